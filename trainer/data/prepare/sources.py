"""Cuts input files into pieces: txt, md, csv and json files, which may be compressed; parquet and
arrow files.

Pieces begin and end with a document. They are gathered into units, the work items of workers. Units
and their documents have a fixed order, independent of the workers.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trainer.data.prepare.blocks import compression, read_blocks
from trainer.data.prepare.options import Split
from trainer.data.prepare.text import choose_split, content_sizes, next_border, window_bytes
from trainer.data.shards import DataError

UNIT_BYTES = 32 << 20
"""Largest size of a unit, in bytes. A unit of one piece may be larger, if the piece cannot be cut
or would leave a tiny rest."""
_SMALLEST_UNIT, _UNITS = 2 << 20, 256
KINDS = "txt, md, csv, tsv, json, jsonl (each also .gz, .bz2, .xz, .zst), parquet or arrow"

_TEXT = (".txt", ".md")
_JSON = (".jsonl", ".json", ".ndjson")
_TABLES = (".csv", ".tsv")
_BINARY: "dict[str, Literal['parquet', 'arrow']]" = {".parquet": "parquet", ".arrow": "arrow"}
Kind: TypeAlias = Literal["text", "json lines", "json", "csv", "parquet", "arrow"]


@dataclass(frozen=True)
class DataInputFormat:
    """The format of a file, how it is cut into documents, and whether all are for validation."""

    kind: Kind
    """"json": values that follow each other on any lines, or arrays of values."""
    split: Split = "auto"
    """Way of cutting text, never "auto"; unused for other kinds of files."""
    window: int = 0
    """Bytes of a window, if `split` is "window"."""
    held_out: bool = False
    """Whether all documents belong to the validation split."""


@dataclass(frozen=True)
class DataInputPiece:
    """A part of one input file, or the whole file."""

    file: str
    form: DataInputFormat
    start: int
    """First byte of text or json lines, or first row group of a parquet file; else 0."""
    end: int
    """One past the last byte or row group; equal to `start` in an empty file."""
    size: int
    """Size in bytes, for the progress bar."""


Pieces: TypeAlias = tuple[DataInputPiece, ...]


def kind_by_name(path: Path) -> Literal["text", "json", "csv", "parquet", "arrow", ""]:
    """Kind of a file by its extension; "" if unknown."""
    ending = bare_suffix(path)
    if ending in _JSON:
        return "json"
    if ending in _TABLES:
        return "csv"
    if ending in _TEXT:
        return "text"
    return "" if compression(path) else _BINARY.get(ending, "")


def bare_suffix(path: Path) -> str:
    """Extension of a file in lower case, without the extension of its compression."""
    return (path.with_suffix("") if compression(path) else path).suffix.lower()


def detect_forms(
    files: Sequence[str], split: Split, held_out: Collection[str] = ()
) -> dict[str, DataInputFormat]:
    """Detect the form of each file from its name and its beginning. `split`: way of cutting text.
    `held_out`: files of the validation split. Raises DataError if a file cannot be read."""
    kinds = {file: kind_by_name(Path(file)) for file in files}
    sizes = content_sizes([Path(file) for file, kind in kinds.items() if kind == "text"])
    window = window_bytes(list(sizes.values()))
    forms: dict[str, DataInputFormat] = {}
    for file, kind in kinds.items():
        path = Path(file)
        if kind == "text":
            chosen = choose_split(path, sizes[path], window) if split == "auto" else split
            forms[file] = DataInputFormat("text", chosen, window if chosen == "window" else 0)
        elif kind == "json":
            forms[file] = DataInputFormat("json lines" if _has_json_lines(path) else "json")
        elif kind:
            forms[file] = DataInputFormat(kind)
        if file in held_out:
            forms[file] = replace(forms[file], held_out=True)
    return forms


def _has_json_lines(path: Path) -> bool:
    """Return whether a file has one value per line. It is assumed not to if it begins with an
    array, or if its first line is only { and none of its first 20 lines is an object."""
    head = b"".join(islice(read_blocks(path), 1)).lstrip()
    if not head.startswith(b"{"):
        return not head.startswith(b"[")
    lines = head.split(b"\n")[:20]
    return len(lines) == 1 or any(map(_is_object, lines)) or len(lines[0].strip()) > 1


def _is_object(line: bytes) -> bool:
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def describe(forms: dict[str, DataInputFormat]) -> Iterator[str]:
    """Yield a line for the user about each way of cutting text."""
    texts = defaultdict[tuple[Split, int], list[str]](list)
    for file, form in forms.items():
        if form.kind == "text":
            texts[form.split, form.window].append(file)
    for (split, window), files in texts.items():
        name = Path(files[0]).name if len(files) == 1 else f"{len(files)} text files"
        document = {
            "file": "one document each" if len(files) > 1 else "one document",
            "separator": "<|endoftext|> or <|end_of_text|> ends a document",
            "form-feed": "a form feed ends a document",
            "blank-line": "a blank line ends a document",
            "line": "every line is a document",
            "window": f"cut into documents of about {window >> 10} KiB, at paragraphs",
        }[split]
        yield f"{name}: {document} (--split-documents changes this)"


def cut_units(forms: dict[str, DataInputFormat]) -> list[Pieces]:
    """Cut all files into units, in order; small files share a unit. Raises DataError if a parquet
    file cannot be opened."""
    total = sum(Path(file).stat().st_size for file in forms)
    # Units are small, to balance workers and to lose little to a kill, but not too many.
    most = min(UNIT_BYTES, max(_SMALLEST_UNIT, total // _UNITS))
    units: list[Pieces] = []
    gathered: list[DataInputPiece] = []
    size = 0
    for file, form in forms.items():
        for piece in _cut(file, form, most):
            if gathered and size + piece.size > most:
                units.append(tuple(gathered))
                gathered, size = [], 0
            gathered.append(piece)
            size += piece.size
    return [*units, tuple(gathered)] if gathered else units


def _cut(file: str, form: DataInputFormat, most: int) -> Iterator[DataInputPiece]:
    path = Path(file)
    size = path.stat().st_size
    if form.kind == "parquet":
        groups = open_parquet(path).num_row_groups
        if not groups:
            yield DataInputPiece(file, form, 0, 0, 0)
        for number in range(groups):
            yield DataInputPiece(file, form, number, number + 1, size // groups)
    elif form.kind in ("text", "json lines") and not compression(path):
        split: Split = "line" if form.kind == "json lines" else form.split
        start = 0
        with path.open("rb") as content:
            while start < size:
                # avoids a tiny last piece
                rest = size - start <= most * 3 // 2
                end = size if rest else next_border(content, start + most, size, split, form.window)
                yield DataInputPiece(file, form, start, end, end - start)
                start = end
        if not size:
            yield DataInputPiece(file, form, 0, 0, 0)
    else:
        yield DataInputPiece(file, form, 0, size, size)


def lines_before(piece: DataInputPiece, known: tuple[DataInputPiece, int] | None = None) -> int:
    """Number of lines (rows of a parquet file) before a piece in its file. `known`: an earlier
    piece and its number, to count from; None: count from the file's beginning."""
    path = Path(piece.file)
    start, lines = 0, 0
    if known and known[0].file == piece.file:
        start, lines = known[0].start, known[1]
    if start == piece.start:
        return lines
    if piece.form.kind == "parquet":
        metadata = open_parquet(path).metadata
        return lines + sum(metadata.row_group(n).num_rows for n in range(start, piece.start))
    return lines + sum(block.count(b"\n") for block in read_blocks(path, start, piece.start))


def open_parquet(path: Path) -> Any:
    """Open a pyarrow ParquetFile. Raises DataError if pyarrow is missing, or the file is not
    parquet."""
    pyarrow = import_pyarrow(path)
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file: {error}") from error


def import_pyarrow(path: Path) -> Any:
    """Import pyarrow with its parquet and ipc modules. Raises DataError if it is not installed,
    although `path` needs it."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: needs pyarrow: pip install pyarrow") from None
    return pyarrow
