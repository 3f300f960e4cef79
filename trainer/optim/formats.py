"""Weights and optimizer state in fewer bits than float32, and their updates.

[Note: rounding] An update is computed in float32, some rows at a time, and rounded when it is
stored. Rounding to nearest would lose small changes: for a bf16 weight, all below 1/512 of it. So
numbers are rounded up or down at random, with probabilities that make the result right on average
(Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"). The random numbers are a hash
of the run's seed, the step, the parameter's FQN and the element's index in the whole tensor. So no
generator state is saved, replicas round equally, and the bits depend neither on the number of ranks
nor on where shards end.

[Note: 8 bits] The last dimension of a tensor is cut into blocks of `BLOCK` elements, each with its
largest magnitude as a float32 scale (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization"). Shards are whole rows, so sharding does not change blocks. For a first moment, codes
are proportional to its square root, for a second moment to its fourth root, which represents small
values more precisely. A second moment is never rounded to zero, because updates divide by its root.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from checkpointing.format.plan import local_boxes
from checkpointing.format.tensors import local_tensor, specs_of

Format = Literal["fp32", "bf16", "int8"]

BLOCK = 128
"""Elements of a row that share a scale."""
SCALE = "_scale"
PORTION = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements updated at a time, per CPU thread (they fit in its cache), or to keep a GPU busy."""
ROUNDING_BYTES = 48
"""Largest number of bytes of temporaries per element during an update: weight, gradient and two
moments in float32, a hash, and the rounded result."""

_TINY = torch.finfo(torch.float32).tiny
_MEAN, _SQUARE = 127, 256
"""Number of codes between 0 and the scale, for a first and a second moment."""
# Constants of SplitMix64 (Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators"),
# as signed numbers.
_GAMMA, MIX1, MIX2 = (
    one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def format_of(parameter: Tensor, wanted: Format) -> Format:
    """Return the format of a parameter's moments if the recipe asks for `wanted`. int8 becomes bf16
    if rows do not divide into blocks. "fp32" also stands for moments in the dtype of a parameter
    that is neither float32 nor bf16."""
    if wanted == "fp32" or parameter.dtype not in (torch.float32, torch.bfloat16):
        return "fp32"
    whole_blocks = parameter.dim() > 1 and parameter.shape[-1] % BLOCK == 0
    return "bf16" if wanted == "int8" and not whole_blocks else wanted


class _MomentPart(NamedTuple):
    """A tensor that stores a moment, or the codes or the scales of a moment."""

    name: str
    dtype: torch.dtype
    block: int
    """Number of consecutive elements of the parameter for each number in the tensor."""


def parts_of(name: str, how: Format, *, square: bool) -> list[_MomentPart]:
    """Describe the tensors that store the moment `name` in the format `how`. `square`: whether it
    is a second moment, which is never negative."""
    if how == "int8":
        codes = _MomentPart(name, torch.uint8 if square else torch.int8, 1)
        return [codes, _MomentPart(name + SCALE, torch.float32, BLOCK)]
    return [_MomentPart(name, torch.float32 if how == "fp32" else torch.bfloat16, 1)]


def zeros_of(parameter: Tensor, part: _MomentPart) -> Tensor:
    """Return the tensor `part` for a moment of zeros, with the parameter's device and sharding."""
    local = local_tensor(parameter)
    *rows, columns = local.shape or [1]
    shape = [*rows, columns // part.block] if local.dim() else []
    return placed(torch.zeros(shape, dtype=part.dtype, device=local.device), parameter, part.block)


def placed(local: Tensor, parameter: Tensor, block: int = 1) -> Tensor:
    """Wrap `local` as a DTensor that is sharded like the parameter; return it unchanged if the
    parameter is no DTensor. The result's last dimension is the parameter's, divided by `block`."""
    if not isinstance(parameter, DTensor):
        return local
    spec = parameter._spec
    *rows, columns = parameter.shape
    shape = torch.Size([*rows, columns // block])
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(shape, strides, local.dtype)
    # DTensor.from_local would move offloaded tensors to the mesh's device.
    return DTensor(local, replace(spec, tensor_meta=meta), requires_grad=False)


# --- rounding --------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerIndices:
    """Indices of a shard's elements, viewed as (R, C), in the whole flat tensor. The sum of a row's
    and a column's term is the index times an odd constant, with which the hash begins."""

    rows: Tensor  # int64 (R, 1)
    columns: Tensor  # int64 (C,)


def places_of(parameter: Tensor) -> OptimizerIndices:
    local = local_tensor(parameter)
    indices = [torch.arange(length) for length in local.shape]
    if isinstance(parameter, DTensor):
        spec = specs_of({"": parameter}, parameter.device_mesh.mesh.flatten().tolist())[""]
        for box in local_boxes(spec.meta.shape, spec.layouts, dist.get_rank()):
            for index, first, length, here in zip(
                indices, box.offset, box.shape, box.local_offset, strict=True
            ):
                index[here : here + length] = torch.arange(first, first + length)
    *leading, columns = indices or [torch.zeros(1, dtype=torch.int64)]
    rows = torch.zeros(1, dtype=torch.int64)
    for dim, index in enumerate(leading):
        step = math.prod(parameter.shape[dim + 1 :])
        rows = (rows[:, None] + index * step).flatten()
    rows, columns = (one.to(local.device) * _GAMMA for one in (rows, columns))
    return OptimizerIndices(rows[:, None], columns)


@dataclass(frozen=True)
class OptimizerRows:
    """Rows `start` to `stop` of this rank's shard of a parameter, viewed as (R, C)."""

    parameter: nn.Parameter
    start: int
    stop: int
    elements: int
    last: bool
    """Whether these are the last rows of the shard."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of the parameter, its gradient or its state, as a flat view."""
        local = local_tensor(tensor)
        if not local.dim():
            return local.reshape(1)
        shape = math.prod(local.shape[:-1]), local.shape[-1]
        return local.view(shape)[self.start : self.stop].view(-1)


def portions_of(
    parameters: Sequence[nn.Parameter], most: int, *, whole: bool
) -> Iterator[list[OptimizerRows]]:
    """Divide parameters into portions of at most `most` elements, or of a single row that has more.
    `whole`: never divide a parameter, and form the same portions on all ranks."""
    portion: list[OptimizerRows] = []
    room = most
    for parameter in parameters:
        local = local_tensor(parameter)
        columns = max(1, local.shape[-1]) if local.dim() else 1
        rows, start = math.prod(local.shape[:-1]), 0
        while True:
            counted = parameter.numel() if whole else columns
            if portion and counted > room:
                yield portion
                portion, room = [], most
            stop = rows if whole else min(rows, start + max(1, room // columns))
            elements = (stop - start) * (local.numel() // max(1, rows))
            portion.append(OptimizerRows(parameter, start, stop, elements, stop == rows))
            room -= parameter.numel() if whole else elements
            start = stop
            if start == rows:
                break
    if portion:
        yield portion


def noise(
    pieces: Sequence[OptimizerRows],
    places: Mapping[nn.Parameter, OptimizerIndices],
    keys: Mapping[nn.Parameter, int],
) -> Tensor:
    """Return three random int16 per element of `pieces`, which are on one device: (3, elements).
    `places`: parameter → its `places_of`; `keys`: parameter → hash of the seed and its FQN."""
    sizes = [piece.elements for piece in pieces]
    device = places[pieces[0].parameter].rows.device
    hashed = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    for piece, out in zip(pieces, hashed.split(sizes), strict=True):
        where = places[piece.parameter]
        rows = where.rows[piece.start : piece.stop] + keys[piece.parameter]
        torch.add(rows, where.columns, out=out.view(len(rows), len(where.columns)))
    hashed.bitwise_xor_(hashed >> 30).mul_(MIX1)
    hashed.bitwise_xor_(hashed >> 27).mul_(MIX2)
    # The lowest of the four 16-bit words is left out, because the hash mixes it least.
    return hashed.view(torch.int16).view(-1, 4).T[1:]


def rounded_to_bf16(values: Tensor, drawn: Tensor) -> Tensor:
    """Round float32 (N,) to bf16, by the random numbers `drawn` (N,) of `noise`. NaN stays NaN."""
    bits = (values.view(torch.int32) + drawn).add_(1 << 15).bitwise_and_(-1 << 16)
    rounded = bits.view(torch.float32)
    # A carry from a NaN's mantissa could turn it into zero.
    return torch.where(values.isnan(), values, rounded).bfloat16()


def stored(values: Tensor, how: Format, drawn: Tensor, *, square: bool) -> list[Tensor]:
    """Encode a moment, float32 (N,), as the flat tensors of `parts_of`, rounded by `drawn` (N,)."""
    if how == "fp32":
        return [values]
    if how == "bf16":
        return [rounded_to_bf16(values, drawn)]
    blocks = values.view(len(values) // BLOCK, BLOCK)
    scales = (blocks if square else blocks.abs()).amax(1, keepdim=True)
    # Clamped, because a GPU's division may round up to above 1, which would overflow the code.
    shares = (blocks / scales.clamp(min=_TINY)).clamp_(-1, 1).view(-1)
    if square:
        roots = shares.sqrt().sqrt_().mul_(_SQUARE).floor_().clamp_(min=1)
        below, above = (roots * roots).square_(), (roots + 1).square_().square_()
        chance = (shares.mul_(_SQUARE**4) - below).div_(above.sub_(below))
        codes = roots.add_(_rounds_up(chance, drawn)).sub_(1).to(torch.uint8)
    else:
        sizes = shares.abs()
        roots = sizes.sqrt().mul_(_MEAN).floor_()
        chance = sizes.mul_(_MEAN**2).sub_(roots * roots).div_(roots * 2 + 1)
        codes = roots.add_(_rounds_up(chance, drawn)).mul_(shares.sign_()).to(torch.int8)
    return [codes, scales.view(-1)]


def _rounds_up(chance: Tensor, drawn: Tensor) -> Tensor:
    """Return booleans that are true with probability `chance`, by the random numbers `drawn`."""
    return drawn < chance.mul_(1 << 16).sub_((1 << 15) + 0.5)


def in_float32(parts: Sequence[Tensor], how: Format, *, square: bool) -> Tensor:
    """Decode a moment that `stored` has encoded; returns float32 (N,)."""
    if how != "int8":
        return parts[0].float()
    codes, scales = parts[0].float(), parts[1]
    if square:
        values = codes.add_(1).div_(_SQUARE).square_().square_()
    else:
        values = codes.div_(_MEAN)
        values = values.mul_(values.abs())
    return values.view(len(scales), BLOCK).mul_(scales[:, None]).view(-1)


@dataclass(frozen=True)
class DecodedOptimizerRows:
    """Rows of weights, gradients or a moment, decoded to float32; `close` encodes them again."""

    pieces: Sequence[OptimizerRows]
    stored: Sequence[Sequence[Tensor]]
    """The stored tensors, by `_MomentPart`, then by piece."""
    how: Format
    square: bool
    everything: Tensor | None
    """All decoded numbers, flat; None if the stored format is float32."""
    values: Sequence[Tensor]
    """Flat views in float32, by piece. For the format float32, views of the stored tensors."""

    def close(self, drawn: Tensor) -> None:
        """Encode the numbers, rounded by `drawn` (elements,) of `noise`, and store them."""
        if self.everything is None:
            return
        encoded = stored(self.everything, self.how, drawn, square=self.square)
        for tensors, flat in zip(self.stored, encoded, strict=True):
            views = [piece.of(one) for piece, one in zip(self.pieces, tensors, strict=True)]
            torch._foreach_copy_(views, [*flat.split([view.numel() for view in views])])


def opened(
    pieces: Sequence[OptimizerRows],
    tensors: Sequence[Sequence[Tensor]],
    how: Format,
    *,
    square: bool = False,
) -> DecodedOptimizerRows:
    """Decode rows to float32. They can be changed in place; `DecodedOptimizerRows.close` then
    stores them. `tensors`: stored tensors, by `_MomentPart`, then by piece."""
    views = [[piece.of(one) for piece, one in zip(pieces, part, strict=True)] for part in tensors]
    if how == "fp32":
        return DecodedOptimizerRows(pieces, tensors, how, square, None, views[0])
    everything = in_float32([torch.cat(part) for part in views], how, square=square)
    values = everything.split([piece.elements for piece in pieces])
    return DecodedOptimizerRows(pieces, tensors, how, square, everything, values)
