"""Check that replicas hold the same bits. Ranks that start from the same weights and apply the same
gradients stay bitwise equal; a difference means that a machine computes wrongly."""

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from checkpointing.format.tensors import local_tensor
from elastic.node.exchange import gathered, received
from trainer.parallel.mesh import LAYERS, PIPELINE, REPLICATE
from trainer.run.state import Run


def diverged_ranks(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, *, ends: bool = False
) -> list[int]:
    """Return the global ranks whose tensors differ from the majority of a group of replicas;
    without a majority, all compared ranks. With `ends` only the first and last rank are compared.
    On all ranks of the group, each with its own tensors."""
    # A checksum of 64 bits: the sum of all 8-byte words, those of each tensor times an odd number.
    checksum = None
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        words = flat[: flat.numel() // 8 * 8].view(torch.int64).sum()
        total = (words + flat[flat.numel() // 8 * 8 :].sum()) * (2 * number + 1)
        checksum = total if checksum is None else checksum + total
    if checksum is None:
        return []
    values, ranks = gathered(checksum, group), dist.get_process_group_ranks(group)
    if ends:
        values, ranks = [values[0], values[-1]], [ranks[0], ranks[-1]]
    value, count = Counter(values).most_common(1)[0]
    if count * 2 <= len(values):
        return ranks
    return [rank for rank, own in zip(ranks, values, strict=True) if own != value]


def check_replicas(run: Run) -> None:
    """Log the ranks whose weights differ from their replicas, if `elastic.check_replicas_every`
    says that a check is due. On all ranks."""
    every, mesh = run.recipe.elastic.check_replicas_every, run.mesh.device_mesh
    copied = [name for name in (REPLICATE, *LAYERS) if name in (mesh.mesh_dim_names or ())]
    pipeline = run.model.pipeline
    if not every or not run.due(every) or not (copied or pipeline):
        return
    weights = [*run.model.parameters.values()]
    held = {name: [weight for weight in weights if _on_all(name, weight)] for name in LAYERS}
    held[REPLICATE] = weights
    ranks = [
        rank
        for name in copied
        for rank in diverged_ranks(map(local_tensor, held[name]), mesh[name].get_group())
    ]
    if pipeline:  # a tied embedding is on the first and last rank only
        none = local_tensor(weights[0])[:0]  # empty, on the device that holds the weights
        tied = none if pipeline.tied is None else local_tensor(pipeline.tied)
        ranks += diverged_ranks([tied], mesh[PIPELINE].get_group(), ends=True)
    flags = torch.zeros(run.world.world_size, device=mesh.device_type)
    flags[ranks] = 1  # summed, because each group of replicas compares only its own shard
    dist.all_reduce(flags)
    if ranks := [rank for rank, flag in enumerate(received(flags)) if flag]:
        named = ", ".join(map(str, ranks))
        what = f"weights of rank {named} differ from those of its replicas"
        run.log.event(run.progress.step, "bad numbers", what)


def _on_all(name: str, weight: torch.Tensor) -> bool:
    """Return whether all ranks along mesh dimension `name` hold the same part of a weight."""
    if not isinstance(weight, DTensor):
        return False
    names = weight.device_mesh.mesh_dim_names or ()
    return name in names and weight.placements[names.index(name)].is_replicate()
