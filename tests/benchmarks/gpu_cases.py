"""Cases that end in every way, and a driver of its own for them: `-m tests.benchmarks.gpu_cases
WORK` runs what is not known yet."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.cases import Case
from benchmarks.gpu.driver import MARGIN, Machine, Plan, State, run_cases
from benchmarks.gpu.setting import Setting, UnsupportedError
from benchmarks.support import python_path

MACHINE = Machine(code="here", torch="2", gpu="cpu", size="toy")


def case(function, seconds=0.1, **options):
    return Case(function, 0, f"tests.benchmarks.gpu_cases:{function}", seconds, options=options)


def plan(work, seconds=600.0, machine=MACHINE, **more):
    return Plan(
        state=State(work / "state.json"),
        machine=machine,
        device="cpu",
        work=work,
        environment={**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[2])},
        deadline=time.monotonic() + MARGIN + seconds,
        **more,
    )


def good(setting: Setting, note: str):
    with Path(note).open("a") as file:
        file.write("good\n")
    return {"others": len(setting.others), "files": len(list(setting.scratch.iterdir()))}


def fails(setting: Setting):
    raise ValueError("what is wrong")


def cannot(setting: Setting):
    raise UnsupportedError("no such device")


def dies(setting: Setting):
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(setting: Setting, note: str):
    """So does what it has started, in a session of its own, as torchrun's workers are."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(note).write_text(str(child.pid))
    time.sleep(1000)


if __name__ == "__main__":
    work = Path(sys.argv[1])
    cases = [case("good", note=str(work / "note")), case("hangs", note=str(work / "child"))]
    for _, what in run_cases(cases, plan(work)):
        print(what, flush=True)
