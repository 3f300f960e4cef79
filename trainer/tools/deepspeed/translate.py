"""A DeepSpeed configuration (ds_config.json) → a recipe, with every key accounted for.

Each key is translated, or named as dropped with the reason; what a recipe needs and a ds_config
does not say (model, data, length of the run) stays open, as a line to fill in. "auto" is what
Hugging Face's Trainer puts there: the value of its TrainingArguments, whose default is taken here.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.recipe import ZERO_STAGES, RecipeError
from trainer.recipe.yaml_tree import apply_override, listed
from trainer.tools.deepspeed.config import (
    AUTO,
    Source,
    a_boolean,
    a_device,
    a_number,
    a_pair,
    a_positive_number,
    a_whole_number,
    read_config,
)
from trainer.tools.deepspeed.imported import Imported

ADAM = ("adam", "adamw", "onebitadam", "zerooneadam")
TORCH = {
    "Adadelta": 1.0, "Adafactor": 0.01, "Adagrad": 0.01, "Adamax": 2e-3, "ASGD": 0.01,
    "NAdam": 2e-3, "RAdam": 1e-3, "RMSprop": 0.01, "Rprop": 0.01, "SGD": 1e-3,
}  # fmt: skip
"""Optimizers of torch that DeepSpeed takes by their names, and their learning rates."""


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
    source = Source(str(path), read_config(path), made)
    source.drop_switched_off()
    _strategy(source)
    replicas = _parallelism(source, ranks)
    _precision(source)
    peak, foreign = _optimizer(source)
    _schedule(source, peak, foreign)
    _batch(source, replicas)
    _tracking(source)
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


def _strategy(source: Source) -> None:
    zero = "zero_optimization"
    if isinstance(source.left.get(zero), bool):  # as DeepSpeed spelled it in its first year
        source.left[f"{zero}.stage"] = int(source.left.pop(zero))
        source.spelled[f"{zero}.stage"] = zero
    stage = source.take(f"{zero}.stage", a_whole_number, 0)
    if stage not in ZERO_STAGES:
        raise source.error(f"{zero}.stage", f"should be 0, 1, 2 or 3, but it is {stage}")
    group = source.take(f"{zero}.mics_shard_size", a_whole_number, -1)
    device = _offload_device(source, stage)
    if stage == 0:
        source.put(f"{zero}.stage", "strategy.name", "ddp")
    else:
        sharding = "HYBRID_SHARD" if stage == 3 and group > 0 else ZERO_STAGES[stage]
        note = f"ZeRO-{stage}"
        if device and stage == 1:
            sharding, note = ZERO_STAGES[2], "ZeRO-1 there; offloading needs sharded gradients"
        source.made.set("strategy.name", "fsdp", f"{zero}.stage")
        source.put(f"{zero}.stage", "strategy.sharding", sharding, note)
        if sharding == "HYBRID_SHARD":
            source.put(f"{zero}.mics_shard_size", "strategy.shard_size", group, "ranks per group")
    source.became(f"{zero}.mics_shard_size", "", "MiCS is switched off, or needs stage 3")
    if device:
        _offload(source, device)
    _activations(source)
    if source.take("compile.enabled", a_boolean, False) is True:
        source.put("compile.enabled", "strategy.compile", True)
    elif source.take("compile.disable", a_boolean, True) is False:  # its older spelling
        source.put("compile.disable", "strategy.compile", True)


def _offload_device(source: Source, stage: int) -> str:
    """Where DeepSpeed would put optimizer state or parameters: "", "cpu" or "nvme"."""
    found = set()
    for what, old, least in (("optimizer", "cpu_offload", 1), ("param", "cpu_offload_param", 3)):
        keys = (f"zero_optimization.offload_{what}.device", f"zero_optimization.{old}")
        device = source.take(keys[0], a_device, "none")
        device = "cpu" if source.take(keys[1], a_boolean, False) is True else device
        if device in ("none", "auto"):
            source.settle(keys, "", "nothing is offloaded")
        elif stage < least:
            why = f"DeepSpeed offloads this from stage {least} on; stage {stage} keeps it"
            source.settle(keys, "", why)
        else:
            found.add(device)
    return max(found, default="")


def _offload(source: Source, device: str) -> None:
    """The one place that knows how a recipe spells offloading."""
    zero, note = "zero_optimization", "parameters, gradients and optimizer state"
    source.made.set("strategy.offload", device, f"{zero}.offload_optimizer.device", note)
    old = (f"{zero}.cpu_offload", f"{zero}.cpu_offload_param")
    devices, paths = (
        [f"{zero}.offload_{what}.{key}" for what in ("optimizer", "param")]
        for key in ("device", "nvme_path")
    )
    source.settle([*devices, *old], f"strategy.offload={device}", note)
    if device == "nvme":
        given = [key for key in paths if source.left.get(key) not in (None, "auto")]
        origin = next(iter(given), paths[0])
        path = source.left[origin] if given else "/local_nvme"
        source.made.set("strategy.offload_directory", path, origin, "a directory on a local disk")
        for key in paths:
            other = key in given and source.left[key] != path
            why = "one directory holds all that is offloaded" if other else ""
            source.became(key, f"strategy.offload_directory={path}", why)
    source.settle(paths, "", "nothing is offloaded to it")


def _activations(source: Source) -> None:
    settings = {k: v for k, v in source.left.items() if k.startswith("activation_checkpointing.")}
    used = next((key for key, value in settings.items() if value not in (None, False, 0)), None)
    if used:
        note = "the model's own code decides there; selective costs less time"
        source.put(used, "strategy.activation_checkpointing", "full", note)


def _parallelism(source: Source, ranks: int | None) -> int | None:
    """Tensor and sequence parallelism; returns how many replicas of the model the ranks make."""
    together = 1
    for key, target, note in (
        ("tensor_parallel.autotp_size", "strategy.tp", ""),
        ("sequence_parallel_size", "strategy.cp", "Ulysses there, a ring here"),
    ):
        size = source.take(key, a_whole_number, 0)
        if isinstance(size, int) and size > 1:
            together *= size
            if ranks and ranks % together:
                raise source.error(key, f"{ranks} ranks are no multiple of {together}")
            source.put(key, target, size, note)
        source.became(key, "", "1 or less: not used")
    return ranks // together if ranks else None


def _precision(source: Source) -> None:
    dtypes = {"bf16": "bf16", "fp16": "fp16", "amp": "fp16", "torch_autocast": "bf16"}
    cast = str(source.take("torch_autocast.dtype", str, "bfloat16")).removeprefix("torch.")
    if cast in ("float16", "half", "fp16"):
        dtypes["torch_autocast"] = "fp16"
    enabled = {name: source.take(f"{name}.enabled", a_boolean, False) for name in dtypes}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        raise source.error("fp16.enabled", "is true, and so is bf16.enabled; keep one")
    chosen = next((name for name, on in enabled.items() if on is True), "")
    auto = next((name for name, on in enabled.items() if on == "auto"), "")
    dtype = dtypes.get(chosen or auto, "fp32")
    if chosen:
        source.put(f"{chosen}.enabled", "precision.dtype", dtype)
    elif auto:
        note = "auto: --bf16 or --fp16 of your script decides, or fp32 where it gave neither"
        source.made.set("precision.dtype", dtype, f"{auto}.enabled", note)
        source.settle(("bf16.enabled", "fp16.enabled"), f"precision.dtype={dtype}", note)
    else:
        source.put("bf16.enabled", "precision.dtype", "fp32", "neither bf16 nor fp16 there")
    source.settle([f"{name}.enabled" for name in enabled], "", f"precision.dtype is {dtype}")
    fixed, power = "fp16.loss_scale", "fp16.initial_scale_power"
    scale, exponent = source.take(fixed, a_number, 0), source.take(power, a_number, "auto")
    if dtype == "fp16" and scale not in (0, "auto"):
        note = "fixed there; here where the dynamic scale begins"
        source.put(fixed, "precision.loss_scale", float(scale), note)
        source.became(power, "", "loss_scale is given")
    elif dtype == "fp16" and exponent != "auto":
        source.put(power, "precision.loss_scale", 2.0**exponent)
    source.became(fixed, "", "the scale is dynamic")
    source.became(power, "", f"precision.dtype is {dtype}")


def _optimizer(source: Source) -> tuple[float | None, str]:
    """Its parameters; returns the learning rate, if there is one, and for an optimizer that is not
    known here why its learning rates mean nothing."""
    params = "optimizer.params."
    clip = source.take("gradient_clipping", a_number, None)
    legacy = source.take(params + "max_grad_norm", a_number, None)
    if None not in (clip, legacy) and clip != legacy:
        both = f"is {legacy}, but gradient_clipping is {clip}; keep one"
        raise source.error(params + "max_grad_norm", both)
    key = "gradient_clipping" if legacy is None else params + "max_grad_norm"
    note = "0 before DeepSpeed 0.19.3" if clip is legacy is None else ""
    source.move(key, "optimizer.clip_norm", a_number, 1.0, 1.0, note)
    source.became("gradient_clipping", "optimizer.clip_norm")
    kind = source.take("optimizer.type", str, None)
    if kind is None:
        source.became("optimizer.type", "", "null")
        return None, ""
    if kind.lower() == "muon":
        return _muon(source), ""
    if named := next((name for name in TORCH if name.lower() == kind.lower()), None):
        return _of_torch(source, named), ""
    if kind.lower() not in ADAM:
        foreign = (
            f"torch.optim has no {kind}, and its values are not AdamW's; a class of yours or of a "
            "package is named in optimizer.factory"
        )
        source.settle(source.below("optimizer."), "", foreign)
        return None, foreign
    compressed = "; gradients are sent whole" if kind.lower() in ADAM[2:] else ""
    source.became("optimizer.type", "optimizer", f"AdamW{compressed}")
    lr = source.move(params + "lr", "optimizer.lr", a_number, 1e-3, 5e-5)
    source.move(params + "betas", "optimizer.betas", a_pair, [0.9, 0.999], [0.9, 0.999])
    source.move(params + "eps", "optimizer.eps", a_number, 1e-8, 1e-8)
    modes = [params + name for name in ("adam_w_mode", "adamw_mode")]
    decoupled = all(source.take(mode, a_boolean, True) is not False for mode in modes)
    torch_adam = source.take(params + "torch_adam", a_boolean, False) is True
    default = 0.01 if torch_adam and decoupled else 0.0
    note = "matrices and embeddings only"
    if not decoupled and source.take(params + "weight_decay", a_number, default) not in (0, "auto"):
        note = "added to the gradient there (adam_w_mode: false), decoupled here"
    source.move(params + "weight_decay", "optimizer.weight_decay", a_number, default, 0.0, note)
    source.settle(modes, "", "weight decay is always decoupled")
    for name, usual, same, other in (
        ("bias_correction", True, "moments are corrected", "the first steps differ: "),
        ("amsgrad", False, "AdamW without the running maximum", "AMSGrad is not known: "),
    ):
        differs = source.take(params + name, a_boolean, usual) is not usual
        target, why = ("", other + same) if differs else ("optimizer", same)
        source.became(params + name, target, why)
    return lr, ""


def _of_torch(source: Source, name: str) -> float:
    """An optimizer of torch.optim as a factory; returns the learning rate."""
    params = "optimizer.params."
    source.put("optimizer.type", "optimizer.factory", f"torch.optim:{name}")
    lr: float = source.move(params + "lr", "optimizer.lr", a_number, TORCH[name], 5e-5)
    decayed = "matrices and embeddings only"
    source.move(params + "weight_decay", "optimizer.weight_decay", a_number, 0.0, 0.0, decayed)
    given = [key for key in source.below(params) if source.left[key] not in (None, "auto")]
    options = {key.removeprefix(params): source.left[key] for key in given}
    if options:
        source.made.set("optimizer.factory_options", options, given[0])
    source.settle(given, "optimizer.factory_options")
    source.settle(source.below(params), "", f"torch's default of {name}")
    return lr


def _muon(source: Source) -> float:
    """Muon, with AdamW for the rest; returns the learning rate."""
    params = "optimizer.params."
    source.put("optimizer.type", "optimizer.name", "muon", "the adjustment is the original one")
    muon: dict[str, Any] = {"adjust_lr": "original"}
    if (momentum := source.take(params + "momentum", a_number)) is not None:
        muon["momentum"] = momentum if momentum != "auto" else 0.95
    source.made.set("optimizer.muon", muon, "optimizer.type")
    source.became(params + "momentum", "optimizer.muon.momentum")
    source.became(params + "ns_method", "", "the iteration of torch.optim.Muon")
    own = params + ("muon_lr" if source.left.get(params + "muon_lr") is not None else "lr")
    lr: float = source.move(own, "optimizer.lr", a_number, 0.02, 5e-5)
    source.became(params + "lr", "", "muon_lr is given")
    adam = source.take(params + "adam_lr", a_number)
    if isinstance(adam, float):
        scale = f"{adam / lr:g}" if lr else "of your choice"
        why = f"one rate for all; optimizer.groups gives names of AdamW's an lr_scale: {scale}"
        source.became(params + "adam_lr", "", why)
    source.move(params + "betas", "optimizer.betas", a_pair, [0.9, 0.95], [0.9, 0.95])
    source.move(params + "eps", "optimizer.eps", a_number, 1e-10, 1e-10)
    decayed = "matrices and embeddings only"
    source.move(params + "weight_decay", "optimizer.weight_decay", a_number, 0.0, 0.0, decayed)
    return lr


def _schedule(source: Source, peak: float | None, foreign: str) -> None:
    """Its shape, and its peak over that of AdamW; not over that of another optimizer."""
    kind = source.take("scheduler.type", str, None)
    shapes = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    shape = shapes.get((kind or "").lower())
    if not shape:
        why = f"{kind} has no counterpart; Perdure knows cosine, linear, wsd and constant"
        source.settle(source.below("scheduler."), "", why)
        note = why if kind else "no scheduler there; if your script makes one, say it here"
        source.made.set("schedule.name", "constant", "scheduler.type", note)
        return
    params = "scheduler.params."
    source.put("scheduler.type", "schedule.name", shape)
    warmup = source.take(params + "warmup_num_steps", a_whole_number, 1000)
    logarithmic = source.take(params + "warmup_type", str, "log") != "linear"
    why = "linear, where DeepSpeed's is logarithmic" if logarithmic and warmup != "auto" else ""
    why = why if warmup else ""
    source.move(params + "warmup_num_steps", "schedule.warmup_steps", a_whole_number, 1000, 0, why)
    source.became(params + "warmup_type", "" if why else "schedule", why or "warm-up is linear")
    steps = source.take(params + "total_num_steps", a_whole_number, None)
    if isinstance(steps, int):
        source.put(params + "total_num_steps", "run.steps", steps)
    source.became(params + "total_num_steps", "run.steps", "auto: the length of your run")
    if shape == "cosine":
        source.move(params + "cos_min_ratio", "schedule.min_lr_ratio", a_number, 1e-4, 0.0)
    top = source.take(params + "warmup_max_lr", a_number, None if shape != "linear" else 1e-3)
    has_peak = top is not None and shape != "cosine" and not foreign
    if has_peak and not (top == "auto" and peak is not None):
        top = 5e-5 if top == "auto" else top
        differs = peak is not None and top != peak
        note = f"the scheduler's peak; optimizer.params.lr is {peak:g}" if differs else ""
        source.put(params + "warmup_max_lr", "optimizer.lr", top, note)
    start = source.take(params + "warmup_min_lr", a_number, 0.0)
    if shape == "linear":
        top = peak if top == "auto" else top
        end = 0.0 if start == "auto" else start
        note = "WarmupDecayLR ends at warmup_min_lr" + ("; warm-up starts from 0" if end else "")
        source.put(
            params + "warmup_min_lr", "schedule.min_lr_ratio", end / top if top else 0.0, note
        )
    source.became(params + "warmup_max_lr", "optimizer.lr" if has_peak else "", foreign)
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        from_zero = source.take(params + name, a_number, 0.0) in (0, "auto")
        why = "warm-up starts from 0" if from_zero else "but warm-up starts from 0"
        source.became(params + name, "schedule" if from_zero else "", why)


def _batch(source: Source, replicas: int | None) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, passes = (source.take(name, a_positive_number, None) for name in names)
    factors = [size for size in (micro, passes, replicas) if isinstance(size, int)]
    product, all_known = math.prod(factors), len(factors) == 3
    if isinstance(whole, int) and (whole % product or (all_known and whole != product)):
        wanted = ("" if all_known else "a multiple of ") + " x ".join(map(str, factors))
        raise source.error(names[0], f"{whole} is not {wanted}" + (" replicas" if replicas else ""))
    if micro is not None:
        source.put(names[1], "batch.micro_batch", _auto(micro, 8), "the most one rank holds")
    elif whole == "auto":
        micro = "auto"
        source.made.set("batch.micro_batch", 8, names[0], AUTO)
    elif isinstance(whole, int) and replicas:
        each = whole // (_auto(passes, 1, 1) * replicas)
        note = f"{whole} / ({_auto(passes, 1, 1)} x {replicas} replicas)"
        source.made.set("batch.micro_batch", each, names[1], note)
    if isinstance(whole, int):
        note = "" if micro or replicas else "--ranks would tell batch.micro_batch, too"
        source.put(names[0], "batch.global_batch", whole, note)
    elif replicas and micro is not None:
        total = _auto(micro, 8) * _auto(passes, 1, 1) * replicas
        note = f"{_auto(micro, 8)} x {_auto(passes, 1, 1)} x {replicas} replicas"
        source.made.set("batch.global_batch", total, names[0], note)
    asked = "" if replicas else "; tell --ranks, or fill it in"
    source.became(names[0], "batch.global_batch", f"micro-batch x accumulation x replicas{asked}")
    source.became(names[2], "batch.global_batch", "accumulation is what the global batch needs")


def _tracking(source: Source) -> None:
    for tracker, value, name, target in (
        ("tensorboard", True, "job_name", "name"),
        ("wandb", "online", "project", "project"),
    ):
        if source.take(f"{tracker}.enabled", a_boolean, False) is True:
            source.put(f"{tracker}.enabled", f"tracking.{tracker}", value)
            named = source.take(f"{tracker}.{name}", str, None)
            if named:
                source.put(f"{tracker}.{name}", f"tracking.{target}", named)


def _auto(value: Any, auto: Any, missing: Any = None) -> Any:
    """`auto` for "auto", `missing` for None, else the value."""
    return auto if value == "auto" else missing if value is None else value
