"""Processes that end when the one that started them does, what they may use, and whom they start.

`python -m elastic.process MODULE ARGUMENT …` runs a module like `python -m`, in such a process.

[Note: output] The reader of a pipe ends, a terminal is closed, the disk that holds the log is full:
then a write fails, and Python raises an error where a program only wanted to print. Each process of
ours calls `outlive` when it starts. What it cannot write from then on is dropped, and it goes on.
Nothing else changes: the same process writes, at once, to the same file.
"""

import ctypes
import io
import os
import re
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it dies (on Linux).

    `parent` is its process id, where that is known: it may have died before this call.

    torchrun puts each rank into a session of its own, so a launcher that is killed with SIGKILL
    leaves ranks behind that train on, and write where the restarted run writes.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died just before
        os._exit(1)


def set_name(name: str) -> None:
    """Show this process under a name, besides its command line, in /proc, `ps -o comm` and
    `top`."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, f"perdure-{name}".encode())


def search_path() -> list[str]:
    """Where a process that this one starts is to look for modules: where this one does, but for the
    working directory that `python -m` puts first. A folder there that is called like a module of
    ours, of torch's or of Python's would be taken for it. Goes with `python -P`."""
    found = list(sys.path)
    if not sys.flags.safe_path and found[:1] in ([""], [os.getcwd()]):
        del found[0]
    home = str(Path(__file__).parents[1])
    return [*filter(None, found), *([] if home in found else [home])]


def boot_id() -> str:
    """Names this boot of this machine; "" where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def usable_cores() -> int:
    """Cores that this process may run on, which Slurm and cpusets make fewer than the machine
    has."""
    return len(os.sched_getaffinity(0))


# --- families --------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process, oldest first."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """Process ids of the children of a process, of their children, and so on; parents first."""
    found, todo = [], [pid]
    while todo:
        more = children(todo.pop())
        found += more
        todo += more
    return found


def signal_family(pid: int, number: int) -> list[int]:
    """Send a signal to a process and its descendants; returns their process ids."""
    family = [pid, *descendants(pid)]
    for member in family:
        with suppress(ProcessLookupError):
            os.kill(member, number)
    return family


def remaining(find: Callable[[], list[str]], seconds: float) -> list[str]:
    """What `find` still returns after `seconds`; an empty list as soon as it returns one."""
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


# --- output ----------------------------------------------------------------------------------

PATIENCE_SECONDS = 5.0
"""How long a reader that is there but does not read may hold a process up, once."""
NAMES = {"stdout": "standard output", "stderr": "standard error"}


class _Outliving(io.FileIO):
    """A descriptor that every write to succeeds."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.begin()

    def begin(self) -> None:
        """Begin anew: the descriptor may be another file's now."""
        self.why = ""
        """Why the last write failed that did; empty: none has."""
        self._missing = 0
        """Bytes dropped since the last write that succeeded."""
        self._mid_line = False

    def write(self, data: Any) -> int:
        """Write all of `data`, or drop the rest of it; returns its size in bytes."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            if self._missing and left:
                lost = f"[{self._missing} bytes of output are missing here: {self.why}]\n".encode()
                self._put(b"\n" + lost if self._mid_line else lost)
                self._missing, self._mid_line = 0, False
            while left:
                count = self._put(left[: select.PIPE_BUF])
                self._mid_line = left[count - 1] != ord("\n")
                left = left[count:]
        except OSError as error:
            self.why = str(error.strerror)
            self._missing += len(left)
        return size

    def _put(self, data: bytes | memoryview) -> int:
        """Write what the file takes now, at least a byte; returns how many bytes.

        Raises:
            OSError: it takes nothing.
        """
        poll, milliseconds = select.poll(), 0 if self._missing else int(1e3 * PATIENCE_SECONDS)
        poll.register(self.fileno(), select.POLLOUT)
        # A pipe that is ready takes PIPE_BUF bytes without waiting for its reader.
        count = super().write(data) if poll.poll(milliseconds) else None
        if not count:
            raise BlockingIOError(0, "nobody reads it")
        return count


def outlive() -> None:
    """Have sys.stdout and sys.stderr of this process, and of those that it forks, drop what they
    cannot write. A stream that the program has replaced stays as it is. To be called again where
    the descriptors have become those of other files.

    Descriptors 0 to 2 that are closed become the null device: the next file opened would take their
    place, and get the output of the processes that this one starts.
    """
    closed = [descriptor for descriptor in range(3) if not _is_open(descriptor)]
    for _ in closed:  # each takes the lowest free number
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for descriptor, name in enumerate(NAMES, 1):
        stream: TextIO | None = getattr(sys, f"__{name}__")
        raw = _raw(stream)
        if isinstance(raw, _Outliving):
            raw.begin()
            continue
        replaced = getattr(sys, name) is not stream
        if replaced or (stream is None and descriptor not in closed):
            continue
        outliving = _over(descriptor, stream)
        setattr(sys, name, outliving)
        setattr(sys, f"__{name}__", outliving)


def plain(error: object) -> str:
    """The text of an error, without the place in gloo's source and the advice that gloo adds to it:
    whoever reads it looks for what happened to this run."""
    text = re.sub(r"^\[\S+\.cc:\d+\] ", "", str(error))
    return re.sub(r"\. This is typically caused by .*", "", text)


def lost() -> str:
    """Where output of this process was dropped, and why; empty if none was."""
    return ", ".join(f"{NAMES[name]}: {raw.why}" for name, raw in _outliving() if raw.why)


def _over(descriptor: int, stream: TextIO | None) -> TextIO:
    """A stream like another, over a descriptor that may fail."""
    raw = _Outliving(descriptor)
    if not isinstance(stream, io.TextIOWrapper):  # it was closed when this process started
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=True)
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _raw(stream: TextIO | None) -> object:
    """The file under a stream."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _outliving() -> Iterator[tuple[str, _Outliving]]:
    for name in NAMES:
        raw = _raw(getattr(sys, f"__{name}__"))
        if isinstance(raw, _Outliving):
            yield name, raw


if __name__ == "__main__":
    die_with_parent()
    outlive()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
