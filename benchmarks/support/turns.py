"""Jobs on this machine that take turns: one runs for a moment while all others are stopped.

A machine whose speed changes from minute to minute tells little of two jobs that ran one after the
other. These meet the same machine, and the time of each is counted only while it runs.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from benchmarks.support import environment
from benchmarks.support.processes import descendants

LOOK_SECONDS = 0.2


class PausableJob:
    """A command, started at once, and all processes that it starts. A context manager, which ends
    them.

    Args:
        command: its words.
        directory: where it runs.
        output: what it prints goes to this file with .out and .err as suffixes.
    """

    def __init__(self, command: Sequence[str], directory: Path, output: Path) -> None:
        self._ran: list[tuple[float, float]] = []
        with (
            output.with_suffix(".out").open("w") as out,
            output.with_suffix(".err").open("w") as err,
        ):
            self._process = subprocess.Popen(
                command, cwd=directory, env=environment(), stdout=out, stderr=err
            )
        self._began: float | None = time.time()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.code is None:
            self._signal(signal.SIGKILL)
        self._process.wait()

    @property
    def code(self) -> int | None:
        """Its exit code; None until it has ended."""
        return self._process.poll()

    def resume(self) -> None:
        """Let it run. It is not running."""
        self._began = time.time()
        self._signal(signal.SIGCONT)

    def run(self, seconds: float) -> None:
        """Wait for so long, or until it ends. It is running."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def run_until(self, ready: Callable[[], bool]) -> None:
        """Wait until it has ended, or is `ready`. It is running."""
        while self.code is None and not ready():
            self.run(LOOK_SECONDS)

    def pause(self) -> None:
        """Stop all of its processes, if it has not ended."""
        if self.code is None:
            self._signal(signal.SIGSTOP)
        if self._began is not None:
            self._ran.append((self._began, time.time()))
        self._began = None

    def ran(self, at: float) -> float:
        """Seconds for which it had run at a moment in Unix time."""
        return sum(min(end, at) - start for start, end in self._ran if start < at)

    def _signal(self, number: int) -> None:
        told: set[int] = set()
        # Parents first, and again until none is new: what is not stopped yet may fork.
        while new := [pid for pid in self._processes() if pid not in told]:
            for pid in new:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
            told.update(new)

    def _processes(self) -> list[int]:
        return [self._process.pid, *descendants(self._process.pid)]


def take_turns(jobs: Sequence[PausableJob], seconds: float) -> None:
    """Let each run for so long while the others are stopped, in turn, until all have ended. All are
    stopped."""
    going = list(jobs)
    while going:
        for job in going:
            job.resume()
            job.run(seconds)
            job.pause()
        going = [job for job in going if job.code is None]
