"""Decides whether a step's update is applied or skipped, whether the run stops, and whether earlier
weights are loaded. Pure functions of global values."""

import math
from dataclasses import dataclass
from typing import Literal


class GradientDisputeError(RuntimeError):
    """Two ranks computed different gradients of one micro-batch, twice; see witness.py.
    `outvoted`: whether a majority of ranks has shown that this rank computes wrongly."""

    def __init__(self, what: str, *, outvoted: bool = False) -> None:
        super().__init__(what)
        self.outvoted = outvoted


@dataclass(frozen=True)
class StepVerdict:
    """What to do with the gradients of a step, and why."""

    action: Literal["keep", "skip", "stop", "undo"]
    """"keep": update the weights. "skip": leave them unchanged. "stop": too many steps were skipped
    in a row. "undo": the weights themselves are not finite; load earlier ones."""
    reason: str = ""


def judge_step(
    step: int, loss: float, grad_norm: float, bad_ranks: list[int], skipped: int, limit: int
) -> StepVerdict:
    """Judge one step. All ranks reach the same verdict, because all arguments are global values.

    Args:
        grad_norm: norm of the whole gradient, after removing any loss scale.
        bad_ranks: ranks whose own loss was not finite, with all ranks that computed it together.
        skipped: steps skipped in a row before this one.
        limit: largest number of steps that may be skipped in a row.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return StepVerdict("keep")
    where = f"on rank {', '.join(map(str, bad_ranks))}" if bad_ranks else "in the backward pass"
    what = f"loss is {loss}"
    if math.isfinite(loss):
        what = f"loss is {loss:.4f} but grad norm {grad_norm}"
    reason = f"step {step}: {what}, first seen {where}"
    if skipped >= limit:
        return StepVerdict(
            "stop",
            f"{reason}; {skipped} steps in a row were already skipped "
            f"(elastic.max_skipped_steps={limit}). If this continues: lower optimizer.lr, lengthen "
            "schedule.warmup_steps, or inspect the data of these steps",
        )
    return StepVerdict("skip", f"{reason}; skipped, weights unchanged ({skipped + 1} of {limit})")


def judge_weights(step: int, updated: bool, where: str) -> StepVerdict:
    """Judge a step before or after which weights or optimizer state hold NaN or infinity.
    `updated`: whether this step's update, rather than an earlier one, caused it. `where`: the bad
    tensors and the ranks that hold them, in words."""
    when = "its update left" if updated else "skipped: an update before it left"
    hint = "If this continues: lower optimizer.lr, raise optimizer.eps, or clip gradients"
    return StepVerdict("undo", f"step {step}: {when} {where}. {hint}")
