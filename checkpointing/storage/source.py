"""A checkpoint as one process reads it: its tensors piece by piece, and the files beside them.

verify, diff, export and import work on these. One block is in memory at a time.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from checkpointing.errors import DamagedCheckpoint, reading
from checkpointing.format.layout import (
    BLOCK_BYTES,
    COMMIT_RECORD,
    LATEST,
    MODEL,
    TRAINER_STATE,
    FileRecord,
    StoredTensor,
)
from checkpointing.format.untrusted import is_plain, printable
from checkpointing.storage.interface import StoredFile
from checkpointing.storage.place import Place
from checkpointing.storage.posix import block_buffer
from checkpointing.storage.steps import (
    hugging_face_tensors,
    open_step,
    plain_adapter,
    reading_lock,
    step_state,
    storage_of,
    stored_tensors,
)

PIECE_BYTES = 4 << 20
"""A multiple of every element's size."""


@dataclass(frozen=True)
class Source:
    """A checkpoint of ours, or a plain Hugging Face directory, also one that PEFT wrote."""

    path: Place
    model: dict[str, StoredTensor]
    optimizer: dict[str, StoredTensor] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    """None: a plain directory, which has neither optimizer nor checksums."""
    records: dict[str, FileRecord] = field(default_factory=dict)
    """By file; what is read of these is checked."""
    odd: Collection[str] = ()
    """Tensors that held NaN or infinity when they were saved, and may: see CommitRecord."""
    is_adapter: bool = False
    """Whether `model` is an adapter, by PEFT's names."""


@contextmanager
def open_source(path: Place) -> Iterator[Source]:
    """Look into a checkpoint of ours, which retention then leaves alone, or a plain directory.

    Raises:
        DamagedCheckpoint, StorageError: what is wrong with it.
    """
    if not storage_of(path).exists(path / COMMIT_RECORD):
        if (adapter := plain_adapter(path)) is not None:
            yield Source(path, adapter, is_adapter=True)
        else:
            yield Source(path, hugging_face_tensors(path))
        return
    with reading_lock(path):
        step = open_step(path)
        model, optimizer = (stored_tensors(step, one, verify=True) for one in step.sections)
        yield Source(
            path, model, optimizer, step_state(step), step.record.files, step.record.odd,
            is_adapter=MODEL not in step.sections,
        )  # fmt: skip


class TensorReader:
    """Bytes of tensors, in checked blocks. A context manager.

    One file is open and one of its blocks held at a time, so tensors are best read in the order of
    files and offsets.
    """

    def __init__(self, path: Place, records: Mapping[str, FileRecord]) -> None:
        self._path, self._records = path, records
        self._opened = ExitStack()
        self._name: str | None = None
        self._blocks: CheckedBlocks | None = None

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read(self, tensor: StoredTensor, start: int, target: memoryview) -> None:
        """Fill `target` from byte `start` of a tensor on.

        Raises:
            DamagedCheckpoint: the file is missing or short, or a checksum is wrong.
        """
        file = self._path / tensor.file
        with reading(file):
            if self._blocks is None or tensor.file != self._name:
                self._opened.close()
                opened = self._opened.enter_context(storage_of(file).open(file))
                self._blocks = CheckedBlocks(opened, file, self._records.get(tensor.file))
                self._name = tensor.file
            self._blocks.read(target, tensor.begin + start)

    def pieces(self, tensor: StoredTensor) -> Iterator[memoryview]:
        """The bytes of a tensor in order, PIECE_BYTES at a time, each until the next is asked
        for."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, tensor.meta.nbytes)))
        for start in range(0, tensor.meta.nbytes, PIECE_BYTES):
            piece = buffer[: tensor.meta.nbytes - start]
            self.read(tensor, start, piece)
            yield piece


class CheckedBlocks:
    """An open file, read by whole blocks that are compared with what was written.

    Args:
        file: the open file.
        path: its path, for messages.
        record: what was written; None: nothing is compared.
    """

    def __init__(self, file: StoredFile, path: Place, record: FileRecord | None) -> None:
        self._file, self._path, self._record = file, path, record
        self._buffer = block_buffer(file.size)
        self._held: tuple[int, int] | None = None
        """Number and length of the block in the buffer."""

    def check(self, block: int) -> int:
        """Read a block and compare it; returns its length in bytes.

        Raises:
            DamagedCheckpoint: names file and block.
        """
        self._held = None
        size = self._file.read_into([self._buffer], block * BLOCK_BYTES)
        if self._record is not None and (
            block >= len(self._record.checksums)
            or crc32(self._buffer[:size]) != self._record.checksums[block]
        ):
            raise DamagedCheckpoint(
                f"{self._path}: checksum of block {block} (from byte {block * BLOCK_BYTES} on) is "
                "wrong; the file was changed after it was saved"
            )
        self._held = block, size
        return size

    def held(self, size: int) -> memoryview:
        """The `size` bytes of the block that was checked last, until the next is."""
        return self._buffer[:size]

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` from `offset` on.

        Raises:
            DamagedCheckpoint: a checksum is wrong, or the file ends too early.
        """
        done = 0
        while done < len(target):
            block, start = divmod(offset + done, BLOCK_BYTES)
            size = self._held[1] if self._held and self._held[0] == block else self.check(block)
            stop = min(size, start + len(target) - done)
            if stop <= start:
                raise DamagedCheckpoint(f"{self._path}: ends too early; it was cut short")
            target[done : done + stop - start] = self._buffer[start:stop]
            done += stop - start


# --- small files ----------------------------------------------------------------------------------

MOST_BYTES, MOST_FILES = 128 << 20, 256
"""Bytes of all together: they are kept in memory, and written into every checkpoint."""
OURS = {COMMIT_RECORD, LATEST, TRAINER_STATE}
"""What a checkpoint of ours has of its own."""
_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp",
}  # fmt: skip
_NAMED = 3
"""How many files a message names."""


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights, or says which files do."""
    return Path(name).suffix in _WEIGHTS or name.endswith(".index.json")


def beside_weights(directory: Place) -> tuple[dict[str, bytes], str]:
    """Contents by name, and in one line what is left out and why ("": nothing).

    Names are relative, such as `additional_chat_templates/tool.jinja`. Not meant are hidden files,
    those that a checkpoint of ours has of its own, and folders with weights, which belong to other
    models. Links are followed inside of the directory, and to where the Hub's cache has its files.
    Of what is too much the largest is left out.

    Raises:
        DamagedCheckpoint, StorageError: it cannot be read.
    """
    storage, homes = storage_of(directory), _homes(directory)
    sizes: dict[str, int] = {}
    left: dict[str, list[str]] = {}
    with reading(directory):
        for name, entry in _files(directory):
            if why := _refused(name, entry, homes):
                left.setdefault(why, []).append(printable(name))
            elif name not in OURS:
                sizes[name] = storage.stat(entry).st_size
    files: dict[str, bytes] = {}
    total = 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        total += sizes[name]
        if total > MOST_BYTES or len(files) == MOST_FILES:
            why = f"more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB together"
            left.setdefault(why, []).append(name)
            continue
        with reading(directory / name):
            files[name] = storage.read(directory / name, MOST_BYTES)
    return files, "; ".join(f"{_listed(names)}: {why}" for why, names in left.items())


def _files(folder: Place, prefix: str = "") -> Iterator[tuple[str, Place]]:
    """(name, place) of what is neither weights nor hidden; a link to a folder counts as a file."""
    storage = storage_of(folder)
    try:
        entries = [entry for entry in storage.children(folder) if not _is_hidden(entry.name)]
    except PermissionError:  # as lost+found
        yield prefix, folder
        return
    if prefix and any(is_weights(entry.name) for entry in entries):
        return
    for entry in sorted(entries, key=lambda entry: entry.name):
        is_link = isinstance(entry, Path) and entry.is_symlink()
        if storage.is_directory(entry) and not is_link:
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif not is_weights(entry.name):
            yield prefix + entry.name, entry


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _homes(directory: Place) -> set[Path]:
    """Where links may lead. The Hub's cache: MODEL/snapshots/COMMIT has links to MODEL/blobs."""
    if not isinstance(directory, Path):
        return set()
    home = directory.resolve()
    is_snapshot = home.parent.name == "snapshots"
    return {home, home.parents[1] / "blobs"} if is_snapshot else {home}


def _refused(name: str, entry: Place, homes: set[Path]) -> str | None:
    """Why a file is left out, whatever its size."""
    if not is_plain(name):
        return "no printable name"
    if isinstance(entry, Path) and not (entry.is_file() and homes & {*entry.resolve().parents}):
        return "no file that can be read, or a link that leads elsewhere"
    return None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
