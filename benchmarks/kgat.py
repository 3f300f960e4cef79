"""KGAT against the baselines that the same code trains, seed by seed.

BPR-MF; the same for as many CF steps more with KGAT's learning rates; and KGAT from its embeddings.
One rank each; a seed decides the split, the initial weights, the order of the samples and their
negatives. The hyper-parameters are those of the recipe for every seed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

from benchmarks.support import ROOT, arguments, json_lines, report, run

BPR_MF = ["model.factory_options.layers=[]", "data.factory_options.triples_per_sample=0"]
METRICS = ("recall@20", "ndcg@20")
BASELINES = ("BPR-MF", "BPR-MF longer")


@dataclass(frozen=True)
class Case:
    title: str
    recipe: str
    folder: str
    bpr_mf: list[str]
    """Overrides of the first run, besides those of any BPR-MF."""
    steps: int
    """Steps of BPR-MF."""
    more: int
    """CF steps among those of KGAT."""
    kgat_steps: int


CASES = {
    "ml100k": Case(
        "MovieLens 100k", "kgat_ml100k.yaml", "ml-100k", ["optimizer.lr=1e-2"], 1000, 50, 105
    ),
    "lastfm": Case(
        "Last.FM", "kgat_lastfm.yaml", "lastfm", ["optimizer.lr=3e-3"], 2850, 1140, 1440
    ),
}


def main() -> None:
    options = arguments(__doc__ or "", case="lastfm", seeds=5, first=0, graph="", shorter=1)
    case = CASES[options.case]
    graph = Path(options.graph or ROOT / "data" / case.folder).resolve()
    figures: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory(prefix="perdure-kgat-") as folder:
        directory = Path(folder)

        def train(name: str, seed: int, steps: int, *overrides: str) -> str:
            """Returns the last checkpoint."""
            steps = -(-steps // options.shorter)
            command = [sys.executable, "-m", "trainer.cli", "train", "--nproc-per-node", "1"]
            settings = [f"run.dir={name}-{seed}", f"run.seed={seed}", f"run.steps={steps}"]
            settings += [f"data.factory_options.path={graph}", f"run.evaluate_every={steps}"]
            settings += [f"data.factory_options.split_seed={seed}"]
            recipe = str(ROOT / "recipes" / case.recipe)
            run([*command, recipe, *settings, *overrides], directory)
            records = json_lines(directory / f"{name}-{seed}" / "metrics.jsonl")
            last = next(r for r in reversed(records) if METRICS[0] in r)
            figures.setdefault(name, []).append({key: last[key] for key in METRICS})
            if name == "KGAT":
                popular = {key: last[f"popularity_{key}"] for key in METRICS}
                figures.setdefault("popularity", []).append(popular)
            print(f"seed {seed}, {name}: {figures[name][-1]}", flush=True)
            return str(directory / f"{name}-{seed}" / "checkpoints" / f"step-{steps:08}")

        for seed in range(options.first, options.first + options.seeds):
            start = train("BPR-MF", seed, case.steps, *BPR_MF, "model.init_from=null", *case.bpr_mf)
            begin = f"model.init_from={start}"
            train("BPR-MF longer", seed, case.more, *BPR_MF, begin)
            train("KGAT", seed, case.kgat_steps, begin)
    rows = [
        {"": name} | {key: _spread([one[key] for one in found]) for key in METRICS}
        for name, found in figures.items()
    ]
    for baseline in BASELINES:
        leads = {
            key: [
                ours[key] - theirs[key]
                for ours, theirs in zip(figures["KGAT"], figures[baseline], strict=True)
            ]
            for key in METRICS
        }
        rows.append({"": f"KGAT - {baseline}"} | {key: _lead(leads[key]) for key in METRICS})
    title = (
        f"KGAT and its baselines on {case.title}, test part; mean (standard deviation) over seeds"
    )
    report(title, rows, figures, options.json)


def _spread(values: list[float]) -> str:
    return f"{mean(values):.4f} ({stdev(values) if len(values) > 1 else 0.0:.4f})"


def _lead(values: list[float]) -> str:
    ahead = sum(value > 0 for value in values)
    return f"{_spread(values)}, ahead in {ahead} of {len(values)}"


if __name__ == "__main__":
    main()
