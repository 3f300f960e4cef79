"""Text for people: tables, and safe output to terminals. Imports no other module of Perdure."""

import os
import sys
import unicodedata
from collections.abc import Container, Sequence
from textwrap import fill
from typing import Any, TextIO

_JOINERS = "\u200c\u200d"
"""Invisible characters that Persian, Indian scripts and emoji need."""
_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters that control a terminal: controls, formats (some of which
reverse text), surrogates, line and paragraph separators."""


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[list[str]]:
    """Pad the cells of rows to their column's width. `right`: indices of the columns to align at
    the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def table(rows: Sequence[Sequence[str]], right: Container[int] = (), indent: str = "") -> list[str]:
    """Format rows as lines that begin with `indent`. `right`: indices of the columns to align at
    the right."""
    return [indent + "  ".join(row).rstrip() for row in aligned(rows, right)]


def markdown(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int] = ()
) -> list[str]:
    """Return the lines of a Markdown table, aligned so that it is readable on a console. `right`:
    indices of the columns to align at the right."""
    head, *body = aligned([columns, *rows], right)
    rule = [
        "-" * (len(cell) - 1) + (":" if number in right else "-")
        for number, cell in enumerate(head)
    ]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def wrapped(text: str) -> str:
    """Wrap a paragraph or list item of Markdown at 100 columns, only between words."""
    rest = "  " if text.startswith("- ") else ""
    return fill(text, 100, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def terminal_columns(stream: TextIO) -> int | None:
    """Width of a stream's terminal; 80 if unknown; None if the stream is no terminal."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def visible(text: str, kept: str = "\n\t") -> str:
    """Escape control characters as in Python strings, such as `\\x1b`, so that the text cannot
    control a terminal. All languages and emoji are unchanged. `kept`: control characters to keep.
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
    """A stream that escapes what is written to it, as `visible` does."""

    def __init__(self, stream: TextIO, kept: str) -> None:
        self._stream, self._kept = stream, kept

    def write(self, text: str) -> int:
        self._stream.write(visible(text, self._kept))
        return len(text)  # callers compare with the length that they passed

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def beneath(stream: TextIO) -> TextIO:
    """Return the stream that `show_only_visible` has wrapped, to which our own colours can be
    written; any other stream unchanged."""
    return stream._stream if isinstance(stream, _Visible) else stream


def show_only_visible() -> None:
    """Make sys.stdout and sys.stderr escape control characters from now on, because a command may
    print text from other users' files, checkpoints or nodes. stderr keeps carriage returns, for
    progress bars."""
    for name, kept in (("stdout", "\n\t"), ("stderr", "\n\t\r")):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Visible):
            setattr(sys, name, _Visible(stream, kept))
