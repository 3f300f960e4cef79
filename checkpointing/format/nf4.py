"""NF4: weights in 4 bits (QLoRA, Dettmers et al. 2023).

[Note: nf4] A row of a weight is cut into blocks of 64. Each block has a float32 scale, its largest
magnitude. Each number is stored as the code of the nearest of 16 levels times the scale. So a
weight (out, in) becomes uint8 (out, in / 64 · 36): for each block 32 bytes of codes, the first of
two in the upper half of a byte, then the 4 bytes of the scale. A cut by rows, or by 64 columns, is
a cut of the bytes. Codes and values are those of bitsandbytes, without its double quantisation.
"""

import torch
from torch import Tensor

NF4 = "nf4"  # in recipes and trainer states
BLOCK = 64  # columns that share a scale
CODE_BYTES, BLOCK_BYTES = 32, 36
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 levels of the paper's appendix E, by code."""
PIECE = 1 << 24
"""Numbers that are dequantised at a time, as intermediate results take six bytes for each."""


def packed_shape(rows: int, columns: int) -> tuple[int, int]:
    """Returns the shape of a weight's packed bytes. Raises ValueError for wrong columns."""
    if columns % BLOCK:
        raise ValueError(f"{columns} columns are no multiple of {BLOCK}, the size of nf4's blocks")
    return rows, columns // BLOCK * BLOCK_BYTES


def weight_shape(packed: Tensor) -> tuple[int, int]:
    rows, width = packed.shape
    return rows, width // BLOCK_BYTES * BLOCK


def weights_in(parameter: Tensor) -> int:
    """Returns the number of weights in a parameter; uint8 encodes weights in nf4."""
    count = parameter.numel()
    return count // BLOCK_BYTES * BLOCK if parameter.dtype == torch.uint8 else count


def quantise(weight: Tensor) -> Tensor:
    """Returns (out, in / 64 · 36) uint8 for a weight (out, in) of finite numbers."""
    shape = packed_shape(*weight.shape)
    blocks = weight.float().unflatten(1, (weight.shape[1] // BLOCK, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True)
    # Multiplying by the reciprocal rounds as bitsandbytes does.
    relative = blocks * (1 / scales.clamp_min(1e-38))
    levels = torch.tensor(LEVELS, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(relative, borders, out_int32=True).byte()
    pairs = codes[..., ::2] << 4 | codes[..., 1::2]
    return torch.cat([pairs, scales.view(torch.uint8)], -1).view(shape)


def dequantise(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight (out, in) of packed bytes: products in float32, rounded to `dtype`."""
    rows, columns = weight_shape(packed)
    blocks = packed.unflatten(1, (columns // BLOCK, BLOCK_BYTES))
    if torch.compiler.is_compiling():  # the compiler fuses all of it into one kernel
        levels, scales = _factors(blocks)
        return (levels * scales).to(dtype).flatten(1)
    weight = torch.empty(rows, columns // BLOCK, BLOCK, dtype=dtype, device=packed.device)
    step = max(1, PIECE // max(1, columns))
    for first in range(0, rows, step):
        levels, scales = _factors(blocks[first : first + step])
        torch.mul(levels, scales, out=weight[first : first + step])
    return weight.flatten(1)


def _factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns levels (rows, blocks, BLOCK) and scales (rows, blocks, 1), float32."""
    codes = blocks[..., :CODE_BYTES].int().flatten()
    levels = _pairs(blocks.device).index_select(0, codes).view(*blocks.shape[:2], BLOCK)
    return levels, blocks[..., CODE_BYTES:].contiguous().view(torch.float32)


def _pairs(device: torch.device) -> Tensor:
    """Returns the two levels of each byte, float32 (256, 2)."""
    kept = not torch.compiler.is_compiling()
    if kept and device in _PAIRS:
        return _PAIRS[device]
    levels = torch.tensor(LEVELS, device=device)
    pairs = torch.cartesian_prod(levels, levels)
    if kept and type(pairs) is Tensor:  # a fake tensor, as in a memory plan, has no numbers
        _PAIRS[device] = pairs
    return pairs


_PAIRS: dict[torch.device, Tensor] = {}
"""Made on first use, as a process that will be forked must not have started torch's threads."""
