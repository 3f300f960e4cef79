"""Which directories stay: committed steps, half-written ones of the dead, deleted ones.

[Note: names]
  step-00001000                 committed, if its commit record is valid
  step-00001000.tmp-<n>-<owner> being written by <owner>
  step-00001000.trash-<owner>   being deleted by <owner>
Owners are processes, see checkpointing/owners.py. Nothing with any other name is ever touched. In
object stores there are other rules, see checkpointing/object_target.py.
"""

import fcntl
import itertools
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpointing.errors import (
    CheckpointError,
    DamagedCheckpoint,
    UnreadableCheckpoint,
    explain,
)
from checkpointing.layout import COMMIT_RECORD, parse_step
from checkpointing.object_target import collect_steps, delete_step
from checkpointing.objects import ObjectPath
from checkpointing.options import CheckpointOptions
from checkpointing.owners import is_alive, is_owner, owner
from checkpointing.steps import list_steps, open_step, reading, step_state
from checkpointing.storage import retrying
from checkpointing.untrusted import printable

logger = logging.getLogger(__name__)

FOREIGN_SECONDS = 3600
"""A half-written directory of another machine, whose processes cannot be seen from here, counts as
left behind when nothing in it has changed for so long."""

_numbers = itertools.count(1)
_ASIDE = re.compile(r"step-\d{8,}\.(?P<why>tmp|trash)-.+")


# --- the decision --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What retention knows of a step."""

    path: Path
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

    path: Path
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
    step goes: what was written is not yet what can be read.

    Args:
        found: newest first.
        options: keep, keep_every, keep_best and best_by.
    """
    good = [item for item in found if item.is_good]
    newest = {item.path for item in good[: options.keep]}
    right = next((item.path for item in good if item.right), None)
    judged = {
        item.value: item
        for item in good  # of equal values the last, and so the oldest
        if item.value is not None and math.isfinite(item.value)
    }
    best = {judged[value].path for value in sorted(judged)[: options.keep_best]}

    def judge(item: Found) -> tuple[bool, str]:
        if item.unreadable is not None:
            return True, f"cannot be read: {item.unreadable}"
        if options.keep == 0:
            return True, "keep=0 keeps all"
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


def survey(directory: Path, best_by: str, known: Known) -> list[Found]:
    """What `decide` needs to know of the steps in a directory, newest first. Reads no tensors.

    Args:
        directory: of the checkpoints.
        best_by: key of trainer_state.json.
        known: of them.
    """
    return [_look(path, best_by, known) for path in list_steps(directory)]


def _look(path: Path, best_by: str, known: Known) -> Found:
    found = Found(path, parse_step(path.name) or 0, right=path.name in known.right)
    try:
        step = open_step(path)
        value = _number(step_state(step), best_by)
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


def _number(state: Mapping[str, Any], key: str) -> float | None:
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else math.inf


# --- carrying it out -----------------------------------------------------------------------------


def prune(directory: Path, options: CheckpointOptions, known: Known) -> list[Decision]:
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
    collect(directory)
    return done


def _carry_out(decision: Decision) -> Decision:
    try:
        with _unless_read(decision.path) as free:
            if not free:
                return replace(decision, stays=True, reason="being read at this moment")
            delete(decision.path)
    except FileNotFoundError:  # another process was faster
        return decision
    except (OSError, CheckpointError) as error:
        logger.warning("could not delete an old checkpoint: %s", explain(error))
        return replace(decision, stays=True, reason=f"could not be deleted: {explain(error)}")
    return decision


def delete(path: Path) -> None:
    """Delete a step such that it is never seen half deleted: it is renamed first. What a crash or
    an error leaves of it, `collect` deletes."""
    if isinstance(path, ObjectPath):
        delete_step(path)
        return
    aside = path.with_name(f"{path.name}.trash-{owner()}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    _remove(aside)


def _remove(aside: Path) -> None:
    """One file after the other, which a metadata server hardly notices."""
    shutil.rmtree(aside, ignore_errors=True)
    if aside.exists():
        where = printable(str(aside))
        logger.warning("could not delete all of %s; tried again after the next save", where)


def tmp_path(final: Path) -> Path:
    """Where this process writes the step that is going to be `final`: a new place each time, so
    that whoever still writes to a save that was given up is not in the way of the next."""
    return final.with_name(f"{final.name}.tmp-{next(_numbers)}-{owner()}")


def collect(directory: Path, lost: Collection[str] = ()) -> None:
    """Remove half-written directories whose owners are dead, and finish deletions that they, or
    this process, did not.

    Args:
        directory: of the checkpoints.
        lost: owners that may write here no more, whether or not they live.
    """
    if isinstance(directory, ObjectPath):
        collect_steps(directory, lost)
        return
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        match = _ASIDE.fullmatch(path.name)
        if match is None:
            continue
        if path.name.endswith(f".trash-{owner()}"):
            _remove(path)
        elif is_owner(path.name, lost) or _is_abandoned(path):
            logger.info("removing %s, which a dead run left behind", printable(str(path)))
            _remove_left(path)


def _remove_left(path: Path) -> None:
    """Renamed first: a commit of it that is still under way somewhere fails, or was whole."""
    aside = path
    if ".trash-" not in path.name:
        aside = path.with_name(f"{path.name}.trash-{owner()}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            logger.warning("could not delete %s: %s", printable(str(path)), explain(error))
            return
    _remove(aside)


def _is_abandoned(path: Path) -> bool:
    alive = is_alive(path.name)
    if alive is not None:
        return not alive
    try:
        times = [entry.stat().st_mtime for entry in (path, *path.rglob("*"))]
    except OSError:  # it changes at this moment
        return False
    return time.time() - max(times) > FOREIGN_SECONDS


# --- being read ----------------------------------------------------------------------------------


@contextmanager
def reading_lock(path: Path) -> Iterator[None]:
    """While it is held, retention does not delete the step at `path`. In any process; the kernel
    drops it when that process dies.

    A shared flock on the commit record. It holds between processes of one machine; between
    machines it is best effort, as network filesystems differ in whether they pass locks on; object
    stores have none.

    Raises:
        DamagedCheckpoint: there is no such step, or it is being deleted.
    """
    if isinstance(path, ObjectPath):
        yield
        return
    where = path / COMMIT_RECORD
    with reading(where):
        descriptor = retrying(os.open, where, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait
    try:
        _share(descriptor, where)
        yield
    finally:
        os.close(descriptor)


def _share(descriptor: int, where: Path) -> None:
    gone = DamagedCheckpoint(f"{where.parent}: is being deleted by retention")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise gone from error
    except OSError as error:
        logger.debug("%s: no locks on this filesystem: %s", where, explain(error))
    if not where.exists() or not os.path.samestat(where.stat(), os.fstat(descriptor)):
        raise gone  # renamed between open and flock


@contextmanager
def _unless_read(path: Path) -> Iterator[bool]:
    """Keep readers off the step at `path`; False if there are some. What has no commit record, or
    lies where there are no locks, counts as not being read."""
    if isinstance(path, ObjectPath):
        yield True
        return
    try:
        # For writing, though nothing is written: NFS gives exclusive locks on no other files.
        descriptor = os.open(path / COMMIT_RECORD, os.O_RDWR)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    except OSError:
        free = True
    try:
        yield free
    finally:
        os.close(descriptor)
