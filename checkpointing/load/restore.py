"""Loading on all ranks: a step in storage, or one that a dead run left in memory."""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, WrongModel
from checkpointing.format.layout import (
    MODEL,
    OPTIMIZER,
    CommitRecord,
    StoredTensor,
    TensorMeta,
    parse_step,
    sections_of,
)
from checkpointing.format.sections import by_section, stored_by_name
from checkpointing.load.fill import read_together
from checkpointing.load.memory import LeftSlot, check, newest_whole, open_parts, survey, token
from checkpointing.load.reader import refuse_differences
from checkpointing.load.segments import Files
from checkpointing.ranks import RankError, Ranks
from checkpointing.save.peers import Pull
from checkpointing.save.planning import Described, unguarded
from checkpointing.storage.place import Place
from checkpointing.storage.steps import (
    list_steps,
    open_step,
    read_state,
    reading_lock,
    storage_of,
    stored_tensors,
)

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Goal:
    """What a checkpoint is to be loaded into."""

    targets: tuple[Tensors, Tensors]
    """Tensors of model and optimizer."""
    described: Described
    """What all ranks hold of them."""
    finite: Collection[str]
    """Names of tensors that must not hold NaN or infinity, by section."""


Aim = Callable[[Mapping[str, Any], Mapping[str, TensorMeta]], Goal]
"""(state that was saved, optimizer tensors that were, as far as that is known) → goal. On all
ranks."""


def load_step(
    ranks: Ranks,
    path: Place,
    aim: Aim,
    verify: bool,
    refuse: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Load a committed step; returns its state. On all ranks. Rank 0
    alone reads small files and headers, and keeps retention from deleting the step.

    Args:
        ranks: who loads.
        path: of the step.
        aim: says what it is loaded into.
        verify: check checksums.
        refuse: raises if the state does not fit; on rank 0, before any tensor is read.

    Raises:
        RankError: on all ranks; its kind is WrongModel, DamagedCheckpoint or StorageError.
    """
    lock = ExitStack()

    def look() -> tuple[CommitRecord, tuple[dict[str, StoredTensor], ...], dict[str, Any]]:
        lock.enter_context(reading_lock(path))
        step = open_step(path)
        stored = tuple(stored_tensors(step, one, verify=False) for one in step.sections)
        return step.record, stored, read_state(path)

    def compare() -> None:
        for section, there, wanted in zip(
            sections_of(record.files), (model, optimizer), goal.described.specs, strict=True
        ):
            try:
                what = OPTIMIZER.stem if section is OPTIMIZER else MODEL.stem
                refuse_differences(path, there, wanted, what)
            except WrongModel:
                if verify:  # it is not known yet that the headers are good
                    stored_tensors(open_step(path), section, verify=True)
                raise
        refuse(state)

    with lock:
        record, (model, optimizer), state = ranks.on_main(look)
        goal = aim(state, {name: tensor.meta for name, tensor in optimizer.items()})
        ranks.on_main(compare)
        read_together(
            ranks,
            Files(
                path,
                lambda name: storage_of(path).open(path / name),
                by_section(model, optimizer),
                record.files if verify else {},
            ),
            by_section(*goal.described.specs),
            by_section(*goal.targets),
            ranks.nodes(),
            goal.finite,
        )
    return state


# --- memory ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """A step that a dead run left in memory. Equal on all ranks."""

    step: int
    listed: int | None
    """Newest step in storage, good or not."""
    newest: int | None
    """Newest good step in storage."""
    run: str
    """The token of the run."""
    parts: list[LeftSlot]
    stored: dict[str, StoredTensor]
    state: dict[str, Any]
    """What was saved beside the tensors."""
    goal: Goal


def find_memory(ranks: Ranks, directory: Place, aim: Aim, held: ExitStack) -> Memory | None:
    """The step in memory that is whole and no older than storage, if there is one. On all ranks.

    Args:
        ranks: who loads.
        directory: of the checkpoints.
        aim: says what it is loaded into.
        held: until it is closed, nobody takes over or deletes what was found.
    """
    run = ranks.on_main(lambda: token(directory))
    left = survey_all(ranks, directory, run, held) if run else []
    if not run or not left:
        return None

    def look() -> tuple[int | None, int | None]:
        paths = list_steps(directory)
        return newest_step(paths), _newest_good(paths)

    listed, good = ranks.on_main(look)  # after `survey`: who lived until then may have saved
    digests = dict.fromkeys(part.manifest.tensors for part in left)
    whole = [newest_whole(left, digest, listed, good) for digest in digests]
    found = sorted((one for one in whole if one), key=lambda one: one[0], reverse=True)
    for step, parts in found:
        state = dict(json.loads(parts[0].manifest.state))
        goal = aim(state, {})
        planned = goal.described.layout
        if planned.tensors == parts[0].manifest.tensors:
            stored = stored_by_name(planned.files)
            return Memory(step, listed, good, run, parts, stored, state, goal)
    return None


def survey_all(ranks: Ranks, directory: Place, run: str, held: ExitStack) -> list[LeftSlot]:
    """What a run left in the memory of all machines. On all ranks; see `survey`."""
    ranks.nodes()

    def look() -> list[LeftSlot]:
        return survey(str(directory), ranks.node, run, held) if ranks.first_of_node else []

    return [part for of_rank in ranks.together(look) for part in of_rank]


def look_at(
    ranks: Ranks,
    memory: Memory,
    refuse: Callable[[Mapping[str, Any]], None],
    holds: Callable[[Mapping[str, Any]], bool],
) -> dict[int, bool] | None:
    """Compare what `find_memory` found with its checksums. On all ranks.

    Args:
        ranks: who loads.
        memory: what was found.
        refuse: raises WrongModel if the state does not fit; on rank 0.
        holds: on each rank, whether its targets are what was saved with the state, but for buffers.

    Returns:
        What `holds` says, by rank; None if it is not what was left there.

    Raises:
        RankError: on all ranks: `refuse` did.
    """

    def look() -> bool:
        if ranks.is_main:
            refuse(memory.state)
        for part in memory.parts:
            if ranks.first_of_node and part.home == ranks.node:
                check(part, memory.run)
        return holds(memory.state)

    try:
        return dict(zip(ranks.all, ranks.together(look), strict=True))
    except RankError as failed:
        if issubclass(failed.kind, WrongModel):
            raise
        if ranks.is_main:
            logger.warning("memory of step %d is not used: %s", memory.step, failed.message)
        return None


def load_memory(ranks: Ranks, memory: Memory, pull: Pull, kept: Mapping[int, bool]) -> None:
    """Load what `look_at` found good. On all ranks.

    Args:
        ranks: who loads.
        memory: what is loaded.
        pull: fetches from other nodes.
        kept: by rank, whether its targets are what was saved: such a rank reads buffers alone.

    Raises:
        RankError: on all ranks: some was loaded, and the rest cannot be.
    """
    specs, targets = by_section(*memory.goal.described.specs), by_section(*memory.goal.targets)
    if kept[ranks.rank]:
        read = unguarded(*memory.goal.targets)
        specs = {name: spec for name, spec in specs.items() if name in read}
        targets = {name: target for name, target in targets.items() if name in read}
    # Each of those that read little reads by itself: the others of its node read more.
    nodes = [tuple(rank for rank in node if not kept[rank]) for node in ranks.nodes()]
    nodes += [(rank,) for rank, keeps in kept.items() if keeps]
    read_together(
        ranks,
        Files(
            Path("memory"),
            lambda name: open_parts(name, memory.parts, ranks.node, pull, memory.run),
            memory.stored,
            {},
        ),
        specs,
        targets,
        tuple(filter(None, nodes)),
        memory.goal.finite,
    )
    if ranks.is_main:
        keep = sum(kept.values())
        logger.warning(
            "restored step %d from memory%s; storage has %s",
            memory.step,
            f", {keep} of {len(kept)} ranks by what they have kept" if keep else "",
            "it too" if memory.newest == memory.step else memory.newest or "none",
        )


def newest_step(paths: Sequence[Place]) -> int | None:
    """The newest of steps that `list_steps` found, good or not."""
    return parse_step(paths[0].name) if paths else None


def _newest_good(paths: Sequence[Place]) -> int | None:
    """The newest step in storage whose record is good. Reads no tensors."""
    for path in paths:
        try:
            return open_step(path).record.step
        except DamagedCheckpoint:
            continue
    return None
