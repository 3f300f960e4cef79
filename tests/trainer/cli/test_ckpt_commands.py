"""`perdure ckpt …` as a user types it: what it prints, and its exit codes."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpointing.stored import flip, write_checkpoint
from trainer.cli.main import main

RULES = {"keep": 2, "keep_every": 0, "keep_best": 1, "best_by": "validation_loss", "every": 10}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose step 20 has the lowest validation loss."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30, 40, 50):
        state = {"validation_loss": 2.0 + abs(step - 20), "recipe": {"checkpoint": RULES}}
        model = {"w": torch.full((4,), 1 / step), "b": torch.ones(2)}
        path = tmp_path / f"run/checkpoints/step-{step:08}"
        write_checkpoint(path, step, model, None, state, {"config.json": b'{"dtype": "float32"}'})
    return tmp_path / "run"


@pytest.fixture
def perdure(monkeypatch, capsys):
    """Exit code and what is printed."""

    def call(*arguments):
        monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
        monkeypatch.setattr(sys, "argv", ["perdure", "ckpt", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code, printed.out + printed.err

    return call


def steps(run):
    return [int(name[5:]) for name in sorted(os.listdir(run / "checkpoints")) if name[0] != "."]


def test_prune(run, perdure):
    code, text = perdure("prune", "run", "--dry-run")
    assert code == 0
    assert "every byte read and found right: step-00000050, step-00000040" in text
    assert [line.split(maxsplit=2) for line in text.splitlines()[:-2]] == [
        ["step-00000050", "stays", "among the newest 2"],
        ["step-00000040", "stays", "among the newest 2"],
        ["step-00000030", "goes", "older than the newest 2"],
        ["step-00000020", "stays", "validation_loss 2 is among the 1 best"],
        ["step-00000010", "goes", "older than the newest 2"],
    ]
    assert text.splitlines()[-1].startswith("2 of 5 would be deleted (dry run): ")
    assert steps(run) == [10, 20, 30, 40, 50]
    assert perdure("prune", "run", "--keep-every", "30")[0] == 0
    assert steps(run) == [20, 30, 40, 50]
    code, text = perdure("prune", "run/checkpoints", "--keep", "1", "--keep-best", "0")
    assert "3 of 4 deleted" in text
    assert steps(run) == [50]


def test_what_was_not_trained_by_a_recipe_is_not_deleted_unasked(tmp_path, perdure):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path / f"step-{step:08}", step, {"w": torch.ones(1)})
    assert "0 of 3 deleted" in perdure("prune", str(tmp_path))[1]
    assert "2 of 3 deleted" in perdure("prune", str(tmp_path), "--keep", "1")[1]


def test_diff(run, perdure):
    newest = "run/checkpoints/step-00000050"
    code, text = perdure("diff", "run", newest)
    assert (code, "2 identical" in text) == (0, True)
    code, text = perdure("diff", "run", "run/checkpoints/step-00000040")
    assert code == 1
    assert "1 identical, 1 with other values" in text
    assert "validation_loss: 32.0, 22.0" in text
    flip(run / "checkpoints/step-00000040/model-00001-of-00001.safetensors", -1)
    code, text = perdure("diff", "run", "run/checkpoints/step-00000040")
    assert code == 2
    assert text.startswith("error: ")
    assert "checksum of block 0" in text
    assert text.count("\n") == 1


def test_export_and_import(run, perdure):
    code, text = perdure("export", "run", "out", "--dtype", "bf16", "--max-shard-size", "4 B")
    assert code == 0
    assert re.fullmatch(r"out: 2 tensors, \d+ B in 2 files\n", text)
    assert json.loads(Path("out/config.json").read_text())["dtype"] == "bfloat16"
    found = load_file("out/model-00001-of-00002.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    code, text = perdure("export", "run", "out")
    assert (code, text.startswith("error: out: exists already")) == (2, True)
    code, text = perdure("import", "out", "start", "--step", "7")
    assert code == 0
    assert re.fullmatch(r"start: 2 tensors, \d+ B in 1 file\n", text)
    assert "start: good" in perdure("verify", "start")[1]
    assert "step 7" in perdure("show", "start")[1]
    # The best is named, as is any other.
    listed = perdure("ls", "run")[1].splitlines()[1:]
    assert [line[:13] for line in listed if line.endswith(" best")] == ["step-00000020"]
    for step, number in (("best", 20), ("10", 10)):
        assert f": step {number}\n" in perdure("show", "run", "--step", step)[1]
        assert perdure("export", "run", f"out-{step}", "--step", step)[0] == 0
        assert load_file(f"out-{step}/model.safetensors")["w"][0] == pytest.approx(1 / number)
    code, text = perdure("diff", "out", "start")
    assert (code, "only the models are compared" in text) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prune", "nowhere"], "holds no checkpoints; give a run directory"),
        (["prune", "run/checkpoints/step-00000010"], "is one checkpoint; give the run"),
        (["prune", "run", "--keep", "-1"], "'-1' is not a whole number of at least 0"),
        (["export", "run", "out", "--max-shard-size", "4 parsecs"], "write a number of bytes, or"),
        (["export", "run", "out", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["export", "nowhere", "out"], "holds no checkpoints"),
        (["import", "run", "out"], "holds neither model.safetensors nor"),
        (["diff", "run", "nowhere"], "holds no checkpoints"),
        (["export", "run", "out", "--step", "7"], "no checkpoint of step 7, but of 50, 40, 30"),
        (["show", "run", "--step", "bset"], "'bset' is not a whole number of at least 0"),
    ],
)
def test_wrong_input_ends_in_one_line_and_code_2(run, perdure, arguments, says):
    code, text = perdure(*arguments)
    assert code == 2
    assert says in text.splitlines()[-1]
    assert "Traceback" not in text
    assert steps(run) == [10, 20, 30, 40, 50]
