"""Seeded faults of all kinds over one run: nothing is lost, nothing is left, nothing differs."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from elastic.chaos import gone, processes_with
from elastic.chaos_plan import random_plan
from tests.distributed.jobs import ROOT, soak
from trainer.chaos import judge, run_chaos

SEED = 605
"""Its first eight faults are of seven kinds; one comes amid a recovery, three during a save; a node
that joins, which takes longest, is needed only once."""
STEADY = [
    *("optimizer.lr=3e-4", "checkpoint.every=20"),
    *("elastic.snapshot_every=1", "checkpoint.slots=2"),
]


@pytest.fixture
def chaos(workspace, monkeypatch):
    """chaos(plan, run, steps) → Verdict."""
    monkeypatch.chdir(workspace)

    def chaos(plan, run, steps, patience=90.0):
        overrides = [*STEADY, f"run.dir={run}", f"run.steps={steps}"]
        environment = {"PYTHONPATH": f"{ROOT}:{workspace}"}
        return run_chaos("recipe.yaml", overrides, plan, patience=patience, environment=environment)

    return chaos


def steps_for(plan):
    """The run goes on while a node that joins starts, which takes as long as so many steps."""
    return plan.last_step + 20 + 150 * sum(fault.what == "join" for fault in plan.faults)


@pytest.mark.timeout(900)
def test_a_few_faults(chaos, workspace, tmp_path):
    plan = random_plan(SEED, 8, 1, 3, nodes=3, every=8)
    steps = steps_for(plan)
    verdict = chaos(plan, "few", steps)
    assert not verdict.problems, verdict
    assert [outcome.fault for outcome in verdict.outcomes] == list(plan.faults)
    assert str(verdict).endswith("PASSED")

    # What passed was looked at: a run that is otherwise is found out.
    run, undisturbed = workspace / "few-chaos/run", workspace / "few-chaos/undisturbed"
    assert judge(run, undisturbed, steps, 1e-4)[1] == []
    assert "of a weight tensor" in judge(run, undisturbed, steps, 1e-9)[1][-1]
    assert judge(run, undisturbed, steps + 1, 1e-4)[1] == [
        f"the run ended at step {steps} of {steps + 1}"
    ]
    spoilt = tmp_path / "run"
    shutil.copytree(run, spoilt)
    for file, mark in (
        ("ledger.jsonl", '"kind":"step","step":5,'),
        ("metrics.jsonl", '"step": 5,'),
    ):
        lines = (run / file).read_text().splitlines(keepends=True)
        kept = [line for line in lines if mark not in line]
        assert kept != lines
        (spoilt / file).write_text("".join(kept))
    sequences, loss = judge(spoilt, undisturbed, steps, 1e-4)[1]
    assert "no record of 5" in sequences
    assert loss == "largest relative difference of a loss: inf, of step 5"


@soak
@pytest.mark.timeout(3600)
def test_a_hundred_faults(chaos):
    plan = random_plan(int(os.environ.get("CHAOS_SEED", "1")), 100, 1, 4, nodes=2, every=12)
    verdict = chaos(plan, "many", steps_for(plan), patience=180.0)
    print(verdict)
    assert not verdict.problems, verdict
    assert len(verdict.outcomes) == 100


@pytest.mark.timeout(900)
def test_nothing_outlives_it(workspace):
    (workspace / "plan.yaml").write_text("nodes: 2\nfaults: [{what: kill_node, at: 25}]\n")
    mark = "TEST_OF_CHAOS", f"{os.getpid()}"
    command = [sys.executable, "-m", "trainer.cli", "chaos", "recipe.yaml", "--plan", "plan.yaml"]
    harness = subprocess.Popen(
        [*command, "run.dir=outlived", "run.steps=30"],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{workspace}", mark[0]: mark[1]},
        stdout=subprocess.DEVNULL,
    )

    def left():
        return processes_with(*mark)

    deadline = time.monotonic() + 200
    try:
        while sum("elastic.zygote" in process for process in left()) < 2:
            assert harness.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        harness.send_signal(signal.SIGKILL)
        harness.wait()
    assert gone(left, 5) == []


def test_a_wrong_plan_ends_before_anything_starts(workspace):
    (workspace / "wrong.yaml").write_text("faults:\n  - {what: kil_node}\n")
    command = [sys.executable, "-m", "trainer.cli", "chaos", "recipe.yaml", "--plan", "wrong.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    refused = subprocess.run(
        command, cwd=workspace, env=environment, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: wrong.yaml:2: faults.0.what: there is no 'kil_node'; did you mean 'kill_node'?\n"
    )
    assert not (workspace / "run-chaos").exists()
