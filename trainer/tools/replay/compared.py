"""Compares the numbers of a recomputed step with its ledger line. Imports no torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from elastic.record.history import LedgerStepLine

Proof = Literal["bits", "rounding", "none"]
"""How far numbers must agree: in every bit; up to rounding; or not at all, because code or machine
differ."""

NORM = 10
"""Factor by which a gradient norm, which sums squares, may differ more than the loss."""
SUM_ORDER = 1e-9
"""Largest relative difference of validation means in exact mode. Another number of ranks sums them
in another order."""


@dataclass(frozen=True)
class ReplayNumbers:
    """The numbers of one step."""

    loss: float
    norm: float
    skipped: str
    """Verdict that skipped the step, see [Note: verdicts] in ledger.py; "" for no skipped step."""
    consumed: str | None
    """Digest of the sequences that the ranks consumed; None: the data supports none."""


def differences(
    recomputed: ReplayNumbers, line: LedgerStepLine, proof: Proof, tolerance: float
) -> Iterator[str]:
    """Yield a clause for each value in which a step differs from its ledger line. With the proof
    "none" only the consumed data is compared, with "bits" loss and norm must be equal. With
    "rounding" the loss may differ relatively by `tolerance`, the norm by NORM times as much."""
    if line.consumed and recomputed.consumed and line.consumed != recomputed.consumed:
        yield f"it consumed {recomputed.consumed}, and the ledger says {line.consumed}"
    if proof == "none":
        return
    exact = proof == "bits"
    ours, theirs = recomputed.skipped, line.skipped
    if ours != theirs and (exact or not (ours and theirs)):
        yield f"it is {_verdict(ours)}, and the ledger says {_verdict(theirs)}"
    for name, number, recorded, most in (
        ("loss", recomputed.loss, line.loss, tolerance),
        ("norm", recomputed.norm, line.norm, NORM * tolerance),
    ):
        if recorded is not None and relative(number, recorded) > (0 if exact else most):
            yield f"its {name} is {number!r}, and the ledger says {recorded!r}"


def unrecorded(recomputed: ReplayNumbers, line: LedgerStepLine) -> list[str]:
    """Return the names of the recomputed numbers that a ledger line lacks."""
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
    """Yield a clause for each mean over the validation set that differs from the ledger, where None
    stands for a mean that was not finite. If the proof is "rounding", only the loss is compared,
    because measures of a ranking change in jumps."""
    for name, ours in recomputed.items() if proof != "none" else ():
        theirs = recorded.get(name)
        theirs = math.nan if theirs is None else theirs
        if proof == "rounding" and name != "validation_loss":
            continue
        if relative(ours, theirs) > (SUM_ORDER if proof == "bits" else tolerance):
            yield f"its {name} is {ours!r}, and the ledger says {theirs!r}"


def relative(ours: float, theirs: float) -> float:
    """Return the difference of two numbers relative to the second. Non-finite numbers count as
    equal, because the ledger does not distinguish NaN and infinities."""
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return 0.0 if math.isfinite(ours) == math.isfinite(theirs) else math.inf
    if ours == theirs:
        return 0.0
    return abs(ours - theirs) / abs(theirs) if theirs else math.inf


def _verdict(skipped: str) -> str:
    return f"skipped for its {skipped}" if skipped else "kept"
