"""A checkpoint for tools of one process: its tensors piece by piece, and the files beside them.

Used by show, diff, export and import. One block is in memory at a time."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.errors import reading
from checkpointing.format.layout import (
    ADAPTER,
    COMMIT_RECORD,
    LATEST,
    MODEL,
    TRAINER_STATE,
    FileRecord,
    LayoutTensor,
)
from checkpointing.format.untrusted import is_plain, listed, printable
from checkpointing.storage import steps
from checkpointing.storage.place import StoragePlace

PIECE_BYTES = 4 << 20
"""Bytes of a piece; a multiple of every element size."""


@dataclass(frozen=True)
class StorageCheckpoint:
    """A checkpoint of this package, or a plain Hugging Face directory, including one by PEFT."""

    path: StoragePlace
    model: dict[str, LayoutTensor]
    optimizer: dict[str, LayoutTensor] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    """Trainer state; None for a plain directory, which has neither optimizer nor checksums."""
    records: dict[str, FileRecord] = field(default_factory=dict)
    """File → size and checksums, with which reads are compared."""
    odd: Collection[str] = ()
    """Tensors that are allowed to hold NaN or infinity, see `CommitRecord.odd`."""
    is_adapter: bool = False
    """Whether `model` holds an adapter, with PEFT's names."""


@contextmanager
def open_source(path: StoragePlace) -> Iterator[StorageCheckpoint]:
    """Open a checkpoint, which retention does not delete meanwhile, or a plain directory. Raises
    DamagedCheckpoint or StorageError if it is damaged or cannot be read."""
    if not steps.storage_of(path).exists(path / COMMIT_RECORD):
        adapter = ADAPTER.file(1, 1)
        if steps.storage_of(path).exists(path / adapter):
            yield StorageCheckpoint(path, steps.read_header(path, adapter, None), is_adapter=True)
        else:
            yield StorageCheckpoint(path, steps.hugging_face_tensors(path))
        return
    with steps.reading_lock(path):  # held until the caller has read the tensors
        step = steps.open_step(path)
        model, optimizer = (steps.stored_tensors(step, one, verify=True) for one in step.sections)
        yield StorageCheckpoint(
            path, model, optimizer, steps.step_state(step), step.record.files, step.record.odd,
            is_adapter=MODEL not in step.sections,
        )  # fmt: skip


class StorageTensorReader(ExitStack):
    """Reads bytes of tensors through checked blocks. A context manager. It holds one open file and
    one block of this file, so read tensors in the order of files and offsets."""

    def __init__(self, path: StoragePlace, records: Mapping[str, FileRecord]) -> None:
        super().__init__()
        self._path, self._records = path, records
        self._name: str | None = None
        self._blocks: steps.StorageFileReader | None = None

    def read(self, tensor: LayoutTensor, start: int, target: memoryview) -> None:
        """Fill `target` with bytes of a tensor, from its byte `start` on. Raises DamagedCheckpoint
        if the file is missing or short, or a checksum is wrong."""
        file = self._path / tensor.file
        with reading(file):
            if self._blocks is None or tensor.file != self._name:
                self.close()
                opened = self.enter_context(steps.storage_of(file).open(file))
                self._blocks = steps.StorageFileReader(opened, file, self._records.get(tensor.file))
                self._name = tensor.file
            self._blocks.read(target, tensor.begin + start)

    def pieces(self, tensor: LayoutTensor) -> Iterator[memoryview]:
        """Yields the bytes of a tensor, PIECE_BYTES at a time, in one reused buffer."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, tensor.meta.nbytes)))
        for start in range(0, tensor.meta.nbytes, PIECE_BYTES):
            piece = buffer[: tensor.meta.nbytes - start]
            self.read(tensor, start, piece)
            yield piece


# --- files beside the weights ---------------------------------------------------------------------

MOST_BYTES, MOST_FILES = 128 << 20, 256
"""Limits for all files together, as they are kept in memory and written to every checkpoint."""
OWN_FILES = {COMMIT_RECORD, LATEST, TRAINER_STATE}
"""Files that this package adds to a checkpoint."""
_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp",
}  # fmt: skip


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights or their index."""
    return Path(name).suffix in _WEIGHTS or name.endswith(".index.json")


def beside_weights(directory: StoragePlace) -> tuple[dict[str, bytes], str]:
    """Returns (name → contents, one line about files that are left out and why; "" if none is).

    Names are relative, such as `additional_chat_templates/tool.jinja`. Excluded are weights, hidden
    files, files that this package adds to a checkpoint, and folders with weights: other models.
    Links are followed inside the directory, and to the blobs of the Hub's cache. If the limits are
    exceeded, the largest files are left out. Raises DamagedCheckpoint or StorageError if a file
    cannot be read."""
    storage, homes = steps.storage_of(directory), _homes(directory)
    sizes: dict[str, int] = {}
    left: dict[str, list[str]] = {}
    with reading(directory):
        for name, entry in _files(directory):
            if why := _refused(name, entry, homes):
                left.setdefault(why, []).append(printable(name))
            elif name not in OWN_FILES:
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
    return files, "; ".join(f"{listed(names)}: {why}" for why, names in left.items())


def _files(folder: StoragePlace, prefix: str = "") -> Iterator[tuple[str, StoragePlace]]:
    """Yields (name, place) of files, except weights and hidden ones. A link counts as a file."""
    storage = steps.storage_of(folder)
    try:
        entries = [entry for entry in storage.children(folder) if not _is_hidden(entry.name)]
    except PermissionError:  # such as lost+found, which is then reported as a file
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


def _homes(directory: StoragePlace) -> set[Path]:
    """Returns the folders that links may lead into: a snapshot in the Hub's cache,
    MODEL/snapshots/COMMIT, has links to MODEL/blobs."""
    if not isinstance(directory, Path):
        return set()
    home = directory.resolve()
    is_snapshot = home.parent.name == "snapshots"
    return {home, home.parents[1] / "blobs"} if is_snapshot else {home}


def _refused(name: str, entry: StoragePlace, homes: set[Path]) -> str | None:
    """Returns why a file is left out regardless of its size; None if it is not."""
    if not is_plain(name):
        return "no printable name"
    if isinstance(entry, Path) and not (entry.is_file() and homes & {*entry.resolve().parents}):
        return "no file that can be read, or a link that leads elsewhere"
    return None
