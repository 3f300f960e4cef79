"""Reads the documents in pieces of input files, and reports bad records, in bounded memory."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.data.prepare.blocks import LONGEST_LINE, UTF_16, read_blocks, read_rows, split_lines
from trainer.data.prepare.chats import COLUMN_OF_CHATS, form_of
from trainer.data.prepare.sources import DataInputPiece, import_pyarrow, open_parquet
from trainer.data.prepare.text import cut_documents
from trainer.data.shards import DataError

_ROWS = 256  # rows of parquet per batch
_TOO_LONG = f"more than {LONGEST_LINE >> 20} MiB; split it, or use a txt file"


@dataclass(frozen=True)
class DataInputRecord:
    """One document, a part of one, or a rejected record with its problem. A blank line has neither
    text nor problem."""

    line: int
    """Place in the piece, from 1: line, row of a parquet or arrow file, or value of a json file."""
    text: str = ""
    value: dict[str, Any] | None = None
    """All fields of the record, if no single field was requested; `text` is then empty."""
    problem: str = ""
    goes_on: bool = False
    """Whether the next record continues this document."""


def read_piece(
    piece: DataInputPiece, field: str | None, report: Callable[[int], None] = lambda count: None
) -> Iterator[DataInputRecord]:
    """Yield the documents of a piece, in file order.

    Args:
        piece: from `cut_units`.
        field: field of json objects, or column of csv, parquet and arrow, with the text; None: all
            fields of each record (not for plain text).
        report: called now and then with the bytes of the piece read so far.

    Raises:
        DataError: the whole file is unreadable: damaged, or without the column.
    """
    path = Path(piece.file)
    # A table or an array is read to its end: cut within a row that is being appended, it would lose
    # the rest of that row unnoticed.
    end = piece.end if piece.form.kind in ("text", "json lines") else None
    blocks = read_blocks(path, piece.start, end, report)  # opened by its first use
    match piece.form.kind:
        case "parquet":
            return _parquet(path, piece, field, report)
        case "arrow":
            return _arrow(path, piece, field, report)
        case "text":
            return _text(blocks, piece)
        case "json lines":
            return _json_lines(blocks, field)
        case "csv":
            return _csv(path, blocks, field)
    return _json_values(path, blocks, field)


def _text(blocks: Iterable[bytes], piece: DataInputPiece) -> Iterator[DataInputRecord]:
    split = piece.form.split
    begun = False
    for line, content, goes_on in cut_documents(blocks, split, piece.form.window):
        if begun or goes_on or content.strip():
            yield _decoded(content, line, goes_on)
        elif split == "file":
            yield DataInputRecord(line, problem="empty")
        begun = goes_on


def _decoded(content: bytes, line: int, goes_on: bool) -> DataInputRecord:
    try:
        return DataInputRecord(line, content.decode("utf-8"), goes_on=goes_on)
    except UnicodeDecodeError as error:
        if content.startswith(UTF_16):
            problem = "UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"
        else:
            line += content[: error.start].count(b"\n")
            problem = f"not UTF-8 (byte 0x{content[error.start]:02x})"
        return DataInputRecord(line, problem=problem, goes_on=goes_on)


def _json_lines(blocks: Iterable[bytes], field: str | None) -> Iterator[DataInputRecord]:
    for number, line in enumerate(split_lines(blocks), 1):
        if line is None:
            yield DataInputRecord(number, problem=f"a line of {_TOO_LONG}")
        else:
            yield _json_record(line, number, field) if line.strip() else DataInputRecord(number)


def _json_record(line: bytes, number: int, field: str | None) -> DataInputRecord:
    try:
        value: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        if line.startswith(UTF_16):
            return _decoded(line, number, goes_on=False)
        return DataInputRecord(number, problem=f"not UTF-8 (byte 0x{line[error.start]:02x})")
    except json.JSONDecodeError as error:
        return DataInputRecord(number, problem=f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return DataInputRecord(number, problem=f"not JSON: {error}")
    return _record_of(value, number, field)


def _record_of(value: Any, number: int, field: str | None) -> DataInputRecord:
    if not isinstance(value, dict):
        what = f"an object with text in {field!r}" if field else "an object"
        return DataInputRecord(number, problem=f"{_called(value)}, not {what}")
    if field is None:
        return DataInputRecord(number, value=value)
    try:
        content = _inside(value, field)
    except (KeyError, RecursionError):
        return DataInputRecord(number, problem=f"no field {field!r}; {_instead(value)}")
    return _text_of(content, number, f"field {field!r} is")


def _inside(value: Any, field: str) -> Any:
    """Look up a field: a key of an object or, if there is none, a path of keys with dots. In a
    list, the field is looked up in each element. Raises KeyError if the field is missing."""
    if isinstance(value, list):
        return [_inside(item, field) for item in value]
    if not isinstance(value, dict):
        raise KeyError(field)
    if field in value:
        return value[field]
    dots = (place for place, letter in enumerate(field) if letter == ".")
    key = next((field[:dot] for dot in dots if field[:dot] in value), None)
    if key is None:
        raise KeyError(field)
    return _inside(value[key], field[len(key) + 1 :])


def _text_of(value: Any, number: int, what: str) -> DataInputRecord:
    """Convert a cell or field to a record; texts in a list, however deep, become lines of one
    document. `what`: beginning of a problem's text, which ends in the kind of the value."""
    # an explicit stack: untrusted lists may nest deeper than Python recurses
    parts, stack = [], [value]
    while stack:
        match stack.pop():
            case str() as part:
                parts.append(part)
            case bytes() as content:
                record = _decoded(content, number, goes_on=False)
                if record.problem:
                    return DataInputRecord(number, problem=record.problem)
                parts.append(record.text)
            case list() as more:
                stack += reversed(more)
            case other:
                inside = " a list with" if isinstance(value, list) else ""
                return DataInputRecord(number, problem=f"{what}{inside} {_called(other)}, not text")
    text = "\n".join(parts)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return DataInputRecord(number, problem="half of a surrogate pair")
    return (
        DataInputRecord(number, text) if text.strip() else DataInputRecord(number, problem="empty")
    )


def _called(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def _instead(names: Iterable[str]) -> str:
    """Return the end of a message about a record or table without the text field: the names that it
    has, and what to do."""
    names = list(names)
    if not names:
        return "it is empty"
    # by the names alone, as the values of a table are unknown
    kind = form_of({name: [] for name in names})
    way = {"chats": "these are chats; use --chat", "pairs": "these are pairs; use --pairs"}
    return f"it has {_names(names)}; {way.get(kind, 'see --field')}"


def _names(names: Iterable[str]) -> str:
    first, *others = (json.dumps(name, ensure_ascii=False)[1:-1][:40] for name in names)
    return ", ".join([first, *others[:7], *(["…"] if len(others) > 7 else [])])


def _json_values(
    path: Path, blocks: Iterable[bytes], field: str | None
) -> Iterator[DataInputRecord]:
    """Yield a record for each JSON value; values follow each other on any lines, or are in
    arrays."""
    # incremental, as a character may span blocks
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    buffer, position, number, depth, tried = "", 0, 0, 0, 0
    for block in chain(blocks, [b""]):
        final = not block
        try:
            buffer, position = buffer[position:] + decode.decode(block, final), 0
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: not UTF-8, after {number} values: {error.reason}; convert the file"
            ) from error
        if not final and len(buffer) < 2 * tried:
            continue  # avoids parsing a long value again for every block
        while True:
            # skips separators between values, and counts brackets
            while position < len(buffer) and (letter := buffer[position]) in " \t\r\n,[]":
                depth += (letter == "[") - (letter == "]")
                position += 1
            if position == len(buffer):
                break
            try:
                value, end = decoder.raw_decode(buffer, position)
            except (ValueError, RecursionError) as error:
                if not final and len(buffer) - position <= LONGEST_LINE:
                    break
                what = f"a value of {_TOO_LONG}" if not final else f"not JSON: {error}"
                raise DataError(f"{path}: value {number + 1}: {what}") from error
            if end == len(buffer) and not final:
                break  # the next block may continue a number
            number, position = number + 1, end
            yield _record_of(value, number, field)
        tried = len(buffer) - position
    if depth > 0:
        raise DataError(f"{path}: ends inside of its array, after {number} values; copy it again")
    if depth < 0:
        raise DataError(f"{path}: has a ] without its [, after {number} values; correct the file")


def _csv(path: Path, blocks: Iterable[bytes], field: str | None) -> Iterator[DataInputRecord]:
    """Yield rows of a table, with the line in which each begins."""
    rows = read_rows(path, blocks, field or COLUMN_OF_CHATS)
    _, names = next(rows, (0, []))
    place = names.index(_column_of(path, field, names, nested=False)) if field else 0
    for line, row in rows:
        if not row:
            yield DataInputRecord(line)
        elif len(row) != len(names):
            yield DataInputRecord(
                line, problem=f"a row of {len(row)} cells, but {len(names)} columns"
            )
        else:
            wanted = row[place] if field else "".join(row)
            # `read_rows` decodes invalid bytes to lone surrogates (surrogateescape).
            if escaped := re.search("[\udc80-\udcff]", wanted):
                yield DataInputRecord(
                    line, problem=f"not UTF-8 (byte 0x{ord(escaped[0]) & 0xFF:02x})"
                )
            elif field:
                yield _text_of(wanted, line, "")
            else:
                yield DataInputRecord(line, value=dict(zip(names, row, strict=True)))


def _parquet(
    path: Path, piece: DataInputPiece, field: str | None, report: Callable[[int], None]
) -> Iterator[DataInputRecord]:
    file = open_parquet(path)
    column = _column_of(path, field, file.schema_arrow.names) if field else None
    groups = list(range(piece.start, piece.end))
    rows = sum(file.metadata.row_group(group).num_rows for group in groups)
    row = 0
    try:
        wanted = [column] if column else None
        # in batches, as a row group may be larger than memory
        for batch in file.iter_batches(_ROWS, row_groups=groups, columns=wanted):
            yield from _rows(batch, row, field, column)
            row += batch.num_rows
            report(piece.size * row // max(rows, 1))
    except (ValueError, OSError) as error:
        raise DataError(
            f"{path}: row group {piece.start} cannot be read: {error}; copy the file again"
        ) from error


def _arrow(
    path: Path, piece: DataInputPiece, field: str | None, report: Callable[[int], None]
) -> Iterator[DataInputRecord]:
    """Yield rows of a file in Arrow's stream format, which `datasets.save_to_disk` writes, or in
    Arrow's file format."""
    pyarrow = import_pyarrow(path)
    row = 0
    try:
        with pyarrow.OSFile(str(path), "rb") as file:
            # magic bytes of the file format
            if file.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                file.seek(0)
                reader = batches = pyarrow.ipc.open_stream(file)
            column = _column_of(path, field, reader.schema.names) if field else None
            for batch in batches:
                yield from _rows(batch, row, field, column)
                row += batch.num_rows
                report(file.tell())
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not an arrow file, or damaged: {error}; copy the file again"
        ) from error


def _column_of(path: Path, field: str, names: list[str], nested: bool = True) -> str:
    """Name of the column that has a field: the field's name or, if `nested`, the beginning of its
    path. Raises DataError if there is no such column."""
    keys = field.split(".")
    paths = [".".join(keys[:count]) for count in range(len(keys), 0, -1)] if nested else [field]
    column = next((path for path in paths if path in names), None)
    if column is None:
        raise DataError(f"{path}: no column {field!r}; {_instead(names)}")
    return column


def _rows(
    batch: Any, before: int, field: str | None, column: str | None
) -> Iterator[DataInputRecord]:
    """Yield records of a pyarrow batch that follows `before` rows."""
    names = batch.schema.names
    places = [names.index(column)] if column else range(batch.num_columns)
    columns = [_values(batch.column(place)) for place in places]
    for number, cells in enumerate(zip(*columns, strict=True), before + 1):
        if bad := next((cell for cell in cells if isinstance(cell, DataInputRecord)), None):
            yield replace(bad, line=number)
        elif field is None:
            yield DataInputRecord(
                number, value=_without_nulls(dict(zip(names, cells, strict=True)))
            )
        elif column == field:
            yield _text_of(cells[0], number, f"column {field!r} holds")
        else:
            yield _record_of({column: cells[0]}, number, field)


def _values(cells: Iterable[Any]) -> Iterator[Any]:
    """Yield the cells of a column as Python values; for a cell that is not UTF-8, a record with the
    problem."""
    for cell in cells:
        try:
            yield cell.as_py()
        except UnicodeDecodeError as error:
            yield DataInputRecord(0, problem=f"not UTF-8 (byte 0x{error.object[error.start]:02x})")


def _without_nulls(value: Any) -> Any:
    """Remove keys whose value is null: a table gives all rows the same keys, and fills missing
    ones with null."""
    if isinstance(value, dict):
        return {k: _without_nulls(item) for k, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
