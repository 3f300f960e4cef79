"""Translates a DeepSpeed configuration (ds_config.json) to a recipe, with every key accounted for.

Settings that a ds_config lacks (model, data, length of the run) become lines to fill in. "auto"
means the value in Hugging Face's TrainingArguments. Optimizer and schedule come from
TrainingArguments, too, if the ds_config has none.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.recipe import ZERO_STAGES
from trainer.recipe.yaml_tree import flat
from trainer.tools.importing.deepspeed_keys import TABLE
from trainer.tools.importing.foreign_config import (
    ImportedConfig,
    a_boolean,
    a_number,
    a_pair,
    a_positive_number,
    a_whole_number,
    beside,
    one_of,
    read_json,
)
from trainer.tools.importing.imported import ABSENT, ImportedRecipe, ImportReportLine
from trainer.tools.importing.training_arguments import (
    DTYPES,
    fill,
    is_file,
    mixed_precision,
    read_arguments,
)

ZERO, PARAMS = "zero_optimization.", "optimizer.params."

SIZES = (
    ("tensor_parallel.autotp_size", "strategy.tp", ""),
    ("sequence_parallel_size", "strategy.cp", "Ulysses there, a ring here"),
)
"""(key of a size of parallelism, recipe key, what differs)."""

SWITCHES: tuple[tuple[str, bool, str, Any, str, str], ...] = (
    ("compile.enabled", True, "strategy.compile", True, "", ""),
    ("compile.disable", False, "strategy.compile", True, "", ""),  # older spelling of enabled
    ("tensorboard.enabled", True, "tracking.tensorboard", True, "tensorboard.job_name", "name"),
    ("wandb.enabled", True, "tracking.wandb", "online", "wandb.project", "project"),
)
"""(key, value that means on, recipe key, its value if on, a further key that applies if on, name of
that key in `tracking`)."""

TORCH = {
    "Adadelta": 1.0, "Adafactor": 0.01, "Adagrad": 0.01, "Adamax": 2e-3, "ASGD": 0.01,
    "NAdam": 2e-3, "RAdam": 1e-3, "RMSprop": 0.01, "Rprop": 0.01, "SGD": 1e-3,
}  # fmt: skip
"""torch optimizer that DeepSpeed accepts by name → its default learning rate."""

ADAM = ("optimizer.name", "adamw", 1e-3, [0.9, 0.999], 1e-8, "")
OPTIMIZERS: dict[str, tuple[str, str, float, list[float] | None, float | None, str]] = {
    "adam": ADAM,
    "adamw": ADAM,
    "onebitadam": (*ADAM[:5], "gradients are sent whole"),
    "zerooneadam": (*ADAM[:5], "gradients are sent whole"),
    "muon": ("optimizer.name", "muon", 0.02, [0.9, 0.95], 1e-10, "adjusted as in the original"),
    **{
        name.lower(): ("optimizer.factory", f"torch.optim:{name}", lr, None, None, "")
        for name, lr in TORCH.items()
    },
}
"""DeepSpeed's name in lower case → (recipe key and its value; DeepSpeed's learning rate, betas and
eps; what differs)."""

SHAPES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
"""DeepSpeed's scheduler in lower case → `schedule.name`."""


def import_deepspeed(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    training_arguments: str | Path | None = None,
    allow_unknown: bool = False,
) -> ImportedRecipe:
    """Translate a ds_config to a recipe.

    Args:
        path: JSON file.
        overrides: `key.sub=value` of the recipe, applied over the ds_config.
        ranks: number of ranks of the original run, if the file lacks it. With the micro-batch it
            gives the global batch.
        training_arguments: JSON file of the Hugging Face TrainingArguments used with it.
        allow_unknown: report unknown keys instead of raising an error; DeepSpeed itself ignores
            most unknown keys.

    Raises:
        RecipeError: no JSON, an unknown key, a value of the wrong type, or contradictory keys; one
            line with file and key.
    """
    imported = ImportedRecipe(str(path))
    imported.override(overrides)
    arguments = read_arguments(training_arguments, imported)
    source = ImportedConfig(str(path), flat(read_json(path, "ds_config")), TABLE, imported)
    by_trainer = source.automatic or is_file(arguments) or not source.has("optimizer.type")
    optimizes = translate(source, arguments, ranks, by_trainer=by_trainer)
    source.drop_rest(allow_unknown)
    if by_trainer:
        fill(arguments, optimizes=optimizes)
        arguments.drop_rest(allow_unknown)
    imported.finish()
    return imported


def deepspeed_of_arguments(
    arguments: ImportedConfig, ranks: int | None, allow_unknown: bool
) -> bool:
    """Translate the ds_config that TrainingArguments contain or name. Return whether
    TrainingArguments may have the values of the optimizer."""
    held = arguments.left.get("deepspeed")
    if not held:
        return True
    imported = arguments.imported
    if isinstance(held, dict):
        arguments.left.pop("deepspeed")
        values = flat(held, "deepspeed.")
        source = ImportedConfig(arguments.file, values, TABLE, imported, prefix="deepspeed.")
    else:
        path = beside(str(held), arguments.file, "deepspeed")
        source = ImportedConfig(str(path), flat(read_json(path, "ds_config")), TABLE, imported)
        arguments.became("deepspeed", "strategy", f"{path.name} has it")
    optimizes = translate(source, arguments, ranks)
    source.drop_rest(allow_unknown)
    return optimizes


def translate(
    source: ImportedConfig,
    arguments: ImportedConfig,
    ranks: int | None,
    *,
    by_trainer: bool = True,
    mixed: str | None = None,
) -> bool:
    """Translate the keys of a ds_config that have a counterpart; "auto" means the value in
    TrainingArguments. Return whether the optimizer's values may come from TrainingArguments.

    Args:
        source: the ds_config.
        arguments: TrainingArguments used with it.
        ranks: number of ranks, if known.
        by_trainer: whether Hugging Face's Trainer reads the file.
        mixed: accelerate's `mixed_precision`, which "auto" then means.
    """
    source.drop_switched_off()
    _strategy(source)
    source.imported.replicas = _parallelism(source, ranks)
    _precision(source, arguments, mixed)
    peak, foreign = _optimizer(source, arguments)
    _schedule(source, arguments, peak, foreign, by_trainer)
    _batch(source, arguments, by_trainer)
    for key, on, target, value, name, place in SWITCHES:
        if source.take(key, a_boolean, not on) is on:
            source.put(key, target, value)
            if name and (named := source.take(name, str)):
                source.put(name, f"tracking.{place}", named)
    return not foreign


def _strategy(source: ImportedConfig) -> None:
    imported = source.imported
    key, parts = f"{ZERO}stage", f"{ZERO}mics_shard_size"
    if isinstance(source.left.get(ZERO[:-1]), bool):  # DeepSpeed's spelling in its first year
        source.left[key] = int(source.left.pop(ZERO[:-1]))
        source.spelled[key] = ZERO[:-1]
    stage = source.take(key, a_whole_number, 0)
    if stage not in ZERO_STAGES:
        raise source.error(key, f"should be 0, 1, 2 or 3, but it is {stage}")
    group = source.take(parts, a_whole_number, -1)
    device = _offload(source, stage)
    if stage == 0:
        source.put(key, "strategy.name", "ddp")
    else:
        sharding = "HYBRID_SHARD" if stage == 3 and group > 0 else ZERO_STAGES[stage]
        differs = ""
        if device and stage == 1:
            sharding, differs = ZERO_STAGES[2], "ZeRO-1 there; offloading needs sharded gradients"
        # parallelism_config has set hybrid sharding
        elif imported.get("strategy.sharding") == "HYBRID_SHARD":
            sharding = "HYBRID_SHARD"
        source.set(key, "strategy.name", "fsdp")
        source.put(key, "strategy.sharding", sharding, f"ZeRO-{stage}", differs)
        if group > 0 and sharding == "HYBRID_SHARD":
            source.put(parts, "strategy.shard_size", group, "ranks per group")
    recomputed = source.below("activation_checkpointing.")
    used = next((key for key in recomputed if source.left[key] not in (None, False, 0)), None)
    if used:
        note = "the model's own code decides there; selective costs less time"
        source.put(used, "strategy.activation_checkpointing", "full", note)


def _offload(source: ImportedConfig, stage: int) -> str:
    """Return the device of DeepSpeed's offloaded optimizer state or parameters: "", "cpu" or
    "nvme". Also set the recipe's offload keys."""
    devices: dict[str, str] = {}
    a_device = one_of("none", "cpu", "nvme")
    for what, old, least in (("optimizer", "cpu_offload", 1), ("param", "cpu_offload_param", 3)):
        for key, kind in ((f"{ZERO}offload_{what}.device", a_device), (ZERO + old, a_boolean)):
            device = source.take(key, kind, "none")
            if device not in ("none", "auto", False) and stage >= least:
                devices[key] = "cpu" if device is True else device
    # Perdure offloads both to one device; "nvme" sorts after "cpu".
    device = max(devices.values(), default="")
    if device:
        note = "parameters, gradients and optimizer state"
        source.set(next(iter(devices)), "strategy.offload", device, note)
        source.settle(devices, f"strategy.offload={device}", note)
    if device == "nvme":
        paths = [f"{ZERO}offload_{what}.nvme_path" for what in ("optimizer", "param")]
        given = {key: at for key in paths if (at := source.left.get(key)) not in (None, "auto")}
        origin, path = next(iter(given.items()), (paths[0], "/local_nvme"))
        source.set(origin, "strategy.offload_directory", path, "a directory on a local disk")
        for key in paths:
            other = given.get(key, path) != path
            why = "one directory holds all that is offloaded" if other else ""
            source.became(key, f"strategy.offload_directory={path}", why, differs=other)
    return device


def _parallelism(source: ImportedConfig, ranks: int | None) -> int | None:
    """Translate tensor and sequence parallelism; return the number of model replicas, if known."""
    together = 1
    for key, target, note in SIZES:
        size = source.take(key, a_whole_number, 0)
        if isinstance(size, int) and size > 1:
            together *= size
            if ranks and ranks % together:
                raise source.error(key, f"{ranks} ranks are no multiple of {together}")
            source.put(key, target, size, differs=note)
    return ranks // together if ranks else None


def _precision(source: ImportedConfig, arguments: ImportedConfig, mixed: str | None) -> None:
    dtypes = {"bf16": "bf16", "fp16": "fp16", "amp": "fp16", "torch_autocast": "bf16"}
    cast = str(source.take("torch_autocast.dtype", str, "bfloat16")).removeprefix("torch.")
    if cast in ("float16", "half", "fp16"):
        dtypes["torch_autocast"] = "fp16"
    enabled = {name: source.take(f"{name}.enabled", a_boolean, False) for name in dtypes}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        raise source.error("fp16.enabled", "is true, and so is bf16.enabled; keep one")
    used = [name for wanted in (True, "auto") for name in dtypes if enabled[name] == wanted]
    dtype = dtypes[used[0]] if used else "fp32"
    if used and enabled[used[0]] is True:
        source.put(f"{used[0]}.enabled", "precision.dtype", dtype)
    elif not used and mixed is None:
        source.put("bf16.enabled", "precision.dtype", "fp32", "neither bf16 nor fp16 there")
    else:
        wanted = mixed_precision(arguments) or (mixed and DTYPES[mixed])
        guess = not wanted and not is_file(arguments)
        dtype = wanted or ("bf16" if guess else "fp32")
        note = "auto: --bf16 or --fp16 of your script decides, or fp32 where it gave neither"
        note = note if guess else "auto: your other file has it"
        key = f"{used[0] if used else 'bf16'}.enabled"
        source.set(key, "precision.dtype", dtype, note, given=False)
        keys = ("bf16.enabled", "fp16.enabled")
        source.settle(keys, f"precision.dtype={dtype}", note, differs=guess)
    if dtype != "fp16":
        source.settle(source.below("fp16."), "", "fp16 is not used")
        return
    fixed, power = "fp16.loss_scale", "fp16.initial_scale_power"
    scale, exponent = (_number(source.take(key, a_number)) for key in (fixed, power))
    if scale:
        differs = "fixed there; here the initial value of the dynamic scale"
        source.put(fixed, "precision.loss_scale", scale, differs=differs)
    else:
        exponent = 16 if exponent is None else exponent
        if abs(exponent) > 127:
            raise source.error(power, f"2^{exponent:g} is no scale of float32; lower it")
        source.put(power, "precision.loss_scale", 2.0**exponent)
        if "fp16.loss_scale_window" not in source.left:
            why = "after 1000 good steps there, 2000 here, the scale doubles"
            name = f"{source.label}fp16.loss_scale_window"
            source.imported.lines.append(ImportReportLine(name, ABSENT, "", why, differs=True))


def _optimizer(source: ImportedConfig, arguments: ImportedConfig) -> tuple[float | None, str]:
    """Translate the optimizer's parameters. Return its learning rate, if set, and for an unknown
    optimizer the reason why its learning rates do not apply."""
    clip = source.take("gradient_clipping", a_number)
    legacy = source.take(PARAMS + "max_grad_norm", a_number)
    if None not in (clip, legacy) and clip != legacy:
        both = f"is {legacy}, but gradient_clipping is {clip}; keep one"
        raise source.error(PARAMS + "max_grad_norm", both)
    key = "gradient_clipping" if legacy is None else PARAMS + "max_grad_norm"
    note = "0 before DeepSpeed 0.19.3" if clip is legacy is None else ""
    source.move(key, "optimizer.clip_norm", a_number, 1.0, note)
    kind = source.take("optimizer.type", str)
    if kind is None:
        why = "without optimizer.type DeepSpeed ignores it"
        source.settle(source.below("optimizer."), "", why, differs=True)
        return None, ""
    if kind.lower() not in OPTIMIZERS:
        foreign = (
            f"torch.optim has no {kind}, and its values are not AdamW's; a class of yours or of a "
            "package is named in optimizer.factory"
        )
        source.settle(source.below("optimizer."), "", foreign, differs=True)
        return None, foreign
    target, value, usual, betas, eps, differs = OPTIMIZERS[kind.lower()]
    source.put("optimizer.type", target, value, differs=differs)
    rates = (PARAMS + "muon_lr", PARAMS + "lr")
    rate = rates[value != "muon" or source.left.get(rates[0]) is None]
    lr: float | None = source.move(rate, "optimizer.lr", a_number, usual)
    peak = arguments.take("learning_rate", a_number, 5e-5) if lr is None else lr
    if betas:
        source.move(PARAMS + "betas", "optimizer.betas", a_pair, betas)
        source.move(PARAMS + "eps", "optimizer.eps", a_number, eps)
    _decay(source, arguments, str(value))
    if source.take(PARAMS + "bias_correction", a_boolean, True) is False:
        why = "AdamW corrects its moments from the first step on"
        source.became(PARAMS + "bias_correction", "", why, differs=True)
    if value == "muon":
        muon: dict[str, Any] = {"adjust_lr": "original"}
        if (momentum := source.take(PARAMS + "momentum", a_number)) is not None:
            muon["momentum"] = 0.95 if momentum == "auto" else momentum
        source.set("optimizer.type", "optimizer.muon", muon)
        source.became(PARAMS + "momentum", "optimizer.muon.momentum")
        if isinstance(adam := source.take(PARAMS + "adam_lr", a_number), float):
            scale = f"{adam / peak:g}" if peak else "of your choice"
            why = f"one rate for all; optimizer.groups gives names of AdamW's an lr_scale: {scale}"
            source.became(PARAMS + "adam_lr", "", why, differs=True)
    elif target == "optimizer.factory":
        given = [key for key in source.below(PARAMS) if source.left[key] not in (None, "auto")]
        options = {key.removeprefix(PARAMS): source.left[key] for key in given}
        if options:
            source.set(given[0], "optimizer.factory_options", options)
        source.settle(given, "optimizer.factory_options")
        source.settle(source.below(PARAMS), "", f"the default of {value}")
    return peak, ""


def _decay(source: ImportedConfig, arguments: ImportedConfig, value: str) -> None:
    """Translate weight decay. `value`: name of the recipe's optimizer."""
    key, usual, differs = PARAMS + "weight_decay", 0.0, ""
    decay = source.take(key, a_number)
    if decay == "auto":
        decay = arguments.take("weight_decay", a_number, 0.0)
    if value == "adamw":
        modes = [source.take(PARAMS + mode, a_boolean) for mode in ("adam_w_mode", "adamw_mode")]
        if False not in modes:
            usual = 0.01 if source.take(PARAMS + "torch_adam", a_boolean) is True else 0.0
        elif decay:
            differs = "added to the gradient there (adam_w_mode: false), decoupled here; and "
    if decay or usual:
        differs += "on matrices and embeddings only"
    source.move(key, "optimizer.weight_decay", a_number, usual, differs=differs)


def _schedule(
    source: ImportedConfig,
    arguments: ImportedConfig,
    peak: float | None,
    foreign: str,
    by_trainer: bool,
) -> None:
    """Translate the schedule's shape, and its peak unless the optimizer has no counterpart."""
    kind = source.take("scheduler.type", str)
    shape = SHAPES.get((kind or "").lower())
    if not shape:
        if kind or not by_trainer:
            why = f"{kind} has no counterpart; Perdure knows cosine, linear, wsd and constant"
            source.settle(source.below("scheduler."), "", why, differs=True)
            note = why if kind else "no scheduler there; if your script has one, set it here"
            source.put("scheduler.type", "schedule.name", "constant", differs=note)
            source.imported.given.add("schedule.name")
        return
    warmup, steps, low, high = (
        f"scheduler.params.{name}"
        for name in ("warmup_num_steps", "total_num_steps", "warmup_min_lr", "warmup_max_lr")
    )
    source.put("scheduler.type", "schedule.name", shape)
    warms = source.take(warmup, a_whole_number, 1000)
    if warms == "auto":
        warms = arguments.take("warmup_steps", a_number, 0)
        warms = warms or arguments.take("warmup_ratio", a_number, 0)
    logarithmic = source.take("scheduler.params.warmup_type", str, "log") != "linear"
    differs = "linear, where DeepSpeed's is logarithmic" if warms and logarithmic else ""
    source.move(warmup, "schedule.warmup_steps", a_whole_number, 1000, differs=differs)
    if isinstance(total := source.take(steps, a_whole_number), int):
        source.put(steps, "run.steps", total)
    if shape == "cosine":
        source.move("scheduler.params.cos_min_ratio", "schedule.min_lr_ratio", a_number, 1e-4)
    top = source.take(high, a_number, None if shape != "linear" else 1e-3)
    has_peak = top is not None and shape != "cosine" and not foreign
    if has_peak and top == "auto":
        top = peak if peak is not None else arguments.take("learning_rate", a_number, 5e-5)
        source.leave(high, "optimizer.lr")
    elif has_peak:
        other = peak is not None and top != peak
        note = f"the scheduler's peak; optimizer.params.lr is {peak:g}" if other else ""
        source.put(high, "optimizer.lr", top, note)
    if shape == "linear":
        end = _number(source.take(low, a_number)) or 0.0
        note = "WarmupDecayLR ends at warmup_min_lr"
        start = "warm-up starts from 0" if end else ""
        ratio = end / top if isinstance(top, float) and top else 0.0
        source.put(low, "schedule.min_lr_ratio", ratio, note, start)
    if foreign:
        source.became(high, "", foreign, differs=True)


def _batch(source: ImportedConfig, arguments: ImportedConfig, by_trainer: bool) -> None:
    replicas = source.imported.replicas
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, passes = (source.take(name, a_positive_number) for name in names)
    automatic = by_trainer and (micro == "auto" or (micro is None and not isinstance(whole, int)))
    if automatic:
        micro = arguments.take("per_device_train_batch_size", a_positive_number, 8)
        source.leave(names[1], "batch.micro_batch")
    if passes == "auto" or (passes is None and automatic):
        passes = arguments.take(names[2], a_positive_number, 1)
    factors = [size for size in (micro, passes, replicas) if isinstance(size, int)]
    product, all_known = math.prod(factors), len(factors) == 3
    if isinstance(whole, int) and (whole % product or (all_known and whole != product)):
        wanted = ("" if all_known else "a multiple of ") + " x ".join(map(str, factors))
        raise source.error(names[0], f"{whole} is not {wanted}" + (" replicas" if replicas else ""))
    if source.has(names[2]) or names[2] in source.assumed:
        source.imported.accumulation = passes
    accumulated = passes if isinstance(passes, int) else 1
    if isinstance(micro, int) and not automatic:
        source.put(names[1], "batch.micro_batch", micro, "the most one rank holds")
    elif isinstance(whole, int) and replicas and not isinstance(micro, int):
        note = f"{whole} / ({accumulated} x {replicas} replicas)"
        micro = whole // (accumulated * replicas)
        source.set(names[0], "batch.micro_batch", micro, note)
    if isinstance(whole, int):
        note = "" if micro or replicas else "with --ranks, batch.micro_batch is set, too"
        source.put(names[0], "batch.global_batch", whole, note)
    elif replicas and isinstance(micro, int):
        note = f"{micro} x {accumulated} x {replicas} replicas"
        source.set(names[0], "batch.global_batch", micro * accumulated * replicas, note)
        source.became(names[0], "batch.global_batch", note)
    source.became(names[2], "batch.global_batch", "accumulation is what the global batch needs")


def _number(value: Any) -> float | None:
    return None if value == "auto" else value
