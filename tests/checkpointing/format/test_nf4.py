"""nf4: the levels of the paper, the nearest of them, and bytes that can be cut."""

import math
from statistics import NormalDist

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checkpointing.format.nf4 import (
    _PAIRS,
    BLOCK,
    LEVELS,
    PIECE,
    dequantise,
    packed_shape,
    quantise,
    weight_shape,
)
from tests.distributed.jobs import soak


def weights(dtype):
    """Rows of all sizes; one block is zero, others hold a single number, or half of them are."""
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(96, 256, generator=draw) * torch.logspace(-9, 9, 96)[:, None]
    weight[1, :BLOCK] = 0
    weight[2, BLOCK:] = weight[2, BLOCK]
    weight[3, ::2] = 0
    weight[4] = -weight[4].abs()
    return weight.to(dtype)


def rounded(weight):
    return dequantise(quantise(weight), torch.float32)


def test_levels_are_quantiles_of_the_normal_distribution():
    """As the paper makes them (equation 4 and appendix E): eight of the positive half and of zero,
    seven of the negative one, divided by the largest; `offset` is that of its authors' code."""
    offset, quantile = 0.9677083, NormalDist().inv_cdf
    shares = [offset + (0.5 - offset) * n / 8 for n in range(8)]
    below = [offset + (0.5 - offset) * n / 7 for n in range(7)]
    made = sorted([*map(quantile, shares), 0.0, *(-quantile(share) for share in below)])
    expected = torch.tensor([level / max(made) for level in made])
    torch.testing.assert_close(torch.tensor(LEVELS), expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_number_becomes_the_nearest_level_of_its_block(dtype):
    weight = weights(dtype) if dtype != torch.float16 else weights(torch.float32)[30:66].to(dtype)
    packed = quantise(weight)
    assert packed.dtype == torch.uint8
    assert packed.shape == packed_shape(*weight.shape) == (len(weight), 4 * 36)
    assert weight_shape(packed) == weight.shape
    assert packed.nbytes == 0.5625 * weight.numel()
    blocks = packed.view(-1, 36)
    codes = torch.stack([blocks[:, :32] >> 4, blocks[:, :32] & 15], -1).flatten(1)
    scales = blocks[:, 32:].contiguous().view(torch.float32)
    numbers = weight.double().view(-1, BLOCK)
    assert scales.double().equal(numbers.abs().amax(1, keepdim=True))
    off = (numbers / scales.double().clamp_min(1e-300))[..., None] - torch.tensor(LEVELS).double()
    nearest = off.abs().argmin(-1)
    assert codes.long().equal(nearest)
    for out in (torch.float32, torch.bfloat16, torch.float16):
        values = dequantise(packed, out)
        assert values.equal((torch.tensor(LEVELS)[nearest] * scales).view(weight.shape).to(out))
    assert rounded(rounded(weight)).equal(rounded(weight))
    assert rounded(weight)[numbers.view(weight.shape) == 0].eq(0).all()


def test_a_cut_of_the_weight_is_a_cut_of_the_bytes(monkeypatch):
    weight = weights(torch.float32)
    packed = quantise(weight)
    assert quantise(weight[33:]).equal(packed[33:])
    assert quantise(weight[:, 128:]).equal(packed[:, 72:])
    assert dequantise(packed[5:, 36:], torch.float32).equal(rounded(weight)[5:, BLOCK:])
    assert quantise(weight[:0]).shape == (0, 144)
    assert dequantise(packed[:0], torch.float32).shape == (0, 256)
    monkeypatch.setattr("checkpointing.format.nf4.PIECE", 7 * 256)
    assert weight.numel() < PIECE
    assert dequantise(packed, torch.float32).equal(rounded(weight))
    with pytest.raises(ValueError, match="100 columns are no multiple of 64"):
        quantise(torch.ones(2, 100))


@soak
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_values_are_those_of_bitsandbytes(dtype):
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = weights(dtype)
    codes, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    blocks = quantise(weight).view(-1, 36)
    assert codes.view(-1, 32).equal(blocks[:, :32])
    assert state.absmax.equal(blocks[:, 32:].contiguous().view(torch.float32)[:, 0])
    values = bnb.dequantize_4bit(codes, state)
    ours = dequantise(quantise(weight), dtype)
    assert values.equal(ours)
    assert not math.isnan(values.float().sum())


def test_what_a_plan_computed_on_fake_tensors_is_not_kept():
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    _PAIRS.clear()
    with FakeTensorMode() as fake:
        dequantise(quantise(fake.from_tensor(weight)), torch.float32)
    assert (dequantise(quantise(weight), torch.float32) - weight).abs().max() < 0.4
