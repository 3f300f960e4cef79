"""An FSDP2 model with AdamW state whose every value is known: what checkpoint benchmarks save."""

from collections.abc import Iterator, Mapping
from math import isqrt, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY = 32003
"""Odd, so that the ranks' shards of dim 0 differ in size."""

BYTES_PER_PARAMETER = 12  # fp32: the parameter, exp_avg, exp_avg_sq


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.post_attention_layernorm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)


class _Decoder(nn.Module):
    """The parameters of a decoder; it is sharded and saved, never run."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        hidden = width * 8 // 3 // 64 * 64
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(_Block(width, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)


class ShardedState:
    """About `gigabytes` (10^9 bytes) of fp32 parameters and AdamW state, sharded over all ranks if
    there are more than one.

    A value is a function of the tensor, the place of the element in the whole tensor and the number
    of mutations, so that any world size can tell whether it has loaded the right ones. Made and
    used on all ranks.
    """

    def __init__(self, gigabytes: float) -> None:
        parameters = gigabytes * 1e9 / BYTES_PER_PARAMETER
        width = max(1, round(isqrt(int(parameters / 242)) / 128)) * 128
        hidden = width * 8 // 3 // 64 * 64
        block = 4 * width * width + 3 * width * hidden
        layers = max(1, round((parameters - 2 * VOCABULARY * width) / block))
        with torch.device("meta"):
            decoder = _Decoder(width, layers)
        if dist.get_world_size() > 1:
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            for unit in (*decoder.layers, decoder):
                fully_shard(unit, mesh=mesh)
        decoder.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(decoder.parameters())
        for parameter in decoder.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        self.module, self.adamw = decoder, optimizer
        self.nbytes = sum(tensor.nbytes for tensor in self.local().values())
        """What this rank holds; the scalars that every rank holds count on each."""
        self.mutations = 0
        for _, part, expected in self._parts():
            part.copy_(expected)

    @property
    def model(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.module.named_parameters())

    @property
    def optimizer(self) -> dict[str, Tensor]:
        """AdamW's state; other tensors than before, once it has been loaded from a state_dict."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.module.named_parameters()
            for key, value in self.adamw.state[parameter].items()
        }

    def flat(self) -> dict[str, Tensor]:
        """All tensors under one name each; the sharded ones as DTensors."""
        return {
            **{f"model.{name}": tensor.detach() for name, tensor in self.model.items()},
            **{f"optim.{name}": tensor for name, tensor in self.optimizer.items()},
        }

    def local(self) -> dict[str, Tensor]:
        """This rank's part of `flat`: plain contiguous tensors, the live ones."""
        return {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in self.flat().items()
        }

    def mutate(self) -> None:
        """Change every value, as an optimizer step would; exact in fp32."""
        torch._foreach_mul_(list(self.local().values()), 2.0)
        self.mutations += 1

    def clear(self) -> None:
        """Make every value wrong."""
        torch._foreach_zero_(list(self.local().values()))

    def load_local(self, values: Mapping[str, Tensor]) -> None:
        """Copy `values`, as `local` names them, into the tensors."""
        for name, tensor in self.local().items():
            tensor.copy_(values[name])

    def wrong(self) -> list[str]:
        """Names of this rank's tensors that differ in any bit from what `mutations` says."""
        return sorted({n for n, part, expected in self._parts() if not torch.equal(part, expected)})

    def _parts(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, part of the local tensor, what it should hold), 4 million elements at a time."""
        length = 1 << 22
        for number, (name, tensor) in enumerate(self.flat().items()):
            local, first = tensor, 0
            if isinstance(tensor, DTensor):
                local = tensor.to_local()
                # fully_shard gives each rank as many rows as torch.chunk does.
                rows = -(-tensor.shape[0] // dist.get_world_size())
                first = min(dist.get_rank() * rows, tensor.shape[0]) * prod(tensor.shape[1:])
            flat = local.view(-1)
            for start in range(0, flat.numel(), length):
                part = flat[start : start + length]
                yield name, part, _values(number, first + start, part.numel()) * 2.0**self.mutations


def _values(seed: int, first: int, count: int) -> Tensor:
    """Pseudo-random fp32 in [1, 2) of elements `first` to `first + count` of a tensor."""
    bits = (torch.arange(first, first + count) + (seed << 32)) * 0x9E3779B97F4A7C1
    mantissa = (bits >> 24).bitwise_and_(0x7FFFFF)
    return mantissa.bitwise_or_(0x3F800000).int().view(torch.float32)
