"""The steps in a checkpoint directory, read without torch: which steps exist and are good, and
their contents."""

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
from checkpointing.format import layout
from checkpointing.format.peft import CONFIG as ADAPTER_CONFIG
from checkpointing.format.untrusted import MAX_JSON_BYTES, printable
from checkpointing.storage.interface import NewStoredStep, Storage, StorageFile
from checkpointing.storage.place import ObjectPath, P, StoragePlace
from checkpointing.storage.posix import block_buffer
from checkpointing.storage.posix_storage import PosixStorage

_POSIX: Storage[Any] = PosixStorage()


def storage_of(place: P) -> Storage[P]:
    storage = _POSIX
    if isinstance(place, ObjectPath):  # imported only where a run uses it
        from checkpointing.storage.object_storage import ObjectStorage

        storage = ObjectStorage()
    return storage


MAX_POINTER_BYTES = 4096


@dataclass(frozen=True)
class _CommittedStep:
    """A committed checkpoint: its record is valid, all files have the recorded sizes, and all files
    except tensor files have the recorded checksums."""

    path: StoragePlace
    record: layout.CommitRecord

    @property
    def sections(self) -> tuple[layout.FileLayoutPart, layout.FileLayoutPart]:
        return layout.sections_of(self.record.files)


class StorageFileReader:
    """Reads an open file in whole blocks, and compares them with the checksums of `record`."""

    def __init__(
        self, file: StorageFile, path: StoragePlace, record: layout.FileRecord | None
    ) -> None:
        self._file, self._path, self._record = file, path, record
        self._buffer = block_buffer(file.size)
        self._held: tuple[int, int] | None = None
        """Number and length of the block in the buffer."""

    def check(self, block: int) -> int:
        """Read and compare a block; returns its length in bytes. Raises DamagedCheckpoint if the
        checksum is wrong."""
        # If reading or the checksum fails, the buffer must not count as checked.
        self._held = None
        start = block * layout.BLOCK_BYTES
        size = self._file.read_into([self._buffer], start)
        if self._record is not None and (
            block >= len(self._record.checksums)
            or crc32(self._buffer[:size]) != self._record.checksums[block]
        ):
            raise DamagedCheckpoint(
                f"{self._path}: checksum of block {block} (from byte {start} on) is wrong; the "
                "file was changed after it was saved"
            )
        self._held = block, size
        return size

    def held(self, size: int) -> memoryview:
        """Returns the first `size` bytes of the last checked block, valid until the next check."""
        return self._buffer[:size]

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes of the file from `offset` on. Raises DamagedCheckpoint if a
        checksum is wrong, or the file ends too early."""
        done = 0
        while done < len(target):
            block, start = divmod(offset + done, layout.BLOCK_BYTES)
            size = self._held[1] if self._held and self._held[0] == block else self.check(block)
            stop = min(size, start + len(target) - done)
            if stop <= start:
                raise DamagedCheckpoint(f"{self._path}: ends too early; it was cut short")
            target[done : done + stop - start] = self._buffer[start:stop]
            done += stop - start


def list_steps(directory: P) -> list[P]:
    """Returns the directories that are named as steps, newest first. They may be damaged. Raises
    StorageError if the directory cannot be read."""
    with reading(directory):
        paths = storage_of(directory).steps(directory)
    found = {path: layout.parse_step(path.name) for path in paths}
    steps = {path: step for path, step in found.items() if step is not None}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def latest(directory: StoragePlace) -> str | None:
    """Returns the name in the pointer file `latest` beside the steps; None if there is no such
    file. Raises DamagedCheckpoint or StorageError if it cannot be read."""
    where = directory / layout.LATEST
    if not storage_of(where).exists_as(where):
        return None
    with reading(where):
        # not followed, as a link could lead anywhere
        text = storage_of(where).read(where, MAX_POINTER_BYTES, follow=False)
        return text.decode(errors="replace").strip()


@contextmanager
def reading_lock(path: StoragePlace) -> Iterator[None]:
    """Keep retention from deleting the step at `path` during the block. Only processes of the user
    who trains get a lock; the kernel drops it when the process dies. Between machines a lock works
    only if the network filesystem forwards locks. Object stores have no locks. Raises
    DamagedCheckpoint if there is no such step, or it is being deleted."""
    with storage_of(path).reading_lock(path):
        yield


def new_step(final: StoragePlace, damaged: Collection[str]) -> NewStoredStep | None:
    """Returns a new step for writing, which becomes `final`; None if `final` is committed already.
    First deletes `final` if it is `damaged`, although its record is valid."""
    storage = storage_of(final)
    if storage.exists_as(final):
        if not storage.is_foreign(final) and final.name not in damaged and _is_good(final):
            return None
        storage.delete_step(final)  # a foreign step is renamed instead
    return storage.new_step(final)


def _is_good(path: StoragePlace) -> bool:
    try:
        open_step(path)
    except UnreadableCheckpoint:  # the step may be undamaged, so it must not be deleted
        raise
    except DamagedCheckpoint:
        return False
    return True


def open_step(path: StoragePlace) -> _CommittedStep:
    """Check a committed checkpoint without reading its tensors. Raises DamagedCheckpoint, which
    names the damaged file, and StorageError if a file cannot be read."""
    record = read_record(path)
    with reading(path):
        for name, size in storage_of(path).sizes(path, record.files):
            file, expected = path / name, record.files[name]
            if size != expected.size:
                raise DamagedCheckpoint(f"{file}: has {size} bytes, {expected.size} were written")
            # tensors are checked as they are read
            if not name.endswith(".safetensors"):
                _check_small(file, expected)
    indexes = [section.index for section in layout.sections_of(record.files)]
    for name in (layout.TRAINER_STATE, *indexes):
        if name not in record.files:
            raise DamagedCheckpoint(f"{path / layout.COMMIT_RECORD}: names no {name}")
    return _CommittedStep(path, record)


def read_record(path: StoragePlace) -> layout.CommitRecord:
    """Returns the commit record of the step at `path`. Raises DamagedCheckpoint if it is missing,
    malformed, or of another step, and StorageError if it cannot be read."""
    where = path / layout.COMMIT_RECORD
    record = layout.CommitRecord.decode(*_contents(where))
    # a renamed copy of a step may have no step in its name
    if layout.parse_step(path.name) not in (None, record.step):
        raise DamagedCheckpoint(f"{where}: is the record of step {record.step}, not of this one")
    return record


def _check_small(file: StoragePlace, expected: layout.FileRecord) -> None:
    with storage_of(file).open(file) as stored:
        blocks = StorageFileReader(stored, file, expected)
        for block in range(len(expected.checksums)):
            blocks.check(block)


def newest_checkpoint(directory: P) -> P | None:
    """Returns the newest step in `directory` that `open_step` finds good; None if there is none.
    Reads no tensors and needs no torch, so it may be called before a job starts, on any rank."""
    for path in list_steps(directory):
        try:
            open_step(path)
            return path
        except DamagedCheckpoint:
            continue
    return None


def read_state(path: StoragePlace) -> dict[str, Any]:
    """Returns the `state` saved in the checkpoint at `path`. Raises DamagedCheckpoint or
    StorageError if the checkpoint is damaged or cannot be read."""
    return step_state(open_step(path))


def step_state(step: _CommittedStep) -> dict[str, Any]:
    """Returns the `state` saved in a step. Raises DamagedCheckpoint or StorageError if the file is
    not a JSON object, is of another step, or cannot be read."""
    return layout.parse_state(*_contents(step.path / layout.TRAINER_STATE), step.record.step)


def _contents(where: StoragePlace) -> tuple[bytes, str]:
    """Returns the bytes of a JSON file, and its path for messages."""
    with reading(where):
        return storage_of(where).read(where, MAX_JSON_BYTES), str(where)


def stored_tensors(
    step: _CommittedStep, section: layout.FileLayoutPart, *, verify: bool
) -> dict[str, layout.LayoutTensor]:
    """Returns the position of every tensor of a section of `step`, from the headers of its files.
    Raises DamagedCheckpoint if a header is damaged or contradicts the index, or, with `verify`, if
    the blocks that hold the headers have wrong checksums."""
    path, index, records = step.path, section.index, step.record.files
    weight_map = layout.parse_index(*_contents(path / index))
    files = sorted(set(weight_map.values()))
    for file in files:
        if file not in records:
            raise DamagedCheckpoint(f"{path / index}: names {file}, which was not saved with it")
    headers = {file: read_header(path, file, records[file] if verify else None) for file in files}
    # both ways, as a tensor that only the index or only a header lists would be lost
    for file, header in headers.items():
        for name in header:
            if weight_map.get(name) != file:
                there = f"in {weight_map[name]}" if name in weight_map else "in no file"
                raise DamagedCheckpoint(
                    f"{path / file}: holds {name}, which is {there} according to {index}"
                )
    tensors = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise DamagedCheckpoint(f"{path / file}: lacks {name}, which {index} says it holds")
        tensors[name] = headers[file][name]
    return tensors


ADAPTER_CURE = (
    "it holds an adapter: merge it into its model (perdure ckpt export --merge, or "
    "merge_and_unload of PEFT), and give the directory with the merged model"
)
SINGLE_FILE = "model.safetensors"
"""Name of the file with all weights in a Hugging Face directory that is not sharded."""


def hugging_face_tensors(path: StoragePlace) -> dict[str, layout.LayoutTensor]:
    """Returns the position of every tensor of a plain Hugging Face directory: in model.safetensors,
    or else in the files of an index. As in transformers, an index beside model.safetensors is
    ignored, and only the file names in an index are used. Raises DamagedCheckpoint if a file is
    missing, damaged, or contradicts another, and StorageError if there is no safetensors model."""
    storage = storage_of(path)
    if storage.exists(path / SINGLE_FILE):
        return read_header(path, SINGLE_FILE, None)
    if not storage.exists(path / layout.MODEL.index):
        raise StorageError(
            f"{path}: holds neither {SINGLE_FILE} nor {layout.MODEL.index}; {_else(path)}"
        )
    weight_map = layout.parse_index(*_contents(path / layout.MODEL.index))
    tensors: dict[str, layout.LayoutTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in read_header(path, file, None).items():
            if name in tensors:
                raise DamagedCheckpoint(
                    f"{path}: {printable(name)} is in {tensors[name].file} and in {file}, and "
                    f"{layout.MODEL.index} names both files; remove the files that another save "
                    "left there"
                )
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise DamagedCheckpoint(
                f"{path / file}: lacks {printable(name)}, which {layout.MODEL.index} says it holds"
            )
    return tensors


def _else(path: StoragePlace) -> str:
    """Returns advice for a directory that has no weights where they are expected."""
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
        return f"it has {others[0]}: rename that to {SINGLE_FILE} if it is the whole model"
    if others:
        return f"it has {others[0]}: give the model in safetensors that it was made from"
    return "give a directory of Hugging Face safetensors or a checkpoint of perdure"


def read_header(
    path: StoragePlace, file: str, record: layout.FileRecord | None
) -> dict[str, layout.LayoutTensor]:
    """Returns the tensors of one safetensors file, from its header. `record` has checksums for the
    blocks that hold the header; None: do not check. Raises DamagedCheckpoint, which names the file
    and, if a checksum is wrong, the block."""
    with reading(path / file), storage_of(path).open(path / file) as stored:
        prefix = bytearray(8)
        stored.read_into([memoryview(prefix)], 0)
        header = bytearray(layout.header_bytes(bytes(prefix), str(path / file), stored.size))
        if record:
            blocks = StorageFileReader(stored, path / file, record)
            for block in range(-(-len(header) // layout.BLOCK_BYTES)):
                blocks.check(block)
        stored.read_into([memoryview(header)], 0)
        return layout.parse_header(bytes(header), file, stored.size, str(path / file))
