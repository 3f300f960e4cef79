"""Runs cases one after another, each in a process of its own, within a budget of seconds.

Knows nothing of CUDA, and imports nothing that is not Python's: a machine without a registry has to
be given packages first. What a case gave is in the state at once, under the case, the code, torch
and the GPU: a later call goes on where this one ended, on however it ended.
"""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.cases import Case, Figures, Size
from elastic.process import children

ROOT = Path(__file__).parents[2]
CODE = (
    *("trainer", "elastic", "checkpointing", "lab", "benchmarks/peers", "benchmarks/support"),
    *(
        f"benchmarks/gpu/{name}.py"
        for name in ("setting", "forked", "sharded", "sharing", "synthetic")
    ),
)
"""What results depend on, besides the module of the case."""
MARGIN = 5.0
"""Seconds at the end of the budget for the summary."""
TOY_SECONDS, TOY_LIMIT = 30.0, 300.0
"""What a case of toy size needs at most to be begun, and what it has at least until it is killed:
a CPU may be busy, and compile slowly."""


@dataclass(frozen=True)
class Machine:
    """What results are kept under, besides the case."""

    code: str
    """Digest of the sources: a copy of the tree on another machine has no commit."""
    torch: str
    gpu: str
    """Its name; `cpu` without one."""
    size: Size

    def key(self, case: Case) -> str:
        """Key of a result in the state."""
        of_case = case.name, source(case.function)
        return " | ".join((*of_case, self.code, self.torch, self.gpu, self.size))


class State:
    """The results so far: a JSON file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.entries = json.loads(path.read_text(encoding="utf-8"))

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Keep a result, on disk when this returns."""
        self.entries[key] = entry
        write_json(self.path, self.entries)

    def figures(self, machine: Machine) -> dict[str, Figures]:
        """Figures of the cases that were done on a machine, by name."""
        like = asdict(machine).items()
        return {
            entry["case"]: entry["figures"]
            for entry in self.entries.values()
            if entry["status"] == "done" and like <= entry.items()
            if entry["source"] == source(entry["function"])
        }


def write_json(path: Path, content: Any) -> None:
    """Replace a file by one that is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def code_digest(root: Path = ROOT) -> str:
    """Digest of the sources that results depend on."""
    digest = hashlib.sha256()
    paths = [root / name for name in CODE]
    files = [p for path in paths for p in ([path] if path.is_file() else path.rglob("*.py"))]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def source(function: str) -> str:
    """Digest of the module of a case's function: what is mended there is to be measured again.
    Empty if there is none any more, as of a case of before."""
    path = ROOT / f"{function.partition(':')[0].replace('.', '/')}.py"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:6] if path.exists() else ""


def identify(device: str, size: Size, environment: Mapping[str, str]) -> Machine:
    """Ask a process that may import torch what it finds."""
    command = [sys.executable, "-m", "benchmarks.gpu.case", "identify", "--device", device]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"torch cannot be asked for a device:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Machine(code_digest(), found["torch"], found["gpu"], size)


@dataclass(frozen=True)
class Plan:
    """How to run the cases."""

    state: State
    machine: Machine
    device: str
    work: Path
    """Folder for synthetic data and logs, kept from call to call."""
    environment: Mapping[str, str]
    deadline: float
    """By time.monotonic()."""
    retry: bool = False
    """Run again what failed, or was unsupported."""


def run_cases(cases: Sequence[Case], plan: Plan) -> Iterator[tuple[Case, str]]:
    """Run what is not known yet and fits into the time that is left; yields each case with what
    became of it, once that is in the state."""
    for case in cases:
        key = plan.machine.key(case)
        known = plan.state.entries.get(key)
        left = plan.deadline - time.monotonic() - MARGIN
        toy = plan.machine.size == "toy"
        limit = min(max(case.limit, TOY_LIMIT) if toy else case.limit, left)
        if known and not ((plan.retry and known["status"] != "done") or cut_short(known, limit)):
            yield case, f"known: {known['status']}"
            continue
        needed = min(TOY_SECONDS, case.seconds) if toy else case.seconds
        if left < needed:
            yield case, f"skipped: it takes {needed:.0f} s, {max(0.0, left):.0f} s are left"
            continue
        began = time.monotonic()
        entry = run_case(case, plan, limit)
        entry |= {
            **asdict(plan.machine),
            "case": case.name,
            "function": case.function,
            "source": source(case.function),
            "seconds": round(time.monotonic() - began, 1),
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
        }
        plan.state.put(key, entry)
        yield case, f"{entry['status']} in {entry['seconds']:.0f} s"


def cut_short(known: Mapping[str, Any], limit: float) -> bool:
    """Whether a case was ended by a budget, and would now have twice the time."""
    return known["status"] == "timed out" and limit >= 2 * known["seconds"]


def run_case(case: Case, plan: Plan, limit: float) -> dict[str, Any]:
    """Run one in a process of its own, for `limit` seconds at most. No process, file or shared
    memory of it is left when this returns."""
    log = plan.work / "logs" / f"{case.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    scratches = TemporaryDirectory(prefix="case-", dir=plan.work)
    with log.open("wb") as output, scratches as scratch:
        result, others = Path(scratch, "result.json"), Path(scratch, "others.json")
        write_json(others, plan.state.figures(plan.machine))
        command = [
            *(sys.executable, "-m", "elastic.process", "benchmarks.gpu.case", case.function),
            *("--options", json.dumps(dict(case.options))),
            *("--device", plan.device, "--size", plan.machine.size, "--scratch", scratch),
            *("--data", str(plan.work / "data"), "--others", str(others), "--out", str(result)),
        ]
        code = wait(command, plan, output, limit)
        if result.exists():
            entry: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return entry
        forget = [sys.executable, "-m", "benchmarks.gpu.case", "forget", "--scratch", scratch]
        wait(forget, plan, output, TOY_SECONDS)
        if code is None:
            return {"status": "timed out", "why": f"no end after {limit:.0f} s", "figures": {}}
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return {"status": "died", "why": f"{how}; {last_line(log)}", "figures": {}}


def wait(command: Sequence[str], plan: Plan, output: Any, limit: float) -> int | None:
    """Run a command, and kill what it leaves; its exit code, None after `limit` seconds."""
    with (
        nobody_left(),
        subprocess.Popen(
            command, cwd=ROOT, env=plan.environment, stdout=output, stderr=output
        ) as process,
    ):
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()


@contextmanager
def nobody_left() -> Iterator[None]:
    """Kill, in the end, all that was started within, also what its parent has left behind: this
    process becomes the parent of such (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    before = set(children(os.getpid()))
    prctl(set_child_subreaper, 1)
    try:
        yield
    finally:
        while new := set(children(os.getpid())) - before:
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        prctl(set_child_subreaper, 0)


def last_line(log: Path) -> str:
    """The last line that a case printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no output")


def commit() -> str:
    """The tree's commit, where it has one."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
