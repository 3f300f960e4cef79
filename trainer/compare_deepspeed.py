"""What torchrun starts in each rank for `perdure compare --against deepspeed`: the model, the order
of the data, the batch and the optimizer of a recipe, trained by DeepSpeed.

    torchrun … -m trainer.compare_deepspeed STAGE RECIPE.yaml [key.sub=value …]

Rank 0 leaves `deepspeed.json` in the run directory. DeepSpeed keeps its tensors in buffers of its
own, so memory is told as a peak alone, and no checkpoint is written.
"""

import gc
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from elastic import BatchPlan, die_with_parent, plan_batch
from elastic.world import join_world, leave_world
from trainer.compare_strategies import LOG_EVERY, MEASURED, WARM_UP
from trainer.data.loader import load
from trainer.measure import Trace, storages
from trainer.optimizer import build_optimizer, learning_rate
from trainer.recipe import Recipe, RecipeError, load_recipe
from trainer.tasks import Task, build_task
from trainer.train import requests


def main(arguments: list[str]) -> None:
    """Run one rank; never returns."""
    die_with_parent()
    recipe = load_recipe(arguments[1], arguments[2:])
    world = join_world(recipe.run.device, recipe.elastic.timeout_seconds)
    batch = recipe.batch
    plan = plan_batch(batch.global_batch, world.world_size, batch.micro_batch)
    if plan.global_batch != plan.world_size * plan.passes * plan.micro_batch:
        print(f"error: batch: DeepSpeed wants equal micro-batches, and this is {plan}")
        leave_world(2)
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    task = build_task(recipe)
    module = _with_weights(task, world.device)
    optimizer = build_optimizer(dict(module.named_parameters()), recipe.optimizer)
    optimizer.state.clear()  # it is to hold the state of DeepSpeed's own flat parameters
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=config(recipe, int(arguments[0]), plan, task.parameter_count),
        dist_init_required=False,
    )
    batches = load(
        task.stream,
        requests(plan, world.rank, 0),
        workers=0,
        pin_memory=world.device.type == "cuda",
    )
    seconds, losses, trace, held = [], {}, None, 0
    for step in range(1, recipe.run.steps + 1):
        if step == recipe.run.steps - MEASURED + 1:
            gc.collect()
            held = sum(storages(_live_tensors(), world.device).values())
            trace = Trace(world.device)
        began = time.perf_counter()
        lr = learning_rate(step, recipe.run.steps, recipe.optimizer.lr, recipe.schedule)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        with trace.step() if trace else nullcontext():
            for _ in range(plan.passes):
                inputs = {key: value.to(world.device) for key, value in next(batches).items()}
                loss = engine(**inputs)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / (plan.passes * world.world_size)
            dist.all_reduce(total)
        if step % LOG_EVERY == 0 or step == recipe.run.steps:
            losses[step] = total.item()
        seconds.append(time.perf_counter() - began)
    batches.close()
    peak = torch.zeros((), dtype=torch.float64)
    communication = 0.0
    folder = Path(recipe.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    if trace:
        trace.stop(folder / f"rank-{world.rank:05}.trace.json.gz")
        peak += trace.peak(held)
        communication = trace.communication
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if world.is_main:
        timed = seconds[WARM_UP : _last_timed(recipe)]
        rate = plan.global_batch * recipe.data.seq_len / median(timed)
        figures: dict[str, Any] = {
            "step_seconds": timed,
            "tokens_per_second": rate,
            "losses": losses,
            "peak": int(peak.item()),
            "communication": communication,
        }
        (folder / "deepspeed.json").write_text(json.dumps(figures), encoding="utf-8")
    leave_world(0)


def config(recipe: Recipe, stage: int, plan: BatchPlan, parameters: int) -> dict[str, Any]:
    """A recipe in DeepSpeed's words, for one of its ZeRO stages. Buckets are those it has unless
    told otherwise, but no larger than the model: they are allocated whole."""
    dtype = recipe.precision.dtype
    precision: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
    if dtype != "fp32" and stage == 0:  # without ZeRO it has none with gradients in float32
        name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
        precision |= {"torch_autocast": {"enabled": True, "dtype": name}}
    elif dtype != "fp32":
        precision |= {dtype: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.passes,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": min(500_000_000, parameters),
            "allgather_bucket_size": min(500_000_000, parameters),
            "stage3_prefetch_bucket_size": min(50_000_000, parameters),
        },
        "zero_allow_untested_optimizer": True,
        **precision,
        "gradient_clipping": recipe.optimizer.clip_norm,
        "steps_per_print": 1 << 30,
    }


def _last_timed(recipe: Recipe) -> int:
    every = recipe.checkpoint.every
    if not isinstance(every, int):
        raise RecipeError("checkpoint.every: a comparison sets it to the last timed step")
    return every


def _with_weights(task: Task, device: torch.device) -> torch.nn.Module:
    """The model with its initial weights, those of the trainer's own runs."""
    if task.fill is None:
        return task.model.to(device)
    module = task.model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(task.fill(name, tuple(parameter.shape)))
    return module


def _live_tensors() -> list[torch.Tensor]:
    return [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]


if __name__ == "__main__":
    main(sys.argv[1:])
