"""Shared by the benchmark programs: data, subprocesses, tables."""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from elastic import usable_cores
from elastic.process import descendants
from trainer.text import markdown

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def arguments(description: str, **defaults: int | str) -> argparse.Namespace:
    """Command line of a benchmark: `--json FILE`, and `--NAME VALUE` for each of `defaults`. Then
    SIGTERM ends the benchmark's child processes, too."""
    end_children_at_sigterm()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    for name, default in defaults.items():
        kind = type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default {default}")
    return parser.parse_args()


def end_children_at_sigterm() -> None:
    """Have SIGTERM kill all descendants of this process, and end it by SystemExit, so that
    temporary directories are removed. Its forks it ends at once. Called in the main thread."""
    own = os.getpid()

    def send(number: int, processes: Iterable[int]) -> None:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(number: int, _: object) -> NoReturn:
        if os.getpid() != own:
            os._exit(128 + number)
        found: set[int] = set()
        # stopped first, as a running process could fork another one meanwhile
        while more := {*descendants(os.getpid())} - found:
            send(signal.SIGSTOP, more)
            found |= more
        send(signal.SIGKILL, found)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def workspace() -> Iterator[Path]:
    """A scratch directory that holds data/wikipedia as `make train` prepares it."""
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        path = Path(scratch)
        prepared = ROOT / "data" / "wikipedia"
        if (prepared / "index.json").exists():
            (path / "data").mkdir()
            (path / "data" / "wikipedia").symlink_to(prepared)
        else:
            perdure = [sys.executable, "-m", "trainer.cli", "data", "prepare", "wikipedia"]
            run([*perdure, "--out", "data/wikipedia", "--train-bpe", "4096"], path)
        yield path


def torchrun(ranks: int, *worker: str) -> list[str]:
    """Command that starts `worker` (`-m module …` or `file.py …`) on `ranks` ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *worker]


def environment() -> dict[str, str]:
    """Environment of a job that starts now: this package on its path, one thread per rank."""
    paths = {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **paths, "PERDURE_LAUNCHED_AT": str(time.time())}


def python_path(*folders: str | Path) -> str:
    """`folders`, and what is on PYTHONPATH now: on machines without a registry that is where
    packages lie."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else [])])


def run(command: Sequence[str], directory: Path, more: Mapping[str, str] = {}) -> str:
    """Run to the end in `directory`, with `more` in the environment; returns stdout. A failure
    shows all output and stops."""
    done = subprocess.run(
        command,
        cwd=directory,
        env={**environment(), **more},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range on one line."""
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def report(
    title: str, rows: Sequence[Mapping[str, Any]], figures: Any, json_file: Path | None
) -> None:
    """Print a table (columns are the keys of the first row), and write `figures` as JSON."""
    heading(title)
    print_table(rows)
    write_json(title, figures, json_file)


def heading(title: str) -> None:
    """Print the title, and when and where this ran."""
    print(f"\n{title}\n{_today()}, {_machine()}\n")


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table; columns are the keys of the first row."""
    columns = list(rows[0])
    print("\n".join(markdown(columns, [[str(row[column]) for column in columns] for row in rows])))


def json_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON objects among a file's lines, but for one that is being written; none where there is
    no file."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line[:2] == '{"' and line[-1] == "\n"]


def write_json(title: str, figures: Any, json_file: Path | None) -> None:
    """Write the figures, and when and where they were taken, if there is a file to write to."""
    if json_file:
        content = {"title": title, "date": _today(), "machine": _machine(), "figures": figures}
        # What holds nothing else is on one line.
        text = re.sub(
            r"[\[{][^\[\]{}]*[\]}]",
            lambda inner: re.sub(r"\n\s*", " ", inner[0]),
            json.dumps(content, indent=2),
        )
        json_file.write_text(text + "\n", encoding="utf-8")


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _machine() -> str:
    import torch

    machine = f"{usable_cores()} CPU cores, Python {platform.python_version()}"
    machine += f", torch {torch.__version__}"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return machine
