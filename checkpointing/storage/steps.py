"""The steps in a checkpoint directory, read without torch: which exist, are good, and hold what."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from isal.isal_zlib import crc32

from checkpointing.errors import (
    CheckpointError,
    DamagedCheckpoint,
    StorageError,
    UnreadableCheckpoint,
    reading,
)
from checkpointing.format.layout import (
    ADAPTER,
    BLOCK_BYTES,
    COMMIT_RECORD,
    LATEST,
    MODEL,
    TRAINER_STATE,
    CommitRecord,
    FileRecord,
    Section,
    StoredTensor,
    check_state,
    header_bytes,
    parse_header,
    parse_index,
    parse_state,
    parse_step,
    sections_of,
)
from checkpointing.format.peft import CONFIG as ADAPTER_CONFIG
from checkpointing.format.untrusted import MAX_JSON_BYTES, printable
from checkpointing.storage.interface import NewStep, Storage, StoredFile
from checkpointing.storage.place import ObjectPath, P, Place
from checkpointing.storage.posix import block_buffer
from checkpointing.storage.posix_storage import PosixStorage

_POSIX: Storage[Any] = PosixStorage()


def storage_of(place: P) -> Storage[P]:
    """The storage that holds a file or directory."""
    storage = _POSIX
    if isinstance(place, ObjectPath):
        from checkpointing.storage.object_storage import ObjectStorage  # few runs need it

        storage = ObjectStorage()
    return storage


MAX_POINTER_BYTES = 4096


@dataclass(frozen=True)
class CommittedStep:
    """A committed checkpoint: its record is valid, every file has its size, and every file but
    the tensor files has its checksums."""

    path: Place
    record: CommitRecord

    @property
    def sections(self) -> tuple[Section, Section]:
        """Sections of the step: that of its model or adapter, and that of its optimizer."""
        return sections_of(self.record.files)


def list_steps(directory: P) -> list[P]:
    """Directories named as committed steps, newest first; whether they are good is not known.

    Raises:
        StorageError: the directory cannot be read.
    """
    with reading(directory):
        paths = storage_of(directory).steps(directory)
    found = {path: parse_step(path.name) for path in paths}
    steps = {path: step for path, step in found.items() if step is not None}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def latest(directory: Place) -> str | None:
    """What the pointer beside the steps names; None if there is no pointer.

    Raises:
        DamagedCheckpoint, StorageError: it cannot be read.
    """
    where = directory / LATEST
    if not storage_of(where).exists_as(where):
        return None
    with reading(where):
        text = storage_of(where).read(where, MAX_POINTER_BYTES, follow=False)
        return text.decode(errors="replace").strip()


@contextmanager
def reading_lock(path: Place) -> Iterator[None]:
    """While it is held, retention does not delete the step at `path`. In any process of the user
    who trains; the kernel drops it when that process dies. It holds between processes of one
    machine; between machines it is best effort, as network filesystems differ in whether they pass
    locks on; object stores have none, and other users take none.

    Raises:
        DamagedCheckpoint: there is no such step, or it is being deleted.
    """
    with storage_of(path).reading_lock(path):
        yield


def new_step(final: Place, damaged: Collection[str]) -> NewStep | None:
    """To write the step that is going to be `final`; None if it is committed already.

    Args:
        final: its path.
        damaged: names of steps that are known to be damaged, though their records are good; such a
            one is deleted to be written again.
    """
    storage = storage_of(final)
    if storage.exists_as(final):
        if not storage.is_foreign(final) and final.name not in damaged and _is_good(final):
            return None
        storage.delete_step(final)  # or puts it aside
    return storage.new_step(final)


def _is_good(path: Place) -> bool:
    try:
        open_step(path)
    except UnreadableCheckpoint:  # no reason to delete it
        raise
    except DamagedCheckpoint:
        return False
    return True


def open_step(path: Place) -> CommittedStep:
    """Check a committed checkpoint as far as is cheap. Reads no tensors.

    Raises:
        DamagedCheckpoint: names the file.
        StorageError: it cannot be read.
    """
    record = read_record(path)
    with reading(path):
        for name, size in storage_of(path).sizes(path, record.files):
            file, expected = path / name, record.files[name]
            if size != expected.size:
                raise DamagedCheckpoint(f"{file}: has {size} bytes, {expected.size} were written")
            if not name.endswith(".safetensors"):
                _check_small(file, expected)
    for name in (TRAINER_STATE, *(section.index for section in sections_of(record.files))):
        if name not in record.files:
            raise DamagedCheckpoint(f"{path / COMMIT_RECORD}: names no {name}")
    return CommittedStep(path, record)


def read_record(path: Place) -> CommitRecord:
    """The commit record of the step at `path`.

    Raises:
        DamagedCheckpoint: it is missing or malformed, or is that of another step.
        StorageError: it cannot be read.
    """
    where = path / COMMIT_RECORD
    with reading(where):
        record = CommitRecord.decode(storage_of(where).read(where, MAX_JSON_BYTES), str(where))
    if parse_step(path.name) not in (None, record.step):
        raise DamagedCheckpoint(f"{where}: is the record of step {record.step}, not of this one")
    return record


def _check_small(file: Place, expected: FileRecord) -> None:
    with storage_of(file).open(file) as stored:
        buffer = block_buffer(expected.size)
        for block in range(len(expected.checksums)):
            _check_block(stored, file, expected, block, buffer)


def newest_checkpoint(directory: P) -> P | None:
    """The newest committed step in `directory` that `open_step` finds good, None without one.

    Cheap (reads no tensors, needs no torch), so it may be called before a job starts, on any rank.
    """
    for path in list_steps(directory):
        try:
            open_step(path)
            return path
        except DamagedCheckpoint:
            continue
    return None


def read_state(path: Place) -> dict[str, Any]:
    """The `state` that was saved in the checkpoint at `path`.

    Raises:
        DamagedCheckpoint, StorageError: as `open_step`.
    """
    return step_state(open_step(path))


def step_state(step: CommittedStep) -> dict[str, Any]:
    """The `state` that was saved in a step.

    Raises:
        DamagedCheckpoint, StorageError: it is not a JSON object, or of another step, or cannot be
            read.
    """
    where = step.path / TRAINER_STATE
    with reading(where):
        state = parse_state(storage_of(where).read(where, MAX_JSON_BYTES), str(where))
    check_state(state, step.record.step, str(where))
    return state


def stored_tensors(
    step: CommittedStep, section: Section, *, verify: bool
) -> dict[str, StoredTensor]:
    """Where every tensor of a section lies, from the headers of its files.

    Args:
        step: a checkpoint of ours.
        section: one of its `sections`.
        verify: check the checksums of the blocks that hold the headers.

    Raises:
        DamagedCheckpoint: a header is damaged, or contradicts the index.
    """
    path, index, records = step.path, section.index, step.record.files
    weight_map = _weight_map(path, index)
    files = sorted(set(weight_map.values()))
    for file in files:
        if file not in records:
            raise DamagedCheckpoint(f"{path / index}: names {file}, which was not saved with it")
    headers = {file: read_header(path, file, records[file] if verify else None) for file in files}
    for file, header in headers.items():
        for name in header:
            if weight_map.get(name) != file:
                there = weight_map.get(name, "nowhere")
                raise DamagedCheckpoint(
                    f"{path / file}: holds {name}, which {index} says lies in {there}"
                )
    tensors = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise DamagedCheckpoint(f"{path / file}: lacks {name}, which {index} says it holds")
        tensors[name] = headers[file][name]
    return tensors


ADAPTER_CURE = (
    "it holds an adapter: merge it into its model (perdure ckpt export --merge, or "
    "merge_and_unload of PEFT), and give the directory that you make"
)
SINGLE_FILE = "model.safetensors"
"""The weights of a Hugging Face directory that is not sharded."""


def plain_adapter(path: Place) -> dict[str, StoredTensor] | None:
    """Where the tensors of an adapter lie in a directory that PEFT wrote; None in any other.

    Raises:
        DamagedCheckpoint: the file is damaged.
    """
    if not storage_of(path).exists(path / ADAPTER.file(1, 1)):
        return None
    return read_header(path, ADAPTER.file(1, 1), None)


def hugging_face_tensors(path: Place) -> dict[str, StoredTensor]:
    """Where every tensor of a plain Hugging Face directory lies: in model.safetensors, or else in
    the files that an index names. As transformers reads them: an index beside model.safetensors is
    an older one, and of an index only the names of files count.

    Raises:
        DamagedCheckpoint: a file is missing, damaged, or contradicts the others.
        StorageError: there is no safetensors model there.
    """
    storage = storage_of(path)
    if storage.exists(path / SINGLE_FILE):
        return read_header(path, SINGLE_FILE, None)
    if not storage.exists(path / MODEL.index):
        raise StorageError(f"{path}: holds neither {SINGLE_FILE} nor {MODEL.index}; {_else(path)}")
    weight_map = _weight_map(path, MODEL.index)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in read_header(path, file, None).items():
            if name in tensors:
                raise DamagedCheckpoint(
                    f"{path}: {printable(name)} is in {tensors[name].file} and in {file}, which "
                    f"{MODEL.index} names both; remove the files that are left of another save"
                )
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise DamagedCheckpoint(
                f"{path / file}: lacks {printable(name)}, which {MODEL.index} says it holds"
            )
    return tensors


def _else(path: Place) -> str:
    """What to do with a directory that has no weights where they are expected."""
    storage = storage_of(path)
    names: list[str] = []
    with suppress(OSError, CheckpointError):
        names = sorted(printable(entry.name) for entry in storage.children(path))
    if ADAPTER_CONFIG in names:
        return ADAPTER_CURE
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        return (
            f"it has {pickles[0]}, a pickle, which may run code and is not opened; convert it where"
            " you trust it: AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW)"
        )
    others = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if others and others[0].endswith(".safetensors"):
        return f"it has {others[0]}: call that {SINGLE_FILE} if it is the whole model"
    if others:
        return f"it has {others[0]}: give the model in safetensors that it was made from"
    return "give a directory of Hugging Face safetensors or a checkpoint of ours"


def _weight_map(path: Place, index: str) -> dict[str, str]:
    """File by the name of the tensor in it, as an index says.

    Raises:
        DamagedCheckpoint, StorageError: it is not an index, or cannot be read.
    """
    with reading(path / index):
        return parse_index(storage_of(path).read(path / index, MAX_JSON_BYTES), str(path / index))


def read_header(path: Place, file: str, record: FileRecord | None) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, from its header.

    Args:
        path: the checkpoint directory.
        file: relative to it.
        record: what was written; its blocks that hold the header are checked. None: no check.

    Raises:
        DamagedCheckpoint: names the file, and the block where a checksum is wrong.
    """
    with reading(path / file), storage_of(path).open(path / file) as stored:
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
    stored: StoredFile, file: Place, record: FileRecord, block: int, buffer: memoryview
) -> None:
    size = stored.read_into([buffer], block * BLOCK_BYTES)
    found = crc32(buffer[:size])
    if block >= len(record.checksums) or found != record.checksums[block]:
        start = block * BLOCK_BYTES
        raise DamagedCheckpoint(
            f"{file}: checksum of block {block} (from byte {start} on) is wrong; the file was "
            "changed after it was saved"
        )
