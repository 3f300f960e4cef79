"""The recipes that a run keeps, and the data of its attempts, as this machine finds them; whether a
recipe may resume a checkpoint; and what it changes."""

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
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.ownership import TrustedStorageOwners
from checkpointing.storage.place import ObjectPath
from elastic.node.files import open_to_read, own_directory, read_text, write_whole
from elastic.record.history import RecordedAttempt, last_start
from elastic.record.ledger import StartLine
from elastic.world import World
from trainer.data.loader import later_stages
from trainer.data.shards import is_prepared
from trainer.data.stream import Stream
from trainer.recipe import Recipe, RecipeError, load_recipe, resolved, strategies
from trainer.recipe.data_change import CHANGES, RecipeDataChange, parsed, plain
from trainer.recipe.factory import with_defaults
from trainer.recipe.load import renewed, validate
from trainer.recipe.yaml_tree import read_tree
from trainer.run.identity import decides, flat
from trainer.tasks.task import Task

logger = logging.getLogger(__name__)

RECIPES = "recipes"
"""Folder in the run directory that keeps the recipe of each attempt as DIGEST.yaml."""
MOST_NAMED = 8
"""Largest number of changed keys named on the console."""
MOST_CHANGE_BYTES = 1 << 20
LONGEST_SHOWN = 40
"""Largest number of characters of a value in a message."""


def run_state(recipe: Recipe, task: Task, world: World, init_from: str | None) -> dict[str, Any]:
    """Return the part of trainer_state.json that is constant in an attempt. `init_from`: digest of
    the initial weights."""
    adapter, base = recipe.model.adapter, recipe.model.init_from
    # Steps were computed from epochs; a recipe that names both would be refused.
    given = replace(recipe, run=replace(recipe.run, steps=0)) if recipe.run.epochs else recipe
    place = base if base and "://" in base else os.path.abspath(base or "")
    under = {"path": place, "fingerprint": init_from}
    return {
        **({"base": {**under, "format": adapter.base}} if adapter else {}),
        "parameters": {
            "trained": task.trained_count,
            "frozen": task.parameter_count - task.trained_count,
        },
        "data": {
            "fingerprint": task.stream.fingerprint,
            "seq_len": recipe.data.seq_len,
            **({"stages": stages} if (stages := later_stages(task.stream)) else {}),
        },
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
    state: dict[str, Any], recipe: Recipe, task: Task, path: object, init_from: str | None = None
) -> None:
    """Raise RecipeError for a recipe of another model, data, seed or initial weights than a
    checkpoint has.

    Args:
        state: the trainer state of the checkpoint.
        path: name of the checkpoint in messages.
        init_from: digest of the weights in `model.init_from`; "": the recipe names none; None: do
            not compare.
    """
    way_out = f"restore the recipe that wrote {path}, or choose a new run.dir"
    if "recipe" not in state:
        raise RecipeError(
            f"run.dir: {path} was not written by a run of this trainer, so there is nothing to "
            "resume; name it in model.init_from and choose another run.dir"
        )
    saved, ours = (_complete(one, recipe)["model"] for one in (state["recipe"], resolved(recipe)))
    for key in ("architecture", "family", "factory", "factory_options", "adapter"):
        there, here = saved.get(key), ours[key]  # an older checkpoint may lack the key
        if there and here and key == "adapter":  # dropout may change between attempts
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
                f"recipe says {ours[key]}, whose state differs; {way_out}"
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
            f"the checkpoint's position in the data means nothing; {way_out}"
        )
    done = state.get("sequences", 0)
    before, now = (
        [list(stage) for stage in stages if stage[0] < done]
        for stages in (state["data"].get("stages", []), later_stages(task.stream))
    )
    if before != now:
        raise RecipeError(
            f"data.stages: the checkpoint was trained on the first {done} sequences, whose stages "
            f"differ (from sequence {_starts(before)} there, {_starts(now)} here, or with other "
            f"weights or data); change only stages that begin at sequence {done} or later; "
            f"{way_out}"
        )
    if state["seed"] != recipe.run.seed:
        raise RecipeError(
            f"run.seed: the checkpoint was trained with {state['seed']}, the recipe says "
            f"{recipe.run.seed}, which is another order of the data; {way_out}"
        )
    if init_from:  # initial weights in the recipe must be those that the run began with
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
                f"{recipe.model.init_from}, which would not be read; name the weights that it "
                "began with, or choose a new run.dir"
                if began
                else f"model.init_from: the run began with random weights, so those in "
                f"{recipe.model.init_from} would not be read; set model.init_from=null, or "
                "choose a new run.dir"
            )


def other_data(start: StartLine, stream: Stream) -> str:
    """Return how a stream differs from the data that an attempt began with; "" if it does not."""
    if start.data != stream.fingerprint:
        return "its fingerprint differs"
    stages = later_stages(stream)
    if [list(stage) for stage in start.stages] != stages:
        return "its stages differ"
    return ""


def _starts(stages: Sequence[Sequence[Any]]) -> str:
    return ", ".join(["0", *(str(stage[0]) for stage in stages)])


# --- the recipe of each attempt --------------------------------------------------------------


def recipe_file(run: Path, digest: str) -> Path:
    return run / RECIPES / f"{digest}.yaml"


def digest_of(text: str) -> str:
    """Return the digest of a resolved recipe's text: 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep_recipe(directory: Path, text: str) -> None:
    """Create the run directory, and write the resolved recipe into it under its digest. Raises
    RecipeError if the directory cannot be written. On rank 0."""
    path = recipe_file(directory, digest_of(text))
    with suppress(OSError, ValueError):
        if read_text(path) == text:
            return  # without a write, a restart succeeds on a full disk
    try:
        own_directory(path.parent)
        write_whole(path, text)
    except OSError as error:
        raise RecipeError(
            f"run.dir: cannot write to {directory}: {error.strerror}; choose another run.dir"
        ) from error


def show_recipe(directory: Path, text: str) -> None:
    """Write recipe.yaml, the recipe of the present attempt, once all checks passed. On rank 0."""
    try:
        path = directory / "recipe.yaml"
        with suppress(OSError, ValueError):
            if read_text(path) == text:
                return
        write_whole(path, text)
    except OSError as error:  # training continues: the recipe is in recipes/ too
        logger.warning("recipe.yaml of %s is not that of this start: %s", directory, error.strerror)


# --- changes of the data while a run trains, see data_changes.py -----------------------------


def read_changes(recipe: Recipe) -> list[RecipeDataChange]:
    """Return the accepted changes of the data of a run; [] if there are none. Raises RecipeError if
    the file of changes cannot be read, StorageError if the run's bucket does not answer."""
    place = _changes_place(recipe)
    try:
        if isinstance(place, ObjectPath):
            return parsed(_json(store_of(place).read(place)))
        return parsed(trusted_json(place, recipe))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RecipeError(f"{place}: {error}; restore it, or remove it") from error


def write_changes(recipe: Recipe, changes: Sequence[RecipeDataChange]) -> None:
    """Keep the accepted changes of the data where every later start finds them: in the run
    directory, or in the run's bucket. Raises OSError or StorageError. On rank 0."""
    place, text = _changes_place(recipe), json.dumps(plain(changes), indent=1)
    if isinstance(place, ObjectPath):
        store_of(place).write(place, text.encode())
    else:
        write_whole(place, text)


def _changes_place(recipe: Recipe) -> Path | ObjectPath:
    run = ObjectPath.of(recipe.run.dir) if recipe.in_bucket else recipe.directory
    return run / CHANGES


def trusted_json(path: Path, recipe: Recipe) -> Any:
    """Read a JSON file that belongs to this user or to a user in `checkpoint.trust`. Raises OSError
    if it belongs to another user or cannot be read, ValueError if it is no JSON."""
    with os.fdopen(open_to_read(path), "rb") as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner not in TrustedStorageOwners(tuple(recipe.checkpoint.trust), path.parent):
            raise PermissionError(f"belongs to uid {owner}, who is not in checkpoint.trust")
        return _json(file.read(MOST_CHANGE_BYTES))


def _json(data: bytes) -> Any:
    try:
        return json.loads(data[:MOST_CHANGE_BYTES])
    except RecursionError:
        raise ValueError("nested too deep") from None


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
    """Return what differs from the last attempt of the run: key of recipe, code or machine → (old
    value, new value). On rank 0, before the start line is written.

    Args:
        digest: digest of the resolved recipe.
        computed_by: code and machines of this start.
        state: state of the loaded checkpoint, for a run directory without the old recipe.
        restart: whether this is a restart within one launch; a new launch is compared with the last
            attempt that completed a step.
    """
    before = last_start(run, trained=not restart)
    differences: dict[str, tuple[Any, Any]] = {}
    if before is None or before.recipe != digest:
        old = None
        if before:
            kept = recipe_file(run, before.recipe) if before.recipe else run / "recipe.yaml"
            with suppress(RecipeError):
                old = read_tree(kept, kept=True)[0]
        differences = changes(old if isinstance(old, dict) else state["recipe"], recipe)
    machines = before.computed_by if before else {}
    kinds = {
        key: (old_value, computed_by.get(key))
        for key, old_value in machines.items()
        if computed_by.get(key) != old_value
    }
    return {**differences, **kinds}


def changes(old: Mapping[str, Any], recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return how `recipe` differs from an earlier resolved recipe: key → (old value, new value),
    for keys that change the results of steps."""
    before, now = (dict(flat(_complete(one, recipe))) for one in (old, resolved(recipe)))
    changed = {
        key: (before.get(key), now.get(key))
        for key in [*now, *(key for key in before if key not in now)]
        if decides(key) and before.get(key) != now.get(key)
    }
    if recipe.batch.micro_batch == "auto":  # the old recipe has the number that the run chose
        changed.pop("batch.micro_batch", None)
    # decides() leaves init_from out, as the same weights may have another path. Its removal counts.
    weights = "model.init_from"
    if before.get(weights) and not now.get(weights):
        changed[weights] = before[weights], None
    return changed


def _complete(old: Mapping[str, Any], recipe: Recipe) -> Mapping[str, Any]:
    """Return an older resolved recipe with defaults for keys and factory options that it lacks. A
    recipe with keys that no longer exist is returned unchanged, so new keys count as changed."""
    if old == resolved(recipe) and not recipe.own_code:  # what follows takes milliseconds
        return old
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
    """Describe the result of `changes_of_start` in one line; "" if nothing changed."""
    if not changed:
        return ""
    parts = [f"{key} {_short(old)} → {_short(new)}" for key, (old, new) in changed.items()]
    if len(parts) > MOST_NAMED:
        parts[MOST_NAMED:] = [f"and {len(parts) - MOST_NAMED} more, see ledger.jsonl"]
    line = f"changed since the run last trained: {', '.join(parts)}"
    if changed.keys() & {"run.steps", "run.epochs"} and recipe.schedule.name != "constant":
        line += "; the schedule has the new length"
    if strategies.exact.used(recipe) and changed.keys() & {"code", "torch", "cpu", "gpu"}:
        line += "; an exact run repeats its bits only on one kind of machine and code"
    return line


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = printable(text)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"


class RunProvenanceError(RecipeError):
    """Recipe or data of an attempt are missing, so nothing proves or refutes its steps."""


def kept_recipe(run: Path, attempts: Sequence[RecordedAttempt]) -> Recipe:
    """Read the recipe that some attempts of a run share. Attempts whose start lines name no recipe
    are older than the folder of recipes, and used recipe.yaml.

    Raises:
        RunProvenanceError: the recipe is missing, or this version cannot read it.
        RecipeError: the file is not the recipe of the attempts.
    """
    digest = attempts[0].start.recipe
    path = recipe_file(run, digest) if digest else run / "recipe.yaml"
    try:
        text = read_text(path)
    except OSError as error:
        raise RunProvenanceError(f"{path}: {error.strerror}") from error
    except ValueError:  # the file is not text
        text = ""
    if digest and digest_of(text) != digest:
        raise RecipeError(f"{path} is not the recipe of {numbers_of(attempts)}")
    try:
        return load_recipe(path, kept=True)
    except RecipeError as error:
        raise RunProvenanceError(f"{path}: this version cannot read it: {error}") from error


def where_it_lies(recipe: Recipe, directory: str) -> tuple[Recipe, str]:
    """Return the recipe with the present paths of its sources and of `model.init_from`, and without
    validation; and the path of the first missing source, "" if none is missing. Relative paths are
    looked up from `directory`, the run's working directory, then from this process's."""
    sources = []
    for source in recipe.data.sources:
        places = [source.path]
        if "://" not in source.path:
            places.insert(0, str(Path(directory) / source.path))
        place = next((path for path in places if is_prepared(path)), None)
        if place is None:
            return recipe, places[0]
        sources.append(replace(source, path=place))
    data = replace(recipe.data, sources=tuple(sources))
    model, begun = recipe.model, recipe.model.init_from
    if begun and "://" not in begun and (there := Path(directory) / begun).exists():
        model = replace(model, init_from=str(there))
    run = replace(recipe.run, evaluate_every=0)
    return replace(recipe, data=data, model=model, run=run), ""


def numbers_of(attempts: Sequence[RecordedAttempt]) -> str:
    """Format the numbers of attempts: "attempt 1, 2"."""
    numbers = ", ".join(str(attempt.number) for attempt in attempts[:8])
    more = f" and {len(attempts) - 8} more" if len(attempts) > 8 else ""
    return f"attempt {numbers}{more}"
