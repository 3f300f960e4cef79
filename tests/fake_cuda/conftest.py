"""Only on the fake CUDA runtime (`make fakecuda`), and its table of cases."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.distributed.conftest import start, train, workspace

__all__ = ["start", "train", "workspace"]

collect_ignore_glob = [] if "FAKE_CUDA" in os.environ else ["test_*.py"]

_results: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each case ended: its worst phase counts."""
    if report.when == "call" or report.outcome != "passed":
        _results[report.nodeid.partition("::")[2]] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table, if FAKE_CUDA_TABLE names a file."""
    target = os.environ.get("FAKE_CUDA_TABLE")
    if not target or hasattr(session.config, "workerinput"):
        return
    import torch

    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    if subprocess.check_output(["git", "status", "--porcelain", "-uno"]):
        commit += " and changes"
    passed = sum(result == "passed" for result in _results.values())
    lines = [
        "# Cases on the fake CUDA runtime",
        "",
        f"Made by `make fakecuda`: {passed} of {len(_results)} passed. Commit {commit}, torch "
        f"{torch.__version__}. It shows arguments, devices, order, pinning and exchange between "
        "ranks; never speed, and no kernel of a GPU.",
        "",
        "| case | result |",
        "|---|---|",
        *(f"| {name.removeprefix('test_').replace('_', ' ')} | {result} |"
          for name, result in sorted(_results.items())),
    ]  # fmt: skip
    Path(target).write_text("\n".join(lines) + "\n")
