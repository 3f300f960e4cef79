"""Observations of a rank's process from outside: kernel counters (stopped, waiting for a core, out
of memory) and stack dumps. Linux only; without figures in /proc a rank counts as healthy.

[Note: own time] On an overloaded machine a healthy rank takes many times as long as usual. The
kernel counts for every thread how long it was ready to run without a core (the second number of
schedstat), and for the machine how long the hypervisor ran other machines (steal). The *own time*
of a rank is the elapsed time without these times. A rank that sleeps, waits for ever or is stopped
has only own time, however busy the machine is. At least a tenth of the elapsed time counts as own,
so that endless spinning is noticed too."""

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

from elastic.node.progress import NodeRankProgress

YOUNG_SECONDS = 0.5
"""Seconds in a phase before a rank is examined, so that healthy ranks cost nothing."""
INTERVAL_SECONDS = 0.25
"""Seconds between two examinations of a rank, as each thread is a file of /proc to read."""
MAX_STARVED_SHARE = 0.9
"""Largest fraction of the elapsed time that counts as waiting for a core."""
_TICKS, _CORES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_NPROCESSORS_ONLN")


@dataclass(frozen=True)
class NodeProcessCounters:
    """Kernel counters of a process since its start."""

    stopped: bool
    runs: int
    """Number of times that the main thread got a core."""
    worked: float
    """CPU seconds of all threads."""
    starved: float
    """Seconds in which threads were ready to run but had no core, plus those in which the
    hypervisor used the core for another machine."""


@dataclass(frozen=True)
class NodeRankVitals:
    """Observations of a rank in its current phase."""

    stopped: float = 0.0
    """Seconds for which the process has been stopped by a signal, up to now."""
    starved: float = 0.0
    """Seconds without a core, which do not count as own time ([Note: own time])."""
    busy: bool = False
    """Whether the process computes, or would compute if it had a core, most of the time."""


NO_SIGNS = NodeRankVitals()


@dataclass
class _Mark:
    """Counters of a rank when it was first examined in its current phase."""

    pid: int
    entered: float
    at: float
    vitals: NodeProcessCounters
    looked: float = 0.0
    signs: NodeRankVitals = NO_SIGNS
    stopped_at: float | None = None
    runs: int = 0
    """`NodeProcessCounters.runs` when the process was first seen stopped."""


class NodeVitalsWatch:
    """Observes whether the processes of a node's ranks are stopped, starved of a core, or busy."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def look(
        self, pids: Mapping[int, int], progress_by_rank: Mapping[int, NodeRankProgress], now: float
    ) -> dict[int, NodeRankVitals]:
        """Returns rank → observations of the rank in its current phase. `pids`: rank → process id;
        0 while the rank is being forked. `now`: by time.monotonic()."""
        signs = {}
        stolen: float | None = None
        for rank, progress in progress_by_rank.items():
            mark = self._marks.get(rank)
            same = mark is not None and (mark.pid, mark.entered) == (pids[rank], progress.at)
            if mark and same and now - mark.looked < INTERVAL_SECONDS:
                signs[rank] = mark.signs
                continue
            vitals = None
            if pids[rank] and now - progress.at > YOUNG_SECONDS:
                # The machine's stolen time is read once for all ranks.
                stolen = _stolen() if stolen is None else stolen
                vitals = read_vitals(pids[rank], stolen)
            signs[rank] = self.note(rank, pids[rank], progress.at, now, vitals)
        return signs

    def note(
        self, rank: int, pid: int, entered: float, now: float, vitals: NodeProcessCounters | None
    ) -> NodeRankVitals:
        """Record new counters of a rank, and return its observations. `entered`: time at which the
        rank entered its phase. `now`: time at which `vitals` were read."""
        if vitals is None:
            self._marks.pop(rank, None)
            return NO_SIGNS
        mark = self._marks.get(rank)
        if mark is None or (mark.pid, mark.entered) != (pid, entered):
            # The counters rise for ever, so only their increase in this phase counts.
            mark = self._marks[rank] = _Mark(pid, entered, now, vitals)
        mark.looked = now
        if not vitals.stopped:
            mark.stopped_at = None
        # the process has run between two examinations, so the stop is a new one
        elif mark.stopped_at is None or vitals.runs != mark.runs:
            mark.stopped_at, mark.runs = now, vitals.runs
        starved = max(0.0, vitals.starved - mark.vitals.starved)
        demand = vitals.worked - mark.vitals.worked + starved
        mark.signs = NodeRankVitals(
            stopped=0.0 if mark.stopped_at is None else now - mark.stopped_at,
            starved=min(starved, MAX_STARVED_SHARE * (now - entered)),
            busy=demand > 0.5 * (now - mark.at) > 0,
        )
        return mark.signs


def read_vitals(pid: int, stolen: float = 0.0) -> NodeProcessCounters | None:
    """Read a process's counters; returns None if the process has ended or /proc has no figures.
    `stolen`: seconds per core that the hypervisor has taken since boot."""
    try:
        # the process name may contain brackets and spaces
        state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        runs = int(_read(f"/proc/{pid}/schedstat").split()[2])
        threads = os.listdir(f"/proc/{pid}/task")
    except (OSError, IndexError):
        return None
    starved = stolen
    for thread in threads:
        with suppress(OSError, IndexError):  # the thread has just ended
            starved += int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1]) / 1e9
    return NodeProcessCounters(
        state == "T", runs, (int(fields[10]) + int(fields[11])) / _TICKS, starved
    )


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
    """Returns the number of processes that the kernel has killed for lack of memory, in this
    process's cgroup and below or, if the cgroup has no such counter, on the whole machine."""
    for path in (_cgroup() / "memory.events", Path("/proc/vmstat")):
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _cgroup() -> Path:
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return CGROUPS / line.removeprefix("0::").strip("/")
    return CGROUPS


# --- stack dumps -----------------------------------------------------------------------------

Activity = Literal["stopped", "silent", "elsewhere", "unclear", "collective", "unknown"]
"""What a rank does, by the kernel ("stopped" by a signal) or by its stack dump; most suspicious
first. "silent": it wrote no dump. "elsewhere": not in a collective. "unclear": perhaps in one.
"unknown": no dump was taken."""

DUMP_SIGNAL = signal.SIGUSR2
COMPLETE_SECONDS = 0.1
SILENT_SECONDS = 1.0


def register_dumps(path: Path) -> None:
    """Have SIGUSR2 append the Python stacks of all threads of this rank to a file. Its `path` must
    be on a local disk or in memory, as the rank may hang on remote storage."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    # chain=True would also run the default action, which kills the process
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True, chain=False)


def take_dumps(ranks: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """Returns stack dumps of `ranks`, rank → (process id, path passed to `register_dumps`); "" for
    a rank that writes none. The result omits ranks that have ended, ranks that have not registered
    yet (the signal would kill them), and ranks that get no core to write a dump. Takes 0.1 s, or
    SILENT_SECONDS if a rank writes none."""
    ready = {rank: path for rank, (pid, path) in ranks.items() if _ready(pid)}
    sizes = {rank: path.stat().st_size for rank, path in ready.items()}
    for rank in ready:
        with suppress(ProcessLookupError):  # the rank has just ended, which the zygote will report
            os.kill(ranks[rank][0], DUMP_SIGNAL)
    dumps = dict.fromkeys(ready, "")
    grown = dict.fromkeys(ready, time.monotonic())
    deadline = time.monotonic() + SILENT_SECONDS
    while True:
        time.sleep(COMPLETE_SECONDS / 5)
        now = time.monotonic()
        for rank, path in ready.items():
            with path.open("rb") as file:
                file.seek(sizes[rank])
                dump = file.read().decode(errors="replace")
            if dump != dumps[rank]:
                dumps[rank], grown[rank] = dump, now
        if now > deadline or all(
            dumps[rank] and now - grown[rank] >= COMPLETE_SECONDS for rank in ready
        ):
            states = {rank: _status(ranks[rank][0])["State"].split()[0] for rank in ready}
            return {rank: dump for rank, dump in dumps.items() if dump or states[rank] != "R"}


def _ready(pid: int) -> bool:
    """Whether a process is alive, perhaps stopped, and handles the dump signal."""
    fields = _status(pid)
    if fields["State"].split()[0] in "ZX":  # the process has ended, but still lists its handlers
        return False
    return bool(int(fields["SigCgt"], 16) >> (DUMP_SIGNAL - 1) & 1)


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
"""Files whose functions wait for other ranks. FSDP's hooks call the user's modules from outside:
the innermost frame is in FSDP only while FSDP gathers, scatters or waits."""
UNCLEAR = (
    "/torch/autograd/",  # the backward pass in C++: DDP may wait in it, or a kernel may hang
    "/torchinductor_",  # compiled code, which may contain collectives
)

COMPILING = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/graph.py",  # compiles backward passes too, on their first use
    "/torch/_inductor/async_compile.py",
    "/triton/compiler/",
)
"""Files on the stack of a rank while it compiles, which a new shape can cause at any step."""

SHOWN_FRAMES, FRAME_LENGTH = 12, 200
"""Largest number of frames, and of characters per frame, of the stack in a `MembershipFailure`. All
nodes read it, so it must be short."""


def in_collective(dump: str) -> bool | None:
    """Returns whether the main thread waits for other ranks; None if its stack does not show it.
    The innermost Python frame that does not only forward a call decides: C++ code appears as the
    Python function that called it."""
    files = (file for _, file in _main_thread(dump))
    innermost = next((file for file in files if not _within(file, FORWARDING)), None)
    if innermost is None or _within(innermost, UNCLEAR):
        return None
    return _within(innermost, COLLECTIVES)


def is_compiling(dump: str) -> bool:
    return any(_within(file, COMPILING) for _, file in _main_thread(dump))


def _main_thread(dump: str) -> list[tuple[str, str]]:
    """Returns (frame, file) of the main thread's frames, innermost first. faulthandler writes the
    main thread last."""
    threads = re.split(r"^(?:Current thread|Thread) ", dump, flags=re.MULTILINE)
    return re.findall(r'^  (File "(.*)", line \d+ in .*)', threads[-1], re.MULTILINE)


def main_stack(dump: str) -> str:
    """Returns the innermost frames of the main thread, one per line; "" if the dump has none."""
    frames = _main_thread(dump)[:SHOWN_FRAMES]
    return "\n".join(frame[:FRAME_LENGTH] for frame, _ in frames)


def classify_dump(dump: str) -> Activity:
    if not dump:
        return "silent"
    waits = in_collective(dump)
    if waits is None:
        return "unclear"
    return "collective" if waits else "elsewhere"


def _within(file: str, places: Iterable[str]) -> bool:
    return any(place in file for place in places)
