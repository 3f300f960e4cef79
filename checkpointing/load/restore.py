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
from checkpointing.format.layout import MODEL, OPTIMIZER, CommitRecord, StoredTensor, parse_step
from checkpointing.format.sections import PlanInput, Specs, by_section, stored_by_name
from checkpointing.load.fill import read_tensors
from checkpointing.load.memory import LeftSlot, check, newest_whole, open_parts, survey, token
from checkpointing.load.reader import refuse_differences
from checkpointing.load.segments import Files
from checkpointing.ranks import RankError, Ranks
from checkpointing.save.pulls import Pull
from checkpointing.storage.kinds import storage_of
from checkpointing.storage.place import Place
from checkpointing.storage.steps import (
    list_steps,
    open_step,
    read_state,
    reading_lock,
    stored_tensors,
)

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]


def load_step(
    ranks: Ranks,
    path: Place,
    specs: tuple[Specs, Specs],
    targets: tuple[Tensors, Tensors],
    verify: bool,
    finite: Collection[str],
    refuse: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Load a committed step; returns its state. On all ranks. Rank 0 alone reads small files and
    headers, and keeps retention from deleting the step.

    Args:
        ranks: who loads.
        path: of the step.
        specs: of model and optimizer.
        targets: tensors of model and optimizer.
        verify: check checksums.
        finite: names of tensors that must not hold NaN or infinity, by section.
        refuse: raises if the state does not fit; on rank 0, before any tensor is read.

    Raises:
        RankError: on all ranks; its kind is WrongModel, DamagedCheckpoint or StorageError.
    """
    lock = ExitStack()

    def look() -> tuple[CommitRecord, tuple[dict[str, StoredTensor], ...], dict[str, Any]]:
        lock.enter_context(reading_lock(path))
        step = open_step(path)
        stored = tuple(
            stored_tensors(step, section, verify=False) for section in (MODEL, OPTIMIZER)
        )
        for section, there, wanted in zip((MODEL, OPTIMIZER), stored, specs, strict=True):
            try:
                refuse_differences(path, there, wanted, section.stem)
            except WrongModel:
                if verify:  # it is not known yet that the headers are good
                    stored_tensors(step, section, verify=True)
                raise
        state = read_state(path)
        refuse(state)
        return step.record, stored, state

    with lock:
        record, (model, optimizer), state = ranks.on_main(look)
        ranks.together(
            lambda: read_tensors(
                Files(
                    path,
                    lambda name: storage_of(path).open(path / name),
                    by_section(model, optimizer),
                    record.files if verify else {},
                ),
                by_section(*specs),
                by_section(*targets),
                ranks.group,
                ranks.nodes(),
                finite=finite,
            )
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

    @property
    def state(self) -> dict[str, Any]:
        """What was saved beside the tensors."""
        return dict(json.loads(self.parts[0].manifest.state))


def find_memory(
    ranks: Ranks, directory: Place, layout: Callable[[], PlanInput], held: ExitStack
) -> Memory | None:
    """The step in memory that is whole and no older than storage, if there is one. On all ranks.

    Args:
        ranks: who loads.
        directory: of the checkpoints.
        layout: says where what is to be loaded would be stored.
        held: until it is closed, nobody takes over or deletes what was found.
    """
    run = ranks.on_main(lambda: token(directory))
    left = survey_all(ranks, directory, run, held) if run else []
    if not run or not left:
        return None

    def look() -> tuple[int | None, int | None]:
        paths = list_steps(directory)
        return newest_step(paths), _newest_good(paths)

    planned = layout()
    listed, good = ranks.on_main(look)  # after `survey`: who lived until then may have saved
    found = newest_whole(left, planned.tensors, listed, good)
    if found is None:
        return None
    return Memory(found[0], listed, good, run, found[1], stored_by_name(planned.files))


def survey_all(ranks: Ranks, directory: Place, run: str, held: ExitStack) -> list[LeftSlot]:
    """What a run left in the memory of all machines. On all ranks; see `survey`."""
    ranks.nodes()

    def look() -> list[LeftSlot]:
        return survey(str(directory), ranks.node, run, held) if ranks.first_of_node else []

    return [part for of_rank in ranks.together(look) for part in of_rank]


def load_memory(
    ranks: Ranks,
    memory: Memory,
    pull: Pull,
    specs: tuple[Specs, Specs],
    targets: tuple[Tensors, Tensors],
    finite: Collection[str],
) -> bool:
    """Load what `find_memory` found; False, and the targets are as they were, if it is not what was
    left there. On all ranks.

    Raises:
        RankError: on all ranks: some was loaded, and the rest cannot be.
    """

    def check_mine() -> None:
        for part in memory.parts:
            if ranks.first_of_node and part.home == ranks.node:
                check(part, memory.run)

    try:
        ranks.together(check_mine)
    except RankError as failed:
        if ranks.is_main:
            logger.warning("memory of step %d is not used: %s", memory.step, failed.message)
        return False
    ranks.together(
        lambda: read_tensors(
            Files(
                Path("memory"),
                lambda name: open_parts(name, memory.parts, ranks.node, pull, memory.run),
                memory.stored,
                {},
            ),
            by_section(*specs),
            by_section(*targets),
            ranks.group,
            ranks.nodes(),
            finite=finite,
        )
    )
    if ranks.is_main:
        logger.warning(
            "restored step %d from memory; storage has %s",
            memory.step,
            "it too" if memory.newest == memory.step else memory.newest or "none",
        )
    return True


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
