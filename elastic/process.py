"""Child processes that end with their parent, and output that may lose its reader.

`python -m elastic.process MODULE ARGUMENT …` runs a module like `python -m`, in a process that ends
with its parent.

[Note: output] When the reader of a pipe ends, a terminal is closed or the log's disk is full, a
write fails, and `print` raises an error. Each of our processes calls `tolerate_lost_output` when it
starts. From then on, output that cannot be written is dropped, and the process continues. Nothing
is redirected or buffered more than before."""

import ctypes
import io
import os
import re
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent, process `parent`, dies. Linux only.
    Otherwise ranks would outlive a torchrun killed by SIGKILL, as torchrun starts each in a new
    session, and write to the files of the restarted run."""
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os._exit(1)


def set_name(name: str) -> None:
    """Set this process's name in /proc, `ps -o comm` and `top`. Its command line is unchanged."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, f"perdure-{name}".encode())


def search_path() -> list[str]:
    """Returns the module search path for a child process started with `python -P`: this process's
    path without the working directory, which `python -m` puts first. A folder in it could hide a
    module of the same name."""
    result = list(sys.path)
    if not sys.flags.safe_path and result[:1] in ([""], [os.getcwd()]):
        del result[0]
    home = str(Path(__file__).parents[1])
    return [*filter(None, result), *([] if home in result else [home])]


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def usable_cores() -> int:
    """Number of cores that this process may run on; Slurm and cpusets may limit it."""
    return len(os.sched_getaffinity(0))


# --- processes and their descendants ---------------------------------------------------------


def children(pid: int) -> list[int]:
    """Returns the process ids of a process's children, oldest first."""
    result: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            result += map(int, path.read_text().split())
    return sorted(result)


def descendants(pid: int) -> list[int]:
    """Returns the process ids of all descendants of a process, parents before children."""
    result, todo = [], [pid]
    while todo:
        more = children(todo.pop())
        result += more
        todo += more
    return result


def descends(pid: int, ancestor: int) -> bool:
    """Whether the living process `pid` is `ancestor` or a descendant of it."""
    while pid > 1 and pid != ancestor:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # the process has ended
            return False
        # the process name may contain brackets and spaces
        pid = int(status.rpartition(")")[2].split()[1])
    return pid == ancestor


def signal_family(pid: int, number: int) -> list[int]:
    """Send signal `number` to a process and its descendants; returns their process ids."""
    family = [pid, *descendants(pid)]
    for member in family:
        with suppress(ProcessLookupError):
            os.kill(member, number)
    return family


def remaining(find: Callable[[], list[str]], seconds: float) -> list[str]:
    """Poll `find` for up to `seconds` until it returns an empty list; returns its last result."""
    deadline = time.monotonic() + seconds
    while (result := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


# --- output ----------------------------------------------------------------------------------

PATIENCE_SECONDS = 5.0
"""Seconds for which a reader that does not read may block a process, once."""
STREAM_NAMES = {"stdout": "standard output", "stderr": "standard error"}


class _LossyOutput(io.FileIO):
    """A file descriptor on which every write succeeds: bytes that cannot be written are dropped."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.begin()

    def begin(self) -> None:
        """Reset the state, because the descriptor may refer to another file now."""
        self.why = ""
        """Error text of the last failed write; empty: none has failed."""
        self._missing = 0  # bytes dropped since the last successful write
        self._mid_line = False

    def write(self, data: Any) -> int:
        """Write all of `data`, or drop the rest; returns the size of `data` in bytes."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            # Earlier bytes were dropped: first tell the reader how many.
            if self._missing and left:
                gap = f"[{self._missing} bytes of output are missing here: {self.why}]\n".encode()
                self._put(b"\n" + gap if self._mid_line else gap)
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
        """Write as many bytes as the file accepts now; returns their number. Raises OSError if the
        file accepts no byte."""
        poll, milliseconds = select.poll(), 0 if self._missing else int(1e3 * PATIENCE_SECONDS)
        poll.register(self.fileno(), select.POLLOUT)
        # if poll() reports a pipe ready, it accepts PIPE_BUF bytes without blocking
        count = super().write(data) if poll.poll(milliseconds) else None
        if not count:
            raise BlockingIOError(0, "nobody reads it")
        return count


def tolerate_lost_output() -> None:
    """Make sys.stdout and sys.stderr drop output that they cannot write, in this process and its
    forks. A stream that the program has replaced is left alone. Call this function again after
    replacing descriptors 1 or 2. Closed descriptors 0 to 2 are opened on the null device, as the
    next opened file would otherwise receive the output of child processes."""
    closed = []
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            closed.append(descriptor)
    for _ in closed:  # open() returns the lowest free number
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for descriptor, name in enumerate(STREAM_NAMES, 1):
        stream: TextIO | None = getattr(sys, f"__{name}__")
        raw = _raw(stream)
        if isinstance(raw, _LossyOutput):
            raw.begin()
            continue
        replaced = getattr(sys, name) is not stream
        if replaced or (stream is None and descriptor not in closed):
            continue
        outliving = _lossy_stream(descriptor, stream)
        setattr(sys, name, outliving)
        setattr(sys, f"__{name}__", outliving)


def plain_text(error: object) -> str:
    """Returns the text of an error, without the source location and the advice that gloo adds."""
    text = re.sub(r"^\[\S+\.cc:\d+\] ", "", str(error))
    return re.sub(r"\. This is typically caused by .*", "", text)


def unbuffer_output() -> None:
    """Let standard output and error write at once, as under `python -u`."""
    for name in STREAM_NAMES:
        stream = getattr(sys, name)
        # `write_through` alone would leave text in the binary buffer.
        if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.BufferedWriter):
            stream.flush()
            raw = stream.buffer.raw
            setattr(
                sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)
            )


def lost_output() -> str:
    """Returns which streams of this process dropped output, and why; empty: none did."""
    raws = {name: _raw(getattr(sys, f"__{name}__")) for name in STREAM_NAMES}
    return ", ".join(
        f"{STREAM_NAMES[name]}: {raw.why}"
        for name, raw in raws.items()
        if isinstance(raw, _LossyOutput) and raw.why
    )


def _lossy_stream(descriptor: int, stream: TextIO | None) -> TextIO:
    """Returns a text stream like `stream` over `descriptor`, whose writes cannot fail."""
    raw = _LossyOutput(descriptor)
    if not isinstance(stream, io.TextIOWrapper):  # the stream was closed when this process started
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


def _raw(stream: TextIO | None) -> object:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


if __name__ == "__main__":
    die_with_parent()
    tolerate_lost_output()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
