"""What lies beside the weights of a model: chat templates, tokenizer, licence, code, …"""

from collections.abc import Iterator
from pathlib import Path

from checkpointing.format.layout import COMMIT_RECORD, LATEST, TRAINER_STATE
from checkpointing.format.untrusted import is_plain, printable
from checkpointing.storage.kinds import storage_of
from checkpointing.storage.place import Place
from checkpointing.storage.reading import reading

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
