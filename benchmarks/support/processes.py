"""Memory and CPU time of a tree of processes over time."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from elastic.process import descendants

PERIOD = 0.02
LOOK_FOR_PROCESSES = 0.2


class _Watch:
    """A thread that runs `watch`, until `_stopped`, inside a `with` block."""

    def __init__(self, watch: Callable[[], None]) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


class MemoryWatch(_Watch):
    """Samples, in a thread, the anonymous memory of all descendants of this process plus all shared
    memory of the machine (whose owner the kernel does not tell). A context manager."""

    def __init__(self) -> None:
        super().__init__(self._watch)
        self._samples: list[tuple[float, int]] = []

    def extra(self, before: float, start: float, end: float) -> int:
        """Bytes: the peak from `start` to `end`, less what there was at `before`; all three as
        time.monotonic() tells them in any process."""
        base = [taken for when, taken in self._samples if when <= before][-1]
        return max(taken for when, taken in self._samples if start <= when <= end) - base

    def _watch(self) -> None:
        processes: list[int] = []
        looked = 0.0
        while not self._stopped.wait(PERIOD):
            now = time.monotonic()
            if now - looked > LOOK_FOR_PROCESSES:
                processes, looked = descendants(os.getpid()), now
            taken = _shared() + sum(_anonymous(process) for process in processes)
            self._samples.append((now, taken))


class CpuWatch(_Watch):
    """Samples, in a thread, the CPU time of all descendants of this process. A context manager."""

    def __init__(self) -> None:
        super().__init__(self._watch)
        self._samples: list[tuple[float, dict[int, float]]] = []

    def used(self, start: float, end: float) -> list[float]:
        """CPU seconds of each process that lived from `start` to `end`, as time.time() tells them,
        per second of that time; the greatest first."""
        first, then = next(sample for sample in self._samples if sample[0] >= start)
        last, now = [sample for sample in self._samples if sample[0] <= end][-1]
        seconds = (now[process] - then[process] for process in now if process in then)
        return sorted((value / (last - first) for value in seconds), reverse=True)

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_FOR_PROCESSES):
            taken = {process: cpu_seconds(process) for process in descendants(os.getpid())}
            self._samples.append((time.time(), taken))


class CpuCount:
    """CPU seconds of processes that begin and end. Call it often: a process that has ended counts
    up to the last call before its end."""

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._taken: dict[int, float] = {}

    def __call__(self) -> float:
        for process in self._processes():
            self._taken[process] = max(self._taken.get(process, 0.0), cpu_seconds(process))
        return sum(self._taken.values())


def cpu_seconds(process: int) -> float:
    """Seconds of a core that a process has taken; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # has just ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _anonymous(process: int) -> int:
    try:
        return _kilobytes(f"/proc/{process}/status", "RssAnon")
    except OSError:
        return 0


def _shared() -> int:
    return _kilobytes("/proc/meminfo", "Shmem")


def _kilobytes(file: str, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0  # a process that is ending has no memory
