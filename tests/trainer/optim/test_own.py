"""Optimizers of `optimizer.factory`: what they keep, what they get when parameters are sharded, and
their rates."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import soak
from trainer.optim.optimizer import set_rate
from trainer.optim.own import build_own, describe_own
from trainer.optim.saved_state import own_state, own_targets
from trainer.optim.slices import is_elementwise, like_sharded
from trainer.recipe import OptimizerSection, ParameterGroup, RecipeError

SHAPES = (
    *((7, 5), (8, 6), (6,), (5, 4, 3), (1, 9), (4, 1), (2, 6), (1, 1), (2,)),
    *((4, 3, 2, 2), (5, 1, 3, 3), (1, 2, 3, 3)),  # kernels of convolutions
)
"""With fewer rows than ranks, and rows that ranks cannot share evenly."""
FACTORS = OptimizerSection(factory="torch.optim:Adafactor", lr=0.05)


def trained(place, shapes, saved=None):
    """What parameters are after four steps, whole; with the placements of all state, and with what
    is kept after two. With `saved` another optimizer goes on from that then."""
    draw = torch.Generator().manual_seed(0)
    parameters = {
        f"{shape}": nn.Parameter(place(torch.randn(shape, generator=draw))) for shape in shapes
    }
    optimizer = build_own(parameters, FACTORS)
    after_two = None
    for step in range(4):
        if step == 2:
            found = own_state(optimizer, parameters)
            tensors = {name: whole(tensor).clone() for name, tensor in found.tensors.items()}
            after_two = json.dumps(found.trees), tensors
            if saved:
                optimizer = build_own(parameters, FACTORS)
                targets = own_targets(optimizer, parameters, json.loads(saved[0]), {})
                for name, target in targets.tensors.items():
                    target.copy_(like_sharded(saved[1][name], target))
                targets.put()
        for parameter in parameters.values():
            parameter.grad = place(torch.randn(parameter.shape, generator=draw))
        optimizer.step()
    ends, kept = {}, {}
    for name, parameter in parameters.items():
        ends[name] = whole(parameter.detach())
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, DTensor):
                kept[f"{name} {key}"] = tuple(value.placements)
    return ends, kept, after_two


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("sizes", "cuts", "shapes"),
    [
        ((3,), (Shard(0),), SHAPES[::2]),
        pytest.param((3,), (Shard(0),), SHAPES, marks=soak),
        pytest.param((2, 2), (Replicate(), Shard(0)), SHAPES[:3], marks=soak),
    ],
)
def test_factors_of_sharded_matrices_are_those_of_whole_ones(tmp_path, sizes, cuts, shapes):
    wanted, _, saved = trained(torch.Tensor.clone, shapes)

    def rank(_):
        mesh = init_device_mesh("cpu", sizes)
        # On the larger mesh it goes on from what whole matrices have saved.
        given = saved if len(sizes) > 1 else None
        return trained(lambda tensor: distribute_tensor(tensor, mesh, cuts), shapes, given)

    for found, kept, _ in run_ranks(math.prod(sizes), rank, tmp_path):
        for name, end in wanted.items():
            torch.testing.assert_close(found[name], end, rtol=1e-5, atol=1e-6, msg=name)
        assert kept["(7, 5) row_var"] == cuts  # with the rows
        assert not any(cut.is_shard() for cut in kept["(7, 5) col_var"])


class Aliases(torch.optim.SGD):
    """Has its parameters, and what it keeps for them, at hand, and makes a table once."""

    def __init__(self, groups, lr=1e-3):
        super().__init__(groups, lr=lr)
        self.weights = [one for group in self.param_groups for one in group["params"]]
        self.table = []

    @torch.no_grad()
    def step(self, closure=None):
        self.table = self.table or [torch.linspace(0, 1, 4)]
        self.sums = [self.state[one].setdefault("sum", torch.zeros(4, 3)) for one in self.weights]
        for one, total in zip(self.weights, self.sums, strict=True):
            if one.grad is not None:
                one.sub_(total.add_(one.grad), alpha=self.param_groups[0]["lr"])


class Counting(torch.optim.SGD):
    """Counts in its groups, and in an int of each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                calls = self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] / calls / group["steps"])


class Forgetful(torch.optim.SGD):
    """Counts where no checkpoint looks."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        super().step()


class Clipping(torch.optim.SGD):
    """Takes an element by itself, unless the gradient is larger than any that it is tried with."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(max(1, parameter.grad.norm() / 1e9))
        super().step()


class Local(torch.optim.SGD):
    """Divides by the norm of what it takes for the whole gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                local = getattr(parameter.grad, "_local_tensor", parameter.grad)
                local.div_(local.norm() + 1e-6)
        super().step()


class Estimating(torch.optim.SGD):
    """Finds its rate from all gradients, and begins so low that no weight shows it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] = max(group.get("d", 1e-9), *(float(p.grad.sum()) for p in group["params"]))
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=1e-12 * group["d"])


class Blocks(torch.optim.SGD):
    """Rounds what it keeps in blocks of numbers, if there are enough of them."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
            kept.add_(parameter.grad)
            if kept.numel() >= 4096:
                kept.copy_((kept.view(-1, 256).cumsum(1) * 8).round().view_as(kept) / 8)
            parameter.sub_(kept, alpha=0.1)


def weights(*shape):
    return {"weight": nn.Parameter(torch.randn(shape))}


def own(name, **options):
    return OptimizerSection(factory=f"{__name__}:{name}", lr=0.1, **options)


@pytest.mark.parametrize("name", ["Aliases", "Counting"])
def test_what_is_at_hand_or_counted_is_no_hindrance_and_nothing_is_drawn(name):
    before = torch.get_rng_state()
    build_own({"weight": nn.Parameter(torch.zeros(4, 3))}, own(name))
    assert torch.equal(before, torch.get_rng_state())


def test_what_no_checkpoint_holds_is_refused():
    with pytest.raises(RecipeError, match="Forgetful changes count of the optimizer itself"):
        build_own(weights(4, 3), own("Forgetful"))
    with pytest.raises(RecipeError, match=r"Unheard updates .* otherwise after a checkpoint"):
        build_own(weights(4, 3), own("Unheard"))


class Unheard(Counting):
    """Has a state_dict of its own, which leaves out the numbers."""

    def state_dict(self):
        return {"nothing": 0}

    def load_state_dict(self, state_dict):
        assert state_dict == {"nothing": 0}


@pytest.mark.parametrize(
    ("name", "elementwise"),
    [
        *(("Counting", True), ("Clipping", False), ("Estimating", False), ("Blocks", False)),
        *(("Local", False), ("Unheard", False)),
    ],
)
def test_slices_are_for_those_that_take_each_element_by_itself(name, elementwise):
    def build(parameters):
        return globals()[name](parameters.values(), lr=0.1)

    with torch.random.fork_rng():
        assert is_elementwise(weights(64, 64), build) == elementwise


def test_a_sharded_optimizer_that_does_other_things_than_a_whole_one_is_refused(tmp_path):
    def rank(_):
        mesh, said = init_device_mesh("cpu", (2,)), []
        for name in ("Local", "Unheard", "Counting"):
            whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
            cut = {"weight": nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))}
            try:
                said.append(type(build_own(cut, own(name))).__name__)
            except RecipeError as error:
                said.append(str(error))
        return said

    for local, unheard, counting in run_ranks(2, rank, tmp_path):
        assert "Local updates sharded parameters otherwise than whole ones" in local
        assert "Unheard has a state_dict of its own" in unheard or "after a checkpoint" in unheard
        assert counting == "SliceOptimizer"


def test_the_factorys_word_counts_for_rates_and_the_schedule_multiplies_it():
    """Each group of a factory keeps its rate and decay, and what the recipe overrides is said."""
    parameters = {f"{n}.weight": nn.Parameter(torch.randn(4, 3)) for n in range(2)}
    optimizer = build_own(parameters, own("two_rates"))
    set_rate(optimizer, 0.05)  # half of the recipe's
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-3, 5e-5])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.01]
    said = describe_own(optimizer, own("two_rates"))
    assert "1 parameter(s) with lr 0.01, weight_decay 0.3;" in said
    assert "1 parameter(s) with lr 0.0001, weight_decay 0.01;" in said

    adamw = OptimizerSection(factory="torch.optim:AdamW", lr=0.1, factory_options={"lr": 1e-3})
    optimizer = build_own(parameters, adamw)
    set_rate(optimizer, 0.05)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
    assert "weight_decay 0.1 of the recipe instead of its own 0.01" in describe_own(
        optimizer, adamw
    )
    options = {"weight_decay": 0.2}
    optimizer = build_own(parameters, replace(adamw, factory_options=options))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2]
    ruled = ParameterGroup(match="0.*", lr_scale=0.5, weight_decay=0.0)
    optimizer = build_own(parameters, replace(adamw, groups=(ruled,), factory_options={}))
    set_rate(optimizer, 0.1)
    told = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert told == [(0.05, 0.0), (0.1, 0.1)]


def two_rates(groups):
    (_, first), (_, second) = [pair for group in groups for pair in group["params"]]
    return torch.optim.AdamW(
        [{"params": [first], "lr": 1e-2, "weight_decay": 0.3}, {"params": [second], "lr": 1e-4}]
    )
