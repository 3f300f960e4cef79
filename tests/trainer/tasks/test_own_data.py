"""Data of a user's that cannot be trained on is refused before anything is started, in one line."""

import sys

import pytest

from tests.distributed.jobs import ROOT
from trainer.cli.main import main
from trainer.data.stream import AccountedStream
from trainer.plan.blueprint import read_blueprint
from trainer.recipe import RecipeError, load_recipe, resolved
from trainer.run.identity import identify, with_data
from trainer.run.preflight import check_launch
from trainer.run.provenance import changes, check_resume
from trainer.tasks.task import build_task, check_plannable

MODULE = """
from threading import Lock

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

def lists():
    return [[1.0, n] for n in range(40)]

def tuples():
    return [([1.0, n], n) for n in range(40)]

def triples():
    return [([1.0, n], n, 0) for n in range(40)]

def pair():
    return ROWS, ROWS[:9]

def frame():
    import pandas
    return pandas.DataFrame({"x": [1.0] * 40, "y": range(40)})

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

class Deep(Line):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

    def forward(self, *given, **named):
        return (self.weight(self.layers(named["x"])).squeeze(1) - named["y"]).square().mean()

class Odd(Line):
    def __init__(self, kind):
        super().__init__()
        one, frozen, change = torch.ones(2), {"requires_grad": False}, None
        self.table, self.kind = nn.Embedding(9, 2, sparse=kind == "sparse"), kind
        if kind == "lazy":
            self.layer = nn.LazyLinear(2)
        if kind == "meta":
            self.layer = nn.Linear(2, 2, device="meta")
        if kind == "expanded":
            self.odd = nn.Parameter(torch.ones(1).expand(3))
        if kind == "complex":
            self.odd = nn.Parameter(one + 0j)
        if kind == "empty":
            self.odd = nn.Parameter(one[:0])
        if kind == "quantized":
            self.odd = nn.Parameter(torch.quantize_per_tensor(one, 1, 0, torch.qint8), **frozen)
        if kind == "sparse_buffer":
            self.register_buffer("odd", torch.eye(2).to_sparse())
        if kind == "complex128_buffer":
            self.register_buffer("odd", (one + 0j).to(torch.complex128))
        if kind == "one_memory":
            self.odd = nn.Parameter(self.weight.weight.data)
        if kind == "in_one_memory":
            flat = torch.zeros(6)
            self.odd, self.other = nn.Parameter(flat[:4]), nn.Parameter(flat[3:])
        if kind == "locked":
            self.lock = Lock()
        if kind == "float64":
            self.odd = nn.Parameter(one.double())
        if kind == "fine":
            halves = torch.ones(4, 2).chunk(2, dim=1)
            self.left, self.right = map(nn.Parameter, halves)
            self.tied = self.left
            self.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
            self.register_buffer("rotary", one + 0j)
            self.register_buffer("mask", torch.ones(1, 1).expand(2, 2))
            self.number = nn.Parameter(torch.arange(3), **frozen)

    def forward(self, x, y):
        number, table = y.long() % 9, self.table.weight
        x = x + nn.functional.embedding(number, table, sparse=self.kind == "functional_sparse")
        used = sum(one.sum() for one in self.parameters() if one is not table)
        return super().forward(x, y) + used * 0

class Each(Line):
    def forward(self, x, y):
        return (self.weight(x).squeeze(1) - y) ** 2

class Walk:  # samples in an order of its own, from the run's seed on
    fingerprint = "walk"

    def __init__(self, size, seed=0, broken=False):
        self.sequences, self.seed, self.broken = size, seed, broken

    def fetch(self, positions):
        y = torch.tensor([float(self.seed + place) for place in positions])
        return {1} if self.broken else {"x": torch.stack([torch.ones(len(y)), y], dim=1), "y": y}

    def describe(self, global_batch):
        return "on a walk"

def walk(size, recipe, broken=False):
    return Samples(Walk(size, recipe.run.seed, broken), validation=Walk(9))

class Judge(Line):
    checkpoint_files = {"walk.txt": b"0 1 2"}
    init_from_tensors = ["weight.bias"]

    def __init__(self, width, data, recipe):
        super().__init__()
        self.got = data.train.seed, recipe.batch.global_batch, width

    def forward(self, x, y):
        loss = super().forward(x, y)
        return loss if self.training else {"square": loss}

    def after_step(self, samples, forward):
        self.after = samples, forward(x=torch.ones(1, 2), y=torch.zeros(1))["loss"].requires_grad
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


ODD = ["model.factory=mine:Odd"]
WALK = [
    "model={factory: mine:Judge, factory_options: {width: 3}}",
    "data={factory: mine:walk, factory_options: {size: 40}}",
    *("run.seed=7", "run.evaluate_every=2"),
]
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
    (["data.factory=mine:lists"], "an item is a list; all items must be mappings"),
    (["data.factory=mine:triples"], "an item has 3 parts, which go to forward in this order, but"),
    (["data.factory=mine:tuples", "model.factory=mine:Deep"], "forward takes no arguments that"),
    (["data.factory=mine:pair"], "mine:pair returned 2 data sets; return trainer.Samples("),
    (["data.factory=mine:frame"], "is a DataFrame of columns, where [0] is no row; give its rows"),
    (["data.factory=mine:words"], "'x' is a str, not an array, tensor or number"),
    (["data.factory=mine:ragged"], "'x' has several shapes"),
    (
        ["data.factory=mine:ragged_validation", "run.evaluate_every=2"],
        "the validation set of mine:ragged_validation: 'x'",
    ),
    (
        ["data.factory=mine:wide_validation", "run.evaluate_every=2"],
        "mine:Line, given a batch of the validation set, fails at ",
    ),
    (["data.factory=mine:missing"], "mine.py:48: FileNotFoundError: "),
    (["data.factory=mine:unready"], "mine.py:51: RuntimeError: Dataset not found"),
    (["run.evaluate_every=2"], "run.evaluate_every: mine:rows gives no validation set"),
    (["model.factory=mine:Plane"], "whose forward(x, z) is called with x=, y=: "),
    (["model.factory=mine:Each"], "returns a tensor of shape (8,); it should be the mean loss"),
    *(
        ([*ODD, f"model.factory_options.kind={kind}"], what)
        for kind, what in (
            ("lazy", "parameter layer.weight of mine:Odd is lazy and has no shape yet; name"),
            ("meta", "parameter layer.weight of mine:Odd is on the meta device and has no values"),
            ("sparse", "table of mine:Odd is an embedding with sparse gradients, which no strat"),
            ("functional_sparse", "model.factory: table.weight gets a sparse gradient, which no"),
            ("expanded", "parameter odd of mine:Odd is expanded: several of its elements share"),
            ("complex", "parameter odd of mine:Odd is in complex64, which the optimizers do not"),
            ("empty", "parameter odd of mine:Odd has no element (its shape is (0,)); leave it out"),
            ("quantized", "parameter odd of mine:Odd is in qint8, which checkpoints do not hold"),
            ("sparse_buffer", "buffer odd of mine:Odd has the layout torch.sparse_coo; make it"),
            ("complex128_buffer", "buffer odd of mine:Odd is in complex128, which checkpoints do"),
            ("one_memory", "parameter odd and parameter weight.weight of mine:Odd lie in the same"),
            ("in_one_memory", "parameter odd and parameter other of mine:Odd lie in the same mem"),
            (
                "float64",
                "strategy.sharding: FSDP gathers weight.weight (torch.float32) and odd",
            ),
        )
    ),
    (
        [*WALK, "data.factory_options.broken=true"],
        "fetch of mine:walk fails: AttributeError: ",
    ),
    ([*WALK, "run.stop_after=2"], "a dict without a scalar 'loss' (of 'square'); it should be the"),
    ([*WALK, "model.init_from=nowhere"], "model.init_from: no checkpoint at nowhere; name one"),
    (["model.factory=mine:Judge"], "mine:Judge is called with recipe=, data=, but: "),
    (["data.seq_len=8"], "data.factory: excludes data.sources and data.seq_len"),
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
    told = capsys.readouterr().err.strip().removeprefix("# loading PyTorch\n")
    assert end.value.code == 2
    assert what in told
    assert told.count("\n") == 0, told
    assert not (mine / "run").exists()


def test_what_is_right_passes(mine, monkeypatch, capsys):
    for overrides in (
        [],
        ["data.factory=mine:with_validation", "run.evaluate_every=2"],
        ["data.factory=mine:tuples"],
    ):
        monkeypatch.setattr(sys, "argv", ["perdure", "train", "mine.yaml", "--dry-run", *overrides])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0, capsys.readouterr()


def test_a_stream_and_a_model_say_what_becomes_of_them(mine):
    """An order, figures of validation, files of checkpoints, what is loaded, and a last word."""
    recipe = load_recipe("mine.yaml", WALK)
    check_launch(recipe, 2, 2)
    task = build_task(recipe)
    assert task.model.got == (7, 8, 3)
    assert task.stream.fetch([0, 40, 5])["y"].tolist() == [7, 47, 12]
    assert task.stream.fingerprint == "walk"
    assert not isinstance(task.stream, AccountedStream), "nothing proves which samples it took"
    assert task.validation.count == 9
    assert task.validation.values({"square": 4.0}) == {"square": 4.0}
    assert (task.files, task.pretrained) == ({"walk.txt": b"0 1 2"}, ["weight.bias"])
    task.after_step(lambda inputs: {"loss": task.model(**inputs)}, 24)
    assert task.model.after == (24, False)
    plain = build_task(load_recipe("mine.yaml"))
    assert (plain.files, plain.pretrained, plain.after_step) == ({}, None, None)


def test_an_option_that_is_written_out_at_its_default_is_no_other_model(mine):
    recipe = load_recipe("mine.yaml")
    written = ["data.factory_options={count: 40}"]
    old = resolved(load_recipe("mine.yaml", written))
    assert not changes(old, recipe)
    other = load_recipe("mine.yaml", ["data.factory_options={count: 30}"])
    assert changes(old, other) == {"data.factory_options.count": (40, 30)}


def test_what_is_odd_and_can_be_trained_passes(mine):
    recipe = load_recipe("mine.yaml", [*ODD, "model.factory_options.kind=fine"])
    notes = check_launch(recipe, 2, 2)
    assert notes == ["Odd has no blocks (an nn.ModuleList, nn.Sequential or nn.ModuleDict of "
                     "modules), so FSDP gathers all weights at once"]  # fmt: skip
    mask = build_task(recipe).model.mask
    mask[0, 0] = 2  # as loading does
    assert mask.tolist() == [[2, 1], [1, 1]]


def test_what_becomes_of_blocks_is_told(mine):
    recomputed = "strategy.activation_checkpointing=full"
    for overrides, notes in (
        ((), ["2 blocks of class Linear: sharded one by one"]),
        ((recomputed,), ["2 blocks of class Linear: sharded one by one and recomputed (full)"]),
        (("strategy.name=ddp",), []),
        (
            ("strategy.name=ddp", recomputed, "model.factory=mine:Line"),
            ["Line has no blocks (an nn.ModuleList, nn.Sequential or nn.ModuleDict of modules), "
             "so activation_checkpointing=full recomputes nothing"],
        ),
    ):  # fmt: skip
        recipe = load_recipe("mine.yaml", ["model.factory=mine:Deep", *overrides])
        assert check_launch(recipe, 2, 2) == notes


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


def test_a_model_that_cannot_be_copied_trains_and_is_not_planned(mine):
    locked = [*ODD, "model.factory_options.kind=locked"]
    check_launch(load_recipe("mine.yaml", locked), 2, 2)
    tokens = ["data={sources: [{path: x}], seq_len: 2}"]
    with pytest.raises(RecipeError, match=r"a copy of Odd, which planning needs, fails: TypeErr"):
        read_blueprint(load_recipe("mine.yaml", [*locked, *tokens]))


def test_the_example_is_a_right_recipe(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "examples")
    task = build_task(load_recipe("own_data.yaml"))
    assert task.name == "CNN"
    assert len(task.blocks) == 2
    assert task.validation.count == 256
