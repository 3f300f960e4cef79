"""Bad input is one clear line, exit code 2, and nothing written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.support import python_path
from tests.distributed.jobs import RECIPE, Job
from trainer.cli import main as cli
from trainer.cli import train
from trainer.data.prepare.prepare import prepare
from trainer.facts import facts

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    options = {"tokenizer": "bytes", "split_documents": "line", "validation_fraction": 0.01}
    lines = "".join(f"{n}: to be, or not to be, that is the question.\n" for n in range(2000))
    (folder / "text.txt").write_text(lines)
    prepare([str(folder / "text.txt")], folder / "data", **options)
    return folder / "data"


@pytest.fixture
def folder(tmp_path, prepared, monkeypatch):
    shutil.copytree(prepared, tmp_path / "data")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def perdure(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["perdure", *arguments])
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    # It would end with the command's process, which is this one.
    monkeypatch.setattr(train, "start_early", lambda: None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr().err


def test_too_few_open_files_end_a_run_before_it_begins(folder):
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 255; exec "$@"', "-", sys.executable, "-m", "trainer.cli", "train",
         "recipe.yaml"],
        env={**os.environ, "PYTHONPATH": python_path(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "this process may open 255 files, and a run needs 256 or more" in done.stderr


@pytest.mark.parametrize("command", [["train"], ["compare"], ["chaos", "--faults", "1"]])
def test_ranks_cannot_read_a_recipe_from_a_pipe_again(monkeypatch, capsys, command):
    code, error = perdure(monkeypatch, capsys, *command, "/dev/stdin")
    assert code == 2
    assert "/dev/stdin: the recipe is read again whenever a rank starts" in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lrr=1"], "optimizer.lrr: unknown key; did you mean 'lr'?"),
        (["run.steps=soon"], "run.steps: input should be a valid integer"),
        (["data.sources.0.path=nowhere"], "data.sources.0.path: no prepared data set at nowhere"),
        (["model.architecture.vocab_size=100"], "vocab_size: 100 is smaller than the 257 tokens"),
        (["batch.global_batch=1"], "batch.global_batch: a global batch of 1 sequences leaves 1"),
        (["batch.global_batch=5000"], "fewer than one global batch of 5000"),
        (["run.dir=recipe.yaml/x"], "recipe.yaml is not a directory"),
        (["tracking.tensorboard=true"], "tracking.tensorboard: tensorboard is not installed; pip"),
        (["tracking.prometheus=run.txt"], "tracking.prometheus: run.txt does not end in .prom"),
        (["tracking.prometheus=no/run.prom"], "tracking.prometheus: no file can be written in"),
        (["tracking.sinks=[json:nothing]"], "json/__init__.py has no nothing; it has JSONDec"),
        (["tracking.sinks=[json]"], "tracking.sinks: write it as package.module:function"),
        (["tracking.sinks=[os:getpid]"], "os:getpid is called with the run directory alone: too"),
        (["tracking.hooks=[os:getpid]"], "tracking.hooks: os:getpid is called with an event alone"),
        (["run.device=cuda"], "run.device: cuda is requested, but torch finds no GPU"),
        (["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=3"], "groups of 3"),
        (["strategy.tp=3"], "strategy.tp: groups of 3 ranks do not divide the"),
        (["strategy.cp=3"], "strategy.cp: groups of 3 ranks do not divide the"),
        (["strategy.tp=3", "strategy.cp=2"], "strategy.cp: groups of tp x cp = 6 ranks do not"),
        (
            ["strategy.tp=2", "model.architecture.num_key_value_heads=1"],
            "strategy.tp: num_key_value_heads=1 is not a multiple of tp=2",
        ),
        (["strategy.pp=3"], "strategy.pp: 2 rank(s) do not divide into pipelines of 3; start"),
        (
            ["strategy.pp=2", "model.architecture.num_hidden_layers=1"],
            "strategy.pp: 1 blocks cannot be cut into 2 stages; lower strategy.pp",
        ),
        (
            ["strategy.tp=2", "model.architecture.model_type=qwen3_moe"],
            "strategy.tp: tensor parallelism does not divide a model's experts; also set ",
        ),
        (["strategy.ep=3"], "strategy.ep: groups of 3 ranks do not divide the 2 that share"),
        (["strategy.ep=2"], "strategy.ep: the model has no experts; set strategy.ep=1"),
        (["strategy.ep=2", "strategy.name=ddp"], "strategy.ep: divides experts among ranks that"),
        (
            ["strategy.ep=2", "strategy.tp=2", "data.seq_len=31"],
            "strategy.ep: its ranks have equal parts",
        ),
        (
            [
                *("strategy.ep=2", "model.architecture.model_type=qwen3_moe"),
                "model.architecture.options={num_experts: 5, num_experts_per_tok: 2}",
            ],
            "strategy.ep: 5 experts do not divide among 2 ranks; set a divisor",
        ),
        *(
            (
                ["model.architecture.model_type=qwen3_moe", f"model.architecture.options={wrong}"],
                f"model.architecture.options.{message}",
            )
            for wrong, message in (
                ("{num_experts: 4}", "num_experts_per_tok: a token cannot go through 8 of 4"),
                ("{num_experts_per_tok: 0}", "num_experts_per_tok: must be at least 1, but"),
                ("{num_experts: 0}", "num_experts: must be at least 1, but"),
                ("{moe_intermediate_size: -1}", "moe_intermediate_size: must be at least 1, but"),
                ("{router_aux_loss_coef: -0.1}", "router_aux_loss_coef: must not be negative"),
            )
        ),
        (["model.architecture=null", "model.init_from=nowhere"], "model.init_from: nowhere"),
        (
            ["model.architecture=null", "model.factory=no.such:thing"],
            "model.factory: cannot import",
        ),
        (
            ["model.attention=flex"],
            "model.attention: flex cannot work: FlexAttention has no backward",
        ),
        (
            ["model.architecture=null", "model.factory=a:b", "model.attention=sdpa"],
            "model.attention: only for model.architecture and model.init_from",
        ),
        (["data.seq_len=5000"], "data.seq_len: 5000 is longer than"),
        (["run.evaluate_every=5", "data.seq_len=3000"], "run.evaluate_every: the validation split"),
        (
            ["run.steps=0", "run.epochs=1.5", "schedule.warmup_steps=900000"],
            "schedule.warmup_steps: 900000 is not below the",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_one_line_exit_2_nothing_written(folder, monkeypatch, capsys, overrides, message):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    before = sorted(folder.rglob("*"))
    code, error = perdure(monkeypatch, capsys, "train", "recipe.yaml", *overrides)
    assert message in error
    assert error.count("\n") == 1
    assert code == 2
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LBFGS", "optimizer.factory: LBFGS computes losses of its own in each step"),
        ("SparseAdam", "SparseAdam fails: RuntimeError: SparseAdam does not support dense"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["plan", "--gpus", "2xH100", "precision.dtype=bf16"],
        ["compare", "--strategies", "ddp,zero3"],
        ["chaos", "--faults", "1", "run.steps=90"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_refuses_an_optimizer(folder, monkeypatch, capsys, command, name, why):
    before = sorted(folder.rglob("*"))
    options = [*command[1:], f"optimizer.factory=torch.optim:{name}"]
    code, error = perdure(monkeypatch, capsys, command[0], "recipe.yaml", *options)
    assert why in error
    assert error.count("\n") == 1
    assert code == 2
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("key", "size", "ranks"), [("tp", 1, 8), ("tp", 2, 16), ("pp", 2, 16), ("cp", 2, 16)]
)
def test_an_agent_knows_how_many_ranks_have_work_and_how_many_hold_the_model(
    folder, key, size, ranks
):
    order = str(folder / "recipe.yaml"), f"strategy.{key}={size}"
    known = facts(order, 2)
    assert (known["most_ranks"], known["unit"]) == (ranks, size)
    # Before it joins, a node hears of groups that would cross it; a pipeline may.
    refused = facts(order, 1).get("error", "")
    crosses = f"groups of {size} ranks do not divide the 1 rank(s) of a node"
    assert (crosses in refused) == (key in ("tp", "cp") and size > 1)


@pytest.mark.parametrize(
    ("nodes", "ranks", "least"), [("1:4", 1, 2), ("3:4", 1, 4), ("1:4", 2, 1), ("1:4", 3, 2)]
)
def test_a_job_begins_with_whole_replicas(folder, monkeypatch, capsys, nodes, ranks, least):
    order = ("train", "recipe.yaml", "strategy.pp=2", "--dry-run", "--rdzv-endpoint", "h:1")
    order += ("--nnodes", nodes, "--nproc-per-node", f"{ranks}")
    code, error = perdure(monkeypatch, capsys, *order)
    assert code == 0, error
    assert f"checked for {least * ranks} rank(s)" in error


MISFIT = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(17, 257)

    def forward(self, input_ids, labels, document_ids=None):
        logits = self.head(self.embed(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


def test_a_model_that_does_not_fit_is_told_before_anything_is_started(folder, monkeypatch, capsys):
    (folder / "misfit_model.py").write_text(MISFIT)
    monkeypatch.syspath_prepend(folder)
    overrides = ["model.architecture=null", "model.factory=misfit_model:Model"]
    code, error = perdure(monkeypatch, capsys, "train", "recipe.yaml", *overrides)
    with pytest.raises(RuntimeError) as torchs:  # its words differ from release to release
        nn.Linear(17, 257)(torch.ones(32, 16))
    assert error == (
        f"error: model.factory: the forward pass of misfit_model:Model fails at "
        f"{folder / 'misfit_model.py'}:10: RuntimeError: {torchs.value}\n"
    )
    assert code == 2
    assert not (folder / "run").exists()


def test_all_that_is_wrong_is_told_in_one_run(folder, monkeypatch, capsys):
    wrong = {
        "tracking.sinks=[os:getpid]": "tracking.sinks: os:getpid is called with the run directory",
        "tracking.hooks=[json:nothing]": "tracking.hooks: ",
        "data.sources.0.path=nowhere": "data.sources.0.path: no prepared data set at nowhere",
        "run.device=cuda": "run.device: cuda is requested, but torch finds no GPU",
        "strategy.tp=3": "strategy.tp: groups of 3 ranks do not divide the",
        "optimizer.groups=[{match: x, lr_scale: 2}]": "optimizer.groups.0.match: no parameter is",
        "run.dir=recipe.yaml/x": "run.dir: recipe.yaml/x cannot be made",
        "tracking.prometheus=no/run.prom": "tracking.prometheus: no file can be written in",
    }
    code, error = perdure(monkeypatch, capsys, "train", "recipe.yaml", *wrong)
    assert code == 2
    told = error.splitlines()
    assert all(line.startswith("error: ") for line in told)
    assert [what for what in wrong.values() if not any(what in line for line in told)] == []
    assert len(told) == len(wrong)


def test_what_it_names_does_nothing_to_a_terminal(folder, monkeypatch, capsys):
    code, error = perdure(monkeypatch, capsys, "train", "recipe.yaml", "run.\x1b[2J=1")
    assert code == 2
    assert "unknown key" in error
    assert "\\x1b[2J" in error
    assert "\x1b" not in error


def test_missing_recipe(folder, monkeypatch, capsys):
    code, error = perdure(monkeypatch, capsys, "train", "nowhere.yaml")
    assert code == 2
    assert error == "error: nowhere.yaml: cannot read the recipe: No such file or directory\n"


def test_truncated_shard_is_named(folder, monkeypatch, capsys):
    shard = next((folder / "data").glob("train-*.tokens"))
    os.truncate(shard, shard.stat().st_size - 2)
    code, error = perdure(monkeypatch, capsys, "train", "recipe.yaml")
    assert code == 2
    assert shard.name in error


def test_checkpoint_of_another_run_is_refused(folder, monkeypatch, capsys):
    code, output = Job(folder, 1, ["run.steps=1", "schedule={}"]).wait()
    assert code == 0, output
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for override, message in (
        ("model.architecture.num_hidden_layers=3", "num_hidden_layers (2 there, 3 here)"),
        ("run.seed=8", "run.seed: the checkpoint was trained with 7"),
        ("data.seq_len=16", "data.seq_len: the checkpoint was trained with 32"),
    ):
        code, error = perdure(monkeypatch, capsys, "train", "recipe.yaml", override)
        assert code == 2
        assert message in error
        assert "choose a new run.dir" in error
    index = json.loads((folder / "data" / "index.json").read_text())
    shutil.rmtree(folder / "data")
    (folder / "other.txt").write_text("Another text altogether. " * 400)
    prepare([str(folder / "other.txt")], folder / "data", tokenizer="bytes")
    assert json.loads((folder / "data" / "index.json").read_text()) != index
    code, error = perdure(monkeypatch, capsys, "train", "recipe.yaml")
    assert code == 2
    assert "data.sources: the data is not what the checkpoint was trained on" in error
    run = {path: time for path, time in before.items() if path.is_relative_to(folder / "run")}
    assert run == {
        path: path.stat().st_mtime_ns for path in (folder / "run", *(folder / "run").rglob("*"))
    }


def test_nothing_to_generate_from(folder, monkeypatch, capsys):
    code, error = perdure(monkeypatch, capsys, "generate", ".", "--prompt", "x")
    assert code == 2
    assert "holds no checkpoints" in error


def test_ranks_refuse_too_and_one_of_them_says_why(folder):
    code, output = Job(folder, 2, ["optimizer.lrr=1"]).wait()
    assert code == 2
    assert output.count("error: override 'optimizer.lrr=1': optimizer.lrr: unknown key") == 1
    assert not (folder / "run").exists()


def test_help_shows_examples(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    for command in (
        ["train"],
        ["data", "prepare"],
        ["data", "inspect"],
        ["ckpt", "ls"],
        ["generate"],
    ):
        monkeypatch.setattr(sys, "argv", ["perdure", *command, "--help"])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        assert "examples:" in capsys.readouterr().out
