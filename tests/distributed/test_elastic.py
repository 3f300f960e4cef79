"""Processes and nodes that die, leave and join: the run goes on, and its losses do not change."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.support import python_path
from elastic.record.causes import ending
from elastic.record.history import LedgerError, read_history
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT, SOAK, Forked, Job, losses, records, soak, wait_for_memory

STEPS = 100 if SOAK else 40
"""Nodes that join take a while."""
RECIPE = [f"run.steps={STEPS}", "optimizer.lr=3e-4"]

PACED = """
import os, time, torch

class Paced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Embedding(257, 257)

    def forward(self, input_ids, labels, document_ids):
        time.sleep(0.1)
        while os.path.exists("hold"):
            time.sleep(0.02)
        scores = self.head(input_ids).flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, labels.flatten())
"""


@pytest.fixture
def cluster(workspace, tmp_path):
    """cluster(nnodes, *overrides, ranks=…) → LocalNodes, still without a node."""
    started = []

    def cluster(nnodes, *overrides, ranks=1):
        nodes = LocalNodes(
            ["-m", "trainer", "recipe.yaml", *RECIPE, *overrides],
            folder=workspace,
            nnodes=nnodes,
            logs=tmp_path,
            start=Forked,
            ranks=ranks,
            environment={"PYTHONPATH": python_path(ROOT, workspace)},
        )
        started.append(nodes.__enter__())
        return nodes

    yield cluster
    for nodes in started:
        nodes.__exit__()


@pytest.fixture(scope="session")
def undisturbed(workspace):
    """Losses by step of a single process that nothing happens to."""
    code, output = Job(workspace, 1, ["run.dir=alone", *RECIPE]).wait()
    assert code == 0, output
    return losses(workspace, "alone")


def wait_for_step(workspace, run, step, nodes, seconds=180):
    """Until the run has logged `step`."""
    deadline = time.monotonic() + seconds
    while max(losses(workspace, run), default=0) < step:
        texts = "\n".join(node.text()[-2000:] for node in nodes.nodes)
        assert any(node.process.poll() is None for node in nodes.nodes), texts
        assert time.monotonic() < deadline, f"step {step} did not come\n{texts}"
        time.sleep(0.02)


def wait_until(condition, node, seconds=90):
    """Until `condition`, of which the log of `node` may tell more."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, node.text()
        time.sleep(0.02)


def same_losses(workspace, run, expected):
    found = losses(workspace, run)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-4), step


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("members", "ranks"),
    [(1, 2), pytest.param(4, 1, marks=soak)],
    ids=["one of two", "four of one"],
)
def test_a_surplus_node_is_a_spare_and_a_stranger_is_refused(cluster, workspace, members, ranks):
    """The nodes have the whole global batch between them; nobody else disturbs them."""
    (workspace / "paced.py").write_text(PACED)
    hold, run = workspace / "hold", workspace / f"crowd-{members}"
    model = ("model.architecture=null", "model.factory=paced:Paced", "strategy.name=ddp")
    size = (f"run.dir={run.name}", "run.steps=40", "checkpoint.every=10")
    size += (f"batch.global_batch={members * ranks}", "batch.micro_batch=1")
    nodes = cluster("1:8", *model, *size, ranks=ranks)
    first = [nodes.add() for _ in range(members)]

    def sizes():
        with suppress(OSError, LedgerError):  # nothing has begun
            return [attempt.start.nodes for attempt in read_history(run).attempts]
        return []

    wait_until(lambda: sizes()[-1:] == [members], first[0])
    hold.touch()
    before = sizes()
    spare = nodes.add()
    nodes.worker = [*nodes.worker, "optimizer.lr=1e-3"]
    stranger = nodes.add()
    wait_until(lambda: stranger.process.poll() is not None, stranger)
    assert stranger.process.returncode == 2
    assert "optimizer.lr is 0.001 here, 0.0003 there" in stranger.text()
    wait_until(lambda: "waits as a spare" in spare.text(), spare)
    hold.unlink()
    done = max(losses(workspace, run.name), default=0)
    wait_for_step(workspace, run.name, done + 12, nodes)
    assert sizes() == before, "the run was disturbed"
    first[-1].kill()
    codes = nodes.wait(60)
    assert codes == [*[0] * (members - 1), -signal.SIGKILL, 0, 2], spare.text()
    history = read_history(run)
    assert sizes() == [*before, members], "the spare took its place at once"
    assert len({attempt.start.round for attempt in history.attempts}) == len(sizes())
    assert (history.step, history.problems) == (40, [])


@soak
def test_nodes_get_ranks_by_where_they_stand_and_no_bit_depends_on_it(cluster, workspace, train):
    """The second states the first rack, so that it has rank 0, whatever its address."""
    nodes = cluster("2", "run.dir=placed", "run.steps=8")
    named, usual = [], nodes.environment
    for rack in (2, 1):
        nodes.environment = {**usual, "PERDURE_PLACE": f"row/rack{rack}"}
        named.append(nodes.add())
    assert nodes.wait(60) == [0, 0], named[1].text()
    line = "placement: dp_shard=2 across 2 nodes; ranks 0 in row/rack1, 1 in row/rack2"
    assert line in named[1].text(), named[1].text()
    assert line not in named[0].text()
    train(2, "run.dir=together", *RECIPE, "run.steps=8")
    assert losses(workspace, "placed") == losses(workspace, "together")


@soak
def test_a_killed_rank_comes_back_from_memory(cluster, workspace, undisturbed):
    nodes = cluster("1", "run.dir=rank", "elastic.snapshot_every=1", "checkpoint.slots=2", ranks=2)
    node = nodes.add()
    for step in (10, 25):
        wait_for_step(workspace, "rank", step, nodes)
        wait_for_memory(workspace / "rank", step)
        os.kill(node.trainers()[step % 2], signal.SIGKILL)
        done = max(losses(workspace, "rank"))
        wait_for_step(workspace, "rank", done + 3, nodes)
        assert node.text().count("restored step") == (1 if step == 10 else 2)
        told = r"resuming .* from memory; rank [01]: SIGKILL; \w+ steps? lost"
        assert len(re.findall(told, node.text())) == (1 if step == 10 else 2)
    assert nodes.wait(180) == [0], node.text()
    same_losses(workspace, "rank", undisturbed)


@soak
def test_who_kills_what_torchrun_started_kills_a_rank(cluster, workspace, undisturbed):
    """torchrun ends the other stand-ins by a signal, which is no notice to the node."""
    nodes = cluster(
        "1", "run.dir=killed", "elastic.snapshot_every=1", "checkpoint.slots=2", ranks=2
    )
    node = nodes.add()
    wait_for_step(workspace, "killed", 10, nodes)
    wait_for_memory(workspace / "killed", 10)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in node.family()}
    stand_ins = [pid for pid, command in commands.items() if b"\0-u\0-m\0trainer\0" in command]
    assert len(stand_ins) == 2
    os.kill(stand_ins[0], signal.SIGKILL)
    assert nodes.wait(60) == [0], node.text()
    assert "told to go" not in node.text()
    assert node.text().count("restored step") == 1
    history = read_history(workspace / "killed")
    assert ending(history, history.attempts[0]).kind == "process"
    same_losses(workspace, "killed", undisturbed)


@soak
def test_nodes_are_lost_and_join(cluster, workspace, undisturbed):
    nodes = cluster("1:3", "run.dir=nodes", "checkpoint.every=5")
    first, second = nodes.add(), nodes.add()
    wait_for_step(workspace, "nodes", 12, nodes)
    first.kill()
    wait_for_step(workspace, "nodes", max(losses(workspace, "nodes")) + 5, nodes)
    nodes.add()
    wait_for_step(workspace, "nodes", max(losses(workspace, "nodes")) + 5, nodes)
    assert nodes.wait(180)[1:] == [0, 0], second.text()
    same_losses(workspace, "nodes", undisturbed)


@soak
def test_a_node_that_is_told_to_go_loses_no_step(cluster, workspace, undisturbed):
    nodes = cluster("1:2", "run.dir=notice")
    first, second = nodes.add(), nodes.add()
    wait_for_step(workspace, "notice", 12, nodes)
    second.process.send_signal(signal.SIGTERM)
    second.process.wait(20)
    assert nodes.wait(180)[0] == 0, first.text()
    assert "pausing after step" in first.text() + second.text()
    steps = [record["step"] for record in records(workspace, "notice") if "loss" in record]
    assert steps == sorted(set(steps)), "a step was done twice"
    same_losses(workspace, "notice", undisturbed)


@soak
def test_a_store_outlives_its_job(cluster, workspace, undisturbed):
    nodes = cluster("1:2", "run.dir=outlived")
    for _ in range(2):
        node = nodes.add()
        assert nodes.wait(180)[-1] == 0, node.text()
        same_losses(workspace, "outlived", undisturbed)
        (workspace / "outlived").rename(workspace / f"outlived-{node.number}")
