"""What a recipe changes in a run that goes on, in keys and values; whose weights it began with."""

from types import SimpleNamespace

import pytest

from trainer.recipe import RecipeError, resolved
from trainer.run.provenance import changes, check_resume, describe_changes


def test_what_decides_a_step_is_named_and_nothing_else(recipe):
    old = resolved(recipe())
    same = ["optimizer.lr=0.003", "run.dir=elsewhere", "data.workers=3", "checkpoint.keep=9"]
    same += ["data.sources.0.path=moved", "tracking.wandb=offline", "schedule.warmup_steps=5"]
    assert changes(old, recipe(*same)) == {}
    new = recipe("batch.global_batch=16", "precision.dtype=bf16", "optimizer.weight_decay=0")
    assert changes(old, new) == {
        "batch.global_batch": (8, 16),
        "precision.dtype": ("fp32", "bf16"),
        "optimizer.weight_decay": (old["optimizer"]["weight_decay"], 0.0),
    }
    groups = recipe("optimizer.groups=[{match: '*norm*', lr_scale: 0.1}]")
    assert changes(old, groups)["optimizer.groups.0.lr_scale"] == (None, 0.1)
    assert changes(resolved(groups), recipe())["optimizer.groups.0.lr_scale"] == (0.1, None)


def test_a_recipe_that_is_older_than_a_key_had_its_default(recipe):
    old = resolved(recipe())
    del old["elastic"]["check_replicas_every"], old["optimizer"]["clip_norm"]
    assert changes(old, recipe()) == {}
    assert changes(old, recipe("optimizer.clip_norm=2")) == {"optimizer.clip_norm": (1.0, 2.0)}
    old["optimizer"]["a_key_that_is_no_more"] = 1
    assert changes(old, recipe())["optimizer.a_key_that_is_no_more"] == (1, None)


def test_one_line_says_it(recipe):
    old = resolved(recipe())
    line = describe_changes(changes(old, recipe("run.steps=600")), recipe())
    assert line == (
        "changed since the run last trained: run.steps 50 → 600; the schedule has the new length"
    )
    many = {f"optimizer.key{number}": (number, "\x1b[31m" + "x" * 99) for number in range(20)}
    line = describe_changes(many, recipe())
    assert "and 12 more, see ledger.jsonl" in line
    assert line.isprintable()
    assert len(line) < 800
    machines = {"cpu": ("AVX512", "AVX2")}
    assert "keeps" not in describe_changes(machines, recipe())
    exact = recipe("run.determinism=exact", "checkpoint.every=0")
    assert "only on one kind of machine" in describe_changes(machines, exact)
    assert describe_changes({}, exact) == ""


def state_of(recipe):
    """What a checkpoint says of a run, as far as it decides who may go on."""
    data = {"seq_len": 32, "fingerprint": "data"}
    return {"recipe": resolved(recipe), "data": data, "seed": 7, "init_from": ""}


def test_a_model_that_is_older_than_a_key_goes_on(recipe):
    stretched = recipe("model.architecture.rope_scaling={factor: 2}")
    state, task = state_of(stretched), SimpleNamespace(stream=SimpleNamespace(fingerprint="data"))
    older = state["recipe"]["model"]["architecture"]["rope_scaling"]
    del older["rope_type"], older["short_factor"]
    check_resume(state, stretched, task, "it", "")
    older["factor"] = 3.0
    with pytest.raises(RecipeError, match=r"another model: architecture\.rope_scaling"):
        check_resume(state, stretched, task, "it", "")


def test_weights_that_would_be_left_unread_are_refused(recipe):
    """`began`: digest in the checkpoint; None, if it is older than that."""
    plain, stream = recipe(), SimpleNamespace(fingerprint="data")
    state = {name: value for name, value in state_of(plain).items() if name != "init_from"}

    def goes_on(began, now):
        known = {} if began is None else {"init_from": began}
        check_resume({**state, **known}, plain, SimpleNamespace(stream=stream), "it", now)

    for began, now in (("#a", "#a"), ("#a", ""), ("", ""), (None, "")):
        goes_on(began, now)
    with pytest.raises(RecipeError, match="began with other weights than those in"):
        goes_on("#a", "#b")
    for began in ("", None):
        with pytest.raises(RecipeError, match=r"not be read; set model\.init_from=null"):
            goes_on(began, "#b")
