"""The ranks of a run: a frozen `World`, read from the environment once; joining and leaving."""

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elastic.exits import EXIT_DONE, EXIT_PAUSED, EXIT_REQUEUE
from elastic.group.job_secret import Secret
from elastic.group.sealed import SealedStore

logger = logging.getLogger(__name__)

ROUND = "PERDURE_ROUND"
"""Environment variable: the round of the membership that this rank belongs to."""
PLACES = "PERDURE_PLACES"
"""Environment variable: which ranks of that round stand where, in words; empty: not stated."""
GENERATION = "PERDURE_GENERATION"
"""Environment variable: which generation of training processes of that round this one is of."""
CAUSE = "PERDURE_CAUSE"
"""Environment variable: the failure because of which this process was started, as JSON."""

INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables: where torch's process groups listen."""

FREED_SECONDS, STILL_SECONDS = 10.0, 3.0
"""How long a rank waits for the memory of a device that a killed one had: in all, and while the
driver frees none. A device that is not free by then is used by others."""
FREED_SLACK = 1 << 30
"""Bytes that others may have taken meanwhile."""

# A rank that goes on in place leaves a process group as garbage. What it forks (workers that read
# data) has none of its threads, and would wait for their end, or abort, when it collects garbage.
os.register_at_fork(after_in_child=gc.freeze)


@dataclass(frozen=True)
class World:
    """This process and its peers."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Ranks on this node."""
    nodes: int
    round: int
    """Which set of nodes this is, counted from 1; 0 without an agent of ours."""
    generation: int
    """How often the training processes of this round were started again."""
    cause: Mapping[str, Any] | None
    """The failure that made this start necessary: rank, node, step, why, at; None for others."""
    device: torch.device
    free: int = 0
    """Most bytes of the GPU that have been free when a rank of this place joined."""
    places: str = ""
    """Which ranks stand in which rack or NVLink domain, in words; empty: no node has stated it."""

    @property
    def is_main(self) -> bool:
        """Rank 0: prints, and decides for all."""
        return self.rank == 0


def read_environment() -> tuple[int, int, int, int]:
    """(rank, local_rank, world_size, local_world_size) as torchrun set them; one process without
    torchrun is a world of one."""
    read = os.environ.get
    return (
        int(read("RANK", "0")),
        int(read("LOCAL_RANK", "0")),
        int(read("WORLD_SIZE", "1")),
        int(read("LOCAL_WORLD_SIZE", "1")),
    )


_sealed: list[SealedStore] = []
"""The store of the process groups of this process; see `SealedStore`."""


def join_world(
    device: str, timeout_seconds: float, secret: bytes = b"", most_free: int = 0
) -> World:
    """Join the process group that torchrun prepared. Called on all ranks.

    Args:
        device: "cuda", "cpu", or "auto" for CUDA where there is a GPU.
        timeout_seconds: how long a collective may wait for a missing rank.
        secret: of this round (`Pulse.secret`), under which ranks tell each other their addresses;
            empty: none.
        most_free: bytes that this place's GPU had free when a rank joined before; 0: not known.

    The default group carries CUDA tensors over NCCL and CPU tensors over gloo.
    """
    rank, local_rank, world_size, local_world_size = read_environment()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place, free = torch.device("cpu"), 0
    if device == "cuda":
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)
        free = wait_until_freed(place, most_free)
    if local_world_size == world_size:
        for variable in INTERFACES:  # nobody on other machines needs to reach these ranks
            os.environ.setdefault(variable, "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=place if device == "cuda" else None,
        store=_store(secret),
        rank=rank,
        world_size=world_size,
    )
    read = os.environ.get
    return World(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        nodes=int(read("GROUP_WORLD_SIZE", "1")),
        round=int(read(ROUND, "0")),
        generation=int(read(GENERATION) or read("TORCHELASTIC_RESTART_COUNT", "0")),
        cause=json.loads(read(CAUSE, "null")),
        device=place,
        free=max(free, most_free),
        places=read(PLACES, ""),
    )


# torch 2.15 warns of the private name, which is all that releases before 2.14 have.
_set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


def limit_waits(timeout_seconds: float) -> None:
    """Have the collectives of all groups of this rank wait for a missing one as long as those of
    the default group: to others torch gives 10 or 30 minutes, whatever was said of that."""
    for group in list(distributed_c10d._world.pg_map):
        _set_timeout(timedelta(seconds=timeout_seconds), group)


def wait_until_freed(place: torch.device, most: int) -> int:
    """Wait until a GPU has the memory again that a killed rank had: the driver may free it seconds
    after its process has ended.

    Args:
        place: which.
        most: bytes that were free when a rank of this place last joined; 0: not known, so that
            nothing is waited for.

    Returns:
        Bytes that are free now, or are this process's own.
    """

    def free() -> int:
        return torch.cuda.mem_get_info(place)[0] + torch.cuda.memory_reserved(place)

    now, began = free(), time.monotonic()
    grew = began
    while now < most - FREED_SLACK and time.monotonic() < min(
        began + FREED_SECONDS, grew + STILL_SECONDS
    ):
        time.sleep(0.01)
        before, now = now, free()
        if now > before:
            grew = time.monotonic()
    return now


def _store(secret: bytes) -> dist.Store | None:
    """Where ranks meet; None leaves it to torch."""
    read = os.environ.get
    if "RANK" not in os.environ:
        return dist.HashStore()  # nobody to meet
    if not secret and read("RANK") == "0" and read("WORLD_SIZE") != "1":
        logger.warning(
            "torch's own rendezvous shares no secret: whoever reaches port %s of %s may put "
            "himself between the ranks and change the numbers that they exchange; perdure train, "
            "or --rdzv-backend perdure, prevents that",
            read("MASTER_PORT"), read("MASTER_ADDR"),
        )  # fmt: skip
    if read("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    connect = partial(dist.TCPStore, host, port, is_master=False)
    if secret:  # the store is new in every round; generations share it
        _sealed[:] = [SealedStore(connect, Secret(secret), f"generation {read(GENERATION, '0')}")]
        return _sealed[0]
    store = connect()
    # torchrun 2.11 to 2.13 hands restarted ranks the store of the attempt before, with the
    # addresses of dead peers in it. On one node the attempt's number keeps them apart.
    return dist.PrefixStore(f"attempt-{read('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether an error only says that another rank, or the store's host, is gone."""
    gone = ["Connection reset by peer", "Connection closed by peer", "Broken pipe"]
    if isinstance(error, dist.DistBackendError):
        # Any failure of NCCL, such as two ranks on a GPU or too small a /dev/shm; its explanations
        # speak of sockets and of remote peers there as well.
        gone += ["ncclRemoteError", "Connection closed by remote peer", "Connection refused"]
        gone += ["Connection timed out", "failed to recv", "communicator was aborted", "timeout"]
    elif isinstance(error, dist.DistError):  # of the store, or on the way to it
        return True
    return any(sign in str(error) for sign in gone)


def drop_world() -> None:
    """Let go of the process groups of an attempt that is over. On each rank by itself."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # some were aborted, and others had peers that are gone
            dist.destroy_process_group()


def supervised() -> bool:
    """Whether this process was started by an agent of ours, which restarts it."""
    return ROUND in os.environ


def refuse_stale_store() -> str | None:
    """Why this launch must not go on, None if it may.

    On several nodes torchrun's own rendezvous gives restarted ranks a stale store, and they count
    their restarts differently, so that nothing tells the attempts apart.
    """
    read = os.environ.get
    shared = read("TORCHELASTIC_USE_AGENT_STORE") == "True" and ROUND not in os.environ
    if not shared or int(read("GROUP_WORLD_SIZE", "1")) == 1:
        return None
    return (
        "torchrun's c10d rendezvous hands restarted ranks of several nodes the addresses of dead "
        "ones, and the job hangs; start it with --rdzv-backend perdure, or with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
    )


def leave_world(code: int) -> NoReturn:
    """End this rank: with all others after the last step or when they pause, else alone.

    gloo's threads sometimes abort a process while the interpreter shuts down, after all work is
    done, and torchrun then calls the job failed. So: meet, flush, and leave without a shutdown. A
    rank that leaves alone does not destroy the group, for which NCCL waits for the others.
    """
    if dist.is_initialized() and code in (EXIT_DONE, EXIT_PAUSED, EXIT_REQUEUE):
        if code == EXIT_DONE:
            dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
