"""Jobs on this machine that take turns: one runs for a moment while all others are stopped.

A machine whose speed changes from minute to minute tells little of two jobs that ran one after the
other. These meet the same machine, and the time of each is counted only while it runs.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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
        more: variables of its environment besides those of `environment`.
    """

    def __init__(
        self, command: Sequence[str], directory: Path, output: Path, more: Mapping[str, str] = {}
    ) -> None:
        self._ran: list[tuple[float, float]] = []
        with (
            output.with_suffix(".out").open("w") as out,
            output.with_suffix(".err").open("w") as err,
        ):
            self._process = subprocess.Popen(
                command, cwd=directory, env={**environment(), **more}, stdout=out, stderr=err
            )
        self._began: float | None = time.time()
        self._stopped: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()
        for process in self._stopped:
            _tell(process, signal.SIGKILL)
        self._process.wait()

    @property
    def pid(self) -> int:
        """Process id of the command."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None until it has ended."""
        return self._process.poll()

    def resume(self) -> None:
        """Let it run. It is paused, and has not ended."""
        self._began = time.time()
        for process in self._stopped:
            _tell(process, signal.SIGCONT)
        self._stopped = []

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
        """Stop all of its processes, those that have not ended."""
        root, paused_at = self._process.pid, time.time()
        while self.code is None:
            # Parents first, and again until none is new: what is not stopped yet may fork.
            new = [pid for pid in (root, *descendants(root)) if pid not in self._stopped]
            if not new:
                break
            for process in new:
                _tell(process, signal.SIGSTOP)
            self._stopped += new
            paused_at = time.time()
        if self._began is not None:
            self._ran.append((self._began, paused_at))
        self._began = None

    def ran(self, at: float) -> float:
        """Seconds for which it had run at a moment in Unix time."""
        return sum(min(end, at) - start for start, end in self._ran if start < at)


def _tell(process: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(process, number)


def take_turns(jobs: Sequence[PausableJob], seconds: float) -> None:
    """Let each run for so long while the others are stopped, in turn, until all have ended. All are
    paused, or have ended."""
    while going := [job for job in jobs if job.code is None]:
        for job in going:
            job.resume()
            job.run(seconds)
            job.pause()
