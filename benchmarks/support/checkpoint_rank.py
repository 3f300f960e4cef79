"""One rank of a checkpoint benchmark, under torchrun: `-m benchmarks.support.checkpoint_rank TASK`,
where TASK is a Task as JSON. Rank 0 leaves what all ranks together measured in TASK's `result`."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers.checkpoint_engines import ENGINES, Engine, sync
from benchmarks.support.sharded_state import ShardedState

BASE_STEPS = 20
RAW_WRITE = 8 << 20
ROWS = 96
"""Rows of a proxy step's batch: 70 to 100 ms a step on a core of 2025."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks do with one engine."""

    kind: str
    """save: save `times` times beside training steps. write: save once, for others to load. load:
    load save 1 `times` times, cold and warm."""
    engine: str
    gigabytes: float
    directory: str
    """Where the engine writes."""
    times: int
    result: str
    """The file of the result: JSON."""


class Proxy:
    """A training step of some other, small model: forward, backward, all-reduce, update."""

    def __init__(self) -> None:
        layers = (nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))
        self._model = nn.Sequential(*layers, nn.LayerNorm(768), *layers)
        self._inputs = torch.randn(ROWS, 768)
        self._reduced = torch.zeros(1 << 20)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4, foreach=True)

    def compute(self, flag: Callable[[], bool] = lambda: False) -> bool:
        """Forward, backward, all-reduce of 4 MB; whether `flag` was up on any rank."""
        self._model(self._inputs).square().mean().backward()
        self._reduced[-1] = flag()
        dist.all_reduce(self._reduced)
        return bool(self._reduced[-1])

    def update(self) -> None:
        """Change the parameters."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def seconds(self) -> float:
        """Seconds of one whole step."""
        started = time.monotonic()
        self.compute()
        self.update()
        return time.monotonic() - started


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = ShardedState(task.gigabytes)
    work = {"save": _save, "write": _write, "load": _load}[task.kind]
    result = work(task, state)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(task.result).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts in interpreter shut-down


def _save(task: Task, state: ShardedState) -> dict[str, Any]:
    """The saves, combined over ranks; seconds to set the engine up and of a raw write; which
    tensors the last save gives back wrong."""
    directory = Path(task.directory)
    proxy = Proxy()
    for _ in range(3):
        proxy.seconds()
    # A thin disk is slow where nothing has been written before: saves and raw writes alike shall
    # find blocks that this write leaves behind.
    _raw_write(state, directory.with_name("raw"))
    before = start_together()
    try:
        engine = ENGINES[task.engine](state, directory)
    except (ImportError, AttributeError, TypeError) as error:
        return {"not_applicable": f"torch {torch.__version__}: {error}"}
    engine.prepare()
    setup = time.monotonic() - before
    saves, raw, saved_at = [], 0.0, 0
    for number in range(1, task.times + 1):
        _clear(directory)
        saved, saved_at = _measure(engine, number, state, proxy)
        # What the first save needs is counted from before there was an engine.
        saved["before"] = before if number == 1 else saved["start"]
        saved["bytes"] = sum(file.stat().st_size for file in directory.rglob("*"))
        saves.append(saved)
        if number == 1:
            _clear(directory)
            raw = _raw_write(state, directory.with_name("raw"))
    engine.close()

    state.clear()
    engine = ENGINES[task.engine](state, directory)  # anew: what it loads comes from the files
    engine.load(task.times)
    engine.close()
    state.mutations = saved_at
    wrong = sorted(set(chain(*gather(state.wrong()))))
    return {
        "setup_seconds": max(gather(setup)),
        "raw_seconds": raw,
        "state_bytes": sum(gather(state.nbytes)),
        "saves": saves,
        "wrong": wrong,
        "tensors": len(state.flat()),
    }


def _measure(
    engine: Engine, number: int, state: ShardedState, proxy: Proxy
) -> tuple[dict[str, Any], int]:
    """One save beside training steps: its figures combined over ranks (seconds; `start` and `end`
    by time.monotonic()), and the mutations at which the state was saved."""
    base = mean(proxy.seconds() for _ in range(BASE_STEPS))
    start_together()
    mutation_base = mean(timed(state.mutate) for _ in range(2))
    saved_at = state.mutations
    start = start_together()
    running = engine.save(number)
    held = time.monotonic() - start
    steps, spent, mutation = 0, 0.0, mutation_base
    if not engine.asynchronous:
        state.mutate()
    going = engine.asynchronous
    while going:
        began = time.monotonic()
        going = proxy.compute(lambda: running.committed_at() is None)
        spent += time.monotonic() - began
        if steps == 0:  # the update of this step is the first that changes the tensors
            held += timed(running.wait_staged)
            mutation = timed(state.mutate)
        spent += timed(proxy.update)
        steps += 1
    while (end := running.committed_at()) is None:
        time.sleep(0.001)
    lost = held + spent - steps * base + mutation - mutation_base
    ranks = gather(
        {
            "lost": lost,
            "held": held,
            "steps": steps,
            "base": base,
            "step": spent / steps if steps else base,
            "start": start,
            "end": end,
        }
    )
    combined = max(ranks, key=lambda rank: rank["lost"])
    combined["held"] = max(rank["held"] for rank in ranks)
    combined["start"] = min(rank["start"] for rank in ranks)
    combined["end"] = max(rank["end"] for rank in ranks)
    combined["committed"] = combined["end"] - combined["start"]
    return combined, saved_at


def _raw_write(state: ShardedState, directory: Path) -> float:
    """Seconds in which all ranks write what they hold, with `write` and `fsync`."""
    directory.mkdir(exist_ok=True)
    started = start_together()
    with Path(directory, f"rank-{dist.get_rank()}").open("wb", buffering=0) as file:
        for tensor in state.local().values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            while data:
                data = data[file.write(data[:RAW_WRITE]) :]
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    slowest = max(gather(seconds))
    _clear(directory)
    return slowest


def _write(task: Task, state: ShardedState) -> dict[str, Any]:
    """Leave save 1 on the disk."""
    engine = ENGINES[task.engine](state, Path(task.directory))
    engine.prepare()
    running = engine.save(1)
    running.wait_staged()
    while running.committed_at() is None:
        time.sleep(0.01)
    engine.close()
    return {}


def _load(task: Task, state: ShardedState) -> dict[str, Any]:
    """Seconds of the loads, cold and warm, and the bytes that all ranks read in the last."""
    engine = ENGINES[task.engine](state, Path(task.directory))
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    read = 0
    for _ in range(task.times):
        for kind, loads in seconds.items():
            state.clear()
            if kind == "cold" and dist.get_rank() == 0:
                drop_from_cache(Path(task.directory))
            started = start_together()
            read_before = read_bytes()
            mapped = engine.load(1)
            read = read_bytes() - read_before + mapped
            loads.append(max(gather(time.monotonic() - started)))
    engine.close()
    wrong = sorted(set(chain(*gather(state.wrong()))))
    needed = sum(gather(state.nbytes))
    return {
        **seconds,
        "read_bytes": sum(gather(read)),
        "needed_bytes": needed,
        "wrong": wrong,
        "tensors": len(state.flat()),
    }


def read_bytes() -> int:
    """What this process has got from `read` and its like so far, be it from the page cache."""
    counters = Path("/proc/self/io").read_text()
    return int(counters.split("rchar:")[1].split()[0])


def drop_from_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        sync(path)
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _clear(directory: Path) -> None:
    """Empty the directory, and wait for the disk; on all ranks."""
    dist.barrier()
    if dist.get_rank() == 0 and directory.exists():
        for entry in directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        os.sync()
    dist.barrier()


def start_together() -> float:
    dist.barrier()
    return time.monotonic()


def timed(work: Callable[[], None]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    main()
