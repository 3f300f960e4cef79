"""Nodes with network interfaces of their own that are cut off from each other, in one direction or
both: whoever still reaches the store goes on, nobody else commits, and all come together again."""

import time

import pytest

from benchmarks.support import python_path
from elastic.record.history import read_history
from lab.container import network_possible
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT, Forked, losses, soak
from tests.distributed.test_elastic import wait_for_step
from trainer.tools.report.report import check

pytestmark = pytest.mark.skipif(
    not network_possible(), reason="needs root, and the commands ip, nft and nsenter"
)
SAVING = ("checkpoint.every=10", "elastic.snapshot_every=1", "checkpoint.slots=2")


@pytest.fixture
def cluster(workspace, tmp_path):
    """cluster(nnodes, *overrides) → LocalNodes, each with an interface of its own."""
    started = []

    def cluster(nnodes, *overrides):
        nodes = LocalNodes(
            ["-m", "trainer", "recipe.yaml", *SAVING, *overrides],
            folder=workspace,
            nnodes=nnodes,
            logs=tmp_path,
            start=Forked,
            environment={"PYTHONPATH": python_path(ROOT, workspace)},
            own_network=True,
        )
        started.append(nodes.__enter__())
        return nodes

    yield cluster
    for nodes in started:
        nodes.__exit__()


def until_worlds_of_three(nodes, count, seconds=180):
    """Until there were `count` worlds of three ranks."""
    deadline = time.monotonic() + seconds
    while sum(node.text().count("over 3 rank(s)") for node in nodes.nodes) < count:
        assert time.monotonic() < deadline, "\n".join(node.text()[-2000:] for node in nodes.nodes)
        time.sleep(0.05)


CASES = [(0, True, False), (0, True, True), (0, False, True), (2, True, True), (2, False, True)]


@soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "incoming", "outgoing"), CASES)
def test_the_others_go_on_and_the_job_grows_back(
    cluster, workspace, tmp_path, victim, incoming, outgoing
):
    run = f"cut-{victim}-{incoming:d}{outgoing:d}"
    nodes = cluster("1:3", f"run.dir={run}", "run.steps=100000")
    for _ in range(3):
        nodes.add()
    wait_for_step(workspace, run, 15, nodes)
    cut = nodes.nodes[victim]
    cut.container.cut(incoming=incoming, outgoing=outgoing)
    at = max(losses(workspace, run))
    wait_for_step(workspace, run, at + 2, nodes)
    committed = cut.text().count("saved ")
    wait_for_step(workspace, run, at + 25, nodes)
    assert cut.text().count("saved ") == committed
    cut.container.heal()
    until_worlds_of_three(nodes, 2)
    wait_for_step(workspace, run, max(losses(workspace, run)) + 5, nodes)
    history = read_history(workspace / run)
    fine, text = check(history)
    assert fine, text
    assert history.step == max(losses(workspace, run))


@soak
@pytest.mark.timeout(300)
def test_a_job_of_fixed_size_waits_until_all_are_back(cluster, workspace):
    nodes = cluster("3", "run.dir=wait", "run.steps=100000")
    for _ in range(3):
        nodes.add()
    wait_for_step(workspace, "wait", 15, nodes)
    nodes.nodes[1].container.cut()
    time.sleep(4)
    at = max(losses(workspace, "wait"))
    time.sleep(4)
    assert max(losses(workspace, "wait")) == at
    nodes.nodes[1].container.heal()
    wait_for_step(workspace, "wait", at + 10, nodes)
    fine, text = check(read_history(workspace / "wait"))
    assert fine, text
