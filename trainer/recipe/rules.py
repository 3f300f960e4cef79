"""Combinations of recipe settings that cannot work, and what to change."""

import difflib
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from trainer.recipe import strategies
from trainer.recipe.architecture import bundled_families
from trainer.recipe.factory import PATTERN
from trainer.recipe.sections import Recipe, TrackingSection
from trainer.recipe.stages import stage_contradictions
from trainer.recipe.value_types import parse_condition, wrong_paths
from trainer.recipe.yaml_tree import RecipeError


def contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, problem and remedy) for settings that cannot work together."""
    run, model, schedule = recipe.run, recipe.model, recipe.schedule
    yield from wrong_paths(recipe)
    if recipe.data.seq_len < 1:
        yield "data.seq_len", f"must be at least 1, but it is {recipe.data.seq_len}"
    if not recipe.data.sources and not recipe.data.factory:
        yield "data.sources", "the list is empty; name at least one prepared data set"
    kinds = ("architecture", "init_from", "factory")
    given = [key for key in kinds if getattr(model, key)]
    # With a factory, init_from may name weights: KGAT, for instance, starts from those of BPR-MF.
    if len(given) != 1 and given != ["init_from", "factory"]:
        shown = " and ".join(given) or "none of them"
        yield "model", f"give exactly one of {', '.join(kinds)}; found {shown}"
    for key, name in recipe.own_code.items():
        if not PATTERN.fullmatch(name):
            what = "NAME" if key == "model.family" else "function"
            yield key, f"write it as package.module:{what}, not {name!r}"
    if model.family and model.factory:
        yield "model.family", "only for model.architecture and model.init_from; remove it"
    known = bundled_families()
    if model.architecture and not model.family and model.architecture.model_type not in known:
        shown, close = model.architecture.model_type, f"{', '.join(known)} come with Perdure"
        for meant in difflib.get_close_matches(shown, known, n=1, cutoff=0.5):
            close = f"did you mean {meant!r}?"
        yield (
            "model.architecture.model_type",
            f"no family {shown!r} ({close}); a family of your own is named in model.family",
        )
    yield from _adapter_contradictions(recipe)
    yield from _objective_contradictions(recipe)
    yield from strategies.check(recipe)
    yield from _balance_contradictions(recipe)
    yield from _matmul_contradictions(recipe)
    yield from _tracking_contradictions(recipe.tracking)
    yield from _own_data_contradictions(recipe)
    yield from stage_contradictions(recipe)
    if recipe.data.cache and not any("://" in source.path for source in recipe.data.sources):
        yield "data.cache", "only for data.sources in an object store; remove it"
    yield from _optimizer_contradictions(recipe)
    if model.implementation != "auto":
        yield from _implementation_contradictions(recipe)
    if model.attention != "auto" and model.factory:
        yield "model.attention", "only for model.architecture and model.init_from; remove it"
    if model.factory_options and not model.factory:
        yield "model.factory_options", "only for a model of model.factory; remove it"
    yield from _witness_contradictions(recipe)
    if recipe.elastic.snapshot_every and not recipe.checkpoint.slots:
        yield "elastic.snapshot_every", "copies to slots in memory; set checkpoint.slots to 1 or 2"
    yield from _samples_contradictions(recipe)
    lengths = [key for key in ("steps", "epochs") if getattr(run, key)]
    if len(lengths) != 1:
        shown = "both; set one to 0" if lengths else "neither"
        yield "run.steps", f"give exactly one of run.steps and run.epochs; found {shown}"
    # A length in epochs is converted to steps once the data is open, and checked by `counted`.
    elif run.steps:
        yield from length_contradictions(recipe, f"run.steps={run.steps}")
    if schedule.name != "wsd" and schedule.decay_steps:
        yield (
            "schedule.decay_steps",
            f"only for schedule.name: wsd, but it is {schedule.name}; remove it",
        )
    if run.stop_after and not run.evaluate_every:
        yield "run.stop_after", "counts validation passes; set run.evaluate_every"


def length_contradictions(recipe: Recipe, length: str) -> Iterator[tuple[str, str]]:
    """Yield (key, problem and remedy) for settings that do not fit `run.steps`. `length`: the
    length of the run in words, for messages."""
    steps, schedule, after = recipe.run.steps, recipe.schedule, recipe.tracking.profile_after
    if recipe.tracking.profile_steps and after >= steps:
        yield "tracking.profile_after", f"{after} leaves none of {length} to profile; lower it"
    warmup, decay = schedule.lengths(steps)
    if warmup >= steps and warmup > 0:
        yield "schedule.warmup_steps", f"{warmup} is not below {length}; lower it"
    elif schedule.name == "wsd" and not 0 < decay <= steps - warmup:
        yield (
            "schedule.decay_steps",
            f"wsd needs 1 to {steps - warmup} steps of decay ({length} - warmup_steps), but "
            f"decay_steps is {decay}",
        )


def counted(recipe: Recipe, sequences: int) -> Recipe:
    """Return the recipe with `run.steps` computed from `run.epochs`, if set, for epochs of so many
    `sequences`. Raises RecipeError if the run is too short for another key."""
    run = recipe.run
    if not run.epochs:
        return recipe
    samples = Fraction(repr(run.epochs)) * sequences  # exact: a float product would round
    steps = math.ceil(samples / recipe.batch.global_batch)
    recipe = replace(recipe, run=replace(run, steps=steps))
    length = f"the {steps} step(s) of run.epochs={run.epochs:g}"
    problems = [f"{key}: {what}" for key, what in length_contradictions(recipe, length)]
    if problems:
        raise RecipeError("\n".join(problems))
    return recipe


def _witness_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not recipe.elastic.witness:
        return
    if not strategies.exact.used(recipe):
        yield (
            "elastic.witness",
            "compares gradients bit by bit, which only exact mode makes comparable; set "
            "run.determinism=exact, or elastic.witness=0",
        )
    for name, ranks in strategies.sizes(recipe.strategy).items():
        if ranks > 1:
            yield (
                f"strategy.{name}",
                "with elastic.witness each rank must compute whole micro-batches alone; set "
                f"strategy.{name}=1, or elastic.witness=0",
            )
    if strategies.offload.used(recipe.strategy):
        yield (
            "strategy.offload",
            "does not work with elastic.witness yet; set none, or elastic.witness=0",
        )
    if recipe.batch.balance == "speed":
        yield (
            "batch.balance",
            "speed gives ranks unequal numbers of micro-batches, which elastic.witness cannot "
            "compare yet; set batch.balance=equal, or elastic.witness=0",
        )


def _samples_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    prompts, model = recipe.run.samples, recipe.model
    if not prompts:
        return
    if len(set(prompts)) < len(prompts):
        yield "run.samples", "has a prompt twice; remove one"
    if model.factory:
        yield (
            "run.samples",
            "only for model.architecture and model.init_from, as `perdure generate` cannot run a "
            "model of model.factory; remove it",
        )
    if model.adapter and "://" in (model.init_from or ""):
        yield (
            "run.samples",
            f"needs the model under the adapter on a disk, not at {model.init_from}; fetch it, and "
            "name its directory in model.init_from",
        )


def _implementation_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    model = recipe.model
    if not model.init_from or model.factory:
        yield "model.implementation", "only for the model of model.init_from; remove it"
    elif model.family and model.implementation == "transformers":
        yield (
            "model.family",
            "only for models that Perdure computes; remove it, or set model.implementation=auto",
        )


def _adapter_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    model, adapter, strategy = recipe.model, recipe.model.adapter, recipe.strategy
    if adapter is None:
        return
    precision = recipe.precision
    if model.factory:
        yield "model.adapter", "a model of model.factory has no adapters yet; remove it"
    elif not model.init_from:
        yield (
            "model.adapter",
            "is trained over published weights; name their directory in model.init_from",
        )
    if adapter.targets == ():
        yield "model.adapter.targets", "the list is empty; name linear layers, or all-linear"
    if adapter.base == "bf16" and precision.dtype != "bf16":
        yield (
            "model.adapter.base",
            f"bf16 would round the frozen weights for precision.dtype={precision.dtype}; set "
            "model.adapter.base=fp32, or precision.dtype=bf16",
        )
    if adapter.dropout and strategies.together(strategy) > 1:
        yield (
            "model.adapter.dropout",
            "draws other numbers on ranks that share a sample (strategy.tp, pp, cp); set 0",
        )
    if precision.matmul:
        yield "precision.matmul", "does not work with model.adapter yet; remove it"
    if precision.master != "fp32":
        yield (
            "precision.master",
            "an adapter is trained in float32, and model.adapter.base is the format of the frozen "
            "weights; set precision.master=fp32",
        )


def _objective_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    model, objective = recipe.model, recipe.objective
    if not objective.compares:
        for key in ("beta", "gamma", "sft_weight"):
            if getattr(objective, key) is not None:
                yield f"objective.{key}", "only for dpo, ipo, simpo and orpo; remove it"
        return
    name = objective.name
    if objective.gamma is not None and name != "simpo":
        yield "objective.gamma", f"only for objective.name: simpo, but it is {name}; remove it"
    if objective.referenced and not model.init_from:
        yield (
            "objective.name",
            f"{name} compares with published weights; name their directory in model.init_from",
        )
    for key, chosen, problem in (
        ("model.factory", bool(model.factory), "finds no output head in its model; remove it"),
        ("data.factory", bool(recipe.data.factory), "needs prepared pairs; name data.sources"),
        ("data.pack", recipe.data.pack == "stream", "needs whole pairs; set auto"),
        ("data.document_mask", not recipe.data.document_mask, "needs answers apart; set true"),
    ):
        if chosen:
            yield key, f"objective.name={name} {problem}"


def _balance_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy = recipe.strategy
    if recipe.batch.balance == "equal":
        return
    if strategies.exact.used(recipe) and recipe.gathers_twice:
        yield (
            "batch.balance",
            f"speed gains nothing with {strategies.sharding.name(recipe)} in exact mode: ranks "
            "wait for the slowest in each pass, whose size is fixed; use "
            "strategy.sharding=SHARD_GRAD_OP, strategy.name=ddp, or batch.balance=equal",
        )
    if strategies.ep.ranks(strategy) > 1:
        yield (
            "batch.balance",
            "speed gains nothing with strategy.ep, whose ranks wait in each block; set equal",
        )
    if strategies.pp.ranks(strategy) > 1 and strategies.pp.shape(strategy)[0] == "gpipe":
        yield (
            "strategy.pp_schedule",
            "gpipe keeps the activations of all passes, so batch.balance=speed would need more "
            "memory on fast ranks; use 1f1b, or batch.balance=equal",
        )


def _matmul_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.precision.matmul is None:
        return
    matmul, length = recipe.precision.matmul, recipe.data.seq_len
    if recipe.precision.dtype != "bf16":
        yield "precision.dtype", f"precision.matmul={matmul} goes with bf16; set bf16"
    # The lengths of samples of data.factory are unknown before the data is opened.
    if matmul == "mxfp8" and not recipe.data.factory:
        multiple = 32 * strategies.cp.chunks(recipe.strategy)
        if length % multiple:
            yield (
                "data.seq_len",
                f"{length} is no multiple of {multiple}, which mxfp8 needs; change data.seq_len",
            )


def _tracking_contradictions(tracking: TrackingSection) -> Iterator[tuple[str, str]]:
    for key, names in (("sinks", tracking.sinks), ("hooks", tracking.hooks)):
        for name in names:
            if not PATTERN.fullmatch(name):
                yield f"tracking.{key}", f"write it as package.module:function, not {name!r}"
        if len(set(names)) < len(names):
            yield f"tracking.{key}", "names a function twice; remove one of the two"
    for number, alert in enumerate(tracking.alerts):
        key = f"tracking.alerts.{number}"
        if parse_condition(alert.when) is None:
            yield (
                f"{key}.when",
                f"{alert.when!r} is no condition; write loss > 8, failure, or no step for 10 min",
            )
        if not (alert.run or alert.post):
            yield key, "has no action; give run: COMMAND, or post: URL"
        if alert.post and not alert.post.startswith(("http://", "https://", "env:")):
            yield f"{key}.post", f"{alert.post!r} is no webhook; write https://…, or env:NAME"
    if tracking.prometheus and not tracking.prometheus.endswith(".prom"):
        yield (
            "tracking.prometheus",
            f"{tracking.prometheus} does not end in .prom, as the collector needs; rename the file",
        )


def _own_data_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    data = recipe.data
    if data.pack != "auto" and data.factory:
        yield "data.pack", "only for data.sources; remove it"
    if data.factory_options and not data.factory:
        yield "data.factory_options", "only for data of data.factory; remove it"
    if not data.factory:
        return
    if data.sources or data.seq_len != 1:
        yield "data.factory", "excludes data.sources and data.seq_len; remove them"
    if recipe.batch.micro_batch == "auto":
        yield "batch.micro_batch", "data.factory cannot be planned; name a number instead of auto"


def _optimizer_contradictions(recipe: Recipe) -> Iterator[tuple[str, str]]:
    optimizer, schedule = recipe.optimizer, recipe.schedule
    if optimizer.factory_options and not optimizer.factory:
        yield "optimizer.factory_options", "only for an optimizer of optimizer.factory; remove it"
    if optimizer.muon and optimizer.name != "muon":
        yield (
            "optimizer.muon",
            f"only for optimizer.name: muon, but it is {optimizer.name}; remove it",
        )
    if optimizer.factory and optimizer.name != "adamw":
        yield "optimizer.name", "excludes optimizer.factory; give one of the two"
    if optimizer.state_dtype != "fp32" and optimizer.factory:
        yield (
            "optimizer.state_dtype",
            "only for optimizer.name: adamw and muon, not for optimizer.factory; remove it",
        )
    stochastic = recipe.precision.master == "bf16_stochastic"
    if stochastic and optimizer.factory:
        yield (
            "optimizer.factory",
            "with precision.master=bf16_stochastic: would lose small changes of the weights, as it "
            "does not round stochastically; use optimizer.name=adamw or muon, or "
            "precision.master=fp32",
        )
    if stochastic and recipe.strategy.reduce_every_pass:
        yield (
            "strategy.reduce_every_pass",
            "with precision.master=bf16_stochastic: would add up the gradients of several passes "
            "in bf16; set false, or precision.master=fp32",
        )
    if schedule.factory_options and not schedule.factory:
        yield "schedule.factory_options", "only for a schedule of schedule.factory; remove it"
    # A key that has its default counts as not given.
    shape = {"name": "cosine", "warmup_steps": 0, "decay_steps": 0, "min_lr_ratio": 0.1}
    if schedule.factory and any(getattr(schedule, key) != value for key, value in shape.items()):
        yield "schedule.factory", f"excludes {', '.join(shape)}; remove these, or the factory"
