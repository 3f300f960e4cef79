"""With run.determinism=exact the world size, and its changes, show in no bit of the result."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from benchmarks.support import json_lines
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT, SOAK, Forked, assert_kept, deadly, records, soak
from trainer.optim.exact import (
    GRID,
    LARGEST_GRADIENT,
    snap_gradients,
    snap_loss,
    square_sums,
)
from trainer.optim.optimizer import build_optimizer, square_sum
from trainer.parallel.fsdp import is_sharded
from trainer.recipe import OptimizerSection, ParameterGroup, RecipeError, load_recipe

STEPS = 20 if SOAK else 7
EXACT = ("run.determinism=exact", f"run.steps={STEPS}", "schedule.name=constant")
UNEVEN = ("batch.global_batch=11", "batch.micro_batch=3")  # 4 micro-batches, the last one smaller
GRADIENTS = st.lists(st.floats(-250, 250, width=32), min_size=1, max_size=40)


def result(folder, run, last=STEPS):
    """Every loss, gradient norm, weight and optimizer tensor, by name."""
    newest = folder / run / "checkpoints" / f"step-{last:08}"
    tensors = {
        f"{file.parent.name} {name}": tensor
        for file in newest.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    steps = [r for r in records(folder, run) if "loss" in r]
    assert list(dict.fromkeys(r["step"] for r in steps)) == list(range(1, last + 1))
    numbers = {
        f"step {r['step']}": torch.tensor([r["loss"], r["grad_norm"]], dtype=torch.float64)
        for r in steps
    }
    tensors = {name.replace(newest.name, "model"): tensor for name, tensor in tensors.items()}
    assert len(tensors) > 20
    return tensors | numbers


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert not [n for n in ours if ours[n].numpy().tobytes() != theirs[n].numpy().tobytes()]


@pytest.fixture(scope="session")
def single(workspace):
    """What one process gives, by overrides; each computed once."""
    return {}


@pytest.mark.parametrize(
    ("precision", "legs"),
    [
        # Each leg: up to this step, on so many ranks, with a strategy.
        ("fp32", [(6, 3, ["elastic.witness=0.5"]), (STEPS, 1, ["strategy.name=ddp"])]),
        *(
            pytest.param(precision, legs, marks=soak)
            for precision in ("fp32", "bf16")
            for legs in (
                [(20, 2, [])],
                [(20, 3, ["strategy.zero=2"])],
                [(20, 3, ["strategy.name=ddp"])],
                [(20, 4, ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"])],
                [(20, 2, ["strategy.offload=cpu"])],
                [(7, 4, []), (9, 1, ["strategy.zero=2"]), (20, 3, ["strategy.zero=0"])],
            )
        ),
    ],
)
def test_same_bits_at_any_world_size(workspace, train, single, precision, legs):
    common = (*EXACT, *UNEVEN, f"precision.dtype={precision}")
    if precision not in single:
        train(1, f"run.dir=exact-{precision}", *common)
        single[precision] = result(workspace, f"exact-{precision}")
    run = "-".join(["exact", precision, *(f"{ranks}x{step}" for step, ranks, _ in legs)])
    run += "-".join(part.split("=")[1] for _, _, overrides in legs for part in overrides)
    for step, ranks, overrides in legs:
        train(ranks, f"run.dir={run}", *common, *overrides, f"run.steps={step}")
    assert_equal_bits(result(workspace, run), single[precision])
    ledger = json_lines(workspace / run / "ledger.jsonl")
    assert not [line for line in ledger if line.get("event") == "witness"]


TP = ("strategy.tp=2", "strategy.sequence_parallel=true")
# One pass on each of four ranks, two on each of two.
SHORT = (*TP, "schedule.warmup_steps=0", "batch.micro_batch=6")
PP, CP = ("strategy.pp=2",), ("strategy.cp=2",)
DDP, ZERO2 = "strategy.name=ddp", "strategy.zero=2"


@soak
@pytest.mark.parametrize(
    ("layout", "legs"),
    [
        # Each leg: up to this step, on so many ranks, with a strategy; the first one all the way.
        (SHORT, [(3, 2, []), (3, 4, [])]),
        (TP, [(20, 2, []), (9, 4, []), (20, 2, [])]),
        (TP[:1], [(20, 2, []), (20, 4, [DDP])]),
        (TP, [(20, 2, []), (20, 6, [ZERO2])]),
        (PP, [(20, 2, []), (7, 4, [DDP]), (20, 6, [])]),
        ((*PP, "strategy.pp_schedule=zero_bubble"), [(20, 2, [ZERO2]), (20, 4, [ZERO2])]),
        (CP, [(20, 2, []), (9, 4, []), (20, 2, [DDP])]),
        ((*CP, "data.seq_len=31"), [(20, 2, []), (20, 6, [ZERO2])]),
        ((*TP, *PP), [(20, 4, []), (9, 8, []), (20, 4, [])]),
        ((*TP, *CP), [(20, 4, []), (20, 8, [DDP])]),
        ((*PP, *CP), [(20, 4, []), (20, 8, [])]),
    ],
)
def test_same_bits_at_any_data_parallel_size(workspace, train, request, layout, legs):
    """Of ranks that compute a sample together, with as many of them."""
    runs = [f"exact-{number}-{request.node.callspec.id}" for number in range(2)]
    for run, some in zip(runs, (legs[:1], legs[1:]), strict=True):
        for step, ranks, overrides in some:
            train(
                ranks, f"run.dir={run}", *EXACT, *UNEVEN, *layout, *overrides, f"run.steps={step}"
            )
    ours, theirs = (result(workspace, run, last=legs[0][0]) for run in runs)
    assert_equal_bits(ours, theirs)


@soak
def test_stages_without_a_weight_in_common_make_the_bits_of_one_process(workspace, train):
    """Nothing is summed in another order: a tied embedding would be."""
    untied = (*EXACT, *UNEVEN, "model.architecture.tie_word_embeddings=false")
    train(1, "run.dir=exact-whole", *untied)
    train(2, "run.dir=exact-stages", *untied, *PP)
    assert_equal_bits(result(workspace, "exact-stages"), result(workspace, "exact-whole"))


def test_ranks_that_keep_their_state_after_others_were_killed_make_the_same_bits(
    workspace, single, train, tmp_path
):
    if "fp32" not in single:
        train(1, "run.dir=exact-fp32", *EXACT, *UNEVEN)
        single["fp32"] = result(workspace, "exact-fp32")
    kills = {
        0: [(2, 2, "forward")],
        1: [(1, 3, "backward")],
        2: [(0, 4, "update")],
        3: [(2, 5, "save")],
    }
    run = [*EXACT, *UNEVEN, *deadly("exact-kills", kills)]
    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", *run], folder=workspace, nnodes="1", logs=tmp_path,
        start=Forked, ranks=3, environment={"PYTHONPATH": str(ROOT)},
    ) as nodes:  # fmt: skip
        node = nodes.add()
        nodes.wait(60)
    # Of the others some were past what the dead had saved, and took their own snapshots.
    assert_kept(node.text(), [2, 2])
    assert_equal_bits(result(workspace, "exact-kills"), single["fp32"])


@given(gradients=st.lists(GRADIENTS, min_size=4, max_size=4), dtype=st.booleans())
@settings(deadline=None)
def test_snapped_gradients_add_up_alike_in_any_order(gradients, dtype):
    """Four micro-batches, of weights that share nothing but the grid."""
    width = min(map(len, gradients))
    unit = nn.Linear(width, 1, bias=False, dtype=torch.bfloat16 if dtype else torch.float32)
    snap_gradients([unit], 4, is_sharded)
    terms = []
    for row in gradients:
        inputs = torch.tensor(row[:width], dtype=unit.weight.dtype) / 4
        unit.weight.grad = None
        unit(inputs).sum().backward()
        snapped = unit.weight.grad.flatten()
        assert (snapped - inputs).abs().max() <= GRID / 2
        terms.append(snapped.double())
    exact = [math.fsum(term[i].item() for term in terms) for i in range(width)]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1)):
        total = sum((terms[i] for i in order), torch.zeros(width, dtype=torch.float64))
        assert total.tolist() == exact


def test_a_gradient_too_large_for_an_exact_sum_is_not_finite():
    unit = nn.Linear(1, 1, bias=False)
    snap_gradients([unit], 4, is_sharded)
    for size, finite in ((LARGEST_GRADIENT / 4, True), (LARGEST_GRADIENT / 3.9, False)):
        unit.weight.grad = None
        unit(torch.tensor([size])).sum().backward()
        assert unit.weight.grad.isfinite().all() == finite
    unit.weight.grad = None
    unit(torch.tensor([math.inf])).sum().backward()
    assert not unit.weight.grad.isfinite().any()


@given(st.permutations([900.1, 0.3, 7.3e-4, 3e-7, 7e-9, 1.1e-8, 5.7e-9, 2.3e-10]))
def test_losses_add_up_alike_in_any_order(losses):
    terms = [snap_loss(torch.tensor(loss)) for loss in losses]
    assert terms == pytest.approx([torch.tensor(loss).item() for loss in losses], abs=2**-33)
    assert sum(terms).item() == math.fsum(terms)


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameter(gradient):
    made = nn.Parameter(torch.empty_like(gradient))
    made.grad = gradient
    return made


def test_the_norm_does_not_depend_on_how_gradients_are_cut(alone):
    """Magnitudes from 1e-9 to 10: sums in an order of their own would differ."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(100_000, generator=generator)
    whole *= 10 ** (torch.rand(100_000, generator=generator) * 10 - 9)
    cpu = torch.device("cpu")
    expected = square_sums([parameter(whole)], cpu)
    assert expected.sum().item() == pytest.approx(whole.double().square().sum().item(), rel=1e-13)
    for seed in range(5):
        order = torch.randperm(100_000, generator=torch.Generator().manual_seed(seed))
        cuts = sorted(random.Random(seed).sample(range(1, 100_000), 4))
        pieces = whole[order].tensor_split(cuts)
        assert square_sums([parameter(piece) for piece in pieces], cpu).equal(expected)
    for bad in (math.nan, math.inf):
        whole[77] = bad
        assert square_sums([parameter(whole), parameter(torch.ones(3))], cpu).isnan().all()
    assert square_sums([parameter(torch.zeros(3))], cpu).tolist() == [0, 0, 0]
    terms = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)), [Partial()])
    with pytest.raises(ValueError, match=r"gradient of a parameter of shape \(3,\) is Partial"):
        square_sum([parameter(terms)], 1)


def test_the_update_is_adamw_and_does_not_depend_on_how_weights_are_cut():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator)
    gradients = [torch.randn(1000, generator=generator) * 10**-k for k in range(6)]

    def trained(build, cuts):
        weights = [nn.Parameter(piece.clone()) for piece in start.tensor_split(cuts)]
        optimizer = build(weights)
        for gradient in gradients:
            for weight, piece in zip(weights, gradient.tensor_split(cuts), strict=True):
                weight.grad = piece.clone()
            optimizer.step()
        return torch.cat([weight.detach() for weight in weights])

    def exact(weights):
        rule = ParameterGroup(match="*", weight_decay=0.1)
        options = OptimizerSection(lr=1e-2, betas=(0.9, 0.95), groups=(rule,))
        return build_optimizer({str(n): w for n, w in enumerate(weights)}, options, exact=True)

    def torchs(weights):
        return torch.optim.AdamW(weights, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    whole = trained(exact, [])
    torch.testing.assert_close(whole, trained(torchs, []), rtol=1e-6, atol=1e-6)
    for cuts in ([333, 667], [1], [7, 500, 503], [999]):
        assert trained(exact, cuts).equal(whole)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("strategy.zero=1", "strategy.sharding: OPTIMIZER_STATE .* use SHARD_GRAD_OP"),
        ("strategy.reduce_every_pass=true", "strategy.reduce_every_pass: .* remove"),
        ("precision.dtype=fp16", "precision.dtype: .* use bf16 or fp32"),
    ],
)
def test_refuses_what_cannot_be_exact(workspace, override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(workspace / "recipe.yaml", ["run.determinism=exact", override])
