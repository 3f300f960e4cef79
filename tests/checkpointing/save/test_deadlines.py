"""What hangs costs one save: it is given up in time, what held it up ends, and others work.
`SOAK=1` has more hang."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpointing import CheckpointOptions, SaveFailed, TensorCheckpointer
from checkpointing.tools.inspect import verify
from tests.checkpointing.faults import children, load, names, parts, plant, until
from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import soak

SECONDS = 5.0
BULK = 1 << 20
"""Bytes that the save which hangs writes besides: for two seconds."""
PER_NODE = 2
TOLD = 3 * SECONDS
"""A rank hears within SECONDS and a fifth; the rest is the machine's."""


def save_through(rank: int, run: Path, stopped: int | None) -> tuple[str, float, int | None, bool]:
    """Step 1 is saved; step 2 hangs; step 3 is saved. What a rank hears of step 2, after how many
    seconds, what it then loads, and whether its writer is another one by then."""
    os.environ["GROUP_RANK"] = str(rank // PER_NODE)
    options = CheckpointOptions(deadline=SECONDS, max_bandwidth="500 kB")
    with TensorCheckpointer(run, options, dist.group.WORLD) as checkpointer:
        checkpointer.save(1, **parts(1))
        checkpointer.wait()
        checkpointer.outcomes()
        writers = children(os.getpid())
        dist.barrier()
        began = time.monotonic()
        checkpointer.save(2, **parts(2, bulk=BULK))
        dist.barrier()  # all have asked, and been answered
        if rank == stopped:  # at once: what is written here takes no more than two seconds
            os.kill(writers[0], signal.SIGSTOP)
        checkpointer.wait_staged()
        told = []
        while not told:  # training goes on meanwhile
            told = checkpointer.outcomes()
            time.sleep(0.01)
        seconds = time.monotonic() - began
        dist.barrier()
        for step in (3, 4):  # the writers of other nodes may hear of it in the middle of step 3
            with suppress(SaveFailed):
                checkpointer.save(step, **parts(step), wait=True)
                checkpointer.wait()
            checkpointer.outcomes()
            dist.barrier()
        anew = writers != children(os.getpid())
    with TensorCheckpointer(run, options, dist.group.WORLD) as checkpointer:
        return str(told[0].error), seconds, load(checkpointer), anew


@pytest.mark.parametrize(
    ("stopped", "hangs", "says"),
    [
        pytest.param(0, None, "", id="writer of rank 0's node", marks=soak),
        pytest.param(2, None, "on node 1: not done within 5 s", id="another writer"),
        pytest.param(None, "pwrite", "model-00001-of-00001.safetensors to be written", id="write"),
        pytest.param(None, "mkdir", "waiting for a place in", id="begin", marks=soak),
        pytest.param(None, "rename", "not done within 5 s", id="commit", marks=soak),
    ],
)
def test_a_save_that_hangs_is_given_up(stopped, hangs, says, tmp_path, monkeypatch):
    run, others = tmp_path / "run", set(children(os.getpid()))
    if hangs:
        label = {"pwrite": "pwrite step-00000002.tmp-/model-00001-of-00001.safetensors"}.get(
            hangs, f"{hangs} step-00000002.tmp-"
        )
        once = str(tmp_path / "once")
        plant(monkeypatch, root=str(run), hang=[label, 1], once=once)
    ranks = run_ranks(4, lambda rank: save_through(rank, run, stopped), tmp_path / "ranks")
    for told in ranks:
        assert not isinstance(told, BaseException), told
    for error, seconds, *_ in ranks:
        assert error.startswith("saving step 2 failed")
        assert seconds < TOLD
    errors = [error for error, *_ in ranks]
    assert any(says in error and "checkpoint.deadline" in error for error in errors), errors
    assert {loaded for *_, loaded, _ in ranks} == {4}
    assert any(anew for *_, anew in ranks), "what held it up goes on"
    assert not verify(run / "step-00000004").problems
    assert not [name for name in names(run) if "tmp" in name or "trash" in name]
    assert until(lambda: set(children(os.getpid())) <= others, 5)
