"""What MACs and checks cost the processes of a job: calls and seconds, by what they were for."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.support import print_table, python_path

FOLDER = "PERDURE_BENCH_MACS"
"""Environment variable: where the processes leave their notes. See injected/sitecustomize.py."""


@dataclass(frozen=True)
class Span:
    """A time in which calls are counted."""

    what: str
    """"recovery from …", or "steps"."""
    begin: float
    """Unix time."""
    end: float
    steps: int = 0
    """Done in it."""


@contextmanager
def noted() -> Iterator[Path]:
    """Have all processes that are started in here note their calls in a folder."""
    before = os.environ.get("PYTHONPATH")
    with TemporaryDirectory(prefix="perdure-bench-macs-") as folder:
        os.environ[FOLDER] = folder
        os.environ["PYTHONPATH"] = python_path(Path(__file__).parent / "injected")
        try:
            yield Path(folder)
        finally:
            del os.environ[FOLDER]
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def show(folder: Path, spans: Sequence[Span]) -> None:
    """Print what was noted: sums over all processes, per recovery and per step."""
    notes = [
        (path.name.partition("-")[0], float(at), name, float(wall), float(cpu))
        for path in folder.iterdir()
        for at, name, wall, cpu in map(str.split, path.read_text().splitlines())
    ]
    cores = len(os.sched_getaffinity(0))
    rows = []
    for what in dict.fromkeys(span.what for span in spans):
        some = [span for span in spans if span.what == what]
        seconds = sum(span.end - span.begin for span in some)
        count = sum(span.steps for span in some) or len(some)
        found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for role, at, name, wall, cpu in notes:
            if any(span.begin <= at <= span.end for span in some):
                found[role, name].append((wall, cpu))
                found["all", "all"].append((wall, cpu))
        for (role, name), calls in sorted(found.items()):
            wall, cpu = (sum(call[index] for call in calls) for index in (0, 1))
            rows.append(
                {
                    "in": what,
                    "processes": role,
                    "call": name,
                    "calls": round(len(calls) / count, 1),
                    "ms": f"{1e3 * wall / count:.3f}",
                    "ms of a core": f"{1e3 * cpu / count:.3f}",
                    "share, %": f"{100 * cpu / seconds / cores:.3f}",
                }
            )
    print(
        "\nMACs and checks, summed over all processes, for one recovery and for one step; the share"
        f"\nis of what the {cores} core(s) of this machine can do in that time. A call that waits "
        "for\nother ranks takes longer than its core."
    )
    print_table(rows)
