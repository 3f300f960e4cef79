"""The ranks of a run: a frozen `World`, read from the environment once; joining and leaving."""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process and its peers."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Ranks on this node."""
    attempt: int
    """How often torchrun has restarted the group."""
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0: prints, and decides for all."""
        return self.rank == 0


def read_environment() -> tuple[int, int, int, int, int]:
    """(rank, local_rank, world_size, local_world_size, attempt) as torchrun set them; one process
    without torchrun is a world of one."""
    read = os.environ.get
    return (
        int(read("RANK", "0")),
        int(read("LOCAL_RANK", "0")),
        int(read("WORLD_SIZE", "1")),
        int(read("LOCAL_WORLD_SIZE", "1")),
        int(read("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies (on Linux).

    torchrun puts each rank into a session of its own, so a launcher that is killed with SIGKILL
    leaves ranks behind that train on, and write where the restarted run writes.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died just before
        os._exit(1)


def join_world(device: str, timeout_seconds: float) -> World:
    """Join the process group that torchrun prepared. Called on all ranks.

    Args:
        device: "cuda", "cpu", or "auto" for CUDA where there is a GPU.
        timeout_seconds: how long a collective may wait for a missing rank.

    The default group carries CUDA tensors over NCCL and CPU tensors over gloo.
    """
    rank, local_rank, world_size, local_world_size, attempt = read_environment()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=place if device == "cuda" else None,
        store=_store(),
        rank=rank,
        world_size=world_size,
    )
    return World(rank, local_rank, world_size, local_world_size, attempt, place)


def _store() -> dist.Store | None:
    """Where ranks meet; None leaves it to torch."""
    read = os.environ.get
    if "RANK" not in os.environ:
        return dist.HashStore()  # nobody to meet
    if read("TORCHELASTIC_USE_AGENT_STORE") == "True" and read("GROUP_WORLD_SIZE") == "1":
        # torchrun 2.11 to 2.13 hands restarted ranks the store of the attempt before, with the
        # addresses of dead peers in it. On one node the attempt's number keeps them apart; several
        # nodes count attempts differently, and need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False)
        return dist.PrefixStore(f"attempt-{read('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return None


def leave_world(code: int) -> NoReturn:
    """End this rank after all ranks are done. Called on all ranks.

    gloo's threads sometimes abort a process while the interpreter shuts down, after all work is
    done, and torchrun then calls the job failed. So: meet, flush, and leave without a shutdown.
    """
    if dist.is_initialized():
        if code == 0:
            dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
