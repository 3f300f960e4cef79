"""A rank that leaves loss and gradients of one step on pairs under several layouts in
OUT-RANK.safetensors: python -m tests.distributed.preference_gradients OUT RECIPE 'key=value …' …"""

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing import load_model
from elastic.group.batch_plan import plan_batch
from elastic.world import World
from tests.distributed.lora_gradients import leave
from trainer.data.loader import TokenStream
from trainer.data.stream import COUNTED
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import parallelize
from trainer.recipe import Recipe
from trainer.tasks.task import build_task


def gradients(recipe: Recipe, world: World) -> dict[str, Tensor]:
    """Of all pairs, by FQN, whole; with what the objective gives beside them."""
    task, mesh = build_task(recipe), build_mesh(recipe, world)
    stream = task.stream
    assert isinstance(stream, TokenStream)
    if recipe.objective.referenced:
        stream.reference = np.load("reference.npy")
    made = parallelize(task.model, task.blocks, mesh, recipe, world.device, task.fill)
    load_model(recipe.model.init_from or "", made.tensors, group=dist.group.WORLD)
    plan = plan_batch(recipe.batch.global_batch, mesh.dp_size, recipe.micro_batch)
    micro_batches = list(plan.micro_batches(mesh.dp_rank, 0))
    batches = [stream.fetch(one.positions) for one in micro_batches]
    counts = [one.pop(COUNTED) for one in batches]
    pairs = stream.documents // 2
    sums: dict[str, Tensor] = {}

    for forward in made.run(batches, train=True):
        number = forward.number
        means = forward(batches[number])
        assert isinstance(means, dict)
        share = counts[number] * micro_batches[number].real / pairs
        for name, value in means.items():
            sums[name] = sums.get(name, 0) + value.detach() * share * mesh.counts
        forward.root = means["loss"] * share
    made.collect_gradients()
    for name in sorted(sums):
        dist.all_reduce(sums[name], group=mesh.group)
    found = {f"means.{name}": value for name, value in sums.items()}
    for name, parameter in made.optimized.items():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


if __name__ == "__main__":
    leave(gradients)
