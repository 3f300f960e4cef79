"""The ranks that are left go on in place: the same processes, with what they have compiled."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from elastic.process import children
from lab.local_nodes import LocalNodes
from tests.checkpointing.faults import until
from tests.distributed.jobs import ROOT, Forked, assert_kept, deadly, losses, soak, starts
from tests.distributed.test_exact import assert_equal_bits, result
from tests.distributed.test_expert_parallel import MOE
from trainer.parallel.mesh import forget_meshes
from trainer.run.build import usable
from trainer.run.worker import rehearse

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
    assert node.text().count("has not let go") == 2


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


HSDP = ("strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2")
EXACT = ("run.determinism=exact",)
BUBBLE = ("strategy.pp=2", "strategy.pp_schedule=zero_bubble", "strategy.zero=2")
EVERYWHERE = {
    0: [(3, 4, "forward")],
    1: [(1, 8, "backward"), (2, 8, "backward")],
    2: [(2, 10, "build")],  # those who had gone on have not done a step yet
    3: [(0, 12, "update")],
    4: [(1, 15, "save")],
}
KEPT = [3, 2]


@pytest.fixture
def trained(workspace, tmp_path):
    """trained(run, kills, *overrides) → (what four ranks print in 20 steps, what comes of them)."""

    def trained(run, kills, *overrides):
        given = ["recipe.yaml", "run.steps=20", *deadly(run, kills), *overrides]
        with LocalNodes(
            ["-m", "trainer", *given], folder=workspace, nnodes="1", logs=tmp_path,
            start=Forked, ranks=4, environment={"PYTHONPATH": str(ROOT)},
        ) as nodes:  # fmt: skip
            node = nodes.add()
            nodes.wait(240)
        return node.text(), result(workspace, run)

    return trained


def test_a_process_in_reserve_has_the_model_of_whichever_rank_it_becomes(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    kept = rehearse(("recipe.yaml", *HSDP))
    for rank in range(4):
        monkeypatch.setenv("RANK", f"{rank}")
        monkeypatch.setenv("LOCAL_RANK", f"{rank}")
        ours = usable(kept, kept[0].recipe)
        coordinates = {
            tuple(tensor.device_mesh.get_coordinate() or ())
            for state in (*ours.optimizer.state.values(), ours.model.parameters)
            for tensor in state.values()
            if isinstance(tensor, DTensor)
        }
        assert coordinates == {divmod(rank, 2)}
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert usable(kept, kept[0].recipe) is None
    forget_meshes()  # other tests have other meshes


@soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("overrides", "kills", "kept"),
    [
        ((), EVERYWHERE, KEPT),
        (EXACT, EVERYWHERE, KEPT),
        (("strategy.zero=2", "batch.global_batch=16"), EVERYWHERE, KEPT),
        (HSDP, EVERYWHERE, KEPT),
        ((*HSDP, *EXACT, "optimizer.name=muon"), EVERYWHERE, KEPT),
        (("strategy.name=ddp",), EVERYWHERE, KEPT),
        (("strategy.zero=1",), EVERYWHERE, KEPT),
        (("strategy.tp=2", "strategy.sequence_parallel=true"), EVERYWHERE, KEPT),
        (("strategy.cp=2",), EVERYWHERE, KEPT),
        ((*BUBBLE, "precision.dtype=bf16"), EVERYWHERE, KEPT),
        ((*MOE, "strategy.ep=2"), EVERYWHERE, KEPT),
        (("strategy.activation_checkpointing=full",), EVERYWHERE, KEPT),
        # Nothing is in memory: all begin again, also those who keep their model.
        (("elastic.snapshot_every=0",), {0: [(3, 5, "forward")]}, []),
        (("elastic.recovery=rebuild",), {0: [(3, 5, "forward")]}, [0]),
        (("strategy.offload=cpu",), {0: [(3, 5, "forward")]}, [0]),
    ],
)
def test_who_keeps_model_and_optimizer_makes_the_same_bits(
    trained, request, overrides, kills, kept
):
    name = request.node.callspec.id
    output, ours = trained(f"kept-{name}", kills, *overrides)
    assert_kept(output, kept)
    _, undisturbed = trained(f"whole-{name}", {}, *overrides)
    assert_equal_bits(ours, undisturbed)


@soak
@pytest.mark.timeout(600)
def test_who_keeps_its_model_compiles_nothing_again(trained):
    output, _ = trained("kept-compiled", {0: [(3, 10, "forward")]}, "strategy.compile=true")
    assert_kept(output, [3])
    before, _, after = output.partition("restored step 9")
    again = set(re.findall(r"process (\d+) compiles", after))
    assert len(set(re.findall(r"process (\d+) compiles", before))) >= 4
    assert len(again) <= 1, output


@soak
@pytest.mark.timeout(600)
def test_many_failures_leave_nothing_behind(workspace, tmp_path):
    """Threads, descriptors and memory of the rank that outlives ten failures."""
    run, seen = "many", {}
    kills = {n: [(1 + n % 3, 6 * n + 6, ("forward", "backward")[n % 2])] for n in range(10)}
    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", "run.steps=70", *deadly(run, kills)],
        folder=workspace, nnodes="1", logs=tmp_path, start=Forked, ranks=4,
        environment={"PYTHONPATH": str(ROOT)},
    ) as nodes:  # fmt: skip
        node = nodes.add()
        while node.process.poll() is None:
            attempt, trainers = len(starts(workspace, run)), node.trainers()
            if attempt not in seen and reached(workspace, run) >= 6 * attempt - 3 and trainers[3:]:
                process = Path(f"/proc/{trainers[0]}")
                status = dict(line.split(":", 1) for line in (process / "status").open())
                held = int(status["Threads"]), len(list((process / "fd").iterdir()))
                seen[attempt] = *held, int(status["RssAnon"].split()[0]), process.name
            time.sleep(0.02)
    assert_kept(node.text(), [3] * 10)
    first, last = seen[2], seen[max(seen)]
    assert max(seen) >= 10
    assert last[3] == first[3], "rank 0 was replaced"
    assert last[0] <= first[0] + 1, seen
    assert last[1] <= first[1] + 2, seen
    assert last[2] <= first[2] + 8_000, seen  # kB; 0.3 MB a failure were measured
