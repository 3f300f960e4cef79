"""Weights and optimizer state in fewer bytes: what a parameter takes, and what that costs in loss.

The quickstart on one rank, with each of several formats: the same initial weights, the same data in
the same order. Bytes are those of the storages of weights, gradients and optimizer state when the
optimizer runs. The losses are that of the validation set after the last step, and the mean of those
of the last hundred steps. Where others use the machine too, times tell little.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support import QUICKSTART, arguments, json_lines, report, run, workspace
from checkpointing.format.tensors import local_tensor
from elastic.world import World
from trainer.optim.method import update
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import parallelize
from trainer.recipe import load_recipe
from trainer.tasks.task import bare_model

CASES = {
    "fp32": (),
    "bf16": ("optimizer.state_dtype=bf16",),
    "int8": ("optimizer.state_dtype=int8",),
    "master-bf16": ("precision.master=bf16_stochastic", "optimizer.state_dtype=bf16"),
    "master-int8": ("precision.master=bf16_stochastic", "optimizer.state_dtype=int8"),
}
TITLES = {
    "fp32": "all in float32",
    "bf16": "state in bf16",
    "int8": "state in int8",
    "master-bf16": "weights and state in bf16",
    "master-int8": "weights in bf16, state in int8",
}
LAST = 100
"""Steps at the end whose losses are averaged."""
LOG_EVERY = 10


def main() -> None:
    options = arguments(__doc__ or "", steps=2000, cases=",".join(CASES))
    figures: dict[str, dict[str, float]] = {}
    with workspace() as directory:
        for case in options.cases.split(","):
            figures[case] = {"bytes": bytes_a_parameter(CASES[case])} | trained(
                CASES[case], options.steps, directory, f"runs/{case}"
            )
            print(f"{case}: {figures[case]}", flush=True)
    first = figures[next(iter(figures))]
    rows = [
        {
            "variant": TITLES[case],
            "bytes a parameter": f"{found['bytes']:.2f}",
            "validation loss": f"{found['validation']:.4f}",
            "ratio": f"{found['validation'] / first['validation']:.4f}",
            "training loss": f"{found['training']:.4f}",
            "its ratio": f"{found['training'] / first['training']:.4f}",
            "steps/s, ratio": f"{first['seconds'] / found['seconds']:.2f}",
        }
        for case, found in figures.items()
    ]
    report(f"The quickstart after {options.steps} steps, one rank", rows, figures, options.json)


def trained(overrides: Iterable[str], steps: int, directory: Path, folder: str) -> dict[str, float]:
    """Losses of a run at its end, and its median time of a step."""
    settings = [
        *(f"run.dir={folder}", f"run.steps={steps}", f"run.log_every={LOG_EVERY}"),
        *(f"run.evaluate_every={steps}", "checkpoint.every=0", "elastic.snapshot_every=0"),
        f"schedule.warmup_steps={min(20, steps // 2)}",
    ]
    command = [sys.executable, "-m", "trainer.cli", "train", "--nproc-per-node", "1"]
    run([*command, str(QUICKSTART), *settings, *overrides], directory)
    records = json_lines(directory / folder / "metrics.jsonl")
    losses = [one["loss"] for one in records if "loss" in one and one["step"] > steps - LAST]
    validation = [one["validation_loss"] for one in records if "validation_loss" in one]
    seconds = [one["step_seconds_p50"] for one in records if "step_seconds_p50" in one]
    return {
        "validation": validation[-1],
        "training": mean(losses),
        "seconds": median(seconds[1:] or seconds),
    }


def _filled(_name: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.full(tuple(shape), 0.02)


def bytes_a_parameter(overrides: Iterable[str]) -> float:
    """Bytes of weights, gradients and optimizer state after a step, for each parameter."""
    recipe = load_recipe(str(QUICKSTART), ["run.device=cpu", *overrides])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, blocks, _ = bare_model(recipe)
        count = sum(parameter.numel() for parameter in model.parameters())
        world = World(0, 0, 1, 1, 1, 0, 0, None, torch.device("cpu"))
        mesh = build_mesh(recipe, world)
        built = parallelize(model, blocks, mesh, recipe, world.device, _filled)
        built.draw_weights()
        optimizer = build_optimizer(built.optimized, recipe.optimizer, zeros_like=built.zeros_like)
        tokens = torch.zeros((1, recipe.data.seq_len), dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens}
        if recipe.data.document_mask:
            batch["document_ids"] = torch.zeros_like(tokens, dtype=torch.int32)
        for forward in built.run([batch], train=True):
            forward.root = _loss(forward(batch))
        weights = [*built.parameters.values()]
        held = nbytes([*weights, *(one.grad for one in weights if one.grad is not None)])
        update(optimizer, built.portions(optimizer), 1.0)
        kept = [one for state in optimizer.state.values() for one in state.values()]
        return (held + nbytes(kept)) / count
    finally:
        dist.destroy_process_group()


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def _loss(found: Any) -> Tensor:
    loss: Tensor = found["loss"]
    return loss


if __name__ == "__main__":
    main()
