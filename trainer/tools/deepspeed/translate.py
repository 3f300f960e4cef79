"""A DeepSpeed configuration (ds_config.json) → a recipe, with every key accounted for.

Each key is translated, or named as dropped with the reason; what a recipe needs and a ds_config
does not say (model, data, length of the run) stays open, as a line to fill in. "auto" is what
Hugging Face's Trainer puts there: the value of its TrainingArguments, whose default is taken here.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from trainer.recipe import ZERO_STAGES, RecipeError
from trainer.recipe.yaml_tree import apply_override, listed
from trainer.tools.deepspeed.config import (
    AUTO,
    DsConfig,
    a_boolean,
    a_device,
    a_number,
    a_pair,
    a_positive_number,
    a_whole_number,
    read_config,
)
from trainer.tools.deepspeed.imported import Imported

ZERO, PARAMS = "zero_optimization.", "optimizer.params."

SIZES = (
    ("tensor_parallel.autotp_size", "strategy.tp", ""),
    ("sequence_parallel_size", "strategy.cp", "Ulysses there, a ring here"),
)
"""Ranks that share a replica of the model: key, recipe key, note."""

SWITCHES: tuple[tuple[str, bool, str, Any, str, str], ...] = (
    ("compile.enabled", True, "strategy.compile", True, "", ""),
    ("compile.disable", False, "strategy.compile", True, "", ""),  # its older spelling
    ("tensorboard.enabled", True, "tracking.tensorboard", True, "tensorboard.job_name", "name"),
    ("wandb.enabled", True, "tracking.wandb", "online", "wandb.project", "project"),
)
"""Key, its value that means on, recipe key and value; a key that then counts, and its place in
`tracking`."""

TORCH = {
    "Adadelta": 1.0, "Adafactor": 0.01, "Adagrad": 0.01, "Adamax": 2e-3, "ASGD": 0.01,
    "NAdam": 2e-3, "RAdam": 1e-3, "RMSprop": 0.01, "Rprop": 0.01, "SGD": 1e-3,
}  # fmt: skip
"""Optimizers of torch that DeepSpeed takes by their names, and their learning rates."""


Method: TypeAlias = tuple[str, str, float, list[float] | None, float | None, str]
ADAM: Method = ("optimizer.name", "adamw", 1e-3, [0.9, 0.999], 1e-8, "")
OPTIMIZERS: dict[str, Method] = {
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
"""Name in DeepSpeed, in small letters → recipe key and its value; DeepSpeed's learning rate, betas
and eps; a note."""

SHAPES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
"""Schedulers of DeepSpeed in small letters → `schedule.name`."""


def import_deepspeed(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    allow_unknown: bool = False,
) -> Imported:
    """Translate a ds_config.

    Args:
        path: JSON file.
        overrides: `key.sub=value` of the recipe, over what the ds_config says.
        ranks: that the ds_config is run on; tells the global batch where it names the micro-batch
            only.
        allow_unknown: list unknown keys as dropped, as DeepSpeed itself does with most of them.

    Raises:
        RecipeError: no JSON, an unknown key, a value of the wrong type, keys that contradict each
            other; one line that names file and key.
    """
    made = Imported(str(path))
    source = DsConfig(str(path), read_config(path), made)
    source.drop_switched_off()
    _strategy(source)
    replicas = _parallelism(source, ranks)
    _precision(source)
    peak, foreign = _optimizer(source)
    _schedule(source, peak, foreign)
    _batch(source, replicas)
    for key, on, target, value, name, place in SWITCHES:
        if source.take(key, a_boolean, not on) is on:
            source.put(key, target, value)
            if name and (named := source.take(name, str)):
                source.put(name, f"tracking.{place}", named)
    source.drop_rest(allow_unknown)
    for override in overrides:
        key = override.partition("=")[0]
        if "." not in key:
            raise RecipeError(f"override '{override}': write it as section.key=value")
        if problems := apply_override(made.tree, override, made.origins):
            raise RecipeError(listed(problems, made.origins))
        made.notes[key] = ""
    made.check()
    return made


def _strategy(source: DsConfig) -> None:
    key, parts = f"{ZERO}stage", f"{ZERO}mics_shard_size"
    if isinstance(source.left.get(ZERO[:-1]), bool):  # as DeepSpeed spelled it in its first year
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
        note = f"ZeRO-{stage}"
        if device and stage == 1:
            sharding, note = ZERO_STAGES[2], "ZeRO-1 there; offloading needs sharded gradients"
        source.made.set("strategy.name", "fsdp", key)
        source.put(key, "strategy.sharding", sharding, note)
        if sharding == "HYBRID_SHARD":
            source.put(parts, "strategy.shard_size", group, "ranks per group")
    recomputed = source.below("activation_checkpointing.")
    used = next((key for key in recomputed if source.left[key] not in (None, False, 0)), None)
    if used:
        note = "the model's own code decides there; selective costs less time"
        source.put(used, "strategy.activation_checkpointing", "full", note)


def _offload(source: DsConfig, stage: int) -> str:
    """Where DeepSpeed would put optimizer state or parameters: "", "cpu" or "nvme". The one place
    that knows how a recipe spells that."""
    found: dict[str, str] = {}
    for what, old, least in (("optimizer", "cpu_offload", 1), ("param", "cpu_offload_param", 3)):
        for key, kind in ((f"{ZERO}offload_{what}.device", a_device), (ZERO + old, a_boolean)):
            device = source.take(key, kind, "none")
            if device not in ("none", "auto", False) and stage >= least:
                found[key] = "cpu" if device is True else device
    device = max(found.values(), default="")
    if device:
        note = "parameters, gradients and optimizer state"
        source.made.set("strategy.offload", device, next(iter(found)), note)
        source.settle(found, f"strategy.offload={device}", note)
    if device == "nvme":
        paths = [f"{ZERO}offload_{what}.nvme_path" for what in ("optimizer", "param")]
        given = {key: at for key in paths if (at := source.left.get(key)) not in (None, "auto")}
        origin, path = next(iter(given.items()), (paths[0], "/local_nvme"))
        source.made.set("strategy.offload_directory", path, origin, "a directory on a local disk")
        for key in paths:
            other = given.get(key, path) != path
            why = "one directory holds all that is offloaded" if other else ""
            source.became(key, f"strategy.offload_directory={path}", why)
    return device


def _parallelism(source: DsConfig, ranks: int | None) -> int | None:
    """Tensor and sequence parallelism; returns how many replicas of the model the ranks make."""
    together = 1
    for key, target, note in SIZES:
        size = source.take(key, a_whole_number, 0)
        if isinstance(size, int) and size > 1:
            together *= size
            if ranks and ranks % together:
                raise source.error(key, f"{ranks} ranks are no multiple of {together}")
            source.put(key, target, size, note)
    return ranks // together if ranks else None


def _precision(source: DsConfig) -> None:
    dtypes = {"bf16": "bf16", "fp16": "fp16", "amp": "fp16", "torch_autocast": "bf16"}
    cast = str(source.take("torch_autocast.dtype", str, "bfloat16")).removeprefix("torch.")
    if cast in ("float16", "half", "fp16"):
        dtypes["torch_autocast"] = "fp16"
    enabled = {name: source.take(f"{name}.enabled", a_boolean, False) for name in dtypes}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        raise source.error("fp16.enabled", "is true, and so is bf16.enabled; keep one")
    used = [name for wanted in (True, "auto") for name in dtypes if enabled[name] == wanted]
    dtype = dtypes[used[0]] if used else "fp32"
    if not used:
        source.put("bf16.enabled", "precision.dtype", "fp32", "neither bf16 nor fp16 there")
    elif enabled[used[0]] is True:
        source.put(f"{used[0]}.enabled", "precision.dtype", dtype)
    else:
        note = "auto: --bf16 or --fp16 of your script decides, or fp32 where it gave neither"
        source.made.set("precision.dtype", dtype, f"{used[0]}.enabled", note)
        source.settle(("bf16.enabled", "fp16.enabled"), f"precision.dtype={dtype}", note)
    fixed, power = "fp16.loss_scale", "fp16.initial_scale_power"
    scale, exponent = (_auto(source.take(key, a_number), None) for key in (fixed, power))
    if dtype == "fp16" and scale:
        note = "fixed there; here where the dynamic scale begins"
        source.put(fixed, "precision.loss_scale", scale, note)
    elif dtype == "fp16" and exponent is not None:
        source.put(power, "precision.loss_scale", 2.0**exponent)


def _optimizer(source: DsConfig) -> tuple[float | None, str]:
    """Its parameters; returns the learning rate, if there is one, and for an optimizer that is not
    known here why its learning rates mean nothing."""
    clip = source.take("gradient_clipping", a_number)
    legacy = source.take(PARAMS + "max_grad_norm", a_number)
    if None not in (clip, legacy) and clip != legacy:
        both = f"is {legacy}, but gradient_clipping is {clip}; keep one"
        raise source.error(PARAMS + "max_grad_norm", both)
    key = "gradient_clipping" if legacy is None else PARAMS + "max_grad_norm"
    note = "0 before DeepSpeed 0.19.3" if clip is legacy is None else ""
    source.move(key, "optimizer.clip_norm", a_number, 1.0, 1.0, note)
    kind = source.take("optimizer.type", str)
    if kind is None:
        return None, ""
    if kind.lower() not in OPTIMIZERS:
        foreign = (
            f"torch.optim has no {kind}, and its values are not AdamW's; a class of yours or of a "
            "package is named in optimizer.factory"
        )
        source.settle(source.below("optimizer."), "", foreign)
        return None, foreign
    target, value, usual, betas, eps, note = OPTIMIZERS[kind.lower()]
    source.put("optimizer.type", target, value, note)
    rates = (PARAMS + "muon_lr", PARAMS + "lr")
    rate = rates[value != "muon" or source.left.get(rates[0]) is None]
    lr: float = source.move(rate, "optimizer.lr", a_number, usual, 5e-5)
    if betas:
        source.move(PARAMS + "betas", "optimizer.betas", a_pair, betas, betas)
        source.move(PARAMS + "eps", "optimizer.eps", a_number, eps, eps)
    decay, note = 0.0, "matrices and embeddings only"
    if value == "adamw":
        modes = [source.take(PARAMS + mode, a_boolean) for mode in ("adam_w_mode", "adamw_mode")]
        if False not in modes:
            decay = 0.01 if source.take(PARAMS + "torch_adam", a_boolean) is True else 0.0
        elif source.take(PARAMS + "weight_decay", a_number) not in (None, 0, "auto"):
            note = "added to the gradient there (adam_w_mode: false), decoupled here"
    source.move(PARAMS + "weight_decay", "optimizer.weight_decay", a_number, decay, 0.0, note)
    if value == "muon":
        muon: dict[str, Any] = {"adjust_lr": "original"}
        if (momentum := source.take(PARAMS + "momentum", a_number)) is not None:
            muon["momentum"] = _auto(momentum, 0.95)
        source.made.set("optimizer.muon", muon, "optimizer.type")
        source.became(PARAMS + "momentum", "optimizer.muon.momentum")
        if isinstance(adam := source.take(PARAMS + "adam_lr", a_number), float):
            scale = f"{adam / lr:g}" if lr else "of your choice"
            why = f"one rate for all; optimizer.groups gives names of AdamW's an lr_scale: {scale}"
            source.became(PARAMS + "adam_lr", "", why)
    elif target == "optimizer.factory":
        given = [key for key in source.below(PARAMS) if source.left[key] not in (None, "auto")]
        options = {key.removeprefix(PARAMS): source.left[key] for key in given}
        if options:
            source.made.set("optimizer.factory_options", options, given[0])
        source.settle(given, "optimizer.factory_options")
        source.settle(source.below(PARAMS), "", f"the default of {value}")
    return lr, ""


def _schedule(source: DsConfig, peak: float | None, foreign: str) -> None:
    """Its shape, and its peak over that of AdamW; not over that of another optimizer."""
    kind = source.take("scheduler.type", str)
    shape = SHAPES.get((kind or "").lower())
    if not shape:
        why = f"{kind} has no counterpart; Perdure knows cosine, linear, wsd and constant"
        source.settle(source.below("scheduler."), "", why)
        note = why if kind else "no scheduler there; if your script makes one, say it here"
        source.made.set("schedule.name", "constant", "scheduler.type", note)
        return
    warmup, steps, low, high = (
        f"scheduler.params.{name}"
        for name in ("warmup_num_steps", "total_num_steps", "warmup_min_lr", "warmup_max_lr")
    )
    source.put("scheduler.type", "schedule.name", shape)
    warms = source.take(warmup, a_whole_number, 1000) not in (0, "auto")
    logarithmic = source.take("scheduler.params.warmup_type", str, "log") != "linear"
    note = "linear, where DeepSpeed's is logarithmic" if warms and logarithmic else ""
    source.move(warmup, "schedule.warmup_steps", a_whole_number, 1000, 0, note)
    if isinstance(total := source.take(steps, a_whole_number), int):
        source.put(steps, "run.steps", total)
    if shape == "cosine":
        key = "scheduler.params.cos_min_ratio"
        source.move(key, "schedule.min_lr_ratio", a_number, 1e-4, 0.0)
    top = source.take(high, a_number, None if shape != "linear" else 1e-3)
    has_peak = top is not None and shape != "cosine" and not foreign
    if has_peak and not (top == "auto" and peak is not None):
        top = 5e-5 if top == "auto" else top
        differs = peak is not None and top != peak
        note = f"the scheduler's peak; optimizer.params.lr is {peak:g}" if differs else ""
        source.put(high, "optimizer.lr", top, note)
    if shape == "linear":
        top = peak if top == "auto" else top
        end = _auto(source.take(low, a_number), 0.0, 0.0)
        note = "WarmupDecayLR ends at warmup_min_lr" + ("; warm-up starts from 0" if end else "")
        source.put(low, "schedule.min_lr_ratio", end / top if top else 0.0, note)
    if foreign:
        source.became(high, "", foreign)


def _batch(source: DsConfig, replicas: int | None) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, passes = (source.take(name, a_positive_number) for name in names)
    factors = [size for size in (micro, passes, replicas) if isinstance(size, int)]
    product, all_known = math.prod(factors), len(factors) == 3
    if isinstance(whole, int) and (whole % product or (all_known and whole != product)):
        wanted = ("" if all_known else "a multiple of ") + " x ".join(map(str, factors))
        raise source.error(names[0], f"{whole} is not {wanted}" + (" replicas" if replicas else ""))
    accumulated = _auto(passes, 1, 1)
    if micro is not None:
        source.put(names[1], "batch.micro_batch", _auto(micro, 8), "the most one rank holds")
    elif whole == "auto":
        micro = "auto"
        source.made.set("batch.micro_batch", 8, names[0], AUTO)
    elif isinstance(whole, int) and replicas:
        note = f"{whole} / ({accumulated} x {replicas} replicas)"
        source.made.set("batch.micro_batch", whole // (accumulated * replicas), names[1], note)
    if isinstance(whole, int):
        note = "" if micro or replicas else "--ranks would tell batch.micro_batch, too"
        source.put(names[0], "batch.global_batch", whole, note)
    elif replicas and micro is not None:
        sizes = _auto(micro, 8), accumulated, replicas
        note = "{} x {} x {} replicas".format(*sizes)
        source.made.set("batch.global_batch", math.prod(sizes), names[0], note)
        source.became(names[0], "batch.global_batch", note)
    source.became(names[2], "batch.global_batch", "accumulation is what the global batch needs")


def _auto(value: Any, auto: Any, missing: Any = None) -> Any:
    """`auto` for "auto", `missing` for None, else the value."""
    return auto if value == "auto" else missing if value is None else value
