"""The steps in a checkpoint directory, read without torch: which there are, which are good, what
is in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EFBIG, EIO, EISDIR, ELOOP, ENOENT, ENOTDIR, ENXIO
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from checkpointing.errors import DamagedCheckpoint, StorageError, UnreadableCheckpoint, explain
from checkpointing.layout import (
    BLOCK_BYTES,
    COMMIT_RECORD,
    MODEL,
    OPTIMIZER,
    TRAINER_STATE,
    CommitRecord,
    FileRecord,
    Section,
    StoredTensor,
    header_bytes,
    parse_header,
    parse_index,
    parse_state,
    parse_step,
)
from checkpointing.object_target import committed
from checkpointing.objects import ObjectPath
from checkpointing.storage import StoredFile, block_buffer, file_sizes, open_file, read_file
from checkpointing.untrusted import MAX_JSON_BYTES

_DAMAGE = {ENOTDIR, EISDIR, ELOOP, ENXIO, EFBIG}


@dataclass(frozen=True)
class Step:
    """A committed checkpoint: its record is valid, every file has its size, and every file but
    the tensor files has its checksums."""

    path: Path
    record: CommitRecord


def list_steps(directory: Path) -> list[Path]:
    """Directories named as committed steps, newest first; whether they are good is not known.

    Raises:
        StorageError: the directory cannot be read.
    """
    with reading(directory):
        if not directory.is_dir():
            return []
        paths = list(directory.iterdir())
        if isinstance(directory, ObjectPath):  # there a step has its name from its first object on
            paths = committed([path for path in paths if parse_step(path.name) is not None])
    found = {path: parse_step(path.name) for path in paths}
    steps = [(step, path) for path, step in found.items() if step is not None]
    return [path for _, path in sorted(steps, reverse=True)]


def open_step(path: Path) -> Step:
    """Check a committed checkpoint as far as is cheap. Reads no tensors.

    Raises:
        DamagedCheckpoint: names the file.
        StorageError: it cannot be read.
    """
    record = read_record(path)
    with reading(path):
        for name, size in file_sizes(path, record.files):
            file, expected = path / name, record.files[name]
            if size != expected.size:
                raise DamagedCheckpoint(f"{file}: has {size} bytes, {expected.size} were written")
            if not name.endswith(".safetensors"):
                _check_small(file, expected)
    for name in (TRAINER_STATE, MODEL.index, OPTIMIZER.index):
        if name not in record.files:
            raise DamagedCheckpoint(f"{path / COMMIT_RECORD}: names no {name}")
    return Step(path, record)


def read_record(path: Path) -> CommitRecord:
    """The commit record of the step at `path`.

    Raises:
        DamagedCheckpoint: it is missing or malformed, or is that of another step.
        StorageError: it cannot be read.
    """
    where = path / COMMIT_RECORD
    with reading(where):
        record = CommitRecord.decode(read_file(where, MAX_JSON_BYTES), str(where))
    if parse_step(path.name) not in (None, record.step):
        raise DamagedCheckpoint(f"{where}: is the record of step {record.step}, not of this one")
    return record


def _check_small(file: Path, expected: FileRecord) -> None:
    with open_file(file) as stored:
        buffer = block_buffer(expected.size)
        for block in range(len(expected.checksums)):
            _check_block(stored, file, expected, block, buffer)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest committed step in `directory` that `open_step` finds good, None without one.

    Cheap (reads no tensors, needs no torch), so it may be called before a job starts, on any rank.
    """
    for path in list_steps(directory):
        try:
            return open_step(path).path
        except DamagedCheckpoint:
            continue
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The `state` that was saved in the checkpoint at `path`.

    Raises:
        DamagedCheckpoint, StorageError: as `open_step`.
    """
    return step_state(open_step(path))


def step_state(step: Step) -> dict[str, Any]:
    """The `state` that was saved in a step.

    Raises:
        DamagedCheckpoint, StorageError: it is not a JSON object, or cannot be read.
    """
    where = step.path / TRAINER_STATE
    with reading(where):
        return parse_state(read_file(where, MAX_JSON_BYTES), str(where))


def stored_tensors(step: Step, section: Section, *, verify: bool) -> dict[str, StoredTensor]:
    """Where every tensor of a section lies, from the headers of its files.

    Args:
        step: a checkpoint of ours.
        section: MODEL or OPTIMIZER.
        verify: check the checksums of the blocks that hold the headers.

    Raises:
        DamagedCheckpoint: a header is damaged, or contradicts the index.
    """
    return _indexed(step.path, section.index, step.record.files, verify=verify)


def hugging_face_tensors(path: Path) -> dict[str, StoredTensor]:
    """Where every tensor of a plain Hugging Face directory lies (one model.safetensors, or several
    files and an index).

    Raises:
        DamagedCheckpoint: a file is missing, damaged, or contradicts the index.
        StorageError: there is no safetensors model there.
    """
    if (path / MODEL.index).exists():
        return _indexed(path, MODEL.index, None, verify=False)
    if (path / "model.safetensors").exists():
        return read_header(path, "model.safetensors", None)
    raise StorageError(
        f"{path}: holds neither model.safetensors nor {MODEL.index}; give a directory of "
        "Hugging Face safetensors or a checkpoint of ours"
    )


def _indexed(
    path: Path, index: str, records: dict[str, FileRecord] | None, *, verify: bool
) -> dict[str, StoredTensor]:
    """Tensors by an index and the headers of its files, which must be in `records` if given."""
    with reading(path / index):
        weight_map = parse_index(read_file(path / index, MAX_JSON_BYTES), str(path / index))
    files = sorted(set(weight_map.values()))
    for file in files:
        if records is not None and file not in records:
            raise DamagedCheckpoint(f"{path / index}: names {file}, which was not saved with it")
    headers = {
        file: read_header(path, file, records[file] if records and verify else None)
        for file in files
    }
    tensors = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise DamagedCheckpoint(f"{path / file}: lacks {name}, which {index} says it holds")
        tensors[name] = headers[file][name]
    return tensors


def read_header(path: Path, file: str, record: FileRecord | None) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, from its header.

    Args:
        path: the checkpoint directory.
        file: relative to it.
        record: what was written; its blocks that hold the header are checked. None: no check.

    Raises:
        DamagedCheckpoint: names the file, and the block where a checksum is wrong.
    """
    with reading(path / file), open_file(path / file) as stored:
        prefix = bytearray(8)
        stored.read_into([memoryview(prefix)], 0)
        header = bytearray(header_bytes(bytes(prefix), str(path / file), stored.size))
        if record:
            buffer = block_buffer(record.size)
            for block in range(-(-len(header) // BLOCK_BYTES)):
                _check_block(stored, path / file, record, block, buffer)
        stored.read_into([memoryview(header)], 0)
        return parse_header(bytes(header), file, stored.size, str(path / file))


def _check_block(
    stored: StoredFile, file: Path, record: FileRecord, block: int, buffer: memoryview
) -> None:
    size = stored.read_into([buffer], block * BLOCK_BYTES)
    found = crc32(buffer[:size])
    if block >= len(record.checksums) or found != record.checksums[block]:
        start = block * BLOCK_BYTES
        raise DamagedCheckpoint(
            f"{file}: checksum of block {block} (from byte {start} on) is wrong; the file was "
            "changed after it was saved"
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system says of a file of a checkpoint into errors of ours."""
    try:
        yield
    except OSError as error:
        if error.errno == ENOENT:
            raise DamagedCheckpoint(f"{error.filename or path}: is missing") from error
        if error.errno in _DAMAGE:
            raise DamagedCheckpoint(f"cannot be read: {explain(error)}") from error
        if error.errno == EIO:
            raise UnreadableCheckpoint(f"cannot be read: {explain(error)}") from error
        raise StorageError(f"cannot read {explain(error)}") from error
