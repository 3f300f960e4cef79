"""The named peer: the loop that one would write by hand, with FSDP2 or DDP straight from PyTorch's
tutorials. Start it with torchrun and a recipe (see benchmarks/support/peer.py)."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from benchmarks.support.peer import Clock, Job, run_peer

KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""Results that selective recomputation keeps."""


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On all ranks."""
    recipe = job.recipe
    dist.init_process_group("nccl" if job.device.type == "cuda" else "gloo")
    model = job.model().to(job.device)
    if getattr(recipe.precision, "master", "fp32") != "fp32":
        model = model.bfloat16()
    if recipe.strategy.activation_checkpointing != "none":
        options: dict[str, Any] = {"preserve_rng_state": False}
        if recipe.strategy.activation_checkpointing == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, list(KEPT))
        for number, block in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(block, **options)
    blocks = list(model.blocks)
    if recipe.strategy.compile:
        for part in (*blocks, *model.compiled_beside_blocks):
            part.compile()
    module: Any = model
    if job.sharded:
        shard(module, blocks, job)
    elif job.world_size > 1:
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = torch.autocast(
        job.device.type, dtype=torch.bfloat16, enabled=job.mixed and not job.sharded
    )
    optimizer = job.optimizer(model.parameters())
    batches = job.micro_batches()
    for _ in range(recipe.run.steps):
        for number in range(job.passes):
            batch = next(batches)
            last = number == job.passes - 1
            sync = nullcontext()
            if job.sharded:
                module.set_requires_gradient_sync(last)
            elif job.world_size > 1 and not last:
                sync = module.no_sync()
            with sync:
                with autocast:
                    loss = module(**batch) / job.passes
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss * job.passes)


def shard(model: torch.nn.Module, blocks: list[torch.nn.Module], job: Job) -> None:
    """FSDP2 in place, one unit per block and one for the rest."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if job.mixed else torch.float32, reduce_dtype=torch.float32
    )
    mesh = init_device_mesh(job.device.type, (job.world_size,))
    for unit in (*blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=job.free_after_forward)


if __name__ == "__main__":
    run_peer(train)
