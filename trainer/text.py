"""Tables of text. Imports nothing of ours."""

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
