"""Data in an object store: what a run waits for it, beside a local disk.

The quickstart's model trains on tokens that are drawn, from a disk and from servers that answer
late, refuse a share of the requests, or share a slow link (benchmarks/support/object_server.py).
Losses must be equal. The share of a step that a rank waits for data is `data_wait` of its records.
"""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.support import QUICKSTART, ROOT, arguments, json_lines, report, run, spread
from trainer.data.prepare.writer import write_data_set
from trainer.data.tokenizer import byte_tokenizer

EOS = 256
WARM_UP = 20
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
    "50 ms": Case(),
    "50 ms, 5 % 503": Case(refused=0.05),
    "50 ms, 5 % 503, 1 ahead": Case(refused=0.05, ahead=1),
    "50 ms, link of 16 MB/s": Case(megabytes_per_second=16),
}


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, steps=120, megabytes=200)
    waits: dict[str, list[float]] = {name: [] for name in CASES}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    asked: dict[str, dict[str, int]] = {name: {} for name in CASES}
    losses: dict[str, list[float]] = {}
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        folder = Path(scratch)
        draw(folder / "bucket" / "data", options.megabytes)
        for _ in range(options.rounds):
            for name, case in CASES.items():
                records, asked[name] = train(folder, case, options.steps)
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
            "requests": f"{asked[name].get('requests', 0):,}",
            "refused": f"{asked[name].get('refused', 0):,}",
            "MB": f"{asked[name].get('bytes', 0) / 1e6:,.0f}",
        }
        for name in CASES
    ]
    figures = {
        name: {"data_wait": waits[name], "seconds_per_step": seconds[name], **asked[name]}
        for name in CASES
    }
    title = "Data wait of the quickstart on 2 ranks; median (min-max) over rounds; losses are equal"
    report(title, rows, figures, options.json)
    worst = max(median(waits[name]) for name, case in CASES.items() if case and case.ahead > 1)
    print(f"\nlimit 1 %: {'held' if worst <= 0.01 else 'EXCEEDED'}")


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
        eos_id=EOS, start_ids=[], tokenizer=tokenizer, about={}, shard_tokens=10_000_000,
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
        path, more = f"{folder}/bucket/data", {}
        if case:
            path = "s3://bucket/data"
            launch.append(f"data.ahead={case.ahead}")
            more = {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        ranks = ["--nproc-per-node", "2"]
        run([*launch, f"data.sources=[{{path: '{path}'}}]", *ranks], folder, more)
        asked = {}
        if case:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats") as answer:
                asked = json.loads(answer.read())
    records = json_lines(folder / "run" / "metrics.jsonl")
    return [record for record in records if "loss" in record], asked


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
