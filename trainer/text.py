"""Text for people: tables, and what a terminal may be shown. Imports nothing of ours."""

import os
import sys
import unicodedata
from collections.abc import Container, Sequence
from textwrap import fill
from typing import Any, TextIO

_JOINERS = "\u200c\u200d"
"""Invisible characters that Persian, Indian scripts and emoji need."""
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories: controls, formats (with them those that turn text around), surrogates, line
and paragraph separators."""


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[list[str]]:
    """Rows whose cells are as wide as their column; those of columns in `right` end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def table(rows: Sequence[Sequence[str]], right: Container[int] = (), indent: str = "") -> list[str]:
    """A line for each row."""
    return [indent + "  ".join(row).rstrip() for row in aligned(rows, right)]


def markdown(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int] = ()
) -> list[str]:
    """Lines of a Markdown table that reads well on a console, too."""
    head, *body = aligned([columns, *rows], right)
    rule = [
        "-" * (len(cell) - 1) + (":" if number in right else "-")
        for number, cell in enumerate(head)
    ]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def wrapped(text: str) -> str:
    """A paragraph or list item of a Markdown page, in lines of at most 100 columns. Longer words
    stay whole."""
    rest = "  " if text.startswith("- ") else ""
    return fill(text, 100, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def terminal_columns(stream: TextIO) -> int | None:
    """Width of the terminal that a stream writes to: 80 where it does not tell; None where the
    stream writes to something else."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def visible(text: str, kept: str = "\n\t") -> str:
    """Text that cannot steer a terminal: what would, is written as Python writes it in a string,
    as `\\x1b`. Text of all languages and emoji stay as they are.

    Args:
        text: from anywhere.
        kept: control characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char in kept or char in _JOINERS or unicodedata.category(char) not in _STEERING
        else ascii(char)[1:-1]
        for char in text
    )


class _Visible:
    """A stream that is written only visible text."""

    def __init__(self, stream: TextIO, kept: str) -> None:
        self._stream, self._kept = stream, kept

    def write(self, text: str) -> int:
        """See io.TextIOBase."""
        self._stream.write(visible(text, self._kept))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """See io.IOBase."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def beneath(stream: TextIO) -> TextIO:
    """The stream under one of `show_only_visible`, for visible text and colours of ours."""
    return stream._stream if isinstance(stream, _Visible) else stream


def show_only_visible() -> None:
    """From now on, have sys.stdout and sys.stderr write nothing that steers a terminal. What a
    command prints may come from files, checkpoints or nodes of others, and it cannot be told later
    from where. stderr keeps carriage returns, by which progress bars are drawn."""
    for name, kept in (("stdout", "\n\t"), ("stderr", "\n\t\r")):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Visible):
            setattr(sys, name, _Visible(stream, kept))
