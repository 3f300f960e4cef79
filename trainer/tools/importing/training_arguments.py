"""Translates Hugging Face's TrainingArguments, from a JSON file or their defaults, to a recipe.

Another file of the same run, a ds_config or an accelerate configuration, may come first. If both
files set a value, the values must agree, as in Trainer.

Tables at the beginning list the keys without a counterpart in recipes, each with the reason. Some
keys are also translated; they are listed for the values that cannot be used. Names are those of
transformers 4.30 to 5.24, and some of TRL.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.recipe import RecipeError
from trainer.recipe.yaml_tree import flat
from trainer.tools.importing.accelerate_keys import TABLE as ACCELERATE
from trainer.tools.importing.accelerate_keys import spelled_out
from trainer.tools.importing.foreign_config import (
    Converter,
    ImportedConfig,
    ImportedConfigKeys,
    a_boolean,
    a_number,
    a_positive_number,
    a_whole_number,
    beside,
    one_of,
    read_json,
    reasons,
    words,
)
from trainer.tools.importing.imported import ImportedRecipe, inline

_NO_MEANING = """\
`perdure train` trains, and continues from the newest checkpoint in run.dir
    do_train do_eval do_predict resume_from_checkpoint overwrite_output_dir local_rank ddp_backend
    ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint past_index
    use_ipex use_mps_device tpu_num_cores tpu_metrics_debug xpu_backend _n_gpu dispatch_batches
max_steps or num_train_epochs says how long the run is
    num_train_epochs max_steps
loss and gradients that are not finite skip the step (elastic.max_skipped_steps)
    logging_nan_inf_filter
run.log_every says when metrics are written, on the console and in metrics.jsonl
    logging_first_step log_on_each_node log_level log_level_replica disable_tqdm logging_dir
    include_num_input_tokens_seen include_tokens_per_second
checkpoints are whole and sharded, from every node, in safetensors
    save_on_each_node save_only_model save_safetensors
the last checkpoint is exported with `perdure ckpt export`; nothing is pushed
    push_to_hub. push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token
validation reads data.validation_sequences, with batch.micro_batch, and writes its loss
    per_device_eval_batch_size per_gpu_eval_batch_size prediction_loss_only eval_on_start eval_delay
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    include_inputs_for_metrics batch_eval_metrics eval_packing
    do_train_eval jit_mode_eval fp16_full_eval bf16_full_eval
checkpoint.keep_best and checkpoint.best_by say which checkpoints stay
    metric_for_best_model greater_is_better
data.reader and data.workers say how prepared tokens are read
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order accelerator_config.
    remove_unused_columns label_names length_column_name dataset_num_proc dataset_text_field
    dataset_kwargs. pad_token eos_token pad_to_multiple_of
    dataset_batch_size truncation_mode trust_remote_code
training keeps no cache of keys and values
    use_cache
metrics.jsonl holds memory and speed, and skipped steps are named
    skip_memory_metrics debug
sequences are packed: there is no incomplete batch, and no padding
    dataloader_drop_last packing packing_strategy padding_free
DDP sends gradients in buckets of 25 MB, and every parameter takes part in the loss
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
the loss is divided by the target tokens of the whole batch
    average_tokens_across_devices
strategy.activation_checkpointing recomputes whole blocks, or all but their matrix products
    activation_checkpointing_kwargs. gradient_checkpointing_kwargs.
blocks are compiled by torch's inductor
    torch_compile_backend torch_compile_mode torchdynamo
Perdure's own models compute the loss in chunks, and norms and attention by torch
    use_liger_kernel use_liger liger_kernel_config.
strategy says how the model is spread
    fsdp fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap deepspeed
the schedule has no such value
    lr_scheduler_kwargs.
tracking.project names the project
    project trackio_space_id trackio_bucket_id trackio_static_space_id
torch.amp is what precision.dtype uses
    half_precision_backend fp16_backend fp16_opt_level
the model is model.init_from
    model_init_kwargs. chat_template_path
"""

_DIFFERS = """\
Perdure's optimizers take no such option; name a class in optimizer.factory
    optim_args optim_target_modules
the loss is plain cross-entropy
    label_smoothing_factor
no noise is added to embeddings
    neftune_noise_alpha
the order of the data follows from run.seed alone
    data_seed
data are shuffled, and sequences are packed to data.seq_len
    group_by_length train_sampling_strategy shuffle_dataset
the weight of the balance loss is that of the model's config.json
    router_aux_loss_coef
batch.micro_batch: auto is the nearest
    auto_find_batch_size
the cache of the allocator is left alone
    torch_empty_cache_steps
torch's own setting for float32 products holds, not TF32
    tf32
the loss is over all target tokens of a sequence
    completion_only_loss assistant_only_loss loss_type activation_offloading
tracking knows TensorBoard and W&B; others are tracking.sinks
    report_to_other
"""


def _spread(reasons_of_accelerate: Mapping[str, str]) -> dict[str, str]:
    # these sections have the same keys as in accelerate
    sections = ("fsdp_config.", "parallelism_config.")
    return {key: why for key, why in reasons_of_accelerate.items() if key.startswith(sections)}


TABLE = ImportedConfigKeys(
    owner="TrainingArguments",
    no_meaning={**_spread(ACCELERATE.no_meaning), **reasons(_NO_MEANING)},
    differs={**_spread(ACCELERATE.differs), **reasons(_DIFFERS)},
    aliases={"evaluation_strategy": "eval_strategy"},
    complete=spelled_out,
)


WHAT = "TrainingArguments file"
DTYPES = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
"""Value of accelerate's `mixed_precision` → `precision.dtype`."""

ADAMW = {
    "adamw_torch": "", "adamw_torch_fused": "", "adamw_hf": "", "adamw_torch_xla": "",
    "adamw_torch_npu_fused": "", "adamw_apex_fused": "",
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit",
         "paged_adamw_8bit"),
        "optimizer.state_dtype=int8 has other blocks and codes, and is not paged; strategy.offload "
        "moves it",
    ),
    **dict.fromkeys(
        ("paged_adamw_32bit", "adamw_anyprecision"),
        "its optimizer state is float32 here, and is not paged; strategy.offload moves it",
    ),
}  # fmt: skip
"""Value of `optim` that is AdamW → how Perdure's differs; "" if it does not."""
OTHER_OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
"""Value of `optim` that is no AdamW → class in torch.optim, which takes no betas."""

SHAPES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "polynomial": "linear",
    "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine", "cosine_with_restarts": "cosine",
    "warmup_stable_decay": "wsd",
}  # fmt: skip
"""Value of `lr_scheduler_type` → `schedule.name`."""


def import_training_arguments(
    path: str | Path, overrides: Sequence[str] = (), *, ranks: int | None = None,
    allow_unknown: bool = False,
) -> ImportedRecipe:  # fmt: skip
    """Translate TrainingArguments, as `TrainingArguments.to_json_string` writes them, with the
    ds_config or `fsdp_config` in them; for arguments and errors see `import_deepspeed`."""
    from trainer.tools.importing.accelerate import fsdp_of_arguments
    from trainer.tools.importing.deepspeed import deepspeed_of_arguments

    imported = ImportedRecipe(str(path))
    imported.override(overrides)
    arguments = read_arguments(path, imported)
    imported.replicas = ranks
    optimizes = deepspeed_of_arguments(arguments, ranks, allow_unknown)
    if imported.get("strategy.name") is None:
        fsdp_of_arguments(arguments)
    fill(arguments, optimizes=optimizes)
    arguments.drop_rest(allow_unknown)
    imported.finish()
    return imported


def read_arguments(path: str | Path | None, imported: ImportedRecipe) -> ImportedConfig:
    """Read TrainingArguments from a JSON file; without a file, return their defaults."""
    if path is None:
        return ImportedConfig("TrainingArguments", {}, TABLE, imported)
    tree = read_json(path, WHAT)
    values: dict[str, Any] = {}
    for key in ("lr_scheduler_kwargs", "fsdp_config", "deepspeed"):
        if isinstance(tree.get(key), str):
            tree[key] = _nested(tree[key], str(path), key)
    for key, value in tree.items():
        nested = isinstance(value, dict) and key != "deepspeed"
        values |= flat({key: value}) if nested else {key: value}
    return ImportedConfig(str(path), values, TABLE, imported)


def _nested(value: str, file: str, key: str) -> Any:
    """Parse an argument that is JSON in a string; `fsdp_config` may also be a path."""
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise RecipeError(f"{file}: {key}: not valid JSON: {error.msg}; correct it") from None
    return read_json(beside(value, file, key), WHAT) if key == "fsdp_config" else value


def is_file(arguments: ImportedConfig) -> bool:
    """Whether the arguments come from a file. Otherwise they are defaults."""
    return arguments.file != "TrainingArguments"


def mixed_precision(arguments: ImportedConfig) -> str | None:
    """Return which of "bf16" and "fp16" is on, None if neither. Raises RecipeError if both are."""
    on = [name for name in ("bf16", "fp16") if arguments.take(name, a_boolean, False) is True]
    if len(on) > 1:
        raise arguments.error("fp16", "is true, and so is bf16; keep one")
    return on[0] if on else None


def fill(arguments: ImportedConfig, *, optimizes: bool = True) -> None:
    """Set the recipe keys that TrainingArguments determine and no other file has set. Record each
    key with a counterpart. `optimizes`: whether the arguments of the optimizer apply."""
    imported = arguments.imported
    if arguments.has("max_steps") and arguments.take("max_steps", a_whole_number) > 0:
        _agree(arguments, "max_steps", "run.steps", a_whole_number)
        arguments.became("num_train_epochs", "", "max_steps sets the length of the run")
    if imported.steps:
        arguments.became("num_train_epochs", "", "run.steps sets the length of the run")
    elif arguments.has("num_train_epochs"):
        differs = "each epoch is rounded up to whole steps there, the whole run here"
        epochs = arguments.take("num_train_epochs", a_number)
        arguments.put("num_train_epochs", "run.epochs", epochs, differs=differs)
    if arguments.left.get("deepspeed"):
        arguments.became("deepspeed", "", "the separate ds_config is used instead")
    if arguments.take("train_sampling_strategy", str) == "random":
        arguments.became("train_sampling_strategy", "", "data are shuffled")
    if arguments.left.get("fsdp"):
        keys = ("fsdp", *arguments.below("fsdp_config."))
        arguments.settle(keys, "", "the other file sets how the model is distributed", differs=True)
    if optimizes:
        _optimizer(arguments)
    else:
        keys = ("optim", "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon")
        why = "the optimizer of the other file has no counterpart"
        arguments.settle((*keys, "weight_decay"), "", why, differs=True)
    _agree(arguments, "max_grad_norm", "optimizer.clip_norm", a_number, 1.0)
    _schedule(arguments)
    if imported.get("precision.dtype") is None:
        key = mixed_precision(arguments) or "bf16"
        arguments.put(key, "precision.dtype", mixed_precision(arguments) or "fp32")
    if arguments.take("average_tokens_across_devices", a_boolean, True) is False:
        why = "the loss is the mean over the target tokens of all devices"
        arguments.became("average_tokens_across_devices", "", why, differs=True)
    for name in ("bf16", "fp16"):
        on = arguments.take(name, a_boolean, False) is True
        dtype = imported.get("precision.dtype")
        if on and dtype != name:
            origin = imported.origins["precision", "dtype"]
            problem = f"is true, but {origin} makes precision.dtype={dtype}; keep one"
            raise arguments.error(name, problem)
        arguments.became(name, f"precision.dtype={dtype}" * on, "" if on else "switched off")
    _batch(arguments)
    _agree(arguments, "seed", "run.seed", a_whole_number, 42)
    if is_file(arguments):
        _operate(arguments)


def _agree(
    arguments: ImportedConfig,
    key: str,
    target: str,
    kind: Converter,
    default: Any = None,
    differs: str = "",
) -> None:
    """Set a recipe key, or check that another file set it to the same value."""
    value, imported = arguments.take(key, kind, default), arguments.imported
    present = imported.get(target)
    if present is None:
        arguments.put(key, target, value, differs=differs)
    elif present == value:
        arguments.became(key, f"{target}={inline(value)}")
    elif target in imported.given and arguments.has(key):
        section, name = target.split(".")
        made = f"{imported.origins[section, name]} makes {target}={inline(present)}"
        raise arguments.error(key, f"is {inline(value)}, but {made}; keep one")
    else:
        why = f"not used: the other file's trainer has {target}={inline(present)} by default"
        arguments.became(key, "", why, differs=True)


def _optimizer(arguments: ImportedConfig) -> None:
    imported = arguments.imported
    name = arguments.take("optim", str, "adamw_torch_fused")
    bundled = imported.get("optimizer.name") or (imported.get("optimizer.factory") and "factory")
    if bundled:
        arguments.became("optim", "", "the optimizer of the other file is used")
    elif name in ADAMW:
        arguments.put("optim", "optimizer.name", "adamw", differs=ADAMW[name])
        if ADAMW[name].startswith("optimizer.state_dtype"):
            arguments.set("optim", "optimizer.state_dtype", "int8")
    elif name in OTHER_OPTIMIZERS:
        arguments.put("optim", "optimizer.factory", f"torch.optim:{OTHER_OPTIMIZERS[name]}")
    else:
        foreign = f"{name} is not AdamW, and its values are not AdamW's"
        keys = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
        why = f"{foreign}; name a class of yours or of a package in optimizer.factory"
        arguments.settle(("optim", *keys), "", why, differs=True)
        return
    _agree(arguments, "learning_rate", "optimizer.lr", a_number, 5e-5)
    _agree(arguments, "weight_decay", "optimizer.weight_decay", a_number, 0.0)
    if imported.get("optimizer.factory"):
        for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            arguments.became(key, "", "the optimizer has no such value")
        if arguments.has("optim_args"):
            arguments.became("optim_args", "", "optimizer.factory_options takes them", differs=True)
        return
    betas = [arguments.take(f"adam_beta{n}", a_number, b) for n, b in ((1, 0.9), (2, 0.999))]
    second = arguments.has("adam_beta2") or not arguments.has("adam_beta1")
    named = "adam_beta2" if second else "adam_beta1"
    _agree(arguments, named, "optimizer.betas", lambda _: betas, betas)
    for key in ("adam_beta1", "adam_beta2"):
        arguments.became(key, f"optimizer.betas={inline(imported.get('optimizer.betas'))}")
    _agree(arguments, "adam_epsilon", "optimizer.eps", a_number, 1e-8)


def _schedule(arguments: ImportedConfig) -> None:
    imported = arguments.imported
    kind = arguments.take("lr_scheduler_type", str, "linear")
    scheduler_keys = ("lr_scheduler_type", *arguments.below("lr_scheduler_kwargs"))
    if imported.get("schedule.name") is not None:
        arguments.settle(scheduler_keys, "", "the scheduler of the other file is used")
    elif kind not in SHAPES:
        why = f"{kind} has no counterpart; schedule.factory names a schedule of your own"
        arguments.set("lr_scheduler_type", "schedule.name", "constant", why)
        arguments.settle(scheduler_keys, "schedule.name=constant", why, differs=True)
    else:
        _shape(arguments, kind)
    if imported.get("schedule.warmup_steps") is not None:
        why = "the scheduler of the other file is used"
        arguments.settle(("warmup_steps", "warmup_ratio"), "", why)
    elif kind == "constant" and "schedule.name" in imported.given:
        arguments.settle(("warmup_steps", "warmup_ratio"), "", "constant has no warm-up")
    else:
        _warmup(arguments)


def _shape(arguments: ImportedConfig, kind: str) -> None:
    """Translate the schedule in `lr_scheduler_type`, with its options."""
    shape, differs = SHAPES[kind], ""
    peak = arguments.imported.get("optimizer.lr")

    def option(name: str, default: float | None = None) -> Any:
        return arguments.take(f"lr_scheduler_kwargs.{name}", a_number, default)

    least, said = 0.0, ""
    if kind == "polynomial":
        said = "lr_end"
        least = option("lr_end", 1e-7) / peak if peak else 0.0
        if (power := option("power", 1.0)) != 1:
            differs = f"a power of {power:g} there, a line here"
    elif "min_lr" in kind:
        given = {name: option(name) for name in ("min_lr_rate", "min_lr_ratio", "min_lr")}
        said = next((name for name, value in given.items() if value is not None), said)
        least = given.get(said) or 0.0
        if said == "min_lr":
            least = least / peak if peak else 0.0
    elif kind == "cosine_with_restarts" and (cycles := option("num_cycles", 1)) != 1:
        differs = f"{cycles:g} cycles there, one here"
    elif shape == "wsd":
        said = "min_lr_ratio"
        least = option(said, 0.0)
        if arguments.take("lr_scheduler_kwargs.decay_type", str, "cosine") != "linear":
            differs = "decays along a cosine there, along a line here"
        decay = int(option("num_decay_steps", 1))
        arguments.set("lr_scheduler_kwargs.num_decay_steps", "schedule.decay_steps", decay)
    if shape != "constant":
        later = "each rate comes one step later there"
        differs = f"{differs}; {later}" if differs else later
    arguments.put("lr_scheduler_type", "schedule.name", shape, differs=differs)
    if shape != "constant":
        key = f"lr_scheduler_kwargs.{said}" if said else "lr_scheduler_kwargs"
        arguments.put(key, "schedule.min_lr_ratio", least)
    arguments.settle(arguments.below("lr_scheduler_kwargs."), f"schedule.name={shape}")


def _warmup(arguments: ImportedConfig) -> None:
    """Translate the warm-up: a number of steps, or a share of the run below 1 (`warmup_ratio`
    before transformers 5)."""
    steps = arguments.take("warmup_steps", a_number, 0)
    share = arguments.take("warmup_ratio", a_number, 0) if steps < 1 else 0
    key = "warmup_ratio" if share else "warmup_steps"
    share = share or (steps if 0 < steps < 1 else 0)
    arguments.put(key, "schedule.warmup_steps", share or int(steps))
    arguments.became("warmup_ratio", "", "warmup_steps is used" if steps else "no warm-up")
    arguments.became("warmup_steps", "", "warmup_ratio is used")


def _batch(arguments: ImportedConfig) -> None:
    imported = arguments.imported
    size, key = "per_device_train_batch_size", "gradient_accumulation_steps"
    differs = "counts examples there, packed sequences of data.seq_len tokens here"
    _agree(arguments, size, "batch.micro_batch", a_positive_number, 8, differs)
    passes = arguments.take(key, a_positive_number, 1)
    if imported.accumulation not in (None, passes) and arguments.has(key):
        problem = f"is {passes}, but the other file has {imported.accumulation}; keep one"
        raise arguments.error(key, problem)
    passes = imported.accumulation or passes
    held = imported.get("batch.micro_batch")
    if imported.get("batch.global_batch") is None and imported.replicas and isinstance(held, int):
        note = f"{held} x {passes} x {imported.replicas} replicas"
        arguments.set(key, "batch.global_batch", held * passes * imported.replicas, note)
    if imported.get("batch.global_batch") is None:
        why = f"batch.global_batch is {held} x {passes} x replicas: give --ranks, or fill it in"
        arguments.became(key, "", why)
    else:
        arguments.became(key, "batch.global_batch", "accumulation is what the global batch needs")


def _operate(arguments: ImportedConfig) -> None:
    """Translate saving, logging and tracking. Their defaults do not affect training."""
    imported = arguments.imported
    arguments.move("save_total_limit", "checkpoint.keep", a_whole_number, 0, "0 keeps all")
    arguments.move("dataloader_num_workers", "data.workers", a_whole_number, 0)
    arguments.move("ddp_timeout", "elastic.timeout_seconds", a_number, 1800)
    for what, target, usual in (
        ("logging", "run.log_every", "steps"),
        ("save", "checkpoint.every", "steps"),
        ("eval", "run.evaluate_every", "no"),
    ):
        _interval(arguments, what, target, usual)
    for key, target, kind in (
        ("output_dir", "run.dir", str),
        ("run_name", "tracking.name", str),
        ("max_length", "data.seq_len", a_positive_number),
        ("max_seq_length", "data.seq_len", a_positive_number),
    ):
        value = arguments.take(key, kind)
        if arguments.has(key):
            arguments.put(key, target, value)
    for key, target, value, differs in (
        ("activation_checkpointing", "strategy.activation_checkpointing", "full", ""),
        ("gradient_checkpointing", "strategy.activation_checkpointing", "full", ""),
        ("torch_compile", "strategy.compile", True, ""),
        ("use_cpu", "run.device", "cpu", ""),
        ("no_cuda", "run.device", "cpu", ""),
        ("full_determinism", "run.determinism", "exact", ""),
        ("load_best_model_at_end", "checkpoint.keep_best", 1, "the best is kept, not loaded"),
    ):
        if arguments.take(key, a_boolean, False) is True:
            arguments.put(key, target, value, differs=differs)
        arguments.became(key, "", "switched off")
    for name in arguments.take("report_to", words, []):
        if name in ("tensorboard", "all"):
            arguments.set("report_to", "tracking.tensorboard", True)
        if name in ("wandb", "all"):
            arguments.set("report_to", "tracking.wandb", "online")
    used = [key for key in ("tracking.tensorboard", "tracking.wandb") if imported.get(key)]
    why = "" if used else "metrics.jsonl is always written"
    arguments.became("report_to", ", ".join(used), why)
    if imported.get("tracking.wandb") and arguments.has("project"):
        arguments.put("project", "tracking.project", arguments.take("project", str))


def _interval(arguments: ImportedConfig, what: str, target: str, usual: str) -> None:
    """Translate `logging_steps`, `save_steps` or `eval_steps`, in steps or as a share of the run,
    if the strategy is steps."""
    imported = arguments.imported
    strategy, steps = f"{what}_strategy", f"{what}_steps"
    kind = arguments.take(strategy, one_of("no", "steps", "epoch", "best"), usual)
    every = arguments.take(steps, a_number, 500 if what != "eval" else None)
    if every is None:  # evaluation is as frequent as logging by default
        every = imported.get("run.log_every") or 500
    why = f"Perdure counts steps: set {target}" if kind in ("epoch", "best") else ""
    if 0 < every < 1 and kind == "steps" and not imported.steps:
        why = f"a share of the run: {target} counts steps; or add run.steps=N"
    if why:
        arguments.settle((strategy, steps), "", why, differs=True)
        return
    if 0 < every < 1:
        every = math.ceil(every * (imported.steps or 0))
    off = (imported.steps or 500) if what == "logging" else 0  # a run always logs some lines
    value = off if kind == "no" else int(every)
    arguments.put(steps, target, value)
    arguments.became(strategy, f"{target}={value}")
