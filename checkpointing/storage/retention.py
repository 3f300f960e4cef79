"""The decision which committed steps are kept, and the deletion of all other steps."""

import logging
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkpointing.errors import CheckpointError, DamagedCheckpoint, UnreadableCheckpoint, explain
from checkpointing.format.layout import LATEST, parse_step
from checkpointing.options import CheckpointOptions
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.steps import latest, list_steps, open_step, step_state, storage_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StorageRetentionStep:
    """What retention knows about a step."""

    path: StoragePlace
    step: int
    value: float | None = None
    """Value that `keep_best` compares; None: the step has none."""
    size: int = 0
    """Total size of its files in bytes."""
    damage: str | None = None
    """Description of the damage; None: no damage is known."""
    unreadable: str | None = None
    """Why the step could not be read; None: it could. An unreadable step is kept."""
    verified: bool = False
    """Whether the step was read completely since it was written, and is undamaged."""
    named: bool = False
    """Whether the pointer file `latest` names the step. A commit updates that pointer last."""

    @property
    def is_good(self) -> bool:
        return self.damage is None and self.unreadable is None


@dataclass(frozen=True)
class StorageRetentionVerdicts:
    """Results of reading steps. Steps are identified by name."""

    damaged: Collection[str] = ()
    """Steps whose tensors are damaged, although their commit records are valid."""
    unreadable: Collection[str] = ()
    verified: Collection[str] = ()


@dataclass(frozen=True)
class StorageRetentionDecision:
    """Whether a step is kept, and why."""

    path: StoragePlace
    stays: bool
    reason: str
    size: int = 0


def decide(
    found: Sequence[StorageRetentionStep], options: CheckpointOptions
) -> list[StorageRetentionDecision]:
    """Decide which steps are kept. A pure function.

    A good step is kept if it is among the newest `keep`, is a multiple of `keep_every`, or is among
    the `keep_best` with the lowest finite `best_by`. So the newest good step is always kept. Of
    steps with the same value only the oldest counts for `keep_best`: it was validated, and later
    steps repeat its value until the next validation. A damaged step is deleted once there is a
    newer good step. With `keep` 0 all steps are kept.

    The newest step that was read back and is undamaged is also kept. Before there is such a step no
    good step is deleted, as written bytes may not be readable. The step that `latest` names is kept
    as well.
    `found` has all steps, newest first. Of the options only keep, keep_every, keep_best and best_by
    are read."""
    good = [item for item in found if item.is_good]
    newest = {item.path for item in good[: options.keep]}
    verified = next((item.path for item in good if item.verified), None)
    best = {item.path for item in best_of(good)[: options.keep_best]}

    def judge(item: StorageRetentionStep) -> tuple[bool, str]:
        # unreadable is not damaged, as the storage may work again later
        if item.unreadable is not None:
            return True, f"cannot be read: {item.unreadable}"
        if options.keep == 0:
            return True, "keep=0 keeps all"
        if item.named:
            return True, f"{LATEST} names it"
        if item.damage is not None:
            replaced = any(other.step > item.step for other in good)
            return not replaced, f"damaged: {item.damage}"
        if item.path in newest:
            return True, f"among the newest {options.keep}"
        if options.keep_every and item.step % options.keep_every == 0:
            return True, f"a multiple of {options.keep_every}"
        if item.path in best:
            return True, f"{options.best_by} {item.value:.6g} is among the {options.keep_best} best"
        if verified is None:
            return True, "no step has been read and found right yet"
        if item.path == verified:
            return True, "the newest that was read and found right"
        return False, f"older than the newest {options.keep}"

    return [StorageRetentionDecision(item.path, *judge(item), item.size) for item in found]


def best_of(found: Sequence[StorageRetentionStep]) -> list[StorageRetentionStep]:
    """Returns the steps with a finite value, lowest value first; of equal values only the oldest
    step. In `found` the newest step is first."""
    judged = {
        item.value: item
        for item in found  # of equal values the last wins, which is the oldest step
        if item.value is not None and math.isfinite(item.value)
    }
    return [judged[value] for value in sorted(judged)]


def inspect_steps(
    directory: StoragePlace, best_by: str, known: StorageRetentionVerdicts
) -> list[StorageRetentionStep]:
    """Returns the input of `decide` for the steps in a directory, newest first. Reads no tensors.
    `best_by` is a key of trainer_state.json, `known` the results of reading the steps."""
    try:
        named = latest(directory)
    except CheckpointError:  # the command `verify` reports this error
        named = None
    found = [_look(path, best_by, known) for path in list_steps(directory)]
    return [replace(item, named=item.path.name == named) for item in found]


def _look(
    path: StoragePlace, best_by: str, known: StorageRetentionVerdicts
) -> StorageRetentionStep:
    found = StorageRetentionStep(
        path, parse_step(path.name) or 0, verified=path.name in known.verified
    )
    try:
        step = open_step(path)
        value = number_of(step_state(step), best_by)
    except UnreadableCheckpoint as error:
        return replace(found, unreadable=str(error))
    except DamagedCheckpoint as error:
        return replace(found, damage=str(error))
    except CheckpointError as error:  # not known to be damaged, so the step is kept
        return replace(found, unreadable=explain(error))
    damage = "found so when it was read" if path.name in known.damaged else None
    if path.name in known.unreadable:
        return replace(found, unreadable="found so when it was read")
    size = sum(file.size for file in step.record.files.values())
    return replace(found, value=value, size=size, damage=damage)


def number_of(state: Mapping[str, Any], key: str) -> float | None:
    """Returns the number under a key of a trainer state; None if there is none."""
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else math.inf


def prune(
    directory: StoragePlace, options: CheckpointOptions, known: StorageRetentionVerdicts
) -> list[StorageRetentionDecision]:
    """Delete steps that are not kept (see `decide`), and unfinished steps of dead processes. Called
    by one process of a run at a time. Never delays a save, as it touches no step that is being
    written. Returns the decision on each step, newest first, with `stays` true if the deletion
    failed."""
    decisions = decide(inspect_steps(directory, options.best_by, known), options)
    done = [decision if decision.stays else _carry_out(decision) for decision in decisions]
    storage_of(directory).collect(directory)
    return done


def _carry_out(decision: StorageRetentionDecision) -> StorageRetentionDecision:
    storage = storage_of(decision.path)
    try:
        with storage.unless_read(decision.path) as free:
            if not free:
                return replace(decision, stays=True, reason="being read at this moment")
            storage.delete_step(decision.path)
    except FileNotFoundError:  # another process has deleted the step
        return decision
    except (OSError, CheckpointError) as error:
        logger.warning("could not delete an old checkpoint: %s", explain(error))
        return replace(decision, stays=True, reason=f"could not be deleted: {explain(error)}")
    return decision
