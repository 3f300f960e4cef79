"""`batch.balance: speed`: measures ranks, and gives them shares of the global batch by their speed.
Imported only where the recipe uses it.

[Note: balance] A window is STEPS steps. In it each rank times its forward passes: a backward pass
ends when the gradients of all ranks are summed. The word of the next step carries the measurements
of all ranks. So after that step all of them decide alike, see elastic/group/shares.py. New shares
begin some steps later, because loaders have requested samples ahead. The order of samples, the
global batch and its loss stay the same. Each attempt begins with equal shares, since its ranks may
be on other machines.

Ranks that compute a share together count with the slowest of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic.group.batch_plan import BatchPlan
from elastic.group.shares import ShareBalance
from trainer.parallel.clock import mark, seconds_between
from trainer.parallel.fsdp import fsdp_units
from trainer.parallel.mesh import SHARD, Mesh
from trainer.recipe import Recipe

STEPS = 4
"""Steps of a window."""
MOST_LISTED = 8
"""Most shares that a message lists one by one."""


class SpeedShares:
    """The plans of a run whose ranks have shares by speed."""

    def __init__(self, recipe: Recipe, mesh: Mesh, plan: BatchPlan, ahead: int) -> None:
        """Begin with equal shares.

        Args:
            recipe: with a number for `batch.micro_batch`.
            mesh: of the run.
            plan: of equal shares.
            ahead: micro-batches that a loader requests before they are used.
        """
        lockstep = recipe.gathers_twice or recipe.strategy.reduce_every_pass
        plan = replace(plan, lockstep=lockstep)
        self._balance = ShareBalance(plan, recipe.micro_batch)
        self._mesh, self._ahead = mesh, ahead
        self._plans = [(0, plan)]
        """Plans in force and to come, each with its first sequence of the global order."""
        self._steps, self._seconds, self._sequences = 0, 0.0, 0
        self._pace = 0.0
        """Seconds of a sequence in the window that has just ended; 0: none has, or no step of it
        was measured."""
        self._sends = False
        """Whether the next word carries measurements."""
        self._paces: list[float] = []
        """Measurements that the last word brought, by rank."""
        self._waits = SHARD in (mesh.device_mesh.mesh_dim_names or ()) and (
            mesh.device_mesh[SHARD].size() > 1
        )
        """Whether FSDP waits for other ranks within forward passes."""
        self._marks: list[tuple[Any, Any]] = []
        """Begin and end of each block's forward, if `_waits`."""

    def plan_at(self, sequences: int) -> BatchPlan:
        """Return the plan of the global batch that begins at a sequence; it does not change once a
        loader has asked for it."""
        return next(plan for begin, plan in reversed(self._plans) if begin <= sequences)

    # --- the step's word ---------------------------------------------------------------------

    def word(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return what this rank adds to the end of a step's word: a float64 for each rank, its own
        measurement filled in; or nothing between windows.

        Args:
            like: a tensor of the word.
        """
        if not self._sends:
            return []
        ranks = like.new_zeros(self._mesh.dp_size * self._mesh.together)
        ranks[self._mesh.place * self._mesh.dp_size + self._mesh.dp_rank] = self._pace
        return [ranks]

    def hear(self, word: list[float]) -> list[float]:
        """Take the measurements from the sum of all words, and return the rest of it."""
        if not self._sends:
            return word
        ranks = self._mesh.dp_size * self._mesh.together
        self._paces = word[-ranks:]
        return word[:-ranks]

    # --- after a step ------------------------------------------------------------------------

    def after_step(self, sequences: int, compute: float, *, odd: bool) -> str:
        """Measure the step just done, and decide if it ended a window. On all ranks.

        Args:
            sequences: consumed so far.
            compute: mean seconds of this rank's forward passes.
            odd: the step took longer for a known reason, and does not count.

        Returns:
            A sentence if the shares change; else "".
        """
        begin = sequences - self._balance.plan.global_batch
        passes = list(self.plan_at(begin).micro_batches(self._mesh.dp_rank, begin))
        seconds = compute * len(passes)
        if self._waits:
            seconds, marks = 0.0, self._marks
            for pair in marks:
                seconds += seconds_between(*pair)
            marks.clear()
        if not odd:
            self._seconds += seconds
            self._sequences += sum(len(micro_batch.positions) for micro_batch in passes)
        paces, self._paces, self._sends = self._paces, [], False
        self._steps += 1
        if self._steps % STEPS == 0:
            self._pace = self._seconds / max(1, self._sequences)
            self._seconds, self._sequences, self._sends = 0.0, 0, True
        # While other shares are still to come, no further ones are decided.
        if not paces or self._plans[-1][0] > sequences:
            return ""
        slowest = [max(paces[share :: self._mesh.dp_size]) for share in range(self._mesh.dp_size)]
        return self._change(sequences) if self._balance.window(slowest) else ""

    def _change(self, sequences: int) -> str:
        """Put the plan just decided into force, at a later step; returns a sentence about it."""
        new, (_, old) = self._balance.plan, self._plans[-1]
        ranks = range(self._mesh.dp_size)
        # On a GPU a step's micro-batches are fetched while the step before computes.
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
        """First sequence of the newest plan."""
        return self._plans[-1][0]

    @property
    def shares(self) -> list[int]:
        """Units of each data-parallel rank in the newest plan."""
        plan = self._plans[-1][1]
        return [len(plan.units_of(rank)) for rank in range(self._mesh.dp_size)]

    # --- measuring ---------------------------------------------------------------------------

    @contextmanager
    def timing(self, model: nn.Module) -> Iterator[None]:
        """While entered, time the blocks of `model` where FSDP waits in forward."""
        hooks = []
        if self._waits:
            for unit in model.modules():
                # The blocks, without the unit of the whole model, in whose forward they wait.
                if isinstance(unit, FSDPModule) and len(fsdp_units(unit)) == 1:
                    # FSDP's hooks run before the first of these, and after the second.
                    hooks.append(unit.register_forward_pre_hook(self._begin_block))
                    hooks.append(unit.register_forward_hook(self._end_block, prepend=True))
        try:
            yield
        finally:  # the next attempt may keep the model
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
