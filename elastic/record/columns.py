"""Reads lines that differ only in their values, all at once, as columns.

[Note: shapes] Nearly all lines of a long ledger are the same but for their values, and so are those
of metrics.jsonl. The *shape* of a line is the literal text around its values, and the kinds of the
values. Whatever does not have the shape exactly is left to the caller, which parses such lines one
by one. Values are exactly those that `int` and `float` return.

A block of lines is read from the left, all lines at once: the place of a value follows from the
length of the one before, which its first character of another kind ends. Texts and values are read
as words of eight characters, and digits are converted eight at a time.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from statistics import mode
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import numpy as np

from elastic.process import usable_cores

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")

Kind = Literal["whole", "number", "fraction", "hex8", "hex16"]
"""whole: a whole number without a sign, of at most 15 digits. number: a number as in JSON.
fraction: the rest of a normal number by `float.hex`, after its "0x1.". hex8, hex16: so many
lower-case hexadecimal digits, returned as characters."""
BLOCK_BYTES = 1 << 20
"""Bytes to read at a time: for fewer, calls of numpy cost more; more leave the CPU's caches."""
FEWEST = 32
"""Least number of lines for which columns are faster than one line after the other."""
_WORTH_A_PROCESS = 16
"""Least number of blocks for which further processes are started."""
MOST_PROCESSES = 4
"""Processes that parse one file, where there are so many cores."""
_NUMBER = re.compile(rb"-?(?:0|[1-9]\d*)(?=[.e])(?:\.\d+)?(?:e[+-]\d+)?")
_BEHIND = 24
"""Bytes added after a block, so that words at its end can be read. A word's first character is its
lowest byte."""
_BYTES = (1 << 64) // 255  # 0x0101…: a byte times this is a word of such bytes
_ONES, _ZEROS, _NINES = (np.uint64(_BYTES * byte) for byte in (1, ord("0"), 127 - 9))
_TENS = 10 ** np.arange(20, dtype=np.uint64)
_DIGITS = 19
"""Most digits of a number that fit in 64 bits."""
_EXACT = 22
"""Largest power of ten that is exact in float64."""
_DIVISORS = np.array([float(10**power) for power in range(_EXACT + 1)])


@dataclass(frozen=True)
class RecordLineShape:
    """See [Note: shapes]."""

    literals: tuple[bytes, ...]
    """Texts around the values. All but the first have a comma or a newline."""
    kinds: tuple[Kind, ...]

    @staticmethod
    def of(
        line: bytes, spans: Sequence[tuple[int, int]], kinds: Sequence[Kind]
    ) -> "RecordLineShape":
        """Return the shape of a line whose values are at (begin, end), in order."""
        ends = [0, *(end for _, end in spans)]
        begins = [*(begin for begin, _ in spans), len(line)]
        literals = tuple(line[end:begin] for end, begin in zip(ends, begins, strict=True))
        return RecordLineShape(literals, tuple(kinds))


class RecordLineBlock:
    """Lines, each with its newline."""

    def __init__(self, text: bytes) -> None:
        self._text = text + bytes(_BEHIND)
        self._bytes = np.frombuffer(self._text, np.uint8)
        newlines = np.flatnonzero(self._bytes == ord("\n"))
        self.bounds: np.ndarray = np.concatenate(([0], newlines + 1))
        """Where each line begins, and where the last ends."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def line(self, index: int) -> bytes:
        return self._text[self.bounds[index] : self.bounds[index + 1]]

    def typical(self) -> bytes:
        """Return the first line of a sample among those with the most frequent number of commas."""
        lines = [self.line(index) for index in range(0, len(self), 1 + len(self) // 64)]
        commas = [line.count(b",") for line in lines]
        return lines[commas.index(mode(commas))]

    def columns(self, shape: RecordLineShape) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the indices of the lines that have a shape, and their values: a column of int64
        (whole), of float64 (number, fraction), or of characters for each of its values."""
        end, columns = self.bounds[:-1], []
        fits = self._has(end, shape.literals[0])
        for kind, before, literal in zip(
            shape.kinds, shape.literals, shape.literals[1:], strict=False
        ):
            begin = end + len(before)
            if kind == "whole":
                good, values, size = self._integers(begin)
                end = begin + size
            elif kind == "number":
                good, values, end = self._numbers(begin, fits)
            elif kind == "fraction":
                good, values, end = self._fractions(begin)
            else:
                good, values, end = self._characters(begin, int(kind[3:]))
            columns.append(values)
            fits &= good & self._has(end, literal)
        indices = np.flatnonzero(fits)
        if len(indices) < len(self):
            columns = [values[indices] for values in columns]
        return indices, columns

    def _byte(self, places: np.ndarray) -> np.ndarray:
        # only in lines that do not fit can a place be out of range
        return self._bytes.take(places, mode="clip")

    def _words(self, begin: np.ndarray, count: int) -> np.ndarray:
        """Return the `count` words that begin at each place. Shape: (count, places)."""
        last = len(self._text) - 8 * count
        windows = np.ndarray((last + 1,), f"V{8 * count}", self._text, strides=(1,))
        return windows[np.minimum(begin, last)].view("<u8").reshape(-1, count).T

    def _has(self, begin: np.ndarray, literal: bytes) -> np.ndarray:
        """Whether `literal` stands at `begin`."""
        wrong = np.zeros(len(begin), np.uint64)
        for at, word in enumerate(self._words(begin, -(-len(literal) // 8))):
            part = literal[8 * at : 8 * at + 8]
            unlike = word ^ np.uint64(int.from_bytes(part, "little"))
            wrong |= unlike & np.uint64((1 << 8 * len(part)) - 1)
        return wrong == 0

    def _digits(self, begin: np.ndarray, words: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of digits from `begin` on, up to eight for each of `words`, and the
        number that they form, modulo 2^64."""
        count, value = np.zeros(len(begin), np.int64), np.zeros(len(begin), np.uint64)
        for at in range(0, 8 * words, 8):
            word = self._words(begin + at, 1)[0] ^ _ZEROS
            ends = ((word + _NINES) | word) >> np.uint64(7) & _ONES  # where there is no digit
            bits = np.bitwise_count((ends & -ends) - np.uint64(1))  # before the first of these
            bits *= count == at
            # digits move to the end of the word, after zeros
            word <<= (64 - bits).astype(np.uint64)
            word = word * np.uint64(10) + (word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
            word = word * np.uint64(100) + (word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
            word = word * np.uint64(10_000) + (word >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
            size = bits >> 3
            value = value * _TENS[size] + word if at else word
            count += size
            if not (size == 8).any():
                break
        return count, value

    def _integers(self, begin: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return whether whole numbers of 1 to 15 digits stand at `begin`, the first of several
        not zero, as JSON demands; and their values and lengths."""
        size, value = self._digits(begin, 2)
        good = ((size == 1) | (value >= _TENS[size - 1])) & (size < 16)
        return good, value.view(np.int64), size

    def _numbers(self, begin: np.ndarray, fits: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return whether numbers stand at `begin`, their values and their ends. `fits`: whose
        values count."""
        minus = self._byte(begin) == ord("-")
        first = begin + minus
        good, integer, size = self._integers(first)
        end = first + size
        has_dot = self._byte(end) == ord(".")
        places, rest = self._digits(end + 1, 3)
        places, rest = places * has_dot, rest * has_dot
        end += has_dot + places
        good &= has_dot == (places > 0)
        power, has_exponent = places, self._byte(end) == ord("e")
        if has_exponent.any():
            known, exponent = self._digits(end + 2, 1)
            sign = self._byte(end + 1)
            good &= ~has_exponent | (known == 2) & ((sign == ord("-")) | (sign == ord("+")))
            exponent = (exponent * has_exponent).astype(np.int64)
            power = power + np.where(sign == ord("-"), exponent, -exponent)
            end += 4 * has_exponent
        good &= size + places <= _DIGITS + (integer == 0)
        # the integer 0 with a sign is not the number -0.0
        good &= has_dot | has_exponent | ~minus | (integer > 0)
        good &= (power >= 0) & (power <= _EXACT)
        mantissa = integer.view(np.uint64) * _TENS[np.where(good, places, 0)] + rest
        near, values = _quotient(mantissa, np.where(good, power, 0))
        values = np.where(minus, -values, values)
        for index in np.flatnonzero((near | ~good) & fits).tolist():
            found = _NUMBER.match(self._text, begin[index])
            good[index] = bool(found)
            if found:
                values[index], end[index] = float(found[0]), found.end()
        return good & np.isfinite(values), values, end

    def _hexadecimal(self, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether words are eight lower-case hexadecimal digits, and the digits' values, one
        a byte."""
        letter = word >> np.uint64(6) & np.uint64(_BYTES)
        digit = (word & np.uint64(_BYTES * 15)) + letter * np.uint64(9)
        good = word == _ZEROS + digit + letter * np.uint64(0x27)
        good &= (digit + np.uint64(_BYTES * 6)) >> np.uint64(4) & np.uint64(_BYTES) == letter
        return good & (digit & np.uint64(_BYTES * 16) == 0), digit

    def _characters(self, begin: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
        words = self._words(begin, width // 8)
        good = np.logical_and.reduce([self._hexadecimal(word)[0] for word in words])
        return good, words.T.view(f"S{width}")[:, 0], begin + width

    def _fractions(self, begin: np.ndarray) -> tuple[np.ndarray, ...]:
        # 13 digits, "p", a sign, and up to three digits
        good, mantissa = np.ones(len(begin), bool), np.zeros(len(begin), np.uint64)
        first, second = self._words(begin, 2)
        p, sign = second >> np.uint64(40) & np.uint64(255), second >> np.uint64(48) & np.uint64(255)
        five = np.uint64((1 << 40) - 1)
        for characters, digits in ((first, 8), (second & five | _ZEROS & ~five, 5)):
            known, word = self._hexadecimal(characters)
            word = (word << np.uint64(4) | word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
            word = (word << np.uint64(8) | word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
            word = (word << np.uint64(16) | word >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
            mantissa = mantissa << np.uint64(4 * digits) | word >> np.uint64(32 - 4 * digits)
            good &= known
        size, power = self._digits(begin + 15, 1)
        good &= (p == ord("p")) & ((sign == ord("+")) | (sign == ord("-")))
        good &= (size > 0) & (size < 4)
        exponent = np.where(sign == ord("-"), -1, 1) * power.astype(np.int64)
        bits = (exponent + 1023).astype(np.uint64) << np.uint64(52) | mantissa
        return good, bits.view(np.float64), begin + 15 + size


def parsed_blocks(
    file: BinaryIO, parse: Callable[[RecordLineBlock], T], *, forks: bool = False
) -> Iterator[tuple[RecordLineBlock, T]]:
    """Yield (block, parse(block)) for the lines from the position of a file on, in order, without a
    last line that has no newline. `forks`: forked processes may parse most of the blocks, so this
    process has no other thread."""
    spans, begin, size = [], file.tell(), os.fstat(file.fileno()).st_size
    while begin < size:
        file.seek(begin + BLOCK_BYTES)
        file.readline()
        end = min(file.tell(), size)
        spans.append((begin, end))
        begin = end
    worth = forks and len(spans) >= _WORTH_A_PROCESS
    count = min(MOST_PROCESSES, usable_cores()) if worth else 1
    with ExitStack() as stack:
        ahead: list[Connection | None] = [None]  # this process parses the first of `count` blocks
        for place in range(1, count):
            others = _parsed_ahead(file, parse, spans[place::count])
            ahead.append(stack.enter_context(others))
        for number, span in enumerate(spans):
            block, results = _block(file, span), ahead[number % count]
            try:
                parsed = results.recv() if results else parse(block)
            except (EOFError, OSError):  # that process was killed
                ahead[number % count], parsed = None, parse(block)
            yield block, parsed


def _block(file: BinaryIO, span: tuple[int, int]) -> RecordLineBlock:
    text = os.pread(file.fileno(), span[1] - span[0], span[0])
    return RecordLineBlock(text[: text.rfind(b"\n") + 1])


@contextmanager
def _parsed_ahead(
    file: BinaryIO, parse: Callable[[RecordLineBlock], Any], spans: Sequence[tuple[int, int]]
) -> "Iterator[Connection]":
    """Context in which a forked process sends the results of `parse` for spans of a file."""
    from multiprocessing import get_context  # imported only for large files

    context = get_context("fork")
    results, sender = context.Pipe(duplex=False)

    def run() -> None:
        results.close()  # so that a send fails once the other process has ended
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(OSError):
            for span in spans:
                sender.send(parse(_block(file, span)))

    process = context.Process(target=run, daemon=True)
    process.start()
    sender.close()
    try:
        yield results
    finally:
        results.close()
        process.join()


def _quotient(mantissa: np.ndarray, power: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mantissa / 10^power, rounded to the nearest float64, and before it, whether this may
    be wrong, as the quotient is too near the middle between two. `power`: at most 22."""
    divisor, high = _DIVISORS[power], mantissa.astype(np.float64)
    if mantissa.max(initial=0) < 1 << 53:  # a division of exact numbers is rounded once
        return np.zeros(len(high), bool), high / divisor
    low = (mantissa - high.astype(np.uint64)).astype(np.int64).astype(np.float64)
    quotient = high / divisor
    # The exact error of quotient * divisor (T. J. Dekker, 1971) gives the quotient's own.
    (a, b), (c, d) = _halves(quotient), _halves(divisor)
    product = quotient * divisor
    error = ((a * c - product) + a * d + b * c) + b * d
    rest = ((high - product) - error + low) / divisor
    values = quotient + rest
    left = np.abs(rest - (values - quotient))
    return np.abs(left / np.spacing(values) - 0.5) < 1e-6, values


def _halves(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split numbers into sums of two of 26 bits."""
    scaled = value * 134217729.0
    high = scaled - (scaled - value)
    return high, value - high
