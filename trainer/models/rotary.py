"""Rotary positions, and their scaling for longer contexts.

Shapes: B batch, T sequence, H head dim, R the number of its elements that rotate (`rotary_size`).
"""

import math
from typing import TypeAlias

import torch
from torch import Tensor

from trainer.recipe.architecture import Architecture, RopeScalingSection

Rope: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles, each (T, R / 2) float32."""


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair of elements (i, i + R / 2) of the heads in x (B, T, heads, H) by its angle
    at the position. Elements from R on are unchanged."""
    cos, sin = rope
    x = x.transpose(1, 2)
    size, rest = 2 * cos.shape[-1], None
    if size < x.shape[-1]:
        x, rest = x.tensor_split([size], dim=-1)
    low, high = x.chunk(2, dim=-1)
    parts = low * cos - high * sin, high * cos + low * sin
    rotated = torch.cat(parts if rest is None else (*parts, rest.to(parts[0].dtype)), dim=-1)
    return rotated.type_as(x).transpose(1, 2)


def rope_table(architecture: Architecture, positions: Tensor, theta: float | None = None) -> Rope:
    """Compute the cosines and sines of the rotary angles (Su et al. 2021) at positions (T,).
    `theta`: base of the wavelengths, without scaling; None: base and scaling of the architecture.
    Raises ValueError for a sequence that is too long for rope_type dynamic."""
    # No buffer holds the table. It would have to be refilled after `to_empty`, kept out of
    # `.to(bfloat16)`, and sized for the longest context.
    size, scaling = architecture.rotary_size, None if theta else architecture.rope_scaling
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    powers = (theta or architecture.rope_theta) ** exponents
    if scaling is None:
        frequencies = 1.0 / powers
    elif scaling.rope_type == "llama3":
        frequencies = stretch(1.0 / powers, scaling)
    elif scaling.rope_type == "yarn":
        frequencies = _yarn(powers, architecture.rope_theta, scaling)
    elif scaling.rope_type == "longrope":
        long = len(positions) > scaling.original_max_position_embeddings
        factors = scaling.long_factor if long else scaling.short_factor
        of_pairs = torch.tensor(factors, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / (of_pairs * powers)  # Ding et al. 2024, "LongRoPE"
    elif scaling.rope_type == "linear":
        frequencies = 1.0 / powers / scaling.factor
    else:  # dynamic: no scaling up to the trained context
        limit = architecture.max_position_embeddings
        if len(positions) > limit:
            raise ValueError(
                f"rope_type dynamic: a sequence of {len(positions)} tokens is longer than "
                f"max_position_embeddings={limit}, beyond which the wavelengths depend on the "
                "length; use shorter sequences"
            )
        frequencies = 1.0 / powers
    angles = positions.float()[:, None] * frequencies
    factor = attention_factor(scaling) if scaling else 1.0
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def stretch(frequencies: Tensor, scaling: RopeScalingSection) -> Tensor:
    """Scale frequencies as Llama 3.1 does: low ones are divided by `factor`, high ones are kept,
    those in between are blended."""
    turns = frequencies * scaling.original_max_position_embeddings / (2 * torch.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = blend.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(powers: Tensor, theta: float, scaling: RopeScalingSection) -> Tensor:
    """Return the frequencies of YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension
    of Large Language Models"). As in `stretch`, low frequencies are divided by `factor`, but YaRN's
    blend is linear in the index of a pair. `powers`: inverse of each unscaled frequency, (R / 2);
    `theta`: base of the wavelengths."""
    size, original = 2 * len(powers), scaling.original_max_position_embeddings

    def pair_that_turns(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0  # avoids a division by 0
    pairs = torch.arange(len(powers), dtype=torch.float32, device=powers.device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def attention_factor(scaling: RopeScalingSection) -> float:
    """Return the factor by which cosines and sines are multiplied, so that attention is sharper."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = scaling.factor
    if factor <= 1 or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(scaling.original_max_position_embeddings))
    if scaling.mscale and scaling.mscale_all_dim:
        one, all_dims = (_magnitude(factor, m) for m in (scaling.mscale, scaling.mscale_all_dim))
        return one / all_dims
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0
