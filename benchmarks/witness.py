"""What it costs that a second rank computes some of the micro-batches, too (elastic.witness).

A run in exact mode in which many passes are drawn, so that there are many to measure. Which steps
have one follows from step and seed. Each such step is compared with the steps before and after it
that have none, as a pair: these meet the same machine, whatever else it does. The cost at a share
of 0.01 is what such a step takes longer, times the share of the steps that have one. A run without
a witness comes after it: steps without a drawn pass must cost as much there. CPU time of all ranks
changes little on a busy machine; beside it stands wall-clock time.
"""

import json
import os
import random
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from benchmarks.support import QUICKSTART, arguments, report, run, spread, torchrun
from benchmarks.support.step_clock import seconds_by_step
from trainer.data.prepare.prepare import prepare
from trainer.recipe import load_recipe
from trainer.run.witness import draw_passes

SHARE, DRAWN, WARM_UP = 0.01, 0.3, 5


def main() -> None:
    summary = (__doc__ or "").partition("\n\n")[0]
    options = arguments(summary, steps=120, ranks=2, passes=4, seq_len=256, strategy="ddp")
    share, load = DRAWN / options.passes, os.getloadavg()[0]
    recipe = [
        str(QUICKSTART), f"run.steps={options.steps}", "run.determinism=exact", "data.workers=0",
        "model.architecture.vocab_size=257", "data.sources=[{path: data}]",
        f"strategy.name={options.strategy}", "tracking.tensorboard=false", "run.evaluate_every=0",
        "checkpoint.every=0", "elastic.snapshot_every=0", f"data.seq_len={options.seq_len}",
        "batch.micro_batch=2", f"batch.global_batch={2 * options.passes * options.ranks}",
    ]  # fmt: skip
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        directory = Path(scratch)
        _prepare_letters(directory)
        with_witness = _seconds(directory, options.ranks, recipe, share)
        without = _seconds(directory, options.ranks, recipe, 0)
    seed = load_recipe(recipe[0], recipe[1:]).run.seed
    drawn = {
        step
        for step in with_witness
        if draw_passes(seed, step, share, options.passes, options.ranks)
    }
    rows, figures = [], {}
    for place, clock in enumerate(("CPU", "wall clock")):
        took = {step: found[place] for step, found in with_witness.items() if step > WARM_UP}
        plain = {step: seconds for step, seconds in took.items() if step not in drawn}
        pairs = []
        for step in sorted(drawn & took.keys()):
            if near := [plain[one] for one in (step - 1, step + 1) if one in plain]:
                pairs.append(took[step] / mean(near))
        calm = [found[place] for step, found in without.items() if step > WARM_UP]
        cost = 100 * SHARE * options.passes * (median(pairs) - 1)
        rows.append(
            {
                "clock": clock,
                "ms per step": spread([1e3 * seconds for seconds in plain.values()], 1),
                "pairs": str(len(pairs)),
                "a step with a drawn pass": spread(pairs, 3),
                "steps without, to none": f"{median(plain.values()) / median(calm):.3f}",
                f"cost at {SHARE}, %": f"{cost:.2f}",
            }
        )
        figures[clock] = {"pairs": pairs, "plain": [*plain.values()], "calm": calm, "cost": cost}
    loads = f"load before {load:.1f}, now {os.getloadavg()[0]:.1f}"
    passes = f"{options.ranks} ranks, {options.passes} passes a step, {options.strategy}"
    report(f"elastic.witness: {passes}; {loads}", rows, figures, options.json)


def _prepare_letters(directory: Path) -> None:
    """Make a data set of drawn letters, which needs no network, in `data`."""
    draw = random.Random(0)
    corpus = directory / "corpus"
    corpus.mkdir()
    for number in range(20):
        (corpus / f"{number}.txt").write_text("".join(draw.choices("abcdefgh ", k=50_000)))
    prepare([str(corpus)], directory / "data", tokenizer="bytes", validation_fraction=0.1)


def _seconds(
    directory: Path, ranks: int, recipe: list[str], share: float
) -> dict[int, tuple[float, float]]:
    """Run to the end; returns seconds by step, see `seconds_by_step`."""
    folder = directory / f"times-{share}"
    folder.mkdir()
    factory = "benchmarks.support.step_clock:schedule"
    clock = {"factory": factory, "factory_options": {"folder": str(folder)}}
    settings = [f"run.dir=runs/{share}", f"elastic.witness={share}"]
    settings.append(f"schedule={json.dumps(clock)}")
    run(torchrun(ranks, "-m", "trainer", *recipe, *settings), directory)
    return seconds_by_step(folder)


if __name__ == "__main__":
    main()
