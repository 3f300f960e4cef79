"""Ranks recompute micro-batches of other ranks, to find a machine that computes wrongly.

[Note: witness] A rank that repeats its own work cannot see an error that is the same each time. So
a fraction of the micro-batches is computed twice: by its own rank, the *subject*, and by another
rank, the *witness*. In exact mode both gradients have the same bits.

- *Draw.* Step and seed decide which passes of a step are drawn, and which rank is the witness of
  which subject. In a drawn pass every rank is once a subject and once a witness, so all ranks take
  equally long, and the collectives of FSDP match.
- *Digest.* A rank keeps 64 bits of each gradient, before gradients are summed over ranks. A number
  computed from these digests joins the all-reduce of the step; its sum is 0 if all pairs agree.
- *Vote.* If the sum is not 0, ranks exchange their digests, and a third rank computes the
  micro-batch on which two disagree. A rank that two others contradict is wrong. The step is then
  computed again, before the weights change.
- *End.* A rank that is contradicted twice is named, and its node leaves the job. The run stops if
  ranks disagree twice and no majority shows which rank is wrong.

A witness keeps only a digest, not the gradient. The first step of an attempt is never checked,
because the digested tensors exist only after FSDP's first forward pass.

Replicas start from the same weights and apply the same gradients, so they hold the same bits; a
difference also means that a machine computes wrongly.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from checkpointing.format.tensors import local_tensor
from checkpointing.ranks import RankGroup
from elastic import LedgerError, read_history
from elastic.node.exchange import gathered, received
from elastic.world import supervised
from trainer.data.loader import MASK
from trainer.parallel.fsdp import gathered_parameters
from trainer.parallel.mesh import LAYERS, PIPELINE, REPLICATE
from trainer.recipe.seeds import stable_seed
from trainer.run.guard import GradientDisputeError
from trainer.run.state import Run

EVENT = "witness"
"""Name of the ledger's events about disputes. Field `ranks` has the ranks that were contradicted
twice. Field `agreed` is the last step whose comparisons agreed; a settled dispute has none."""
OPENED = "ranks disagree on the gradient of a micro-batch"


@dataclass(frozen=True)
class WitnessPass:
    """A pass of a step that every rank also computes as the witness of another rank."""

    number: int
    """Index of the pass in the step."""
    distance: int
    """The witness of rank r is rank (r + distance) modulo the number of ranks."""

    @property
    def third(self) -> int:
        """Distance from a subject to the rank that decides between it and its witness."""
        return 1 if self.distance > 1 else 2


def draw_passes(seed: int, step: int, share: float, passes: int, ranks: int) -> list[WitnessPass]:
    """Choose the passes of a step that are computed by witnesses too. `share`: fraction of all
    passes to draw over many steps. `passes`: passes of each rank in a step. `ranks`: at least 2."""
    wanted = share * passes
    count = int(wanted) + (stable_seed(seed, "witness", step) < wanted % 1 * 2**63)
    if not count:
        return []
    order = sorted(range(passes), key=lambda n: stable_seed(seed, "witnessed pass", step, n))
    # Distances vary, so that two machines with the same fault are not always paired.
    return [
        WitnessPass(number, 1 + stable_seed(seed, "witness of pass", step, number) % (ranks - 1))
        for number in order[:count]
    ]


def digest(gradient: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor, 0-d int64 on its device: the sum of its elements' bits as
    float64, each row multiplied by another odd number. Any single changed bit changes it."""
    # float64 represents the values of all formats in which FSDP may pass a gradient.
    words = gradient.detach().double().contiguous().view(torch.int64)
    sums = words.flatten(1).sum(dim=1) if words.dim() > 1 else words.reshape(-1)
    odd = torch.arange(1, 2 * len(sums), 2, device=gradient.device)
    return (sums * odd).sum()


def find_outvoted(
    draw: WitnessPass, own: Sequence[int], witnessed: Sequence[int], thirds: Sequence[int] | None
) -> tuple[set[int], set[int]]:
    """Return (ranks that two others contradict, ranks that differ without a majority) for a drawn
    pass. The digests are by rank: for its own micro-batch, for the one that it computed as a
    witness, and for the one that it computed as the third rank (None: there are two ranks)."""
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
class WitnessComparison:
    """Digests that this rank computed for the drawn passes of a step."""

    draws: Sequence[WitnessPass]
    whole: bool
    """Whether all passes of the step are drawn."""
    passes: int
    """This rank's passes in the step; other ranks may have more or fewer."""
    rank: int
    ranks: int
    own: torch.Tensor
    """Digests for this rank's own micro-batches: (draws,) int64."""
    witnessed: torch.Tensor
    """Digests for the micro-batches that this rank computed as a witness: (draws,) int64."""
    digests: "_GradientDigests"

    def begin_pass(self, number: int) -> None:
        """Begin pass `number` of this rank's own passes. Digest its gradients if it is drawn."""
        drawn = [n for n, draw in enumerate(self.draws) if draw.number % self.passes == number]
        self.digests.totals = [self.own[place] for place in drawn]

    def word(self) -> torch.Tensor:
        """Return an integer in [0, 2**32) as float64. Its sum over all ranks is 0 modulo 2**32 if
        all pairs agree. If some do not, the sum is 0 with a probability of 2**-32."""
        count = len(self.draws)
        total = torch.zeros_like(self.own[0])
        for place, draw in enumerate(self.draws):
            for sign, rank, one in (
                (1, self.rank, self.own[place]),
                (-1, (self.rank - draw.distance) % self.ranks, self.witnessed[place]),
            ):
                folded = (one ^ (one >> 32)) & MASK  # 32 bits that depend on all 64
                # Each pair has its own factor, so that errors of two pairs do not cancel.
                total += sign * folded * (2 * (rank * count + place) + 1)
        return (total & MASK).double()


class _GradientDigests:
    """Computes digests of the gradients of backward passes, by hooks on the parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.totals: Sequence[torch.Tensor] = ()
        """Tensors (0-d int64) to which the digest of the present pass is added."""
        self.drop = False
        """Whether the gradients of the present pass are dropped instead of accumulated."""

    @contextmanager
    def attached(self) -> Iterator[None]:

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
            # Hooks run in order of registration, so `add` runs after the hook of exact mode, which
            # rounds gradients to a grid.
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
    """Context around a witness's pass: afterwards restore what the pass changed besides gradients.
    `buffers`: whether the pass may change buffers."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in (model.modules() if buffers else ())
        for name, buffer in module.named_buffers(recurse=False)
    ]
    # Routers count the tokens of each expert.
    counting = [part for part in model.modules() if hasattr(part, "forget_step")]
    loads = [part.load for part in counting]
    try:
        yield
    finally:
        for module, name, buffer, before in kept:
            buffer.copy_(before)
            setattr(module, name, buffer)  # the pass may have assigned another tensor
        for part, load in zip(counting, loads, strict=True):
            part.load = load


class GradientWitness:
    """Compares gradients between ranks, and counts how often each was contradicted. `share`:
    fraction of the passes to compare. The weights of `step` are assumed to be right.
    `compute_pass`: the function of this name in step.py. On all ranks."""

    def __init__(
        self, share: float, ranks: int, step: int, compute_pass: Callable[..., object]
    ) -> None:
        self._share, self._ranks, self._compute_pass = share, ranks, compute_pass
        self._contradicted: Counter[int] = Counter()
        self._undecided = 0
        self._agreed = step
        """Last step up to which all comparisons agreed."""

    def __str__(self) -> str:
        if self._ranks == 1:
            return "elastic.witness: one rank has no other to compare with"
        text = f"elastic.witness: {self._share:.3g} of the micro-batches are computed by two ranks"
        if self._ranks == 2:
            text += "; a second difference stops the run: only a third rank could tell who is wrong"
        return text

    @contextmanager
    def watch(self, run: Run) -> Iterator[WitnessComparison | None]:
        """Context around a step's passes. Before they run, compute the drawn micro-batches of other
        ranks, as their witness. While they run, digest the gradients of this rank's own drawn
        passes. Yields None in a step without drawn passes, and in the first step of an attempt. On
        all ranks."""
        step, passes = run.progress.step + 1, run.plan.passes
        draws = []
        if self._ranks > 1:
            draws = draw_passes(run.recipe.run.seed, step, self._share, passes, self._ranks)
        if not draws or run.first_step:
            yield None
            return
        digests = _GradientDigests(gathered_parameters(run.model.module))
        own = torch.zeros(len(draws), dtype=torch.int64, device=run.world.device)
        rank = run.mesh.dp_rank
        comparison = WitnessComparison(
            draws, len(draws) == passes, run.plan.passes_of(rank), rank, self._ranks,
            own, torch.zeros_like(own), digests,
        )  # fmt: skip
        with digests.attached():
            for place, draw in enumerate(draws):
                total = comparison.witnessed[place]
                self._compute_for(run, comparison, draw.number, draw.distance, total)
            digests.drop = False
            yield comparison

    def disputed(
        self, comparison: WitnessComparison, step: int, total: int
    ) -> WitnessComparison | None:
        """Return `comparison` if ranks disagree, else None. `total`: the sum of
        `WitnessComparison.word` over all ranks."""
        if total & MASK:
            return comparison
        # If only some passes were compared, a fault may have begun after the last of them.
        self._agreed = step if comparison.whole else step - 1
        return None

    def settle(self, run: Run, comparison: WitnessComparison) -> None:
        """Find the rank that computed wrongly, and report it. Returns if the step must be computed
        again. Raises GradientDisputeError on all ranks if twice no majority showed which rank is
        wrong; see also `_end`. On all ranks."""
        step = run.progress.step + 1
        run.recall.check()  # a recall aborts NCCL's all-reduce, whose result is then meaningless
        # Recorded before the vote: if a rank dies in the vote, the next attempt must know.
        run.log.event(step, EVENT, f"step {step}: {OPENED}", agreed=self._agreed)
        mine = torch.stack([comparison.own, comparison.witnessed])
        group, thirds = run.mesh.group, None
        own, witnessed = zip(*gathered(mine, group), strict=True)
        if self._ranks > 2:
            thirds = gathered(self._decide(run, comparison), group)
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
        why = f"step {step}: {contradicted(outvoted)}"
        if not outvoted:
            self._undecided += 1
            why = f"step {step}: {differing(undecided, thirds is not None)}"
        if self._undecided > 1:
            run.log.event(step, EVENT, f"{why}; {self._since}", agreed=self._agreed)
            raise GradientDisputeError(why)
        run.log.event(step, EVENT, f"{why}; the step is computed again")

    def _decide(self, run: Run, comparison: WitnessComparison) -> torch.Tensor:
        """Return digests (draws,) that this rank computed as the third rank. On all ranks."""
        totals = torch.zeros_like(comparison.own)
        with comparison.digests.attached():
            for place, draw in enumerate(comparison.draws):
                self._compute_for(run, comparison, draw.number, draw.third, totals[place])
        return totals

    def _compute_for(
        self,
        run: Run,
        comparison: WitnessComparison,
        number: int,
        distance: int,
        total: torch.Tensor,
    ) -> None:
        """Compute pass `number` of the rank that is `distance` below this one, modulo the number of
        ranks. Add the digest of its gradient to `total`, and drop the gradient."""
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
        """Report the ranks `named`, which were contradicted twice. Always raises:
        GradientDisputeError on these ranks, RuntimeError on all others once these have ended."""
        what = f"{contradicted(named)} twice, the last time in step {step}"
        leaves = "; its node leaves" if supervised() else ""
        run.log.event(
            step, EVENT, f"{what}{leaves}; {self._since}", ranks=[*named], agreed=self._agreed
        )
        if run.mesh.dp_rank in named:
            raise GradientDisputeError(what, outvoted=True)
        run.pulse.report(step, "reduce")
        end = torch.zeros(1, device=run.world.device)
        dist.all_reduce(end, group=run.mesh.group)  # fails once a rank has ended
        received(end)
        run.recall.check()
        raise RuntimeError(f"{what}; its process should have ended, but has not")

    @property
    def _since(self) -> str:
        """Clause for messages: the last step up to which no comparison contradicted the weights."""
        return f"nothing speaks against the weights up to step {self._agreed}"


def contradicted(ranks: set[int] | Sequence[int]) -> str:
    return f"two others contradicted the gradient of rank {', '.join(map(str, sorted(ranks)))}"


def differing(ranks: set[int], decided: bool) -> str:
    """Return why no majority shows which of `ranks` (empty if all digests agree) is wrong."""
    if not ranks:
        return (
            "two ranks agree on each gradient, but the sum over ranks that compares them is wrong: "
            "a rank has added up wrongly, or the network has changed a number"
        )
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


def wrong_attempts(run_dir: Path) -> dict[str, int]:
    """Return the attempts in the ledger whose last dispute was not settled: attempt → last step up
    to which its comparisons agreed. On all ranks; rank 0 reads and broadcasts."""

    def read() -> dict[str, int]:
        try:
            attempts = read_history(run_dir).attempts
        except LedgerError:  # the run has no ledger yet
            return {}
        disputes = {
            one.start.attempt: event
            for one in attempts
            for event in one.events
            if event.get("event") == EVENT
        }
        return {
            attempt: last["agreed"]
            for attempt, last in disputes.items()
            if isinstance(last.get("agreed"), int)
        }

    wrong: dict[str, int] = RankGroup(dist.group.WORLD).on_main(read)
    return wrong


def diverged_ranks(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, *, ends: bool = False
) -> list[int]:
    """Return the global ranks whose tensors differ from the majority of a group of replicas;
    without a majority, all compared ranks. With `ends` only the first and last rank are compared.
    On all ranks of the group, each with its own tensors."""
    # A checksum of 64 bits: the sum of all 8-byte words, those of each tensor times an odd number.
    checksum = None
    for number, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        words = flat[: flat.numel() // 8 * 8].view(torch.int64).sum()
        total = (words + flat[flat.numel() // 8 * 8 :].sum()) * (2 * number + 1)
        checksum = total if checksum is None else checksum + total
    if checksum is None:
        return []
    values, ranks = gathered(checksum, group), dist.get_process_group_ranks(group)
    if ends:
        values, ranks = [values[0], values[-1]], [ranks[0], ranks[-1]]
    value, count = Counter(values).most_common(1)[0]
    if count * 2 <= len(values):
        return ranks
    return [rank for rank, own in zip(ranks, values, strict=True) if own != value]


def check_replicas(run: Run) -> None:
    """Log the ranks whose weights differ from their replicas, if `elastic.check_replicas_every`
    says that a check is due. On all ranks."""
    every, mesh = run.recipe.elastic.check_replicas_every, run.mesh.device_mesh
    copied = [name for name in (REPLICATE, *LAYERS) if name in (mesh.mesh_dim_names or ())]
    pipeline = run.model.pipeline
    if not every or not run.due(every) or not (copied or pipeline):
        return
    weights = [*run.model.parameters.values()]
    held = {name: [weight for weight in weights if _on_all(name, weight)] for name in LAYERS}
    held[REPLICATE] = weights
    ranks = [
        rank
        for name in copied
        for rank in diverged_ranks(map(local_tensor, held[name]), mesh[name].get_group())
    ]
    if pipeline:  # a tied embedding is on the first and last rank only
        none = local_tensor(weights[0])[:0]  # empty, on the device that holds the weights
        tied = none if pipeline.tied is None else local_tensor(pipeline.tied)
        ranks += diverged_ranks([tied], mesh[PIPELINE].get_group(), ends=True)
    flags = torch.zeros(run.world.world_size, device=mesh.device_type)
    flags[ranks] = 1  # summed, because each group of replicas compares only its own shard
    dist.all_reduce(flags)
    if ranks := [rank for rank, flag in enumerate(received(flags)) if flag]:
        named = ", ".join(map(str, ranks))
        what = f"weights of rank {named} differ from those of its replicas"
        run.log.event(run.progress.step, "bad numbers", what)


def _on_all(name: str, weight: torch.Tensor) -> bool:
    """Return whether all ranks along mesh dimension `name` hold the same part of a weight."""
    if not isinstance(weight, DTensor):
        return False
    names = weight.device_mesh.mesh_dim_names or ()
    return name in names and weight.placements[names.index(name)].is_replicate()
