"""The named peer: Hugging Face Accelerate, as its documentation has gradient accumulation. Start it
with torchrun and a recipe (see benchmarks/support/peer.py)."""

import os

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.support.peer import Clock, Job, run_peer


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On all ranks."""
    recipe = job.recipe
    if job.world_size == 1:  # `accelerate launch` starts a single process without torchrun's words
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name)
    accelerator = Accelerator(
        cpu=job.device.type == "cpu",
        mixed_precision="bf16" if job.mixed else "no",
        gradient_accumulation_steps=job.passes,
        fsdp_plugin=fsdp_plugin(job) if job.sharded else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if job.sharded and accelerator.distributed_type != DistributedType.FSDP:
        raise RuntimeError(
            f"asked for FSDP2 on {job.device.type}, Accelerate chose {accelerator.distributed_type}"
        )
    model = job.model()
    model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))
    batches = job.micro_batches()
    for _ in range(recipe.run.steps):
        for _ in range(job.passes):
            batch = next(batches)
            with accelerator.accumulate(model):
                loss = model(**batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.optimizer.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
        clock.step(loss)


def fsdp_plugin(job: Job) -> FullyShardedDataParallelPlugin:
    """FSDP2, one unit per block; gradients are reduced in float32."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if job.mixed else torch.float32, reduce_dtype=torch.float32
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=job.free_after_forward,
        mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )


if __name__ == "__main__":
    run_peer(train)
