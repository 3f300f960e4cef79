"""KGAT against the baselines that the same code trains, seed by seed, on MovieLens 100k.

BPR-MF; the same for as many CF steps more with KGAT's learning rates; and KGAT from its embeddings.
One rank each; a seed decides the initial weights, the order of the samples and their negatives. The
split and the hyper-parameters are those of the recipe for every seed.
"""

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

from benchmarks.support import ROOT, arguments, report, run

TITLE = "KGAT and its baselines on MovieLens 100k, test part; mean (standard deviation) over seeds"
BPR_MF = ["model.kgat.layers=[]", "data.graph.triples_per_sample=0"]
STEPS, MORE, KGAT_STEPS = 1000, 50, 105
METRICS = ("recall@20", "ndcg@20")


def main() -> None:
    options = arguments(__doc__ or "", seeds=5, first=0, graph=str(ROOT / "data" / "ml-100k"))
    graph = f"data.graph.path={Path(options.graph).resolve()}"
    figures: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory(prefix="perdure-kgat-") as folder:
        directory = Path(folder)

        def train(name: str, seed: int, steps: int, *overrides: str) -> str:
            """Returns the last checkpoint."""
            command = [sys.executable, "-m", "trainer.cli", "train", "--nproc-per-node", "1"]
            settings = [f"run.dir={name}-{seed}", f"run.seed={seed}", f"run.steps={steps}"]
            settings += [f"run.evaluate_every={steps}", graph]
            run(
                [*command, str(ROOT / "recipes/kgat_ml100k.yaml"), *settings, *overrides], directory
            )
            lines = (directory / f"{name}-{seed}" / "metrics.jsonl").read_text().splitlines()
            last = next(r for r in map(json.loads, reversed(lines)) if METRICS[0] in r)
            figures.setdefault(name, []).append({key: last[key] for key in METRICS})
            if name == "KGAT":
                popular = {key: last[f"popularity_{key}"] for key in METRICS}
                figures.setdefault("popularity", []).append(popular)
            print(f"seed {seed}, {name}: {figures[name][-1]}", flush=True)
            return str(directory / f"{name}-{seed}" / "checkpoints" / f"step-{steps:08}")

        for seed in range(options.first, options.first + options.seeds):
            start = train(
                "BPR-MF", seed, STEPS, *BPR_MF, "model.init_from=null", "optimizer.lr=1e-2"
            )
            begin = f"model.init_from={start}"
            train("BPR-MF longer", seed, MORE, *BPR_MF, begin)
            train("KGAT", seed, KGAT_STEPS, begin)
    rows = [
        {"": name} | {key: _spread([one[key] for one in found]) for key in METRICS}
        for name, found in figures.items()
    ]
    for baseline in ("BPR-MF", "BPR-MF longer"):
        leads = {
            key: [
                ours[key] - theirs[key]
                for ours, theirs in zip(figures["KGAT"], figures[baseline], strict=True)
            ]
            for key in METRICS
        }
        rows.append({"": f"KGAT - {baseline}"} | {key: _spread(leads[key]) for key in METRICS})
    report(TITLE, rows, figures, options.json)


def _spread(values: list[float]) -> str:
    return f"{mean(values):.4f} ({stdev(values) if len(values) > 1 else 0.0:.4f})"


if __name__ == "__main__":
    main()
