"""Copies standard input, or a named pipe, into an input file."""

import hashlib
import os
import re
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from elastic.node.files import own_directory
from trainer.data.prepare.blocks import read_blocks
from trainer.data.prepare.tables import split_header
from trainer.data.prepare.writer import synced
from trainer.data.shards import DataError

FOLDER = ".stdin"
"""Folder in a data set's directory that holds copies of pipes while the data set is prepared."""
_STDIN = ("-", "/dev/stdin")
# Magic bytes of a file → its extension.
_BINARY = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}
_COMPRESSED = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
}
_BLOCK_BYTES = 1 << 20


def is_pipe(name: str) -> bool:
    """Whether an input is standard input ("-") or a named pipe, such as the shell's <(command)."""
    if name in _STDIN:
        return True
    try:
        return stat.S_ISFIFO(os.stat(name).st_mode)
    except OSError:
        return False


def spool(name: str, directory: Path, column: str) -> Path:
    """Copy a pipe into a file, which workers can share and read again, and return the file. Its
    name and age depend only on its contents, so that a repeated command with equal contents has
    equal inputs. Raises DataError if the pipe was empty.

    Args:
        name: see `is_pipe`.
        directory: directory of the data set.
        column: field of the text. If it is a name in the first line, the file is a table (.csv).
    """
    folder = directory / FOLDER
    own_directory(folder)
    part = folder / f"{os.getpid()}.part"
    digest = hashlib.sha256()
    with _open(name) as source, synced(part) as copy:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
            copy.write(block)
    if not part.stat().st_size:
        raise DataError(f"{name}: this pipe was empty")
    file = part.rename(folder / f"stdin-{digest.hexdigest()[:16]}{_compression(part)}")
    file = file.rename(file.with_name(file.stem + _ending(file, column) + file.suffix))
    # The hash of the inputs includes their age.
    os.utime(file, (0, 0))
    return file


def _open(name: str) -> BinaryIO:
    if name not in _STDIN:
        return open(name, "rb")
    if os.isatty(0):
        print("reading text from this terminal; Ctrl-D ends it", file=sys.stderr)
    return os.fdopen(os.dup(0), "rb")


def _compression(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(max(map(len, _COMPRESSED)))
    return next((ending for magic, ending in _COMPRESSED.items() if head.startswith(magic)), "")


def _ending(path: Path, column: str) -> str:
    """Return the extension that fits the contents of a file. ".csv" requires a header that has
    `column` and another name."""
    head = next(read_blocks(path), b"")
    for magic, ending in _BINARY.items():
        if head.startswith(magic):
            return ending
    if re.match(rb"\s*(\[\s*)?\{", head):
        return ".json"
    names = split_header(head.partition(b"\n")[0].decode(errors="replace"), column)[1]
    return ".csv" if column in names and len(names) > 1 else ".txt"
