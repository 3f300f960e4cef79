"""Loading on all ranks: a step in storage, or one that a dead run left in memory."""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, WrongModel
from checkpointing.fill import read_tensors
from checkpointing.layout import MODEL, OPTIMIZER, CommitRecord, StoredTensor, parse_step
from checkpointing.memory import Left, check, newest_whole, open_parts, survey
from checkpointing.options import CheckpointOptions
from checkpointing.pulls import Pull
from checkpointing.ranks import RankError, Ranks
from checkpointing.reader import refuse_differences
from checkpointing.retention import reading_lock
from checkpointing.sections import Specs, by_section, plan_input, stored_by_name
from checkpointing.steps import open_step, read_state, stored_tensors
from checkpointing.storage import open_file

logger = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]


def load_step(
    ranks: Ranks,
    path: Path,
    specs: tuple[Specs, Specs],
    targets: tuple[Tensors, Tensors],
    verify: bool,
) -> dict[str, Any]:
    """Load a committed step; returns its state. On all ranks. Rank 0 alone reads small files and
    headers, and keeps retention from deleting the step.

    Args:
        ranks: who loads.
        path: of the step.
        specs: of model and optimizer.
        targets: tensors of model and optimizer.
        verify: check checksums.

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
        return step.record, stored, read_state(path)

    with lock:
        record, (model, optimizer), state = ranks.on_main(look)
        ranks.together(
            lambda: read_tensors(
                path,
                lambda name: open_file(path / name),
                by_section(model, optimizer),
                by_section(*specs),
                by_section(*targets),
                record.files if verify else {},
                ranks.group,
                ranks.nodes(),
            )
        )
    return state


# --- memory ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """A step that a dead run left in memory. Equal on all ranks."""

    step: int
    newest: int | None
    """Newest good step in storage."""
    run: str
    """The token of the run."""
    parts: list[Left]
    stored: dict[str, StoredTensor]

    @property
    def state(self) -> dict[str, Any]:
        """What was saved beside the tensors."""
        return dict(json.loads(self.parts[0].manifest.state))


def find_memory(
    ranks: Ranks,
    directory: Path,
    run: str | None,
    paths: Sequence[Path],
    specs: tuple[Specs, Specs],
    options: CheckpointOptions,
    held: ExitStack,
) -> Memory | None:
    """The step in memory that is whole and no older than storage, if there is one. On all ranks.

    Args:
        ranks: who loads.
        directory: of the checkpoints.
        run: the token of the run; None: there is none.
        paths: the steps in storage, newest first.
        specs: of model and optimizer.
        options: the `checkpoint:` section.
        held: until it is closed, nobody takes over or deletes what was found.
    """
    if run is None:
        return None
    left = survey_all(ranks, directory, run, held)
    if not left:
        return None
    newest = ranks.on_main(lambda: _newest_good(paths))
    listed = parse_step(paths[0].name) if paths else None
    layout = plan_input(*specs, options.max_shard_bytes)
    found = newest_whole(left, layout.tensors, listed, newest)
    if found is None:
        return None
    return Memory(found[0], newest, run, found[1], stored_by_name(layout.files))


def survey_all(ranks: Ranks, directory: Path, run: str, held: ExitStack) -> list[Left]:
    """What a run left in the memory of all machines. On all ranks; see `survey`."""
    ranks.nodes()

    def look() -> list[Left]:
        return survey(str(directory), ranks.node, run, held) if ranks.first_of_node else []

    return [part for of_rank in ranks.together(look) for part in of_rank]


def load_memory(
    ranks: Ranks,
    memory: Memory,
    pull: Pull,
    specs: tuple[Specs, Specs],
    targets: tuple[Tensors, Tensors],
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
            Path("memory"),
            lambda name: open_parts(name, memory.parts, ranks.node, pull, memory.run),
            memory.stored,
            by_section(*specs),
            by_section(*targets),
            {},
            ranks.group,
            ranks.nodes(),
        )
    )
    if ranks.is_main:
        logger.warning(
            "restored step %d from memory; storage has %s",
            memory.step,
            "it too" if memory.newest == memory.step else memory.newest or "none",
        )
    return True


def _newest_good(paths: Sequence[Path]) -> int | None:
    """The newest step in storage whose record is good. Reads no tensors."""
    for path in paths:
        try:
            return open_step(path).record.step
        except DamagedCheckpoint:
            continue
    return None
