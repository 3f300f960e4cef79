"""The ranks that are left go on in place: the same processes, with what they have compiled."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.checkpointing.faults import until
from tests.distributed.jobs import ROOT, Forked, losses, soak, starts
from trainer.tools.local_nodes import LocalNodes, children

COMPILED = """
import ctypes, os
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.callback import on_compile_start


def note(*_):
    with open("compiled", "a") as file:
        file.write(f"{os.getpid()}\\n")


on_compile_start(note)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(257, 16)
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(16, 257)

    def forward(self, input_ids, labels, document_ids=None):
        while Path(f"stuck-{dist.get_rank()}").exists():
            ctypes.CDLL(None).sleep(1000)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(x).flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, labels.flatten())
"""
WRITER = "checkpointing.save.writer"
RECIPE = [
    *("model.architecture=null", "model.factory=compiled_model:Model", "strategy.compile=true"),
    *("elastic.snapshot_every=1", "checkpoint.slots=2", "data.workers=0", "optimizer.lr=3e-4"),
]


@pytest.fixture
def job(workspace, tmp_path):
    """job(run, nnodes, ranks, *overrides) → LocalNodes."""
    (workspace / "compiled_model.py").write_text(COMPILED)
    started = []

    def job(run, nnodes, ranks, *overrides):
        nodes = LocalNodes(
            ["-m", "trainer", "recipe.yaml", *RECIPE, f"run.dir={run}", *overrides],
            folder=workspace,
            nnodes=nnodes,
            logs=tmp_path,
            start=Forked,
            ranks=ranks,
            environment={"PYTHONPATH": f"{ROOT}:{workspace}"},
        )
        started.append(nodes.__enter__())
        return nodes

    yield job
    for nodes in started:
        nodes.__exit__()


def reached(workspace, run):
    return max(losses(workspace, run), default=0)


def go_on(workspace, run, node, steps, seconds=100):
    goal = reached(workspace, run) + steps
    assert until(lambda: reached(workspace, run) >= goal, seconds), node.text()


def name_of(pid):
    """As `pgrep` sees it."""
    return Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("perdure-")


@soak  # without it: test_exact.py kills ranks, and the others go on in place
@pytest.mark.timeout(240)
def test_a_killed_rank_costs_the_others_neither_process_nor_compiled_code(job, workspace):
    nodes = job("place", "1", 2, "run.steps=100000")
    node = nodes.add()
    go_on(workspace, "place", node, 8)
    for victim in (1, 0):  # 0 has the ledger, and the writer of checkpoints
        # That of now, that of the next attempt, and that of the process in reserve.
        assert until(lambda: len(node.running(WRITER)) == 3, 60), node.text()
        before, writers = node.trainers(), set(node.running(WRITER))
        reserve = set(children(node.zygote())) - set(before)
        # Whoever kills by name, as README does, is to hit a rank.
        assert [*map(name_of, before), *map(name_of, reserve)] == [*["rank"] * 2, "reserve"]
        compiled = (workspace / "compiled").read_text().split()
        os.kill(before[victim], signal.SIGKILL)
        go_on(workspace, "place", node, 5)
        after = node.trainers()
        kept = [pid for pid in before if pid != before[victim]]
        assert [pid for pid in after if pid in before] == kept, node.text()
        again = (workspace / "compiled").read_text().split()[len(compiled) :]
        assert set(map(int, again)) == set(after) - set(before)
        assert set(after) - set(before) == reserve
        assert writers & set(node.running(WRITER))
        # Else storage may get a newer step than memory tells of in the very moment of a kill.
        assert until(lambda: "\nsaved " in node.text(), 60), node.text()
        go_on(workspace, "place", node, 2)
    ranks = [start["cause"] and start["cause"]["rank"] for start in starts(workspace, "place")]
    assert ranks == [None, 1, 0]
    attempts = starts(workspace, "place")
    assert [start["source"] for start in attempts[1:]] == ["memory", "memory"]
    assert "rank 0: SIGKILL" in node.text()


@soak
@pytest.mark.timeout(240)
def test_who_does_not_let_go_is_forked_anew(job, workspace):
    """One sleeps in C, and one is stopped: no abort reaches them."""
    nodes = job("stuck", "1", 4, "run.steps=100000")
    node = nodes.add()
    go_on(workspace, "stuck", node, 8)
    before = node.trainers()
    (workspace / "stuck-1").touch()
    time.sleep(1)
    os.kill(before[2], signal.SIGSTOP)
    os.kill(before[3], signal.SIGKILL)
    assert until(lambda: not {before[1], before[2]} & set(node.trainers()), 20), node.text()
    (workspace / "stuck-1").unlink()
    go_on(workspace, "stuck", node, 5)
    assert node.trainers()[0] == before[0]
    assert node.text().count("did not let go") == 2


@soak
@pytest.mark.timeout(240)
def test_a_lost_node_costs_the_others_no_process(job, workspace):
    nodes = job("rounds", "1:2", 2, "run.steps=100000", "checkpoint.peer_copy=true")
    first, second = nodes.add(), nodes.add()
    assert until(lambda: any(s["nodes"] == 2 for s in starts(workspace, "rounds")), 90)
    go_on(workspace, "rounds", first, 5)
    before = second.trainers()
    first.kill()
    go_on(workspace, "rounds", second, 5)
    assert second.trainers() == before, second.text()
    assert starts(workspace, "rounds")[-1]["nodes"] == 1
