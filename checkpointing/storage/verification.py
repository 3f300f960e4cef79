"""Every byte of a checkpoint, compared with its commit record, and whether those bytes are a
checkpoint: anybody can write a record that agrees with its files. Reads without torch."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from checkpointing.errors import CheckpointError, DamagedCheckpoint, UnreadableCheckpoint, reading
from checkpointing.format.layout import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    MODEL,
    OPTIMIZER,
    FileRecord,
    StoredTensor,
)
from checkpointing.storage.place import Place
from checkpointing.storage.source import CheckedBlocks
from checkpointing.storage.steps import (
    CommittedStep,
    open_step,
    read_header,
    read_record,
    reading_lock,
    step_state,
    storage_of,
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
                odd = record.odd if _of_trainer(step) else None
                found = pool.map(
                    lambda name: _verify_file(step, name, record.files[name], odd, pause),
                    record.files,
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
        files = {
            tensor.file
            for section in step.sections
            for tensor in stored_tensors(step, section, verify=False).values()
        }
        for name in step.record.files:
            if name.endswith(".safetensors") and name not in files and _holds_tensors(step, name):
                raise DamagedCheckpoint(f"{path / name}: holds tensors that no index names")
        step_state(step)
    except CheckpointError as error:
        return [error]
    return []


def _holds_tensors(step: CommittedStep, name: str) -> bool:
    return bool(read_header(step.path, name, None))


def _of_trainer(step: Place) -> bool:
    """Whether a run of the trainer wrote the step: then no tensor holds NaN or infinity that its
    record does not name. Loops of others may keep anything in theirs."""
    try:
        return "recipe" in step_state(open_step(step))
    except CheckpointError:  # is told by whoever reads that file
        return False


def _verify_file(
    step: Place,
    name: str,
    record: FileRecord,
    odd: Collection[str] | None,
    pause: Callable[[], None],
) -> Problems:
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
            tensors = [] if odd is None else _floats(step, name)
            problems += [
                DamagedCheckpoint(f"{path}: {tensor} is not aligned, as what a run writes is")
                for tensor, at in tensors
                if at.begin % DTYPE_BYTES[at.meta.dtype]
            ]
            section = OPTIMIZER if name.startswith(OPTIMIZER.folder) else MODEL
            tensors = [
                (tensor, at)
                for tensor, at in tensors
                if f"{section.stem}/{tensor}" not in (odd or ())
                and not at.begin % DTYPE_BYTES[at.meta.dtype]
            ]
            for block in range(min(len(record.checksums), -(-file.size // BLOCK_BYTES))):
                pause()
                try:
                    size = blocks.check(block)
                except DamagedCheckpoint as error:
                    problems.append(error)
                    continue
                bad = _not_finite(tensors, blocks.held(size), block * BLOCK_BYTES)
                problems += [DamagedCheckpoint(f"{path}: NaN or infinity in {one}") for one in bad]
                tensors = [one for one in tensors if one[0] not in bad]
    except CheckpointError as error:
        problems.append(error)
    return problems


def _floats(step: Place, name: str) -> Sequence[tuple[str, StoredTensor]]:
    """Tensors of a file that could hold NaN or infinity; none where its header is damaged, which is
    told else."""
    from checkpointing.format.bits import may_be_infinite  # numpy: a writer starts without it

    if not name.endswith(".safetensors"):
        return []
    try:
        header = read_header(step, name, None)
    except CheckpointError:
        return []
    return [(tensor, at) for tensor, at in header.items() if may_be_infinite(at.meta.dtype)]


def _not_finite(
    tensors: Sequence[tuple[str, StoredTensor]], data: memoryview, offset: int
) -> Collection[str]:
    """Names of tensors that hold NaN or infinity in a part of their file, from `offset` on."""
    if not tensors:
        return ()
    import numpy as np  # a writer starts without it

    from checkpointing.format.bits import is_finite

    found = set()
    for name, at in tensors:
        begin, end = max(at.begin, offset), min(at.begin + at.meta.nbytes, offset + len(data))
        bits = np.frombuffer(data[begin - offset : end - offset], np.uint8) if begin < end else None
        if bits is not None and not is_finite(at.meta.dtype, bits):
            found.add(name)
    return found
