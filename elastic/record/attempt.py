"""An attempt: the lines of a ledger that one start of training processes wrote. Its step lines are
stored in columns: a million lines are counted in milliseconds."""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np

from elastic.record.ledger import StartLine

_WHOLE, _REAL = ("step", "first", "after_last", "line"), ("seconds", "after", "loss", "norm")
_ABSENT = -math.inf
"""In a column of losses or norms: the line has no such value. No line can hold this number."""
_DIGEST = 16
"""Usual number of characters of `LedgerStepLine.consumed`."""


class LedgerStepLine(NamedTuple):
    """A line that records an optimizer step."""

    step: int
    first: int
    """First sequence that the step consumed."""
    after_last: int
    """Sequence after the last one consumed."""
    seconds: float
    after: float
    """Seconds from the start line to the end of the step."""
    skipped: str
    """Why the update was skipped, see [Note: verdicts] of ledger.py; "": it was not."""
    line: int
    loss: float | None = None
    """NaN: the loss was not finite. None: the line has no loss."""
    norm: float | None = None
    """Norm of the gradient, perhaps not finite. None: the line has no norm."""
    consumed: str | None = None


class LedgerStepLines(Sequence[LedgerStepLine]):
    """The step lines of an attempt, in the order of the file."""

    def __init__(self) -> None:
        self._columns: dict[str, array[Any]] = {
            **{name: array("q") for name in _WHOLE},
            **{name: array("d") for name in _REAL},
        }
        self._digests = bytearray()
        """`consumed` of each line, as `_DIGEST` characters; zeros: none, or in `_other_digests`."""
        self._other_digests: dict[int, str] = {}
        """Index of a line whose `consumed` is longer or shorter → its `consumed`."""
        self._skipped: dict[int, str] = {}
        """Index of a line whose update was skipped → why."""
        names = ("step", "first", "after_last", "seconds", "after", "line", "loss", "norm")
        self._adders = tuple(self._columns[name].append for name in names)
        self.highest = -1
        """The highest step; -1: there is no line."""

    def append(self, one: LedgerStepLine) -> None:
        """Add a step line. Raises OverflowError if a number has more than 64 bits."""
        if max(abs(one.first), abs(one.after_last), one.step) >= 1 << 63:
            raise OverflowError("a number that no run writes")
        if one.skipped:
            self._skipped[len(self)] = one.skipped
        loss = _ABSENT if one.loss is None else one.loss
        norm = _ABSENT if one.norm is None else one.norm
        values = (one.step, one.first, one.after_last, one.seconds, one.after, one.line, loss, norm)
        for add, value in zip(self._adders, values, strict=True):
            add(value)
        digest = (one.consumed or "").encode()
        if digest and len(digest) != _DIGEST:
            self._other_digests[len(self) - 1], digest = str(one.consumed), b""
        self._digests += digest.ljust(_DIGEST, b"\0")
        self.highest = max(self.highest, one.step)

    def extend(self, columns: Mapping[str, np.ndarray]) -> None:
        """Add at least one step line without `skipped`. `columns`: name of a field → its values, as
        int64, float64, or characters; loss, norm and consumed may be missing."""
        count = len(columns["step"])
        for name, column in self._columns.items():
            values = columns[name] if name in columns else np.full(count, _ABSENT)
            column.frombytes(values.tobytes())
        digests = columns.get("consumed")
        self._digests += bytes(count * _DIGEST) if digests is None else digests.tobytes()
        self.highest = max(self.highest, int(columns["step"].max()))

    def __len__(self) -> int:
        return len(self._columns["step"])

    @overload
    def __getitem__(self, index: int) -> LedgerStepLine: ...
    @overload
    def __getitem__(self, index: slice) -> list[LedgerStepLine]: ...
    def __getitem__(self, index: int | slice) -> LedgerStepLine | list[LedgerStepLine]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        of = self._columns
        loss, norm = of["loss"][index], of["norm"][index]
        return LedgerStepLine(
            int(of["step"][index]), int(of["first"][index]), int(of["after_last"][index]),
            of["seconds"][index], of["after"][index], self._skipped.get(index, ""),
            int(of["line"][index]), None if loss == _ABSENT else loss,
            None if norm == _ABSENT else norm, self._consumed(index),
        )  # fmt: skip

    def _consumed(self, index: int) -> str | None:
        digest = self._digests[_DIGEST * index : _DIGEST * (index + 1)].decode()
        return digest if digest[0] != "\0" else self._other_digests.get(index)

    def __iter__(self) -> Iterator[LedgerStepLine]:
        return (self[index] for index in range(len(self)))

    def column(self, name: str) -> np.ndarray:
        """Returns a copy of a column, as int64 or float64."""
        return np.array(self._columns[name])

    def skipped(self) -> list[LedgerStepLine]:
        return [self[index] for index in self._skipped]

    def lack(self, name: str) -> bool:
        """Whether some line lacks the field `name`: loss, norm or consumed. True for a name that no
        line has."""
        if name == "consumed":
            digests = np.frombuffer(bytes(self._digests), np.uint8)[::_DIGEST]
            return int((digests == 0).sum()) > len(self._other_digests)
        return name not in _REAL or bool((self.column(name) == _ABSENT).any())

    def find(self, number: int) -> LedgerStepLine | None:
        numbers = self._columns["step"]
        if not numbers:
            return None
        guess = number - int(numbers[0])  # right if each step follows the one before
        if 0 <= guess < len(self) and numbers[guess] == number:
            return self[guess]
        try:
            return self[numbers.index(number)]
        except (ValueError, OverflowError):
            return None

    def beyond(self, number: int) -> LedgerStepLine | None:
        if self.highest <= number:
            return None
        return self[int((self.column("step") > number).argmax())]

    def consecutive(self, number: int, cursor: int, batch: int) -> bool:
        """Whether the lines are the steps after `number`, in order, each with `batch` sequences,
        beginning with sequence `cursor`."""
        if max(number, abs(cursor), batch) >= 1 << 62:  # sums would exceed int64
            return False
        step, first, after = (self.column(name) for name in ("step", "first", "after_last"))
        whole = np.arange(number + 1, number + 1 + len(self))
        begins = np.concatenate(([cursor], after[:-1])) if len(self) else after
        return bool(
            np.array_equal(step, whole)
            and np.array_equal(first, begins)
            and (after - first == batch).all()
        )

    def finite(self) -> bool:
        """Whether no step was skipped, and every recorded loss and norm is finite."""
        known = [self.column(name) for name in ("loss", "norm")]
        return not self._skipped and all(np.isfinite(one[one != _ABSENT]).all() for one in known)

    # --- as bytes, to be stored and read again ------------------------------------------------

    def dump(self) -> tuple[dict[str, object], list[bytes]]:
        """Returns (values that JSON can hold, columns as bytes), for `fill`."""
        values = {
            "count": len(self),
            "skipped": {str(index): why for index, why in self._skipped.items()},
            "consumed": {str(index): text for index, text in self._other_digests.items()},
        }
        columns = [column.tobytes() for column in self._columns.values()]
        return values, [*columns, bytes(self._digests)]

    def fill(self, values: dict[str, object], columns: Sequence[bytes]) -> None:
        """Fill an empty object with the result of `dump`, or raise ValueError."""
        *numbers, digests = columns
        for column, data in zip(self._columns.values(), numbers, strict=True):
            column.frombytes(data)
        self._digests += digests
        skipped, consumed, count = values["skipped"], values["consumed"], values["count"]
        lengths = {len(digests) / _DIGEST, count, *map(len, self._columns.values())}
        if len(lengths) != 1 or not (isinstance(skipped, dict) and isinstance(consumed, dict)):
            raise ValueError("columns of different lengths")
        self._skipped = {int(index): str(why) for index, why in skipped.items()}
        self._other_digests = {int(index): str(text) for index, text in consumed.items()}
        self.highest = max(self._columns["step"], default=-1)


class LedgerRollbackLine(NamedTuple):
    """A line that records a roll-back."""

    step: int
    """Step after which the run rolled back."""
    to: int
    """Step whose weights were loaded."""
    source: str
    after_step: int
    """Newest step recorded before the roll-back."""
    line: int


@dataclass
class RecordedAttempt:
    """An attempt: one start of training processes, with the lines that it wrote to the ledger. Unix
    times never go backwards from attempt to attempt. While a machine is not restarted, they follow
    its monotonic clock; else the wall clock, moved forward to the end of the attempt before."""

    number: int
    """Number of the attempt in the ledger, from 1."""
    start: StartLine
    line: int
    steps: LedgerStepLines = field(default_factory=LedgerStepLines)
    saves: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    validations: dict[int, Mapping[str, float | None]] = field(default_factory=dict)
    """Step → name → mean over the validation set after the step; None: the mean was not finite."""
    rollbacks: list[LedgerRollbackLine] = field(default_factory=list)
    end: dict[str, Any] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    """Time of the launch."""
    loaded: float = 0.0
    """Time of the start line."""
    finished: float = 0.0
    """Time of the last line."""
    written: float = 0.0
    """Seconds from the start line to the last line."""
    parent: "RecordedAttempt | None" = None
    """Attempt whose state was loaded; None: fresh weights, or no attempt computed the loaded
    step."""
    unrecorded: int = 0
    """Steps of the parent without a step line, proved only by the start line of this attempt."""

    @property
    def last_step(self) -> int:
        return self.steps.highest if self.steps else self.start.step

    def settle(self) -> None:
        """Compute `written` and `LedgerRollbackLine.after_step`, once all step lines have been
        read."""
        number, line = self.steps.column("step"), self.steps.column("line")
        self.written = max(self.written, float(self.steps.column("after").max(initial=0.0)))
        self.rollbacks = [
            one._replace(after_step=int(number[line < one.line].max(initial=self.start.step)))
            for one in self.rollbacks
        ]
