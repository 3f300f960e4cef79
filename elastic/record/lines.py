"""A file that lines are added to, by a process that a full disk must not end."""

import logging
import os
from collections import deque
from collections.abc import Container, Iterable
from itertools import islice
from pathlib import Path

from elastic.node.files import open_to_append

logger = logging.getLogger(__name__)

BATCH = 256
"""Lines handed to the operating system at once, when many wait."""


class Lines:
    """The writing end of a file of lines, made when it is not there.

    Each line is handed to the operating system at once, so it survives the death of this process.
    What a disk that is full or gone does not take waits in memory, in order, and is written before
    the next line.

    Args:
        path: of the file; its directory exists.
        waiting: lines that an earlier process may not have written. Those in the file already are
            not written again.
        trusted: other users (uids) whose file it may be; any other file is put aside.
    """

    def __init__(
        self, path: Path, waiting: Iterable[str] = (), trusted: Container[int] = ()
    ) -> None:
        self._path, self._trusted = path, trusted
        self._file: int | None = None
        self._lines = deque(line.encode() for line in waiting)
        self._from_before = bool(self._lines)
        self._begun = 0
        """Bytes of the first line that waits which are written."""
        self._failing = False

    @property
    def waiting(self) -> list[str]:
        """Lines that are not written, or in part."""
        return [line.decode() for line in self._lines if line]

    def add(self, line: str) -> None:
        """Add a line, given without its end. Raises no OSError."""
        self._lines.append(line.encode())
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait, as far as the file takes them."""
        try:
            while self._lines:
                if self._file is None:
                    self._file = self._open()
                self._written(os.writev(self._file, self._next()))
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s: %s; its lines are kept in memory until it can be written",
                    self._path,
                    error.strerror,
                )
            self._failing = True

    def close(self) -> None:
        """Close the file. Lines that wait are lost with this process."""
        if self._lines:
            self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        """Open the file; from now on the lines that wait are those that it does not have.

        Raises:
            OSError: it cannot be opened or read.
        """
        file = open_to_append(self._path, self._trusted)
        try:
            if self._from_before:
                with open(f"/proc/self/fd/{file}", "rb") as there:
                    missing = dict.fromkeys(self._lines)
                    for line in there:
                        missing.pop(line.removesuffix(b"\n"), None)
                self._lines, self._from_before = deque(missing), False
            if not _ends_well(file):  # another process was killed while it wrote its last line
                self._lines.appendleft(b"")
        except OSError:
            os.close(file)
            raise
        return file

    def _next(self) -> list[bytes]:
        first, *others = (line + b"\n" for line in islice(self._lines, BATCH))
        return [first[self._begun :], *others]

    def _written(self, count: int) -> None:
        """The file has taken `count` bytes more. The rest of a line cut short is written next."""
        self._begun += count
        while self._lines and self._begun > len(self._lines[0]):
            self._begun -= len(self._lines.popleft()) + 1


def _ends_well(file: int) -> bool:
    """Whether the file is empty or its last line is whole."""
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"
