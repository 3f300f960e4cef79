"""Input files, and how they are cut: txt, md, jsonl and json (plain, gzip, zstd), parquet, arrow.

Files are cut into pieces that begin and end with a document, and pieces gathered into units, which
workers take one by one. Units, and the documents in them, have a fixed order that does not depend
on who reads them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trainer.data.prepare.blocks import compression, read_blocks
from trainer.data.prepare.options import Split
from trainer.data.prepare.text import choose_split, next_border, window_bytes
from trainer.data.shards import DataError

UNIT_BYTES = 32 << 20
"""Most that a unit holds, where its parts can be separated."""
_SMALLEST_UNIT, _UNITS = 2 << 20, 256
KINDS = "txt, md, json, jsonl (also .gz, .zst), parquet or arrow"

_TEXT = (".txt", ".md")
_JSON = (".jsonl", ".json", ".ndjson")
_BINARY: "dict[str, Literal['parquet', 'arrow']]" = {".parquet": "parquet", ".arrow": "arrow"}
# What lies beside the data in data sets of Hugging Face and in repositories.
_NOT_DATA = re.compile(
    r"""(readme|changelog|contributing|citation|notice|copying)\b.* | .*\blicen[cs]es?\b.*
    | (dataset_infos?|dataset_dict|state|config|index|tokenizer|tokenizer_config)\.json
    | (special_tokens_map|croissant|package|package-lock)\.json
    | rejects\.jsonl | cache-.*\.arrow | \..*""",
    re.IGNORECASE | re.VERBOSE,
)

Kind: TypeAlias = Literal["text", "json lines", "json", "parquet", "arrow"]


@dataclass(frozen=True)
class Form:
    """What a file holds, and what a document is in it."""

    kind: Kind
    """json: values one after the other over any number of lines, or arrays of them."""
    split: Split = "auto"
    """How text is cut; never auto."""
    window: int = 0
    """Bytes of a document of text that is split into windows."""


@dataclass(frozen=True)
class Piece:
    """A part of one input file, or all of it."""

    file: str
    form: Form
    start: int
    """First byte of text or json lines, or first row group of a parquet file; else 0."""
    end: int
    """One past the last."""
    size: int
    """Bytes, for the progress bar."""


Pieces: TypeAlias = tuple[Piece, ...]


def find_files(inputs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files of all inputs in a fixed order, each once; directories are searched for the known
    endings.

    Returns:
        (files, those in directories that are not data).

    Raises:
        DataError: an input is missing, of no known kind, or an empty directory.
    """
    files: list[str] = []
    left_out: list[str] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found, others = _search(path)
            if not found:
                there = f"; it holds {_listed(others)}" if others else ""
                raise DataError(f"{name}: holds no {KINDS} file with data{there}")
            files += found
            left_out += others
        elif not path.exists():
            raise DataError(f"{name}: no such file or directory")
        elif not _kind_by_name(path):
            raise DataError(f"{name}: not a {KINDS} file, by the ending of its name")
        else:
            files.append(str(path))
    return list(dict.fromkeys(files)), left_out


def _search(directory: Path) -> tuple[list[str], list[str]]:
    found: list[str] = []
    others: list[str] = []
    for file in sorted(directory.rglob("*"), key=str):
        hidden = any(part.startswith(".") for part in file.relative_to(directory).parts[:-1])
        if hidden or not file.is_file():
            continue
        is_data = _kind_by_name(file) and not _NOT_DATA.fullmatch(file.name)
        (found if is_data else others).append(str(file))
    return found, others


def _listed(files: Sequence[str]) -> str:
    names = [Path(file).name for file in files]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _kind_by_name(path: Path) -> Literal["text", "json", "parquet", "arrow", ""]:
    compressed = bool(compression(path))
    ending = (path.with_suffix("") if compressed else path).suffix.lower()
    if ending in _JSON:
        return "json"
    if compressed:
        return ""
    return "text" if ending in _TEXT else _BINARY.get(ending, "")


def look_at(files: Sequence[str], split: Split) -> dict[str, Form]:
    """What each file holds, and what a document is in it, by its name and a look into it.

    Raises:
        DataError: a file cannot be read.
    """
    kinds = {file: _kind_by_name(Path(file)) for file in files}
    sizes = {file: Path(file).stat().st_size for file, kind in kinds.items() if kind == "text"}
    window = window_bytes(list(sizes.values()))
    forms: dict[str, Form] = {}
    for file, kind in kinds.items():
        path = Path(file)
        if kind == "text":
            chosen = choose_split(path, sizes[file], window) if split == "auto" else split
            forms[file] = Form("text", chosen, window if chosen == "window" else 0)
        elif kind == "json":
            forms[file] = Form("json lines" if _has_json_lines(path) else "json")
        elif kind:
            forms[file] = Form(kind)
    return forms


def _has_json_lines(path: Path) -> bool:
    """Whether there is one value a line. Only what shows that there is not counts against it: an
    array, or an object of which the first lines are none."""
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


def describe(forms: dict[str, Form], left_out: Sequence[str]) -> Iterator[str]:
    """What was chosen, a line each, for a person."""
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
    if left_out:
        yield f"left out as not data: {_listed(left_out)}; name a file itself to take it"


def cut_units(forms: dict[str, Form]) -> list[Pieces]:
    """All units of all files, in order; small files share a unit.

    Raises:
        DataError: a parquet file cannot be opened.
    """
    total = sum(Path(file).stat().st_size for file in forms)
    # Enough of them to be shared by workers, and for little to be lost by a kill; not too many.
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
        for number in range(groups):
            yield Piece(file, form, number, number + 1, size // groups)
    elif form.kind in ("text", "json lines") and not compression(path):
        split: Split = "line" if form.kind == "json lines" else form.split
        start = 0
        with path.open("rb") as content:
            while start < size:
                rest = size - start <= most * 3 // 2
                end = size if rest else next_border(content, start + most, size, split, form.window)
                yield Piece(file, form, start, end, end - start)
                start = end
        if not size:
            yield Piece(file, form, 0, 0, 0)
    else:
        yield Piece(file, form, 0, size, size)


def lines_before(piece: Piece, known: tuple[Piece, int] | None = None) -> int:
    """Lines (rows of a parquet file) that come before a piece in its file; `known` before an
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
    """pyarrow, with its parquet and ipc parts.

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
