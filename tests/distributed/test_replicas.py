"""Nodes of a model that is spread over ranks come and go in whole replicas."""

import os
import signal
import subprocess
import sys

import pytest

from benchmarks.support import python_path
from elastic.record.history import read_history
from lab import container
from lab.local_nodes import LocalNodes
from tests.checkpointing.faults import until
from tests.distributed.jobs import ROOT, Forked, losses, soak
from tests.distributed.test_expert_parallel import EP, MOE

SP = ("strategy.tp=2", "strategy.sequence_parallel=true")
PP = ("strategy.pp=2", "batch.micro_batch=1")
CP = ("strategy.cp=2",)
RATE = ("optimizer.lr=3e-4", "schedule.name=constant")
COPIES = ("elastic.snapshot_every=1", "checkpoint.slots=2", "checkpoint.peer_copy=true")


@soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "layout", "count", "ranks"),
    [
        ("tp2-dp2", [*SP, "strategy.name=ddp"], 2, 2),
        ("cp2-dp2", [*CP, "strategy.name=ddp"], 2, 2),
        ("pp2-dp2", [*PP, "strategy.name=ddp"], 4, 1),
        ("pp2-fsdp2", PP, 4, 1),
        ("ep2-fsdp2", [*EP, *MOE, "batch.micro_batch=1"], 4, 1),
        ("tp2-pp2-dp2", [*SP, *PP, "strategy.name=ddp"], 4, 2),
    ],
)
def test_nodes_of_whole_replicas_come_and_go(
    workspace, alone, tmp_path, name, layout, count, ranks
):
    """A rank is killed, then the first node, and a node joins. Between them what is left of its
    replica is a spare."""
    recipe = [*layout, *RATE, *COPIES, f"run.dir=nodes-{name}", "run.steps=100000"]
    run = workspace / f"nodes-{name}"

    def reached():
        return max(losses(workspace, run.name), default=0)

    def text():
        return "\n".join(node.text() for node in nodes.nodes)

    def go_on(steps):
        goal = reached() + steps
        assert until(lambda: reached() >= goal, 100), text()

    def start():
        return read_history(run).attempts[-1].start

    def world_of(size):
        assert until(lambda: start().world_size == size, 150), text()
        go_on(5)

    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", *recipe],
        folder=workspace,
        nnodes=f"1:{count}",
        logs=tmp_path,
        start=Forked,
        ranks=ranks,
        environment={"PYTHONPATH": python_path(ROOT, workspace)},
    ) as nodes:
        first, *_ = [nodes.add() for _ in range(count)]
        assert until(lambda: run.exists() and reached(), 150), text()
        world_of(count * ranks)
        os.kill(nodes.nodes[-1].trainers()[-1], signal.SIGKILL)
        go_on(5)
        assert start().source == "memory", text()
        first.kill()
        world_of(count * ranks // 2)
        assert start().source == "memory", text()
        assert text().count("this node waits as a spare") == count // 2 - 1, text()
        nodes.add()
        world_of(count * ranks)
    report = [sys.executable, "-m", "trainer.cli", "report", run.name, "--check"]
    subprocess.run(report, cwd=workspace, check=True)
    found = losses(workspace, run.name)
    model = [key for key in layout if key.startswith("model.")]
    expected = alone(f"run.steps={len(found)}", *RATE, *model)[0]
    assert [found[step] for step in sorted(found)] == pytest.approx(expected, rel=1e-4)


@soak
@pytest.mark.skipif(not container.possible(), reason="needs root")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("source", ["memory", "storage"])
def test_a_stage_that_is_lost_with_its_node_comes_back(workspace, train, tmp_path, source):
    """The only node that had it is killed, with its memory; another node comes, and no loss differs
    by a bit."""
    run = workspace / f"stage-{source}"
    kept = COPIES if source == "memory" else ("checkpoint.every=5",)
    recipe = [*PP, *RATE, *kept, f"run.dir={run.name}", "run.steps=100000"]

    def reached():
        return max(losses(workspace, run.name), default=0) if run.exists() else 0

    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", *recipe],
        folder=workspace,
        nnodes="1:2",
        logs=tmp_path,
        ranks=1,
        own_memory=True,
        environment={"PYTHONPATH": python_path(ROOT, workspace)},
    ) as nodes:
        first, other = nodes.add(), nodes.add()
        assert until(lambda: reached() > 12, 150), other.text()
        first.kill()
        nodes.add()
        assert until(lambda: read_history(run).attempts[-1].start.source == source, 150), (
            other.text()
        )
        goal = reached() + 10
        assert until(lambda: reached() > goal, 100), other.text()
    found = losses(workspace, run.name)
    train(2, f"run.dir=whole-{source}", *PP, *RATE, f"run.steps={len(found)}")
    assert found == losses(workspace, f"whole-{source}")
