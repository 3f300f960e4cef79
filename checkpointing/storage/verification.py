"""Every byte of a checkpoint, compared with its commit record, and whether those bytes are a
checkpoint: anybody can write a record that agrees with its files. Reads without torch."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from checkpointing.errors import CheckpointError, DamagedCheckpoint, UnreadableCheckpoint
from checkpointing.format.layout import BLOCK_BYTES, MODEL, OPTIMIZER, FileRecord
from checkpointing.storage.kinds import storage_of
from checkpointing.storage.place import Place
from checkpointing.storage.reading import reading
from checkpointing.storage.source import CheckedBlocks
from checkpointing.storage.steps import (
    open_step,
    read_record,
    reading_lock,
    step_state,
    stored_tensors,
)

Problems = list[CheckpointError]
"""DamagedCheckpoint: what was read is not what was written; others: it could not be read."""


def is_damage(problem: CheckpointError) -> bool:
    """Whether reading again would find it again."""
    return isinstance(problem, DamagedCheckpoint) and not isinstance(problem, UnreadableCheckpoint)


class GivenUpError(Exception):
    """Whoever asked does not want to know any more."""


def verify_step(
    step: Place, *, threads: int = 4, pause: Callable[[], None] = lambda: None
) -> tuple[int, Problems]:
    """Read a step whole, on beyond the first problem; retention leaves it alone meanwhile. Of one
    without problems, state, indexes and headers are read as `load` does.

    Args:
        step: a checkpoint of ours.
        threads: that read; reading and the CRC leave the interpreter.
        pause: called before each block; may wait, or raise GivenUpError.

    Returns:
        Bytes that its record names, and what is wrong.
    """
    try:
        with reading_lock(step), ThreadPoolExecutor(threads) as pool:
            record = read_record(step)
            try:
                found = pool.map(
                    lambda name: _verify_file(step, name, record.files[name], pause), record.files
                )
                problems = [problem for of_file in found for problem in of_file]
            except GivenUpError:
                pool.shutdown(cancel_futures=True)
                raise
            size = sum(file.size for file in record.files.values())
            return size, problems or _unloadable(step)
    except CheckpointError as error:
        return 0, [error]


def _unloadable(path: Place) -> Problems:
    """Why a step whose files are those of its record is none that can be loaded."""
    try:
        step = open_step(path)
        for section in (MODEL, OPTIMIZER):
            stored_tensors(step, section, verify=False)
        step_state(step)
    except CheckpointError as error:
        return [error]
    return []


def _verify_file(step: Place, name: str, record: FileRecord, pause: Callable[[], None]) -> Problems:
    path = step / name
    problems: Problems = []
    try:
        with reading(path):
            storage_of(step).own_size(step, name)  # refuses what is behind a link
        with reading(path), storage_of(path).open(path) as file:
            if file.size != record.size:
                problems.append(
                    DamagedCheckpoint(f"{path}: has {file.size} bytes, {record.size} were written")
                )
            blocks = CheckedBlocks(file, path, record)
            for block in range(min(len(record.checksums), -(-file.size // BLOCK_BYTES))):
                pause()
                try:
                    blocks.check(block)
                except DamagedCheckpoint as error:
                    problems.append(error)
    except CheckpointError as error:
        problems.append(error)
    return problems
