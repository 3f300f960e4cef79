"""Code that was written for torch.distributed.checkpoint: one line is another."""

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from checkpointing import CheckpointError, WrongModel
from checkpointing.adapters import dcp as ours
from tests.checkpointing.worlds import run_ranks


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 9])


def train(model, optimizer, schedule):
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def whole(model):
    return [parameter.full_tensor().tolist() for parameter in model.parameters()]


def test_a_dcp_program_saves_and_loads_in_another_world(tmp_path):
    """By a name of one's own, and by that of a step in a run that goes on."""
    names = tmp_path / "one", tmp_path / "run" / "step-00000007"

    def save(_rank):
        parts = build()
        train(*parts)
        model, optimizer = get_state_dict(parts[0], parts[1])
        state = {"model": model, "optimizer": optimizer, "schedule": parts[2], "n": {"step": 1}}
        for at in (*names, names[1].with_name("step-00000008")):
            ours.save(state, checkpoint_id=at)
        train(*parts)
        return whole(parts[0]), parts[1].param_groups[0]["lr"]

    def loaded(at):
        parts = build()
        train(*parts)  # other weights, and state for the optimizer
        train(*parts)
        model, optimizer = get_state_dict(parts[0], parts[1])
        state = {"model": model, "optimizer": optimizer, "schedule": parts[2], "n": {"step": 0}}
        ours.load(state, checkpoint_id=at)
        set_state_dict(
            *parts[:2], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        train(*parts)
        return whole(parts[0]), parts[1].param_groups[0]["lr"], state["n"]["step"]

    (weights, rate), _ = run_ranks(2, save, tmp_path / "ranks")
    for of_names in run_ranks(3, lambda _: [*map(loaded, names)], tmp_path / "ranks"):
        for found, loaded_rate, step in of_names:
            assert step == 1
            assert loaded_rate == rate
            for one, other in zip(found, weights, strict=True):
                assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6)


def test_one_writer_serves_all_names_and_a_save_takes_the_place_of_the_one_before(tmp_path):
    def work(rank):
        for value in range(3):
            for name in ("best", "last"):
                state = {"a": torch.full((3,), float(value)), "value": value, "name": name}
                ours.save(state, checkpoint_id=tmp_path / name)
        with Path("/proc/thread-self/children").open() as children:
            writers = children.read().split()
        (kept,) = [one for (pid, _, _), one in ours._KEPT.items() if pid == os.getpid()]
        kept.close()
        del ours._KEPT[os.getpid(), "", None]
        return len(writers)

    assert run_ranks(2, work, tmp_path / "ranks") == [1, 0]
    for name in ("best", "last"):
        assert [path.name for path in (tmp_path / name).glob("step-*")] == ["step-00000002"]
        found = {"a": torch.zeros(3), "value": 0, "name": ""}
        ours.load(found, checkpoint_id=tmp_path / name)
        assert found == {"a": found["a"], "value": 2, "name": name}
        assert found["a"].tolist() == [2, 2, 2]
    ours.save(found, checkpoint_id=tmp_path / "run" / "step-00000007")
    with pytest.raises(CheckpointError, match="step-00000007 exists already; move it away"):
        ours.save(found, checkpoint_id=tmp_path / "run" / "step-00000007")


def test_what_does_not_fit_is_refused(tmp_path):
    state = {"a": torch.ones(2), "more": [{"b": torch.zeros(3), "k": (1, 2)}], "c": {"d": "text"}}
    ours.save(state, checkpoint_id=tmp_path / "it")
    target = {"a": torch.zeros(2), "more": [{"b": torch.ones(3), "k": None}], "c": {}}
    ours.load(target, checkpoint_id=tmp_path / "it")
    assert target["more"][0]["k"] == (1, 2)
    assert target["c"] == {"d": "text"}
    assert target["a"].tolist() == [1, 1]
    empty = {"a": torch.zeros(2), "more": [{"b": torch.ones(3), "k": None}], "c": {"d": ""}}
    with pytest.raises(WrongModel, match=r"but not in both: e; give dcp\.load all"):
        ours.load({**empty, "e": 1}, checkpoint_id=tmp_path / "it")
    assert empty["a"].tolist() == [0, 0]
    file = r"model-00001-of-00001\.safetensors"
    with pytest.raises(WrongModel, match=rf"a \[3\] \(checkpoint \[2\], {file}\)"):
        ours.load({**empty, "a": torch.zeros(3)}, checkpoint_id=tmp_path / "it")
    assert empty["more"][0]["b"].tolist() == [1, 1, 1]
    with pytest.raises(WrongModel, match=r"some tensors with checkpointing\.load_model"):
        ours.load({"a": torch.zeros(2)}, checkpoint_id=tmp_path / "it")
    for call in ours.save, ours.async_save, ours.load:
        with pytest.raises(TypeError, match=r"\(planner=…\): is not supported.* leave it out"):
            call(state, checkpoint_id=tmp_path / "it", planner=object())
    with pytest.raises(CheckpointError, match="no checkpoint"):
        ours.load(target, checkpoint_id=tmp_path / "other")
    twice = {"x.y": torch.ones(1), "x": {"y": torch.ones(1)}}
    with pytest.raises(ValueError, match=r"the name x\.y occurs twice"):
        ours.save(twice, checkpoint_id=tmp_path / "twice")


def test_a_save_goes_on_while_the_state_changes_and_its_failure_is_told_once_asked(tmp_path):
    def work(rank):
        values = torch.zeros(3)
        state = {"a": values, "n": 0}
        savings = []
        for n in range(3):  # the next waits for the one before, also where it is of another name
            values.fill_(n)
            state["n"] = n
            savings.append(ours.async_save(state, checkpoint_id=tmp_path / f"{n % 2}"))
            values.fill_(-1)
        assert savings[0].done()
        assert savings[1].done()
        deadline = time.monotonic() + 30
        while not savings[2].done() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [one.result() for one in savings] == [None] * 3
        found = []
        for name in "01":
            ours.load(state, checkpoint_id=tmp_path / name)
            found.append((state["n"], values.tolist()))
        state["a"] = torch.full((3,), float("nan"))
        model = {"a": nn.Parameter(state["a"]), "n": 0}
        failed = ours.async_save(model, checkpoint_id=tmp_path / "0")
        ours.load(state, checkpoint_id=tmp_path / "1")
        told = str(failed.exception())
        return found, told

    for found, told in run_ranks(2, work, tmp_path / "ranks"):
        assert found == [(2, [2.0] * 3), (1, [1.0] * 3)]
        assert "NaN or infinity in model/a" in told


class Odd:
    """Its state cannot be had, or put back, on a rank."""

    def __init__(self, fails):
        self.fails = fails

    def state_dict(self):
        if self.fails == "state_dict":
            raise KeyError("not today")
        return {"n": 1}

    def load_state_dict(self, state_dict):
        if self.fails:
            raise KeyError("not today")


def test_an_error_of_one_rank_is_one_of_all(tmp_path):
    def work(rank):
        def told(call, fails, failing):
            state = {"a": torch.ones(2), "odd": Odd(fails if rank == failing else None)}
            with pytest.raises(RuntimeError, match="not today"):
                call(state, checkpoint_id=tmp_path / "it")

        told(ours.save, "state_dict", 0)
        ours.save({"a": torch.ones(2), "odd": Odd(None)}, checkpoint_id=tmp_path / "it")
        told(ours.load, "state_dict", 1)
        told(ours.load, "load_state_dict", 0)
        return "told"

    assert run_ranks(2, work, tmp_path / "ranks") == ["told"] * 2
