"""Ranks compute micro-batches of each other, to find a machine that computes wrongly.

[Note: witness] A rank that repeats its own work cannot see an error that is the same each time. So
a share of the micro-batches is computed by a second rank, too: the *witness* of the first one, the
*subject*. In exact mode both gradients have the same bits.

- *Draw.* Step and seed decide which passes of a step are drawn, and how far the witness is from the
  subject. In a drawn pass every rank is a subject and a witness once, so all ranks take equally
  long, and the collectives of FSDP match.
- *Digest.* A rank keeps 64 bits of each gradient, before it is summed with others. A number made
  from these joins the all-reduce of the step. It adds up to 0 if all pairs agree.
- *Vote.* If they do not, ranks tell each other their digests, and a third rank computes what two
  disagree on. The one that two others contradict is wrong. The step is computed again in any case,
  before the weights change.
- *End.* A rank that is contradicted twice is named, and leaves with its node. Where no majority
  says who is wrong, the run stops.

The passes of a witness leave nothing behind but a digest. The first step of an attempt has none, as
FSDP makes the tensors that a digest reads in a rank's first pass.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from checkpointing.ranks import RankGroup
from elastic import LedgerError, read_history
from elastic.node.exchange import received
from elastic.world import supervised
from trainer.data.loader import MASK
from trainer.parallel.fsdp import gathered_parameters
from trainer.recipe.seeds import stable_seed
from trainer.run.guard import DisputeError
from trainer.run.state import Run

EVENT = "witness"
"""Name of the ledger's events about disputes. `ranks` are those that were contradicted twice;
`agreed`, where the attempt ends, is the newest step that nothing speaks against."""


@dataclass(frozen=True)
class Draw:
    """A pass of a step that every rank computes for another, too."""

    number: int
    """Index of the pass."""
    distance: int
    """The witness of rank r is rank r + distance, counted around."""

    @property
    def third(self) -> int:
        """Distance of the rank that decides between a subject and its witness."""
        return 1 if self.distance > 1 else 2


def draw_passes(seed: int, step: int, share: float, passes: int, ranks: int) -> list[Draw]:
    """The drawn passes of a step; over many steps a `share` of all.

    Args:
        seed: of the run.
        share: of the passes, in [0, 1].
        passes: of each rank in a step.
        ranks: at least 2.
    """
    wanted = share * passes
    count = int(wanted) + (stable_seed(seed, "witness", step) < wanted % 1 * 2**63)
    if not count:
        return []
    order = sorted(
        range(passes), key=lambda number: stable_seed(seed, "witnessed pass", step, number)
    )
    # Distances vary, so that machines which err alike meet others.
    return [
        Draw(number, 1 + stable_seed(seed, "witness of pass", step, number) % (ranks - 1))
        for number in order[:count]
    ]


def digest(gradient: torch.Tensor) -> torch.Tensor:
    """64 bits of a tensor (0-d int64, on its device), of which one changed bit changes some: the
    sum of its numbers' bits as float64, each row multiplied by another odd number."""
    # float64 holds what any format holds: FSDP may hand over one or the other.
    words = gradient.detach().double().contiguous().view(torch.int64)
    sums = words.flatten(1).sum(dim=1) if words.dim() > 1 else words.reshape(-1)
    odd = torch.arange(1, 2 * len(sums), 2, device=gradient.device)
    return (sums * odd).sum()


def find_outvoted(
    draw: Draw, own: Sequence[int], witnessed: Sequence[int], thirds: Sequence[int] | None
) -> tuple[set[int], set[int]]:
    """(ranks that two others contradict, ranks that differ without a majority) in a drawn pass.

    Args:
        own: by rank, digest of its own micro-batch.
        witnessed: by rank, digest of the micro-batch that it computed as a witness.
        thirds: by rank, digest of the micro-batch that it computed to decide; None: nobody did.
    """
    ranks = len(own)
    outvoted: set[int] = set()
    undecided: set[int] = set()
    for subject in range(ranks):
        witness, third = (subject + draw.distance) % ranks, (subject + draw.third) % ranks
        if own[subject] == witnessed[witness]:
            continue
        if thirds and thirds[third] == witnessed[witness]:
            outvoted.add(subject)
        elif thirds and thirds[third] == own[subject]:
            outvoted.add(witness)
        else:
            undecided |= {subject, witness, *([third] if thirds else [])}
    return outvoted, undecided


@dataclass
class Comparison:
    """Digests of a step's drawn passes on this rank, by draw."""

    draws: Sequence[Draw]
    whole: bool
    """Whether all passes of the step are drawn."""
    passes: int
    """Number of this rank's passes in the step; others may have more or fewer."""
    rank: int
    ranks: int
    own: torch.Tensor
    """Digests of the gradients of its own micro-batches: (draws,) int64."""
    witnessed: torch.Tensor
    """Digests of the gradients of its subjects' micro-batches: (draws,) int64."""
    digests: "GradientDigests"

    def begin_pass(self, number: int) -> None:
        """Begin one of the step's own passes, which leaves a digest if it is drawn."""
        drawn = [n for n, draw in enumerate(self.draws) if draw.number % self.passes == number]
        self.digests.totals = [self.own[place] for place in drawn]

    def word(self) -> torch.Tensor:
        """A number in [0, 2**32), float64, whose sum over all ranks is 0 modulo 2**32 if all pairs
        agree; if one does not, with a probability of 2**-32."""
        count = len(self.draws)
        total = torch.zeros_like(self.own[0])
        for place, draw in enumerate(self.draws):
            for sign, rank, one in (
                (1, self.rank, self.own[place]),
                (-1, (self.rank - draw.distance) % self.ranks, self.witnessed[place]),
            ):
                folded = (one ^ (one >> 32)) & MASK  # every bit counts
                # A factor for each pair: errors of two pairs must not cancel.
                total += sign * folded * (2 * (rank * count + place) + 1)
        return (total & MASK).double()


class GradientDigests:
    """Digests the gradients of passes while it is attached to their parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.totals: Sequence[torch.Tensor] = ()
        """Where the digest of the present pass is added, 0-d int64 each."""
        self.drop = False
        """Whether the gradients of the present pass are dropped, rather than added to the
        step's."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch backward passes inside the block."""

        def add(gradient: torch.Tensor, number: int) -> None:
            if self.totals:
                added = digest(gradient) * (2 * number + 1)
                for total in self.totals:
                    total.add_(added)

        def leave(parameter: torch.Tensor) -> None:
            if self.drop:
                parameter.grad = None

        handles: list[Any] = []
        for number, parameter in enumerate(self._parameters):
            # Called after the hook that snaps gradients, which the first step has registered.
            handles.append(parameter.register_hook(partial(add, number=number)))
            handles.append(parameter.register_post_accumulate_grad_hook(leave))
        try:
            yield
        finally:
            self.totals, self.drop = (), False
            for handle in handles:
                handle.remove()


@contextmanager
def unchanged(model: nn.Module, *, buffers: bool) -> Iterator[None]:
    """Around a pass that does not count: restore what it changes beside gradients.

    Args:
        model: that the pass calls.
        buffers: whether it may change buffers.
    """
    kept = [
        (module, name, buffer, buffer.clone())
        for module in (model.modules() if buffers else ())
        for name, buffer in module.named_buffers(recurse=False)
    ]
    # routers, which count the tokens of each expert
    counting = [part for part in model.modules() if hasattr(part, "forget_step")]
    loads = [part.load for part in counting]
    try:
        yield
    finally:
        for module, name, buffer, before in kept:
            buffer.copy_(before)
            setattr(module, name, buffer)  # a pass may have put another tensor there
        for part, load in zip(counting, loads, strict=True):
            part.load = load


class Witness:
    """Compares gradients of a run's ranks, and remembers who was contradicted. On all ranks."""

    def __init__(self, share: float, ranks: int, compute_pass: Callable[..., object]) -> None:
        """`compute_pass`: that of step.py."""
        self._share, self._ranks, self._compute_pass = share, ranks, compute_pass
        self._contradicted: Counter[int] = Counter()
        self._undecided = 0
        self._agreed = 0
        """Newest step whose weights no rank can have spoilt that errs in each pass."""

    def begin(self, step: int) -> None:
        """Begin with the weights of `step`, which are taken to be right."""
        self._agreed = step

    def __str__(self) -> str:
        """What is compared, for the log."""
        if self._ranks == 1:
            return "elastic.witness: one rank has no other to compare with"
        text = f"elastic.witness: {self._share:.3g} of the micro-batches are computed by two ranks"
        if self._ranks == 2:
            text += "; a difference stops the run, as only a third rank could tell which is wrong"
        return text

    @contextmanager
    def watch(self, run: Run) -> Iterator[Comparison | None]:
        """Compute the drawn micro-batches of this rank's subjects, and then watch the step's own
        passes inside the block. Yields None in a step without a draw. On all ranks."""
        step, passes = run.progress.step + 1, run.plan.passes
        draws = []
        if self._ranks > 1:
            draws = draw_passes(run.recipe.run.seed, step, self._share, passes, self._ranks)
        if not draws or run.first_step:
            yield None
            return
        digests = GradientDigests(gathered_parameters(run.model.module))
        own = torch.zeros(len(draws), dtype=torch.int64, device=run.world.device)
        rank, sequences = run.mesh.dp_rank, run.progress.sequences
        comparison = Comparison(
            draws,
            len(draws) == passes,
            sum(1 for _ in run.plan.micro_batches(rank, sequences)),
            rank,
            self._ranks,
            own,
            torch.zeros_like(own),
            digests,
        )
        with digests.attached():
            for place, draw in enumerate(draws):
                total = comparison.witnessed[place]
                self._compute_for(run, comparison, draw.number, draw.distance, total)
            digests.drop = False
            yield comparison

    def disputed(self, comparison: Comparison, step: int, total: int) -> Comparison | None:
        """The comparison if ranks disagree, by the sum of their `Comparison.word`; else None."""
        if total & MASK:
            return comparison
        # A fault may begin between two passes of a step, of which only the first was compared.
        self._agreed = step if comparison.whole else step - 1
        return None

    def settle(self, run: Run, comparison: Comparison) -> None:
        """Find who is wrong, and report it. Returns if the step is to be computed again. On all
        ranks.

        Raises:
            DisputeError: a rank was contradicted twice, on that rank; or nobody can tell, on all.
            RuntimeError: that other rank has left, on those that stay.
        """
        step = run.progress.step + 1
        mine = torch.stack([comparison.own, comparison.witnessed])
        own, witnessed = zip(*gathered(run, mine), strict=True)
        thirds = None
        if self._ranks > 2:
            thirds = gathered(run, self._decide(run, comparison))
        outvoted: set[int] = set()
        undecided: set[int] = set()
        for place, draw in enumerate(comparison.draws):
            found = find_outvoted(
                draw,
                [digests[place] for digests in own],
                [digests[place] for digests in witnessed],
                thirds and [digests[place] for digests in thirds],
            )
            outvoted, undecided = outvoted | found[0], undecided | found[1]
        self._contradicted.update(outvoted)
        named = sorted(rank for rank in outvoted if self._contradicted[rank] > 1)
        if named:
            self._end(run, step, named)
        why = f"step {step}: {told(outvoted)}"
        if not outvoted:
            self._undecided += 1
            why = f"step {step}: {differing(undecided, thirds is not None)}"
        if self._undecided > 1:
            run.log.event(step, EVENT, f"{why}; {self._since}", agreed=self._agreed)
            raise DisputeError(why)
        run.log.event(step, EVENT, f"{why}; the step is computed again")

    def _decide(self, run: Run, comparison: Comparison) -> torch.Tensor:
        """Compute the drawn micro-batches of a third rank; returns their digests, (draws,) int64.
        On all ranks."""
        totals = torch.zeros_like(comparison.own)
        with comparison.digests.attached():
            for place, draw in enumerate(comparison.draws):
                self._compute_for(run, comparison, draw.number, draw.third, totals[place])
        return totals

    def _compute_for(
        self, run: Run, comparison: Comparison, number: int, distance: int, total: torch.Tensor
    ) -> None:
        """Compute pass `number` of the rank `distance` before this one; add the digest of its
        gradient to `total`, and drop the gradient."""
        subject = (comparison.rank - distance) % comparison.ranks
        theirs = list(run.plan.micro_batches(subject, run.progress.sequences))
        micro_batch = theirs[number % len(theirs)]
        run.pulse.report(run.progress.step + 1, "data")
        batch = run.task.stream.fetch(micro_batch.positions)
        comparison.digests.totals, comparison.digests.drop = [total], True
        own_code = run.recipe.model.factory or run.recipe.model.family
        with unchanged(run.model.module, buffers=bool(own_code)):
            for forward in run.model.run([batch], train=True, reduce=False):
                self._compute_pass(run, micro_batch, batch, forward)

    def _end(self, run: Run, step: int, named: Sequence[int]) -> None:
        """Name the ranks that were contradicted twice, of which this may be one.

        Raises:
            DisputeError: it is.
            RuntimeError: they have left.
        """
        what = f"{told(named)} twice, the last time in step {step}"
        leaves = "; its node leaves" if supervised() else ""
        run.log.event(
            step, EVENT, f"{what}{leaves}; {self._since}", ranks=[*named], agreed=self._agreed
        )
        if run.mesh.dp_rank in named:
            raise DisputeError(what, outvoted=True)
        run.pulse.report(step, "reduce")
        end = torch.zeros(1, device=run.world.device)
        dist.all_reduce(end, group=run.mesh.group)  # fails: a rank is gone
        received(end)
        run.recall.check()
        raise RuntimeError(f"{what}, but is still there")

    @property
    def _since(self) -> str:
        """The newest weights to go back to."""
        return f"nothing speaks against the weights up to step {self._agreed}"


def told(ranks: set[int] | Sequence[int]) -> str:
    """Who is wrong, as a clause."""
    return f"two others contradicted the gradient of rank {', '.join(map(str, sorted(ranks)))}"


def differing(ranks: set[int], decided: bool) -> str:
    """Why nobody can tell who is wrong, as a sentence."""
    who = " and ".join(map(str, sorted(ranks)))
    if not decided:
        return (
            f"ranks {who} computed different gradients of one micro-batch; which of them is wrong "
            "only a third rank could tell"
        )
    return (
        f"no two of the ranks {who} computed the same gradient of one micro-batch: several "
        "machines are wrong, or model or data are no pure function of the sequences"
    )


def gathered(run: Run, mine: torch.Tensor) -> Any:
    """The integers of all ranks, by rank, nested as in `mine`. On all ranks."""
    parts = [torch.zeros_like(mine) for _ in range(run.world.world_size)]
    dist.all_gather(parts, mine, group=run.mesh.group)
    return [received(part) for part in parts]


def wrong_attempts(run_dir: Path) -> dict[str, int]:
    """By the ledger: attempt whose comparisons ended in a dispute → newest step before which they
    agreed. On all ranks; rank 0 reads."""

    def read() -> dict[str, int]:
        try:
            attempts = read_history(run_dir).attempts
        except LedgerError:  # there is none yet
            return {}
        found = [(one.start.attempt, event) for one in attempts for event in one.events]
        return {
            attempt: event["agreed"]
            for attempt, event in found
            if event.get("event") == EVENT and isinstance(event.get("agreed"), int)
        }

    wrong: dict[str, int] = RankGroup(dist.group.WORLD).on_main(read)
    return wrong
