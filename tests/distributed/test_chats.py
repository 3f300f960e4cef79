"""Chats under the loop: one mean over the trained tokens of a step, whatever ranks there are."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from elastic.record.history import read_history
from tests.distributed.jobs import losses, records, soak, wait_for_step
from tests.trainer.data.chat_families import PLAIN, VARIABLES, tokenizer, without_workers
from trainer.data.prepare.prepare import prepare
from trainer.data.stream import COUNTED
from trainer.recipe import load_recipe
from trainer.tasks.task import build_task
from trainer.tools.report.report import check

BATCH, RATE = 8, 1000.0
RECIPE = """\
run: {dir: run, steps: 1, log_every: 1, seed: 3, device: cpu}
model:
  architecture:
    {model_type: qwen3, vocab_size: 352, hidden_size: 48, intermediate_size: 96,
     num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
     tie_word_embeddings: true}
data: {sources: [{path: chats}], seq_len: 96}
batch: {global_batch: 8, micro_batch: 1}
optimizer: {factory: "torch.optim:SGD", lr: 1000, clip_norm: 0, weight_decay: 0}
schedule: {name: constant}
precision: {dtype: fp32}
checkpoint: {every: 1}
"""


@pytest.fixture(scope="module")
def folder(workspace):
    """Chats of which some have one trained token for a hundred that are not, others the reverse."""
    draw = np.random.default_rng(0)
    with (workspace / "chats.jsonl").open("w") as file:
        for number in range(150):
            sizes = (30, 1) if number % 3 else (1, 40)
            asked, answered = (" ".join(draw.choice(list("abcdefgh"), size)) for size in sizes)
            roles = {"user": asked, "assistant": answered}
            messages = [{"role": role, "content": text} for role, text in roles.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer().save(str(workspace / "tokenizer.json"))
    settings = {**VARIABLES, "chat_template": PLAIN}
    (workspace / "tokenizer_config.json").write_text(json.dumps(settings))
    options = {"tokenizer": str(workspace), "chat": True, "validation_fraction": 0.1}
    with without_workers():
        prepare([str(workspace / "chats.jsonl")], workspace / "chats", **options)
    (workspace / "chats.yaml").write_text(RECIPE)
    return workspace


@pytest.fixture(scope="module")
def exact(folder):
    """(gradients in double precision by name, the loss, the same where the means of micro-batches
    are averaged, trained tokens) of the first step, in this process."""
    before = os.getcwd()
    os.chdir(folder)
    task = build_task(load_recipe("chats.yaml"))
    os.chdir(before)
    model = task.model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(task.fill(name, tuple(parameter.shape)))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.double()
    sums, means, counted = 0.0, 0.0, 0
    for position in range(BATCH):
        batch = task.stream.fetch([position])
        count = batch.pop(COUNTED)
        loss = model(**batch)
        sums, means, counted = sums + loss * count, means + loss / BATCH, counted + count
    found = []
    for total in (sums / counted, means):
        model.zero_grad()
        total.backward(retain_graph=True)
        found.append({name: one.grad.clone() for name, one in model.named_parameters()})
    return start, *found, float(sums.detach() / counted), counted


def distance(found, expected):
    """Of gradients from others, relative to these."""
    squares = sum(((found[name].double() - one) ** 2).sum() for name, one in expected.items())
    return float((squares / sum((one**2).sum() for one in expected.values())) ** 0.5)


def weights_of(folder, run, step):
    files = (folder / run / f"checkpoints/step-{step:08}").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def gradients(folder, run, start):
    """Of the one step of a run: what plain gradient descent has taken from the weights."""
    weights = weights_of(folder, run, 1)
    return {name: (one.double() - weights[name].double()) / RATE for name, one in start.items()}


LAYOUTS = [
    (1, []),
    (2, ["data.workers=1"]),  # whose processes hold what this one has open
    (2, []),
    (2, ["strategy.name=ddp"]),
    (3, ["strategy.zero=2"]),
    (4, ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"]),
    (4, ["batch.micro_batch=2", "strategy.zero=1"]),
    (2, ["strategy.tp=2"]),
    (2, ["strategy.tp=2", "strategy.sequence_parallel=true"]),
    (2, ["strategy.cp=2"]),
    (2, ["strategy.pp=2"]),
    (4, ["strategy.tp=2", "strategy.cp=2"]),
]


def test_a_step_divides_by_its_trained_tokens(folder, exact, start):
    """The gradient at any world size is that of one mean; averaged means are far from it."""
    weights, right, averaged, loss, counted = exact
    assert distance(averaged, right) > 0.3, "then nothing would be seen"
    alone = None
    for number, (ranks, overrides) in enumerate(LAYOUTS if os.environ.get("SOAK") else LAYOUTS[:2]):
        run = f"mean-{number}"
        code, output = start(ranks, f"run.dir={run}", *overrides, recipe="chats.yaml").wait()
        assert code == 0, output
        (record,) = [one for one in records(folder, run) if "lr" in one]
        assert record["loss"] == pytest.approx(loss, rel=1e-6), overrides
        assert record["tokens"] == counted, "padding and prompts are not trained"
        off = distance(gradients(folder, run, weights), right)
        alone = alone or off
        assert off <= 2 * alone < 1e-5, (ranks, overrides)
        assert "trained tokens each; `tokens` counts these" in output


@soak
def test_chats_that_are_killed_and_resumed_elsewhere(folder, start):
    more = ("run.steps=8", "optimizer.factory=null", "optimizer.lr=0.003", "run.evaluate_every=4")
    curves = []
    exact = ("run.determinism=exact", *more)
    for ranks in (1, 2, 3):
        name = f"exact-{ranks}"
        code, output = start(ranks, f"run.dir={name}", *exact, recipe="chats.yaml").wait()
        assert code == 0, output
        curves.append(losses(folder, name))
    assert curves[0] == curves[1] == curves[2]
    job = start(2, "run.dir=killed", *exact, recipe="chats.yaml")
    wait_for_step(folder, "killed", 3, job)
    job.kill()
    code, output = start(3, "run.dir=killed", *exact, recipe="chats.yaml").wait()
    assert code == 0, output
    good, text = check(read_history(folder / "killed"), folder / "killed")
    assert good, text
    assert "tokens of all 8 steps" in text
    one, other = (weights_of(folder, run, 8) for run in ("exact-1", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)
