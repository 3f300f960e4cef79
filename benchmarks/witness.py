"""What it costs that a second rank computes some of the micro-batches, too (elastic.witness).

A run in exact mode of which many passes are drawn, so that there are many to measure. Which steps
have one follows from step and seed. Each such step is compared with the step before and the one
after it that have none: they meet the same machine, whatever else it does. The difference, by the
share of steps that have a drawn pass at a share of 0.01, is the cost. A second run without a
witness takes turns with the first, and shows what steps without a drawn pass cost more.
"""

import os
import random
import sys
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from benchmarks.support import (
    QUICKSTART,
    arguments,
    json_lines,
    report,
    spread,
    torchrun,
)
from benchmarks.support.turns import PausableJob, take_turns
from trainer.data.prepare.prepare import prepare
from trainer.recipe import load_recipe
from trainer.run.witness import draw_passes

WITH, WITHOUT = "witness", "none"
SHARE, DRAWN, TURN, WARM_UP = 0.01, 0.3, 2.0, 5


def main() -> None:
    summary = (__doc__ or "").partition("\n\n")[0]
    options = arguments(summary, steps=400, ranks=2, passes=4, seq_len=256)
    recipe = [
        str(QUICKSTART), f"run.steps={options.steps}", "run.determinism=exact", "data.workers=0",
        "model.architecture.vocab_size=257", "data.sources=[{path: data}]", "strategy.name=ddp",
        "run.evaluate_every=0", "checkpoint.every=0", "elastic.snapshot_every=0",
        f"data.seq_len={options.seq_len}", "batch.micro_batch=2",
        f"batch.global_batch={2 * options.passes * options.ranks}",
        "tracking.tensorboard=false",
    ]  # fmt: skip
    load = os.getloadavg()[0]
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        directory = Path(scratch)
        _prepare_words(directory)
        jobs = {}
        for name, share in ((WITH, DRAWN / options.passes), (WITHOUT, 0)):
            settings = [f"run.dir=runs/{name}", f"elastic.witness={share}"]
            command = torchrun(options.ranks, "-m", "trainer", *recipe, *settings)
            jobs[name] = PausableJob(command, directory, directory / name)
            ledger = directory / "runs" / name / "ledger.jsonl"
            jobs[name].run_until(partial(_is_warm, ledger))
            if jobs[name].code is not None:
                sys.exit((directory / f"{name}.err").read_text())
            jobs[name].pause()
        take_turns(list(jobs.values()), TURN)
        seconds = {name: _seconds(directory / "runs" / name / "ledger.jsonl") for name in jobs}
    seed = load_recipe(recipe[0], recipe[1:]).run.seed
    share = DRAWN / options.passes
    drawn = {
        step
        for step in seconds[WITH]
        if draw_passes(seed, step, share, options.passes, options.ranks)
    }
    plain = [step for step in seconds[WITH] if step > WARM_UP and step not in drawn]
    pairs = []
    for step in sorted(drawn):
        near = [one for one in (step - 1, step + 1) if one in plain]
        if step > WARM_UP and near:
            pairs.append(seconds[WITH][step] / mean(seconds[WITH][one] for one in near))
    calm = [seconds[WITH][step] / seconds[WITHOUT][step] for step in plain]
    cost = [100 * SHARE * options.passes * (ratio - 1) for ratio in pairs]
    row = {
        "passes a step": str(options.passes),
        "ms per step": spread([1e3 * seconds[WITH][step] for step in plain], 1),
        "pairs": str(len(pairs)),
        "a step with a drawn pass": spread(pairs, 3),
        "a step without, to none": f"{median(calm):.3f}",
        f"cost at {SHARE}, %": f"{median(cost):.2f}",
    }
    loads = f"load before {load:.1f}, now {os.getloadavg()[0]:.1f}"
    title = f"elastic.witness on {options.ranks} ranks; {loads}"
    report(title, [row], {"pairs": pairs, "without": calm, "cost": cost}, options.json)


def _prepare_words(directory: Path) -> None:
    """Make a data set of drawn letters, which needs no network, in `data`."""
    draw = random.Random(0)
    corpus = directory / "corpus"
    corpus.mkdir()
    for number in range(20):
        (corpus / f"{number}.txt").write_text("".join(draw.choices("abcdefgh ", k=50_000)))
    prepare([str(corpus)], directory / "data", tokenizer="bytes", validation_fraction=0.1)


def _is_warm(ledger: Path) -> bool:
    return len(_seconds(ledger)) >= WARM_UP


def _seconds(ledger: Path) -> dict[int, float]:
    """Seconds of each step so far; empty before there is a ledger."""
    lines = json_lines(ledger) if ledger.exists() else []
    return {line["step"]: line["seconds"] for line in lines if line["kind"] == "step"}


if __name__ == "__main__":
    main()
