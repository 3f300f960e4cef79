"""Tables of text."""

from collections.abc import Container, Sequence


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
