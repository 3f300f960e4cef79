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
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from elastic import BatchPlan, World, die_with_parent, plan_batch
from elastic.world import join_world, leave_world
from trainer.compare_strategies import AFTER_SAVE, MEASURED, WARM_UP
from trainer.data.loader import load
from trainer.optimizer import decay_groups, learning_rate
from trainer.profile import peak_bytes, torch_profiler
from trainer.recipe import Recipe, load_recipe
from trainer.step import Batches
from trainer.storages import nbytes, storages
from trainer.tasks import Task, build_task
from trainer.trace_summary import read_trace
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
    options = recipe.optimizer
    # torch's own, which makes the state of DeepSpeed's flat parameters when it meets them.
    optimizer = torch.optim.AdamW(
        decay_groups(dict(module.named_parameters()), options),
        lr=options.lr, betas=options.betas, eps=options.eps, fused=True,
    )  # fmt: skip
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
    figures = _train(engine, batches, recipe, plan, world)
    batches.close()
    if world.is_main:
        path = Path(recipe.run.dir) / "deepspeed.json"
        path.write_text(json.dumps(figures), encoding="utf-8")
    leave_world(0)


def _train(
    engine: Any, batches: Batches, recipe: Recipe, plan: BatchPlan, world: World
) -> dict[str, Any]:
    """The steps of a comparison (see [Note: steps of a comparison]); returns fields of an
    `Outcome`. On all ranks."""
    seconds: list[float] = []
    losses: dict[int, float] = {}
    last = recipe.run.steps
    folder = Path(recipe.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{world.rank:05}.trace.json.gz"
    profiler = torch_profiler(
        world.device, last - MEASURED, MEASURED, lambda done: done.export_chrome_trace(str(path))
    )
    profiler.start()
    for step in range(1, last + 1):
        if step == last - MEASURED + 1:
            gc.collect()
            tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
            held = nbytes(storages(tensors, world.device))
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(world.device)
        began = time.perf_counter()
        lr = learning_rate(step, last, recipe.optimizer.lr, recipe.schedule)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        for _ in range(plan.passes):
            inputs = {key: value.to(world.device) for key, value in next(batches).items()}
            loss = engine(**inputs)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / (plan.passes * world.world_size)
        dist.all_reduce(total)
        losses[step] = total.item()
        seconds.append(time.perf_counter() - began)
        profiler.step()
    profiler.stop()
    trace = read_trace(path)
    peak = torch.tensor(peak_bytes(world.device, held, trace), dtype=torch.float64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    timed = seconds[WARM_UP : last - AFTER_SAVE - MEASURED]
    return {
        "step_seconds": timed,
        "rate": plan.global_batch * recipe.data.seq_len / median(timed),
        "losses": losses,
        "peak": int(peak.item()),
        "communication": trace.communication / sum(trace.steps),
    }


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


def _with_weights(task: Task, device: torch.device) -> torch.nn.Module:
    """The model with its initial weights, those of the trainer's own runs."""
    if task.fill is None:
        return task.model.to(device)
    module = task.model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(task.fill(name, tuple(parameter.shape)))
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
