"""What `perdure compare` runs: a strategy's name → the recipe that trains with it for a few steps.
Imports no torch.

[Note: steps of a comparison] Steps are, in this order: warm-up, timed, after the save, measured.
Speed is that of the timed steps alone. A checkpoint begins after the last of them; the steps that
follow tell what it cost. The measured ones, last, run under torch's profiler
(trainer/run/profile.py) and are slower for it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.recipe import Recipe, RecipeError, load_recipe

WARM_UP, AFTER_SAVE, MEASURED = 5, 4, 3
"""Steps; see [Note: steps of a comparison]."""
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
MODIFIERS: dict[str, str] = {
    "offload": "strategy.offload=cpu",
    "full_ac": "strategy.activation_checkpointing=full",
    "selective_ac": "strategy.activation_checkpointing=selective",
    "compile": "strategy.compile=true",
}
_PLAIN = (
    "strategy.zero=null",
    "strategy.shard_size=null",
    "strategy.offload=none",
    "strategy.offload_directory=null",
    "strategy.activation_checkpointing=none",
)
DEFAULT = (
    *("ddp", "zero1", "zero2", "zero3", "hybrid", "zero2+offload", "zero3+offload"),
    *("ddp+full_ac", "zero3+selective_ac", "zero3+full_ac"),
)


@dataclass(frozen=True)
class Candidate:
    """A strategy, and the recipe to run it with."""

    name: str
    arguments: tuple[str, ...]
    """Recipe file and overrides."""
    recipe: Recipe | None
    problem: str = ""
    """Why it cannot run."""


def candidate(
    name: str, recipe_path: str, overrides: Sequence[str], ranks: int, steps: int, run: Path
) -> Candidate:
    """The strategy of a name over a number of ranks.

    Raises:
        RecipeError: there is no such name, or the recipe is wrong whatever the strategy.
    """
    base, *modifiers = name.split("+")
    unknown = [word for word in modifiers if word not in MODIFIERS]
    if base not in BASES or unknown:
        raise RecipeError(
            f"--strategies: there is no {name!r}; it is one of {', '.join(BASES)}, and any of "
            f"+{', +'.join(MODIFIERS)} after it"
        )
    plain = load_recipe(recipe_path, overrides)
    if plain.strategy.tp > 1:
        raise RecipeError("strategy.tp: tensor parallelism cannot be compared yet; set 1")
    if plain.strategy.pp > 1:
        raise RecipeError("strategy.pp: pipeline parallelism cannot be compared yet; set 1")
    if plain.strategy.cp > 1:
        raise RecipeError("strategy.cp: context parallelism cannot be compared yet; set 1")
    if plain.strategy.ep > 1:
        raise RecipeError("strategy.ep: expert parallelism cannot be compared yet; set 1")
    strategy = [*BASES[base], *_PLAIN, *(MODIFIERS[word] for word in modifiers)]
    if base == "hybrid":
        size = next((size for size in range(ranks // 2, 1, -1) if ranks % size == 0), None)
        if size is None:
            why = f"needs groups of ranks that are neither one rank nor all, and there are {ranks}"
            return Candidate(name, (), None, f"{why}; with --nproc 4 there are")
        strategy.append(f"strategy.shard_size={size}")
    arguments = (recipe_path, *overrides, *_settings(plain, steps, run), *strategy)
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
    except RecipeError as error:
        why = re.sub(r"^override '[^']*': ", "", str(error), flags=re.MULTILINE)
        return Candidate(name, arguments, None, "; ".join(why.splitlines()))
    return Candidate(name, arguments, recipe)


def _settings(recipe: Recipe, steps: int, run: Path) -> list[str]:
    """Overrides that make a short run of its own out of any recipe."""
    save_at = WARM_UP + steps
    last = save_at + AFTER_SAVE + MEASURED
    settings = [f"run.dir={run}", f"run.steps={last}", f"run.log_every={LOG_EVERY}"]
    settings += ["run.evaluate_every=0", f"tracking.profile_steps={MEASURED}"]
    settings += [f"tracking.profile_after={last - MEASURED}"]
    settings += ["tracking.tensorboard=false", "tracking.wandb=off"]
    settings += ["tracking.prometheus=null", "tracking.sinks=[]", "tracking.hooks=[]"]
    settings += ["checkpoint.directory=null", f"checkpoint.every={save_at}", "checkpoint.keep=1"]
    settings += ["elastic.snapshot_every=0"]
    settings += [f"schedule.warmup_steps={min(recipe.schedule.warmup_steps, last - 1)}"]
    if recipe.schedule.name == "wsd":
        settings += ["schedule.name=constant", "schedule.decay_steps=0"]
    return settings
