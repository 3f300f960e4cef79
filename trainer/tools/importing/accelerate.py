"""Translates an accelerate configuration (the YAML of `accelerate launch`) to a recipe.

The configuration describes launch and distribution. TrainingArguments, from a file or their
defaults, have the optimizer's values. The DeepSpeed section is translated as a ds_config.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.recipe.yaml_tree import flat
from trainer.tools.importing import deepspeed
from trainer.tools.importing.accelerate_keys import TABLE
from trainer.tools.importing.deepspeed_keys import INLINE
from trainer.tools.importing.deepspeed_keys import TABLE as DEEPSPEED
from trainer.tools.importing.foreign_config import (
    ImportedConfig,
    a_boolean_or_word,
    a_positive_number,
    a_whole_number,
    beside,
    one_of,
    read_json,
    read_yaml,
    words,
)
from trainer.tools.importing.imported import ImportedRecipe
from trainer.tools.importing.training_arguments import (
    DTYPES,
    fill,
    mixed_precision,
    read_arguments,
)

FSDP, PARALLEL = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
MEGATRON = "megatron_lm_config.megatron_lm_"

FSDP1 = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Values of `fsdp_sharding_strategy`, in the order of their numbers from 1 on."""

TRAINED_ON = "Perdure trains on CUDA GPUs and CPUs"
REFUSED = {
    **dict.fromkeys(("TPU", "XLA"), f"{TRAINED_ON}, not through XLA"),
    **dict.fromkeys(
        (
            "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_SDAA", "MULTI_XPU", "MULTI_HPU",
            "MULTI_NEURON",
        ),
        TRAINED_ON,
    ),
}  # fmt: skip
"""Value of `distributed_type` → why it cannot be imported."""

SECTIONS = {
    "FSDP": "fsdp_config",
    "DEEPSPEED": "deepspeed_config",
    "MEGATRON_LM": "megatron_lm_config",
    "fp8": "fp8_config",
}
"""Value of `distributed_type` or `mixed_precision` → the section that only applies with it."""

FP8 = {
    "AO": "",
    "TE": "TransformerEngine scales by a history of maxima, torchao by the tensor at hand",
    "MSAMP": "MS-AMP also keeps optimizer state and gradients in 8 bits; here they are float32",
    None: "there whichever backend is installed, here torchao's scaling by tensor",
}
"""Value of `fp8_backend` → how precision.matmul differs from it; "" if it does not."""


def import_accelerate(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    training_arguments: str | Path | None = None,
    allow_unknown: bool = False,
) -> ImportedRecipe:
    """Translate an accelerate configuration to a recipe; for the arguments see `import_deepspeed`.
    `path`: YAML file, or a JSON file with the suffix .json. Raises RecipeError as that function
    does, and for a device on which Perdure does not train."""
    imported = ImportedRecipe(str(path))
    imported.override(overrides)
    read = read_json if Path(path).suffix == ".json" else read_yaml
    tree = read(path, "configuration of accelerate")
    source = ImportedConfig(str(path), flat(tree), TABLE, imported)
    arguments = read_arguments(training_arguments, imported)
    ranks = _launch(source, ranks)
    spread, optimizes = _distribute(source), True
    mixed = _mixed_precision(source)
    if spread == "DEEPSPEED":
        imported.replicas = ranks
        _parallelism(source, ranks, "DEEPSPEED")
        optimizes = _deepspeed(source, arguments, imported.replicas, mixed, allow_unknown)
    else:
        _data_parallel(source, arguments, spread, ranks, mixed)
    _compile(source)
    for kind, section in SECTIONS.items():
        if source.left.get(section) in (None, {}):
            source.became(section, "", "it is empty")
        if kind not in (spread, mixed):
            source.settle(source.below(f"{section}."), "", f"only with {kind}")
    if spread not in ("FSDP", "DEEPSPEED"):
        source.settle(source.below(PARALLEL), "", "only with FSDP or DEEPSPEED")
    source.drop_rest(allow_unknown)
    fill(arguments, optimizes=optimizes)
    arguments.drop_rest(allow_unknown)
    imported.finish()
    return imported


def fsdp_of_arguments(arguments: ImportedConfig) -> None:
    """Translate `fsdp` and `fsdp_config` of TrainingArguments. `fsdp` is true, or words as in
    transformers 4, such as "full_shard auto_wrap offload". Without `fsdp` Trainer uses DDP."""
    imported, held = arguments.imported, arguments.left.get("fsdp")
    legacy = [] if held is True or not held else arguments.take("fsdp", words)
    _parallelism(arguments, imported.replicas, "")
    if not held:
        arguments.put("fsdp", "strategy.name", "ddp")
        arguments.settle(arguments.below("fsdp_config."), "", "only with fsdp")
        return
    arguments.set("fsdp", "strategy.name", "fsdp")
    sharding = next((word.upper() for word in legacy if word.upper() in FSDP1), None)
    if sharding:
        arguments.set("fsdp", "strategy.sharding", _sharding_of(sharding)[0])
    if "offload" in legacy:
        arguments.set("fsdp", "strategy.offload", "cpu")
    arguments.became("fsdp", "strategy.name=fsdp")
    _fsdp(arguments, version=1 if legacy else 2)


def _launch(source: ImportedConfig, ranks: int | None) -> int | None:
    """Set the launch command of the report, and return the number of ranks."""
    where = source.take("compute_environment", str, "LOCAL_MACHINE")
    if where != "LOCAL_MACHINE":
        problem = f"{where} is not imported; run the recipe under torchrun on its machines"
        raise source.error("compute_environment", problem)
    count = source.take("num_processes", a_whole_number)
    alone = source.take("distributed_type", str) == "NO"
    ranks = count if count and count > 0 else ranks or (1 if alone else None)
    nodes = source.take("num_machines", a_positive_number, 1)
    if ranks and ranks % nodes:
        raise source.error("num_processes", f"{ranks} is not a multiple of num_machines={nodes}")
    host = source.take("main_process_ip", str) or ("HOST" if nodes > 1 else "localhost")
    port = source.take("main_process_port", a_whole_number) or 29400
    chosen = source.take("gpu_ids", str, "all")
    each = str(ranks // nodes) if ranks else "GPUS_PER_NODE"
    devices = f"CUDA_VISIBLE_DEVICES={chosen.replace(' ', '')} " if chosen != "all" else ""
    source.imported.launch = (
        f"{devices}torchrun --rdzv-backend perdure --rdzv-endpoint {host}:{port} --nnodes {nodes} "
        f"--nproc-per-node {each} --max-restarts 1000000 -m trainer RECIPE.yaml"
    )
    if source.take("use_cpu", a_boolean_or_word, False):
        source.put("use_cpu", "run.device", "cpu")
    return ranks


def _distribute(source: ImportedConfig) -> str:
    """Return the value of `distributed_type`. Raises RecipeError if it has no counterpart."""
    kind = source.take("distributed_type", str)
    if kind is None:
        raise source.error("distributed_type", "is missing; accelerate needs it too")
    kind = kind.upper()
    if kind in REFUSED:
        raise source.error("distributed_type", f"{kind} is not imported: {REFUSED[kind]}")
    names = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
    if kind not in names:
        raise source.error("distributed_type", f"should be one of {', '.join(names)}, not {kind}")
    return kind


def _mixed_precision(source: ImportedConfig) -> str:
    """Return the mixed precision, a key of DTYPES. For "fp8", also set precision.matmul."""
    old = source.take("fp16", a_boolean_or_word, False)
    mixed: str = source.take("mixed_precision", one_of(*DTYPES), "fp16" if old else "no")
    if mixed == "fp8":
        key, scaling = "fp8_config.fp8_backend", "fp8_config.fp8_use_mxfp8_block_scaling"
        differs = FP8[source.take(key, one_of("AO", "TE", "MSAMP"))]
        block = source.take(scaling, a_boolean_or_word, False)
        kind = "mxfp8" if block else "fp8_tensorwise"
        source.put("mixed_precision", "precision.matmul", kind, differs="" if block else differs)
        source.became(key, f"precision.matmul={kind}", differs, differs=bool(differs))
        source.became(scaling, f"precision.matmul={kind}")
    return mixed


def _put_precision(source: ImportedConfig, arguments: ImportedConfig, mixed: str) -> None:
    """Set the precision of a run without DeepSpeed. As in Trainer, TrainingArguments override
    accelerate."""
    dtype_of_arguments = mixed_precision(arguments)
    dtype = dtype_of_arguments or DTYPES[mixed]
    if mixed == "fp8":
        source.set("mixed_precision", "precision.dtype", dtype)
    elif dtype_of_arguments:
        other = mixed not in (dtype_of_arguments, "no")
        why = f"{dtype_of_arguments} of TrainingArguments overrides it" if other else ""
        source.became("mixed_precision", f"precision.dtype={dtype_of_arguments}" * (not other), why)
    else:
        source.put("mixed_precision", "precision.dtype", dtype)


def _data_parallel(
    source: ImportedConfig, arguments: ImportedConfig, spread: str, ranks: int | None, mixed: str
) -> None:
    imported = source.imported
    imported.replicas = ranks
    if spread == "FSDP":
        source.put("distributed_type", "strategy.name", "fsdp")
        version = int(source.take(f"{FSDP}version", a_whole_number, 1))
        _parallelism(source, ranks, spread)
        _fsdp(source, version)
    elif spread == "MEGATRON_LM":
        _megatron(source, ranks)
    else:
        source.put("distributed_type", "strategy.name", "ddp", "" if ranks != 1 else "one process")
    if spread == "MULTI_CPU" and imported.get("run.device") is None:
        source.set("distributed_type", "run.device", "cpu")
    _put_precision(source, arguments, mixed)


def _sharding_of(name: str) -> tuple[str, str]:
    """Return (`strategy.sharding` for a word of FSDP1, what differs)."""
    if name == "HYBRID_SHARD_ZERO2":
        return "HYBRID_SHARD", "parameters are freed after the forward pass here, kept there"
    return name, ""


def _fsdp(source: ImportedConfig, version: int) -> None:
    """Translate `fsdp_config`: sharding, offloading and activation checkpointing."""
    strategy, reshard = f"{FSDP}sharding_strategy", f"{FSDP}reshard_after_forward"
    named = one_of(*FSDP1)

    def a_strategy(value: Any) -> str:
        number = str(value)
        # accelerate writes the strategy by name or by number
        return FSDP1[int(number) - 1] if number in "12345" else str(named(value))

    if source.imported.get("strategy.sharding"):
        source.settle((strategy, reshard), "", "strategy.sharding is set already")
    elif version == 2:
        freed = source.take(reshard, a_boolean_or_word, True)
        sharding = "FULL_SHARD" if freed else "SHARD_GRAD_OP"
        source.put(reshard, "strategy.sharding", sharding)
    else:
        word = source.left.get(reshard)
        is_word = isinstance(word, str) and word.lower() not in ("true", "false")
        key = reshard if is_word and not source.has(strategy) else strategy
        sharding, differs = _sharding_of(source.take(key, a_strategy, "FULL_SHARD"))
        source.put(key, "strategy.sharding", sharding, differs=differs)
    for name, target, value in (
        ("offload_params", "strategy.offload", "cpu"),
        ("cpu_offload", "strategy.offload", "cpu"),
        ("activation_checkpointing", "strategy.activation_checkpointing", "full"),
    ):
        if source.take(FSDP + name, a_boolean_or_word, False):
            source.put(FSDP + name, target, value)


def _parallelism(source: ImportedConfig, ranks: int | None, spread: str) -> None:
    """Translate `parallelism_config`: the size of each kind of parallelism."""
    sizes = {
        name: int(source.take(f"{PARALLEL}{name}_size", a_whole_number, 1) or 1)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        raise source.error(f"{PARALLEL}sp_size", "is above 1, and so is cp_size; keep one")
    for name, target, differs in (
        ("tp", "strategy.tp", ""),
        ("cp", "strategy.cp", ""),
        ("sp", "strategy.cp", "Ulysses there, a ring here"),
    ):
        if sizes[name] > 1:
            source.put(f"{PARALLEL}{name}_size", target, sizes[name], differs=differs)
    together = sizes["tp"] * sizes["cp"] * sizes["sp"]
    if ranks and ranks % together:
        problem = f"{ranks} ranks are no multiple of tp x cp x sp = {together}"
        raise source.error("num_processes", problem)
    source.imported.replicas = ranks // together if ranks else None
    both_sizes = all(source.has(f"{PARALLEL}{name}_size") for name in ("dp_replicate", "dp_shard"))
    product = together * sizes["dp_replicate"] * sizes["dp_shard"]
    if both_sizes and ranks and product != ranks and spread == "FSDP":
        problem = f"{ranks} ranks, but the sizes of parallelism_config make {product}"
        raise source.error("num_processes", problem)
    if sizes["dp_replicate"] > 1:
        key = f"{PARALLEL}dp_replicate_size"
        if sizes["dp_shard"] == 1 and sizes["cp"] == 1:
            raise source.error(key, "needs dp_shard_size above 1; without shards it is MULTI_GPU")
        source.put(key, "strategy.sharding", "HYBRID_SHARD")
        group = sizes["dp_shard"] * sizes["cp"] * sizes["sp"]
        note = "ranks per group, including those of cp and sp"
        source.put(f"{PARALLEL}dp_shard_size", "strategy.shard_size", group, note)


def _megatron(source: ImportedConfig, ranks: int | None) -> None:
    """Translate `megatron_lm_config`: sizes of parallelism, and switches."""
    imported, together = source.imported, 1
    for name, target in (
        ("tp_degree", "strategy.tp"),
        ("pp_degree", "strategy.pp"),
        ("context_parallel_size", "strategy.cp"),
        ("expert_model_parallel_size", "strategy.ep"),
    ):
        size = int(source.take(MEGATRON + name, a_whole_number, 1) or 1)
        if size > 1:
            source.put(MEGATRON + name, target, size)
            together *= size if target != "strategy.ep" else 1
    if ranks and ranks % together:
        raise source.error("num_processes", f"{ranks} ranks are no multiple of {together}")
    imported.replicas = ranks // together if ranks else None

    def on(name: str) -> bool:
        return bool(source.take(MEGATRON + name, a_boolean_or_word, False))

    source.set("distributed_type", "strategy.name", "fsdp")
    source.became("distributed_type", "strategy.name=fsdp")
    distributed, experts = MEGATRON + "use_distributed_optimizer", imported.get("strategy.ep")
    if on("use_custom_fsdp"):
        source.put(MEGATRON + "use_custom_fsdp", "strategy.sharding", "FULL_SHARD")
    elif on("use_distributed_optimizer") and together == 1 and not experts:
        source.put(distributed, "strategy.sharding", "OPTIMIZER_STATE")
    elif on("use_distributed_optimizer") or experts:
        differs = "its optimizer state is sharded there, here also its gradients"
        source.put(distributed, "strategy.sharding", "SHARD_GRAD_OP", differs=differs)
    else:
        source.set("distributed_type", "strategy.sharding", "NO_SHARD")
    if on("sequence_parallelism") and imported.get("strategy.tp"):
        source.put(MEGATRON + "sequence_parallelism", "strategy.sequence_parallel", True)
    if on("recompute_activations"):
        full = source.take(MEGATRON + "recompute_granularity", str) == "full"
        key, kind = MEGATRON + "recompute_activations", "full" if full else "selective"
        source.put(key, "strategy.activation_checkpointing", kind)
    if passes := source.take(MEGATRON + "num_micro_batches", a_positive_number):
        imported.accumulation = passes
        why = "accumulation is what the global batch needs"
        source.became(MEGATRON + "num_micro_batches", "batch.global_batch", why)
    source.move(MEGATRON + "gradient_clipping", "optimizer.clip_norm", float, 1.0)


def _deepspeed(
    source: ImportedConfig,
    arguments: ImportedConfig,
    ranks: int | None,
    mixed: str,
    allow_unknown: bool,
) -> bool:
    """Translate `deepspeed_config`, inline or from the ds_config that it names. Return whether
    TrainingArguments may supply the optimizer's values."""
    imported = source.imported
    inline = source.below("deepspeed_config.")
    named = source.left.get("deepspeed_config.deepspeed_config_file")
    # `ds` or `rest` accounts for these keys below
    values = {key: source.left.pop(key) for key in inline}
    has_file = named and named != "none"
    if has_file:
        path = beside(str(named), source.file, "deepspeed_config.deepspeed_config_file")
        ds = ImportedConfig(str(path), flat(read_json(path, "ds_config")), DEEPSPEED, imported)
        ds.assumed["gradient_accumulation_steps"] = 1
        for key in ("bf16.enabled", "fp16.enabled"):
            if mixed != "no" and key not in ds.left:
                ds.assumed[key] = key.startswith(DTYPES[mixed])
    else:
        ds = ImportedConfig(imported.file, values, INLINE, imported)
        keys = ("gradient_accumulation_steps", "gradient_clipping", "bf16.enabled", "fp16.enabled")
        ds.assumed = {"zero_optimization.stage": 2, **dict.fromkeys(keys, "auto")}
    optimizes = deepspeed.translate(ds, arguments, ranks, mixed=mixed)
    ds.drop_rest(allow_unknown)
    # beside a ds_config file, accelerate reads only keys about the launch from its own section
    if has_file:
        rest = ImportedConfig(imported.file, values, INLINE, imported)
        others = [key for key in rest.left if not key.startswith("deepspeed_config.")]
        rest.settle(others, "", f"{path.name} has it")
        rest.drop_rest(allow_unknown)
    dtype = imported.get("precision.dtype")
    agreed = DTYPES[mixed] == dtype
    why = "" if agreed else "the ds_config or TrainingArguments override it"
    source.became("mixed_precision", f"precision.dtype={dtype}", why, differs=not agreed)
    sharding = imported.get("strategy.sharding")
    strategy = f"strategy.sharding={sharding}" if sharding else "strategy.name=ddp"
    source.became("distributed_type", strategy)
    return optimizes


def _compile(source: ImportedConfig) -> None:
    """Translate `dynamo_config`, or the older `dynamo_backend`."""
    for key in ("dynamo_backend", "dynamo_config.dynamo_backend"):
        backend = source.take(key, str, "NO")
        if backend.upper() not in ("NO", "EAGER"):
            inductor = backend.upper() == "INDUCTOR"
            differs = "" if inductor else f"{backend} there, inductor here"
            source.put(key, "strategy.compile", True, differs=differs)
