"""Kill a run at any moment, start it again: the same losses, the same weights, the same order."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.support import python_path
from elastic.process import children
from elastic.record.history import read_history
from tests.distributed.jobs import ROOT, losses, records, soak, wait_for_memory, wait_for_step
from trainer.tools.report.report import check

STEPS = 40
SHORT = (f"run.steps={STEPS}", "checkpoint.every=5", "checkpoint.keep=2")
ROUNDS, KILLS = 20, 2


def weights(folder: Path, run: str):
    """Tensors of model and optimizer at the end of a run."""
    newest = max((folder / run / "checkpoints").glob("step-*"))
    files = sorted(newest.rglob("*.safetensors"))
    assert files
    return {f"{file.parent.name}/{k}": v for file in files for k, v in load_file(file).items()}


def assert_same(folder: Path, one: str, other: str):
    assert losses(folder, one) == losses(folder, other)
    ours, theirs = weights(folder, one), weights(folder, other)
    ours = {key.split("/")[1]: value for key, value in ours.items()}
    theirs = {key.split("/")[1]: value for key, value in theirs.items()}
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not ours[name].equal(theirs[name])]
    assert not different


def test_sums_over_three_ranks_are_rounded_as_they_were(workspace, train):
    """DDP's buckets are what they were: the place of a gradient decides who is added to whom."""
    command = ("checkpoint.every=2", "schedule={name: constant}", "strategy.name=ddp")
    train(3, "run.dir=three-whole", "run.steps=4", *command)
    shutil.copytree(workspace / "three-whole", workspace / "three")
    shutil.rmtree(workspace / "three/checkpoints/step-00000004")
    output = train(3, "run.dir=three", "run.steps=4", *command)
    assert "resuming after step 2 of 4 from storage" in output
    assert_same(workspace, "three-whole", "three")


def test_a_rank_that_goes_its_own_way_is_found_out(workspace, start, train):
    program = ("tests.distributed.stray", "recipe")
    code, output = start(2, "run.dir=strange", "run.steps=6", program=program).wait()
    assert code == 2
    assert "optimizer.lr is 0.001 on rank 1, 0.003 on rank 0" in output
    assert "step 1/6" not in output

    program = ("tests.distributed.stray", "data")  # it computes no loss: the first rank does
    stray = ("run.dir=stray", "run.steps=3", "schedule={}", "strategy.tp=2")
    code, output = start(2, *stray, program=program).wait()
    assert code == 0, output
    # Three ranks, of which the last has less to do, on workers.
    train(3, "run.dir=straight", "run.steps=3", "schedule={}", "data.workers=1")
    runs = ("stray", "straight")
    found = {run: check(read_history(workspace / run), workspace / run) for run in runs}
    assert found["straight"][0], found["straight"]
    assert "samples of all 3 steps, tokens of all 3 steps" in found["straight"][1]
    assert not found["stray"][0]
    samples, tokens = found["stray"][1].splitlines()
    assert re.search(r"step 3 .* sequences 16 to 23: a rank consumed other sequences", samples)
    assert re.search(r"step 3 .*: a rank consumed other tokens than the data has", tokens)


@pytest.mark.timeout(1200)
@soak  # without it: test_offload.py kills and goes on bit for bit, test_exact.py in other worlds
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("ddp", ["strategy.name=ddp"]),
        ("full-shard", []),
        ("optimizer-state", ["strategy.zero=1"]),
    ],
)
def test_killed_run_resumes_bitwise(workspace, start, train, name, overrides):
    train(2, f"run.dir=whole-{name}", *SHORT, *overrides)
    for attempt in range(ROUNDS):
        run = f"killed-{name}-{attempt}"
        for step in sorted(random.Random(attempt).sample(range(6, 26), KILLS)):
            job = start(2, f"run.dir={run}", *SHORT, *overrides)
            wait_for_step(workspace, run, step, job)
            job.kill()
        output = train(2, f"run.dir={run}", *SHORT, *overrides)
        assert "resuming after step" in output
        assert_same(workspace, f"whole-{name}", run)


@soak
def test_another_world_and_strategy_go_on_from_the_same_checkpoint(workspace, start, train):
    train(1, "run.dir=elastic-whole", *SHORT, "strategy.name=ddp")
    hybrid = ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"]
    for ranks, step, overrides in (3, 6, ["strategy.zero=1"]), (4, 11, hybrid):
        job = start(ranks, "run.dir=elastic", *SHORT, *overrides)
        wait_for_step(workspace, "elastic", step, job)
        job.kill()
    train(1, "run.dir=elastic", *SHORT, "strategy.name=ddp")
    whole, pieces = losses(workspace, "elastic-whole"), losses(workspace, "elastic")
    assert whole.keys() == pieces.keys()
    assert max(abs(whole[s] - pieces[s]) / whole[s] for s in whole) <= 1e-4


@soak
def test_what_is_in_memory_is_checked_too(workspace, start):
    command = ("run.dir=remembered", *SHORT, "checkpoint.every=0", "elastic.snapshot_every=1")
    job = start(1, *command, "run.steps=1000")
    wait_for_step(workspace, "remembered", 3, job)
    wait_for_memory(workspace / "remembered", 3)
    job.kill()
    code, output = start(1, *command, "run.seed=99").wait()
    assert code == 2, output
    assert "run.seed: the checkpoint was trained with 7, the recipe says 99" in output


@soak
def test_a_loss_scale_is_that_of_the_number_format(workspace, train):
    for dtype, steps in (("fp32", 2), ("fp16", 4)):
        train(1, "run.dir=formats", "schedule={}", f"run.steps={steps}", f"precision.dtype={dtype}")
    scales = {r["step"]: r.get("loss_scale") for r in records(workspace, "formats") if "loss" in r}
    assert scales == {1: None, 2: None, 3: 65536.0, 4: 65536.0}


@soak
def test_a_finished_run_does_nothing(workspace, train):
    train(1, "run.dir=finished", *SHORT)
    before = (workspace / "finished" / "metrics.jsonl").read_bytes()
    output = train(1, "run.dir=finished", *SHORT)
    assert f"nothing to train: step {STEPS} of {STEPS}" in output
    assert (workspace / "finished" / "metrics.jsonl").read_bytes() == before


@soak
def test_a_damaged_newest_checkpoint_is_passed_over(workspace, train):
    train(1, "run.dir=damaged", *SHORT)
    newest = workspace / "damaged" / "checkpoints" / f"step-{STEPS:08}"
    (file,) = newest.glob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    output = train(1, "run.dir=damaged", *SHORT)
    assert f"resuming after step {STEPS - 5} of {STEPS}" in output
    assert file.name in output


@soak
def test_torchrun_restarts_a_killed_rank_and_it_resumes(workspace, train):
    """torch's own torchrun and rendezvous, as its manual has it."""
    train(1, "run.dir=whole-restart", *SHORT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "1", "--max-restarts", "1"]
    with subprocess.Popen(
        [*launcher, "-m", "trainer", "recipe.yaml", "run.dir=restarted", *SHORT],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as torchrun:
        deadline = time.monotonic() + 60
        while max(losses(workspace, "restarted"), default=0) < 12:
            assert torchrun.poll() is None, torchrun.communicate()[0]
            assert time.monotonic() < deadline, "step 12 did not come"
            time.sleep(0.01)
        os.kill(children(torchrun.pid)[-1], signal.SIGKILL)
        output, _ = torchrun.communicate(timeout=60)
    assert torchrun.returncode == 0, output
    assert "resuming after step" in output
    assert_same(workspace, "whole-restart", "restarted")
