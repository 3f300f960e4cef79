"""Input files → documents: txt, md, jsonl (plain, gzip, zstd) and parquet.

Files are cut into pieces and pieces gathered into units of about UNIT_BYTES, which workers take
one by one. Units, and the documents in them, have a fixed order that does not depend on who reads
them.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trainer.data.options import Split
from trainer.data.shards import DataError

UNIT_BYTES = 32 << 20

_TEXT = (".txt", ".md")
_JSON_LINES = (".jsonl", ".json")
_COMPRESSED = (".gz", ".zst")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A part of one input file, or all of it."""

    file: str
    start: int
    """First byte of a plain jsonl file, or first row group of a parquet file; else 0."""
    end: int
    """One past the last byte or row group; lines that begin before it belong to this piece."""
    size: int
    """Bytes, for the progress bar."""


Unit: TypeAlias = tuple[Piece, ...]


@dataclass(frozen=True)
class Record:
    """One document, or the reason why there is none; neither for a blank line."""

    line: int
    """Where it stands in the piece, from 1: line, or row of a parquet file."""
    text: str = ""
    problem: str = ""


def find_files(inputs: list[str]) -> list[str]:
    """Files of all inputs in a fixed order, each once; directories are searched for the known
    endings.

    Raises:
        DataError: an input is missing, of no known kind, or an empty directory.
    """
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = sorted(str(f) for f in path.rglob("*") if f.is_file() and kind_of(f))
            if not found:
                raise DataError(f"{name}: holds no txt, md, jsonl(.gz, .zst) or parquet file")
            files += found
        elif not path.exists():
            raise DataError(f"{name}: no such file or directory")
        elif not kind_of(path):
            raise DataError(f"{name}: not a txt, md, jsonl(.gz, .zst) or parquet file")
        else:
            files.append(str(path))
    return list(dict.fromkeys(files))


def kind_of(path: Path) -> Literal["text", "json lines", "parquet", ""]:
    """What a file holds, by its ending."""
    compressed = bool(_compression(path))
    ending = (path.with_suffix("") if compressed else path).suffix.lower()
    if ending in _JSON_LINES:
        return "json lines"
    if compressed:
        return ""
    if ending in _TEXT:
        return "text"
    return "parquet" if ending == ".parquet" else ""


def _compression(path: Path) -> str:
    ending = path.suffix.lower()
    return ending if ending in _COMPRESSED else ""


def cut_units(files: list[str]) -> list[Unit]:
    """All units of all files, in order; small files share a unit.

    Raises:
        DataError: a parquet file cannot be opened.
    """
    units: list[Unit] = []
    gathered: list[Piece] = []
    for file in files:
        for piece in _cut(file):
            if gathered and sum(p.size for p in gathered) + piece.size > UNIT_BYTES:
                units.append(tuple(gathered))
                gathered = []
            gathered.append(piece)
    return [*units, tuple(gathered)] if gathered else units


def _cut(file: str) -> Iterator[Piece]:
    path = Path(file)
    size = path.stat().st_size
    if kind_of(path) == "parquet":
        groups = open_parquet(path).num_row_groups
        for number in range(groups):
            yield Piece(file, number, number + 1, size // groups)
    elif kind_of(path) == "json lines" and not _compression(path):
        for start in range(0, size, UNIT_BYTES):
            end = min(size, start + UNIT_BYTES)
            yield Piece(file, start, end, end - start)
    else:
        yield Piece(file, 0, size, size)


def lines_before(piece: Piece) -> int:
    """Lines (rows of a parquet file) that come before the first of a piece in its file."""
    path = Path(piece.file)
    if not piece.start:
        return 0
    if kind_of(path) == "parquet":
        metadata = open_parquet(path).metadata
        return sum(metadata.row_group(number).num_rows for number in range(piece.start))
    position = count = 0
    with path.open("rb") as file:
        for line in file:
            if position >= piece.start:
                break
            position, count = position + len(line), count + 1
    return count


def read_piece(piece: Piece, field: str, split: Split) -> Iterator[Record]:
    """Documents of a piece, in file order.

    Args:
        piece: from `cut_units`.
        field: of each json object, or column of parquet, that holds the text.
        split: what one document is in txt and md files.

    Raises:
        DataError: the whole file cannot be read: damaged, or without the column.
    """
    path = Path(piece.file)
    try:
        match kind_of(path):
            case "parquet":
                yield from _parquet(path, piece, field)
            case "json lines":
                yield from _json_lines(path, piece, field)
            case _:
                yield from _text(path, split)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _text(path: Path, split: Split) -> Iterator[Record]:
    if split == "file":
        yield _decoded(path.read_bytes(), 1)
        return
    paragraph: list[bytes] = []
    with path.open("rb") as file:
        number = 0
        for number, line in enumerate(file, 1):
            if split == "line":
                if line.strip():
                    yield _decoded(line.rstrip(b"\r\n"), number)
            elif line.strip():
                paragraph.append(line)
            elif paragraph:
                yield _decoded(b"".join(paragraph), number - len(paragraph))
                paragraph = []
        if paragraph:
            yield _decoded(b"".join(paragraph), number + 1 - len(paragraph))


def _decoded(content: bytes, line: int) -> Record:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line += content[: error.start].count(b"\n")
        return Record(line, problem=f"not UTF-8 (byte 0x{content[error.start]:02x})")
    return Record(line, text) if text.strip() else Record(line, problem="empty")


def _json_lines(path: Path, piece: Piece, field: str) -> Iterator[Record]:
    for number, line in enumerate(_lines(path, piece), 1):
        yield _json_record(line, number, field) if line.strip() else Record(number)


def _lines(path: Path, piece: Piece) -> Iterator[bytes]:
    """The lines that begin in a piece."""
    match _compression(path):
        case ".gz":
            with gzip.open(path, "rb") as file:
                yield from file
        case ".zst":
            yield from _split_lines(_decompress_zstd(path))
        case _:
            with path.open("rb") as file:
                if piece.start:
                    file.seek(piece.start - 1)
                    file.readline()
                position = file.tell()
                for line in file:
                    if position >= piece.end:
                        return
                    position += len(line)
                    yield line


def _json_record(line: bytes, number: int, field: str) -> Record:
    try:
        value: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(number, problem=f"not UTF-8 (byte 0x{line[error.start]:02x})")
    except (ValueError, RecursionError) as error:
        return Record(number, problem=f"not JSON: {error}")
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        return Record(number, problem=f"no text in field {field!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return Record(number, problem="half of a surrogate pair")
    return Record(number, text) if text.strip() else Record(number, problem="empty")


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    """The content, in blocks. zstandard's own stream reader takes a truncated file for a whole
    one."""
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: needs zstandard: pip install zstandard") from None
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                while block:
                    if frame.eof:
                        frame = decompressor.decompressobj()
                    yield frame.decompress(block)
                    block = frame.unused_data
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not frame.eof:
        raise EOFError("the compressed stream ends before its end marker; copy the file again")


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        rest.append(first)
        for other in others:
            yield b"".join(rest)
            rest = [other]
    if any(rest):
        yield b"".join(rest)


def open_parquet(path: Path) -> Any:
    """A pyarrow ParquetFile.

    Raises:
        DataError: pyarrow is missing, or the file is not parquet.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: needs pyarrow: pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file: {error}") from error


def _parquet(path: Path, piece: Piece, field: str) -> Iterator[Record]:
    file = open_parquet(path)
    names = file.schema_arrow.names
    if field not in names:
        raise DataError(f"{path}: no column {field!r}; it has {', '.join(names)}; see --field")
    try:
        column = file.read_row_group(piece.start, columns=[field]).column(0)
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: row group {piece.start} cannot be read: {error}") from error
    for number, cell in enumerate(column, 1):
        try:
            text = cell.as_py()
        except UnicodeDecodeError as error:
            yield Record(number, problem=f"not UTF-8 (byte 0x{error.object[error.start]:02x})")
            continue
        if not isinstance(text, str):
            yield Record(number, problem=f"no text in column {field!r}")
        else:
            yield Record(number, text) if text.strip() else Record(number, problem="empty")
