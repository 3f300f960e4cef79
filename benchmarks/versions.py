"""Run the tests in this environment, and keep how they ended: a table of releases.

    python -m benchmarks.versions                 where this checkout is installed (pip install -e)
    python -m benchmarks.versions TEST… --out DIR of some tests, and elsewhere

The line of this environment, that is of its torch and its Python, is replaced in
results/versions.json, and docs/versions.md is made of them.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.support import end_children_at_sigterm

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONTRACT = ("tests/elastic/test_torch_contract.py", "tests/test_private_names.py")
"""What is relied on in private parts of torch."""
DECLARED = "tests/test_packaging.py::test_what_is_declared_was_run"
"""It compares pyproject.toml and the Makefile with this very table, so it is left out of it."""


def main() -> int:
    """Run the tests, and keep how they ended; returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help="default: all")
    parser.add_argument("--workers", default="4", help="processes of pytest, as in `make test`")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of versions.json")
    arguments = parser.parse_args()
    end_children_at_sigterm()
    path = arguments.out.absolute() / "versions.json"
    line: dict[str, Any] = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
    }
    _, line["contract"] = _tests(list(CONTRACT))
    several = ["-n", arguments.workers, "--dist", "worksteal", "--deselect", DECLARED]
    code, line["tests"] = _tests([*several, *arguments.tests])
    keep(path, line)
    if arguments.out == RESULTS:
        subprocess.run(
            [sys.executable, "docs/versions.py"], cwd=ROOT, env=_environment(), check=True
        )
    print(json.dumps(line))
    return code


def _tests(options: list[str]) -> tuple[int, dict[str, Any]]:
    """pytest's exit code, and how many tests passed, were skipped and failed, with their names."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *options]
        code = subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [one for one in cases if {"failure", "error"} & {child.tag for child in one}]
    skipped = sum(one.find("skipped") is not None for one in cases)
    return code, {
        "passed": len(cases) - len(wrong) - skipped,
        "skipped": skipped,
        "failed": sorted(f"{one.get('classname')}.{one.get('name')}" for one in wrong),
    }


def _environment() -> dict[str, str]:
    """The programs of this Python come first."""
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": here}


def _commit() -> str:
    """The commit of this checkout, and whether it has changes."""

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()

    changed = " and changes" if git("status", "--porcelain", "-uno") else ""
    return git("rev-parse", "--short=7", "HEAD") + changed


def keep(path: Path, line: dict[str, Any]) -> None:
    """Put the line of an environment into the file, in the place of the one that it had."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def of(one: dict[str, Any]) -> tuple[str, str]:
        return one["torch"], one["python"]

    lines = sorted([*(one for one in known if of(one) != of(line)), line], key=of)
    text = ",\n".join(json.dumps(one) for one in lines)
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
