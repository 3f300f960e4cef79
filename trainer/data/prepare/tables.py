"""Reads rows of csv and tsv files, in bounded memory."""

import csv
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from trainer.data.prepare.blocks import LONGEST_LINE, UTF_16, read_blocks, split_lines
from trainer.data.shards import DataError


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
