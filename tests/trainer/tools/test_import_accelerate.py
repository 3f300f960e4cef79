"""Configurations of accelerate and TrainingArguments become recipes, with every key and every
default that differs accounted for."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import yaml

from trainer.cli import main as cli
from trainer.optim.optimizer import learning_rate
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.load import resolved
from trainer.recipe.yaml_tree import flat
from trainer.tools.importing.accelerate import import_accelerate
from trainer.tools.importing.deepspeed import import_deepspeed
from trainer.tools.importing.imported import ABSENT, NEEDED, inline
from trainer.tools.importing.training_arguments import import_training_arguments

START = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no",
    "enable_cpu_affinity": False, "machine_rank": 0, "main_training_function": "main",
    "num_machines": 1, "num_processes": 4, "rdzv_backend": "static", "same_network": True,
    "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
FSDP = {
    "fsdp_activation_checkpointing": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip
# What Trainer does where nobody says otherwise.
TRAINER = {
    "optimizer.lr": 5e-5, "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.0, "optimizer.clip_norm": 1.0, "schedule.name": "linear",
    "schedule.min_lr_ratio": 0.0, "schedule.warmup_steps": 0, "run.seed": 42,
}  # fmt: skip

# Kind → (values, what the recipe says, what differs and is named).
CONFIGURATIONS = {
    "DDP on two nodes": (
        {
            **START, "distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_machines": 2,
            "main_process_ip": "10.0.0.7", "main_process_port": 29511, "gpu_ids": "0,1",
            "dynamo_config": {
                "dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune",
                "dynamo_use_dynamic": False, "dynamo_use_fullgraph": True,
            },
        },
        {
            **TRAINER, "strategy.name": "ddp", "strategy.compile": True, "precision.dtype": "bf16",
            "batch.global_batch": 32,
        },
        ("dynamo_config.dynamo_mode", "dynamo_config.dynamo_use_fullgraph"),
    ),
    "FSDP1": (
        {
            **START, "distributed_type": "FSDP", "mixed_precision": "no",
            "fsdp_config": {
                **FSDP, "fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2",
                "fsdp_use_orig_params": True,
                "fsdp_backward_prefetch": "BACKWARD_POST", "fsdp_forward_prefetch": False,
                "fsdp_sync_module_states": True, "fsdp_min_num_params": 1000,
                "fsdp_transformer_layer_cls_to_wrap": "MyLayer", "fsdp_ignored_modules": "head",
            },
        },
        {
            **TRAINER, "strategy.sharding": "HYBRID_SHARD", "precision.dtype": "fp32",
            "strategy.activation_checkpointing": "full",
        },
        ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_ignored_modules"),
    ),
    "FSDP1 by numbers, without the prefix": (
        {
            "distributed_type": "FSDP", "num_processes": 2, "fp16": True,
            "fsdp_config": {"sharding_strategy": 2, "offload_params": True, "min_num_params": 9},
        },
        {
            "strategy.sharding": "SHARD_GRAD_OP", "strategy.offload": "cpu",
            "precision.dtype": "fp16",
        },
        (),
    ),
    "FSDP2 that keeps parameters": (
        {
            **START, "distributed_type": "FSDP", "mixed_precision": "fp16",
            "fsdp_config": {
                **FSDP, "fsdp_version": 2, "fsdp_reshard_after_forward": False,
                "fsdp_activation_checkpointing_offload": True,
            },
        },
        {"strategy.sharding": "SHARD_GRAD_OP", "precision.dtype": "fp16"},
        ("fsdp_config.fsdp_activation_checkpointing_offload",),
    ),
    "FSDP2 with tensor parallelism inside replicas": (
        {
            **START, "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 16,
            "fsdp_config": {**FSDP, "fsdp_version": 2, "fsdp_reshard_after_forward": True},
            "parallelism_config": {
                f"parallelism_config_{name}_size": size
                for name, size in (("dp_replicate", 2), ("dp_shard", 4), ("tp", 2), ("cp", 1))
            } | {"parallelism_config_cp_comm_strategy": "alltoall"},
        },
        {
            "strategy.sharding": "HYBRID_SHARD", "strategy.shard_size": 4, "strategy.tp": 2,
            "batch.global_batch": 64,
        },
        (),
    ),
    "DeepSpeed": (
        {
            **START, "distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
            "deepspeed_config": {
                "zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5,
                "offload_optimizer_device": "cpu", "offload_param_device": "cpu",
                "offload_optimizer_nvme_path": None, "zero3_init_flag": True,
                "zero3_save_16bit_model": True, "deepspeed_multinode_launcher": "standard",
                "deepspeed_moe_layer_cls_names": "MyExperts",
            },
            "parallelism_config": {
                "parallelism_config_sp_size": 2, "parallelism_config_sp_backend": "deepspeed",
                "parallelism_config_dp_shard_size": 2,
                "parallelism_config_sp_seq_length_is_variable": True,
                "parallelism_config_sp_attn_implementation": "sdpa",
            },
        },
        {
            **TRAINER, "strategy.sharding": "FULL_SHARD", "strategy.offload": "cpu",
            "strategy.cp": 2, "optimizer.clip_norm": 0.5, "batch.global_batch": 64,
        },
        ("parallelism_config.parallelism_config_sp_size",),
    ),
    "DeepSpeed by its defaults": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero3_init_flag": False}},
        {**TRAINER, "strategy.sharding": "SHARD_GRAD_OP", "precision.dtype": "fp32"},
        ("zero_optimization.stage",),
    ),
    "one GPU in 8 bits": (
        {
            "distributed_type": "NO", "mixed_precision": "fp8",
            "fp8_config": {
                "backend": "TE", "fp8_format": "HYBRID", "amax_history_len": 16, "margin": 1,
                "amax_compute_algo": "max", "use_autocast_during_eval": True, "interval": 1,
                "override_linear_precision": [False, False, True],
            },
        },
        {
            "precision.dtype": "bf16", "precision.matmul": "fp8_tensorwise",
            "strategy.name": "ddp", "batch.global_batch": 8,
        },
        ("mixed_precision", "fp8_config.backend", "fp8_config.margin"),
    ),
    "torchao in 8 bits": (
        {
            "distributed_type": "FSDP", "mixed_precision": "fp8",
            "fp8_config": {
                "backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True,
            },
        },
        {"precision.matmul": "fp8_tensorwise", "strategy.sharding": "FULL_SHARD"},
        (),
    ),
    "CPUs by MPI": (
        {
            **START, "distributed_type": "MULTI_CPU", "use_cpu": True, "num_machines": 4,
            "mpirun_config": {"mpirun_hostfile": "hosts", "mpirun_ccl": "1"},
        },
        {"run.device": "cpu", "strategy.name": "ddp", "precision.dtype": "fp32"},
        ("mixed_precision",),
    ),
    "Megatron-LM": (
        {
            **START, "distributed_type": "MEGATRON_LM", "mixed_precision": "bf16",
            "num_processes": 8,
            "megatron_lm_config": {
                "megatron_lm_tp_degree": 2, "megatron_lm_pp_degree": 2,
                "megatron_lm_num_micro_batches": 2, "megatron_lm_gradient_clipping": 0.7,
                "megatron_lm_sequence_parallelism": True,
                "megatron_lm_recompute_activations": True,
                "megatron_lm_use_distributed_optimizer": True,
            },
        },
        {
            "strategy.tp": 2, "strategy.pp": 2, "strategy.sequence_parallel": True,
            "strategy.activation_checkpointing": "selective", "optimizer.clip_norm": 0.7,
            "strategy.sharding": "SHARD_GRAD_OP", "batch.global_batch": 32,
        },
        ("megatron_lm_config.megatron_lm_use_distributed_optimizer",),
    ),
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    def write(tree, name="accelerate.yaml"):
        path = tmp_path / name
        text = json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree)
        path.write_text(tree if isinstance(tree, str) else text)
        return path

    return write


def values(made, folder):
    """The recipe, with examples for what is open, as `section.key` → value."""
    file = folder / "recipe.yaml"
    file.write_text(made.recipe())
    recipe = load_recipe(file, [f"{key}={inline(NEEDED[key][0])}" for key in made.open])
    return flat(resolved(recipe))


def kinds(made):
    """Key → part of the report that names it."""
    return {line.key: line.kind for line in made.lines}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_key_and_every_default_that_differs(written, tmp_path, name):
    tree, expected, differ = CONFIGURATIONS[name]
    made = import_accelerate(written(tree))
    told = [line.key for line in made.lines if line.value is not ABSENT]
    assert sorted(told) == sorted(flat(tree))
    assert all(line.became or line.why for line in made.lines)
    recipe = values(made, tmp_path)
    assert {key: recipe[key] for key in expected} == expected
    found = kinds(made)
    trainers = ("learning_rate", "weight_decay", "adam_beta2", "lr_scheduler_type", "seed")
    for key in (*differ, *(f"TrainingArguments: {key}" for key in trainers)):
        assert found[key] == "differs", key
    assert set(found.values()) <= {"translated", "differs", "no meaning here"}


def test_machines_become_the_line_that_starts_them(written):
    made = import_accelerate(written(CONFIGURATIONS["DDP on two nodes"][0]))
    assert made.launch.startswith("CUDA_VISIBLE_DEVICES=0,1 torchrun --rdzv-backend perdure ")
    assert "--rdzv-endpoint 10.0.0.7:29511 --nnodes 2 --nproc-per-node 2 " in made.launch
    one = {"distributed_type": "FSDP"}
    assert "--nnodes 1 --nproc-per-node GPUS_PER_NODE " in import_accelerate(written(one)).launch
    told = import_accelerate(written(one), ranks=6)
    assert "--nproc-per-node 6 " in told.launch
    assert told.tree["batch"]["global_batch"] == 48


def test_a_ds_config_that_is_named_is_read(written, tmp_path, monkeypatch):
    ds = {
        "zero_optimization": {"stage": 1}, "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": "auto",
    }  # fmt: skip
    (tmp_path / "beside").mkdir()
    written(ds, "beside/ds.json")
    section = {"deepspeed_config_file": "ds.json", "zero3_init_flag": False, "zero_stage": 3}
    tree = {**START, "distributed_type": "DEEPSPEED", "deepspeed_config": section}
    monkeypatch.chdir(tmp_path)
    made = import_accelerate(written({**tree, "mixed_precision": "fp16"}, "beside/a.yaml"))
    assert made.tree["strategy"]["sharding"] == "OPTIMIZER_STATE"
    assert made.tree["precision"]["dtype"] == "fp16"
    assert made.tree["batch"] == {"micro_batch": 2, "global_batch": 8}
    found = kinds(made)
    assert found["ds.json: zero_optimization.stage"] == "translated"
    assert found["deepspeed_config.zero_stage"] == "no meaning here"
    assert {f"deepspeed_config.{key}" for key in section} <= set(found)
    assert {f"ds.json: {key}" for key in flat(ds)} <= set(found)
    with pytest.raises(RecipeError, match=r"there is no file ds.json, neither in"):
        import_accelerate(written(tree))


def test_training_arguments_say_what_is_auto(written, tmp_path):
    args = {
        "learning_rate": 2e-5, "adam_beta2": 0.95, "weight_decay": 0.01, "max_grad_norm": 0.3,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
        "lr_scheduler_type": "cosine", "warmup_ratio": 0.05, "num_train_epochs": 2,
        "logging_steps": 7, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 50,
        "save_total_limit": 2, "report_to": ["wandb"], "output_dir": "runs/a", "seed": 3,
        "gradient_checkpointing": True, "neftune_noise_alpha": 5, "fsdp": "", "max_length": 64,
        "optim": "adamw_8bit", "hub_token": "<HUB_TOKEN>", "dataloader_num_workers": 3,
    }  # fmt: skip
    ds = {
        "optimizer": {
            "type": "AdamW",
            "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
        },
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
        **dict.fromkeys(("gradient_clipping", "gradient_accumulation_steps"), "auto"),
        "train_micro_batch_size_per_gpu": "auto",
    }
    file = written(args, "args.json")
    made = import_deepspeed(
        written(ds, "ds.json"), ["run.steps=1000"], ranks=4, training_arguments=file
    )
    expected = {
        "optimizer.lr": 2e-5, "optimizer.betas": [0.9, 0.95], "optimizer.weight_decay": 0.01,
        "optimizer.clip_norm": 0.3, "precision.dtype": "bf16", "batch.micro_batch": 2,
        "batch.global_batch": 32, "schedule.name": "cosine", "schedule.warmup_steps": 0.05,
        "schedule.min_lr_ratio": 0.0, "run.log_every": 7, "checkpoint.every": 0, "run.seed": 3,
        "run.evaluate_every": 50, "checkpoint.keep": 2, "tracking.wandb": "online",
        "run.dir": "runs/a", "strategy.activation_checkpointing": "full", "data.seq_len": 64,
        "data.workers": 3,
    }  # fmt: skip
    recipe = values(made, tmp_path)
    assert {key: recipe[key] for key in expected} == expected
    found = kinds(made)
    assert {f"args.json: {key}" for key in args} | set(flat(ds)) <= set(found)
    assert found["optimizer.params.lr"] == "translated"
    assert found["args.json: neftune_noise_alpha"] == "differs"
    assert found["args.json: num_train_epochs"] == "no meaning here"  # run.steps counts
    alone = import_training_arguments(file, ranks=4)
    assert alone.tree["strategy"]["name"] == "ddp"
    assert alone.tree["optimizer"]["state_dtype"] == "int8"
    assert kinds(alone)["optim"] == kinds(alone)["num_train_epochs"] == "differs"
    assert (alone.tree["run"]["epochs"], "run.steps" in alone.open) == (2, False)
    assert alone.tree["schedule"]["warmup_steps"] == 0.05


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("constant_with_warmup", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("cosine_with_min_lr", {"min_lr": 1e-3}),
        ("polynomial", {"lr_end": 1e-3}),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear"}),
    ],
)
def test_schedules_are_those_of_transformers(written, tmp_path, kind, options):
    optimization = pytest.importorskip("transformers.optimization")
    torch = pytest.importorskip("torch")
    args = {
        "lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "warmup_steps": 5,
        "learning_rate": 0.01, "max_steps": 60,
    }  # fmt: skip
    made = import_training_arguments(written(args, "args.json"))
    values(made, tmp_path)
    recipe = load_recipe(
        tmp_path / "recipe.yaml", [f"{key}={inline(NEEDED[key][0])}" for key in made.open]
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    theirs = optimization.get_scheduler(kind, optimizer, 5, 60, options)
    for step in range(1, 61):
        optimizer.step()
        theirs.step()  # their rate of step n + 1 is the one that ours has at n
        ours = learning_rate(step, 60, recipe.optimizer.lr, recipe.schedule)
        assert ours == pytest.approx(theirs.get_last_lr()[0], abs=1e-9), step


def test_every_name_of_theirs_is_known(written, tmp_path):
    """All fields of TrainingArguments and all options of `accelerate launch`, with the defaults of
    the installed versions."""
    arguments = pytest.importorskip("transformers.training_args")
    launch = pytest.importorskip("accelerate.commands.launch")
    defaults = arguments.TrainingArguments(output_dir="runs/theirs", use_cpu=True)
    made = import_training_arguments(written(defaults.to_json_string(), "args.json"))
    recipe = values(made, tmp_path)
    expected = {
        "optimizer.lr": defaults.learning_rate, "optimizer.eps": defaults.adam_epsilon,
        "optimizer.betas": [defaults.adam_beta1, defaults.adam_beta2],
        "optimizer.weight_decay": defaults.weight_decay, "run.seed": defaults.seed,
        "optimizer.clip_norm": defaults.max_grad_norm, "run.log_every": defaults.logging_steps,
        "batch.micro_batch": defaults.per_device_train_batch_size, "checkpoint.keep": 0,
        "schedule.name": str(defaults.lr_scheduler_type.value), "precision.dtype": "fp32",
        "checkpoint.every": defaults.save_steps, "elastic.timeout_seconds": defaults.ddp_timeout,
    }  # fmt: skip
    assert {key: recipe[key] for key in expected} == expected
    by_default = import_training_arguments(written("{}", "none.json"))
    assert by_default.tree["optimizer"] == made.tree["optimizer"]
    assert by_default.tree["schedule"] == made.tree["schedule"]
    sections = ("fsdp", "fp8", "dynamo", "parallelism_config", "megatron_lm")
    tree = {**START, "distributed_type": "NO"}
    for action in launch.launch_command_parser()._actions:
        section = next((name for name in sections if action.dest.startswith(f"{name}_")), None)
        if section:
            key = section if section == "parallelism_config" else f"{section}_config"
            tree.setdefault(key, {})[action.dest] = str(action.default)
    assert len(flat(tree)) > 60
    told = import_accelerate(written(tree)).lines
    assert {line.key for line in told if line.value is not ABSENT} == set(flat(tree))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"mixed_precision": "bf16"}, "distributed_type: is missing"),
        ({"distributed_type": "XLA"}, "distributed_type: XLA is not imported: .* not through XLA"),
        ({"distributed_type": "MULTI_XPU"}, "MULTI_XPU is not imported: Perdure trains on CUDA"),
        ({"distributed_type": "NO", "num_processes": "auto"}, "number, but it is .auto"),
        ({"distributed_type": "DDP"}, "should be one of NO, MULTI_GPU"),
        (
            {"distributed_type": "NO", "compute_environment": "AMAZON_SAGEMAKER"},
            "AMAZON_SAGEMAKER is not imported",
        ),
        ({"distributed_type": "NO", "mixed_precison": "bf16"}, "mixed_precison: unknown key; did"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_shard_strategy": None}},
            "fsdp_shard_strategy: unknown key; did you mean 'fsdp_config.fsdp_sharding_strategy",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stages": 2}},
            "deepspeed_config.zero_stages: unknown key",
        ),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "int8"}, "should be no | fp16"),
        (
            {"distributed_type": "MULTI_GPU", "num_processes": 5, "num_machines": 2},
            "num_processes: 5 is not a multiple of num_machines=2",
        ),
        (
            {
                "distributed_type": "FSDP", "num_processes": 8,
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 2,
                },
            },
            "num_processes: 8 ranks, but the sizes of parallelism_config make 4",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": ["FULL_SHARD"]},
            r"fsdp_config: should be a section with keys, such as .*, but it is \[",
        ),
        ("distributed_type: NO\ndistributed_type: NO\n", "occurs twice"),
        ("- a list", "a configuration of accelerate is a mapping"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(written, tree, message):
    with pytest.raises(RecipeError, match=message) as error:
        import_accelerate(written(tree))
    assert "\n" not in str(error.value)
    assert "accelerate.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"learning_rate": 1e-4},
            r"args.json: learning_rate: is 0.0001, but .*ds.json: optimizer.",
        ),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps: is 3, but the other"),
        ({"fp16": True}, r"args.json: fp16: is true, but .*ds.json: bf16.* precision.dtype=bf16"),
        (
            {"adam_beta1": 0.8},
            r"adam_beta1: is \[0.8, 0.999\], but .*params.betas makes",
        ),
        ({"learning_rat": 1}, "args.json: learning_rat: unknown key; did you mean 'learning_rate'"),
        ({"learning_rate": "fast"}, "args.json: learning_rate: should be a number"),
    ],
)
def test_files_that_contradict_each_other(written, args, message):
    params = {"lr": 3e-4, "betas": [0.9, 0.999]}
    ds = {
        "optimizer": {"type": "AdamW", "params": params}, "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
    }  # fmt: skip
    with pytest.raises(RecipeError, match=message):
        import_deepspeed(written(ds, "ds.json"), training_arguments=written(args, "args.json"))


def test_the_commands(written, tmp_path, monkeypatch, capsys):
    def perdure(*arguments):
        monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
        monkeypatch.setattr(sys, "argv", ["perdure", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    out, args = tmp_path / "r.yaml", written({"learning_rate": 1e-3, "fsdp": True}, "args.json")
    path = written({**START, "distributed_type": "FSDP"})
    code, printed, _ = perdure("import-accelerate", path, "--out", out, "--training-args", args)
    assert code == 0
    assert "fill in run.dir, run.steps, model.init_from" in printed
    assert f"--nproc-per-node 4 --max-restarts 1000000 -m trainer {out}" in printed
    assert "lr: 0.001" in out.read_text()
    code, printed, _ = perdure("import-training-args", args, "--ranks", 2, "run.dir=x")
    assert code == 0
    assert "sharding: FULL_SHARD" in printed


@pytest.mark.skipif(not os.environ.get("SOAK"), reason="starts torchrun; in `make soak`")
@pytest.mark.parametrize("name", ["FSDP1 by numbers, without the prefix", "CPUs by MPI"])
def test_the_line_starts_a_run(written, tmp_path, name):
    tree = {**CONFIGURATIONS[name][0], "num_processes": 2, "num_machines": 1}
    (tmp_path / "text.txt").write_text("the river runs past the mill\n" * 400)
    perdure = [sys.executable, "-m", "trainer.cli"]
    prepare = ["data", "prepare", "text.txt", "--out", "data", "--tokenizer", "bytes"]
    subprocess.run([*perdure, *prepare], cwd=tmp_path, check=True)
    architecture = (
        "{model_type: qwen3, vocab_size: 257, hidden_size: 32, intermediate_size: 64,"
        " num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16}"
    )
    made = import_accelerate(
        written(tree),
        [
            "run.dir=run", "run.steps=2", "run.device=cpu", f"model.architecture={architecture}",
            "data.sources=[{path: data}]", "data.seq_len=32", "batch.global_batch=4",
            "batch.micro_batch=2",
        ],
    )  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(made.recipe())
    line = made.launch.replace("RECIPE.yaml", "recipe.yaml").replace(
        "localhost:29400", "127.0.0.1:0"
    )
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    steps = [json.loads(text)["step"] for text in (tmp_path / "run/metrics.jsonl").open()]
    assert max(steps) == 2
