"""Weights and optimizer state in fewer bits than float32, and their updates.

[Note: rounding] An update is computed in float32, some rows at a time, and rounded when it is
stored. Rounding to nearest would lose every change below half of a last digit: of a bf16 weight
every change below 1/512 of it. So numbers are rounded up or down at random, with probabilities that
are right on average (Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"). The
random numbers are a hash of the run's seed, the step, the parameter's FQN and the element's place
in the whole tensor. So no generator is saved, replicas round equally, and the bits depend neither
on the number of ranks nor on where shards end.

[Note: 8 bits] The last dimension of a tensor is cut into blocks of `BLOCK` elements, each with its
largest magnitude as a float32 scale (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization"). Shards are whole rows, so sharding does not change a block. Codes are even steps of
the square root of a mean, and of the fourth root of a mean of squares, which keeps digits where
gradients are small. A mean of squares is never rounded to zero, as updates divide by its root.
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
"""Suffix of the name of a moment's scales."""
PORTION = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements updated at a time: as many as fit in the cache of each CPU thread, or keep a GPU
busy."""
ROUNDING_BYTES = 48
"""Most bytes for each element during its update: weight, gradient and two moments in float32, a
hash, and the rounded result."""

_TINY = torch.finfo(torch.float32).tiny
_MEAN, _SQUARE = 127, 256
"""Steps of the codes between 0 and the scale."""
# Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators", as signed numbers.
_GAMMA, MIX1, MIX2 = (
    one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def format_of(parameter: Tensor, wanted: Format) -> Format:
    """Format of a parameter's moments. int8 becomes bf16 if rows are no whole blocks. Parameters
    other than float32 and bf16 have moments in their own dtype."""
    if wanted == "fp32" or parameter.dtype not in (torch.float32, torch.bfloat16):
        return "fp32"
    whole_blocks = parameter.dim() > 1 and parameter.shape[-1] % BLOCK == 0
    return "bf16" if wanted == "int8" and not whole_blocks else wanted


class Part(NamedTuple):
    """One tensor of a stored moment."""

    name: str
    dtype: torch.dtype
    block: int
    """Consecutive elements of the parameter per number."""


def parts_of(name: str, how: Format, *, square: bool) -> list[Part]:
    """The tensors that store a moment.

    Args:
        square: whether it is never negative.
    """
    if how == "int8":
        codes = Part(name, torch.uint8 if square else torch.int8, 1)
        return [codes, Part(name + SCALE, torch.float32, BLOCK)]
    return [Part(name, torch.float32 if how == "fp32" else torch.bfloat16, 1)]


def zeros_of(parameter: Tensor, part: Part) -> Tensor:
    """A part of a zero moment, on the parameter's device and sharded like it."""
    local = local_tensor(parameter)
    *rows, columns = local.shape or [1]
    shape = [*rows, columns // part.block] if local.dim() else []
    return placed(torch.zeros(shape, dtype=part.dtype, device=local.device), parameter, part.block)


def placed(local: Tensor, parameter: Tensor, block: int = 1) -> Tensor:
    """Wrap a local tensor as this rank's part of a tensor that is sharded like the parameter, with
    a last dimension `block` times shorter."""
    if not isinstance(parameter, DTensor):
        return local
    spec = parameter._spec
    *rows, columns = parameter.shape
    shape = torch.Size([*rows, columns // block])
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(shape, strides, local.dtype)
    # from_local would move offloaded tensors to the mesh's device.
    return DTensor(local, replace(spec, tensor_meta=meta), requires_grad=False)


# --- rounding --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Places of the elements of a local tensor, seen as (R, C), in the whole tensor: the sum of
    both fields, times an odd constant."""

    rows: Tensor
    """int64, shape (R, 1)."""
    columns: Tensor
    """int64, shape (C,)."""


def places_of(parameter: Tensor) -> Places:
    """The places of this rank's elements of a parameter."""
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
    return Places(rows[:, None], columns)


@dataclass(frozen=True)
class ParameterRows:
    """Some rows of this rank's part of a parameter, seen as (R, C)."""

    parameter: nn.Parameter
    start: int
    stop: int
    elements: int
    last: bool
    """Whether these are its last rows."""

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of the parameter, its gradient or its state, flat."""
        local = local_tensor(tensor)
        if not local.dim():
            return local.reshape(1)
        shape = math.prod(local.shape[:-1]), local.shape[-1]
        return local.view(shape)[self.start : self.stop].view(-1)


def portions_of(
    parameters: Sequence[nn.Parameter], most: int, *, whole: bool
) -> Iterator[list[ParameterRows]]:
    """Yield parameters in non-empty portions of about `most` elements.

    Args:
        parameters: in order.
        most: elements of a portion; a single row may have more.
        whole: do not cut parameters, and form equal portions on all ranks, by whole sizes.
    """
    portion: list[ParameterRows] = []
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
            portion.append(ParameterRows(parameter, start, stop, elements, stop == rows))
            room -= parameter.numel() if whole else elements
            start = stop
            if start == rows:
                break
    if portion:
        yield portion


def noise(
    pieces: Sequence[ParameterRows],
    places: Mapping[nn.Parameter, Places],
    keys: Mapping[nn.Parameter, int],
) -> Tensor:
    """Three random numbers per element, uniform over int16: (3, elements).

    Args:
        pieces: of parameters on one device.
        places: see `places_of`.
        keys: parameter → hash of the seed and its FQN.
    """
    sizes = [piece.elements for piece in pieces]
    device = places[pieces[0].parameter].rows.device
    hashed = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    for piece, out in zip(pieces, hashed.split(sizes), strict=True):
        where = places[piece.parameter]
        rows = where.rows[piece.start : piece.stop] + keys[piece.parameter]
        torch.add(rows, where.columns, out=out.view(len(rows), len(where.columns)))
    hashed.bitwise_xor_(hashed >> 30).mul_(MIX1)
    hashed.bitwise_xor_(hashed >> 27).mul_(MIX2)
    # The lowest of the four 16-bit words is the least mixed.
    return hashed.view(torch.int16).view(-1, 4).T[1:]


def rounded_to_bf16(values: Tensor, drawn: Tensor) -> Tensor:
    """float32 (N,) → bf16, rounded up or down by `drawn` (N,), see `noise`. NaN stays NaN."""
    bits = (values.view(torch.int32) + drawn).add_(1 << 15).bitwise_and_(-1 << 16)
    rounded = bits.view(torch.float32)
    # A carry from a NaN's mantissa could turn it into zero.
    return torch.where(values.isnan(), values, rounded).bfloat16()


def stored(values: Tensor, how: Format, drawn: Tensor, *, square: bool) -> list[Tensor]:
    """float32 (N,) → the tensors of `parts_of`, flat, rounded by `drawn` (N,), see `noise`."""
    if how == "fp32":
        return [values]
    if how == "bf16":
        return [rounded_to_bf16(values, drawn)]
    blocks = values.view(len(values) // BLOCK, BLOCK)
    scales = (blocks if square else blocks.abs()).amax(1, keepdim=True)
    # A GPU's division may round up: a share above 1 would wrap the largest code.
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
    """Whether to round up, with probability `chance`."""
    return drawn < chance.mul_(1 << 16).sub_((1 << 15) + 0.5)


def in_float32(parts: Sequence[Tensor], how: Format, *, square: bool) -> Tensor:
    """Decode numbers that `stored` has encoded; returns float32 (N,). `square`: whether they are
    second moments, which have codes of their own."""
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
class Opened:
    """Numbers of some pieces in float32, to be changed and stored again."""

    pieces: Sequence[ParameterRows]
    stored: Sequence[Sequence[Tensor]]
    """Their stored tensors: by part of the format, then by piece."""
    how: Format
    square: bool
    everything: Tensor | None
    """All numbers, flat; None if they are stored as float32."""
    values: Sequence[Tensor]
    """Views by piece, flat."""

    def close(self, drawn: Tensor) -> None:
        """Round what is stored in fewer bits by `drawn` (elements,), see `noise`, and store it."""
        if self.everything is not None:
            flat = stored(self.everything, self.how, drawn, square=self.square)
            put(self.pieces, self.stored, flat)


def opened(
    pieces: Sequence[ParameterRows],
    tensors: Sequence[Sequence[Tensor]],
    how: Format,
    *,
    square: bool = False,
) -> Opened:
    """Open numbers of pieces in float32, to be changed in place, and then closed.

    Args:
        tensors: stored tensors, by part of the format, then by piece.
        how: their format.
        square: whether they are never negative.
    """
    views = [[piece.of(one) for piece, one in zip(pieces, part, strict=True)] for part in tensors]
    if how == "fp32":
        return Opened(pieces, tensors, how, square, None, views[0])
    everything = in_float32([torch.cat(part) for part in views], how, square=square)
    values = everything.split([piece.elements for piece in pieces])
    return Opened(pieces, tensors, how, square, everything, values)


def put(
    pieces: Sequence[ParameterRows], tensors: Sequence[Sequence[Tensor]], parts: Sequence[Tensor]
) -> None:
    """Write flat parts, from `stored`, to the tensors of pieces: by part, then by piece."""
    for live, flat in zip(tensors, parts, strict=True):
        views = [piece.of(one) for piece, one in zip(pieces, live, strict=True)]
        torch._foreach_copy_(views, [*flat.split([view.numel() for view in views])])
