"""Tensor, sequence, pipeline and context parallelism as torch has them: DTensor styles, pipelining,
`context_parallel`; where the last one does not work, keys gathered from all ranks, as Llama 3 was
trained (Grattafiori et al. 2024). Each gives a step: micro-batches → mean loss, on all ranks.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.nn.functional import all_gather
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from trainer.models import Decoder
from trainer.models.attention import AttentionDocuments
from trainer.parallel.context import chunks
from trainer.parallel.schedules import cut
from trainer.recipe import Recipe

Step = Callable[[Sequence[Mapping[str, Tensor]]], Tensor]


def with_update(parameters: list[nn.Parameter], lr: float, backward: Step) -> Step:
    """A step whose gradients `backward` leaves, with torch's fused AdamW, which decays nothing."""
    optimizer = torch.optim.AdamW(parameters, lr, (0.9, 0.95), weight_decay=0.0, fused=True)

    def step(batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        loss = backward(batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class WholeNorm(SequenceParallel):
    """A norm on whole activations: its weight is a DTensor like all others."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence_sharding = (Replicate(),)  # type: ignore[assignment]  # torch declares Shard


class LossOfParts(nn.Module):
    """Cross-entropy of logits that are cut by the vocabulary; wants `loss_parallel`."""

    def forward(self, hidden: DTensor, weight: DTensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden.redistribute(placements=[Replicate()]), weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tensor_parallel(model: Decoder, lr: float, sequence: bool) -> Step:
    """An untied Llama by torch's styles."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    between = Shard(1) if sequence else Replicate()
    norm = SequenceParallel() if sequence else WholeNorm()
    block = {
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "self_attn": PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "self_attn.[qkv]_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        **{f"model.layers.*.{name}": style for name, style in block.items()},
        "model.norm": norm,
    }
    parallelize_module(model, mesh, plan)
    assert model.lm_head
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh, [Shard(0)]))
    model.add_module("head_loss", LossOfParts())

    def backward(batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            with loss_parallel():
                loss = model(**batch) / len(batches)
                loss.backward()
            total += loss.detach().full_tensor()
        for parameter in model.parameters():  # of norms: the ranks have parts of their sums
            whole, gradient = parameter.data, parameter.grad
            if isinstance(gradient, DTensor) and isinstance(whole, DTensor):
                parameter.grad = gradient.redistribute(placements=whole.placements)
        return total

    return with_update([*model.parameters()], lr, backward)


class Positional(nn.Module):
    """torch gives the first argument from stage to stage, and the rest to all of them."""

    def __init__(self, part: Decoder, first: bool) -> None:
        super().__init__()
        self.part, self.first = part, first

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        told = labels if self.part.has_head else None
        if self.first:
            return self.part(x, told)
        return self.part(labels, told, hidden=x)  # of the tokens only their number is asked


def pipeline(model: Decoder, lr: float, recipe: Recipe) -> Step:
    """1F1B over all ranks."""
    length, count = recipe.data.seq_len, recipe.batch.global_batch // recipe.micro_batch
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = model.part(cut(tuple(model.block_costs(length)), ranks)[rank])
    stage = PipelineStage(Positional(part, rank == 0), rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, lambda out, _: out / count, scale_grads=False)

    def backward(batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        ids, labels = (torch.cat([b[key] for b in batches]) for key in ("input_ids", "labels"))
        losses: list[Tensor] = []
        last = rank == ranks - 1
        schedule.step(
            *([ids] if rank == 0 else []), labels=labels, target=labels if last else None,
            losses=losses if last else None, return_outputs=False,
        )  # fmt: skip
        return torch.stack(losses).sum().detach() if last else torch.zeros(())

    return with_update([*part.parameters()], lr, backward)


def _sharded(model: Decoder, mesh: DeviceMesh) -> None:
    """As `SHARD_GRAD_OP`; gradients are summed."""
    for unit in (*model.blocks, model):
        assert isinstance(unit, nn.Module)
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def context_by_torch(model: Decoder, lr: float) -> Step:
    """torch's ring attention; as of 2.13 it has no way for the CPU."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _sharded(model, mesh)

    def backward(batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            ids, labels = batch["input_ids"].clone(), batch["labels"].clone()
            positions = torch.arange(ids.shape[1])
            buffers = [ids, labels, positions]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
                loss = model(ids, labels, positions=positions) / mesh.size() / len(batches)
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total

    return with_update([*model.parameters()], lr, backward)


def context_by_gathering(model: Decoder, lr: float) -> Step:
    """Each rank has two chunks of each sequence, and gets the keys and values of all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _sharded(model, init_device_mesh("cpu", (ranks,)))

    def backward(batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            length = batch["input_ids"].shape[1]
            order = torch.cat([_tokens(length, ranks, other) for other in range(ranks)])
            mine = _tokens(length, ranks, rank)
            seen = mine[:, None] >= order[None]

            def look(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
                both = torch.cat(all_gather(torch.stack([k, v])), 2)
                q, k, v = (x.transpose(1, 2) for x in (q, *both))
                mixed = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
                return mixed.transpose(1, 2)

            loss = model(
                batch["input_ids"][:, mine], batch["labels"][:, mine], positions=mine,
                documents=AttentionDocuments("ring", look),
            )  # fmt: skip
            assert isinstance(loss, Tensor)
            loss = loss / ranks / len(batches)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total

    return with_update([*model.parameters()], lr, backward)


def _tokens(length: int, ranks: int, rank: int) -> Tensor:
    return torch.cat([torch.arange(c.start, c.stop) for c in chunks(length, ranks, rank)])
