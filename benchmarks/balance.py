"""What `batch.balance: speed` saves where one of two ranks is slow: seconds per step, beside equal
shares and beside the ideal.

A small model on 2 ranks, 16 sequences a step, under DDP (in exact mode), ZeRO-1 and ZeRO-3. The
slow rank takes three times as long for a sequence as the fast one, in one of two ways:

- held: control groups give the fast rank a core, and the slow one a third of a core (cgroup v1 and
  root; left out elsewhere);
- asleep: both ranks sleep in each layer, the slow one three times as long.

The ideal divides the work at will: 1 / (1/a + 1/b), where a and b are the seconds in which each
rank computes the whole batch alone. Steps before the shares change are left out. A case counts with
the step that a tenth of its steps are faster than, because other work on the machine only adds to
them. Each round runs all cases, so a ratio is of one round; the table has medians of rounds.
"""

import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support import arguments, environment, json_lines, report, spread
from benchmarks.support.control_groups import NoLimitError, cpu_limit
from benchmarks.support.slow_rank import GLOBAL_BATCH, STRATEGIES, write_recipe

HELD = 1.0, 1 / 3
"""Cores of the fast and of the slow rank."""
ASLEEP = 0.005, 0.015
"""Seconds that a layer of them sleeps in forward for a sequence."""
WARM_UP = 28
"""Steps after which shares must have changed."""
CASES: dict[str, tuple[tuple[int, ...], str]] = {
    "fast alone": ((0,), "equal"),
    "slow alone": ((1,), "equal"),
    "equal": ((0, 1), "equal"),
    "speed": ((0, 1), "speed"),
}
"""Name → (its ranks: 0 for the fast one, 1 for the slow one; `batch.balance`)."""


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, steps=24, way="all", strategy="all", tokens=2048)
    ways = ("held", "asleep") if options.way == "all" else (options.way,)
    strategies = [*STRATEGIES] if options.strategy == "all" else [options.strategy]
    rows, figures = [], {}
    print(f"load of the last minute at the start: {os.getloadavg()[0]:.1f}", flush=True)
    for way, strategy in product(ways, strategies):
        try:
            rounds = [_round(way, strategy, options) for _ in range(options.rounds)]
        except NoLimitError as error:
            print(f"{way}: left out: {error}")
            continue
        for case in rounds[0]:
            seconds = [one[case] for one in rounds]
            ratios = [one[case] / one["ideal"] for one in rounds]
            rows.append(
                {
                    "slow rank": way,
                    "strategy": strategy,
                    "case": case,
                    "ms per step": spread([1e3 * value for value in seconds], 0),
                    "beside the ideal": spread(ratios),
                }
            )
            figures[f"{way}, {strategy}, {case}"] = {"seconds": seconds, "ratio": median(ratios)}
    print(f"load of the last minute at the end: {os.getloadavg()[0]:.1f}")
    title = "Seconds per step where one of two ranks takes three times as long; median (min-max)"
    report(title, rows, figures, options.json)


def _round(way: str, strategy: str, options: Namespace) -> dict[str, float]:
    """Seconds of a step by case, the ideal among them."""
    found = {}
    for case, (ranks, balance) in CASES.items():
        alone = len(ranks) == 1
        first = WARM_UP if balance == "speed" else 2
        last = first + (options.steps // 3 if alone else options.steps)
        seconds = [ASLEEP[kind] if way == "asleep" else 0.0 for kind in ranks]
        with TemporaryDirectory(prefix="perdure-bench-") as scratch, ExitStack() as stack:
            groups = [
                str(stack.enter_context(cpu_limit(HELD[kind]))) for kind in ranks if way == "held"
            ]
            write_recipe(Path(scratch), strategy, balance, last, seconds, groups, options.tokens)
            _run(Path(scratch), len(ranks))
            records = json_lines(Path(scratch, "run/metrics.jsonl"))
            events = json_lines(Path(scratch, "run/ledger.jsonl"))
        if balance == "speed":
            print(f"{way}, {strategy}: {_shares_of(events, first)}", flush=True)
        times = [
            record["step_seconds_p50"]
            for record in records
            if record["step"] > first and "step_seconds_p50" in record
        ]
        found[case] = quantiles(times, n=10, method="inclusive")[0]
        print(f"{way}, {strategy}, {case}: {1e3 * found[case]:.0f} ms", flush=True)
    found["ideal"] = 1 / (1 / found["fast alone"] + 1 / found["slow alone"])
    return found


def _shares_of(events: Sequence[Mapping[str, Any]], first: int) -> str:
    """What a run's ledger says of its shares after step `first`; exits if they changed later."""
    changes = [event for event in events if event.get("event") == "shares"]
    if not changes or changes[0]["sequence"] > first * GLOBAL_BATCH:
        sys.exit(f"shares had not changed by step {first}: {changes}")
    return "; ".join(str(change["what"]) for change in changes)


def _run(folder: Path, ranks: int) -> None:
    """Run one job to its end, a process for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(_rank(folder, {**world, "RANK": rank, "LOCAL_RANK": rank}))
            for rank in range(ranks)
        ]
        for job in jobs:
            output, _ = job.communicate()
            if job.returncode:
                sys.exit(f"a rank failed:\n{output}")


@contextmanager
def _rank(folder: Path, place: dict[str, int]) -> Iterator["subprocess.Popen[str]"]:
    """Start a rank that does not outlive the block. `place`: added to its environment."""
    given = {name: str(value) for name, value in place.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "recipe.yaml"],
        cwd=folder,
        env={**environment(), "MASTER_ADDR": "127.0.0.1", **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
