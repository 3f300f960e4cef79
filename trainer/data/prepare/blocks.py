"""Bytes of input files in blocks, decompressed, and lines made of them; in bounded memory."""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.data.shards import DataError

BLOCK_BYTES = 1 << 20
LONGEST_LINE = 32 << 20
BOM = b"\xef\xbb\xbf"
_COMPRESSED = (".gz", ".zst")


def compression(path: Path) -> str:
    """ ".gz", ".zst" or "", by the ending of the name."""
    ending = path.suffix.lower()
    return ending if ending in _COMPRESSED else ""


def read_blocks(
    path: Path,
    start: int = 0,
    end: int | None = None,
    told: Callable[[int], None] = lambda count: None,
) -> Iterator[bytes]:
    """Content of a file, none of the blocks empty, without a byte order mark.

    Args:
        path: .gz and .zst are decompressed.
        start: first byte; 0 for a compressed file.
        end: one past the last byte; None for all.
        told: is called with the bytes of the file, as it lies on disk, that were read so far.

    Raises:
        DataError: it cannot be read, or is not what its ending says.
    """
    try:
        with path.open("rb") as file:
            match compression(path):
                case ".gz":
                    blocks = _gzip(file)
                case ".zst":
                    blocks = _zstd(path, file)
                case _:
                    blocks = _plain(file, start, end)
            first = start == 0
            for block in blocks:
                told(file.tell() - start)
                content = block.removeprefix(BOM) if first else block
                first = False
                if content:
                    yield content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _plain(file: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    file.seek(start)
    left = BLOCK_BYTES if end is None else end - start
    while block := file.read(min(left, BLOCK_BYTES)):
        yield block
        left -= 0 if end is None else len(block)


def _gzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as content:
        while block := content.read(BLOCK_BYTES):
            yield block


def _zstd(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """zstandard's own stream reader takes a truncated file for a whole one."""
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: needs zstandard: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    try:
        while block := file.read(BLOCK_BYTES >> 3):
            while block:
                if frame.eof:
                    frame = decompressor.decompressobj()
                content = frame.decompress(block)
                block = frame.unused_data
                if content:
                    yield content
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not frame.eof:
        raise EOFError("the compressed stream ends before its end marker; copy the file again")


def split_lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Lines without their ends; None for one of more than LONGEST_LINE bytes."""
    parts: list[bytes] = []
    length = 0
    for block in blocks:
        for number, part in enumerate(block.split(b"\n")):
            if number:  # a line has ended
                yield b"".join(parts) if length <= LONGEST_LINE else None
                parts, length = [], 0
            length += len(part)
            parts = [*parts, part] if length <= LONGEST_LINE else []
    if length:
        yield b"".join(parts) if length <= LONGEST_LINE else None
