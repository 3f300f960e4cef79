"""Pictures as SVG: elements, and what bars and labels have in common."""

from collections.abc import Iterable
from html import escape

INK, SOFT, LINE = "#222222", "#666666", "#999999"


def tag(name: str, inside: str = "", /, **attributes: object) -> str:
    """An element. Lengths are rounded; `_` in the name of an attribute stands for `-`."""
    words = []
    for key, value in attributes.items():
        shown = f"{value:.1f}" if isinstance(value, float) else escape(str(value))
        words.append(f' {key.rstrip("_").replace("_", "-")}="{shown}"')
    return f"<{name}{''.join(words)}>{inside}</{name}>" if inside else f"<{name}{''.join(words)}/>"


def label(
    x: float, y: float, text: str, anchor: str = "start", color: str = INK, size: int = 12
) -> str:
    """Text, of which `anchor` (start, middle, end) stands at x."""
    return tag(
        "text", escape(text), x=float(x), y=float(y), text_anchor=anchor, fill=color, font_size=size
    )


def bar(x: float, y: float, width: float, height: float, tip: str, **attributes: object) -> str:
    """A rectangle that says what it is when it is pointed at."""
    title = tag("title", escape(tip))
    return tag("rect", title, x=float(x), y=y, width=float(width), height=height, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    """A straight line."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def document(width: int, height: int, body: Iterable[str]) -> str:
    """A whole picture, on white."""
    ground = tag("rect", width=width, height=height, fill="#ffffff")
    return tag(
        "svg", "\n".join(["", ground, *body, ""]), xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}", width=width, height=height,
        font_family="Helvetica, Arial, sans-serif", font_size=12,
    ) + "\n"  # fmt: skip
