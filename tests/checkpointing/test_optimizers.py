"""Saving and loading an optimizer changes no update, whatever it keeps: every optimizer of torch,
and classes that keep what torch's do not."""

import random
from collections import deque

import pytest
import torch
import torch.distributed as dist

from checkpointing import Checkpointer, WrongModel
from checkpointing.format.layout import TensorMeta
from checkpointing.format.optimizers import optimizer_targets
from tests.checkpointing.worlds import run_ranks, same_bits

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
TENSORS_ALONE = sorted(OPTIMIZERS.keys() - {"LBFGS", "SparseAdam"})
GIVEN = {
    "SGD": {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "ASGD": {"lambd": 0.1, "t0": 2},
    "AdamW": {"amsgrad": True},
}


class Odd(torch.optim.Optimizer):
    """Keeps an int, a list and a queue for each parameter, one number for all, and counts in its
    groups; decays by a factor that no learning rate is in, and draws."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "steps": 0, "largest": torch.tensor(0.0)})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"] = self.state.get("all", 0) + 1
        for group in self.param_groups:
            group["steps"] += 1
            group["largest"] += torch.rand(())
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["calls"], state["means"] = 0, [torch.zeros_like(parameter), None]
                    state["last"] = deque(maxlen=2)
                state["calls"] += 1
                state["means"][0].lerp_(parameter.grad, 1 / state["calls"])
                state["last"].append(parameter.grad.clone())
                rate = group["lr"] * group["steps"] * self.state["all"] * group["largest"]
                parameter.mul_(0.99).sub_(state["means"][0] + sum(state["last"]), alpha=rate.item())


class Looking(torch.optim.SGD):
    """Looks at the state of a parameter before there is any, as schedule-free ones do."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)
        for parameter in self.param_groups[0]["params"]:
            assert "z" not in self.state[parameter]


class Inside(torch.optim.Optimizer):
    """Steps by another optimizer, and says nothing of it."""

    def __init__(self, params, lr):
        self.inner = torch.optim.AdamW(params, lr)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()


class Lookahead(Inside):
    """Goes half of the way back every third step; has a state_dict of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]
        self.steps = 0

    def step(self, closure=None):
        super().step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
                parameter.data.lerp_(slow, 0.5)
                slow.copy_(parameter.data)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict["inner"])
        self.slow, self.steps = state_dict["slow"], state_dict["steps"]


OWN = {kind.__name__: kind for kind in (Odd, Looking, Lookahead)}


def start(name):
    """(parameters by name, their optimizer): `late` gets its first gradient at step 2."""
    draw = torch.Generator().manual_seed(0)
    parameters = {
        key: torch.nn.Parameter(torch.randn(4, 3, generator=draw)) for key in ("early", "late")
    }
    kind = {**OPTIMIZERS, **OWN}[name]
    return parameters, kind(parameters.values(), lr=0.01, **GIVEN.get(name, {}))


def train(parameters, optimizer, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        torch.manual_seed(step)
        for key, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=draw)
            parameter.grad = gradient if key == "early" or step > 1 else None
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def whole(parameters, optimizer):
    """What `Checkpointer` takes."""
    return {"model": torch.nn.ParameterDict(parameters), "optimizer": optimizer}


@pytest.mark.parametrize("name", [*TENSORS_ALONE, *OWN])
def test_an_update_does_not_tell_that_its_state_was_loaded_or_saved(name, tmp_path):
    wanted = train(*start(name), range(1, 9))
    drawn = random.getstate(), torch.get_rng_state()
    parameters, optimizer = start(name)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(whole(parameters, optimizer)) is None
        assert (drawn[0], drawn[1].tolist()) == (random.getstate(), torch.get_rng_state().tolist())
        checkpointer.guard(optimizer)
        for step in range(1, 9):
            found = train(parameters, optimizer, [step])
            if step in (1, 5):
                checkpointer.save(step, whole(parameters, optimizer), wait=True)
    assert all(same_bits(found[key], wanted[key]) for key in wanted)
    # What is loaded into may have state, too: of `late`, which step 1 has none of.
    for begin, trained in (1, 3), (5, 0):
        parameters, optimizer = start(name)
        train(parameters, optimizer, range(11, 11 + trained))
        with Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.load(whole(parameters, optimizer), step=begin) == begin
        found = train(parameters, optimizer, range(begin + 1, 9))
        assert all(same_bits(found[key], wanted[key]) for key in wanted), begin


def test_an_optimizer_that_hides_state_is_refused(tmp_path):
    parameters, _ = start("AdamW")
    with Checkpointer(tmp_path) as checkpointer:
        state = whole(parameters, Inside(parameters.values(), 0.1))
        with pytest.raises(
            ValueError, match=r"Inside has an inner AdamW, whose state .* leaves out"
        ):
            checkpointer.load(state)
        one = torch.optim.SGD(parameters.values(), 0.1)
        one.state[parameters["early"]]["function"] = print
        with pytest.raises(ValueError, match=r"keeps early.function as builtin_function"):
            checkpointer.save(1, whole(parameters, one))


def test_state_of_each_rank_is_refused_or_the_same(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which compiles for a while

    def rank(number):
        parameters, other = start("AdamW")
        zero = ZeroRedundancyOptimizer([*parameters.values()], torch.optim.AdamW, lr=0.1)
        said = []
        with Checkpointer(tmp_path / "run") as checkpointer:
            other.state[parameters["early"]]["calls"] = dist.get_rank()
            for optimizer in (zero, other):
                try:
                    checkpointer.save(1, whole(parameters, optimizer))
                except ValueError as error:
                    said.append(str(error))
        return said

    for zero, other in run_ranks(2, rank, tmp_path):
        assert "ZeroRedundancyOptimizer.state_dict() fails" in zero
        assert "the state of early on rank 1 has other numbers" in other


def test_a_checkpoint_imports_no_class(tmp_path):
    class Halved(torch.Tensor):
        """A tensor of two, as those are that keep numbers in 8 bits."""

        @staticmethod
        def __new__(cls, half):
            return torch.Tensor._make_wrapper_subclass(cls, half.shape)

        def __init__(self, half):
            self.half_of = half

        def __tensor_flatten__(self):
            return ["half_of"], [torch.float32]

        @classmethod
        def __tensor_unflatten__(cls, inner, given, size, stride):
            assert given == [torch.float32]
            return cls(inner["half_of"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    parameters, optimizer = start("AdamW")
    optimizer.state[parameters["early"]]["mean"] = Halved(torch.ones(4, 3))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, whole(parameters, optimizer), wait=True)
    parameters, optimizer = start("AdamW")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(whole(parameters, optimizer))
        kept = optimizer.state[parameters["early"]]["mean"]
        assert type(kept) is Halved
        assert kept.half_of.tolist() == torch.ones(4, 3).tolist()
        Halved.__qualname__ = "Other"
        with pytest.raises(
            WrongModel, match=r"mean was saved as .*Halved, but this process has not"
        ):
            checkpointer.load(whole(*start("AdamW")))


@pytest.mark.parametrize(("capturable", "device"), [(False, "cpu"), (True, "meta")])
def test_a_step_lies_on_the_device_where_the_update_reads_it(capturable, device):
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([weight], capturable=capturable)
    metas = {"w.step": TensorMeta("F32", ()), "w.exp_avg": TensorMeta("F32", (2,))}
    tensors = optimizer_targets(optimizer, {"w": weight}, None, metas).tensors
    assert [tensors[name].device.type for name in metas] == [device, "meta"]
