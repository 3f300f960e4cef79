"""What a checkpoint says of the run that wrote it, and whether a recipe may go on from it."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from elastic.world import World
from trainer.recipe import Recipe, RecipeError, resolved
from trainer.tasks.task import Task


def run_state(recipe: Recipe, task: Task, world: World) -> dict[str, Any]:
    """The part of trainer_state.json that does not change from step to step."""
    return {
        "data": {"fingerprint": task.stream.fingerprint, "seq_len": recipe.data.seq_len},
        "seed": recipe.run.seed,
        "rng": "derived from the seed and the position in the data; nothing to restore",
        "schedule": {
            **asdict(recipe.schedule),
            "steps": recipe.run.steps,
            "lr": recipe.optimizer.lr,
        },
        "recipe": resolved(recipe),
        "versions": {
            "perdure": version("perdure"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "world": {
            "world_size": world.world_size,
            "local_world_size": world.local_world_size,
            "device": world.device.type,
            "sharding": recipe.sharding,
            "tp": recipe.strategy.tp,
            "pp": recipe.strategy.pp,
            "cp": recipe.strategy.cp,
            "ep": recipe.strategy.ep,
        },
    }


def check_resume(state: dict[str, Any], recipe: Recipe, task: Task, path: object) -> None:
    """Refuse to continue a checkpoint whose model, data or seed is not that of the recipe.

    Raises:
        RecipeError: names what differs, and the two ways out.
    """
    way_out = f"restore the recipe that wrote {path}, or choose a new run.dir"
    if "recipe" not in state:
        raise RecipeError(
            f"run.dir: {path} was not written by a run of this trainer, so there is nothing to "
            "resume; name it in model.init_from and choose another run.dir"
        )
    saved = state["recipe"]["model"]
    ours = resolved(recipe)["model"]
    for key in ("architecture", "family", "factory", "factory_options", "kgat"):
        there, here = saved.get(key), ours[key]  # a checkpoint may be older than the key
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
