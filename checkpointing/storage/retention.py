"""Which committed steps stay, and the deletion of the others."""

import logging
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkpointing.errors import (
    CheckpointError,
    DamagedCheckpoint,
    UnreadableCheckpoint,
    explain,
)
from checkpointing.format.layout import LATEST, parse_step
from checkpointing.options import CheckpointOptions
from checkpointing.storage.place import Place
from checkpointing.storage.steps import latest, list_steps, open_step, step_state, storage_of

logger = logging.getLogger(__name__)


# --- the decision --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What retention knows of a step."""

    path: Place
    step: int
    value: float | None = None
    """By which `keep_best` judges; None: it takes no part."""
    size: int = 0
    """Bytes of its files."""
    damage: str | None = None
    """What is wrong with it; None: it is good."""
    unreadable: str | None = None
    """Why nothing is known of it; it stays."""
    right: bool = False
    """Every byte was read since it was written, and found right."""
    named: bool = False
    """`latest` names it: a commit that is under way moves that last."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is known against it."""
        return self.damage is None and self.unreadable is None


@dataclass(frozen=True)
class Known:
    """What reading steps has told of them, by name."""

    damaged: Collection[str] = ()
    """Though their records are good."""
    unreadable: Collection[str] = ()
    right: Collection[str] = ()
    """Every byte was read since they were written, and found right."""


@dataclass(frozen=True)
class Decision:
    """Whether a step stays, and why."""

    path: Place
    stays: bool
    reason: str
    size: int = 0
    """Bytes of its files."""


def decide(found: Sequence[Found], options: CheckpointOptions) -> list[Decision]:
    """Which steps stay. Pure.

    Good steps stay that are among the newest `keep`, are multiples of `keep_every`, or are among
    the `keep_best` with the lowest finite `best_by`; so the newest good one always does. Of steps
    with the same value only the oldest takes part in `keep_best`: that is the one which was
    judged, those after it carry its value on until the next validation. Damaged steps go once there
    is a newer good one. With `keep` 0 everything stays.

    The newest step that was read and found right stays besides, and before there is one no good
    step goes: what was written is not yet what can be read. So does the one that `latest` names.

    Args:
        found: newest first.
        options: keep, keep_every, keep_best and best_by.
    """
    good = [item for item in found if item.is_good]
    newest = {item.path for item in good[: options.keep]}
    right = next((item.path for item in good if item.right), None)
    best = {item.path for item in best_of(good)[: options.keep_best]}

    def judge(item: Found) -> tuple[bool, str]:
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
        if right is None:
            return True, "no step has been read and found right yet"
        if item.path == right:
            return True, "the newest that was read and found right"
        return False, f"older than the newest {options.keep}"

    return [Decision(item.path, *judge(item), item.size) for item in found]


def best_of(found: Sequence[Found]) -> list[Found]:
    """Steps with a finite value, the lowest first; of equal values the oldest step alone.

    Args:
        found: newest first.
    """
    judged = {
        item.value: item
        for item in found  # of equal values the last, and so the oldest
        if item.value is not None and math.isfinite(item.value)
    }
    return [judged[value] for value in sorted(judged)]


def survey(directory: Place, best_by: str, known: Known) -> list[Found]:
    """What `decide` needs to know of the steps in a directory, newest first. Reads no tensors.

    Args:
        directory: of the checkpoints.
        best_by: key of trainer_state.json.
        known: of them.
    """
    try:
        named = latest(directory)
    except CheckpointError:  # whoever verifies is told
        named = None
    found = [_look(path, best_by, known) for path in list_steps(directory)]
    return [replace(item, named=item.path.name == named) for item in found]


def _look(path: Place, best_by: str, known: Known) -> Found:
    found = Found(path, parse_step(path.name) or 0, right=path.name in known.right)
    try:
        step = open_step(path)
        value = number_of(step_state(step), best_by)
    except UnreadableCheckpoint as error:
        return replace(found, unreadable=str(error))
    except DamagedCheckpoint as error:
        return replace(found, damage=str(error))
    except CheckpointError as error:  # no reason to delete it
        return replace(found, unreadable=explain(error))
    damage = "found so when it was read" if path.name in known.damaged else None
    if path.name in known.unreadable:
        return replace(found, unreadable="found so when it was read")
    size = sum(file.size for file in step.record.files.values())
    return replace(found, value=value, size=size, damage=damage)


def number_of(state: Mapping[str, Any], key: str) -> float | None:
    """A value of a trainer state that steps can be compared by; None if it is no number."""
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else math.inf


# --- carrying it out -----------------------------------------------------------------------------


def prune(directory: Place, options: CheckpointOptions, known: Known) -> list[Decision]:
    """Delete the steps that need not stay, and what dead processes left behind. In one process of
    a run at a time; never holds up a save, as it touches nothing that is being written.

    Args:
        directory: of the checkpoints.
        options: keep, keep_every, keep_best and best_by, see `decide`.
        known: of the steps.

    Returns:
        What became of each step, newest first.
    """
    done = []
    for decision in decide(survey(directory, options.best_by, known), options):
        done.append(decision if decision.stays else _carry_out(decision))
    storage_of(directory).collect(directory)
    return done


def _carry_out(decision: Decision) -> Decision:
    storage = storage_of(decision.path)
    try:
        with storage.unless_read(decision.path) as free:
            if not free:
                return replace(decision, stays=True, reason="being read at this moment")
            storage.delete_step(decision.path)
    except FileNotFoundError:  # another process was faster
        return decision
    except (OSError, CheckpointError) as error:
        logger.warning("could not delete an old checkpoint: %s", explain(error))
        return replace(decision, stays=True, reason=f"could not be deleted: {explain(error)}")
    return decision
