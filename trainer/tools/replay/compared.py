"""Numbers of a step, as computed again and as the ledger has them. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from elastic.record.history import StepLine

Proof = Literal["bits", "rounding", "none"]
"""How far numbers must agree: in every bit; but for rounding; or not at all, as code or machine are
of another kind."""

NORM = 10
"""The norm of a gradient may differ so many times as much as the loss: it sums squares, and moves
with the weights."""


@dataclass(frozen=True)
class Numbers:
    """What a step gave."""

    loss: float
    norm: float
    skipped: str
    """What was wrong, see [Note: verdicts] of ledger.py; "" if it changed the weights."""
    consumed: str | None
    """Digest of what the ranks took; None: the data has none."""


def differences(found: Numbers, line: StepLine, proof: Proof, tolerance: float) -> Iterator[str]:
    """In what a step is not what the ledger says, in a clause each.

    Args:
        found: computed again.
        line: of the ledger.
        proof: how far they must agree.
        tolerance: largest relative difference of losses that rounding explains.
    """
    if line.consumed and found.consumed and line.consumed != found.consumed:
        yield f"it took {found.consumed}, and the ledger says {line.consumed}"
    if proof == "none":
        return
    exact = proof == "bits"
    if (found.skipped != line.skipped) if exact else (bool(found.skipped) != bool(line.skipped)):
        yield f"it is {_verdict(found.skipped)}, and the ledger says {_verdict(line.skipped)}"
    for name, ours, theirs, most in (
        ("loss", found.loss, line.loss, tolerance),
        ("norm", found.norm, line.norm, NORM * tolerance),
    ):
        if theirs is not None and relative(ours, theirs) > (0 if exact else most):
            yield f"its {name} is {ours!r}, and the ledger says {theirs!r}"


def relative(ours: float, theirs: float) -> float:
    """How far two numbers are apart, relative to the second. What is not finite is all alike: the
    ledger keeps no more of a loss."""
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return 0.0 if math.isfinite(ours) == math.isfinite(theirs) else math.inf
    if ours == theirs:
        return 0.0
    return abs(ours - theirs) / abs(theirs) if theirs else math.inf


def _verdict(skipped: str) -> str:
    return f"skipped for its {skipped}" if skipped else "kept"
