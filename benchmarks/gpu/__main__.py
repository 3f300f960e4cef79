"""Measure on a GPU all that is worth knowing, in slices, within a budget of seconds.

A case runs in a process of its own. Its result is on disk before the next one begins; the same
command goes on where this one ended. Without a GPU, `--device cpu --size toy` takes the same ways.

exit codes: 0 all that was asked passes; 1 something falls short; 2 wrong option; 3 nothing falls
short, but not everything is measured
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import wheels
from benchmarks.gpu.cases import CASES, SLICES, Case, Verdict, chosen, judge, standings
from benchmarks.gpu.driver import ROOT, Machine, Plan, State, identify, run_cases
from benchmarks.gpu.report import PAGE, before, page, read_results, results_file, take_in

LOG_BYTES = 100_000
"""Bytes of each case's log, in --out."""


def main() -> None:
    options = arguments()
    home = options.state.parent.absolute()
    state = State(options.state)
    if options.wheelhouse:
        wheels.make(home / "wheels", options.wheelhouse)
        return
    if options.report:
        for path in (*take_in(state), write_page()):
            print(path)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    cases = chosen(CASES, options.only)
    if not cases:
        sys.exit(f"--only {options.only}: no slice or case; slices are 0 to {max(SLICES)}")
    wheels.install(home / "wheels", home / "site")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    machine = identify(options.device, options.size, environment)
    print(f"{machine.gpu}, torch {machine.torch}, code {machine.code}, {machine.size} size")
    plan = Plan(
        state=state,
        machine=machine,
        device=options.device,
        work=home,
        environment=environment,
        deadline=began + options.budget,
        retry=options.retry,
    )
    for case, what in run_cases(cases, plan):
        print(f"{time.monotonic() - began:5.0f} s  {case.name:32} {what}", flush=True)
    print()
    code = summarise(cases, state, machine)
    written = [*take_in(state), write_page()] if machine.size == "full" else []
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for path in (*written, options.state):
            if path.exists():  # there is no state where no case began
                shutil.copy(path, options.out)
        (options.out / "cases.log").write_bytes(logs(home, cases))
    sys.exit(code)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--budget", type=float, default=520, metavar="SECONDS", help="default 520")
    parser.add_argument(
        "--state", type=Path, default=Path(".gpu/state.json"), help="default .gpu/state.json"
    )
    parser.add_argument(
        "--only", metavar="SLICE,…", help="numbers of slices, or beginnings of names of cases"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="copy results, page, state and logs there"
    )
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--size", default="full", choices=("full", "toy"))
    parser.add_argument(
        "--report", action="store_true", help="write results and docs/gpu.md from the state"
    )
    parser.add_argument(
        "--wheelhouse",
        metavar="PYTHON",
        help="make wheels beside the state for a GPU machine with this version, such as 3.12",
    )
    return parser.parse_args()


def python_path() -> str:
    """This tree first, then what was there."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def write_page() -> Path:
    """docs/gpu.md from the results in the tree."""
    PAGE.write_text(page(), encoding="utf-8")
    return PAGE


def logs(home: Path, cases: Sequence[Case]) -> bytes:
    """What the cases printed, the end of each."""
    parts = []
    for case in cases:
        path = home / "logs" / f"{case.name}.log"
        if path.exists():
            parts.append(f"=== {case.name}\n".encode() + path.read_bytes()[-LOG_BYTES:])
    return b"\n".join(parts)


def summarise(cases: Sequence[Case], state: State, machine: Machine) -> int:
    """Print each case's verdict and figures; returns the exit code."""
    figures = state.figures(machine)
    known = read_results(results_file(machine.gpu))["cases"]
    verdicts: list[Verdict] = []
    for case in cases:
        entry = state.entries.get(machine.key(case))
        last = before(known.get(case.name), entry) if entry else {}
        verdict, why = judge(case, entry, figures, last, machine.size)
        verdicts.append(verdict)
        print(f"{verdict:13} {case.name}")
        done = entry is not None and entry["status"] == "done"
        for line in [] if done else why:
            print(f"{'':13}   {line}")
        for bound, standing, value in standings(case, entry, figures, last, machine.size):
            source = f" ({bound.source})" if bound.source else ""
            reached = "" if value is None else f", {value:.4g}"
            print(f"{'':13}   {bound}{source}: {standing}{reached}")
        for name, value in (entry or {}).get("figures", {}).items():
            print(f"{'':13}   {name} = {f'{value:.4g}' if isinstance(value, float) else value}")
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if "falls short" in counts else 3 if "not measured" in counts else 0


if __name__ == "__main__":
    main()
