"""batch.micro_batch: auto takes what fits, and less on all ranks once memory ran out on one."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from checkpointing import read_state
from elastic import World
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT, Forked, losses, soak
from trainer.plan import predict
from trainer.plan.blueprint import read_blueprint
from trainer.plan.search import ROOM, largest_micro_batch
from trainer.recipe import RecipeError, load_recipe
from trainer.run.micro_batch import RunOutOfMemoryError, halving

# 1 PiB: no address space holds it, so torch's allocator fails as it does when memory runs out.
FACTORY = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(257, 257)])

    def forward(self, input_ids, labels, document_ids=None):
        planned = type(input_ids) is not torch.Tensor  # else the plan would know
        if not planned and len(input_ids) > 1 and torch.distributed.get_rank() == 1:
            torch.empty(1 << 50)
        logits = self.layers[0](input_ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

"""
MODEL = [
    "model.architecture=null",
    "model.factory=hungry:Model",
    "batch.global_batch=4",
    "run.steps=3",
    "schedule.warmup_steps=0",
    "checkpoint.every=3",
]


@soak
def test_memory_that_ran_out_on_one_rank_halves_the_micro_batch_of_all(workspace, train, tmp_path):
    """The others wait for that rank in a collective. It is no failure, as one would end this job.
    What follows has the bits of a run with that number; another world has a number of its own."""
    (workspace / "hungry.py").write_text(FACTORY)
    auto = [*MODEL, "batch.micro_batch=auto", "run.dir=auto"]
    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", *auto],
        folder=workspace,
        nnodes="1",
        logs=tmp_path,
        start=Forked,
        ranks=2,
        environment={"PYTHONPATH": str(ROOT)},
        options=["--rdzv-conf", "restarts=0"],
    ) as nodes:
        node = nodes.add()
        assert nodes.wait(90) == [0], node.text()
    assert "out of memory with 2 sequences in a pass; the next start takes 1" in node.text()
    assert node.text().count("on cpu") == 2, "one more start"

    train(2, *MODEL, "batch.micro_batch=1", "run.dir=fixed")
    run = workspace / "auto"
    assert losses(workspace, "auto") == losses(workspace, "fixed")
    saved = read_state(run / "checkpoints" / "step-00000003")
    assert saved["recipe"]["batch"]["micro_batch"] == 1

    assert "1 pass(es) x up to 4" in train(1, *auto, "run.steps=4")
    assert set(json.loads((run / "micro_batch.json").read_text())["sequences"].values()) == {1, 4}


NCCL = (
    "NCCL error in: NCCLUtils.cpp:101, {}, NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 '{}'"
)


@pytest.mark.parametrize(
    ("error", "halves"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (dist.DistBackendError(NCCL.format("unhandled cuda error", "out of memory")), True),
        (dist.DistBackendError(NCCL.format("unhandled cuda error", "invalid argument")), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
    ],
)
def test_every_way_in_which_memory_runs_out_halves(tmp_path, workspace, error, halves):
    overrides = ["batch.micro_batch=auto", f"run.dir={tmp_path}"]
    recipe, noted = load_recipe(workspace / "recipe.yaml", overrides), tmp_path / "micro_batch.json"
    fixed = dataclasses.replace(recipe, batch=dataclasses.replace(recipe.batch, micro_batch=4))
    world = World(0, 0, 1, 1, 1, 0, 0, None, torch.device("cpu"))
    run = SimpleNamespace(written=recipe, recipe=fixed, world=world, first_step=True)
    with pytest.raises(RunOutOfMemoryError if halves else type(error)), halving(run):
        raise error
    assert noted.exists() == halves
    if halves:
        assert list(json.loads(noted.read_text())["sequences"].values()) == [2]


GPU = 1.7e6
"""Bytes of one that takes four sequences of the tests' model with one layer."""


@pytest.fixture
def recipe_of(workspace, monkeypatch):
    """recipe_of(override, …) → a recipe; all have the blueprint of the first, whose traces are
    remembered."""
    known = []

    def read_once(recipe):
        known[:] = known or [read_blueprint(recipe)]
        return known[0]

    monkeypatch.setattr("trainer.plan.search.read_blueprint", read_once)
    monkeypatch.setattr("trainer.plan.prediction.read_blueprint", read_once)
    return lambda *overrides: load_recipe(workspace / "recipe.yaml", overrides)


def test_the_largest_that_leaves_room(recipe_of):
    small = "model.architecture.num_hidden_layers=1"  # and soon traced
    recipe = recipe_of(small, "batch.micro_batch=auto")

    def needed(size, device):
        fixed = recipe_of(small, f"batch.micro_batch={size}")
        found = predict(fixed, 1, 1, device=device, gpu_memory=GPU)
        return found.node_memory if device == "cpu" else found.peak

    room = needed(4, "cpu") / (1 - ROOM)
    for memory, largest in (1e3, 1), (room, 4), (room - 1, 2), (80e9, 8):
        assert largest_micro_batch(recipe, 1, 1, memory, "cpu") == largest
    assert needed(4, "cuda") <= (1 - ROOM) * GPU < needed(8, "cuda")
    assert largest_micro_batch(recipe, 1, 1, GPU, "cuda") == 4
    assert largest_micro_batch(recipe, 2, 2, 80e9, "cpu") == 4
    assert largest_micro_batch(recipe, 3, 3, 80e9, "cpu") == 3


def test_a_pipeline_keeps_enough_passes(recipe_of):
    """Whatever fits: of a single pass each rank would wait for half of the time."""
    for sequences, expected in (4, 1), (8, 1), (16, 2), (17, 2), (64, 8):
        given = ["batch.micro_batch=auto", "strategy.pp=2", f"batch.global_batch={sequences}"]
        assert largest_micro_batch(recipe_of(*given), 2, 2, 80e9, "cpu") == expected, sequences


def test_what_cannot_be_planned_wants_a_number(workspace):
    own = ["model={factory: a:b}", "data={factory: a:b}", "batch.micro_batch=auto"]
    with pytest.raises(RecipeError, match=r"batch.micro_batch: data.factory .* name a number"):
        load_recipe(workspace / "recipe.yaml", own)
    exact = ["run.determinism=exact", "batch.micro_batch=auto"]  # a world with more ranks than
    with pytest.raises(RecipeError, match=r"batch.micro_batch: .* an exact run.* name a number"):
        load_recipe(workspace / "recipe.yaml", exact)  # micro-batches could not go on with it
