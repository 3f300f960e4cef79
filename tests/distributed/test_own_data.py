"""Data of the user's own, under the loop: killed, resumed on other ranks, each sample once, and
what plain torch makes of it in one process and one batch."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from benchmarks.support import python_path
from elastic.record.history import read_history
from lab.local_nodes import LocalNodes
from tests.checkpointing.faults import until
from tests.distributed.jobs import ROOT, Forked, losses, records, soak, wait_for_step
from trainer.data.stream import COUNTED
from trainer.optim.optimizer import named_groups
from trainer.recipe import load_recipe
from trainer.tasks.task import build_task
from trainer.tools.report.report import check

STEPS = 10
RECIPE = f"""\
run: {{dir: run, steps: {STEPS}, log_every: 1, evaluate_every: 5, seed: 3, device: cpu}}
batch: {{global_batch: 12, micro_batch: 2}}
optimizer: {{lr: 0.01}}
schedule: {{name: constant}}
precision: {{dtype: fp32}}
checkpoint: {{every: 2}}
"""
KINDS = {
    "arrays": """\
model: {factory: "own_data:model"}
data: {factory: "own_data:data", factory_options: {size: 96}}
""",
    "rows": """\
model: {factory: "own_samples:regression"}
data: {factory: "own_samples:rows"}
""",
    "tokens": """\
model:
  architecture:
    {model_type: qwen3, vocab_size: 61, hidden_size: 32, intermediate_size: 48,
     num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,
     tie_word_embeddings: true}
data: {factory: "own_samples:dialogues"}
""",
}
MEANS = {"arrays": {"accuracy"}, "rows": {"error", "ten"}, "tokens": set()}


@pytest.fixture(scope="session")
def folder(workspace):
    shutil.copy(ROOT / "examples/own_data.py", workspace)
    shutil.copy(Path(__file__).parent / "own_samples.py", workspace)
    for kind, text in KINDS.items():
        (workspace / f"{kind}.yaml").write_text(text + RECIPE)
    return workspace


@pytest.mark.parametrize("kind", [k if k == "rows" else pytest.param(k, marks=soak) for k in KINDS])
def test_it_trains_as_in_one_process(kind, folder, start, monkeypatch):
    job = start(2, f"run.dir={kind}", recipe=f"{kind}.yaml")
    wait_for_step(folder, kind, 3, job)
    job.kill()
    ranks = 3 if os.environ.get("SOAK") else 1
    other = ("batch.micro_batch=5", f"data.workers={ranks // 3}")
    code, output = start(ranks, f"run.dir={kind}", *other, recipe=f"{kind}.yaml").wait()
    assert code == 0, output
    assert "resuming after step" in output

    history = read_history(folder / kind)
    assert history.sequences == 12 * STEPS
    good, text = check(history, folder / kind)
    assert good, text
    assert f"samples of all {STEPS} steps" in text

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    expected, found = one_process(kind), {r["step"]: r for r in records(folder, kind) if "lr" in r}
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, means in enumerate(expected[:-1], 1):
        ours = {name: found[step][name] for name in means}
        assert ours == pytest.approx(means, rel=2e-5, abs=1e-6), step
        assert means.keys() == {"loss", "grad_norm", *MEANS[kind]}
    validated = [r for r in records(folder, kind) if "validation_loss" in r]
    assert [record["step"] for record in validated] == [5, 10]
    assert {k: validated[-1][k] for k in expected[-1]} == pytest.approx(expected[-1], rel=1e-4)
    assert expected[-2]["loss"] < 0.9 * expected[0]["loss"], "nothing was learnt"


def one_process(kind):
    """What torch makes of it, a global batch at a time: of each step loss, norm of the gradient and
    further means, and at last those of the validation set."""
    recipe = load_recipe(f"{kind}.yaml")
    task = build_task(recipe)
    model = task.model
    if task.fill:
        model.to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            parameter.data.copy_(task.fill(name, tuple(parameter.shape)))
    options = recipe.optimizer
    groups = named_groups(dict(model.named_parameters()), options)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)

    def forward(stream, positions):
        batch = stream.fetch(positions)
        del batch[COUNTED]
        result = model(**batch)
        return result if isinstance(result, dict) else {"loss": result}

    found = []
    for step in range(STEPS):
        means = forward(task.stream, range(12 * step, 12 * step + 12))
        means["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        means.pop("count", None)
        found.append({**{name: float(mean) for name, mean in means.items()}, "grad_norm": norm})
    with torch.no_grad():
        held_out = task.validation.stream
        means = forward(held_out, range(held_out.sequences))
    means.pop("count", None)
    return [*found, {f"validation_{name}": float(mean) for name, mean in means.items()}]


@soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_exact_mode_is_exact_whatever_counts(strategy, folder, start):
    for kind in ("rows", "tokens"):
        curves = []
        for ranks in (1, 2, 3):
            name = f"exact-{kind}-{strategy}-{ranks}"
            overrides = [f"run.dir={name}", f"strategy.name={strategy}"]
            job = start(ranks, *overrides, "run.determinism=exact", recipe=f"{kind}.yaml")
            code, output = job.wait()
            assert code == 0, output
            curves.append(losses(folder, name))
        assert curves[0] == curves[1] == curves[2]


@soak
def test_tokens_on_ranks_that_share_a_model(folder, start):
    """Each data-parallel rank reads its own; those of one tensor-parallel group the same."""
    model = ("model.architecture.num_key_value_heads=2", "model.architecture.vocab_size=62")
    curves = []
    for ranks, strategy in (
        (1, ["strategy.name=ddp"]),
        (4, ["strategy.tp=2"]),
        (2, ["strategy.tp=2", "strategy.sequence_parallel=true"]),
    ):
        name = f"shared-{ranks}"
        code, output = start(
            ranks, f"run.dir={name}", *strategy, *model, recipe="tokens.yaml"
        ).wait()
        assert code == 0, output
        curves.append(losses(folder, name))
        assert check(read_history(folder / name), folder / name)[0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


@soak
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_images_in_bf16(strategy, folder, start):
    """What they are multiplied with is in bf16; they come in float32."""
    overrides = [f"run.dir=bf16-{strategy}", f"strategy.name={strategy}", "precision.dtype=bf16"]
    code, output = start(2, *overrides, recipe="arrays.yaml").wait()
    assert code == 0, output
    curve = losses(folder, f"bf16-{strategy}")
    assert curve[STEPS] < 0.9 * curve[1]


@soak
@pytest.mark.parametrize("recovery", ["in_place", "refork"])
def test_a_killed_rank_is_replaced(recovery, folder, tmp_path):
    """By an agent, whose warm process calls no code of the user's."""
    run = folder / f"replaced-{recovery}"
    overrides = [f"run.dir={run.name}", "run.steps=3000", "run.evaluate_every=0"]
    overrides += [f"elastic.recovery={recovery}", "checkpoint.every=0", "elastic.snapshot_every=1"]
    with LocalNodes(
        ["-m", "trainer", "arrays.yaml", *overrides, "checkpoint.slots=2"],
        folder=folder,
        nnodes="1",
        logs=tmp_path,
        start=Forked,
        ranks=2,
        environment={"PYTHONPATH": python_path(ROOT)},
    ) as nodes:
        node = nodes.add()
        assert until(lambda: max(losses(folder, run.name), default=0) > 10, 60), node.text()
        goal = max(losses(folder, run.name)) + 20
        os.kill(node.trainers()[1], signal.SIGKILL)
        assert until(lambda: max(losses(folder, run.name)) > goal, 60), node.text()
        os.kill(node.process.pid, signal.SIGTERM)
        assert nodes.wait(60) == [75], node.text()
    history = read_history(run)
    assert len(history.attempts) > 1
    good, text = check(history, run)
    assert good, text
    assert "samples of all" in text
