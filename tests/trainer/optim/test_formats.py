"""Weights and state in bf16 and int8: how far rounding moves a number, that it is right on average,
and that neither shards nor worlds show in it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import soak
from trainer.optim import formats, method
from trainer.optim.formats import BLOCK, in_float32, noise, places_of, portions_of, stored
from trainer.optim.method import update
from trainer.optim.optimizer import build_optimizer, state_of
from trainer.optim.saved_state import own_targets
from trainer.recipe import OptimizerSection

HOWS = [("bf16", False), ("int8", False), ("int8", True)]


def drawn(count, key=0):
    parameter = nn.Parameter(torch.zeros(count))
    (pieces,) = portions_of([parameter], count, whole=False)
    return noise(pieces, {parameter: places_of(parameter)}, {parameter: key})


def steps_around(values, how, square):
    """Distance between the two numbers of a format that a value lies between."""
    if how == "bf16":
        return 2.0 ** (values.abs().log2().floor() - 7)
    scales = values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    share = (values.abs() / scales).double()
    power, count = (4, 256) if square else (2, 127)
    below = (share ** (1 / power) * count).floor()
    return (((below + 1) / count) ** power - (below / count) ** power) * scales


@pytest.mark.parametrize(("how", "square"), HOWS)
@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(-12, 12), min_size=4, max_size=4),
    st.integers(min_value=0, max_value=1 << 62),
)
def test_a_number_is_rounded_to_one_of_its_neighbours(how, square, powers, key):
    draw = torch.Generator().manual_seed(key & 0xFFFF)
    values = torch.randn(4 * BLOCK, generator=draw)
    values *= torch.tensor([10.0**p for p in powers]).repeat_interleave(BLOCK)
    values = values.square() if square else values
    found = in_float32(
        stored(values.clone(), how, drawn(4 * BLOCK, key)[1], square=square), how, square=square
    )
    most = steps_around(values, how, square)
    # float32 has 2**-24 of a number for what a code means, and for the place between two.
    assert ((found - values).abs() <= most * (1 + 1e-4) + values.abs() * 1e-6).all()
    if how == "int8":
        largest = values.view(-1, BLOCK).abs().amax(1)
        assert found.view(-1, BLOCK).abs().amax(1).equal(largest)
        if square:  # an update divides by its root
            assert (found > 0).all()


@pytest.mark.parametrize(("how", "square"), HOWS)
def test_rounding_is_right_on_average(how, square):
    values = torch.linspace(0.0009, 1, BLOCK).repeat(3)
    values[BLOCK : 2 * BLOCK] *= 1e-3
    values[2 * BLOCK :] *= 1 if square else -1
    times = 600
    copies = values.repeat(times)
    for word in drawn(len(copies)):
        parts = stored(copies.clone(), how, word, square=square)
        found = in_float32(parts, how, square=square).double().view(times, -1).mean(0)
        step = steps_around(values, how, square).double()
        # The variance of a coin is at most 1/4, times the square of the distance.
        error = (found - values.double()) / (step / 2 / times**0.5)
        assert error.abs().max() < 5  # of 384 numbers: beyond 4 sigma one is once in 40 times
        assert error.mean().abs() * len(values) ** 0.5 < 4


def test_what_is_drawn_is_uniform_and_independent_of_its_neighbours():
    rows = torch.cat([drawn(1 << 18, key)[:, None] for key in (1, 2)], 1).double() / (1 << 16)
    words = rows.reshape(6, -1)
    sigma = (1 / 12) ** 0.5 / words.shape[1] ** 0.5
    assert ((words + 0.5 / (1 << 16)).mean(1).abs() < 4 * sigma).all()
    assert (words.var(1) - 1 / 12).abs().max() < 1e-3
    shifted = [words, words.roll(1, 1), words.roll(128, 1)]
    correlation = torch.corrcoef(torch.cat(shifted)) - torch.eye(18)
    assert correlation.abs().max() < 5 / words.shape[1] ** 0.5


@pytest.mark.parametrize(("how", "square"), HOWS)
def test_what_is_no_number_stays_none(how, square):
    values = torch.ones(4 * BLOCK)
    values[:BLOCK] = 0
    # CUDA's NaN has all bits of the mantissa, and would become 0 when one is added.
    values[200] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    values[300] = torch.inf
    parts = stored(values, how, drawn(4 * BLOCK)[0], square=square)
    found = in_float32(parts, how, square=square)
    assert not found[200].isfinite()
    assert not found[300].isfinite()
    assert found[:BLOCK].count_nonzero() == 0
    assert found[3 * BLOCK :].isfinite().all()
    if how == "int8":  # a checkpoint looks at the scales
        assert parts[1].isfinite().tolist() == [True, False, False, True]


# --- updates ---------------------------------------------------------------------------------

SHAPES = {
    "matrix": (6, 256),
    "odd": (5, 24),
    "norm": (10,),
    "stack": (3, 4, 128),
    "large": (9, 128),
}
STEPS = 3


def trained(place, options, master, *, exact=True):
    """State and weights, whole, after a few steps. `place(name, tensor)` lays a tensor on ranks."""
    draw = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=draw).to(master) for name, shape in SHAPES.items()}
    weights = {name: nn.Parameter(place(name, one)) for name, one in whole.items()}
    optimizer = build_optimizer(weights, options, exact=exact)
    for step in range(STEPS):
        for name, weight in weights.items():
            gradient = torch.randn(SHAPES[name], generator=draw) * 10.0 ** -(step % 3)
            weight.grad = place(name, gradient.to(master))
        update(optimizer, [optimizer.param_groups], 0.5, seed=step)
    found = {**{name: one.detach() for name, one in weights.items()}}
    for name, weight in weights.items():
        found |= {f"{name}.{key}": one for key, one in optimizer.state[weight].items()}
    return optimizer, weights, found


def whole_of(found):
    return {
        key: one.full_tensor() if hasattr(one, "full_tensor") else one.clone()
        for key, one in found.items()
    }


OPTIONS = [
    (OptimizerSection(name=name, lr=1e-2, state_dtype=how), master)
    for name, how, master in (
        ("adamw", "bf16", torch.float32),
        ("adamw", "fp32", torch.bfloat16),
        ("muon", "int8", torch.bfloat16),
    )
]


def test_shards_and_portions_show_in_no_bit(tmp_path, monkeypatch):
    expected = [whole_of(trained(alone, *given)[2]) for given in OPTIONS]
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
    for (options, master), found in zip(OPTIONS, expected, strict=True):
        first = "exp_avg" if options.name == "adamw" else "momentum_buffer"
        assert found["matrix"].dtype == master
        assert found[f"matrix.{first}"].dtype == dtypes[options.state_dtype]
        few = "bf16" if options.state_dtype == "int8" else options.state_dtype
        assert found["norm.exp_avg"].dtype == dtypes[few]
    monkeypatch.setitem(formats.PORTION, "cpu", 300)  # rows of a matrix in portions of their own

    def rank(_):
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))

        def columns(name, one):
            inner = Shard(1) if name == "matrix" else Replicate()
            return distribute_tensor(one, square, [Shard(0), inner])

        layouts = [
            lambda _, one: distribute_tensor(one, line, [Shard(0)]),
            lambda _, one: distribute_tensor(one, square, [Replicate(), Shard(0)]),
            columns,
        ]
        return [
            {key: bits(one) for key, one in whole_of(trained(place, *given)[2]).items()}
            for place in layouts
            for given in OPTIONS
        ]

    for of_rank in run_ranks(4, rank, tmp_path):
        for found, wanted in zip(of_rank, expected * 3, strict=True):
            assert found.keys() == wanted.keys()
            for key, one in found.items():
                assert one.equal(bits(wanted[key])), key


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=soak)])
@pytest.mark.parametrize(
    ("how", "master"),
    [("bf16", torch.float32), ("fp32", torch.bfloat16), ("int8", torch.bfloat16)],
)
def test_one_kernel_rounds_as_portions_do(how, master, compiled, monkeypatch):
    """As on a GPU. Order of operations differs, so a number in a thousand may round otherwise."""
    options = OptimizerSection(name="adamw", lr=1e-2, state_dtype=how)
    wanted = trained(alone, options, master, exact=False)[2]
    monkeypatch.setattr(method.MethodOptimizer, "_compiles", lambda *_: True)
    if not compiled:
        monkeypatch.setattr(method, "compiled", lambda: method.update_rows)
    found = trained(alone, options, master, exact=False)[2]
    assert found.keys() == wanted.keys()
    same = total = 0
    for key, one in found.items():
        assert one.dtype == wanted[key].dtype
        # Codes of 8 bits beside each other are 1/64 of a scale apart, where they are largest.
        loose = {"rtol": 0.05, "atol": 1e-5} if one.is_floating_point() else {"rtol": 0, "atol": 1}
        torch.testing.assert_close(one, wanted[key], **loose)
        if one.dtype != torch.float32:
            same, total = same + int((one == wanted[key]).sum()), total + one.numel()
    assert same > 0.99 * total


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.dim() else tensor


def alone(_, tensor):
    return tensor.clone()


@pytest.mark.parametrize("there", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("here", ["fp32", "bf16", "int8"])
def test_state_is_taken_over_in_another_format(there, here):
    def options(how):
        return OptimizerSection(lr=1e-2, state_dtype=how)

    _, weights, before = trained(alone, options(there), torch.float32)
    copies = {name: nn.Parameter(one.detach().clone()) for name, one in weights.items()}
    optimizer = build_optimizer(copies, options(here))
    targets = own_targets(optimizer, copies, {}, {}, there)
    assert targets.tensors.keys() == before.keys() - SHAPES.keys()
    for name, one in targets.tensors.items():
        one.copy_(before[name])
    targets.put()
    for name, weight in copies.items():
        kept = optimizer.state[weight]
        assert kept["step"] == STEPS
        if there == here:
            assert all(one.equal(before[f"{name}.{key}"]) for key, one in kept.items())
    mean = optimizer.state[copies["matrix"]]["exp_avg"]
    if here == there == "fp32" or here != "fp32":
        return
    full = trained(alone, options("fp32"), torch.float32)[2]
    assert (mean - full["matrix.exp_avg"]).abs().max() < 0.05 * full["matrix.exp_avg"].abs().max()


def test_what_is_planned_is_what_is_kept():
    for name in ("adamw", "muon"):
        for how in ("fp32", "bf16", "int8"):
            options = OptimizerSection(name=name, lr=1e-2, state_dtype=how)
            _, weights, found = trained(alone, options, torch.bfloat16)
            planned = state_of(weights, options)
            for fqn, weight in weights.items():
                for one in planned[fqn]:
                    kept = found[f"{fqn}.{one.name}"]
                    assert (kept.dtype, tuple(kept.shape)) == (one.dtype, one.shape)
                    assert kept.nbytes == one.nbytes(weight.numel())
                assert len(planned[fqn]) == sum(key.startswith(f"{fqn}.") for key in found)
