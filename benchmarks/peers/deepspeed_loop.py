"""The named peer: DeepSpeed, at the ZeRO stage of the recipe's sharding. Start it with torchrun and
a recipe (see benchmarks/support/peer.py)."""

import os
from typing import Any

from benchmarks.support.peer import Clock, Job, run_peer
from elastic.group.batch_plan import GroupBatchPlan, plan_batch
from trainer.recipe import ZERO_STAGES, Recipe


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On all ranks."""
    if job.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    recipe, batch = job.recipe, job.recipe.batch
    stage = next(stage for stage, sharding in ZERO_STAGES.items() if sharding == recipe.sharding)
    plan = plan_batch(batch.global_batch, job.world_size, recipe.micro_batch)
    model = job.model().to(job.device)
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=job.optimizer(parameters),
        config=config(recipe, stage, plan, sum(p.numel() for p in parameters)),
    )
    if stage and job.mixed:
        clock.note = "parameters and gradients in bf16, beside float32 weights of the optimizer"
    batches = job.micro_batches()
    for _ in range(recipe.run.steps):
        for _ in range(job.passes):
            loss = engine(**next(batches))
            engine.backward(loss)
            engine.step()
        clock.step(loss)


def config(recipe: Recipe, stage: int, plan: GroupBatchPlan, parameters: int) -> dict[str, Any]:
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


if __name__ == "__main__":
    run_peer(train)
