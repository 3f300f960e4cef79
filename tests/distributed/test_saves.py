"""What a run does about checkpoints that take long, or fail."""

import json

from elastic.node.agent import NodeAgent
from elastic.node.program import NodeProgram
from elastic.node.progress import NodeRankProgress
from elastic.node.standin import NODE_SOCKET
from tests.checkpointing.faults import until
from tests.elastic.node.test_strangers import Group


def test_a_slow_storage_costs_checkpoints_but_not_the_last_one(train, workspace):
    output = train(
        2, "run.dir=slow", "run.steps=6", "checkpoint.every=1", "checkpoint.max_bandwidth=1 MB"
    )
    records = [json.loads(line) for line in (workspace / "slow" / "metrics.jsonl").open()]
    events = [record["event"] for record in records if "event" in record]
    assert any("is not saved: step 1 is still being saved" in event for event in events)
    assert "warning: step 2 is not saved" in output
    saved = [record["checkpoint_step"] for record in records if "checkpoint_bytes" in record]
    assert saved[0] == 1
    assert saved[-1] == 6
    steps = sorted(path.name for path in (workspace / "slow" / "checkpoints").glob("step-*"))
    assert steps[-1] == "step-00000006"


def test_steps_that_are_to_be_kept_are_saved_whatever_the_clock_says(train, workspace):
    train(1, "run.dir=kept", "run.steps=6", "checkpoint.every=auto", "checkpoint.keep_every=4")
    steps = sorted(path.name for path in (workspace / "kept" / "checkpoints").glob("step-*"))
    assert steps == ["step-00000004", "step-00000006"]


def test_no_rank_is_ended_for_a_save_that_has_time_left(workspace, monkeypatch):
    """The agent learns `checkpoint.deadline` from the recipe."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv(NODE_SOCKET, "")
    # xdist's thread would make the zygote a new program, which imports for five seconds.
    monkeypatch.setattr("elastic.node.zygote._can_fork", lambda: True)
    arguments = ("recipe.yaml", "checkpoint.deadline=90000")
    node = NodeAgent(Group(), NodeProgram(package="trainer", arguments=arguments))
    node.start()
    try:
        facts = node.facts(60)
        assert facts
        assert not facts.error
        for phase in ("staging", "save", "end"):
            assert node._hangs.times.limit(0, NodeRankProgress(9, phase, 0.0, False)) > 1.2 * 90_000
    finally:
        node.stop()


def test_the_last_save_is_tried_again(start, workspace):
    """As where a disk is full: there is no folder for it, until the first try has failed."""
    checkpoints = workspace / "again" / "checkpoints"
    job = start(2, "run.dir=again", "run.steps=12", "run.log_every=1", "checkpoint.every=0")
    assert until(lambda: checkpoints.is_dir() and "step  1/12" in job.output(), 60), job.output()
    checkpoints.rename(workspace / "aside")
    checkpoints.touch()
    assert until(lambda: "saving step 12 failed" in job.output(), 60), job.output()
    checkpoints.unlink()
    (workspace / "aside").rename(checkpoints)
    code, output = job.wait()
    assert code == 0, output
    assert (checkpoints / "step-00000012" / "index.json").exists()
