"""Checks of a machine before its node joins.

[Note: checks] The checks of cores, GPUs and links each run in a child process: a GPU may hang for
ever, a broken driver may kill the process, and the agent, which forks, must never initialise CUDA.
The child prints the name of each core or GPU before the check, so that a check that never ends is
reported with that name. All checks run at the same time, each with a time-out.

Folders and the network are checked in threads, which cost less than processes. A thread that waits
for a dead server is abandoned.

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
"""Time-out of a check. A healthy machine needs less than a second, unless it is busy."""
GPU_SECONDS = 120.0
"""Time-out of the GPU checks, which import torch from a cold disk and create CUDA contexts."""
ROUND_TRIP_SECONDS = 1.0
"""Longest round trip to the store with which leases can be renewed in time."""
GPU_BYTES = 256 << 20
WARNING_ONLY = ("gpu", "nvlink", "network")
"""Checks whose problems are only logged, as a slow or unreadable device may still train."""


@dataclass(frozen=True)
class HealthProblem:
    """A fault of this machine that a check has found."""

    check: str
    """Name of the check, or the core, GPU or recipe key at which it found the fault."""
    what: str
    """One line that says what is wrong and what to do."""

    @property
    def refuses(self) -> bool:
        return self.check not in WARNING_ONLY

    def __str__(self) -> str:
        return f"{self.check}: {self.what}"


@dataclass(frozen=True)
class _NodeHealth:
    """What the checks of this machine found."""

    problems: Sequence[HealthProblem]
    domain: str
    """NVLink domain of the node's GPUs; empty if they reach no other node."""


def check_node(
    store_round_trip: Callable[[], float],
    *,
    folders: Mapping[str, str] | None = None,
    network: bool = False,
    root: Path = Path("/"),
    seconds: float = SECONDS,
    gpu_seconds: float = GPU_SECONDS,
) -> _NodeHealth:
    """Check this machine: cores, NVIDIA GPUs and their NVLinks, network, connection to the store,
    and folders. The checks run at the same time, so this takes at most the longest time-out.
    `store_round_trip`: makes a request to the store, and returns how many seconds that took.
    `folders`: recipe key → path that the ranks need. `network`: whether the job has other nodes."""
    checks = [
        _Check("compute", seconds, _Check.run_child),
        _Check("store", seconds, partial(_check_store, store_round_trip)),
        *_folder_checks(folders or {}, seconds),
    ]
    if network:
        checks.append(_Check("network", seconds, partial(_check_network, root)))
    if Path("/dev/nvidiactl").exists():
        checks.append(_Check("gpu", gpu_seconds, _Check.run_child))
        checks.append(_Check("nvlink", gpu_seconds, _Check.run_child))
    problems = [problem for check in checks for problem in check.result()]
    return _NodeHealth(problems, "".join(check.domain for check in checks))


def check_folders(
    folders: Mapping[str, str], *, seconds: float = SECONDS
) -> Sequence[HealthProblem]:
    """Returns problems of the filesystems under `folders`, which maps recipe keys to paths."""
    return [problem for check in _folder_checks(folders, seconds) for problem in check.result()]


def _folder_checks(folders: Mapping[str, str], seconds: float) -> list["_Check"]:
    checks = []
    for key, folder in folders.items():
        path = Path(folder).absolute()
        advice = f" from {path}{describe_mount(path)}; mend or remount it, or name another path"
        checks.append(_Check(key, seconds, partial(_check_folder, path), advice))
    return checks


class _Check:
    """A check that runs in a thread, which is abandoned if it exceeds its time-out. The thread
    starts when this object is created, so that several checks run at the same time."""

    def __init__(
        self, name: str, seconds: float, run: Callable[["_Check"], None], advice: str = ""
    ) -> None:
        self.at, self.seconds, self.advice, self.domain = name, seconds, advice, ""
        self._run, self._problems = run, list[HealthProblem]()
        self._process: subprocess.Popen[str] | None = None
        self._deadline = time.monotonic() + seconds
        self._thread = threading.Thread(target=self._work, name=f"check-{name}", daemon=True)
        self._thread.start()

    def add_problem(self, what: str) -> None:
        self._problems.append(HealthProblem(self.at, what))

    def result(self) -> list[HealthProblem]:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self.add_problem(f"no answer within {self.seconds:g} s{self.advice}")
            if self._process is not None:
                # The child is not awaited: if it waits for a dead driver, it dies only when the
                # driver answers.
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        return list(self._problems)

    def run_child(self) -> None:
        """Run this check in a child process, and collect the problems that the process prints."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic.group.health", self.at],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # a group of its own, so that a hanging check is killed with its forks
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(search_path()),
                "OMP_NUM_THREADS": "1",  # check_compute pins a fork to each core itself
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        last_words = "no message"
        for line in self._process.stdout or ():
            if line.startswith('{"at": '):
                finding = json.loads(line)
                self.at, self.domain = finding["at"], finding.get("domain", "")
                if finding["problem"]:
                    self.add_problem(finding["problem"])
            elif line.strip():
                last_words = line.strip()
        code = self._process.wait()
        if code:
            self.add_problem(f"its process ended with code {code}: {last_words}")

    def _work(self) -> None:
        try:
            self._run(self)
        except Exception as error:  # a check that raises counts as failed
            self.add_problem(f"{type(error).__name__}: {error}")


def _check_store(round_trip: Callable[[], float], check: _Check) -> None:
    took = round_trip()
    if took > ROUND_TRIP_SECONDS:
        check.add_problem(
            f"a round trip to the job's store takes {took:.1f} s, more than "
            f"{ROUND_TRIP_SECONDS:g} s; see the network between this machine and the store's host"
        )


def _check_folder(path: Path, check: _Check) -> None:
    """List a folder or read one byte of a file. If `path` is missing, use its nearest parent."""
    try:
        while True:
            try:
                mode = os.stat(path).st_mode
                break
            except FileNotFoundError:
                path = path.parent
        if stat.S_ISDIR(mode):
            with os.scandir(path) as entries:
                next(entries, None)  # one entry shows that the filesystem answers
        else:
            with open(path, "rb") as file:
                file.read(1)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # the path is wrong, not its filesystem: the code that opens the path reports that
    except OSError as error:
        check.add_problem(f"{error.strerror}{check.advice}")


def _check_network(root: Path, check: _Check) -> None:
    for problem in network_problems(root, os.environ):
        check.add_problem(problem)


# --- in the child ----------------------------------------------------------------------------

Finding = tuple[str, str | None]
"""(core or GPU, None) before a core or GPU is checked; (core or GPU, problem) for each problem."""


def pattern(size: int, module: Any) -> tuple[Any, Any, Any, Any]:
    """Returns (left, right, row weights, column weights): int64 matrices of shape (size, size) and
    vectors of length `size`, as arrays of `module` (numpy or torch). Every sum in left @ right is
    an integer below 2^24 in magnitude, so neither float32 nor TF32 with float32 sums rounds it."""
    index = module.arange(size)
    rows, columns = index[:, None], index[None, :]
    left = (3 * rows + 5 * columns + rows * columns) % 17 - 8
    right = (7 * rows + 2 * columns + rows * columns * columns) % 17 - 8
    return left, right, index % 7 + 1, index % 5 + 1


SIZE = 512
GPU_SIZE = 2048
GOLDEN = {SIZE: -1139798349, GPU_SIZE: -72314594004}
"""Size → the integer row weights @ left @ right @ column weights of `pattern(size)`."""


def check_compute() -> Iterator[Finding]:
    """Multiply matrices whose product is known, in a process pinned to each core. A core that
    computes wrongly raises no error (Hochschild et al., Cores that don't count, 2021)."""
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
            # os._exit, because exit handlers and unwritten output belong to the parent.
            os._exit(wrong())
        children[core] = pid
    for core, pid in children.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            how = "gave a wrong result" if code == 1 else f"ended with code {code}"
            yield f"core {core}", f"a multiplication of matrices {how}; take this machine out"


def check_gpus() -> Iterator[Finding]:
    """Check on every visible GPU that GPU_BYTES of memory keep their contents, and that a product
    of two matrices is right."""
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
            value = (rows.double() @ product @ columns.double()).item()
        except RuntimeError as error:
            yield name, str(error).splitlines()[0]
            continue
        if not kept:
            yield name, "its memory does not keep what is written; take this machine out"
        if value != GOLDEN[GPU_SIZE]:
            yield name, "a multiplication of matrices gave a wrong result; take this machine out"


def main(arguments: list[str]) -> None:
    die_with_parent()
    if arguments == ["nvlink"]:
        from elastic.group.nvml import read_links

        problems, domain = read_links()
        for problem in [*problems, None]:
            message = {"at": "nvlink", "problem": problem, "domain": domain}
            print(json.dumps(message), flush=True)
        return
    for at, problem in check_gpus() if arguments == ["gpu"] else check_compute():
        print(json.dumps({"at": at, "problem": problem}), flush=True)


def describe_mount(path: Path, root: Path = Path("/")) -> str:
    """Describe the mount that `path` is on, such as ` (nfs4 server:/export on /mnt)`; empty for the
    root filesystem, or if /proc has no answer. Reads only `root`/proc, as a filesystem may hang."""
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
        # The kernel writes a space as \040.
        point = Path(fields[4].replace("\\040", " "))
        if point in (path, *path.parents) and len(point.parts) > max(depth, 1):
            depth, shown = len(point.parts), f" ({filesystem[0]} {filesystem[1]} on {point})"
    return shown


if __name__ == "__main__":
    main(sys.argv[1:])
