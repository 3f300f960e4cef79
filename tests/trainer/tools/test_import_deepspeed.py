"""Configurations as public projects publish them become recipes, with every key accounted for."""

import inspect
import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.cli import main as cli
from trainer.optim.optimizer import learning_rate
from trainer.optim.own import build_own
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.yaml_tree import flat
from trainer.tools.importing.deepspeed import TORCH, import_deepspeed
from trainer.tools.importing.foreign_config import read_json
from trainer.tools.importing.imported import ABSENT, NEEDED, inline

SCALER = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
CPU = {"device": "cpu", "pin_memory": True}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO_BATCH = dict.fromkeys((*BATCH, "gradient_clipping"), "auto")
AUTO_ADAMW = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
}

# Project and file → (values as published, some left out; what the recipe says).
PUBLISHED = {
    "transformers, tests/deepspeed/ds_config_zero3.json": (
        {
            "fp16": {"enabled": True, "initial_scale_power": 16, **SCALER},
            "zero_optimization": {
                "stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "overlap_comm": True,
                "contiguous_gradients": True, "sub_group_size": 1e14, "reduce_bucket_size": 0,
                "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
            },
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        {
            "strategy.name": "fsdp", "strategy.sharding": "FULL_SHARD",
            "strategy.offload": "cpu", "precision.dtype": "fp16", "precision.loss_scale": 2**16,
            "optimizer.lr": 3e-5, "optimizer.betas": (0.8, 0.999), "optimizer.eps": 1e-8,
            "optimizer.weight_decay": 3e-7, "optimizer.clip_norm": 1, "schedule.name": "constant",
            "schedule.warmup_steps": 500,
        },
    ),
    "transformers, tests/deepspeed/ds_config_zero2.json": (
        {
            "fp16": {"enabled": "auto", "initial_scale_power": 16, **SCALER},
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            "scheduler": {
                "type": "WarmupLR",
                "params": {
                    "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                },
            },
            "zero_optimization": {
                "stage": 2, "offload_optimizer": CPU, "allgather_partitions": True,
                "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8, "reduce_scatter": True,
                "overlap_comm": True, "contiguous_gradients": True,
            },
            "steps_per_print": 2000,
            **AUTO_BATCH,
        },
        {
            "strategy.sharding": "SHARD_GRAD_OP", "strategy.offload": "cpu",
            "precision.dtype": "bf16", "optimizer.lr": 5e-5, "optimizer.betas": (0.9, 0.999),
            "optimizer.clip_norm": 1.0, "batch.micro_batch": 8, "schedule.warmup_steps": 0,
        },
    ),
    "DeepSpeedExamples, Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_infinity_config.json": (
        {
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
            "steps_per_print": 1,
            "zero_optimization": {
                "stage": 3, "stage3_max_live_parameters": 1e9, "stage3_prefetch_bucket_size": 5e7,
                "stage3_param_persitance_threshold": 1e5,  # misspelt there too
                "reduce_bucket_size": 90000000, "sub_group_size": 1e8,
                "offload_optimizer": {
                    "device": "nvme", "nvme_path": "/nvme_data", "buffer_count": 4,
                    "pipeline_read": False, "pipeline_write": False, "pin_memory": True,
                },
                "offload_param": {"device": "nvme", "nvme_path": "/nvme_data", "max_in_cpu": 1},
            },
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, **SCALER, "loss_scale": 1024},
            "zero_allow_untested_optimizer": False,
            "aio": {"block_size": 1048576, "queue_depth": 16, "thread_count": 2},
        },
        {
            "strategy.sharding": "FULL_SHARD", "strategy.offload": "nvme",
            "strategy.offload_directory": "/nvme_data", "batch.micro_batch": 4,
            "precision.loss_scale": 1024, "optimizer.clip_norm": 1.0,
        },
    ),
    "DeepSpeedExamples, bing_bert/deepspeed_bsz64k_lamb_config_seq128.json": (
        {
            "train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64,
            "prescale_gradients": False,
            "optimizer": {
                "type": "Lamb",
                "params": {
                    "lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3,
                    "min_coeff": 0.01,
                },
            },
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "loss_scale": 0},
            "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4},
        },
        {
            "strategy.name": "ddp", "batch.global_batch": 65536, "batch.micro_batch": 64,
            "optimizer.lr": NEEDED["optimizer.lr"][0],  # Lamb's would be wrong: open
        },
    ),
    "DeepSpeedExamples, bing_bert/deepspeed_bsz4096_adam_config.json": (
        {
            "train_batch_size": 4096, "train_micro_batch_size_per_gpu": 64,
            "optimizer": {
                "type": "Adam",
                "params": {
                    "lr": 2e-4, "max_grad_norm": 1.0, "weight_decay": 0.01,
                    "bias_correction": False,
                },
            },
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        },
        {
            "strategy.name": "ddp", "optimizer.clip_norm": 1.0, "optimizer.weight_decay": 0.01,
            "optimizer.betas": (0.9, 0.999), "schedule.name": "constant",
        },
    ),
    "Axolotl, deepspeed_configs/zero1.json": (
        {
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "auto_cast": False, "initial_scale_power": 32, **SCALER},
            "optimizer": AUTO_ADAMW,
            **dict.fromkeys(BATCH, "auto"),
        },
        {
            "strategy.sharding": "OPTIMIZER_STATE", "strategy.offload": "none",
            "schedule.name": "linear", "optimizer.betas": (0.9, 0.999),
        },
    ),
    "LLaMA-Factory, examples/deepspeed/ds_z2_offload_config.json": (
        {
            **AUTO_BATCH,
            "zero_allow_untested_optimizer": True,
            "fp16": {"enabled": "auto", "initial_scale_power": 16, **SCALER},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {
                "stage": 2, "offload_optimizer": CPU, "allgather_bucket_size": 5e8,
                "reduce_bucket_size": 5e8, "reduce_scatter": True, "overlap_comm": False,
                "contiguous_gradients": True, "round_robin_gradients": True,
            },
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        },
        {
            "strategy.sharding": "SHARD_GRAD_OP", "strategy.offload": "cpu",
            "schedule.name": "linear", "optimizer.weight_decay": 0.0, "optimizer.lr": 5e-5,
        },
    ),
    "open-instruct, configs/ds_configs/stage3_offloading.conf": (
        {
            "bf16": {"enabled": "auto"},
            "optimizer": AUTO_ADAMW,
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto",
                },
            },
            "zero_optimization": {
                "stage": 3, "offload_optimizer": CPU, "offload_param": CPU,
                "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "steps_per_print": 1e5,
            **AUTO_BATCH,
        },
        {
            "schedule.name": "linear", "schedule.min_lr_ratio": 0.0, "optimizer.lr": 5e-5,
            "strategy.offload": "cpu",
        },
    ),
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(tree):
        path = tmp_path / "ds_config.json"
        path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
        return path

    return write


def filled(text, folder, still_open):
    """The recipe with examples for what is open, as a user would fill it in."""
    (folder / "recipe.yaml").write_text(text)
    examples = {key: NEEDED[key][0] for key in still_open}
    examples |= {"run.steps": 1000} if "run.steps" in still_open else {}
    return load_recipe(folder / "recipe.yaml", [f"{k}={inline(v)}" for k, v in examples.items()])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(config, tmp_path, name):
    tree, expected = PUBLISHED[name]
    path = config(tree)
    made = import_deepspeed(path, allow_unknown="Megatron" in name)
    told = sorted(line.key for line in made.lines if line.value is not ABSENT)
    assert told == sorted(flat(read_json(path, "ds_config")))
    assert all(line.became or line.why for line in made.lines)
    for key in ("run.dir", "model.init_from", "data.sources", "data.seq_len"):
        assert key in made.open
    recipe = filled(made.recipe(), tmp_path, made.open)
    for key, value in expected.items():
        section, field = key.split(".")
        assert getattr(getattr(recipe, section), field) == value, key
    with pytest.raises(RecipeError, match=r"recipe.yaml:\d+: .* not set|found none of them"):
        load_recipe(tmp_path / "recipe.yaml")


def test_without_an_optimizer_trainer_s_defaults_hold(config, tmp_path):
    tree = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}
    made = import_deepspeed(config(tree))
    recipe = filled(made.recipe(), tmp_path, made.open)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("adamw", 5e-5, (0.9, 0.999))
    assert (optimizer.eps, optimizer.weight_decay, optimizer.clip_norm) == (1e-8, 0.0, 1.0)
    assert (schedule.name, schedule.min_lr_ratio, schedule.warmup_steps) == ("linear", 0.0, 0)
    text = made.recipe().partition("# differs:")[2].partition("# no meaning here:")[0]
    for line in (
        "weight_decay (not set)", "where a recipe has 0.1", "adam_beta2 (not set)",
        "where a recipe has [0.9, 0.95]", "lr_scheduler_type (not set)", "has cosine",
        "learning_rate (not set)", "bf16.enabled (not set)", "seed (not set)",
    ):  # fmt: skip
        assert line in text


def test_defaults_of_deepspeed_s_own_optimizer_are_named(config, tmp_path):
    tree = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "bias_correction": False}},
        "fp16": {"enabled": True, "hysteresis": 2},
        "progressive_layer_drop": {"enabled": True, "theta": 0.5},
        "curriculum_learning": {"enabled": False, "min_difficulty": 8},
    }
    made = import_deepspeed(config(tree))
    optimizer = filled(made.recipe(), tmp_path, made.open).optimizer
    assert (optimizer.weight_decay, optimizer.betas) == (0.0, (0.9, 0.999))
    assert made.tree["schedule"]["name"] == "constant"  # a script of its own makes no scheduler
    kinds = {line.key: line.kind for line in made.lines}
    for key in (
        "optimizer.params.betas", "optimizer.params.weight_decay", "scheduler.type",
        "optimizer.params.bias_correction", "fp16.hysteresis", "fp16.loss_scale_window",
        "progressive_layer_drop.theta", "zero_optimization.stage",
    ):  # fmt: skip
        assert kinds[key] == "differs", key
    assert kinds["curriculum_learning.min_difficulty"] == "no meaning here"


def test_cosine_schedule_batch_and_groups(config, tmp_path):
    tree = {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 16,
        "zero_optimization": {"stage": 3, "mics_shard_size": 8},
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "adam_w_mode": True}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 10000, "warmup_num_steps": 100, "cos_min_ratio": 0.1},
        },
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
        "wandb": {"enabled": True, "project": "cat"},
        "tensorboard": {"enabled": False, "job_name": "x"},
    }
    made = import_deepspeed(config(tree), ["run.dir=runs/cat", "model.init_from=cat"], ranks=32)
    assert made.open == ["data.sources", "data.seq_len"]
    recipe = filled(made.recipe(), tmp_path, made.open)
    assert (recipe.run.steps, recipe.schedule.name, recipe.schedule.warmup_steps) == (
        10000, "cosine", 100,
    )  # fmt: skip
    assert (recipe.schedule.min_lr_ratio, recipe.optimizer.clip_norm) == (0.1, 0)
    assert (recipe.strategy.sharding, recipe.strategy.shard_size) == ("HYBRID_SHARD", 8)
    assert recipe.strategy.activation_checkpointing == "full"
    assert (recipe.tracking.wandb, recipe.tracking.project) == ("online", "cat")
    assert not recipe.tracking.tensorboard
    assert "logarithmic" in made.recipe()


@pytest.mark.parametrize(
    ("kind", "params", "last"),
    [
        ("WarmupDecayLR", {"warmup_max_lr": 2e-3, "warmup_min_lr": 5e-4}, 5e-4),
        ("WarmupDecayLR", {"warmup_max_lr": "auto", "warmup_min_lr": 1e-4}, 1e-4),
        ("WarmupDecayLR", {"warmup_min_lr": 1e-4}, 1e-4),  # from 1e-3, whatever the optimizer's is
        ("WarmupDecayLR", {"warmup_max_lr": 2e-3}, 0),
        ("WarmupCosineLR", {"cos_min_ratio": 0.25}, 1e-4),
        ("WarmupLR", {"warmup_max_lr": 2e-3, "warmup_min_lr": 5e-4}, 2e-3),
    ],
)
def test_schedules_end_where_deepspeed_s_do(config, tmp_path, kind, params, last):
    tree = {
        "optimizer": {"type": "AdamW", "params": {"lr": 4e-4}},
        "scheduler": {"type": kind, "params": {"warmup_num_steps": 10, **params}},
    }
    made = import_deepspeed(config(tree))
    recipe = filled(made.recipe(), tmp_path, made.open)
    steps, lr = recipe.run.steps, recipe.optimizer.lr
    assert learning_rate(steps, steps, lr, recipe.schedule) == pytest.approx(last)


def test_an_optimizer_of_torch_becomes_a_factory(config, tmp_path):
    params = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "foreach": "auto"}
    warm = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 9}}
    made = import_deepspeed(
        config({"optimizer": {"type": "sgd", "params": params}, "scheduler": warm})
    )
    optimizer = filled(made.recipe(), tmp_path, made.open).optimizer
    assert optimizer.factory == "torch.optim:SGD"
    assert optimizer.factory_options == {"momentum": 0.9, "nesterov": True}
    assert (optimizer.lr, optimizer.weight_decay) == (0.2, 1e-4)  # the scheduler's peak
    made_of = build_own({"w": torch.nn.Parameter(torch.zeros(2, 2))}, optimizer)
    assert made_of.param_groups[0]["nesterov"] is True
    for name, rate in TORCH.items():
        made = import_deepspeed(config({"optimizer": {"type": name}}))
        optimizer = filled(made.recipe(), tmp_path, made.open).optimizer
        assert inspect.signature(getattr(torch.optim, name)).parameters["lr"].default == rate
        assert optimizer.lr == rate
        assert optimizer.factory == f"torch.optim:{name}"


def test_muon_is_the_bundled_one(config, tmp_path):
    params = {"lr": 0.01, "muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "ns_method": "gram"}
    made = import_deepspeed(config({"optimizer": {"type": "Muon", "params": params}}))
    optimizer = filled(made.recipe(), tmp_path, made.open).optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("muon", 0.02, 0.0)
    assert (optimizer.muon.momentum, optimizer.muon.adjust_lr) == (0.9, "original")
    dropped = {line.key: line.why for line in made.lines if not line.became}
    assert "lr_scale: 0.05" in dropped["optimizer.params.adam_lr"]


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_another_optimizer_s_peak_is_not_adamw_s(config, kind):
    tree = {
        "optimizer": {"type": "Lamb", "params": {"lr": 11e-3}},
        "scheduler": {"type": kind, "params": {"warmup_max_lr": 11e-3, "warmup_min_lr": 11e-4}},
    }
    made = import_deepspeed(config(tree))
    assert "optimizer.lr" in made.open
    dropped = {line.key: line.why for line in made.lines if not line.became}
    assert "Lamb" in dropped["scheduler.params.warmup_max_lr"]
    if kind == "WarmupDecayLR":
        assert made.tree["schedule"]["min_lr_ratio"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("paths", "directory"),
    [(("auto", "auto"), "/local_nvme"), (("auto", "/b"), "/b"), (("/a", "/b"), "/a")],
)
def test_one_directory_holds_all_that_is_offloaded(config, paths, directory):
    offload = [{"device": "nvme", "nvme_path": path} for path in paths]
    zero = {"stage": 3, "offload_optimizer": offload[0], "offload_param": offload[1]}
    made = import_deepspeed(config({"zero_optimization": zero}))
    assert made.tree["strategy"]["offload_directory"] == directory
    lines = {line.key: line for line in made.lines}
    for what, path in zip(("optimizer", "param"), paths, strict=True):
        line = lines[f"zero_optimization.offload_{what}.nvme_path"]
        assert line.became == f"strategy.offload_directory={directory}"
        assert bool(line.why) == (path not in ("auto", directory))


def test_an_automatic_batch_is_trainer_s(config):
    tree = {"train_batch_size": "auto", "gradient_accumulation_steps": 2}
    assert import_deepspeed(config(tree)).tree["batch"] == {"micro_batch": 8}
    made = import_deepspeed(config(tree), ranks=4)
    assert made.tree["batch"] == {"micro_batch": 8, "global_batch": 64}
    assert "batch.global_batch" not in made.open


def test_a_split_model_makes_fewer_replicas(config):
    tree = {
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 4,
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 2},
    }
    made = import_deepspeed(config(tree), ranks=16)
    assert made.tree["strategy"] == {
        "name": "fsdp", "sharding": "SHARD_GRAD_OP", "tp": 2, "cp": 4,
    }  # fmt: skip
    assert made.tree["batch"] == {"micro_batch": 3, "global_batch": 6}
    with pytest.raises(RecipeError, match="sequence_parallel_size: 12 ranks are no multiple of 8"):
        import_deepspeed(config(tree), ranks=12)
    one = import_deepspeed(config({"autotp_size": 1, "sequence_parallel_size": 1}), ranks=2)
    assert one.tree["strategy"] == {"name": "ddp"}


@settings(max_examples=10, deadline=None)
@given(micro=st.integers(1, 64), passes=st.integers(1, 64), ranks=st.integers(1, 512))
def test_the_global_batch_is_the_product(tmp_path_factory, micro, passes, ranks):
    path = tmp_path_factory.getbasetemp() / "ds_config.json"
    whole = micro * passes * ranks
    sizes = dict(zip(BATCH, (whole, micro, passes), strict=True))
    for left_out, expected in (
        ((), (whole, micro)),
        (BATCH[:1], (whole, micro)),
        (BATCH[1:2], (whole, micro)),
        (BATCH[2:], (whole, micro)),
        (BATCH[1:], (whole, micro * passes)),  # DeepSpeed does not accumulate unless it is told
        ((BATCH[0], BATCH[2]), (micro * ranks, micro)),
    ):
        told = {name: size for name, size in sizes.items() if name not in left_out}
        path.write_text(json.dumps(told))
        batch = import_deepspeed(path, ranks=ranks).tree["batch"]
        assert (batch["global_batch"], batch["micro_batch"]) == expected
        path.write_text(json.dumps({**told, BATCH[0]: whole + 1}))
        if ranks > 1:
            with pytest.raises(RecipeError, match=rf"{whole + 1} is not .*\b{ranks} replicas"):
                import_deepspeed(path, ranks=ranks)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ('{"a": 1,}', r"ds_config.json:1:\d+: not valid JSON"),
        ("[1]", "a ds_config is a JSON object"),
        ('{"steps_per_print": 1, "steps_per_print": 2}', "steps_per_print: this key occurs twice"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation.stage: unknown key; did you mean"),
        ({"zero_optimization": {"stage": 4}}, "should be 0, 1, 2 or 3, but it is 4"),
        ({"bf16": {"enabled": True, "immediate_grad": 1}}, "bf16.immediate_grad: unknown key; did"),
        ({"bf16": True}, r"bf16: should be a section with keys, such as bf16\..*, but it is true"),
        ({"aio": {"queue_deep": 1}}, "aio.queue_deep: unknown key; did you mean 'aio.queue_depth'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled: is true, and so"),
        ({"fp16": {"enabled": "maybe"}}, 'enabled: should be true, false or "auto"'),
        (
            {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
            "bf16.enabled.*values differ",
        ),
        ({"gradient_clipping": "x"}, 'should be a number or "auto", but it is "x"'),
        (
            {"gradient_clipping": 1, "optimizer": {"params": {"max_grad_norm": 2}}},
            "max_grad_norm: is 2.0, but gradient_clipping is 1.0; keep one",
        ),
        ({"train_batch_size": 0}, "train_batch_size: should be a whole number above 0"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": -1}}},
            "optimizer.params.lr: optimizer.lr: must be at least 0",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": [1, 2]}}},
            "one for all parameters",
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {"total_num_steps": 10, "warmup_num_steps": 20},
                }
            },
            "warmup_num_steps: schedule.warmup_steps: 20 is not below run.steps=10",
        ),
    ],
)
def test_wrong_input_is_one_line(config, tree, message):
    with pytest.raises(RecipeError, match=message) as error:
        import_deepspeed(config(tree))
    assert "\n" not in str(error.value)
    assert "ds_config.json" in str(error.value)


def test_the_command(config, tmp_path, monkeypatch, capsys):
    path, out = config(PUBLISHED["Axolotl, deepspeed_configs/zero1.json"][0]), tmp_path / "r.yaml"

    def perdure(*arguments):
        monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
        monkeypatch.setattr(sys, "argv", ["perdure", "import-deepspeed", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    code, printed, _ = perdure(path, "--out", out, "--ranks", "4", "run.dir=runs/x")
    assert code == 0
    assert "zero_optimization.overlap_comm: true" in printed
    assert "fill in run.steps, model.init_from, data.sources, data.seq_len" in printed
    assert "global_batch: 32" in out.read_text()
    code, printed, error = perdure(path, "--out", out)
    assert (code, printed) == (2, "")
    assert error == f"error: {out}: already exists; choose another --out\n"
    assert "run.dir" in perdure(path)[1]
    assert "lrr: unknown key; did you mean 'lr'" in perdure(path, "optimizer.lrr=1")[2]
