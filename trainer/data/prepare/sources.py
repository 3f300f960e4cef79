"""Cuts input files into pieces: txt, md, csv, json, also compressed, parquet, arrow.

Pieces begin and end with a document, and are gathered into units, which workers take one by one.
Units, and documents in them, have a fixed order, independent of the workers.
"""

import json
from collections import Counter
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
"""Most bytes of a unit, where its parts can be separated."""
_SMALLEST_UNIT, _UNITS = 2 << 20, 256
KINDS = "txt, md, csv, tsv, json, jsonl (each also .gz, .bz2, .xz, .zst), parquet or arrow"

_TEXT = (".txt", ".md")
_JSON = (".jsonl", ".json", ".ndjson")
_TABLES = (".csv", ".tsv")
_BINARY: "dict[str, Literal['parquet', 'arrow']]" = {".parquet": "parquet", ".arrow": "arrow"}
Kind: TypeAlias = Literal["text", "json lines", "json", "csv", "parquet", "arrow"]


@dataclass(frozen=True)
class Form:
    """The contents of a file, and the extent of a document in it."""

    kind: Kind
    """json: values in sequence over any number of lines, or arrays of them."""
    split: Split = "auto"
    """How text is cut; never auto."""
    window: int = 0
    """Bytes of a document of text that is split into windows."""
    held_out: bool = False
    """Whether all its documents belong to the validation split."""


@dataclass(frozen=True)
class Piece:
    """A part of one input file, or all of it."""

    file: str
    form: Form
    start: int
    """First byte of text or json lines, or first row group of a parquet file; else 0."""
    end: int
    """One past the last; equal to the first in an empty file."""
    size: int
    """Bytes, for the progress bar."""


Pieces: TypeAlias = tuple[Piece, ...]


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
    """Extension of a file in lower case, without that of its compression."""
    return (path.with_suffix("") if compression(path) else path).suffix.lower()


def look_at(files: Sequence[str], split: Split, held_out: Collection[str] = ()) -> dict[str, Form]:
    """The form of each file, from its name and its beginning.

    Args:
        files: with known extensions.
        split: how text is cut.
        held_out: the files of the validation split.

    Raises:
        DataError: a file cannot be read.
    """
    kinds = {file: kind_by_name(Path(file)) for file in files}
    sizes = content_sizes([Path(file) for file, kind in kinds.items() if kind == "text"])
    window = window_bytes(list(sizes.values()))
    forms: dict[str, Form] = {}
    for file, kind in kinds.items():
        path = Path(file)
        if kind == "text":
            chosen = choose_split(path, sizes[path], window) if split == "auto" else split
            forms[file] = Form("text", chosen, window if chosen == "window" else 0)
        elif kind == "json":
            forms[file] = Form("json lines" if _has_json_lines(path) else "json")
        elif kind:
            forms[file] = Form(kind)
        if file in held_out:
            forms[file] = replace(forms[file], held_out=True)
    return forms


def _has_json_lines(path: Path) -> bool:
    """Whether there is one value per line: assumed unless the file begins with an array, or with an
    object whose first lines are none."""
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


def describe(forms: dict[str, Form]) -> Iterator[str]:
    """Yield a line per choice, for the user."""
    texts = Counter((form.split, form.window) for form in forms.values() if form.kind == "text")
    for (split, window), count in texts.items():
        example = next(
            file for file, form in forms.items() if (form.split, form.window) == (split, window)
        )
        name = Path(example).name if count == 1 else f"{count} text files"
        document = {
            "file": "one document each" if count > 1 else "one document",
            "separator": "<|endoftext|> or <|end_of_text|> ends a document",
            "form-feed": "a form feed ends a document",
            "blank-line": "a blank line ends a document",
            "line": "every line is a document",
            "window": f"cut into documents of about {window >> 10} KiB, at paragraphs",
        }[split]
        yield f"{name}: {document} (--split-documents says otherwise)"


def cut_units(forms: dict[str, Form]) -> list[Pieces]:
    """All units of all files, in order; small files share a unit.

    Raises:
        DataError: a parquet file cannot be opened.
    """
    total = sum(Path(file).stat().st_size for file in forms)
    # Small enough to be shared by workers and lost by a kill, but not too many.
    most = min(UNIT_BYTES, max(_SMALLEST_UNIT, total // _UNITS))
    units: list[Pieces] = []
    gathered: list[Piece] = []
    size = 0
    for file, form in forms.items():
        for piece in _cut(file, form, most):
            if gathered and size + piece.size > most:
                units.append(tuple(gathered))
                gathered, size = [], 0
            gathered.append(piece)
            size += piece.size
    return [*units, tuple(gathered)] if gathered else units


def _cut(file: str, form: Form, most: int) -> Iterator[Piece]:
    path = Path(file)
    size = path.stat().st_size
    if form.kind == "parquet":
        groups = open_parquet(path).num_row_groups
        if not groups:
            yield Piece(file, form, 0, 0, 0)
        for number in range(groups):
            yield Piece(file, form, number, number + 1, size // groups)
    elif form.kind in ("text", "json lines") and not compression(path):
        split: Split = "line" if form.kind == "json lines" else form.split
        start = 0
        with path.open("rb") as content:
            while start < size:
                # Avoids a tiny last piece.
                rest = size - start <= most * 3 // 2
                end = size if rest else next_border(content, start + most, size, split, form.window)
                yield Piece(file, form, start, end, end - start)
                start = end
        if not size:
            yield Piece(file, form, 0, 0, 0)
    else:
        yield Piece(file, form, 0, size, size)


def lines_before(piece: Piece, known: tuple[Piece, int] | None = None) -> int:
    """Lines (rows of a parquet file) before a piece in its file; `known`: the count before an
    earlier one."""
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
    """A pyarrow ParquetFile.

    Raises:
        DataError: pyarrow is missing, or the file is not parquet.
    """
    pyarrow = import_pyarrow(path)
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file: {error}") from error


def import_pyarrow(path: Path) -> Any:
    """pyarrow with its parquet and ipc modules.

    Raises:
        DataError: it is not installed; `path` needs it.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: needs pyarrow: pip install pyarrow") from None
    return pyarrow
