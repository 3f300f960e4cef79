"""A recipe is strict, says where it is wrong, and survives a round trip."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.optim.optimizer import build_schedule
from trainer.recipe import (
    RecipeError,
    counted,
    dump_recipe,
    load_recipe,
    recipe_schema,
)
from trainer.recipe.load import recipe_reference

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
GOOD = """\
run: {dir: runs/x, steps: 10}
model:
  architecture:
    {model_type: qwen3, vocab_size: 64, hidden_size: 32, intermediate_size: 64,
     num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
data:
  sources:
    - path: data/x
  seq_len: 16
batch: {global_batch: 4}
optimizer:
  lr: 1e-3
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    return path


def test_defaults_overrides_and_round_trip(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["optimizer.lr=3e-4", "data.sources.0.weight=2"])
    assert recipe.optimizer.lr == 3e-4  # PyYAML alone would read 3e-4 as text
    assert recipe.data.sources[0].weight == 2.0
    assert recipe.sharding == "FULL_SHARD"
    again = tmp_path / "resolved.yaml"
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path):
    recipe = load_recipe(path)
    assert recipe.run.dir == f"runs/{path.stem}"


def test_zero_is_a_synonym(recipe_file):
    stages = {0: "NO_SHARD", 1: "OPTIMIZER_STATE", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}
    for stage, sharding in stages.items():
        assert load_recipe(recipe_file, [f"strategy.zero={stage}"]).sharding == sharding


def test_schedules_are_named_as_papers_write_them(recipe_file):
    recipe = load_recipe(recipe_file, ["strategy.pp=2", "strategy.pp_schedule=1F1B"])
    assert recipe.strategy.pp_schedule == "1f1b"


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "inf", "1e999"])
@pytest.mark.parametrize(
    "key",
    [
        "optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay",
        "optimizer.clip_norm", "schedule.min_lr_ratio", "data.sources.0.weight",
        "precision.loss_scale", "elastic.timeout_seconds", "checkpoint.deadline",
        "model.architecture.rope_theta", "tracking.peak_tflops",
    ],
)  # fmt: skip
def test_numbers_are_finite(recipe_file, key, value):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, [f"{key}=" + (f"[0.9, {value}]" if "betas" in key else value)])
    where = f"{key}.1" if "betas" in key else key
    assert f"{where}: must be a finite number" in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "optimizer.lrr: unknown key; did you mean 'lr'?"),
        ("optimiser.lr=1", "optimiser: unknown key; did you mean 'optimizer'?"),
        ("run.steps=many", "run.steps: input should be a valid integer"),
        ("run.steps=1.5", "run.steps: input should be a valid integer"),
        ("run.steps=-1", "run.steps: must be at least 0"),
        ("run.steps=0", "run.steps: give exactly one of run.steps and run.epochs; found neither"),
        ("run.epochs=1.5", "run.steps: give exactly one of run.steps and run.epochs; found both"),
        ("run.epochs=-1", "run.epochs: must be at least 0"),
        ("run.stop_after=2", "run.stop_after: counts validation passes; set run.evaluate_every"),
        ("checkpoint.max_shard_size=[1]", "checkpoint.max_shard_size: input should be"),
        ("checkpoint.max_writers=auto", "checkpoint.max_writers: input should be a valid integer"),
        ("checkpoint.max_writers=0", "checkpoint: max_writers must be a whole number above 0"),
        ("checkpoint.max_shard_size=4 bananas", "checkpoint: max_shard_size is '4 bananas'"),
        ("data.sources.7.path=x", "data.sources has 1 items"),
        ("optimizer.betas=[0.9]", "optimizer.betas: the list has too few items: [0.9]"),
        ("data.sources=[]", "data.sources: the list is empty"),
        ("run.dir=null", "run.dir: input should be a valid string, but it is None"),
        ("run.dir=''", "run.dir: is empty; name a directory"),
        ("run.dir=~/x", "run.dir: '~/x': only a shell expands ~; write ${HOME}/x"),
        ("data.sources.0.path=~/x", "data.sources.0.path: '~/x': only a shell expands ~"),
        ("run.evaluate_every=true", "run.evaluate_every: must be a number, but it is true"),
        ("strategy.zero=true", "strategy.zero: must be a number, but it is true"),
        ("optimizer.betas=[true, 0.9]", "optimizer.betas.0: must be a number, but it is true"),
        ("schedule=[cosine]", "schedule: must be a section of `key: value` lines, but it is ['c"),
        ("lr", "write overrides as key.sub=value"),
        ("run.dir=${PERDURE_NO_SUCH_NAME}", "PERDURE_NO_SUCH_NAME is not set"),
        ("model.factory=a:b", "give exactly one of architecture, init_from, factory"),
        ("model.architecture.model_type=quen3", "no family 'quen3' (did you mean 'qwen3'?)"),
        ("model.family=olmo2", "model.family: write it as package.module:NAME, not 'olmo2'"),
        ("model.implementation=hf", "model.implementation: input should be"),
        ("model.implementation=transformers", "only for the model of model.init_from"),
        ("model.architecture.num_key_value_heads=3", "num_attention_heads=2 is not a multiple"),
        ("strategy.zero=5", "strategy.zero: input should be 0, 1, 2 or 3"),
        ("schedule.warmup_steps=10", "schedule.warmup_steps: 10 is not below run.steps=10"),
        ("schedule.warmup_steps=1.5", "schedule.warmup_steps: input should be a valid integer"),
        ("schedule.name=wsd", "schedule.decay_steps: wsd needs"),
        (
            "schedule={name: wsd, warmup_steps: 0.5, decay_steps: 0.6}",
            "schedule.decay_steps: wsd needs 1 to 5 steps of decay",
        ),
        ("optimizer.lr=.nan", "optimizer.lr: must be a finite number, but it is nan"),
        ("strategy.sequence_parallel=true", "only with strategy.tp above 1; remove it"),
    ],
)
def test_one_clear_line(recipe_file, override, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, [override])
    assert message in str(error.value)
    assert override in str(error.value) or "recipe.yaml:" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("epochs", "sequences", "batch", "steps"),
    [
        (3, 100, 8, 38),
        (1.5, 100, 8, 19),
        (0.07, 100, 1, 7),  # 0.07 * 100 is 7.000000000000001
        (1e-9, 100, 8, 1),
        (0.1, 10**17 + 10, 1, 10**16 + 1),
    ],
)
def test_epochs_are_counted_in_steps(recipe_file, epochs, sequences, batch, steps):
    given = ["run.steps=0", f"run.epochs={epochs!r}", f"batch.global_batch={batch}"]
    recipe = load_recipe(recipe_file, given)
    assert counted(recipe, sequences).run.steps == steps
    assert load_recipe(recipe_file).run == counted(load_recipe(recipe_file), sequences).run
    with pytest.raises(RecipeError, match=r"^schedule.warmup_steps: 9+ is not below the \d+ step"):
        counted(
            load_recipe(recipe_file, [*given, f"schedule.warmup_steps={10**18 - 1}"]), sequences
        )


@pytest.mark.parametrize(
    ("warmup", "decay", "steps", "lengths"),
    [
        (0.03, 0.1, 1000, (30, 100)),
        (0.07, 0.07, 100, (7, 7)),
        (0.03, 0.1, 10, (1, 1)),  # up, and down
        (0.5, 0.5, 3, (2, 1)),
        (0.9, 0.05, 2, (1, 1)),
        (0.03, 0.1, 1, (0, 1)),
        (5, 0, 10, (5, 0)),
        (0.0, 0.0, 10, (0, 0)),
    ],
)
def test_lengths_of_a_schedule_may_be_shares_of_the_run(recipe_file, warmup, decay, steps, lengths):
    name = "wsd" if decay else "linear"
    shape = f"schedule={{name: {name}, warmup_steps: {warmup}, decay_steps: {decay}}}"
    recipe = load_recipe(recipe_file, [f"run.steps={steps}", shape])
    assert recipe.schedule.lengths(steps) == lengths
    same = f"schedule={{name: {name}, warmup_steps: {lengths[0]}, decay_steps: {lengths[1]}}}"
    written = load_recipe(recipe_file, [f"run.steps={steps}", same])
    rates, others = (
        [rate(step) for step in range(1, steps + 1)]
        for rate in map(build_schedule, (recipe, written))
    )
    assert rates == others


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("strategy.zero=1", "use SHARD_GRAD_OP"),
        ("data.seq_len=15", "data.seq_len=15 is not a multiple of strategy.tp=2"),
    ],
)
def test_what_tensor_parallelism_does_not_do_yet_is_refused(recipe_file, override, instead):
    tp = ["strategy.tp=2", "strategy.sequence_parallel=true"]
    assert load_recipe(recipe_file, tp).strategy.tp == 2
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, [*tp, override])
    assert instead in str(error.value)


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("model.factory=a:b", "model.factory: its model cannot be cut into stages"),
        ("strategy.pp_stages_per_rank=2", "goes with strategy.pp_schedule: interleaved_1f1b"),
        ("strategy.pp_schedule=interleaved_1f1b", "set 2 or more with it"),
        ("strategy.pp_schedule=zero_bubble", "FULL_SHARD frees them; use SHARD_GRAD_OP"),
        ("strategy.pp_schedule=zero_bubble", "strategy.reduce_every_pass: does not work with"),
        ("strategy.pp=1", "strategy.pp_schedule: only with strategy.pp above 1; remove it"),
    ],
)
def test_what_a_pipeline_does_not_do_is_refused(recipe_file, override, instead):
    pp = ["strategy.pp=2", "strategy.pp_schedule=gpipe", "strategy.reduce_every_pass=true"]
    assert load_recipe(recipe_file, pp).strategy.pp == 2
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, [*pp, override])
    assert instead in str(error.value)


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("model.factory=a:b", "model.factory: its model cannot compute parts of sequences"),
        ("model.attention=sdpa", "model.attention: strategy.cp computes attention in a ring"),
        ("data.factory=a:b", "data.factory: does not work with strategy.cp"),
        ("data.seq_len=3", "strategy.cp: a sequence is cut into 4 chunks, but data.seq_len is 3"),
        ("data.seq_len=18", "data.seq_len=18 is not a multiple of strategy.tp=2 x cp=2"),
    ],
)
def test_what_context_parallelism_does_not_do_yet_is_refused(recipe_file, override, instead):
    cp = ["strategy.tp=2", "strategy.sequence_parallel=true", "strategy.cp=2"]
    assert load_recipe(recipe_file, cp).strategy.cp == 2
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, [*cp, override])
    assert instead in str(error.value)


def test_experts_of_an_exact_run_sum_up_the_same_micro_batches_at_every_world_size(recipe_file):
    given = ["run.determinism=exact", "batch.micro_batch=2", "strategy.ep=4"]
    assert load_recipe(recipe_file, [*given, "batch.global_batch=16"]).strategy.ep == 4
    # Ranks that share tokens by tensor parallelism have the same micro-batch.
    assert load_recipe(recipe_file, [*given, "batch.global_batch=12", "strategy.tp=2"])
    with pytest.raises(RecipeError, match=r"4 micro-batches at once, but a step has 6"):
        load_recipe(recipe_file, [*given, "batch.global_batch=12"])


@pytest.mark.parametrize("parallel", [["strategy.cp=2"], ["strategy.ep=2", "strategy.tp=2"]])
def test_own_data_is_not_refused_for_a_length_that_nobody_set(recipe_file, parallel):
    data = ["data.factory=a:b", "data.sources=[]", "data.seq_len=0"]
    assert load_recipe(recipe_file, [*data, "strategy.tp=2", "strategy.sequence_parallel=true"])
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, [*data, *parallel])
    assert "data.factory: does not work with" in str(error.value)
    assert "\n" not in str(error.value)


def test_all_errors_are_told_at_once_in_the_order_of_the_lines(recipe_file, monkeypatch):
    monkeypatch.delenv("PERDURE_UNSET", raising=False)
    recipe_file.write_text("""\
run:
  dir: ${PERDURE_UNSET}/x
  stepz: 10
model: {architecture: {model_type: qwen3, vocab_size: many}}
data:
  sources: []
  seq_len: 16
  seq_len: 32
optimizer: {lr: 1e-3, betas: [0.9, 1.5]}
strategy: {name: ddp, offload: cpu}
checkpoint: {every: 20}
schedule: {name: wsd, warmup_steps: -1}
""")
    overrides = ["precision.dtype=int8", "data.sources.3.path=x", "lr", "checkpoint.deadline=-1"]
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, overrides)
    expected = [
        (":2: run.dir: ", "PERDURE_UNSET is not set"),
        (":3: run.stepz: ", "unknown key; did you mean 'steps'?"),  # and not that steps is missing
        (":4: model.architecture.vocab_size: ", "input should be a valid integer"),
        (":4: model.architecture.hidden_size: ", "required"),
        (":6: data.sources: ", "the list is empty"),
        (":8: data.seq_len: ", "this key occurs twice (first at "),
        (":9: optimizer.betas.1: ", "must be below 1, but it is 1.5"),
        (":10: strategy.offload: ", "only with strategy.name: fsdp"),
        (":12: schedule.warmup_steps: ", "must be at least 0"),
        ("override 'precision.dtype=int8': precision.dtype: ", "input should be 'bf16'"),
        ("override 'checkpoint.deadline=-1': checkpoint: ", "deadline must be finite and above 0"),
        ("override 'data.sources.3.path=x': ", "data.sources has 0 items"),
        ("override 'lr': ", "write overrides as key.sub=value"),
    ]
    lines = str(error.value).splitlines()
    places = []
    for place, what in expected:
        found = [n for n, line in enumerate(lines) if place in line and what in line]
        assert len(found) == 1, (place, what, lines)
        places += found
    assert places == sorted(places)
    assert sum("batch" in line for line in lines) == 1  # a section that is missing: no line of it
    # What follows from a wrong value only is not told: whether decay fits into unknown steps.
    assert not [line for line in lines if "decay_steps" in line or "give exactly one of" in line]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["strategy.name=ddp", "strategy.offload=cpu"], "strategy.offload"),
        (["strategy.name=ddp", "strategy.sharding=FULL_SHARD"], "strategy.sharding"),
        (["strategy.zero=1", "strategy.offload=cpu"], "strategy.offload"),
        (["strategy.offload=nvme"], "strategy.offload_directory: goes with"),
        (["strategy.offload_directory=x"], "strategy.offload_directory: goes with"),
        (["strategy.zero=2", "strategy.sharding=FULL_SHARD"], "strategy.zero"),
        (["strategy.shard_size=2"], "strategy.shard_size"),
    ],
)
def test_contradictions_are_refused(recipe_file, overrides, key):
    with pytest.raises(RecipeError, match=key):
        load_recipe(recipe_file, overrides)


def test_errors_name_the_line(recipe_file):
    recipe_file.write_text(GOOD.replace("  lr: 1e-3", "  lr: 1e-3\n  betass: [0, 0]"))
    with pytest.raises(RecipeError, match=r"recipe\.yaml:13: optimizer\.betass: unknown key"):
        load_recipe(recipe_file)


def test_a_key_that_stands_twice_is_refused(recipe_file):
    recipe_file.write_text(GOOD + "  lr: 2e-3\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml:13: optimizer\.lr: .*first at .*:12"):
        load_recipe(recipe_file)


def test_missing_key_says_what_it_means(recipe_file):
    recipe_file.write_text(GOOD.replace("dir: runs/x, ", ""))
    with pytest.raises(RecipeError, match=r"run\.dir: required.*Directory of this run"):
        load_recipe(recipe_file)


@pytest.mark.parametrize("text", ["", "- a", "run: {", "\tx: 1"])
def test_not_a_recipe(recipe_file, text):
    recipe_file.write_text(text)
    with pytest.raises(RecipeError):
        load_recipe(recipe_file)


def test_environment_variables_expand_only_where_written(recipe_file, monkeypatch):
    monkeypatch.setenv("PERDURE_TEST_DIR", "/scratch/a")
    overrides = ["run.dir=${PERDURE_TEST_DIR}/b", "data.sources.0.path=${PERDURE_UNSET:-data/y}"]
    recipe = load_recipe(recipe_file, overrides)
    assert recipe.run.dir == "/scratch/a/b"
    assert recipe.data.sources[0].path == "data/y"


def test_generated_pages_are_up_to_date():
    assert (ROOT / "docs" / "recipe.md").read_text() == recipe_reference(), "run `make docs`"
    schema = json.loads((ROOT / "recipes" / "schema.json").read_text())
    assert schema == json.loads(json.dumps(recipe_schema())), "run `make docs`"


def test_every_key_is_documented():
    def keys(schema):
        for definition in schema["$defs"].values():
            yield from definition["properties"].items()

    undocumented = [key for key, value in keys(recipe_schema()) if not value.get("description")]
    assert not undocumented


def test_an_old_recipe_is_told_what_to_write(recipe_file):
    old = ["model={kgat: {layers: [4]}}", "data={graph: {path: x}}"]
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, old)
    assert str(error.value).splitlines() == [
        f"override '{old[0]}': model.kgat: write model.factory: trainer.kgat:KGAT, and its keys in "
        "model.factory_options",
        f"override '{old[1]}': data.graph: write data.factory: trainer.kgat:open_graph, and its "
        "keys in data.factory_options",
    ]
    kept = load_recipe(recipe_file, old, kept=True)
    assert (kept.model.factory_options, kept.data.factory_options) == (
        {"layers": [4]},
        {"path": "x"},
    )
    # As older versions wrote them into each resolved recipe.
    unset = load_recipe(recipe_file, ["model.kgat=null", "data.graph=null"])
    assert unset == load_recipe(recipe_file)


def test_reading_a_recipe_imports_nothing_heavy(recipe_file):
    code = (
        "import sys; from trainer.recipe import load_recipe; load_recipe(sys.argv[1]);"
        "heavy = {'torch', 'numpy', 'wandb', 'safetensors'} & set(sys.modules); assert not heavy"
    )
    subprocess.run([sys.executable, "-c", code, str(recipe_file)], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "path", ["s3://b", "s3:/b", "S3://b", "s3:b", "file:///x", "hf://a/b", "gs://b", "s3:///"]
)
@pytest.mark.parametrize(
    "key",
    [
        *("run.dir", "strategy.offload_directory", "checkpoint.slot_directory"),
        "tracking.prometheus",
    ],
)
def test_a_path_that_looks_like_a_url_is_refused(recipe_file, key, path):
    with pytest.raises(RecipeError, match=f"{key}: {path!r} looks like a URL") as refused:
        load_recipe(recipe_file, [f"{key}={path}"])
    assert ("write /x" in str(refused.value)) == (path == "file:///x")


@pytest.mark.parametrize("key", ["checkpoint.directory", "data.sources.0.path", "model.init_from"])
def test_what_may_lie_in_an_object_store_and_a_folder_may_have_a_strange_name(recipe_file, key):
    more = ["run.dir=./s3:/x"]
    if key == "model.init_from":
        more.append("model.architecture=null")
    for path in ("s3://b/x", "gs://b", "memory://b/c", "/x", "./s3:/x", "a:b"):
        assert load_recipe(recipe_file, [f"{key}={path}", *more])
    cures = {"file:///x": "write /x", "hf://b/c": "fetch it with `hf download`"}
    for path in ("s3:/b", "S3://b", "file:///x", "https://b/c", "hf://b/c", "s3:///", "s3://"):
        cure = cures.get(path, "write it as s3://bucket/folder")
        with pytest.raises(RecipeError, match=f"{key}: {path!r} is no URL of an .*; {cure}"):
            load_recipe(recipe_file, [f"{key}={path}", *more])


def test_copies_are_of_an_object_store_and_have_a_size(recipe_file):
    cache, url = "data.cache={directory: /x, size: %s}", "data.sources.0.path=s3://b/x"
    recipe = load_recipe(recipe_file, [cache % "2 TB", url])
    assert recipe.data.cache.most_bytes == 2 * 10**12
    assert recipe.data.ahead == 8
    for overrides, message in (
        ([cache % "2 TB"], "data.cache: only for data.sources in an object store; remove it"),
        ([cache % "much", url], "data.cache: size is 'much'; write a number of bytes, or a number"),
        (["data.cache={directory: s3://b/x, size: 1}", url], "data.cache.directory: 's3://b/x' lo"),
        ([url, "data.ahead=0"], "data.ahead: must be at least 1, but it is 0"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe(recipe_file, overrides)


def test_a_run_may_lie_in_a_folder_of_a_bucket(recipe_file, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = load_recipe(recipe_file, ["run.dir=s3://b/runs/x/"])
    assert recipe.checkpoint_directory == "s3://b/runs/x/checkpoints"
    assert recipe.directory.is_relative_to(tmp_path)
    assert recipe.directory.name == "x"
    assert recipe.directory != load_recipe(recipe_file, ["run.dir=s3://b/other/x"]).directory
    for path in ("gs://b/x", "az://b/x", "abfs://b/x"):
        assert load_recipe(recipe_file, [f"run.dir={path}"]).in_bucket
    for path in ("s3://b/", "s3://b//x", "s3://b/../x", "s3://b/x/..", "gs://b", "memory://b/x"):
        with pytest.raises(RecipeError, match="a run may lie in a folder of a bucket"):
            load_recipe(recipe_file, [f"run.dir={path}"])
    with pytest.raises(RecipeError, match=r"hf:.* cannot create a file on the condition .*gs://"):
        load_recipe(recipe_file, ["run.dir=hf://b/x"])
