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
class StepInfo:
    """A step as retention sees it."""

    path: Place
    step: int
    value: float | None = None
    """Value that `keep_best` compares; None: the step does not take part."""
    size: int = 0
    """Bytes of its files."""
    damage: str | None = None
    """What is damaged; None: nothing is known to be."""
    unreadable: str | None = None
    """Why its state is unknown; such a step stays."""
    verified: bool = False
    """Whether every byte was read since it was written, and is correct."""
    named: bool = False
    """Whether `latest` names it: a commit under way moves that pointer last."""

    @property
    def is_good(self) -> bool:
        """Whether it is neither damaged nor unreadable."""
        return self.damage is None and self.unreadable is None


@dataclass(frozen=True)
class Verdicts:
    """Results of reading steps, by name of the step."""

    damaged: Collection[str] = ()
    """Steps with damaged tensors, though their records are good."""
    unreadable: Collection[str] = ()
    verified: Collection[str] = ()
    """Steps whose every byte was read since they were written, and is correct."""


@dataclass(frozen=True)
class RetentionDecision:
    """Whether a step stays, and why."""

    path: Place
    stays: bool
    reason: str
    size: int = 0
    """Bytes of its files."""


def decide(found: Sequence[StepInfo], options: CheckpointOptions) -> list[RetentionDecision]:
    """Decide which steps stay. Pure.

    A good step stays if it is among the newest `keep`, is a multiple of `keep_every`, or is among
    the `keep_best` with the lowest finite `best_by`. So the newest good step always stays. Of steps
    with the same value only the oldest counts for `keep_best`: that one was validated, and later
    ones carry its value until the next validation. A damaged step goes once there is a newer good
    one. With `keep` 0 everything stays.

    The newest step that was read back and is correct stays too, and before there is one no good
    step goes: bytes that were written may not be readable. The step that `latest` names stays as
    well.

    Args:
        found: newest first.
        options: keep, keep_every, keep_best and best_by.
    """
    good = [item for item in found if item.is_good]
    newest = {item.path for item in good[: options.keep]}
    verified = next((item.path for item in good if item.verified), None)
    best = {item.path for item in best_of(good)[: options.keep_best]}

    def judge(item: StepInfo) -> tuple[bool, str]:
        # Unknown is not damaged: the storage may answer later.
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

    return [RetentionDecision(item.path, *judge(item), item.size) for item in found]


def best_of(found: Sequence[StepInfo]) -> list[StepInfo]:
    """Returns steps with a finite value, the lowest first; of equal values only the oldest step.

    Args:
        found: newest first.
    """
    judged = {
        item.value: item
        for item in found  # of equal values the last, and so the oldest
        if item.value is not None and math.isfinite(item.value)
    }
    return [judged[value] for value in sorted(judged)]


def inspect_steps(directory: Place, best_by: str, known: Verdicts) -> list[StepInfo]:
    """Returns what `decide` needs of the steps in a directory, newest first. Reads no tensors.

    Args:
        best_by: key of trainer_state.json.
        known: results of reading them.
    """
    try:
        named = latest(directory)
    except CheckpointError:  # `verify` reports it
        named = None
    found = [_look(path, best_by, known) for path in list_steps(directory)]
    return [replace(item, named=item.path.name == named) for item in found]


def _look(path: Place, best_by: str, known: Verdicts) -> StepInfo:
    found = StepInfo(path, parse_step(path.name) or 0, verified=path.name in known.verified)
    try:
        step = open_step(path)
        value = number_of(step_state(step), best_by)
    except UnreadableCheckpoint as error:
        return replace(found, unreadable=str(error))
    except DamagedCheckpoint as error:
        return replace(found, damage=str(error))
    except CheckpointError as error:  # not known to be damaged, so it stays
        return replace(found, unreadable=explain(error))
    damage = "found so when it was read" if path.name in known.damaged else None
    if path.name in known.unreadable:
        return replace(found, unreadable="found so when it was read")
    size = sum(file.size for file in step.record.files.values())
    return replace(found, value=value, size=size, damage=damage)


def number_of(state: Mapping[str, Any], key: str) -> float | None:
    """Returns a number of a trainer state for comparison; None if the key has none."""
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else math.inf


# --- carrying it out -----------------------------------------------------------------------------


def prune(directory: Place, options: CheckpointOptions, known: Verdicts) -> list[RetentionDecision]:
    """Delete the steps that need not stay, and what dead processes left. Called by one process of a
    run at a time; never delays a save, since it touches nothing that is being written.

    Args:
        options: keep, keep_every, keep_best and best_by, see `decide`.
        known: results of reading the steps.

    Returns:
        The decision on each step, newest first, as carried out.
    """
    done = []
    for decision in decide(inspect_steps(directory, options.best_by, known), options):
        done.append(decision if decision.stays else _carry_out(decision))
    storage_of(directory).collect(directory)
    return done


def _carry_out(decision: RetentionDecision) -> RetentionDecision:
    storage = storage_of(decision.path)
    try:
        with storage.unless_read(decision.path) as free:
            if not free:
                return replace(decision, stays=True, reason="being read at this moment")
            storage.delete_step(decision.path)
    except FileNotFoundError:  # another process has deleted it
        return decision
    except (OSError, CheckpointError) as error:
        logger.warning("could not delete an old checkpoint: %s", explain(error))
        return replace(decision, stays=True, reason=f"could not be deleted: {explain(error)}")
    return decision
