"""For tests of faults: what happens in writer processes, who is alive, what is left."""

import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpointing import TensorCheckpointer
from checkpointing.load.memory import TOKEN
from checkpointing.storage.folders import living_folders, memory_folders
from checkpointing.storage.posix import LOCK_FILE
from tests.checkpointing.worlds import fork_rank, local, same_bits, spread, whole_state

_PATTERN = torch.arange(251, dtype=torch.uint8)
FOLDER = Path(__file__).parent / "writer_faults"


def plant(monkeypatch: pytest.MonkeyPatch, **faults: Any) -> None:
    """Have writer processes that start from now on do what writer_faults/sitecustomize.py says."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("WRITER_FAULTS", json.dumps(faults))


def parts(step: int, strategy: str = "replicated", bulk: int = 0) -> dict[str, Any]:
    """What to save at a step: every bit follows from the step."""
    model, optimizer = whole_state(seed=step)
    if bulk:
        model["bulk"] = _PATTERN.roll(step).repeat(-(-bulk // 251))[:bulk]
    files = {"config.json": b'{"a": 1}\n'}
    model, optimizer = spread(model, strategy), spread(optimizer, strategy)
    return {"model": model, "optimizer": optimizer, "state": {"step": step}, "files": files}


def load(
    checkpointer: TensorCheckpointer, strategy: str = "replicated", bulk: int = 0
) -> int | None:
    """The step that is loaded, None without one; it must be that step's state to the bit."""

    def zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    shapes = parts(0, strategy, bulk)
    model, optimizer = zeros(shapes["model"]), zeros(shapes["optimizer"])
    state = checkpointer.load(model=model, optimizer=optimizer)
    if state is None:
        return None
    right = parts(state["step"], strategy, bulk)
    for target, wanted in ((model, right["model"]), (optimizer, right["optimizer"])):
        for name in wanted:
            assert same_bits(local(target[name]), local(wanted[name])), f"{name} of {state}"
    return int(state["step"])


def names(directory: Path) -> list[str]:
    """What is in a checkpoint directory, besides the run's token, the lock of readers and the claim
    of who saved there last."""
    found = (path.name for path in directory.iterdir())
    return sorted(
        name for name in found if name not in (TOKEN, LOCK_FILE) and name[:8] != ".writer-"
    )


def memory_of(run: Path) -> list[Path]:
    """What processes of a run, living or dead, have in shared memory."""
    return list(memory_folders(str(run)))


def left_in_memory(run: Path) -> list[Path]:
    """What dead ones have there."""
    living = living_folders(str(run))
    return [path for path in memory_of(run) if path not in living]


class Job:
    """Ranks that a test kills. A context manager, which nothing outlives."""

    def __init__(self, world_size: int, work: Callable[[int], Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        store = folder / f"store-{time.monotonic_ns()}"
        self.results = [folder / f"{store.name}-{rank}" for rank in range(world_size)]
        self.ranks = [
            fork_rank(rank, world_size, work, store, self.results[rank])
            for rank in range(world_size)
        ]
        self._running = set(self.ranks)
        self._writers: set[int] = set()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(self.ranks)
        assert until(lambda: not any(map(_runs, self._writers)), 5), "a writer outlives its rank"

    def kill(self, pids: Sequence[int]) -> None:
        """SIGKILL to processes of this job, and wait for the ends of those that are ranks."""
        self.writers()
        for pid in pids:
            if pid in self._running or pid in self._writers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pid in self._running & set(pids):
            os.waitpid(pid, 0)
            self._running.remove(pid)

    def running(self) -> set[int]:
        """Ranks that have not ended."""
        self._running -= {pid for pid in self._running if os.waitpid(pid, os.WNOHANG)[0]}
        return self._running

    def writers(self) -> list[int]:
        """Writer processes that live now, in order of the ranks that started them."""
        found = [child for rank in self.ranks for child in children(rank)]
        self._writers |= set(found)
        return found

    def result(self, rank: int) -> Any:
        """What a rank returned or raised; None if it did not."""
        path = self.results[rank]
        return pickle.loads(path.read_bytes()) if path.exists() else None


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether a condition comes true within some time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
