"""Every strategy and world size follows the loss curve of a single process."""

import os

import pytest

from tests.distributed.jobs import Job, losses, records, soak

# Largest relative difference seen here: 6e-7, float32 rounding in another order of summation.
TOLERANCE = 1e-4
STEPS = 50 if os.environ.get("SOAK") else 8
LENGTH = (f"run.steps={STEPS}", f"run.evaluate_every={STEPS // 2}")
COMPILED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(257, 257)

    def forward(self, input_ids):
        return self.table(input_ids).tanh()

    def compile(self):
        super().compile(backend=told)  # inductor's C++ compiler would take half a minute


def told(graph, _inputs):
    print("a graph is compiled", flush=True)
    return graph


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, input_ids, labels, document_ids=None):
        logits = sum(layer(input_ids) for layer in self.layers)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


@pytest.fixture(scope="session")
def single(workspace):
    code, output = Job(workspace, 1, ("run.dir=single", "strategy.name=ddp", *LENGTH)).wait()
    assert code == 0, output
    curve = losses(workspace, "single")
    assert len(curve) == STEPS
    assert curve[STEPS] < curve[1] - 0.5, "the model must learn something, or curves prove nothing"
    return curve


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        pytest.param("ddp-2", 2, ["strategy.name=ddp"], marks=soak),
        pytest.param("no-shard-2", 2, ["strategy.sharding=NO_SHARD"], marks=soak),
        pytest.param("full-shard-1", 1, [], marks=soak),
        pytest.param("full-shard-2", 2, [], marks=soak),
        pytest.param("full-shard-3", 3, [], marks=soak),
        pytest.param("full-shard-4", 4, ["strategy.reduce_every_pass=true"], marks=soak),
        ("zero2-recomputing-2", 2, ["strategy.zero=2", "strategy.activation_checkpointing=full"]),
        pytest.param("optimizer-state-3", 3, ["strategy.zero=1"], marks=soak),
        pytest.param(
            "hybrid-2x2", 4, ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"], marks=soak
        ),
        pytest.param("selective-2", 2, ["strategy.activation_checkpointing=selective"], marks=soak),
        pytest.param("compile-2", 2, ["strategy.compile=true"], marks=soak),
    ],
)
def test_same_curve_as_single_process(workspace, train, single, name, ranks, overrides):
    train(ranks, f"run.dir={name}", *LENGTH, *overrides)
    curve = losses(workspace, name)
    assert curve.keys() == single.keys()
    worst = max(abs(curve[step] - single[step]) / single[step] for step in single)
    assert worst <= TOLERANCE
    ours, theirs = (
        [r["validation_loss"] for r in records(workspace, run) if "validation_loss" in r]
        for run in (name, "single")
    )
    assert len(ours) == 2
    assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_ddp_leaves_compiled_blocks_whole(workspace, train):
    """Below 2 MiB torch's own way to compile under DDP fails; above, it cuts blocks."""
    (workspace / "compiled.py").write_text(COMPILED)
    model = ["model.architecture=null", "model.factory=compiled:Model"]
    model += ["strategy.name=ddp", "run.steps=2", "schedule.warmup_steps=0"]
    output = train(2, "run.dir=ddp-compiled", *model, "strategy.compile=true")
    assert output.count("a graph is compiled") in (2, 4), "on each rank one, or one for each block"
    train(2, "run.dir=ddp-eager", *model)
    assert losses(workspace, "ddp-compiled") == losses(workspace, "ddp-eager")
