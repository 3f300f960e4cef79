"""Cuts plain text into documents, in bounded memory. The beginning of the text decides how."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import BinaryIO

from trainer.data.prepare.blocks import BLOCK_BYTES, compression, read_blocks
from trainer.data.prepare.options import Split

# With 256 documents a random validation split of 2 % is empty in one of 176 data sets.
_ENOUGH_DOCUMENTS = 256
_SMALLEST_WINDOW, _LARGEST_WINDOW = 2 << 10, 1 << 20
# Blank lines count as ends of documents from a mean length of _LONG_BLOCK bytes on, line ends from
# _LONG_LINE bytes on; and only if there are at least _SEVERAL documents.
_LONG_BLOCK, _LONG_LINE, _SEVERAL = 2000, 1000, 8

_BORDERS = {
    "line": re.compile(rb"\r*\n"),
    "blank-line": re.compile(rb"\n(?:[ \t\r\f\v]*\n)+"),
    "separator": re.compile(rb"<\|end(?:oftext|_of_text)\|>[ \t]*\r?\n?"),
    "form-feed": re.compile(rb"\f"),
}
_SEPARATOR_AT_LINE_BORDER = re.compile(
    rb"^<\|end(?:oftext|_of_text)\|>|<\|end(?:oftext|_of_text)\|>[ \t\r]*$", re.MULTILINE
)
_FORM_FEED_AT_LINE_BORDER = re.compile(rb"^\f|\f[ \t\r]*$", re.MULTILINE)
# Places to end a window, best first: before a heading, at a blank line, a line end, a space.
_WINDOW_ENDS = tuple(map(re.compile, (rb"\n\s*\n(?=#)", rb"\n[ \t\r]*\n", rb"\n", rb"\s")))


def window_bytes(sizes: Sequence[int]) -> int:
    """Return the size, in bytes, of the windows into which text without borders is cut. It is the
    largest power of two from 2 KiB to 1 MiB with which files of these sizes, in bytes, give at
    least 256 documents; 2 KiB if none does. A file below one and a half windows stays whole."""
    window = _LARGEST_WINDOW
    while (
        window > _SMALLEST_WINDOW
        and sum(max(1, round(size / window)) for size in sizes) < _ENOUGH_DOCUMENTS
    ):
        window //= 2
    return window


def content_sizes(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the bytes of text in each file. For a large compressed file this is a lower bound:
    reading stops when a larger size would change neither `window_bytes` nor `choose_split`."""
    sizes = {}
    documents = 0
    for path in sorted(paths, key=lambda path: bool(compression(path))):
        if compression(path):
            enough = max(2, _ENOUGH_DOCUMENTS - documents + 1) * _LARGEST_WINDOW
            sizes[path] = 0
            for block in read_blocks(path):
                sizes[path] += len(block)
                if sizes[path] >= enough:
                    break
        else:
            sizes[path] = path.stat().st_size
        documents += max(1, round(sizes[path] / _LARGEST_WINDOW))
    return sizes


def choose_split(path: Path, size: int, window: int) -> Split:
    """Choose how a text file is cut into documents, from its beginning. `size`: bytes of text in
    the file. `window`: from `window_bytes`."""
    head = b""
    for block in read_blocks(path):
        head += block
        if len(head) >= BLOCK_BYTES:
            break
    head = head[:BLOCK_BYTES]
    if _SEPARATOR_AT_LINE_BORDER.search(head):
        return "separator"
    if size < window * 3 // 2:
        return "file"
    if _FORM_FEED_AT_LINE_BORDER.search(head):
        return "form-feed"
    blocks = [block for block in _BORDERS["blank-line"].split(head) if block.strip()]
    if len(blocks) >= _SEVERAL and fmean(map(len, blocks)) >= _LONG_BLOCK:
        return "blank-line"
    lines = head.splitlines()
    if len(blocks) == 1 and len(lines) >= _SEVERAL and fmean(map(len, lines)) >= _LONG_LINE:
        return "line"
    return "window"


def next_border(file: BinaryIO, target: int, size: int, split: Split, window: int) -> int:
    """Return the first offset from byte `target` on where a document ends; `size`, the length of
    the file, if none ends before."""
    if target >= size or split == "file":
        return size
    if split == "window":
        file.seek(target)
        buffer = file.read(window // 4)
        return target + _window_end(buffer, 0, len(buffer))
    place = target - 1  # the line before `target` may end with this byte
    file.seek(place)
    buffer = b""
    while block := file.read(BLOCK_BYTES):
        buffer += block
        found = _BORDERS[split].search(buffer)
        if found and found.end() < len(buffer):
            return place + found.end()
        # A border may begin near the end of the buffer and continue after it.
        keep = found.start() if found else max(0, len(buffer) - 64)
        place, buffer = place + keep, buffer[keep:]
    return size


def cut_documents(
    blocks: Iterable[bytes], split: Split, window: int
) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (line, content, continues) for each document of a text that comes in blocks, or part of
    one below 4 MiB: the line where the content begins, from 1, and whether the next item continues
    its document."""
    buffer, position, line = b"", 0, 1
    for block in chain(blocks, [b""]):
        buffer, position = buffer[position:] + block, 0
        while True:
            if border := _border(buffer, position, split, window, final=not block):
                end, following = border
                goes_on = False
            elif block and len(buffer) - position > 2 * BLOCK_BYTES:
                start = position + BLOCK_BYTES
                end = following = _window_end(buffer, start, start + BLOCK_BYTES // 4)
                goes_on = True
            else:
                break
            yield line, buffer[position:end], goes_on
            line += buffer.count(b"\n", position, following)
            position = following
    yield line, buffer[position:], False


def _border(
    buffer: bytes, position: int, split: Split, window: int, final: bool
) -> tuple[int, int] | None:
    """Return (end of the document that begins at `position`, begin of the next document). None if
    the document ends where the text ends, or, unless `final`, may end in a later block."""
    if split == "file":
        return None
    if split == "window":
        # A rest below one and a half windows stays whole, so that the last window has at least a
        # quarter of `window` bytes. Before the final block two windows must be in the buffer.
        if len(buffer) - position < (window * 3 // 2 if final else window * 2):
            return None
        start = position + window
        end = _window_end(buffer, start, start + window // 4)
        return end, end
    found = _BORDERS[split].search(buffer, position)
    if not found or (found.end() == len(buffer) and not final):
        return None
    return found.start() + (split == "blank-line"), found.end()


def _window_end(buffer: bytes, start: int, stop: int) -> int:
    """Best place in [start, stop) to cut a text."""
    for pattern in _WINDOW_ENDS:
        if found := pattern.search(buffer, start, stop):
            return found.end()
    while start < min(stop, len(buffer)) and buffer[start] & 0xC0 == 0x80:
        start += 1  # do not cut inside a UTF-8 character
    return start
