"""Runs with weights and optimizer state in bf16 and int8: worlds, resumes, other formats."""

import json

import pytest
import torch
from safetensors.torch import load_file

from checkpointing.tools.inspect import verify
from tests.distributed.jobs import losses, soak
from trainer.parallel.parallelize import check_parallel
from trainer.recipe import RecipeError, load_recipe
from trainer.tasks.task import bare_model

# Rows of 128 and 256 elements are whole blocks.
SIZES = ("model.architecture.hidden_size=128", "model.architecture.intermediate_size=256")
SMALL = ("precision.master=bf16_stochastic", "optimizer.state_dtype=int8")
EXACT = ("run.determinism=exact", "schedule.name=constant", "batch.global_batch=7")
COMMON = (*SIZES, "schedule.warmup_steps=0", "checkpoint.keep=5", "run.evaluate_every=0")
SGD = "optimizer.factory=torch.optim:SGD"
NVME = ("strategy.offload=nvme", "strategy.offload_directory=x")
LAST = 4


def kept(folder, run, step):
    """Weights and optimizer state of a checkpoint, by name."""
    newest = folder / run / "checkpoints" / f"step-{step:08}"
    return {
        name: tensor
        for file in newest.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert (
            one.reshape(-1).view(torch.uint8).equal(theirs[name].reshape(-1).view(torch.uint8))
        ), name


@soak
def test_an_exact_run_has_the_same_bits_in_any_world_and_goes_on_in_other_formats(workspace, train):
    given = (*COMMON, *EXACT, *SMALL)
    train(1, "run.dir=small", f"run.steps={LAST}", *given)
    train(3, "run.dir=small-moved", "run.steps=2", *given)
    train(2, "run.dir=small-moved", f"run.steps={LAST}", *given, "strategy.name=ddp")
    found = kept(workspace, "small", LAST)
    assert_equal_bits(kept(workspace, "small-moved", LAST), found)
    assert losses(workspace, "small-moved") == losses(workspace, "small")

    name = "model.layers.0.mlp.up_proj.weight"
    shapes = {key: (str(found[key].dtype), [*found[key].shape]) for key in found if name in key}
    assert shapes == {
        name: ("torch.bfloat16", [256, 128]),
        f"{name}.exp_avg": ("torch.int8", [256, 128]),
        f"{name}.exp_avg_scale": ("torch.float32", [256, 1]),
        f"{name}.exp_avg_sq": ("torch.uint8", [256, 128]),
        f"{name}.exp_avg_sq_scale": ("torch.float32", [256, 1]),
        f"{name}.step": ("torch.float32", []),
    }
    assert found["model.norm.weight.exp_avg"].dtype == torch.bfloat16
    newest = workspace / "small" / "checkpoints" / f"step-{LAST:08}"
    assert json.loads((newest / "config.json").read_text())["dtype"] == "bfloat16"
    assert verify(newest).problems == []

    output = train(1, "run.dir=small", f"run.steps={LAST + 1}", *COMMON, *EXACT)
    assert "optimizer.state_dtype int8 → fp32" in output
    assert "precision.master bf16_stochastic → fp32" in output
    full = kept(workspace, "small", LAST + 1)
    assert {tensor.dtype for tensor in full.values()} == {torch.float32}
    assert abs(losses(workspace, "small")[LAST + 1] - losses(workspace, "small")[LAST]) < 0.5


MOE = (
    "model.architecture.model_type=qwen3_moe",
    "model.architecture.options={num_experts: 4, num_experts_per_tok: 2, "
    "moe_intermediate_size: 128, norm_topk_prob: true}",
)
LAYOUTS = {
    "zero2": (2, ["strategy.zero=2", *SMALL]),
    "zero1": (2, ["strategy.zero=1", "optimizer.state_dtype=int8"]),
    "ddp": (2, ["strategy.name=ddp", "optimizer.state_dtype=int8"]),
    "ddp-small": (2, ["strategy.name=ddp", *SMALL]),
    "hybrid": (4, ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2", *SMALL]),
    "offload": (2, ["strategy.offload=cpu", *SMALL]),
    "tp": (4, ["strategy.tp=2", *SMALL]),
    "pp": (2, ["strategy.pp=2", *SMALL]),
    "cp": (2, ["strategy.cp=2", *SMALL]),
    "ep": (2, ["strategy.ep=2", *MOE, *SMALL]),
    "muon": (3, ["optimizer.name=muon", *SMALL]),
    "muon-tp": (4, ["optimizer.name=muon", "strategy.tp=2", *SMALL]),
    "bf16": (2, ["precision.dtype=bf16", "optimizer.state_dtype=bf16", SMALL[0]]),
    "fp16": (2, ["precision.dtype=fp16", *SMALL]),
}


@soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_as_in_float32_and_goes_on_in_another(workspace, train, layout):
    """Rounding moves a loss by less than 1 % in a few steps; replicas stay equal."""
    ranks, overrides = LAYOUTS[layout]
    sizes = ("model.architecture.intermediate_size=256",)
    given = (*COMMON, *sizes, "checkpoint.every=5", "elastic.check_replicas_every=1")
    plain = [one for one in overrides if one not in SMALL]
    train(ranks, f"run.dir=full-{layout}", "run.steps=10", *given, *plain)
    output = train(ranks, f"run.dir=few-{layout}", "run.steps=10", *given, *overrides)
    assert "differ from those of its replicas" not in output
    ours, theirs = losses(workspace, f"few-{layout}"), losses(workspace, f"full-{layout}")
    assert ours[10] == pytest.approx(theirs[10], rel=0.01)
    assert ours[10] < 0.97 * ours[1]
    moved = [one for one in overrides if one in (*SMALL, *MOE) or one.startswith("optimizer")]
    train(1, f"run.dir=few-{layout}", "run.steps=12", *given, *moved)
    assert losses(workspace, f"few-{layout}")[12] < 0.97 * ours[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([SMALL[1], SGD], "only for optimizer.name: adamw and muon"),
        ([SMALL[1], *NVME], "nvme updates float32 state"),
        ([SMALL[0], *NVME], "nvme updates float32 weights"),
        ([SMALL[0], "strategy.zero=1"], "OPTIMIZER_STATE .ZeRO-1. would add up gradients in bf16"),
        ([SMALL[0], "strategy.reduce_every_pass=true"], "gradients of several passes in bf16"),
        ([SMALL[0], SGD], "does not round stochastically"),
    ],
)
def test_refuses_what_cannot_be_rounded(workspace, overrides, message):
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(workspace / "recipe.yaml", overrides)
    assert len(str(caught.value).splitlines()) == 1


def test_refuses_ranks_that_would_cut_a_block(workspace):
    given = [*SMALL, "strategy.tp=2", "model.architecture.intermediate_size="]
    for size, cut in ((128, True), (256, False), (96, False)):  # 96 has bf16 state
        recipe = load_recipe(workspace / "recipe.yaml", [*given[:-1], f"{given[-1]}{size}"])
        model = bare_model(recipe)[0]
        if not cut:
            check_parallel(recipe, model, 1)
            continue
        what = r"^optimizer.state_dtype: .* 128 columns of model.layers.0.mlp.down_proj into .* 64;"
        with pytest.raises(RecipeError, match=what):
            check_parallel(recipe, model, 1)
