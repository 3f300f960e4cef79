"""Tensors that must hold finite numbers: no step is committed, remembered or loaded in which one
does not."""

import json
import logging
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from checkpointing import (
    Checkpointer,
    CheckpointOptions,
    DamagedCheckpoint,
    SaveFailed,
    TensorCheckpointer,
    load_model,
)
from checkpointing.format.digests import digest_and_finite
from checkpointing.format.plan import SectionNumbers
from tests.checkpointing.worlds import STRATEGIES, run_ranks, spread, whole_state

FINITE = {"w"}


def parts(step, **values):
    """A step's arguments: `w` and its moment must be finite, `mask` need not."""
    model = {
        "w": torch.full((40, 3), float(step), dtype=torch.bfloat16),
        "mask": torch.tensor([0.0, -torch.inf]),
    }
    optimizer = {"w.exp_avg_sq": torch.full((40, 3), float(step))}
    for name, value in values.items():
        {"w": model["w"], "moment": optimizer["w.exp_avg_sq"]}[name][-1, -1] = value
    return {"model": model, "optimizer": optimizer, "finite": FINITE}


def load(checkpointer, again=False, finite=FINITE):
    """Step that was loaded, and its `w`."""
    targets = {name: part for name, part in parts(0).items() if name != "finite"}
    found = (checkpointer.reload if again else checkpointer.load)(**targets, finite=finite)
    return found["step"], targets["model"]["w"]


@pytest.mark.parametrize(
    ("slots", "values", "name"),
    [(2, {"w": -torch.inf}, "model/w"), (0, {"moment": torch.nan}, "optimizer/w.exp_avg_sq")],
)
def test_a_step_that_is_not_finite_is_not_there(tmp_path, slots, values, name):
    options = CheckpointOptions(keep=1, slots=slots, when_busy="wait")
    with TensorCheckpointer(tmp_path, options, None) as checkpointer:
        checkpointer.save(1, **parts(1), state={"step": 1}, files={})
        checkpointer.wait()
        assert not checkpointer.not_finite
        if slots:
            checkpointer.save(2, **parts(2), state={"step": 2}, files={}, memory_only=True)
        for step in (3, 4):
            checkpointer.save(step, **parts(step, **values), state={"step": step}, files={})
            with pytest.raises(SaveFailed, match=f"NaN or infinity in {name}; earlier"):
                checkpointer.wait()
        checkpointer.save(5, **parts(5, **values), state={"step": 5}, files={}, memory_only=True)
        assert name in checkpointer.not_finite
        assert [path.name for path in tmp_path.glob("step-????????")] == ["step-00000001"]
        step, w = load(checkpointer, again=True)
        assert step == (2 if slots else 1)
        assert bool((w == step).all())
        assert not checkpointer.not_finite
        checkpointer.save(6, **parts(6), state={"step": 6}, files={})
        checkpointer.wait()
    record = json.loads((tmp_path / "step-00000006" / "index.json").read_bytes())
    assert record["not_finite"] == ["model/mask"]


@pytest.mark.parametrize(
    ("verify", "values"), [(True, {"w": torch.inf}), (False, {"moment": torch.nan})]
)
def test_a_step_of_others_that_is_not_finite_is_passed_over(tmp_path, caplog, verify, values):
    options = CheckpointOptions(keep=0, verify=verify, when_busy="wait", slots=0)
    with TensorCheckpointer(tmp_path, options, None) as checkpointer:
        for step, given in ((1, {}), (2, values), (3, values)):
            anything = {**parts(step, **given), "finite": None}
            checkpointer.save(step, **anything, state={"step": step}, files={}, wait=True)
        checkpointer.wait()
    with TensorCheckpointer(tmp_path, options, None) as checkpointer:
        with caplog.at_level(logging.WARNING):
            step, w = load(checkpointer)
        assert step == 1
        assert bool((w == 1).all())
        assert "the checkpoint of step 3 is damaged and passed over" in caplog.text
        assert "NaN or infinity in" in caplog.text
        shutil.rmtree(tmp_path / "step-00000001")
        with pytest.raises(DamagedCheckpoint, match="NaN or infinity in"):
            load(checkpointer)


def saved_and_told(rank, folder, strategy):
    """What a rank hears of a save of two steps, the second with a NaN in one rank's part."""
    model, optimizer = whole_state(3)
    model.pop("layers.0.cube")
    model.pop("layers.0.eighth")
    model, optimizer = spread(model, strategy), spread(optimizer, strategy)
    with TensorCheckpointer(folder, CheckpointOptions(), dist.group.WORLD) as checkpointer:
        given = {"model": model, "optimizer": optimizer, "finite": model.keys()}
        checkpointer.save(1, **given, state={"step": 1}, files={})
        checkpointer.wait()
        (good,) = checkpointer.outcomes()
        if rank == dist.get_world_size() - 1 or strategy == "replicated":
            part = model["embed_tokens.weight"]
            (part.to_local() if strategy != "replicated" else part).view(-1)[-1] = torch.nan
        checkpointer.save(2, **given, state={"step": 2}, files={})
        try:
            checkpointer.wait()
        except SaveFailed as error:
            return good.weights, good.moments, str(error)


def test_every_rank_hears_of_it_and_digests_are_of_the_state_not_of_the_world(tmp_path):
    told = {}
    for strategy in ("replicated", "rows-3", "columns-2"):
        ranks = max(STRATEGIES[strategy][0], default=2)
        heard = run_ranks(
            ranks,
            lambda rank, at=tmp_path / strategy, s=strategy: saved_and_told(rank, at, s),
            tmp_path / "ranks",
        )
        assert len(set(heard)) == 1, heard
        assert "NaN or infinity in model/embed_tokens.weight" in heard[0][2]
        assert [path.name for path in (tmp_path / strategy).glob("step-????????")] == [
            "step-00000001"
        ]
        told[strategy] = heard[0][:2]
    assert len(set(told.values())) == 1, told
    for section, digest in zip(("model", "optimizer"), told["rows-3"], strict=True):
        total = SectionNumbers()
        where = tmp_path / "rows-3" / "step-00000001"
        for file in where.rglob(f"{section}-*.safetensors"):
            for name, tensor in load_file(file).items():
                size = tensor.element_size()
                bits = tensor.reshape(-1).view(torch.uint8).numpy().view(f"u{size}")
                bits = bits.reshape(tensor.shape)
                origin = (0,) * tensor.ndim
                full = f"{section}/{name}"
                total += SectionNumbers(digest_and_finite(full, "", tensor.shape, origin, bits)[0])
        assert f"{total.weights:016x}" == digest


def test_a_loop_of_ones_own_keeps_its_last_finite_step(tmp_path, caplog):
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("mask", torch.tensor([-torch.inf, 0.0]))

    model = Masked()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path, keep=1) as checkpointer, caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            if step == 2:
                with torch.no_grad():
                    model.weight[1, 1] = torch.nan
            checkpointer.save(step, state)
            checkpointer.wait_staged()
    assert "saving step 3 failed: NaN or infinity in model/weight" in caplog.text
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(state) == 1
    assert bool(model.weight.isfinite().all())


def test_weights_to_begin_from_must_be_finite(tmp_path):
    weights = {"w": torch.ones(3), "mask": torch.tensor([-torch.inf])}
    targets = {name: torch.zeros_like(one) for name, one in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    load_model(tmp_path, targets, finite={"w"})
    save_file({**weights, "w": torch.tensor([1.0, torch.nan, 1.0])}, tmp_path / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors: NaN or infinity in w"):
        load_model(tmp_path, targets, finite={"w"})
