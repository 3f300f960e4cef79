"""Verification of a checkpoint: compares every byte with the commit record, then parses the
contents. Needs no torch."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from checkpointing.errors import CheckpointError, DamagedCheckpoint, UnreadableCheckpoint, reading
from checkpointing.format.layout import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    MODEL,
    OPTIMIZER,
    FileRecord,
    LayoutTensor,
)
from checkpointing.storage import steps
from checkpointing.storage.place import StoragePlace

Problems = list[CheckpointError]
"""DamagedCheckpoint: the bytes are wrong. Other errors: the bytes could not be read."""


def is_damage(problem: CheckpointError) -> bool:
    """Whether the problem is in the bytes, so that another read would find it again."""
    return isinstance(problem, DamagedCheckpoint) and not isinstance(problem, UnreadableCheckpoint)


class StorageVerificationStoppedError(Exception):
    """Raised by `pause` to stop reading."""


def verify_step(
    step: StoragePlace, *, threads: int = 4, pause: Callable[[], None] = lambda: None
) -> tuple[int, Problems]:
    """Read a whole step, even after a problem. Retention does not delete it meanwhile. If all bytes
    are correct, state, indexes and headers are parsed as by `load`. Returns (bytes of the files in
    the commit record, problems).

    Args:
        threads: threads that read; reading and CRC release the GIL.
        pause: called before each block; may sleep, or raise StorageVerificationStoppedError.
    """
    try:
        with steps.reading_lock(step), ThreadPoolExecutor(threads) as pool:
            record = steps.read_record(step)
            try:
                odd = record.odd if _of_trainer(step) else None
                found = pool.map(
                    lambda name: _verify_file(step, name, record.files[name], odd, pause),
                    record.files,
                )
                problems = [problem for of_file in found for problem in of_file]
            except StorageVerificationStoppedError:  # otherwise the pool would read the other files
                pool.shutdown(cancel_futures=True)
                raise
            size = sum(file.size for file in record.files.values())
            return size, problems or _unloadable(step)
    except CheckpointError as error:
        return 0, [error]


def _unloadable(path: StoragePlace) -> Problems:
    """Returns why a step cannot be loaded although its bytes match its commit record."""
    try:
        step = steps.open_step(path)
        files = {
            tensor.file
            for section in step.sections
            for tensor in steps.stored_tensors(step, section, verify=False).values()
        }
        for name in step.record.files:
            unnamed = name.endswith(".safetensors") and name not in files
            if unnamed and steps.read_header(path, name, None):
                raise DamagedCheckpoint(f"{path / name}: holds tensors that no index names")
        steps.step_state(step)
    except CheckpointError as error:
        return [error]
    return []


def _of_trainer(step: StoragePlace) -> bool:
    """Whether the trainer wrote the step. Then the record must name all tensors with NaN or
    infinity. Other loops may save any numbers."""
    try:
        return "recipe" in steps.step_state(steps.open_step(step))
    except CheckpointError:  # `_verify_file` or `_unloadable` reports this error
        return False


def _verify_file(
    step: StoragePlace,
    name: str,
    record: FileRecord,
    odd: Collection[str] | None,
    pause: Callable[[], None],
) -> Problems:
    path = step / name
    problems: Problems = []
    try:
        with reading(path):
            steps.storage_of(step).own_size(step, name)  # raises for a link
        with reading(path), steps.storage_of(path).open(path) as file:
            if file.size != record.size:
                wrong = f"{path}: has {file.size} bytes, {record.size} were written"
                problems.append(DamagedCheckpoint(wrong))
            blocks = steps.StorageFileReader(file, path, record)
            tensors = [] if odd is None else _floats(step, name)
            problems += [
                DamagedCheckpoint(
                    f"{path}: {tensor} begins at byte {at.begin}, which is no multiple of its "
                    "element size, although every run writes aligned tensors"
                )
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
            # the blocks of a file with a wrong size may still be right
            for block in range(min(len(record.checksums), -(-file.size // BLOCK_BYTES))):
                pause()
                try:
                    size = blocks.check(block)
                except DamagedCheckpoint as error:
                    problems.append(error)
                    continue
                bad = _not_finite(tensors, blocks.held(size), block * BLOCK_BYTES)
                problems += [DamagedCheckpoint(f"{path}: NaN or infinity in {one}") for one in bad]
                tensors = [one for one in tensors if one[0] not in bad]  # reports each only once
    except CheckpointError as error:
        problems.append(error)
    return problems


def _floats(step: StoragePlace, name: str) -> Sequence[tuple[str, LayoutTensor]]:
    """Returns (name, tensor) for tensors of a file whose dtype has NaN or infinity; empty if the
    header is damaged, which `_unloadable` reports."""
    # imported late, as numpy would slow the start of a writer process
    from checkpointing.format.digests import may_be_infinite

    if not name.endswith(".safetensors"):
        return []
    try:
        header = steps.read_header(step, name, None)
    except CheckpointError:
        return []
    return [(tensor, at) for tensor, at in header.items() if may_be_infinite(at.meta.dtype)]


def _not_finite(
    tensors: Sequence[tuple[str, LayoutTensor]], data: memoryview, offset: int
) -> Collection[str]:
    """Returns names of tensors with NaN or infinity in `data`: bytes of their file at `offset`."""
    if not tensors:
        return ()
    import numpy as np  # imported late, as it would slow the start of a writer process

    from checkpointing.format.digests import is_finite

    found = set()
    for name, at in tensors:
        begin, end = max(at.begin, offset), min(at.begin + at.meta.nbytes, offset + len(data))
        bits = np.frombuffer(data[begin - offset : end - offset], np.uint8) if begin < end else None
        if bits is not None and not is_finite(at.meta.dtype, bits):
            found.add(name)
    return found
