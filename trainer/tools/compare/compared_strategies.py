"""Turns a strategy's name into a recipe that trains with it for a few steps. Imports no torch.

[Note: steps of a comparison] A run has four kinds of steps, in this order: warm-up, timed, after
the save, traced. Speed is measured over the timed steps. A checkpoint begins after the last timed
step, and the steps after the save show its cost. The traced steps come last, because torch's
profiler (trainer/run/profile.py) slows them down.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.recipe import Recipe, RecipeError, StrategySection, load_recipe
from trainer.recipe.strategies import dividing, sizes

WARM_UP, AFTER_SAVE, MEASURED = 5, 4, 3
"""Numbers of warm-up, after-save and traced steps; see [Note: steps of a comparison]."""
LOG_EVERY = 5

_FSDP = "strategy.name=fsdp"
BASES: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy.name=ddp", "strategy.sharding=null"),
    "zero1": (_FSDP, "strategy.sharding=OPTIMIZER_STATE"),
    "zero2": (_FSDP, "strategy.sharding=SHARD_GRAD_OP"),
    "zero3": (_FSDP, "strategy.sharding=FULL_SHARD"),
    "hybrid": (_FSDP, "strategy.sharding=HYBRID_SHARD"),
    "no_shard": (_FSDP, "strategy.sharding=NO_SHARD"),
}
MODIFIERS: dict[str, tuple[str, ...]] = {
    "offload": ("strategy.offload=cpu",),
    "full_ac": ("strategy.activation_checkpointing=full",),
    "selective_ac": ("strategy.activation_checkpointing=selective",),
    "compile": ("strategy.compile=true",),
    "sp": ("strategy.sequence_parallel=true",),
    "gpipe": ("strategy.pp_schedule=gpipe",),
    "interleaved": ("strategy.pp_schedule=interleaved_1f1b", "strategy.pp_stages_per_rank=2"),
    "zero_bubble": ("strategy.pp_schedule=zero_bubble",),
}
SIZES = tuple(sizes(StrategySection()))
LAYOUT = re.compile(rf"({'|'.join(SIZES)})([1-9]\d*)")
"""Pattern of a modifier that sets how many ranks share a computation: tp2, pp4."""
LAYOUT_BASE = "zero2"
"""Base of a name that begins with a layout; ZeRO-2 gathers weights only once per step."""
_PLAIN = (
    "strategy.zero=null",
    "strategy.shard_size=null",
    "strategy.offload=none",
    "strategy.offload_directory=null",
    "strategy.activation_checkpointing=none",
    "strategy.sequence_parallel=false",
    "strategy.pp_schedule=1f1b",
    "strategy.pp_stages_per_rank=1",
    *(f"strategy.{key}=1" for key in SIZES),
)
DEFAULT = (
    *("ddp", "zero1", "zero2", "zero3", "hybrid", "zero2+offload", "zero3+offload"),
    *("ddp+full_ac", "zero3+selective_ac", "zero3+full_ac"),
)


@dataclass(frozen=True)
class ComparedStrategy:
    """A strategy, and the recipe that runs it."""

    name: str
    arguments: tuple[str, ...]
    """Recipe file and overrides."""
    recipe: Recipe | None
    problem: str = ""
    """Why the strategy cannot run; "" if it can."""


def candidate(
    name: str, recipe_path: str, overrides: Sequence[str], ranks: int, steps: int, run: Path
) -> ComparedStrategy:
    """Build the recipe of a named strategy for a number of ranks. A name is a key of BASES, with
    modifiers after "+": keys of MODIFIERS, or words that LAYOUT matches. Such a word may also come
    first. Raises RecipeError if the name is unknown, or the recipe is wrong."""
    words = name.split("+")
    base, modifiers = (words[0], words[1:]) if words[0] in BASES else (LAYOUT_BASE, words)
    layout = {m[1]: int(m[2]) for m in map(LAYOUT.fullmatch, modifiers) if m}
    known = all(word in MODIFIERS or LAYOUT.fullmatch(word) for word in modifiers)
    if not known or (words[0] != base and not LAYOUT.fullmatch(words[0])):
        raise RecipeError(
            f"--strategies: {name!r} is unknown; use one of {', '.join(BASES)}, or "
            f"{', '.join(f'{key}2' for key in SIZES)} (any number), and any of "
            f"{', '.join(f'+{key}2' for key in SIZES)}, +{', +'.join(MODIFIERS)} after it"
        )
    plain = load_recipe(recipe_path, overrides)
    strategy = [*BASES[base], *_PLAIN, *(f"strategy.{key}={size}" for key, size in layout.items())]
    strategy += [override for word in modifiers for override in MODIFIERS.get(word, ())]
    if base == "hybrid":
        cut = (module.KEYS[0] for module in dividing("layers", "stages"))
        together = math.prod(layout.get(key, 1) for key in cut)
        sharing = ranks // together
        size = next((size for size in range(sharing // 2, 1, -1) if sharing % size == 0), None)
        if size is None:
            why = (
                f"needs to divide the {sharing} rank(s) that can share parameters into several "
                f"groups of several ranks; use --nproc {4 * together}"
            )
            return ComparedStrategy(name, (), None, why)
        strategy.append(f"strategy.shard_size={size}")
    arguments = (recipe_path, *overrides, *_settings(plain, steps, run), *strategy)
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
    except RecipeError as error:
        why = re.sub(r"^override '[^']*': ", "", str(error), flags=re.MULTILINE)
        return ComparedStrategy(name, arguments, None, "; ".join(why.splitlines()))
    return ComparedStrategy(name, arguments, recipe)


def _settings(recipe: Recipe, steps: int, run: Path) -> list[str]:
    """Overrides that turn any recipe into a short run of its own."""
    save_at = WARM_UP + steps
    last = save_at + AFTER_SAVE + MEASURED
    settings = [f"run.dir={run}", f"run.steps={last}", "run.epochs=0", "run.samples=[]"]
    settings += [f"run.log_every={LOG_EVERY}", "run.evaluate_every=0", "run.stop_after=0"]
    profile = f"profile_steps: {MEASURED}, profile_after: {last - MEASURED}"
    settings += [f"tracking={{wandb: off, {profile}}}", "elastic.snapshot_every=0"]
    settings += ["checkpoint.directory=null", f"checkpoint.every={save_at}", "checkpoint.keep=1"]
    settings += [f"schedule.warmup_steps={min(recipe.schedule.warmup_steps, last - 1)}"]
    if recipe.schedule.name == "wsd":
        settings += ["schedule.name=constant", "schedule.decay_steps=0"]
    return settings
