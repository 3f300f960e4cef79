"""Input files → documents: txt, md, jsonl (plain, gzip, zstd) and parquet.

A file is cut into units that workers take one by one. Units, and the documents in them, have a
fixed order that does not depend on who reads them.
"""

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from trainer.data.shards import DataError

Split = Literal["file", "blank-line", "line"]
UNIT_BYTES = 32 << 20

_TEXT = (".txt", ".md")
_JSON_LINES = (".jsonl", ".json")
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Unit:
    """A piece of one input file."""

    file: str
    start: int
    """First byte of a plain jsonl file, or first row group of a parquet file; else 0."""
    end: int
    """One past the last byte or row group; lines that begin before it belong to this unit."""
    size: int
    """Bytes, for the progress bar."""


@dataclass(frozen=True)
class Record:
    """One document, or the reason why there is none; neither for a blank line."""

    line: int
    """Where it stands in the unit, from 1: line, or row of a parquet file."""
    text: str = ""
    problem: str = ""


def find_files(inputs: list[str]) -> list[str]:
    """Files of all inputs in a fixed order; directories are searched for the known endings.

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
    return files


def kind_of(path: Path) -> Literal["text", "json lines", "parquet", ""]:
    """What a file holds, by its ending."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    last = suffixes[-1] if suffixes else ""
    inner = suffixes[-2] if last in _COMPRESSED and len(suffixes) > 1 else last
    if last in _TEXT:
        return "text"
    if inner in _JSON_LINES:
        return "json lines"
    return "parquet" if last == ".parquet" else ""


def cut_units(files: list[str]) -> list[Unit]:
    """All units of all files, in order."""
    units = []
    for file in files:
        path = Path(file)
        size = path.stat().st_size
        if kind_of(path) == "parquet":
            groups = open_parquet(path).num_row_groups
            units += [Unit(file, n, n + 1, size // max(1, groups)) for n in range(groups)]
        elif kind_of(path) == "json lines" and path.suffix not in _COMPRESSED:
            for start in range(0, size, UNIT_BYTES):
                end = min(size, start + UNIT_BYTES)
                units.append(Unit(file, start, end, end - start))
        else:
            units.append(Unit(file, 0, size, size))
    return units


def read_unit(unit: Unit, field: str, split: Split) -> Iterator[Record]:
    """Documents of a unit, in file order.

    Raises:
        DataError: the whole file cannot be read: damaged, or without the column.
    """
    path = Path(unit.file)
    try:
        match kind_of(path):
            case "parquet":
                yield from _parquet(path, unit, field)
            case "json lines":
                yield from _json_lines(path, unit, field)
            case _:
                yield from _text(path, split)
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _text(path: Path, split: Split) -> Iterator[Record]:
    content = path.read_bytes()
    if split == "file":
        yield _decoded(content, 1)
        return
    paragraph, first = b"", 1
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if split == "line":
            if line.strip():
                yield _decoded(line.rstrip(b"\r\n"), number)
        elif line.strip():
            first = first if paragraph else number
            paragraph += line
        elif paragraph:
            yield _decoded(paragraph, first)
            paragraph = b""
    if paragraph:
        yield _decoded(paragraph, first)


def _decoded(content: bytes, line: int) -> Record:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line += content[: error.start].count(b"\n")
        return Record(line, problem=f"not UTF-8 (byte 0x{content[error.start]:02x})")
    return Record(line, text) if text.strip() else Record(line, problem="empty")


def _json_lines(path: Path, unit: Unit, field: str) -> Iterator[Record]:
    with _open_lines(path) as file:
        whole = path.suffix in _COMPRESSED
        position = 0 if whole else _seek_line(file, unit.start)
        for number, line in enumerate(file, 1):
            if not whole and position >= unit.end:
                return
            position += len(line)
            yield _json_record(line, number, field) if line.strip() else Record(number)


def _seek_line(file: BinaryIO, start: int) -> int:
    """Move to the first line that begins at or after `start`."""
    if start:
        file.seek(start - 1)
        file.readline()
    return file.tell()


def _json_record(line: bytes, number: int, field: str) -> Record:
    try:
        value: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(number, problem=f"not UTF-8 (byte 0x{line[error.start]:02x})")
    except ValueError as error:
        return Record(number, problem=f"not JSON: {error}")
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        return Record(number, problem=f"no text in field {field!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return Record(number, problem="half of a surrogate pair")
    return Record(number, text) if text.strip() else Record(number, problem="empty")


def _open_lines(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{path}: needs zstandard: pip install 'perdure[zstd]'") from None
        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True)
        return io.BufferedReader(reader, 1 << 20)
    return path.open("rb")


def open_parquet(path: Path) -> Any:
    """A pyarrow ParquetFile.

    Raises:
        DataError: pyarrow is missing, or the file is not parquet.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: needs pyarrow: pip install 'perdure[parquet]'") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file: {error}") from error


def _parquet(path: Path, unit: Unit, field: str) -> Iterator[Record]:
    file = open_parquet(path)
    names = file.schema_arrow.names
    if field not in names:
        raise DataError(f"{path}: no column {field!r}; it has {', '.join(names)}; see --field")
    column = file.read_row_group(unit.start, columns=[field]).column(0)
    for number, text in enumerate(column.to_pylist(), 1):
        if not isinstance(text, str):
            yield Record(number, problem=f"no text in column {field!r}")
        else:
            yield Record(number, text) if text.strip() else Record(number, problem="empty")
