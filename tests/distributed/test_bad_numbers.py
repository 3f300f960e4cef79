"""Non-finite losses: computed again, skipped and counted, rolled back, and in the end a reason to
stop. Weights and moments that are not finite: undone, and never saved."""

import json

import pytest
import torch
from safetensors.torch import load_file

from elastic.record.history import read_history
from tests.distributed.jobs import losses, records, soak, wait_for_step
from trainer.optim.optimizer import LossScale
from trainer.tools.report.report import check

FACTORY = '''
import torch
from torch import nn

class Model(nn.Module):
    """A bigram table whose loss is NaN for chosen batches, or only in chosen calls."""

    def __init__(self, bad_batches, bad_calls, bad_rank):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(257, 257)])
        self.batches, self.bad_batches = [], bad_batches
        self.calls, self.bad_calls, self.bad_rank = 0, bad_calls, bad_rank
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids, labels, document_ids=None):
        logits = self.dropout(self.layers[0](input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.calls += 1
        if input_ids.tolist() not in self.batches:
            self.batches.append(input_ids.tolist())
        batch = self.batches.index(input_ids.tolist()) + 1
        bad = self.calls in self.bad_calls or batch in self.bad_batches
        bad = bad and torch.distributed.get_rank() == self.bad_rank
        return loss * float("nan") if bad else {"loss": loss}

def build(bad_batches=(), bad_calls=(), bad_rank=0):
    return Model(list(bad_batches), list(bad_calls), bad_rank)
'''


@pytest.fixture
def factory(workspace):
    (workspace / "users_model.py").write_text(FACTORY)
    recipe = (workspace / "recipe.yaml").read_text()
    head, rest = recipe.split("model:\n")
    rest = rest[rest.index("data:") :]
    text = f"{head}model: {{factory: 'users_model:build'}}\n{rest}"
    (workspace / "factory.yaml").write_text(text)
    return "factory.yaml"


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(["strategy.name=ddp"], id="ddp", marks=soak), pytest.param([], id="fsdp")],
)
def test_bad_steps_are_skipped_and_the_run_goes_on(workspace, start, factory, overrides):
    run = f"skips-{len(overrides)}"
    bad = "model.factory_options={bad_batches: [5, 6, 9], bad_rank: 1}"  # two passes a step
    job = start(2, f"run.dir={run}", "run.steps=8", bad, *overrides, recipe=factory)
    code, output = job.wait()
    assert code == 0, output
    assert "step 3: loss is nan, first seen on rank 1; skipped" in output
    assert "computed twice, not finite both times, so data or model is the cause" in output
    assert "step 5: loss is nan, first seen on rank 1; skipped" in output
    steps = [record for record in records(workspace, run) if "loss" in record]
    assert steps[-1]["skipped_steps"] == 2
    curve = losses(workspace, run)
    assert [step for step, loss in curve.items() if loss is None] == [3, 5]


@soak
def test_a_number_that_is_bad_only_once_is_the_machines_fault(workspace, start, factory):
    def run(name, *overrides):
        code, output = start(2, f"run.dir={name}", "run.steps=8", *overrides, recipe=factory).wait()
        assert code == 0, output
        return output, losses(workspace, name)

    _, expected = run("sound")
    output, found = run("corrupt", "model.factory_options={bad_calls: [6], bad_rank: 1}")
    assert "warning: step 3: silent corruption on rank 1: computed again" in output
    assert found == expected


FAMILY = '''
from dataclasses import replace

import torch
from torch import distributed as dist

from trainer.models.decoder import MLP, Block
from trainer.models.families import qwen3


class Faulty(Block):
    """Gives NaN once, on the first rank, in the sixth pass."""

    calls = 0

    def forward(self, *inputs):
        self.calls += dist.is_initialized() and dist.get_rank() == 0
        return super().forward(*inputs) * (float("nan") if self.calls == 6 else 1)


FAMILY = replace(
    qwen3.FAMILY, model_type="faulty", block=lambda a: Faulty(a, qwen3.attention(a), MLP(a))
)
'''


@soak
def test_what_a_stage_computed_wrongly_is_not_put_down_to_the_last_one(workspace, start):
    """Which has the loss, and the NaN that came to it."""
    (workspace / "faulty.py").write_text(FAMILY)
    family = ["model.family=faulty:FAMILY", "model.architecture.model_type=faulty"]
    for ranks, tp, named in ((2, 1, "rank 0, 1"), (4, 2, "rank 0, 1, 2, 3")):
        overrides = [f"run.dir=faulty-{tp}", "run.steps=3", "schedule={}", *family]
        code, output = start(ranks, *overrides, "strategy.pp=2", f"strategy.tp={tp}").wait()
        assert code == 0, output
        assert f"warning: step 2: silent corruption on {named}: computed again" in output


def test_too_many_bad_steps_roll_back_and_then_stop_the_run(workspace, start, factory):
    def run(name, batches, *overrides):
        bad = f"model.factory_options={{bad_batches: {list(batches)}, bad_rank: 0}}"
        limit = "elastic.max_skipped_steps=2"
        job = start(2, f"run.dir={name}", "run.steps=12", bad, limit, *overrides, recipe=factory)
        return job.wait()

    code, output = run("back", range(9, 15), "checkpoint.every=2", "checkpoint.when_busy=wait")
    assert code == 0, output
    # Not to those of step 6, which was skipped.
    assert "weights of step 4 in storage; the data from there to step 7 is not" in output
    ledger = [json.loads(line) for line in (workspace / "back" / "ledger.jsonl").open()]
    steps = [line for line in ledger if line["kind"] == "step"]
    assert [line["step"] for line in steps if line.get("skipped")] == [5, 6, 7]
    history = read_history(workspace / "back")
    assert history.taken_back() == [(4, 7)]
    assert check(history, workspace / "back")[0], check(history, workspace / "back")
    # A mark, or a roll-back, that is taken away contradicts what counts them.
    for gone in (6, "rollback"):
        lines = [dict(line) for line in ledger]
        if gone == 6:
            line = next(line for line in lines if line["kind"] == "step" and line["step"] == 6)
            line |= {"skipped": False, "loss": 2.0, "norm": "0x1.0p+0"}
            del line["why"]
        else:
            lines = [line for line in lines if line["kind"] != gone]
        (workspace / "forged.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        problems = read_history(workspace / "forged.jsonl").problems
        assert "but the lines up to there have" in problems[0]
    # That of step 6 is made up for as soon as the weights are good again.
    assert [line["step"] for line in ledger if "ok" in line] == [2, 4, 7, 8, 10, 12]

    code, output = run("stops", range(5, 99))
    assert code != 0
    assert "stopped: step 5: loss is nan, first seen on rank 0" in output
    assert code == 93
    assert not list((workspace / "stops" / "checkpoints").glob("step-*"))


SPOILING = '''
import torch
from torch import distributed as dist

from checkpointing.format.tensors import local_tensor

CALLS = []

class Spoiling(torch.optim.AdamW):
    """AdamW, of which chosen calls leave what is no number on the last rank."""

    def __init__(self, groups, weights=(), moments=()):
        super().__init__(groups)
        self.plan = {"weights": list(weights), "moments": list(moments)}

    def step(self):
        super().step()
        group = self.param_groups[0]
        if not dist.is_initialized() or dist.get_rank() < dist.get_world_size() - 1:
            return
        parameter = group["params"][0]
        if not group["lr"] or parameter.shape[0] < 100:  # to make its state, or to try it
            return
        CALLS.append(1)
        moment = self.state[parameter]["exp_avg_sq"]
        for what, tensor in (("weights", parameter), ("moments", moment)):
            if len(CALLS) in self.plan[what]:
                local_tensor(tensor)[-1, -1] = torch.inf
'''


def all_finite(folder):
    """Whether all checkpoints of a run are, and there are any."""
    files = [*folder.glob("checkpoints/step-*/**/*.safetensors")]
    return files and all(one.isfinite().all() for f in files for one in load_file(f).values())


def test_an_update_that_leaves_no_numbers_is_undone(workspace, start):
    (workspace / "spoiling.py").write_text(SPOILING)
    given = ["optimizer.factory=spoiling:Spoiling", "checkpoint.every=2", "checkpoint.keep=2"]
    given += ["model.architecture.hidden_size=128"]  # it is tried on fewer than 100 rows
    given += ["batch.global_batch=2", "batch.micro_batch=1"]

    def run(name, spoiled, *overrides):
        options = f"optimizer.factory_options={{{spoiled}}}"
        busy = "checkpoint.when_busy=wait"
        code, output = start(
            2, f"run.dir={name}", "run.steps=8", options, busy, *given, *overrides
        ).wait()
        ledger = [json.loads(line) for line in (workspace / name / "ledger.jsonl").open()]
        assert all_finite(workspace / name), output
        assert all(len(line["weights"]) == 16 for line in ledger if line.get("ok"))
        return code, output, ledger

    # A moment has no effect on any loss. No step follows the last one that could hear of it.
    code, output, ledger = run("undone", "moments: [3], weights: [7]", "elastic.snapshot_every=1")
    assert code == 0, output
    assert "NaN or infinity in model.embed_tokens.weight.exp_avg_sq on rank 1" in output
    assert "step 8: " in output
    assert "NaN or infinity in model.embed_tokens.weight on rank 1" in output
    assert output.count("in memory; the data from there to step") == 2
    assert (workspace / "undone" / "checkpoints" / "step-00000008").is_dir()
    steps = [line for line in ledger if line["kind"] == "step" and line.get("skipped")]
    assert [line["why"] for line in steps] == ["weights", "weights"]
    assert steps[1]["step"] == 8
    assert check(read_history(workspace / "undone"), workspace / "undone")[0]

    always = f"weights: {[*range(5, 99)]}"
    ddp = "run.steps=12", "strategy.name=ddp", "checkpoint.slots=0"
    code, output, ledger = run("ends", always, *ddp)
    assert code == 93, output
    assert output.count("in storage; the data from there to step") == 2
    assert "the run was rolled back 2 times already (elastic.max_rollbacks)" in ledger[-1]["reason"]


def test_a_loss_scale_that_fell_to_one_grows_again():
    scale = LossScale(2.0).after_overflow().after_overflow()
    assert scale == LossScale(1.0)
    for _ in range(LossScale.GROWTH_INTERVAL):
        scale = scale.after_good_step()
    assert scale == LossScale(2.0)


@soak
def test_a_step_is_unscaled_by_the_scale_that_it_was_scaled_by(workspace, start, factory):
    """Also the step after which the scale grows."""
    (workspace / "users_model.py").write_text(
        FACTORY.replace("Dropout(0.1)", "Identity()")
        + """
def growing(every):
    from trainer.optim.optimizer import LossScale

    LossScale.GROWTH_INTERVAL = every
    return build()
"""
    )
    moments = []
    for every in (2, 1000):
        run = f"grows-{every}"
        job = start(
            1, f"run.dir={run}", "run.steps=3", "schedule={}",
            "precision.dtype=fp16", "precision.loss_scale=1024",
            "model.factory=users_model:growing", f"model.factory_options={{every: {every}}}",
            recipe=factory,
        )  # fmt: skip
        code, output = job.wait()
        assert code == 0, output
        scales = [r["loss_scale"] for r in records(workspace, run) if "loss" in r]
        assert scales == ([1024, 2048, 2048] if every == 2 else [1024] * 3)
        (file,) = (workspace / run).glob("checkpoints/step-00000003/optimizer/*.safetensors")
        (moment,) = (t for name, t in load_file(file).items() if name.endswith("exp_avg"))
        moments.append(moment)
    torch.testing.assert_close(*moments, rtol=1e-2, atol=1e-7)


@soak
def test_a_users_model_with_dropout_resumes_bitwise(workspace, start, factory):
    def losses_of(run, *legs):
        for steps_to_kill in (*legs, None):
            job = start(2, f"run.dir={run}", "run.steps=9", "checkpoint.every=2", recipe=factory)
            if steps_to_kill is None:
                code, output = job.wait()
                assert code == 0, output
            else:
                wait_for_step(workspace, run, steps_to_kill, job)
                job.kill()
        return losses(workspace, run)

    assert losses_of("dropout-whole") == losses_of("dropout-killed", 5)
