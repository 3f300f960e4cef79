"""What a run keeps of its recipes and says of them in checkpoints; whether a recipe may go on from
a checkpoint, and what it changes."""

import copy
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from checkpointing.format.untrusted import printable
from elastic.node.files import own_directory, read_text, write_whole
from elastic.record.history import last_start
from elastic.world import World
from trainer.recipe import Recipe, RecipeError, resolved, strategies
from trainer.recipe.factory import with_defaults
from trainer.recipe.load import renewed, validate
from trainer.recipe.yaml_tree import read_tree
from trainer.run.identity import decides, flat
from trainer.tasks.task import Task

logger = logging.getLogger(__name__)

RECIPES = "recipes"
"""Folder of the run directory: DIGEST.yaml is a recipe that an attempt began with."""
MOST_NAMED = 8
"""Changed keys that are named on the console."""
LONGEST_SHOWN = 40
"""Characters of a value."""


def run_state(recipe: Recipe, task: Task, world: World, init_from: str | None) -> dict[str, Any]:
    """The part of trainer_state.json that does not change from step to step. `init_from`: digest
    of the weights that the run began with."""
    adapter, base = recipe.model.adapter, recipe.model.init_from
    given = replace(recipe, run=replace(recipe.run, steps=0)) if recipe.run.epochs else recipe
    under = {"path": os.path.abspath(base or ""), "fingerprint": init_from}
    return {
        **({"base": {**under, "format": adapter.base}} if adapter else {}),
        "parameters": {
            "trained": task.trained_count,
            "frozen": task.parameter_count - task.trained_count,
        },
        "data": {"fingerprint": task.stream.fingerprint, "seq_len": recipe.data.seq_len},
        "seed": recipe.run.seed,
        "rng": "derived from the seed and the position in the data; nothing to restore",
        "schedule": {
            **asdict(recipe.schedule),
            "steps": recipe.run.steps,
            "lr": recipe.optimizer.lr,
        },
        "recipe": resolved(given),
        "versions": {
            "perdure": version("perdure"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "world": {
            "world_size": world.world_size,
            "local_world_size": world.local_world_size,
            "device": world.device.type,
            "sharding": strategies.sharding.name(recipe),
            **strategies.sizes(recipe.strategy),
        },
    }


def check_resume(
    state: dict[str, Any],
    recipe: Recipe,
    task: Task,
    path: object,
    init_from: str | None = None,
) -> None:
    """Refuse to continue a checkpoint whose model, data or seed is not that of the recipe, or that
    began with other weights than those of `model.init_from`.

    Args:
        state: of the checkpoint.
        recipe: to go on with.
        task: of the recipe.
        path: names the checkpoint.
        init_from: digest of the weights in `model.init_from`, "" without any; None: not compared.

    Raises:
        RecipeError: names what differs, and the two ways out.
    """
    way_out = f"restore the recipe that wrote {path}, or choose a new run.dir"
    if "recipe" not in state:
        raise RecipeError(
            f"run.dir: {path} was not written by a run of this trainer, so there is nothing to "
            "resume; name it in model.init_from and choose another run.dir"
        )
    saved, ours = (_complete(one, recipe)["model"] for one in (state["recipe"], resolved(recipe)))
    for key in ("architecture", "family", "factory", "factory_options", "adapter"):
        there, here = saved.get(key), ours[key]  # a checkpoint may be older than the key
        if there and here and key == "adapter":  # what training draws may change
            there = {**there, "dropout": here["dropout"]}
        names = [key] if there != here else []
        if isinstance(there, dict) and isinstance(here, dict):
            names = [
                f"{key}.{name} ({there.get(name)} there, {here.get(name)} here)"
                for name in sorted(there.keys() | here.keys())
                if there.get(name) != here.get(name)
            ]
        if names:
            raise RecipeError(f"model: the checkpoint is of another model: {names[0]}; {way_out}")
    named, ours = state["recipe"]["optimizer"], resolved(recipe)["optimizer"]
    for key, default in (("name", "adamw"), ("factory", None)):
        if named.get(key, default) != ours[key]:
            raise RecipeError(
                f"optimizer.{key}: the checkpoint was trained with {named.get(key, default)}, the "
                f"recipe says {ours[key]}, whose state is another; {way_out}"
            )
    if state["data"]["seq_len"] != recipe.data.seq_len:
        raise RecipeError(
            f"data.seq_len: the checkpoint was trained with {state['data']['seq_len']}, the recipe "
            f"says {recipe.data.seq_len}; {way_out}"
        )
    if state["data"]["fingerprint"] != task.stream.fingerprint:
        key, parts = "sources", "contents, tokenizer or weights"
        if recipe.data.factory:
            key, parts = "factory", "its name, options, size or fingerprint"
        raise RecipeError(
            f"data.{key}: the data is not what the checkpoint was trained on ({parts} differ), so "
            f"its position in it means nothing; {way_out}"
        )
    if state["seed"] != recipe.run.seed:
        raise RecipeError(
            f"run.seed: the checkpoint was trained with {state['seed']}, the recipe says "
            f"{recipe.run.seed}, which is another order of the data; {way_out}"
        )
    if init_from:  # else nobody can take the run for one that began with weights that it did not
        began = state.get("init_from")
        if began is None and not state["recipe"]["model"].get("init_from"):
            began = ""
        if began is not None and began != init_from:
            if recipe.model.adapter:
                raise RecipeError(
                    f"model.init_from: the adapter in {path} was trained over other weights than "
                    f"those in {recipe.model.init_from} (fingerprint {began} there, {init_from} "
                    "here); name the directory of those weights, or choose a new run.dir"
                )
            raise RecipeError(
                f"model.init_from: the run began with other weights than those in "
                f"{recipe.model.init_from}, which would be left unread; name the weights that it "
                "began with, or choose a new run.dir"
                if began
                else f"model.init_from: the run did not begin with weights of others, so those in "
                f"{recipe.model.init_from} would be left unread; set model.init_from=null, or "
                "choose a new run.dir"
            )


# --- the recipe of each attempt --------------------------------------------------------------


def recipe_file(run: Path, digest: str) -> Path:
    """Where a run keeps the recipe that has a digest."""
    return run / RECIPES / f"{digest}.yaml"


def digest_of(text: str) -> str:
    """Digest of a resolved recipe, given as text: 16 characters."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep_recipe(directory: Path, text: str) -> None:
    """Make the directory of a run and leave its recipe in it, under its digest. On rank 0.

    Args:
        directory: of the run.
        text: the resolved recipe, as `dump_recipe` gives it.

    Raises:
        RecipeError: it cannot be written.
    """
    path = recipe_file(directory, digest_of(text))
    with suppress(OSError, ValueError):
        if read_text(path) == text:
            return  # a restart gets by without writing, so a full disk does not end the run
    try:
        own_directory(path.parent)
        write_whole(path, text)
    except OSError as error:
        raise RecipeError(
            f"run.dir: cannot write to {directory}: {error.strerror}; choose another run.dir"
        ) from error


def show_recipe(directory: Path, text: str) -> None:
    """Make recipe.yaml in the directory of a run that of the attempt that begins. On rank 0, once
    nothing refuses the start any more."""
    try:
        path = directory / "recipe.yaml"
        with suppress(OSError, ValueError):
            if read_text(path) == text:
                return
        write_whole(path, text)
    except OSError as error:  # training needs no copy of what lies in recipes/
        logger.warning("recipe.yaml of %s is not that of this start: %s", directory, error.strerror)


# --- what a start changes --------------------------------------------------------------------


def changes_of_start(
    run: Path,
    recipe: Recipe,
    digest: str,
    computed_by: Mapping[str, str],
    state: Mapping[str, Any],
    *,
    restart: bool,
) -> dict[str, tuple[Any, Any]]:
    """Keys in which a start differs from what the run last trained with, in recipe, code or
    machines → (old, new). On rank 0, before the start line is written.

    Args:
        run: its directory.
        recipe: of this start.
        digest: of the recipe.
        computed_by: code and machines of this start.
        state: what was loaded. It says what made it where the run directory says nothing.
        restart: this start belongs to a launch that has begun already, so the attempt before has
            said what it changes, even if it did no step.
    """
    before = last_start(run, trained=not restart)
    found: dict[str, tuple[Any, Any]] = {}
    if before is None or before.recipe != digest:
        old = None
        if before:
            kept = recipe_file(run, before.recipe) if before.recipe else run / "recipe.yaml"
            with suppress(RecipeError):
                old = read_tree(kept)[0]
        found = changes(old if isinstance(old, dict) else state["recipe"], recipe)
    machines = before.computed_by if before else {}
    kinds = {
        key: (there, computed_by.get(key))
        for key, there in machines.items()
        if computed_by.get(key) != there
    }
    return {**found, **kinds}


def changes(old: Mapping[str, Any], recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Keys whose value decides a step and differs between a resolved recipe, which may be older
    than some of them, and another → (old, new)."""
    before, now = (dict(flat(_complete(one, recipe))) for one in (old, resolved(recipe)))
    found = {
        key: (before.get(key), now.get(key))
        for key in [*now, *(key for key in before if key not in now)]
        if decides(key) and before.get(key) != now.get(key)
    }
    if recipe.batch.micro_batch == "auto":  # a checkpoint has the number that the run chose
        found.pop("batch.micro_batch", None)
    weights = "model.init_from"  # where they lie may change
    if before.get(weights) and not now.get(weights):
        found[weights] = before[weights], None
    return found


def _complete(old: Mapping[str, Any], recipe: Recipe) -> Mapping[str, Any]:
    """A resolved recipe with the defaults of keys that it is older than, and of options that it
    leaves to factories which `recipe` names, too. One with keys that are no more stays as it is,
    and new ones count as changed."""
    with suppress(RecipeError):
        tree = resolved(validate(renewed(copy.deepcopy(dict(old)))[0], {}, "recipe.yaml"))
        for key, name in recipe.own_code.items():
            section = tree[key.partition(".")[0]]
            if "factory_options" in section and section["factory"] == name:
                options = with_defaults(key, name, section["factory_options"])
                section["factory_options"] = options
        return tree
    return old


def describe_changes(changed: Mapping[str, Sequence[Any]], recipe: Recipe) -> str:
    """One line on what a start changes; "" if that is nothing."""
    if not changed:
        return ""
    parts = [f"{key} {_shown(old)} → {_shown(new)}" for key, (old, new) in changed.items()]
    if len(parts) > MOST_NAMED:
        parts[MOST_NAMED:] = [f"and {len(parts) - MOST_NAMED} more, see ledger.jsonl"]
    line = f"changed since the run last trained: {', '.join(parts)}"
    if changed.keys() & {"run.steps", "run.epochs"} and recipe.schedule.name != "constant":
        line += "; the schedule has the new length"
    if strategies.exact.used(recipe) and changed.keys() & {"code", "torch", "cpu", "gpu"}:
        line += "; an exact run repeats its bits only on one kind of machine and code"
    return line


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = printable(text)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"
