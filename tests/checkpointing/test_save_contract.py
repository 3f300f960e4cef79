"""What `save` promises: it holds one moment in time, and what fails on one rank fails on all."""

import threading

import pytest
import torch

from checkpointing import CheckpointOptions, SaveFailed, TensorCheckpointer, optimizer_tensors
from checkpointing.format.tensors import as_bytes
from checkpointing.save import staging
from checkpointing.tools.inspect import verify
from tests.checkpointing.worlds import run_ranks

BULK = 16 << 20
"""Bytes that are copied before what may change at once."""


def save_and_go_on(tmp_path):
    """Forward passes follow at once, until the optimizer steps; then a load does."""
    model = torch.nn.Sequential(torch.nn.Linear(4, BULK // 16), torch.nn.BatchNorm1d(BULK // 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.arange(8.0).reshape(2, 4)
    model(inputs).square().sum().backward()
    optimizer.step()
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer_tensors(optimizer, dict(model.named_parameters())),
    }
    with TensorCheckpointer(tmp_path, CheckpointOptions(), None) as checkpointer:
        checkpointer.prepare(**parts)
        moments = {}
        for step in (1, 2, 3):
            moments[step] = {name: value.clone() for name, value in model.state_dict().items()}
            checkpointer.save(step, **parts, state={"step": step}, files={}, wait=True)
            model(inputs)
            checkpointer.wait()
        for step in (2, 1):  # a load follows a save at once: of another state, into the same
            (tmp_path / f"step-{step + 1:08}" / "index.json").unlink()
            assert checkpointer.load(**parts) == {"step": step}
            for name, value in model.state_dict().items():
                assert torch.equal(value, moments[step][name]), name
        model[0].weight.data.fill_(7.0)
        checkpointer.save(4, **parts, state={"step": 4}, files={}, wait=True)
        assert checkpointer.load(**parts) in ({"step": 1}, {"step": 4})  # 4 may be committed
        checkpointer.wait()
        assert checkpointer.load(**parts) == {"step": 4}
        assert bool((model[0].weight == 7.0).all())


def test_a_save_holds_the_buffers_of_its_moment(tmp_path):
    (error,) = run_ranks(1, lambda rank: save_and_go_on(tmp_path / "run"), tmp_path / "ranks")
    assert error is None
    assert not verify(tmp_path / "run" / "step-00000004").problems


CIRCLE: dict = {}
CIRCLE["itself"] = CIRCLE


def failing(rank, what):
    """Arguments of a save that fail on one rank."""
    model = {"w": torch.ones(4)}
    parts = {"model": model, "optimizer": {}, "state": {}, "files": {}}
    parts |= (
        {
            "state": {"state": {"step": threading.Lock()}},
            "circle": {"state": CIRCLE},
            "files": {"files": {"config.json": "text"}},
            "name": {"files": {"../config.json": b""}},
        }.get(what, {})
        if rank == 0
        else {}
    )
    if what == "tensor" and rank == 1:
        parts["model"] = {"w": None}
    return parts


@pytest.mark.parametrize("prepared", [True, False])
def test_what_fails_on_one_rank_fails_on_all(prepared, tmp_path):
    good = {"model": {"w": torch.ones(4)}, "optimizer": {}, "state": {}, "files": {}}

    def work(rank):
        told = []
        group = torch.distributed.group.WORLD
        with TensorCheckpointer(tmp_path, CheckpointOptions(), group) as checkpointer:
            if prepared:
                checkpointer.prepare(model=good["model"], optimizer={})
            for step, what in enumerate(("state", "circle", "files", "name", "tensor"), 1):
                try:
                    checkpointer.save(step, **failing(rank, what), wait=True)
                    checkpointer.wait()
                except (SaveFailed, Exception) as error:
                    told.append(str(error))
                checkpointer.outcomes()
            checkpointer.save(9, **good, wait=True)
            checkpointer.wait()
        return told

    first, *others = run_ranks(3, work, tmp_path / "ranks")
    assert [told[:4] for told in others] == [first[:4]] * 2
    for message, says in zip(first, ("as JSON", "as JSON", "not bytes", "plain"), strict=False):
        assert says in message
    assert all(len(told) == 5 and "NoneType" in told[4] for told in (first, *others))
    assert (tmp_path / "step-00000009").exists()


def test_no_copy_of_a_tensor_in_another_order_is_larger_than_a_portion(tmp_path, monkeypatch):
    """Such a tensor is cut into portions like any other. Each takes the elements that it wants."""
    monkeypatch.setattr(staging, "PORTION_BYTES", 1001)  # inside elements
    handled = []

    def watched(tensor):
        handled.append(tensor.nbytes)
        return as_bytes(tensor)

    monkeypatch.setattr(staging, "as_bytes", watched)
    values = torch.arange(3 * 5 * 700, dtype=torch.float64).reshape(3, 5, 700)
    model = {
        "a": values.permute(2, 0, 1),  # rows shorter than a portion
        "b": values.permute(1, 2, 0),  # longer ones
        "c": values.float().transpose(1, 2)[:, ::2],
        "d": values[0].bfloat16().T,
    }
    with TensorCheckpointer(tmp_path, CheckpointOptions(), None) as checkpointer:
        checkpointer.save(1, model=model, optimizer={}, state={}, files={}, wait=True)
        checkpointer.wait()
        loaded = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        checkpointer.load(model=loaded, optimizer={})
    assert len(handled) > sum(tensor.nbytes for tensor in model.values()) // 1001
    assert max(handled) <= 1001 + 2 * 8
    for name, tensor in model.items():
        assert torch.equal(loaded[name], tensor), name
