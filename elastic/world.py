"""The `World` of a rank, read once from the environment; joining and leaving the process group."""

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
from elastic.group.job_secret import JobSecret
from elastic.group.sealed import SealedStore

logger = logging.getLogger(__name__)

ROUND = "PERDURE_ROUND"
"""Environment variable: the membership round of this rank."""
PLACES = "PERDURE_PLACES"
"""Environment variable: text that says which ranks are in which rack or NVLink domain."""
JOB = "PERDURE_JOB"
"""Environment variable: identity of this launch, equal on all its nodes."""
AGENT = "PERDURE_AGENT"
"""Environment variable: process id of this rank's agent."""
GENERATION = "PERDURE_GENERATION"
"""Environment variable: generation of this process within its round."""
CAUSE = "PERDURE_CAUSE"
"""Environment variable: the failure that caused this start, as JSON."""

FREED_SECONDS, STILL_SECONDS = 10.0, 3.0
"""Longest wait for the memory of a killed rank's GPU: in total, and since memory was last freed. If
the GPU is still occupied then, other processes use it."""
FREED_SLACK = 1 << 30
"""Bytes that other processes may have allocated on the GPU since the rank before joined."""

# A data worker forked from a rank that has continued after a failure (recall.py) lacks the threads
# of the rank's old process group, and would hang or abort when it collects that group as garbage.
os.register_at_fork(after_in_child=gc.freeze)


@dataclass(frozen=True)
class World:
    """The rank, world size and device of one process of a job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    nodes: int
    round: int
    """Membership round, counted from 1; 0 without an agent."""
    generation: int
    """Restarts of the training processes within this round."""
    cause: Mapping[str, Any] | None
    """The failure that caused this start: rank, node, step, why, at; None: there was none."""
    device: torch.device
    free: int = 0
    """Largest number of free bytes of this rank's GPU at any of its joins so far."""
    places: str = ""
    """Text that says which ranks are in which rack or NVLink domain; empty: unknown."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and decides for all ranks."""
        return self.rank == 0


def read_environment() -> tuple[int, int, int, int]:
    """Returns (rank, local_rank, world_size, local_world_size) as torchrun has set them; without
    torchrun, (0, 0, 1, 1)."""
    read = os.environ.get
    return (
        int(read("RANK", "0")),
        int(read("LOCAL_RANK", "0")),
        int(read("WORLD_SIZE", "1")),
        int(read("LOCAL_WORLD_SIZE", "1")),
    )


_sealed: list[SealedStore] = []
"""Holds the store of this process's groups, as torch keeps no reference to its Python object."""


def join_world(
    device: str, timeout_seconds: float, secret: bytes = b"", most_free: int = 0
) -> World:
    """Join the process group that torchrun prepared. Called on all ranks. The default group carries
    CUDA tensors over NCCL and CPU tensors over gloo.

    Raises RuntimeError if the process was forked from one that has used CUDA.

    Args:
        device: "cuda", "cpu", or "auto" for CUDA where there is a GPU.
        timeout_seconds: seconds that a collective waits for a missing rank.
        secret: secret of this round (`Pulse.secret`), which seals the addresses that ranks
            exchange. Empty: they are not sealed.
        most_free: free bytes of this rank's GPU at an earlier join; 0: unknown.
    """
    rank, local_rank, world_size, local_world_size = read_environment()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place, free = torch.device("cpu"), 0
    if device == "cuda":
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                "an import has opened CUDA in the process that ranks are forked from, so that no "
                "rank can use a GPU; find the module that calls torch.cuda, or makes a tensor on "
                "a GPU, while it is imported, and move that into a function"
            )
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)  # before other calls, which would open a context on GPU 0
        free = wait_until_freed(place, most_free)
    if local_world_size == world_size:
        # All ranks are on this machine: do not listen on its network.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=place if device == "cuda" else None,
        store=_address_store(secret),
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


# torch before 2.14 has only the private function, and torch 2.15 warns of its use.
_set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


def limit_waits(timeout_seconds: float) -> None:
    """Give the collectives of all groups of this rank the same time-out. torch gives all groups but
    the default group 10 or 30 minutes, whatever the argument of init_process_group was."""
    for group in list(distributed_c10d._world.pg_map):
        _set_timeout(timedelta(seconds=timeout_seconds), group)


def wait_until_freed(place: torch.device, most: int) -> int:
    """Wait until a GPU has as much free memory as before a rank on it was killed. The driver may
    free the memory seconds after the process has ended. Returns the bytes that are free now, or
    reserved by this process's allocator. `most`: bytes that were free when a rank last joined on
    this GPU; 0: unknown, do not wait."""

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


def _address_store(secret: bytes) -> dist.Store | None:
    """Returns the store in which ranks exchange addresses; None: torch creates a store."""
    read = os.environ.get
    if "RANK" not in os.environ:
        return dist.HashStore()  # a single rank has no peers to meet
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
    if secret:  # generations of a round share its store, so each has key names of its own
        _sealed[:] = [
            SealedStore(connect, JobSecret(secret), f"generation {read(GENERATION, '0')}")
        ]
        return _sealed[0]
    store = connect()
    # A prefix per attempt: torchrun 2.11 to 2.13 gives restarted ranks the old peers' addresses.
    return dist.PrefixStore(f"attempt-{read('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether an error only means that another rank, or the store's host, is gone."""
    signs = ["Connection reset by peer", "Connection closed by peer", "Broken pipe"]
    if isinstance(error, dist.DistBackendError):
        # NCCL's texts for other failures mention sockets and peers too: use specific phrases only.
        signs += ["ncclRemoteError", "Connection closed by remote peer", "Connection refused"]
        signs += ["Connection timed out", "failed to recv", "communicator was aborted", "timeout"]
    elif isinstance(error, dist.DistError):  # errors of the store and of connections to it
        return True
    return any(sign in str(error) for sign in signs)


def drop_world() -> None:
    """Destroy the process groups of an attempt that has ended. Each rank calls it by itself."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # some groups were aborted, others have lost peers
            dist.destroy_process_group()


def supervised() -> bool:
    """Whether an agent of Perdure has started this process, and would restart it."""
    return ROUND in os.environ


def refuse_stale_store() -> str | None:
    """Returns one line that says why this launch must not continue; None if it may. On several
    nodes torchrun's own rendezvous gives restarted ranks a stale store. The nodes count restarts
    differently, so that no number can separate the attempts."""
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
    """End this rank with exit code `code`. Called on all ranks after the last step and at a pause;
    otherwise each rank calls it by itself. A rank that leaves alone does not destroy its groups,
    because NCCL would wait for the other ranks."""
    if dist.is_initialized() and code in (EXIT_DONE, EXIT_PAUSED, EXIT_REQUEUE):
        # The barrier: a rank that destroys its group early looks like a lost peer to ranks that
        # still use theirs.
        if code == EXIT_DONE:
            dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit, as gloo's threads sometimes abort a process that shuts its interpreter down.
    os._exit(code)
