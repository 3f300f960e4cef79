"""The loops in examples/ that run on ranks and nodes that come and go, under real torchrun."""

import difflib
import os
import re
import shutil
import signal
import time
from functools import cache

import pytest

from lab.local_nodes import LocalNode
from tests.distributed.jobs import EXAMPLES, Job, soak


def alone(folder, name: str, ranks: int) -> dict[int, float]:
    """Losses by step of a run without an agent of ours that nothing happens to."""
    shutil.copy(EXAMPLES / f"{name}.py", folder)
    code, output = Job(folder, ranks, program=[name], torchrun=name == "fsdp_loop").wait()
    assert code == 0, output
    return losses(output)


def losses(output: str) -> dict[int, float]:
    """By step; of one that was done twice, the last."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)\n", output)}


def wait_for_step(node: LocalNode, step: int) -> None:
    """Until the host of rank 0 has printed a step, in the generation that is under way."""
    deadline = time.monotonic() + 90
    while max(losses(node.text()[node.seen :]), default=0) < step:
        assert node.process.poll() is None, node.text()
        assert time.monotonic() < deadline, node.text()
        time.sleep(0.01)


def kill_rank(node: LocalNode, local_rank: int) -> None:
    node.seen = len(node.text())
    os.kill(node.trainers()[local_rank], signal.SIGKILL)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """undisturbed(name) → losses of one process that nothing happens to."""
    return cache(lambda name: alone(tmp_path_factory.mktemp(name), name, 1))


@soak
def test_a_rank_is_killed_then_the_node_and_the_loop_goes_on(cluster, tmp_path, undisturbed):
    """The killed rank is forked anew; after the node it resumes on three ranks."""
    node = cluster("fsdp_loop_elastic", "1", ranks=2).add()
    node.seen = 0
    wait_for_step(node, 12)
    kill_rank(node, 1)
    wait_for_step(node, 24)
    node.kill()
    before = losses(node.text())
    assert re.search(r"rank 1: SIGKILL in step \d+", node.text())
    after = alone(tmp_path, "fsdp_loop_elastic", 3)
    assert min(after) > 1
    assert before | after == pytest.approx(undisturbed("fsdp_loop"), abs=1e-5)


@soak
def test_a_node_that_is_told_to_go_saves_and_leaves(cluster, tmp_path, undisturbed):
    """After a step that all ranks agree on. Twenty rows do not divide among three ranks."""
    node = cluster("elastic_loop", "1", ranks=3).add()
    node.seen = 0
    wait_for_step(node, 60)
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(60) == 75, node.text()
    before = losses(node.text())
    last = max(before)
    assert last % 50
    assert (tmp_path / "checkpoints" / f"step-{last:08}").exists(), "no step is done twice"
    after = alone(tmp_path, "elastic_loop", 2)
    assert min(after) == last + 1
    assert before | after == pytest.approx(undisturbed("elastic_loop"), abs=1e-5)


@soak
def test_a_node_is_lost_and_comes_back(cluster, tmp_path, undisturbed):
    """Two nodes; what the lost one had is in the memory of the other, or in storage."""
    nodes = cluster("elastic_loop", "1:2", ranks=1)
    loop = tmp_path / "elastic_loop.py"
    slow = "    __import__('time').sleep(0.2 * (step > 200 and job.world.world_size == 1))"
    body = "    batch = torch.randn"
    assert body in loop.read_text()
    loop.write_text(
        loop.read_text().replace(body, f"{slow}\n{body}")
    )  # alone, it waits for the other
    first, second = nodes.add(), nodes.add()
    for node in (first, second):
        node.seen = 0
    wait_for_step(first, 120)
    second.kill()
    first.seen = len(first.text())
    wait_for_step(first, 200)
    nodes.restart(second)
    assert nodes.wait(180) == [0, 0], first.text()
    text = first.text() + second.text()
    found = re.findall(r"after step (\d+) from (memory|storage)", text)
    assert len(found) >= 2  # the node was lost, and came back
    assert int(found[0][0]) >= 100
    assert losses(text) == pytest.approx(undisturbed("elastic_loop"), abs=1e-5)


def test_becoming_elastic_takes_ten_lines():
    texts = [
        (EXAMPLES / f"{name}.py").read_text().splitlines()
        for name in ("fsdp_loop_saved", "fsdp_loop_elastic")
    ]
    assert len([line for line in difflib.ndiff(*texts) if line[0] in "+-"]) <= 10
