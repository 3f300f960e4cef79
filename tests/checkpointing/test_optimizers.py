"""Asking for the tensors of an optimizer, saving and loading them, changes no update: for every
optimizer of torch."""

import pytest
import torch

import checkpointing.format.tensors
from checkpointing import CheckpointOptions, TensorCheckpointer, optimizer_tensors
from tests.checkpointing.worlds import local, run_ranks, same_bits, save_now, spread

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


def start(name):
    """(parameters by name, their optimizer): `late` gets its first gradient at step 2."""
    draw = torch.Generator().manual_seed(0)
    parameters = {
        key: torch.nn.Parameter(torch.randn(4, 3, generator=draw)) for key in ("early", "late")
    }
    return parameters, OPTIMIZERS[name](parameters.values(), lr=0.01, **GIVEN.get(name, {}))


def train(parameters, optimizer, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for key, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=draw)
            parameter.grad = gradient if key == "early" or step > 1 else None
        optimizer.step()
        optimizer.zero_grad()


def everything(parameters, optimizer):
    state = {
        f"{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
    return {**{name: parameter.detach() for name, parameter in parameters.items()}, **state}


@pytest.mark.parametrize("name", TENSORS_ALONE)
def test_an_update_does_not_tell_that_its_state_was_asked_for_saved_or_loaded(name, tmp_path):
    parameters, optimizer = start(name)
    train(parameters, optimizer, range(1, 5))
    wanted = everything(parameters, optimizer)

    def parts(parameters, optimizer):
        return {
            "model": {key: parameter.data for key, parameter in parameters.items()},
            "optimizer": optimizer_tensors(optimizer, parameters),
        }

    def check(parameters, optimizer, tensors):
        found = everything(parameters, optimizer)
        assert found.keys() == wanted.keys()
        assert all(same_bits(found[key], wanted[key]) for key in wanted)
        live = {**tensors["model"], **tensors["optimizer"]}
        assert all(same_bits(live[key], wanted[key]) for key in wanted)

    with TensorCheckpointer(tmp_path, CheckpointOptions(), None) as checkpointer:
        parameters, optimizer = start(name)
        tensors = parts(parameters, optimizer)
        assert checkpointer.load(**tensors) is None
        save_now(checkpointer, 0, **tensors, state={}, files={})
        train(parameters, optimizer, [1, 2])
        # A checkpoint of step 2 needs all state, which `late` of some have only now.
        save_now(checkpointer, 2, **tensors, state={}, files={})
        train(parameters, optimizer, [3, 4])
        check(parameters, optimizer, tensors)
    for begin in (2, 0):
        with TensorCheckpointer(tmp_path, CheckpointOptions(), None) as checkpointer:
            parameters, optimizer = start(name)
            tensors = parts(parameters, optimizer)
            assert checkpointer.load(**tensors) is not None
        train(parameters, optimizer, range(begin + 1, 5))
        check(parameters, optimizer, tensors)
        for path in tmp_path.glob("step-00000002/index.json"):
            path.unlink()


class Decaying(torch.optim.Optimizer):
    """Decays by a factor that no learning rate is in, and counts its steps in its groups."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.1)
                parameter.mul_(0.9).sub_(mean, alpha=group["lr"])


@pytest.mark.parametrize("portion", [1 << 30, 1])
def test_asking_changes_neither_weights_nor_gradients_nor_groups(portion, monkeypatch):
    monkeypatch.setattr(checkpointing.format.tensors, "PORTION_BYTES", portion)
    ends = []
    for asked in (False, True):
        parameters, _ = start("SGD")
        groups = [{"params": [one], "lr": one.norm().item()} for one in parameters.values()]
        optimizer = Decaying(groups, {"steps": 0})
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        tensors = optimizer_tensors(optimizer, parameters) if asked else {}
        assert len(tensors) == 2 * asked
        optimizer.step()
        ends.append(everything(parameters, optimizer))
        assert all(group["steps"] == 1 for group in optimizer.param_groups)
    assert all(same_bits(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_an_optimizer_whose_state_is_more_than_tensors_is_refused_unchanged(name):
    parameters, _ = start("AdamW")
    optimizer = OPTIMIZERS[name](parameters.values(), lr=0.01)
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    with pytest.raises(ValueError, match=f"{name} .*; choose an optimizer"):
        optimizer_tensors(optimizer, parameters)
    assert all(same_bits(parameters[key].detach(), before[key]) for key in before)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(parameter.grad is None for parameter in parameters.values())


def test_sharded_state_begins_as_if_nobody_had_asked_too(tmp_path):
    def work(_rank):
        ends = []
        for asked in (False, True):
            parameters, _ = start("NAdam")
            whole = {key: parameter.detach() for key, parameter in parameters.items()}
            shards = {
                key: torch.nn.Parameter(shard) for key, shard in spread(whole, "rows-2").items()
            }
            optimizer = torch.optim.NAdam(shards.values(), lr=0.01)
            tensors = optimizer_tensors(optimizer, shards) if asked else {}
            for shard in shards.values():
                shard.grad = torch.ones_like(shard)
            optimizer.step()
            ends.append({key: local(value) for key, value in everything(shards, optimizer).items()})
            assert all(same_bits(local(tensors[key]), ends[-1][key]) for key in tensors)
        return all(same_bits(ends[0][key], ends[1][key]) for key in ends[0])

    assert run_ranks(2, work, tmp_path) == [True, True]
