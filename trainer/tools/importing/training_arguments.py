"""Translates Hugging Face's TrainingArguments, from a JSON file or their defaults, to a recipe.

Another file of the same run, a ds_config or an accelerate configuration, may come first. If both
files set a value, the values must agree, as in Trainer.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.recipe import RecipeError
from trainer.recipe.yaml_tree import flat
from trainer.tools.importing.foreign_config import (
    Converter,
    ImportedConfig,
    a_boolean,
    a_number,
    a_positive_number,
    a_whole_number,
    beside,
    one_of,
    read_json,
    words,
)
from trainer.tools.importing.imported import ImportedRecipe, inline
from trainer.tools.importing.training_arguments_keys import TABLE

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
