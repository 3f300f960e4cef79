"""Compares the numbers of a recomputed step with its ledger line. Imports no torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from elastic.record.history import StepLine

Proof = Literal["bits", "rounding", "none"]
"""How far numbers must agree: in every bit; up to rounding; or not at all, because code or machine
differ."""

NORM = 10
"""Factor by which a gradient norm may differ more than the loss: it sums squares, and depends on
the weights."""


SUM_ORDER = 1e-9
"""Largest relative difference of validation means in exact mode, in which ranks add up their parts
in another order."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step."""

    loss: float
    norm: float
    skipped: str
    """The verdict that skipped the step, see [Note: verdicts] of ledger.py; "" if it changed the
    weights."""
    consumed: str | None
    """Digest of the sequences that the ranks consumed; None: the data supports none."""


def differences(
    recomputed: StepNumbers, line: StepLine, proof: Proof, tolerance: float
) -> Iterator[str]:
    """Yield a clause for each number in which a step differs from its ledger line.

    Args:
        recomputed: the numbers of the step.
        line: the ledger line.
        proof: how far step and line must agree.
        tolerance: largest relative difference of losses that rounding explains.
    """
    if line.consumed and recomputed.consumed and line.consumed != recomputed.consumed:
        yield f"it consumed {recomputed.consumed}, and the ledger says {line.consumed}"
    if proof == "none":
        return
    exact = proof == "bits"
    if (
        (recomputed.skipped != line.skipped)
        if exact
        else (bool(recomputed.skipped) != bool(line.skipped))
    ):
        yield f"it is {_verdict(recomputed.skipped)}, and the ledger says {_verdict(line.skipped)}"
    for name, ours, theirs, most in (
        ("loss", recomputed.loss, line.loss, tolerance),
        ("norm", recomputed.norm, line.norm, NORM * tolerance),
    ):
        if theirs is not None and relative(ours, theirs) > (0 if exact else most):
            yield f"its {name} is {ours!r}, and the ledger says {theirs!r}"


def unrecorded(recomputed: StepNumbers, line: StepLine) -> list[str]:
    """Return the names of the numbers that a ledger line lacks, and that thus are not compared."""
    return [
        name
        for name in ("loss", "norm", "consumed")
        if getattr(line, name) is None and getattr(recomputed, name) is not None
    ]


def other_means(
    recomputed: Mapping[str, float],
    recorded: Mapping[str, float | None],
    proof: Proof,
    tolerance: float,
) -> Iterator[str]:
    """Yield a clause for each mean over the validation set that differs from the ledger. If the
    proof is "rounding", only the loss is compared, because measures of a ranking change in jumps.

    Args:
        recorded: name → mean; None: it was not finite.
        tolerance: as in `differences`.
    """
    for name, ours in recomputed.items() if proof != "none" else ():
        theirs = recorded.get(name)
        theirs = math.nan if theirs is None else theirs
        if proof == "rounding" and name != "validation_loss":
            continue
        if relative(ours, theirs) > (SUM_ORDER if proof == "bits" else tolerance):
            yield f"its {name} is {ours!r}, and the ledger says {theirs!r}"


def relative(ours: float, theirs: float) -> float:
    """Return the difference of two numbers relative to the second. Two non-finite numbers count as
    equal, because the ledger does not distinguish NaN and infinities."""
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return 0.0 if math.isfinite(ours) == math.isfinite(theirs) else math.inf
    if ours == theirs:
        return 0.0
    return abs(ours - theirs) / abs(theirs) if theirs else math.inf


def _verdict(skipped: str) -> str:
    return f"skipped for its {skipped}" if skipped else "kept"
