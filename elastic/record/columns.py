"""Reads lines that differ only in their values, all at once, as columns.

[Note: shapes] Nearly all lines of a long ledger are the same but for their values, and so are those
of metrics.jsonl. The *shape* of a line is the literal text around its values, and the kinds of the
values. Whatever does not have the shape exactly is left to the caller, which parses such lines one
by one. Values are exactly those that `int` and `float` return.

A value ends before a comma or a newline. So the positions of commas and newlines in a block of
lines tell where all values are. The values of a column are then converted together, from words of
eight characters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["whole", "number", "fraction", "hex8", "hex16"]
"""whole: a whole number without a sign, of at most 15 digits. number: a number as in JSON.
fraction: the rest of a normal number by `float.hex`, after its "0x1.". hex8, hex16: so many
lower-case hexadecimal digits, returned as characters."""
BLOCK_BYTES = 1 << 20
"""Bytes to read at a time: for fewer, calls of numpy cost more; more leave the CPU's caches."""
FEWEST = 32
"""Least number of lines for which columns are faster than one line after the other."""
_MARKS = b",.\n"
_NUMBER = re.compile(rb"-?(?:0|[1-9]\d*)(?=[.e])(?:\.\d+)?(?:e[+-]\d+)?")
_BEFORE, _BEHIND = 24, 8
"""Bytes added around a block, so that words around each value can be read."""
_BYTES = (1 << 64) // 255  # 0x0101…: a byte times this is a word of such bytes
_ZEROS, _HIGH = _BYTES * 0x30, _BYTES * 0x80
_KEPT = np.array(
    [[(1 << 64) - (1 << 64 - 8 * min(max(n - at, 0), 8)) for n in range(25)] for at in (0, 8, 16)],
    np.uint64,
)
"""Masks of the characters of a number of n digits in its last word, and in the two words before. A
word's first character is its lowest byte."""
_TENS = 10 ** np.arange(20, dtype=np.uint64)
_DIGITS = 18
"""Most digits of a number; 64 bits hold more."""
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
        self._text = bytes(_BEFORE) + text + bytes(_BEHIND)
        self._bytes = np.frombuffer(self._text, np.uint8)
        count = len(self._text) - 7
        self._words: np.ndarray = np.ndarray((count,), "<u8", self._text, strides=(1,))
        comma, dot, newline = (self._bytes == mark for mark in _MARKS)
        self._marks = np.flatnonzero(comma | dot | newline)
        """Positions of commas, dots and newlines."""
        self._ends = np.flatnonzero(~dot[self._marks])
        """Indices in `_marks` of commas and newlines."""
        self._lines = np.flatnonzero(newline[self._marks[self._ends]])
        """Indices in `_ends` of newlines."""
        self._commas = np.diff(self._lines, prepend=-1) - 1
        """Number of commas in each line."""
        after = self._marks[self._ends[self._lines]] + 1
        self._begins = np.concatenate(([_BEFORE], after[:-1]))
        self.bounds: list[int] = [0, *(after - _BEFORE).tolist()]
        """Where each line begins, and where the last ends."""

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, index: int) -> bytes:
        return self._text[_BEFORE + self.bounds[index] : _BEFORE + self.bounds[index + 1]]

    def typical(self) -> bytes:
        """Return the first line among those with the most frequent number of commas."""
        return self.line(int((self._commas == np.bincount(self._commas).argmax()).argmax()))

    def columns(self, shape: RecordLineShape) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the indices of the lines that have a shape, and their values: a column of int64
        (whole), of float64 (number, fraction), or of characters for each of its values."""
        commas = [literal.count(b",") for literal in shape.literals]
        lines = np.flatnonzero(self._commas == sum(commas))
        last, begin = self._lines[lines], self._begins[lines]
        fits, columns = self._has(begin, shape.literals[0]), []
        for number, (kind, literal) in enumerate(
            zip(shape.kinds, shape.literals[1:], strict=True), 1
        ):
            begin = begin + len(shape.literals[number - 1])
            mark = self._ends[last - sum(commas[number:])]
            end = self._marks[mark] - len(re.split(rb"[,\n]", literal)[0])
            if kind in ("whole", "number"):
                before = self._marks[mark - 1]
                has_dot = (before >= begin) & (self._bytes[before] == ord("."))
                dot = np.where(has_dot, before, end)
                good, values = self._numbers(begin, end, dot, fits, whole=kind == "whole")
            elif kind == "fraction":
                good, values = self._fractions(begin, end)
            else:
                good, values = self._characters(begin, end, int(kind[3:]))
            columns.append(values)
            begin = end
            fits &= good & self._has(begin, literal)
        return lines[fits], [values[fits] for values in columns]

    def _at(self, places: np.ndarray) -> np.ndarray:
        """Return the words that begin at `places`."""
        # only in lines that do not fit can a place be out of range
        words: np.ndarray = self._words[np.minimum(places, len(self._words) - 1)]
        return words

    def _has(self, begin: np.ndarray, literal: bytes) -> np.ndarray:
        """Whether `literal` stands at `begin`."""
        good = np.ones(len(begin), bool)
        for ahead in range(0, len(literal), 8):
            at = max(0, min(ahead, len(literal) - 8))  # the last word overlaps the one before
            part, words = literal[at : at + 8], self._at(begin + at)
            if len(part) < 8:
                words &= np.uint64((1 << 8 * len(part)) - 1)
            good &= words == np.uint64(int.from_bytes(part, "little"))
        return good

    def _digits(self, end: np.ndarray, length: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
        """Return whether the `length` characters before `end` are digits, at most `most` (8, 16 or
        24), and the number that they form, below 10^18."""
        good = (length >= 0) & (length <= most)
        length = np.where(good, length, 0)
        value = np.zeros(len(end), np.uint64)
        for at in range(0, int(length.max(initial=0)), 8):
            word = (self._at(end - at - 8) ^ np.uint64(_ZEROS)) & _KEPT[at // 8][length]
            good &= ((word + np.uint64(_BYTES * 0x76)) | word) & np.uint64(_HIGH) == 0
            word = word * np.uint64(10) + (word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
            word = word * np.uint64(100) + (word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
            word = word * np.uint64(10_000) + (word >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
            value += word * _TENS[at]
            if at == 16:
                good &= word < 100
        return good, value

    def _numbers(
        self, begin: np.ndarray, end: np.ndarray, dot: np.ndarray, fits: np.ndarray, *, whole: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return whether numbers from `begin` to `end` are complete, and their values. `dot`: place
        of the decimal point, or `end`. `fits`: whose values count."""
        if whole:
            good, value = self._digits(end, end - begin, 16)
            return good & (begin < end) & (end - begin < 16) & (dot == end), value.astype(np.int64)
        minus = self._bytes[begin] == ord("-")
        first = begin + minus
        exponent, digits_end = np.zeros(len(begin), np.int64), end
        good = np.ones(len(begin), bool)
        has_exponent = (self._bytes[end - 4] == ord("e")) & (end - 4 > first)
        if has_exponent.any():
            digits_end = end - 4 * has_exponent
            known, power = self._digits(end, np.where(has_exponent, 2, 0), 8)
            sign = self._bytes[end - 3]
            good = known & (~has_exponent | (sign == ord("-")) | (sign == ord("+")))
            exponent = np.where(sign == ord("-"), -1, 1) * power.astype(np.int64)
            dot = np.minimum(dot, digits_end)
        has_dot = dot < digits_end
        places = np.where(has_dot, digits_end - dot - 1, 0)
        size = dot - first
        known, integer = self._digits(dot, size, 16)
        good &= known & (size > 0) & ((self._bytes[first] != ord("0")) | (size == 1))
        known, rest = self._digits(digits_end, places, 24)
        good &= known & (has_dot == (places > 0))
        good &= (integer == 0) | (size + places <= _DIGITS)
        # the integer 0 with a sign is not the number -0.0
        good &= has_dot | has_exponent | ~minus | (integer > 0)
        power = places - exponent
        good &= (places < len(_TENS)) & (power >= 0) & (power <= _EXACT)
        mantissa = integer * _TENS[np.where(good, places, 0)] + rest
        near, values = _quotient(mantissa, np.where(good, power, 0))
        values = np.where(minus, -values, values)
        for index in np.flatnonzero(~(good & ~near) & fits).tolist():
            text = self._text[begin[index] : end[index]]
            good[index] = bool(_NUMBER.fullmatch(text))
            if good[index]:
                values[index] = float(text)
        return good & np.isfinite(values), values

    def _hexadecimal(self, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether words are eight lower-case hexadecimal digits, and the digits' values, one
        a byte."""
        letter = word >> np.uint64(6) & np.uint64(_BYTES)
        digit = (word & np.uint64(_BYTES * 15)) + letter * np.uint64(9)
        good = word == np.uint64(_ZEROS) + digit + letter * np.uint64(0x27)
        good &= (digit + np.uint64(_BYTES * 6)) >> np.uint64(4) & np.uint64(_BYTES) == letter
        return good & (digit & np.uint64(_BYTES * 16) == 0), digit

    def _characters(
        self, begin: np.ndarray, end: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        good, words = end - begin == width, []
        for at in range(0, width, 8):
            words.append(self._at(begin + at))
            good &= self._hexadecimal(words[-1])[0]
        return good, np.stack(words, axis=1).view(f"S{width}")[:, 0]

    def _fractions(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # 13 digits as two words that overlap, "p", a sign, and up to three digits
        good, mantissa = np.ones(len(begin), bool), np.zeros(len(begin), np.uint64)
        for at, digits in ((0, 8), (5, 5)):
            known, word = self._hexadecimal(self._at(begin + at))
            word = (word << np.uint64(4) | word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
            word = (word << np.uint64(8) | word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
            word = (word << np.uint64(16) | word >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
            kept = np.uint64((1 << 4 * digits) - 1)
            mantissa = mantissa << np.uint64(4 * digits) | word & kept
            good &= known
        p, sign = (self._bytes[np.minimum(begin + at, end)] for at in (13, 14))
        size = end - begin - 15
        known, power = self._digits(end, size, 8)
        good &= known & (size > 0) & (size < 4)
        good &= (p == ord("p")) & ((sign == ord("+")) | (sign == ord("-")))
        exponent = np.where(sign == ord("-"), -1, 1) * power.astype(np.int64)
        bits = (exponent + 1023).astype(np.uint64) << np.uint64(52) | mantissa
        return good, bits.view(np.float64)


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
