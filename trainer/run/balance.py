"""`batch.balance: speed`: measures the ranks, and divides the global batch in proportion to their
speed.

[Note: balance] Ranks are measured over windows of STEPS steps. A rank times its forward passes
only, because a backward pass includes waiting for the gradients of all ranks. The all-reduce of the
step after a window carries the measurements of all ranks. So all ranks compute the same new shares,
see elastic/group/batch_plan.py. Of several ranks that compute one share (tp, cp, pp), the slowest
counts. New shares begin some steps later, because loaders have requested samples ahead. The order
of samples, the global batch and its loss stay the same. Each attempt begins with equal shares,
since its ranks may be on other machines.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic.group.batch_plan import GroupBatchPlan, GroupBatchPlanner
from trainer.parallel.fsdp import fsdp_units
from trainer.parallel.mesh import SHARD, Mesh
from trainer.parallel.passes import mark, seconds_between
from trainer.recipe import Recipe

STEPS = 4
"""Steps of a window of measurements."""
MOST_LISTED = 8
"""Largest number of shares that a message lists one by one."""


class RunSpeedBalance:
    """Divides each global batch among data-parallel ranks by their measured speed. `plan`: the
    first plan, with equal shares. `ahead`: micro-batches that a loader requests before they are
    used."""

    def __init__(self, recipe: Recipe, mesh: Mesh, plan: GroupBatchPlan, ahead: int) -> None:
        lockstep = recipe.gathers_twice or recipe.strategy.reduce_every_pass
        plan = replace(plan, lockstep=lockstep)
        self._balance = GroupBatchPlanner(plan, recipe.micro_batch)
        self._mesh, self._ahead = mesh, ahead
        self._plans = [(0, plan)]
        """The present and any later plan, each with the first sequence that it divides."""
        self._steps, self._seconds, self._sequences = 0, 0.0, 0
        self._pace = 0.0
        """Seconds per sequence on this rank in the last window; 0 if nothing was measured."""
        self._sends = False
        """Whether the next step's all-reduce carries measurements."""
        self._paces: list[float] = []
        """Seconds per sequence of all ranks, by rank; [] unless the last step brought them."""
        self._waits = SHARD in (mesh.device_mesh.mesh_dim_names or ()) and (
            mesh.device_mesh[SHARD].size() > 1
        )
        """Whether FSDP waits for other ranks within forward passes."""
        self._marks: list[tuple[Any, Any]] = []
        """(begin, end) of each block's forward pass in this step; recorded only if `_waits`."""

    def plan_at(self, sequences: int) -> GroupBatchPlan:
        """Return the plan of the global batch that begins at sequence `sequences`. Once a loader
        has requested samples of that batch, its plan never changes."""
        return next(plan for begin, plan in reversed(self._plans) if begin <= sequences)

    def to_sum(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return what this rank appends to the step's all-reduce: after a window a vector with one
        entry per rank, all 0 but for its own measurement; otherwise []. `like`: a tensor with the
        vector's dtype (float64) and device."""
        if not self._sends:
            return []
        ranks = like.new_zeros(self._mesh.dp_size * self._mesh.together)
        ranks[self._mesh.place * self._mesh.dp_size + self._mesh.dp_rank] = self._pace
        return [ranks]

    def take_from_sum(self, word: list[float]) -> list[float]:
        """Remove the measurements of all ranks from the end of `word`, the result of the step's
        all-reduce, if it has any; return the other values."""
        if not self._sends:
            return word
        ranks = self._mesh.dp_size * self._mesh.together
        self._paces = word[-ranks:]
        return word[:-ranks]

    def after_step(self, sequences: int, compute: float, *, odd: bool) -> str:
        """Add a step to the measurements; at the end of a window decide on shares. Returns a
        message for the log if the shares change; else "". On all ranks. `sequences`: consumed so
        far. `compute`: mean seconds of this rank's forward passes. `odd`: whether the step took
        longer for a known reason, and is not measured."""
        begin = sequences - self._balance.plan.global_batch
        passes = list(self.plan_at(begin).micro_batches(self._mesh.dp_rank, begin))
        seconds = compute * len(passes)
        if self._waits:
            seconds = sum(seconds_between(*pair) for pair in self._marks)
            self._marks.clear()
        if not odd:
            self._seconds += seconds
            self._sequences += sum(len(micro_batch.positions) for micro_batch in passes)
        paces, self._paces, self._sends = self._paces, [], False
        self._steps += 1
        if self._steps % STEPS == 0:
            self._pace = self._seconds / max(1, self._sequences)
            self._seconds, self._sequences, self._sends = 0.0, 0, True
        # Measurements made under old shares must not decide on the shares after the newest.
        if not paces or self._plans[-1][0] > sequences:
            return ""
        slowest = [max(paces[share :: self._mesh.dp_size]) for share in range(self._mesh.dp_size)]
        return self._change(sequences) if self._balance.window(slowest) else ""

    def _change(self, sequences: int) -> str:
        """Schedule the new batch plan for a later step. Return a message for the log."""
        new, (_, old) = self._balance.plan, self._plans[-1]
        ranks = range(self._mesh.dp_size)
        # Loaders have requested `ahead` micro-batches; on a GPU those of the next step as well.
        steps = 2 + -(-self._ahead // min(old.passes_of(rank) for rank in ranks))
        begin = sequences + steps * new.global_batch
        self._plans = [self._plans[-1], (begin, new)]
        shares = self.shares
        shown = ", ".join(map(str, shares))
        if len(shares) > MOST_LISTED:
            least, most = min(shares), max(shares)
            shown = f"{least} (rank {shares.index(least)}) to {most} (rank {shares.index(most)})"
        what = f"micro-batches of {new.micro_batch}" if new.fixed else "sequences"
        paces = self._balance.paces
        slowest = max(ranks, key=paces.__getitem__)
        return (
            f"batch.balance: from sequence {begin} on, data-parallel ranks have {shown} of "
            f"{new.units} {what}; the slowest of them is rank {slowest}, which takes "
            f"{paces[slowest] / min(paces):.2f} times as long as the fastest"
        )

    @property
    def begin(self) -> int:
        """First sequence that the newest plan divides."""
        return self._plans[-1][0]

    @property
    def shares(self) -> list[int]:
        """Share of each data-parallel rank in the newest plan, in micro-batches or sequences."""
        plan = self._plans[-1][1]
        return [len(plan.units_of(rank)) for rank in range(self._mesh.dp_size)]

    @contextmanager
    def timing(self, model: nn.Module) -> Iterator[None]:
        """While entered, time the forward passes of the model's blocks, if FSDP waits in them."""
        hooks = []
        if self._waits:
            for unit in model.modules():
                # The root unit is left out: its forward pass includes the waits of all blocks.
                if isinstance(unit, FSDPModule) and len(fsdp_units(unit)) == 1:
                    # These hooks run inside FSDP's, so that all-gathers are not timed.
                    hooks.append(unit.register_forward_pre_hook(self._begin_block))
                    hooks.append(unit.register_forward_hook(self._end_block, prepend=True))
        try:
            yield
        finally:  # the next attempt may reuse the model
            for hook in hooks:
                hook.remove()

    @torch.compiler.disable
    def _begin_block(self, block: nn.Module, _inputs: object) -> None:
        if block.training:
            now = mark(torch.device(self._mesh.device_mesh.device_type))
            self._marks.append((now, now))

    @torch.compiler.disable
    def _end_block(self, block: nn.Module, _inputs: object, _output: object) -> None:
        if block.training:
            began, _ = self._marks.pop()
            self._marks.append((began, mark(torch.device(self._mesh.device_mesh.device_type))))
