"""Reads input files as decompressed blocks of bytes, as lines, or as rows of a csv or tsv table, in
bounded memory."""

import bz2
import codecs
import csv
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.shards import DataError

BLOCK_BYTES = 1 << 20
LONGEST_LINE = 32 << 20
BOM = codecs.BOM_UTF8
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
COMPRESSED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
"""Extension of a compressed file → its format."""
_COMPRESSED_BLOCK = 1 << 14  # small, as repetitive text grows a thousandfold when decompressed
_LARGEST_WINDOW = 1 << 31  # zstd's maximum, `--long=31`


def compression(path: Path) -> str:
    """Format of a compressed file, by its extension; "" for other files."""
    return COMPRESSED.get(path.suffix.lower(), "")


def read_blocks(
    path: Path,
    start: int = 0,
    end: int | None = None,
    report: Callable[[int], None] = lambda count: None,
) -> Iterator[bytes]:
    """Yield the contents of a file, decompressed if its extension says so, in non-empty blocks
    without a byte order mark. Raises DataError if the file cannot be read, or does not match its
    extension.

    Args:
        start: first byte; 0 for a compressed file.
        end: one past the last byte; None for all. Unused for a compressed file.
        report: called with the number of bytes read from disk so far.
    """
    try:
        with path.open("rb") as file:
            kind = compression(path)
            blocks = _decompressed(path, file, kind) if kind else _plain(file, start, end)
            first = start == 0
            for block in blocks:
                report(file.tell() - start)
                content = block.removeprefix(BOM) if first else block
                first = False
                if content:
                    yield content
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _plain(file: BinaryIO, start: int, end: int | None) -> Iterator[bytes]:
    file.seek(start)
    left = BLOCK_BYTES if end is None else end - start
    while block := file.read(min(left, BLOCK_BYTES)):
        yield block
        left -= 0 if end is None else len(block)


def _decompressed(path: Path, file: BinaryIO, kind: str) -> Iterator[bytes]:
    """Yield the contents of all compressed streams in a file, one after another."""
    # Streams one by one: Python's readers of whole files mistake damage after the first stream for
    # the end of the file, and zstandard's mistakes a truncated file for a complete one.
    new_stream, damage = _decompressor(path, kind)
    stream, begun = new_stream(), False
    try:
        while block := file.read(_COMPRESSED_BLOCK):
            while block:
                if stream.eof:
                    block = block.lstrip(b"\0")  # streams may be padded
                    if not block:
                        break
                    stream = new_stream()
                begun = True
                yield from filter(None, _expand(stream, block))
                block = stream.unused_data
    except damage as error:
        raise DataError(f"{path}: not {kind}, or damaged: {error}; copy the file again") from error
    if not stream.eof:
        what = "the compressed stream ends before its end marker" if begun else "the file is empty"
        raise EOFError(f"{what}; copy the file again")


def _expand(stream: Any, block: bytes) -> Iterator[bytes]:
    """Yield the contents of a compressed block; for bzip2 and xz in parts of at most BLOCK_BYTES,
    as 45 bytes may expand to 46 MB."""
    if not hasattr(stream, "needs_input"):
        yield stream.decompress(block)
        return
    yield stream.decompress(block, BLOCK_BYTES)
    while not (stream.eof or stream.needs_input):
        yield stream.decompress(b"", BLOCK_BYTES)


def _decompressor(path: Path, kind: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return (function that creates the decompressor of one stream, exception that it raises for
    damage). Only one zstd decompressor may be in use at a time."""
    match kind:
        case "gzip":
            return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
        case "bzip2":
            return bz2.BZ2Decompressor, OSError
        case "xz":
            return lzma.LZMADecompressor, lzma.LZMAError
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: needs zstandard: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    return decompressor.decompressobj, zstandard.ZstdError


def split_lines(blocks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yield lines without their ends; None for a line above LONGEST_LINE bytes."""
    parts: list[bytes] = []
    length = 0
    for block in blocks:
        for number, part in enumerate(block.split(b"\n")):
            if number:  # a line has ended
                yield b"".join(parts) if length <= LONGEST_LINE else None
                parts, length = [], 0
            length += len(part)
            # the rest of an overlong line is skipped and not kept in memory
            parts = [*parts, part] if length <= LONGEST_LINE else []
    if length:
        yield b"".join(parts) if length <= LONGEST_LINE else None


def read_header(path: Path, column: str) -> list[str]:
    """Column names of a file. Raises DataError if the file cannot be read."""
    return next(read_rows(path, read_blocks(path), column), (0, []))[1]


def read_rows(path: Path, blocks: Iterable[bytes], column: str) -> Iterator[tuple[int, list[str]]]:
    """Yield rows of a table, with the line in which each begins; the first row has the column
    names. A quoted cell may contain line ends. Bytes that are not UTF-8 become surrogates. Raises
    DataError if a quote is not closed, or text follows a closed quote; the next row cannot be found
    then."""
    lines = _text_lines(path, blocks)
    first = next(lines, "")
    csv.field_size_limit(LONGEST_LINE)
    delimiter, _ = split_header(first, column)
    rows = csv.reader(chain([first] if first else [], lines), delimiter=delimiter, strict=True)
    line = 1
    try:
        for row in rows:
            yield line, [name.strip() for name in row] if line == 1 else row
            # a quoted cell may span lines
            line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}: line {line}: not csv: {error}; double each quote inside of a quoted cell"
        ) from error


def split_header(line: str, column: str) -> tuple[str, list[str]]:
    """Return (delimiter, column names) of a table, from its first line. The delimiter is the first
    of comma, semicolon, tab and bar with which there is a `column`, else comma."""
    columns = {delimiter: _cells(line, delimiter) for delimiter in ",;\t|"}
    delimiter = next((d for d, names in columns.items() if column in names), ",")
    return delimiter, columns[delimiter]


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _text_lines(path: Path, blocks: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(split_lines(blocks), 1):
        if line is None:
            raise DataError(
                f"{path}: line {number} has more than {LONGEST_LINE >> 20} MiB; split it"
            )
        if number == 1 and line.startswith(UTF_16):
            raise DataError(f"{path}: UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
        yield line.decode("utf-8", "surrogateescape") + "\n"
