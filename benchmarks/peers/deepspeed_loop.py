"""The named peer: DeepSpeed, with the configuration that `perdure compare --against deepspeed`
gives it. Start it with torchrun and a recipe (see benchmarks/support/peer.py)."""

import os

from benchmarks.support.peer import Clock, Job, run_peer
from elastic import plan_batch
from trainer.compare_deepspeed import config


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On all ranks."""
    if job.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    recipe, batch = job.recipe, job.recipe.batch
    stage = 0 if not job.sharded else 3 if job.free_after_forward else 2
    plan = plan_batch(batch.global_batch, job.world_size, batch.micro_batch)
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


if __name__ == "__main__":
    run_peer(train)
