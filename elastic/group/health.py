"""Whether a node is fit to join: checks before its first round.

[Note: checks] Each check runs in a process of its own, because what it looks for may hang for ever
(a GPU), kill the process (a broken driver), or spoil it (the agent, which forks, must never
initialise CUDA). The process says what it is about to do before it does it, so that a check
that never ends still has a name. All checks run at the same time, and each has a time-out.

A folder is read, and Linux is asked for its network, in a thread: both cost too little for a
process, and a thread that waits for a dead server is left alone as well.

    python -m elastic.group.health compute | gpu | nvlink
"""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic.group.network import network_problems
from elastic.process import die_with_parent, search_path

SECONDS = 60.0
"""A healthy machine answers in a fraction of one, unless it imports all else at the same time."""
GPU_SECONDS = 120.0
"""Importing torch from a cold disk and making a CUDA context takes many."""
ROUND_TRIP_SECONDS = 1.0
"""A store slower than that does not carry leases, which are about as long."""
GPU_BYTES = 256 << 20
ONLY_TOLD = ("gpu", "nvlink", "network")
"""Checks whose problems keep no node out: what is slow, or cannot be asked, may still train."""


@dataclass(frozen=True)
class HealthProblem:
    """Something that is wrong with this machine."""

    check: str
    what: str

    @property
    def refuses(self) -> bool:
        """Whether it is a reason not to join."""
        return self.check not in ONLY_TOLD

    def __str__(self) -> str:
        return f"{self.check}: {self.what}"


@dataclass(frozen=True)
class Health:
    """What is known of this machine once it is checked."""

    problems: Sequence[HealthProblem]
    domain: str
    """The NVLink domain of its GPUs; empty if they reach no other node."""


def check_node(
    store_round_trip: Callable[[], float],
    *,
    folders: Mapping[str, str] | None = None,
    network: bool = False,
    root: Path = Path("/"),
    seconds: float = SECONDS,
    gpu_seconds: float = GPU_SECONDS,
) -> Health:
    """Check this machine: its cores, the GPUs of an NVIDIA driver and their links, its network, and
    its way to the store and to folders. Takes at most the longest time-out.

    Args:
        store_round_trip: asks the store for something and returns the seconds that took.
        folders: paths that the ranks need, by the key that names them.
        network: whether the job has other nodes, which are reached over it.
        root: folder with `sys` in it; `/` but in tests.
        seconds: time-out of each check.
        gpu_seconds: time-out of the check of all GPUs.
    """
    checks = [
        _Check("compute", seconds, _Check.run_child),
        _Check("store", seconds, partial(_time_store, store_round_trip)),
        *_folder_checks(folders or {}, seconds),
    ]
    if network:
        checks.append(_Check("network", seconds, partial(_look_at_network, root)))
    if Path("/dev/nvidiactl").exists():
        checks.append(_Check("gpu", gpu_seconds, _Check.run_child))
        checks.append(_Check("nvlink", gpu_seconds, _Check.run_child))
    return Health(_run(checks), "".join(check.domain for check in checks))


def check_folders(
    folders: Mapping[str, str], *, seconds: float = SECONDS
) -> Sequence[HealthProblem]:
    """Whether what is mounted answers where these paths lie, by the key that names each. A path
    that is not there is no problem of its mount."""
    return _run(_folder_checks(folders, seconds))


def _folder_checks(folders: Mapping[str, str], seconds: float) -> list["_Check"]:
    checks = []
    for key, folder in folders.items():
        path = Path(folder).absolute()
        advice = f" from {path}{mount_of(path)}; mend or remount it, or name another path"
        checks.append(_Check(key, seconds, partial(_look_at_folder, path), advice))
    return checks


def _run(checks: Sequence["_Check"]) -> list[HealthProblem]:
    """Run checks at the same time."""
    for check in checks:
        check.start()
    return [problem for check in checks for problem in check.result()]


class _Check:
    """A check in a thread, which is left alone if it does not end in time."""

    def __init__(
        self, name: str, seconds: float, run: Callable[["_Check"], None], advice: str = ""
    ) -> None:
        self.at, self.seconds, self.advice, self.domain = name, seconds, advice, ""
        self._run, self._problems = run, list[HealthProblem]()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name=f"check-{name}", daemon=True)

    def start(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self._thread.start()

    def found(self, what: str) -> None:
        self._problems.append(HealthProblem(self.at, what))

    def result(self) -> list[HealthProblem]:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self.found(f"no answer within {self.seconds:g} s{self.advice}")
            if self._process is not None:
                # One that waits for a dead driver stays until that answers: not waited for.
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        return list(self._problems)

    def run_child(self) -> None:
        """Run the check of this name as a child, and take in what it says."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic.group.health", self.at],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(search_path()),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        last_words = "no message"
        for line in self._process.stdout or ():
            if line.startswith('{"at": '):
                finding = json.loads(line)
                self.at, self.domain = finding["at"], finding.get("domain", "")
                if finding["problem"]:
                    self.found(finding["problem"])
            elif line.strip():
                last_words = line.strip()
        code = self._process.wait()
        if code:
            self.found(f"its process ended with code {code}: {last_words}")

    def _work(self) -> None:
        try:
            self._run(self)
        except Exception as error:  # whatever it is, this check did not succeed
            self.found(f"{type(error).__name__}: {error}")


def _time_store(round_trip: Callable[[], float], check: _Check) -> None:
    took = round_trip()
    if took > ROUND_TRIP_SECONDS:
        check.found(f"a round trip takes {took:.1f} s, more than {ROUND_TRIP_SECONDS:g} s")


def _look_at_folder(path: Path, check: _Check) -> None:
    try:
        look_at(path)
    except OSError as error:
        check.found(f"{error.strerror}{check.advice}")


def _look_at_network(root: Path, check: _Check) -> None:
    for problem in network_problems(root, os.environ):
        check.found(problem)


# --- in the child ----------------------------------------------------------------------------

Finding = tuple[str, str | None]
"""What is about to be checked, and then what is wrong with it."""


def pattern(size: int, module: Any) -> tuple[Any, Any, Any, Any]:
    """(left, right, row weights, column weights): integer matrices and vectors, as int64 arrays of
    `module` (numpy or torch).

    Values are within ±8, so that every sum in left @ right is an integer below 2^24 in magnitude,
    and no sum is rounded in float32, nor in TF32 with float32 sums.
    """
    index = module.arange(size)
    rows, columns = index[:, None], index[None, :]
    left = (3 * rows + 5 * columns + rows * columns) % 17 - 8
    right = (7 * rows + 2 * columns + rows * columns * columns) % 17 - 8
    return left, right, index % 7 + 1, index % 5 + 1


SIZE = 512
GPU_SIZE = 2048
GOLDEN = {SIZE: -1139798349, GPU_SIZE: -72314594004}
"""Row weights @ left @ right @ column weights, by size of `pattern`, from integer arithmetic."""


def check_compute() -> Iterator[Finding]:
    """Fork, and a multiplication of matrices on every core, whose result is known exactly.

    A core that computes wrongly does so without a word (Hochschild et al., Cores that don't count,
    2021), and spoils the state of all ranks.
    """
    yield "compute", None
    import numpy as np

    left, right, rows, columns = pattern(SIZE, np)

    def wrong() -> bool:
        for dtype in (np.float32, np.float64):
            product = left.astype(dtype) @ right.astype(dtype)
            if rows @ product.astype(np.int64) @ columns != GOLDEN[SIZE]:
                return True
        return False

    children = {}
    for core in sorted(os.sched_getaffinity(0)):
        pid = os.fork()
        if pid == 0:
            os.sched_setaffinity(0, {core})
            os._exit(wrong())
        children[core] = pid
    for core, pid in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            how = "gave a wrong result" if code == 1 else f"ended with code {code}"
            yield f"core {core}", f"a multiplication of matrices {how}; take this machine out"


def check_gpus() -> Iterator[Finding]:
    """Memory that keeps what it is given, and a product of matrices, on every visible GPU."""
    yield "gpu", None
    import torch

    for index in range(torch.cuda.device_count()):
        name = f"GPU {index}"
        yield name, None
        try:
            with torch.device("cuda", index):
                memory = torch.full((GPU_BYTES // 8,), 0x5AA5C33C0FF0, dtype=torch.int64)
                kept = bool((memory == 0x5AA5C33C0FF0).all())
                left, right, rows, columns = pattern(GPU_SIZE, torch)
            product = (left.float() @ right.float()).double()
            found = (rows.double() @ product @ columns.double()).item()
        except RuntimeError as error:
            yield name, str(error).splitlines()[0]
            continue
        if not kept:
            yield name, "memory does not keep what is written; take this machine out"
        if found != GOLDEN[GPU_SIZE]:
            yield name, "a multiplication of matrices gave a wrong result; take this machine out"


def main(arguments: list[str]) -> None:
    """One check, one JSON object a line."""
    die_with_parent()
    if arguments == ["nvlink"]:
        from elastic.group.nvml import ask_links

        problems, domain = ask_links()
        for problem in [*problems, None]:
            said = {"at": "nvlink", "problem": problem, "domain": domain}
            print(json.dumps(said), flush=True)
        return
    for at, problem in check_gpus() if arguments == ["gpu"] else check_compute():
        print(json.dumps({"at": at, "problem": problem}), flush=True)


HARMLESS = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors that say nothing of a mount: whoever needs the path tells of them."""


def look_at(path: Path) -> None:
    """List a folder, or read a byte of a file; of a path that is not there its nearest parent.

    Raises:
        OSError: the filesystem does not do it.
    """
    try:
        while True:
            try:
                mode = os.stat(path).st_mode
                break
            except FileNotFoundError:
                if path == path.parent:
                    return
                path = path.parent
        if stat.S_ISDIR(mode):
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except HARMLESS:
        return


def mount_of(path: Path, root: Path = Path("/")) -> str:
    """Where a path is mounted from, for people: ` (nfs4 server:/export on /mnt)`; empty if it is on
    the filesystem of `/`, or that is not known. Asks no filesystem but /proc.

    Args:
        path: absolute.
        root: folder with `proc` in it; `/` but in tests.
    """
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    depth, shown = 0, ""
    for line in lines.splitlines():
        before, _, after = line.partition(" - ")
        fields, filesystem = before.split(), after.split()
        if len(fields) < 5 or len(filesystem) < 2:
            continue
        point = Path(fields[4].replace("\\040", " "))
        if point in (path, *path.parents) and len(point.parts) > max(depth, 1):
            depth, shown = len(point.parts), f" ({filesystem[0]} {filesystem[1]} on {point})"
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
