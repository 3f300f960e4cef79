"""Weights and optimizer state in fewer bits than float32 has, and the updates of such.

[Note: rounding] An update is computed in float32, some rows at a time, and rounded when it is
stored. Rounding to the nearest number would lose whatever is smaller than half of a last digit: of
a bf16 weight every change below 1/512 of it. So a number is rounded up or down at random, with the
chances that make it right on average (Gupta et al. 2015, "Deep Learning with Limited Numerical
Precision"). What is drawn is a hash of the run's seed, the step, the parameter's FQN and the place
of the element in the whole tensor. So there is no generator to save, replicas round alike, and the
bits depend neither on the number of ranks nor on where shards end.

[Note: 8 bits] The last dimension of a tensor is cut into blocks of `BLOCK` elements, each with its
largest magnitude as a float32 scale (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization"). Shards are whole rows, so no cut of them changes a block. Codes are even steps of
the square root of a mean, and of the fourth root of a mean of squares: where gradients are small,
both keep as many digits. A mean of squares is never rounded to zero, as updates divide by its root.
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
"""Ends the name of the scales of a moment."""
PORTION = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements that are updated at a time: what the cache of each thread holds; what keeps a GPU
busy."""
ROUNDING_BYTES = 48
"""Most bytes for each of them while they are updated: weight, gradient and two moments in float32,
a hash, and what is rounded."""

_TINY = torch.finfo(torch.float32).tiny
_MEAN, _SQUARE = 127, 256
"""Steps of the codes between 0 and the scale."""
# Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators", as signed numbers.
_GAMMA, MIX1, MIX2 = (
    one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def format_of(parameter: Tensor, wanted: Format) -> Format:
    """How the moments of a parameter are stored. Rows that are no whole blocks have bf16 in place
    of int8. Parameters in other formats than float32 and bf16 have moments like themselves."""
    if wanted == "fp32" or parameter.dtype not in (torch.float32, torch.bfloat16):
        return "fp32"
    whole_blocks = parameter.dim() > 1 and parameter.shape[-1] % BLOCK == 0
    return "bf16" if wanted == "int8" and not whole_blocks else wanted


class Part(NamedTuple):
    """One tensor of what stores a moment."""

    name: str
    dtype: torch.dtype
    block: int
    """Consecutive elements of the parameter for which it has one number."""


def parts_of(name: str, how: Format, *, square: bool) -> list[Part]:
    """The tensors that store a moment.

    Args:
        name: of the moment.
        how: its format.
        square: it is never negative.
    """
    if how == "int8":
        codes = Part(name, torch.uint8 if square else torch.int8, 1)
        return [codes, Part(name + SCALE, torch.float32, BLOCK)]
    return [Part(name, torch.float32 if how == "fp32" else torch.bfloat16, 1)]


def zeros_of(parameter: Tensor, part: Part) -> Tensor:
    """A part of a moment that is zero, on the parameter's device and cut as that is."""
    local = local_tensor(parameter)
    *rows, columns = local.shape or [1]
    shape = [*rows, columns // part.block] if local.dim() else []
    return placed(torch.zeros(shape, dtype=part.dtype, device=local.device), parameter, part.block)


def placed(local: Tensor, parameter: Tensor, block: int = 1) -> Tensor:
    """A local tensor as this rank's part of a whole one, which lies on the ranks as a parameter
    does, and whose last dimension is `block` times shorter."""
    if not isinstance(parameter, DTensor):
        return local
    spec = parameter._spec
    *rows, columns = parameter.shape
    shape = torch.Size([*rows, columns // block])
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    meta = TensorMeta(shape, strides, local.dtype)
    # Not from_local, which moves what is offloaded to the mesh's device.
    return DTensor(local, replace(spec, tensor_meta=meta), requires_grad=False)


# --- rounding --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Where the elements of a local tensor, seen as (R, C), lie in the whole one: the sum of both,
    times an odd constant."""

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
    """No rows come after them."""

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of the parameter, of its gradient or of its state, flat."""
        local = local_tensor(tensor)
        if not local.dim():
            return local.reshape(1)
        shape = math.prod(local.shape[:-1]), local.shape[-1]
        return local.view(shape)[self.start : self.stop].view(-1)


def portions_of(
    parameters: Sequence[nn.Parameter], most: int, *, whole: bool
) -> Iterator[list[ParameterRows]]:
    """Parameters in portions of about so many elements, none of them empty.

    Args:
        parameters: in their order.
        most: elements of a portion, but for a single row that has more.
        whole: cut none, and cut alike on all ranks: whole tensors count, not this rank's parts.
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
    """Three numbers for each element, uniform over int16, that depend on no others: int16 of shape
    (3, elements).

    Args:
        pieces: of parameters on one device.
        places: see `places_of`.
        keys: a hash of what draws for each parameter.
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
    # The lowest of the four words is the least mixed.
    return hashed.view(torch.int16).view(-1, 4).T[1:]


def rounded_to_bf16(values: Tensor, drawn: Tensor) -> Tensor:
    """float32 (N,) → bf16, up or down as `drawn` (N,), of `noise`, says. What is no number stays
    none."""
    bits = (values.view(torch.int32) + drawn).add_(1 << 15).bitwise_and_(-1 << 16)
    found = bits.view(torch.float32)
    # The mantissa of a NaN may carry into the sign, and make a zero of it.
    return torch.where(values.isnan(), values, found).bfloat16()


def stored(values: Tensor, how: Format, drawn: Tensor, *, square: bool) -> list[Tensor]:
    """float32 (N,) → what `parts_of` names, flat; rounded as `drawn` (N,) says, see `noise`."""
    if how == "fp32":
        return [values]
    if how == "bf16":
        return [rounded_to_bf16(values, drawn)]
    blocks = values.view(len(values) // BLOCK, BLOCK)
    scales = (blocks if square else blocks.abs()).amax(1, keepdim=True)
    # A GPU's division may round up: a share of more than 1 would wrap the largest code.
    shares = (blocks / scales.clamp(min=_TINY)).clamp_(-1, 1).view(-1)
    if square:
        roots = shares.sqrt().sqrt_().mul_(_SQUARE).floor_().clamp_(min=1)
        below, above = (roots * roots).square_(), (roots + 1).square_().square_()
        chance = (shares.mul_(_SQUARE**4) - below).div_(above.sub_(below))
        codes = roots.add_(_up(chance, drawn)).sub_(1).to(torch.uint8)
    else:
        sizes = shares.abs()
        roots = sizes.sqrt().mul_(_MEAN).floor_()
        chance = sizes.mul_(_MEAN**2).sub_(roots * roots).div_(roots * 2 + 1)
        codes = roots.add_(_up(chance, drawn)).mul_(shares.sign_()).to(torch.int8)
    return [codes, scales.view(-1)]


def _up(chance: Tensor, drawn: Tensor) -> Tensor:
    """Whether to round up: with this chance."""
    return drawn < chance.mul_(1 << 16).sub_((1 << 15) + 0.5)


def in_float32(parts: Sequence[Tensor], how: Format, *, square: bool) -> Tensor:
    """What `stored` has made, as float32 (N,)."""
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
    """One number for each element of some pieces, in float32."""

    pieces: Sequence[ParameterRows]
    stored: Sequence[Sequence[Tensor]]
    """Where they come from: by part of the format, then by piece."""
    how: Format
    square: bool
    everything: Tensor | None
    """All of them, flat; None if they are float32 where they are stored."""
    values: Sequence[Tensor]
    """By piece, flat."""

    def close(self, drawn: Tensor) -> None:
        """Round what is not float32, as `drawn` (elements,) of `noise` says, and store it."""
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
    """Numbers of pieces in float32, to be changed in place, and then closed.

    Args:
        pieces: whose.
        tensors: where they are stored, by part of the format, then by piece.
        how: they are stored.
        square: none is negative.
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
    """Write flat parts, as `stored` makes them, to where pieces have theirs: by part, then by
    piece."""
    for live, flat in zip(tensors, parts, strict=True):
        views = [piece.of(one) for piece, one in zip(pieces, live, strict=True)]
        torch._foreach_copy_(views, [*flat.split([view.numel() for view in views])])
