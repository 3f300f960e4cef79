"""VITALS"""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elastic.node.progress import Progress

YOUNG = 0.5
"""Seconds in a phase before which nobody is looked at: what goes well costs nothing."""
EVERY = 0.25
"""Seconds between two looks at a rank: many threads are many files of /proc."""
MOST = 0.9
"""At most this share of the time is taken for waiting for a core."""
_TICKS, _CORES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_NPROCESSORS_ONLN")


@dataclass(frozen=True)
class Vitals:
    """What the kernel tells of a process, in seconds since it began."""

    stopped: bool
    """By SIGSTOP: it does nothing until somebody has it go on."""
    runs: int
    """How often its main thread was given a core."""
    worked: float
    """CPU time of its threads."""
    starved: float
    """Time in which its threads were ready and had no core, and that was stolen of one core."""


@dataclass(frozen=True)
class Signs:
    """What is known of a rank since it entered its phase."""

    stopped: float = 0.0
    """Seconds for which it has been stopped, up to now."""
    starved: float = 0.0
    """Seconds that are not its own."""
    busy: bool = False
    """It computes, or would, most of the time."""


NO_SIGNS = Signs()


@dataclass
class _Mark:
    """A rank when it was first looked at in a phase."""

    pid: int
    entered: float
    at: float
    vitals: Vitals
    looked: float = 0.0
    signs: Signs = NO_SIGNS
    """By the last look."""
    stopped_at: float | None = None
    runs: int = 0
    """How often its main thread had run when it was seen to be stopped."""


class Vigil:
    """Follows the ranks of a node."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def look(
        self, pids: Mapping[int, int], progress_by_rank: Mapping[int, Progress], now: float
    ) -> dict[int, Signs]:
        """The signs of all ranks; at every look, so that it is known since when.

        Args:
            pids: process ids by rank; 0 for one that is just being forked.
            progress_by_rank: what they said last.
            now: by time.monotonic().
        """
        signs = {}
        stolen: float | None = None
        for rank, progress in progress_by_rank.items():
            mark = self._marks.get(rank)
            same = mark is not None and (mark.pid, mark.entered) == (pids[rank], progress.at)
            if mark and same and now - mark.looked < EVERY:
                signs[rank] = mark.signs
                continue
            vitals = None
            if pids[rank] and now - progress.at > YOUNG:
                stolen = _stolen() if stolen is None else stolen
                vitals = read_vitals(pids[rank], stolen)
            signs[rank] = self.note(rank, pids[rank], progress.at, now, vitals)
        return signs

    def note(self, rank: int, pid: int, entered: float, now: float, vitals: Vitals | None) -> Signs:
        """What follows for a rank, in its phase since `entered`, from what the kernel told `now`
        and before."""
        if vitals is None:
            self._marks.pop(rank, None)
            return NO_SIGNS
        mark = self._marks.get(rank)
        if mark is None or (mark.pid, mark.entered) != (pid, entered):
            mark = self._marks[rank] = _Mark(pid, entered, now, vitals)
        mark.looked = now
        if not vitals.stopped:
            mark.stopped_at = None
        elif mark.stopped_at is None or vitals.runs != mark.runs:  # it has run between two looks
            mark.stopped_at, mark.runs = now, vitals.runs
        starved = max(0.0, vitals.starved - mark.vitals.starved)
        wanted = vitals.worked - mark.vitals.worked + starved
        mark.signs = Signs(
            stopped=0.0 if mark.stopped_at is None else now - mark.stopped_at,
            starved=min(starved, MOST * (now - entered)),
            busy=wanted > 0.5 * (now - mark.at) > 0,
        )
        return mark.signs


def read_vitals(pid: int, stolen: float = 0.0) -> Vitals | None:
    """What the kernel tells of a process now; None if it has ended, or /proc does not tell.

    `stolen`: by the hypervisor, seconds of one core since the machine began.
    """
    try:
        state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        runs = int(_read(f"/proc/{pid}/schedstat").split()[2])
        threads = os.listdir(f"/proc/{pid}/task")
    except (OSError, IndexError):
        return None
    starved = stolen
    for thread in threads:
        with suppress(OSError, IndexError):  # one that has just ended
            starved += int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1]) / 1e9
    return Vitals(state == "T", runs, (int(fields[10]) + int(fields[11])) / _TICKS, starved)


def _stolen() -> float:
    with suppress(OSError, IndexError):
        return int(_read("/proc/stat").split(maxsplit=9)[8]) / _TICKS / _CORES
    return 0.0


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)


CGROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Processes killed in the cgroup of this one, and in those inside it; on the machine, where
    the cgroup does not count."""
    for path in (_cgroup() / "memory.events", Path("/proc/vmstat")):
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _cgroup() -> Path:
    """The folder of the cgroup of this process (version 2)."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return CGROUPS / line.removeprefix("0::").strip("/")
    return CGROUPS


# --- stack dumps -----------------------------------------------------------------------------

Where = Literal["stopped", "silent", "elsewhere", "unclear", "collective", "unknown"]
"""What a rank does, by the kernel or its dump; the more suspicious first."""

DUMP_SIGNAL = signal.SIGUSR2
STILL = 0.1
"""A dump that has not grown for so many seconds is complete."""
SILENT_SECONDS = 1.0
"""After which a rank that has not answered is called silent."""


def register_dumps(path: Path) -> None:
    """Have SIGUSR2 append the Python stacks of all threads to a file. By a rank, once.

    Args:
        path: on a local disk or in memory: the dump must not wait for what the rank hangs on.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True, chain=False)


def take_dumps(ranks: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """Stack dumps of ranks of this node, empty for one that does not answer. By the agent.

    Args:
        ranks: by rank, its process id and the path it gave to `register_dumps`.

    It takes 0.1 s, and SILENT_SECONDS where a rank does not answer. A rank that has not registered
    yet, which the signal would kill, or has ended, is left out of the result; and so is one that
    would answer, but gets no core to do it.
    """
    asked = {rank: path for rank, (pid, path) in ranks.items() if _ready(pid)}
    sizes = {rank: path.stat().st_size for rank, path in asked.items()}
    for rank in asked:
        with suppress(ProcessLookupError):  # it ended this moment; its agent hears of that anyway
            os.kill(ranks[rank][0], DUMP_SIGNAL)
    dumps = dict.fromkeys(asked, "")
    grown = dict.fromkeys(asked, time.monotonic())
    deadline = time.monotonic() + SILENT_SECONDS
    while True:
        time.sleep(STILL / 5)
        now = time.monotonic()
        for rank, path in asked.items():
            dump = read_dump(path, sizes[rank])
            if dump != dumps[rank]:
                dumps[rank], grown[rank] = dump, now
        if now > deadline or all(dumps[rank] and now - grown[rank] >= STILL for rank in asked):
            return {rank: dump for rank, dump in dumps.items() if dump or not _runs(ranks[rank][0])}


def read_dump(path: Path, start: int = 0) -> str:
    """What was appended to a file of dumps after its first `start` bytes."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _ready(pid: int) -> bool:
    """Whether a process runs, or is stopped, and has a handler for the signal."""
    fields = _status(pid)
    if fields["State"].split()[0] in "ZX":  # it ended, though its handlers are still told
        return False
    return bool(int(fields["SigCgt"], 16) >> (DUMP_SIGNAL - 1) & 1)


def _runs(pid: int) -> bool:
    """Whether a process has a core, or would take one."""
    return _status(pid)["State"].split()[0] == "R"


def _status(pid: int) -> dict[str, str]:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return {"State": "X"}
    return dict(line.split(":", 1) for line in status.splitlines())


FORWARDING = (
    "/torch/_ops.py",
    "/torch/utils/_contextlib.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/autograd/function.py",
)
"""Frames that only pass a call on."""
COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/nn/functional.py",
    "/torch/distributed/fsdp/",
    "/torch/distributed/tensor/_collective_utils.py",
    "/torch/distributed/tensor/_redistribute.py",
    "/torch/distributed/utils.py",
    "/torch/nn/parallel/distributed.py",
    "/elastic/node/exchange.py",
)
"""Where ranks wait for each other. FSDP's hooks call the user's modules from outside: the innermost
frame is one of FSDP's only while it gathers, scatters, or waits for either."""
UNCLEAR = (
    "/torch/autograd/",  # backward in C++: DDP waits for its buckets here, but kernels hang too
    "/torchinductor_",  # compiled code, with and without collectives
)

COMPILING = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/graph.py",  # also of a backward pass, which is compiled on first use
    "/torch/_inductor/async_compile.py",
    "/triton/compiler/",
)
"""What is on the stack of a rank that compiles, or waits for processes that do it: at any step, if
a shape is new."""

_FRAME = re.compile(r'^  File "(.*)", line \d+ in ', re.MULTILINE)


def in_collective(dump: str) -> bool | None:
    """Whether the main thread waits for other ranks; None if its stack does not tell.

    Args:
        dump: of all threads, as faulthandler writes it: innermost frame first, and the main thread,
            which is the oldest, last.

    Judged by the innermost Python frame that does not only pass the call on: time spent in C++ is
    seen as time in the Python function that called it.
    """
    files = _main_thread(dump)
    innermost = next((file for file in files if not _within(file, FORWARDING)), None)
    if innermost is None or _within(innermost, UNCLEAR):
        return None
    return _within(innermost, COLLECTIVES)


def compiles(dump: str) -> bool:
    """Whether the main thread compiles."""
    return any(_within(file, COMPILING) for file in _main_thread(dump))


def _main_thread(dump: str) -> list[str]:
    """Files of the frames of the main thread, the innermost first."""
    main_thread = re.split(r"^(?:Current thread|Thread) ", dump, flags=re.MULTILINE)[-1]
    return _FRAME.findall(main_thread)


def where(dump: str) -> Where:
    """What a dump says of a rank; an empty one, that it is silent."""
    if not dump:
        return "silent"
    waits = in_collective(dump)
    if waits is None:
        return "unclear"
    return "collective" if waits else "elsewhere"


def _within(file: str, places: Iterable[str]) -> bool:
    return any(place in file for place in places)
