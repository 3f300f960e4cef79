"""A user's own model: what its code may do, and what becomes of its modes and buffers."""

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.support import python_path
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT, Forked, losses
from trainer.recipe import RecipeError, load_recipe
from trainer.run.preflight import check_launch
from trainer.tasks.task import bare_model

FACTORY = '''
import time

import torch
from torch import nn

from checkpointing.save.staging import SaveStaging

copy = SaveStaging._copy

def copy_late(self, *arguments):
    """After the next forward pass."""
    time.sleep(0.3)
    copy(self, *arguments)


class Model(nn.Module):
    """A bigram table that counts its passes, and is slow on one rank."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(257, 257)])
        self.frozen = nn.Dropout().eval()
        self.register_buffer("trained", torch.zeros(()))
        self.register_buffer("evaluated", torch.zeros(()))
        self.register_buffer("thawed", torch.zeros(()))

    def forward(self, input_ids, labels, document_ids=None):
        self.trained = self.trained + self.training  # another tensor
        self.evaluated += not self.training
        self.thawed += self.frozen.training
        if torch.distributed.get_rank() == 1:
            time.sleep(0.05)
        logits = self.layers[0](input_ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def build():
    SaveStaging._copy = copy_late
    torch.tril(torch.ones(2048, 2048))  # a process that has run threads cannot be forked
    return Model()

def published():
    return Model().eval()
'''
MODEL = ["model.architecture=null", "model.factory=own_model:build"]
STEPS = 6


def test_an_own_model_trains(workspace, start):
    (workspace / "own_model.py").write_text(FACTORY)
    run = ["run.dir=own", f"run.steps={STEPS}", "strategy.name=ddp", "run.evaluate_every=2"]
    run += ["checkpoint.every=1", "checkpoint.keep=3", "checkpoint.when_busy=wait"]
    words = ["recipe.yaml", "--nproc-per-node", "2", *MODEL, *run]
    code, output = start(1, *words, recipe="train", program=["trainer.cli"]).wait()
    assert code == 0, output
    assert "rank 1 is slow, and all others wait for it" in output
    for step in range(STEPS - 2, STEPS + 1):
        (file,) = (workspace / "own" / "checkpoints" / f"step-{step:08}").glob("model*.safetensors")
        tensors = load_file(file)
        assert tensors["trained"] == 2 * step, "a buffer is of a later pass"
        assert tensors["evaluated"] == 3 * (step // 2)  # 10 sequences on two ranks
        assert tensors["thawed"] == 0


def test_a_model_that_comes_in_eval_mode_is_trained(workspace, monkeypatch):
    (workspace / "own_model.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(workspace)
    recipe = load_recipe(
        str(workspace / "recipe.yaml"), [*MODEL, "model.factory=own_model:published"]
    )
    model, *_ = bare_model(recipe)
    assert all(module.training for module in model.modules())


def test_a_parameter_that_fsdp_cannot_cut_is_named_before_anything_starts(workspace, monkeypatch):
    scale = "self.scale = nn.Parameter(torch.ones(()))"
    text = FACTORY.replace("self.frozen =", f"{scale}\n        self.frozen =")
    (workspace / "scaled.py").write_text(text.replace("return nn.", "return self.scale * nn."))
    monkeypatch.syspath_prepend(workspace)
    factory = ["model.architecture=null", "model.factory=scaled:Model"]
    data = f"data.sources.0.path={workspace / 'data'}"
    recipe = load_recipe(workspace / "recipe.yaml", [data, *factory])
    with pytest.raises(RecipeError, match="parameter scale has no dimension"):
        check_launch(recipe, 2, 2)


def test_a_model_without_a_loss_is_told_in_a_line(workspace, start):
    """Without an agent of ours, which would have tried it."""
    text = FACTORY.replace("return nn.functional.cross_entropy(", "return dict(logits=logits, x=")
    (workspace / "no_loss.py").write_text(text.replace(".flatten(0, 1), labels.flatten())", ")"))
    factory = ["model.architecture=null", "model.factory=no_loss:Model", "strategy.name=ddp"]
    code, output = start(2, "run.dir=no-loss", *factory).wait()
    assert code == 2, output
    told = "error: model.factory: forward returns a dict without a scalar 'loss' (of 'logits', 'x')"
    assert told in output
    assert "Traceback" not in output


def test_a_model_that_does_not_fit_ends_the_job_at_its_first_pass(workspace, tmp_path):
    """Where nobody has tried it before, as `perdure train` does."""
    text = FACTORY.replace("self.layers[0](input_ids)", "self.layers[0](input_ids) @ self.trained")
    (workspace / "misfit.py").write_text(text)
    factory = ["model.architecture=null", "model.factory=misfit:published"]
    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", "run.dir=misfit", *factory],
        folder=workspace,
        nnodes="1",
        logs=tmp_path,
        start=Forked,
        environment={"PYTHONPATH": python_path(ROOT)},
    ) as nodes:
        node = nodes.add()
        assert nodes.wait(60) == [2], node.text()
    place = f"{workspace / 'misfit.py'}:{text[: text.index(' @ ')].count(chr(10)) + 1}"
    assert f"error: model.factory: the forward pass of misfit:published fails at {place}: " in (
        node.text()
    )
    assert "resuming" not in node.text()
    assert node.text().count("on cpu") == 1, "started once"


HALVES = '''
import torch
from torch import nn


class Model(nn.Module):
    """Made in bf16, with norms in float32, a head in fp16, and an embedding that is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(257, 32).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.to(torch.bfloat16)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 257).half()
        self.register_buffer("scale", torch.full((), 0.1, dtype=torch.bfloat16))

    def forward(self, input_ids, labels, document_ids=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(self.norm(x) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def in_float32():
    return Model().float()
'''


def test_what_a_factory_makes_in_bf16_is_trained_in_float32(workspace, train):
    """As if it had been made in float32, bit by bit; a frozen parameter, which FSDP casts anyway,
    stays in bf16."""
    (workspace / "halves.py").write_text(HALVES)
    common = ["model.architecture=null", "run.steps=4", "schedule={}", "optimizer.lr=1e-5"]
    common += ["precision.dtype=bf16"]
    output = train(2, "run.dir=halves", "model.factory=halves:Model", *common)
    trained = "they are converted to float32, and trained and saved so"
    assert f"note: halves:Model made 4 parameters in bfloat16; {trained}" in output
    assert f"note: halves:Model made 2 parameters in float16; {trained}" in output
    assert "note: halves:Model made 1 parameter in bfloat16, which stays so" in output
    train(2, "run.dir=wide", "model.factory=halves:in_float32", *common)
    assert losses(workspace, "halves") == losses(workspace, "wide")
    (file,) = (workspace / "halves/checkpoints/step-00000004").glob("model*.safetensors")
    tensors = load_file(file)
    assert {key for key, one in tensors.items() if one.dtype != torch.float32} == {"embed.weight"}
