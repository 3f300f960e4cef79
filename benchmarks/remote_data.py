"""Data in an object store: what a run waits for it, beside a local disk.

Tokens are drawn, and read from a disk and from servers that answer late, refuse a share of the
requests, or share a slow link (benchmarks/support/object_server.py). First by a loop that sleeps in
place of a GPU (benchmarks/support/loader_wait.py), with a loader process as the recipes for GPUs
have: samples must be equal. Then the quickstart's model trains on them without loader processes:
losses must be equal, and the share of a step that a rank waits for data is `data_wait` of its
records.
"""

import json
import multiprocessing
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.support import QUICKSTART, ROOT, arguments, json_lines, report, run, spread
from benchmarks.support.loader_wait import loader_wait
from trainer.data.prepare.writer import write_data_set
from trainer.data.tokenizer import byte_tokenizer

EOS = 256
FORK = multiprocessing.get_context("fork")
WORKERS = 1
"""Loader processes of the loop that sleeps."""
WARM_UP = 10
"""Steps at the start whose records do not count."""


@dataclass(frozen=True)
class Case:
    """Where the data lies."""

    latency: float = 0.05
    """Seconds, on average 1.2 times as many."""
    refused: float = 0.0
    """Share of the requests."""
    megabytes_per_second: float = 0.0
    """Bandwidth of the link; 0: no limit."""
    ahead: int = 8


CASES: dict[str, Case | None] = {
    "local disk": None,
    "50 ms, 5 % 503": Case(refused=0.05),
    "50 ms, 5 % 503, 1 ahead": Case(refused=0.05, ahead=1),
    "50 ms, link of 16 MB/s": Case(megabytes_per_second=16),
}


def main() -> None:
    options = arguments(
        __doc__ or "", rounds=1, steps=50, megabytes=40, sleeps=40, milliseconds=300
    )
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        folder = Path(scratch)
        draw(folder / "bucket" / "data", options.megabytes)
        if options.sleeps:
            sleep(folder, options.sleeps, options.milliseconds / 1e3, options.json)
        if options.rounds:
            train_all(folder, options.rounds, options.steps, options.json)


def sleep(folder: Path, steps: int, seconds: float, json_file: Path | None) -> None:
    """The wait of a loop that sleeps for `seconds` a step."""
    rows: list[dict[str, str]] = []
    figures: dict[str, dict[str, float]] = {}
    digests: dict[str, list[int]] = {}
    for name, case in CASES.items():
        with served(folder, case) as port:
            given = *where(folder, case, port), steps, seconds, case.ahead if case else 1, WORKERS
            with ProcessPoolExecutor(1, mp_context=FORK) as process:  # with a client of its own
                share, digests[name] = process.submit(loader_wait, *given).result()
            asked = stats(port)
        figures[name] = {"data_wait": share, **asked}
        print(f"{name}: {share:.2%} waited", flush=True)
        rows.append({"data": name, "data wait, %": f"{share:.2%}", **columns(asked)})
    if len({tuple(one) for one in digests.values()}) > 1:
        sys.exit(f"other samples than from the local disk: {digests}")
    title = f"Data wait of a loop that sleeps {1e3 * seconds:.0f} ms a step, {steps} steps"
    report(f"{title}; samples are equal", rows, figures, json_file)
    tell_limit([found["data_wait"] for name, found in figures.items() if counts(name)])


def train_all(folder: Path, rounds: int, steps: int, json_file: Path | None) -> None:
    """The wait of the quickstart, case by case, in rounds."""
    waits: dict[str, list[float]] = {name: [] for name in CASES}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    asked: dict[str, dict[str, int]] = {name: {} for name in CASES}
    losses: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, case in CASES.items():
            records, asked[name] = train(folder, case, steps)
            late = [record for record in records if record["step"] > WARM_UP]
            waits[name].append(mean(record["data_wait"] for record in late))
            elapsed = late[-1]["time"] - late[0]["time"]
            seconds[name].append(elapsed / (len(late) - 1))
            losses[name] = [record["loss"] for record in records]
            print(f"{name}: {waits[name][-1]:.2%} of a step waited", flush=True)
    if odd := [name for name in CASES if losses[name] != losses["local disk"]]:
        sys.exit(f"other losses than from the local disk: {', '.join(odd)}")
    rows = [
        {
            "data": name,
            "data wait, % of a step": spread([1e2 * one for one in waits[name]]),
            "ms per step": spread([1e3 * one for one in seconds[name]], 0),
            **columns(asked[name]),
        }
        for name in CASES
    ]
    figures = {
        name: {"data_wait": waits[name], "seconds_per_step": seconds[name], **asked[name]}
        for name in CASES
    }
    title = "Data wait of the quickstart on 2 ranks; median (min-max) over rounds; losses are equal"
    report(title, rows, figures, json_file)
    tell_limit([median(those) for name, those in waits.items() if counts(name)])


def counts(name: str) -> bool:
    """Whether the limit is for this case."""
    case = CASES[name]
    return case is not None and case.ahead > 1


def tell_limit(shares: list[float]) -> None:
    """Say whether the limit is held."""
    print(f"\nlimit 1 %: {'held' if max(shares) <= 0.01 else 'EXCEEDED'}")


def columns(asked: dict[str, int]) -> dict[str, str]:
    """What a server was asked for, in a table."""
    return {
        "requests": f"{asked.get('requests', 0):,}",
        "refused": f"{asked.get('refused', 0):,}",
        "MB": f"{asked.get('bytes', 0) / 1e6:,.0f}",
    }


def draw(folder: Path, megabytes: int) -> None:
    """A data set of random bytes in documents of 500 tokens on average."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    parts = []
    for split, size in (("train", megabytes * 500_000), ("validation", 100_000)):
        tokens = random.integers(0, EOS, size).astype("<u2")
        ends = np.unique(np.append(random.integers(1, size, size // 500), size)).astype("<u8")
        tokens[ends - 1] = EOS
        part = {kind: folder.parent.parent / f"{split}.{kind}" for kind in ("tokens", "ends")}
        tokens.tofile(part["tokens"])
        ends.tofile(part["ends"])
        parts.append(part)
    tokenizer = byte_tokenizer().to_str().encode()
    write_data_set(
        folder, {"train": parts[:1], "validation": parts[1:]}, dtype="uint16", vocab_size=257,
        eos_id=EOS, start_ids=[], tokenizer=tokenizer, about={}, shard_tokens=2_000_000,
    )  # fmt: skip


def train(folder: Path, case: Case | None, steps: int) -> tuple[list[dict], dict[str, int]]:
    """The records of a run, and what it asked the server for."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    words = [
        *("run.dir=run", f"run.steps={steps}", "run.log_every=1", "run.evaluate_every=0"),
        *("checkpoint.every=0", "elastic.snapshot_every=0", "run.device=cpu"),
    ]
    launch = [sys.executable, "-m", "trainer.cli", "train", str(QUICKSTART), *words]
    with served(folder, case) as port:
        path, more = where(folder, case, port)
        launch += [f"data.sources=[{{path: '{path}'}}]", "--nproc-per-node", "2"]
        if case:
            launch.append(f"data.ahead={case.ahead}")
        run(launch, folder, more)
        asked = stats(port)
    records = json_lines(folder / "run" / "metrics.jsonl")
    return [record for record in records if "loss" in record], asked


def where(folder: Path, case: Case | None, port: int) -> tuple[str, dict[str, str]]:
    """Path or URL of the data, and the environment that leads there."""
    if not case:
        return f"{folder}/bucket/data", {}
    return "s3://bucket/data", {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def stats(port: int) -> dict[str, int]:
    """What a server was asked for; nothing without one."""
    if not port:
        return {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats") as answer:
        found: dict[str, int] = json.loads(answer.read())
        return found


@contextmanager
def served(folder: Path, case: Case | None) -> Iterator[int]:
    """The port of a server of the data; 0 without one."""
    if not case:
        yield 0
        return
    words = [str(folder), str(case.latency), str(case.refused)]
    words.append(str(case.megabytes_per_second * 1e6))
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.support.object_server", *words],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as server:  # fmt: skip
        assert server.stdout
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


if __name__ == "__main__":
    main()
