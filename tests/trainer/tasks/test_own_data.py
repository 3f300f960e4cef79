"""Data of a user's that cannot be trained on is refused before anything is started, in one line."""

import sys

import pytest

from tests.distributed.jobs import ROOT
from trainer.cli.main import main
from trainer.recipe import RecipeError, load_recipe, resolved
from trainer.run.identity import identify, with_data
from trainer.run.provenance import check_resume
from trainer.tasks.task import build_task, check_plannable

MODULE = """
import torch
from torch import nn
from trainer.data import Samples

ROWS = [{"x": [1.0, n], "y": n} for n in range(40)]

def rows(count=40):
    return ROWS[:count]

def with_validation():
    return Samples(ROWS, validation=ROWS[:9])

def ragged():
    return [{"x": [1.0] * n} for n in range(1, 41)]

def ragged_validation():
    return Samples(ROWS, validation=ragged())

def wide_validation():
    return Samples(ROWS, validation=[{"x": [1.0] * 3, "y": n} for n in range(40)])

def stream():
    return iter(ROWS)

def nameless():
    return [(1.0, n) for n in range(40)]

def words():
    return [{"x": "word", "y": n} for n in range(40)]

def missing():
    return open("no/such/file")

def unready():
    raise RuntimeError("Dataset not found. You can use download=True")

def tokens(last=70):
    return [{"input_ids": [n, last], "labels": [last, -100]} for n in range(40)]

def tokens_validation():
    return Samples(tokens(0), validation=tokens())

def threes():
    return [{"input_ids": [n, 0, 1], "labels": [0, 1, -100]} for n in range(40)]

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(2, 1)

    def forward(self, x, y):
        return ((self.weight(x).squeeze(1) - y) ** 2).mean()

class Plane(Line):
    def forward(self, x, z):
        return x.mean()

class Each(Line):
    def forward(self, x, y):
        return (self.weight(x).squeeze(1) - y) ** 2
"""
RECIPE = """\
run: {dir: run, steps: 4, device: cpu}
model: {factory: "mine:Line"}
data: {factory: "mine:rows"}
batch: {global_batch: 8, micro_batch: 4}
optimizer: {lr: 1e-3}
precision: {dtype: fp32}
"""
DECODER = (
    "model={architecture: {model_type: qwen3, vocab_size: 64, hidden_size: 32, "
    "intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 16}}"
)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    yield tmp_path
    sys.modules.pop("mine", None)


WRONG = [
    (["data.factory=mine:absent"], "mine.py has no absent; it has ROWS, rows, with_validation"),
    (
        ["data.factory=yours:rows"],
        "data.factory: cannot import yours:rows: No module named 'yours'",
    ),
    (["data.factory=rows"], "data.factory: write it as package.module:function"),
    (["data.factory_options={size: 3}"], "data.factory_options: mine:rows is called with size="),
    (["data.factory_options={count: 5}"], "holds 5 sample(s), fewer than one global batch of 8"),
    (["data.factory=mine:stream"], "list_iterator without __len__"),
    (["data.factory=mine:nameless"], "an item is a tuple, no mapping"),
    (["data.factory=mine:words"], "'x' is a str, no array, tensor or number"),
    (["data.factory=mine:ragged"], "'x' has no one shape"),
    (
        ["data.factory=mine:ragged_validation", "run.evaluate_every=2"],
        "the validation set of mine:ragged_validation: 'x'",
    ),
    (
        ["data.factory=mine:wide_validation", "run.evaluate_every=2"],
        "mine:Line, given a batch of the validation set, fails at ",
    ),
    (["data.factory=mine:missing"], "mine.py:33: FileNotFoundError: "),
    (["data.factory=mine:unready"], "mine.py:36: RuntimeError: Dataset not found"),
    (["run.evaluate_every=2"], "run.evaluate_every: mine:rows gives no validation set"),
    (["model.factory=mine:Plane"], "whose forward(x, z) is called with x=, y=: "),
    (["model.factory=mine:Each"], "returns a tensor of shape (8,); it should be the mean loss"),
    (["data.seq_len=8"], "data.factory: excludes data.sources, data.seq_len and data.graph"),
    (["batch.micro_batch=auto"], "batch.micro_batch: data.factory cannot be planned"),
    ([DECODER], "samples have no input_ids and no labels"),
    ([DECODER, "data.factory=mine:tokens"], "token 70 is outside model.architecture.vocab_size=64"),
    (
        [DECODER, "data.factory=mine:tokens_validation", "run.evaluate_every=2"],
        "token 70 is outside model.architecture.vocab_size=64",
    ),
    (
        [DECODER, "data.factory=mine:threes", "strategy={tp: 2, sequence_parallel: true}"],
        "a sequence of 3 tokens does not divide among strategy.tp=2; pad it",
    ),
]


@pytest.mark.parametrize(("overrides", "what"), WRONG, ids=[what for _, what in WRONG])
def test_what_is_wrong_is_told_in_a_line_with_code_2(overrides, what, mine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["perdure", "train", "mine.yaml", "--dry-run", *overrides])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().err.strip()
    assert end.value.code == 2
    assert what in told
    assert told.count("\n") == 0, told
    assert not (mine / "run").exists()


def test_what_is_right_passes(mine, monkeypatch, capsys):
    for overrides in ([], ["data.factory=mine:with_validation", "run.evaluate_every=2"]):
        monkeypatch.setattr(sys, "argv", ["perdure", "train", "mine.yaml", "--dry-run", *overrides])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0, capsys.readouterr()


def test_it_resumes_on_the_same_data_alone(mine):
    recipe = load_recipe("mine.yaml")
    task = build_task(recipe)
    other = load_recipe("mine.yaml", ["data.factory_options={count: 20}"])
    state = {
        "recipe": resolved(recipe),
        "data": {"seq_len": 1, "fingerprint": task.stream.fingerprint},
        "seed": 0,
    }
    check_resume(state, recipe, task, "it")
    with pytest.raises(RecipeError, match=r"data\.factory: the data is not what the checkpoint"):
        check_resume(state, other, build_task(other), "it")
    here, there = (
        with_data(identify(one, None), build_task(one).stream.fingerprint)
        for one in (recipe, other)
    )
    assert here["data.factory source"] == there["data.factory source"]
    assert here["data.fingerprint"] != there["data.fingerprint"]


def test_it_is_not_planned(mine):
    with pytest.raises(RecipeError, match="only prepared tokens can be planned"):
        check_plannable(load_recipe("mine.yaml"))


def test_the_example_is_a_right_recipe(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "examples")
    task = build_task(load_recipe("own_data.yaml"))
    assert task.name == "CNN"
    assert len(task.blocks) == 2
    assert task.validation.count == 256
