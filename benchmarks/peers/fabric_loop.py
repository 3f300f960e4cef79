"""The named peer: Lightning Fabric, as its documentation has gradient accumulation. Start it with
torchrun and a recipe (see benchmarks/support/peer.py)."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.peers.minimal_loop import shard
from benchmarks.support.peer import Clock, Job, run_peer


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On all ranks."""
    recipe = job.recipe
    fabric = build_fabric("lightning_fabric", job, lambda model: model.blocks)
    model = fabric.setup_module(job.model())
    optimizer = fabric.setup_optimizers(job.optimizer(model.parameters()))
    batches = job.micro_batches()
    for _ in range(recipe.run.steps):
        for number in range(job.passes):
            batch = next(batches)
            with fabric.no_backward_sync(model, enabled=number < job.passes - 1):
                loss = model(**batch)
                fabric.backward(loss / job.passes)
        fabric.clip_gradients(model, optimizer, max_norm=recipe.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss)


def build_fabric(package: str, job: Job, blocks: Any) -> Any:
    """A launched Fabric with the strategy of the recipe.

    FSDP2 is Fabric's ModelParallelStrategy: its FSDPStrategy is the older FSDP, and CUDA alone. It
    takes the policy of mixed precision from the function that shards the model.

    Args:
        package: lightning_fabric or lightning.fabric, which are the same code.
        job: what is trained.
        blocks: model → its repeated parts, units of sharding.
    """
    strategies = import_module(f"{package}.strategies")

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        units: Iterable[nn.Module] = blocks(model)
        shard(model, list(units), job)
        return model

    strategy: Any = "auto"
    if job.sharded:
        strategy = strategies.ModelParallelStrategy(
            parallelize, data_parallel_size=job.world_size, tensor_parallel_size=1
        )
    elif job.world_size > 1:
        strategy = strategies.DDPStrategy(gradient_as_bucket_view=True)
    fabric = import_module(package).Fabric(
        accelerator=job.device.type,
        devices=job.world_size,
        strategy=strategy,
        precision="bf16-mixed" if job.mixed and not job.sharded else "32-true",
    )
    fabric.launch()
    return fabric


if __name__ == "__main__":
    run_peer(train)
