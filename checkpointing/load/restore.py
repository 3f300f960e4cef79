"""Loads a step on all ranks, from storage or from the memory that a dead run left."""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, WrongModel
from checkpointing.format import layout
from checkpointing.format.plan import by_section, stored_by_name
from checkpointing.load.fill import read_together
from checkpointing.load.memory import (
    LoadLeftoverSlot,
    LoadSlotsFile,
    check,
    leftover_slots,
    newest_whole,
    token,
)
from checkpointing.load.reader import refuse_differences
from checkpointing.load.segments import LoadFiles
from checkpointing.ranks import RankError, RankGroup
from checkpointing.save.peers import Pull
from checkpointing.save.planning import SaveTensors, unguarded
from checkpointing.storage.place import StoragePlace
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
T = TypeVar("T")


@dataclass(frozen=True)
class LoadGoal:
    """The tensors to load a checkpoint into."""

    targets: tuple[Tensors, Tensors]
    """(tensors of the model, tensors of the optimizer)."""
    described: SaveTensors
    """Specs of these tensors, merged over all ranks."""
    finite: Collection[str]
    """Joint names (see plan.py) of tensors that must not hold NaN or infinity."""


GoalOf = Callable[[Mapping[str, Any], Mapping[str, layout.TensorMeta]], LoadGoal]
"""(saved trainer state, metadata of the saved optimizer tensors as far as known) → goal. Called on
all ranks."""


def load_step(
    ranks: RankGroup,
    path: StoragePlace,
    aim: GoalOf,
    verify: bool,
    refuse: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Load a committed step into the tensors that `aim` returns; returns its trainer state. Called
    on all ranks. Only rank 0 reads small files and headers, and locks the step against retention.
    It calls `refuse`, which raises if the state does not fit, before any tensor is read. Raises on
    all ranks a RankError, whose `kind` is WrongModel, DamagedCheckpoint or StorageError."""
    lock = ExitStack()

    def look() -> tuple[
        layout.CommitRecord, tuple[dict[str, layout.LayoutTensor], ...], dict[str, Any]
    ]:
        lock.enter_context(reading_lock(path))
        step = open_step(path)
        stored = tuple(stored_tensors(step, one, verify=False) for one in step.sections)
        return step.record, stored, read_state(path)

    def compare() -> None:
        for section, there, wanted in zip(
            layout.sections_of(record.files), (model, optimizer), goal.described.specs, strict=True
        ):
            try:
                # to the user, an adapter is the model
                what = layout.OPTIMIZER.stem if section is layout.OPTIMIZER else layout.MODEL.stem
                refuse_differences(path, there, wanted, what)
            except WrongModel:
                if verify:  # headers are not checked yet, and a damaged one could cause the error
                    stored_tensors(open_step(path), section, verify=True)
                raise
        refuse(state)

    # The lock keeps retention from deleting the step until all ranks have read it.
    with lock:
        record, (model, optimizer), state = ranks.on_main(look)
        # Outside of `on_main`, as describing the targets is itself a collective operation.
        goal = aim(state, {name: tensor.meta for name, tensor in optimizer.items()})
        ranks.on_main(compare)
        files = LoadFiles(
            path,
            lambda name: storage_of(path).open(path / name),
            by_section(model, optimizer),
            record.files if verify else {},
        )
        wanted, targets = by_section(*goal.described.specs), by_section(*goal.targets)
        read_together(ranks, files, wanted, targets, ranks.nodes(), goal.finite)
    return state


@dataclass(frozen=True)
class _MemoryStep:
    """A step that a dead run left in memory. Equal on all ranks, except for `goal.targets`."""

    step: int
    listed: int | None
    """Newest step in storage, good or not."""
    newest: int | None
    """Newest good step in storage."""
    run: str
    """Token of the run, see memory.py [Note: token]."""
    parts: list[LoadLeftoverSlot]
    stored: dict[str, layout.LayoutTensor]
    state: dict[str, Any]
    goal: LoadGoal


def find_memory(
    ranks: RankGroup, directory: StoragePlace, aim: GoalOf, held: ExitStack
) -> _MemoryStep | None:
    """Returns the newest complete step in memory that is no older than storage; None if there is
    none. Called on all ranks. Locks keep other processes from taking over or deleting the slots,
    until `held` is closed."""

    def look() -> tuple[int | None, int | None]:
        paths = list_steps(directory)
        return newest_step(paths), _newest_good(paths)

    # The steps are read last, as a dying writer may have committed one meanwhile.
    run, left, steps = after_leftover_slots(ranks, directory, held, look)
    if not steps:
        return None
    listed, good = steps
    # A run may change its tensors between two starts, and leave slots of both versions.
    digests = dict.fromkeys(part.manifest.tensors for part in left)
    whole = [newest_whole(left, digest, listed, good) for digest in digests]
    found = sorted((one for one in whole if one), key=lambda one: one[0], reverse=True)
    for step, parts in found:
        # Every slot has the trainer state of rank 0, which SaveAdmitted carries.
        state = dict(json.loads(parts[0].manifest.state))
        goal = aim(state, {})
        planned = goal.described.layout
        if planned.tensors == parts[0].manifest.tensors:
            stored = stored_by_name(planned.files)
            return _MemoryStep(step, listed, good, run, parts, stored, state, goal)
    return None


def after_leftover_slots(
    ranks: RankGroup, directory: StoragePlace, held: ExitStack, look: Callable[[], T]
) -> tuple[str, list[LoadLeftoverSlot], T | None]:
    """Returns the run's token ("": it has none), the slots that dead processes of the run left in
    the memory of all machines, and the result of `look`. Rank 0 calls `look` after it knows all
    slots. Without slots `look` is not called, and its result is None. Called on all ranks."""

    def slots(run: str) -> list[LoadLeftoverSlot]:
        found = run and ranks.first_of_node
        return leftover_slots(str(directory), ranks.node, run, held) if found else []

    def on_this_node() -> tuple[str, list[LoadLeftoverSlot], T | None]:
        run = token(directory) or ""
        left = slots(run)
        return run, left, look() if left else None

    # One node needs a single exchange, before which rank 0 does its work, while new ranks still
    # build their model.
    if len(ranks.nodes()) == 1:
        return ranks.on_main(on_this_node)
    run = ranks.on_main(lambda: token(directory) or "")
    left = [part for of_rank in ranks.together(lambda: slots(run)) for part in of_rank]
    return run, left, ranks.on_main(look) if left else None


def check_memory(
    ranks: RankGroup,
    memory: _MemoryStep,
    refuse: Callable[[Mapping[str, Any]], None],
    holds: Callable[[Mapping[str, Any]], bool],
) -> dict[int, bool] | None:
    """Check the step that `find_memory` found: its state and its checksums. Called on all ranks.
    Raises RankError on all ranks if `refuse`, called on rank 0, has raised WrongModel because the
    state does not fit.

    Args:
        holds: whether this rank's targets, except buffers, still have the numbers that were saved
            with the state.

    Returns:
        Rank → result of `holds`; None if memory cannot be used, such as for a wrong checksum.
    """

    def look() -> bool:
        if ranks.is_main:
            refuse(memory.state)
        for part in memory.parts:
            # on one rank of each node, as `check` uses several cores
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


def load_memory(
    ranks: RankGroup, memory: _MemoryStep, pull: Pull, kept: Mapping[int, bool]
) -> None:
    """Load the step that `check_memory` accepted. Called on all ranks. Raises RankError on all
    ranks if the load failed; targets may have been overwritten.

    Args:
        kept: rank → whether its targets still have the saved numbers; such a rank reads only
            buffers.
    """
    specs, targets = by_section(*memory.goal.described.specs), by_section(*memory.goal.targets)
    if kept[ranks.rank]:
        read = unguarded(*memory.goal.targets)
        specs = {name: spec for name, spec in specs.items() if name in read}
        targets = {name: target for name, target in targets.items() if name in read}
    # A rank that reads only buffers counts as a node, as the other ranks of its node read more.
    nodes = [tuple(rank for rank in node if not kept[rank]) for node in ranks.nodes()]
    nodes += [(rank,) for rank, keeps in kept.items() if keeps]
    files = LoadFiles(
        Path("memory"),
        lambda name: nullcontext(LoadSlotsFile(name, memory.parts, ranks.node, pull, memory.run)),
        memory.stored,
        {},
    )
    together = tuple(filter(None, nodes))
    read_together(ranks, files, specs, targets, together, memory.goal.finite)
    if ranks.is_main:
        keep = sum(kept.values())
        logger.warning(
            "restored step %d from memory%s; storage has %s",
            memory.step,
            f", {keep} of {len(kept)} ranks by what they have kept" if keep else "",
            "it too" if memory.newest == memory.step else memory.newest or "none",
        )


def newest_step(paths: Sequence[StoragePlace]) -> int | None:
    """Returns the newest step in the result of `list_steps`, undamaged or not."""
    return layout.parse_step(paths[0].name) if paths else None


def _newest_good(paths: Sequence[StoragePlace]) -> int | None:
    """Returns the newest step whose commit record is undamaged. Reads no tensors."""
    for path in paths:
        try:
            return open_step(path).record.step
        except DamagedCheckpoint:
            continue
    return None
