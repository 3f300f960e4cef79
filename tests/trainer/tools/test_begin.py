"""How one begins: `perdure init` writes a recipe that trains, `perdure doctor` says what is
missing."""

import json
import sys

import pytest
import torch
import yaml

from tests.distributed.jobs import RECIPE, soak
from trainer.cli.main import main
from trainer.data.prepare.prepare import prepare
from trainer.recipe import load_recipe

CONFIG = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip


@pytest.fixture
def perdure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["perdure", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert end.value.code == code, out + err
        return out + err

    return run


@pytest.fixture
def data(tmp_path):
    lines = "".join(f"{n}: to be, or not to be, that is the question.\n" for n in range(2000))
    (tmp_path / "text.txt").write_text(lines)
    options = {"tokenizer": "bytes", "split_documents": "line", "validation_fraction": 0.01}
    prepare([str(tmp_path / "text.txt")], tmp_path / "data/text", **options)
    return "data/text"


def test_a_recipe_to_begin_with(tmp_path, perdure, data):
    wishes = ["--data", data, "--gpus", "cpu"]
    perdure("init", "--model", "quickstart", *wishes, "--out", "first.yaml")
    perdure("train", "first.yaml", "--dry-run")
    text = (tmp_path / "first.yaml").read_text()
    recipe = load_recipe("first.yaml")
    assert (recipe.model.architecture.vocab_size, recipe.data.seq_len) == (384, 128)
    assert recipe.run.dir == "runs/first"
    keys = [line for line in text.splitlines() if ": " in line and not line.startswith("#")]
    bare = [line.split(":")[0].strip() for line in keys if " # " not in line]
    assert not {"dir", "epochs", "seq_len", "global_batch", "micro_batch", "lr"} & set(bare)
    assert "already exists; name another --out" in perdure(
        "init", "--model", "quickstart", *wishes, "--out", "first.yaml", code=2
    )


@soak
def test_a_recipe_that_was_planned(tmp_path, perdure, data):
    wishes = ["--data", data, "--gpus", "1x0.001GB"]
    said = perdure("init", "--model", "quickstart", *wishes, code=2)
    assert said.startswith("error: --gpus: no strategy fits 1 node(s) of 1 GPU(s): ")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(CONFIG))
    perdure("init", "--model", "hf", "--data", data, "--gpus", "2xT4", "--nodes", "2")
    planned = yaml.safe_load((tmp_path / "hf.yaml").read_text())
    assert planned["model"] == {"init_from": "hf"}
    assert planned["precision"]["dtype"] == "fp16"  # T4 has no bf16
    assert planned["data"]["seq_len"] == 64  # all that the model takes
    assert isinstance(planned["batch"]["micro_batch"], int)
    assert "# Planned for 2 node(s) of 2 GPU(s)" in (tmp_path / "hf.yaml").read_text()


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"model": ""}, "--model: is required"),
        ({"data": "text.txt"}, "perdure data prepare text.txt --out data/text --tokenizer"),
        ({"data": "nowhere"}, "nowhere/index.json: missing"),
        ({"model": "Qwen/Qwen9"}, "hf download Qwen/Qwen9 --local-dir Qwen9"),
        ({"gpus": "8xH999"}, "--gpus: '8xH999' is not a number of GPUs"),
        ({"nodes": "none"}, "--nodes: 'none' is not a whole number"),
    ],
)
def test_a_wish_that_cannot_be_fulfilled(tmp_path, perdure, data, wishes, says):
    given = {"model": "quickstart", "data": data, "gpus": "cpu"} | wishes
    options = [word for key, value in given.items() if value for word in (f"--{key}", value)]
    (line,) = perdure("init", *options, code=2).splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it lacks a GPU")
def test_what_is_missing_is_named_with_what_to_do(tmp_path, perdure):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    wrong = ["run.device=cuda", "run.dir=recipe.yaml/run"]
    lines = perdure("doctor", "recipe.yaml", *wrong, code=1).splitlines()
    at = {line.split()[1]: n for n, line in enumerate(lines) if line.startswith("WRONG")}
    assert at.keys() == {"GPUs", "run.dir"}
    assert "none, but run.device is cuda" in lines[at["GPUs"]]
    assert lines[at["run.dir"] + 1].lstrip().startswith("→ choose another run.dir")
    assert lines[-1] == "training cannot start here: 2 thing(s) to repair"
    assert any(line.startswith("ok") and torch.__version__ in line for line in lines)
