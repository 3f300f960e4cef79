"""One optimizer step: forward and backward over a global batch, the verdict on its numbers, the
update."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from checkpointing.format.tensors import tensors_not_finite
from checkpointing.format.untrusted import printable
from elastic.group.batch_plan import MicroBatch
from elastic.node.exchange import received
from trainer.data.loader import MASK
from trainer.data.stream import CONSUMED, COUNTED
from trainer.optim.exact import snap_loss, square_sums
from trainer.optim.method import MethodOptimizer, update
from trainer.optim.optimizer import set_rate, square_sum
from trainer.parallel.clock import mark, reached, seconds_between
from trainer.parallel.passes import COUNT, Call, Passed
from trainer.recipe.seeds import stable_seed
from trainer.recipe.strategies import exact
from trainer.run.guard import Verdict, judge_step, judge_weights
from trainer.run.state import Run

NAME_BYTES = 256
"""Longest name of a tensor that ranks tell each other."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Equal on all ranks, except for the times (seconds)."""

    loss: float
    """Mean over the target tokens of the global batch."""
    means: Mapping[str, float]
    """What else the model returned, likewise."""
    grad_norm: float
    """Norm of the whole gradient, before clipping."""
    lr: float
    verdict: Verdict
    seconds: float
    data_wait: float
    compute: float
    """One forward pass of this rank, on average."""
    save: bool
    """Rank 0 would save now."""
    pause: float
    """0, or all ranks end after this step: the sum of `Pulse.pause_request` over them."""
    mute: int
    """Ranks of which output was dropped (`Pulse.mute`)."""
    consumed: str | None
    """Digest of what the ranks took for it, in 16 hexadecimal digits, see
    `TokenStream.fetch_with_digest`."""

    @property
    def skipped(self) -> str:
        """What was wrong, as the ledger names it, if the step left the weights alone; else ""."""
        if self.verdict.action == "keep":
            return ""
        numbers = {"loss": self.loss, "norm": self.grad_norm}
        return next((name for name, one in numbers.items() if not math.isfinite(one)), "weights")


class Inputs:
    """The micro-batches of this rank, a step's at a time.

    On a GPU the next step's are fetched while it computes this one. What counts as waiting is what
    is fetched once it has computed.
    """

    def __init__(self, batches: Iterator[dict[str, torch.Tensor]], passes: int) -> None:
        self._batches, self._passes = batches, passes
        self._ahead: list[dict[str, torch.Tensor]] | Exception | None = None
        self._seconds = 0.0

    def take(self) -> tuple[list[dict[str, torch.Tensor]], float]:
        """The micro-batches of the next step, and the seconds that were waited for them.

        Raises:
            Exception: whatever fetching them has raised.
        """
        if self._ahead is None:
            began = time.perf_counter()
            self._ahead = [next(self._batches) for _ in range(self._passes)]
            self._seconds = time.perf_counter() - began
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        return ahead, self._seconds

    def fetch(self, computed: Any) -> None:
        """Fetch the micro-batches of the next step. `computed` is the mark that the device reaches
        when it has computed this one; what is fetched after that counts as waiting."""
        ahead, self._seconds = [], 0.0
        try:
            for _ in range(self._passes):
                began, late = time.perf_counter(), reached(computed)
                ahead.append(next(self._batches))
                self._seconds += late * (time.perf_counter() - began)
            self._ahead = ahead
        except Exception as error:  # this step is none of its business
            self._ahead = error


def train_step(run: Run, given: Inputs) -> StepResult:
    """One optimizer step over one global batch. Called on all ranks; moves `run.progress` on."""
    recipe, plan, pulse = run.recipe, run.plan, run.pulse
    model, optimizer, progress = run.model, run.optimizer, run.progress
    started, step, options = time.perf_counter(), progress.step + 1, recipe.optimizer
    pulse.report(step, "data")
    inputs, data_wait = given.take()
    micro_batches = plan.micro_batches(run.mesh.dp_rank, progress.sequences)
    digest = consumed(inputs, micro_batches, run.mesh.witness)
    found = gradients(run, inputs, digest, given)
    note = spoiled = ""
    overflow = progress.loss_scale.value > 1 and math.isfinite(found.loss)  # of fp16, as it does
    if found.spoiled or not (found.good or overflow):
        spoiled = not_finite_anywhere(run)
    if not found.good and not spoiled and progress.loss_scale.value == 1:
        model.zero_gradients()
        found, note = rerun(run, found, gradients(run, inputs, digest))
    scale = progress.loss_scale.value  # of these gradients; the verdict may change it
    verdict = judge_weights(step, False, spoiled) if spoiled else judge(run, found, note)

    lr = run.rate(step)
    pulse.report(step, "staging")
    run.recall.check()
    pulse.safe = False
    with record_function("wait for checkpoint"):
        run.checkpointer.wait_staged()
    pulse.report(step, "update")
    # Before the weights change: whoever loses a peer in the middle of that is past its snapshot,
    # and does not take what it has for the same (`restore`).
    progress.sequences += plan.global_batch
    whole = plan.global_batch * recipe.data.seq_len
    progress.tokens += found.counted if run.task.counts_labels else whole
    if verdict.action == "keep":
        clip = options.clip_norm and options.clip_norm < found.norm
        factor = (options.clip_norm / found.norm if clip else 1.0) * found.undivided / scale
        set_rate(optimizer, lr)
        if options.factory:  # a user's may draw: replicas are to draw alike, and after a resume
            seed_generators(stable_seed(recipe.run.seed, "update", step), run.world.device)
        seed = stable_seed(recipe.run.seed, "rounding", step)
        update(optimizer, model.portions(optimizer), factor, seed)
        model.publish_weights()
        # No step comes that would hear what its save finds.
        last = run.may_end_with(step) or found.pause > 0
        if last and (spoiled := not_finite_anywhere(run)):
            verdict = judge_weights(step, True, spoiled)
    if verdict.action == "undo":
        progress.skipped += 1
    model.zero_gradients()

    progress.step = step
    pulse.report(step, "after")
    seconds = time.perf_counter() - started
    return StepResult(
        found.loss, found.means, found.norm, lr, verdict, seconds, data_wait, found.compute,
        found.save, found.pause, found.mute, found.consumed if digest else None,
    )  # fmt: skip


def consumed(
    inputs: Sequence[dict[str, Any]], micro_batches: Iterable[MicroBatch], witness: int
) -> tuple[int, int] | None:
    """Take the digests from the inputs of a step, and sum those that count, times `Mesh.witness`;
    None without any."""
    samples = contents = 0
    for batch, made in zip(inputs, micro_batches, strict=True):
        if CONSUMED not in batch:
            return None
        part = batch.pop(CONSUMED)
        if made.real:
            samples, contents = samples + part[0], contents + part[1]
    return samples * witness & MASK, contents * witness & MASK


@dataclass(frozen=True)
class Gradients:
    """What one forward and backward over a global batch gave; the gradients are in the model. Equal
    on all ranks, except for `local_loss` and `compute`."""

    loss: float
    means: Mapping[str, float]
    norm: float
    """Norm of the whole gradient, as the optimizer sees it."""
    undivided: float
    """What the gradients in the model are still to be multiplied by: 1, unless the step has counted
    other than usual."""
    counted: int
    """Over how many things the means of all ranks together were taken."""
    save: bool
    pause: float
    mute: int
    spoiled: bool
    """A rank has saved numbers that are not finite since they were last looked at."""
    consumed: str
    local_loss: torch.Tensor
    """This rank's part of the loss."""
    compute: float
    """Seconds of one forward pass of this rank, on average: backward waits for other ranks."""

    @property
    def good(self) -> bool:
        """No number is infinite or NaN."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def gradients(
    run: Run,
    inputs: Sequence[Mapping[str, torch.Tensor]],
    digest: tuple[int, int] | None,
    given: Inputs | None = None,
) -> Gradients:
    """Forward and backward over one global batch. On all ranks.

    Args:
        run: the gradients of its model are added to.
        inputs: the micro-batches of this rank.
        digest: see `consumed`.
        given: where those of the next step come from, to be fetched meanwhile.
    """
    recipe, plan, mesh, device = run.recipe, run.plan, run.mesh, run.world.device
    model, progress, pulse = run.model, run.progress, run.pulse
    step, marks = progress.step + 1, []
    # What is wanted is the gradient of a sum over the global batch, divided by how much there was
    # to count. That is known when all ranks have counted: so it is divided by what is usual here,
    # and by the rest when it is read. Sequences of tokens all count alike, and no rest is left.
    usual = plan.global_batch * run.task.usual_count
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    counted: float | torch.Tensor = 0.0
    recorded: list[torch.Tensor] = []
    micro_batches = list(plan.micro_batches(mesh.dp_rank, progress.sequences))

    def forward(number: int, batch: Mapping[str, torch.Tensor], call: Call) -> Passed:
        nonlocal loss_sum, counted, recorded
        micro_batch = micro_batches[number]
        pulse.report(step, "step")  # again: a pass is what takes always as long
        on_device = {
            key: tensor.to(device, non_blocking=True)
            for key, tensor in batch.items()
            if key != COUNTED
        }
        if model.draws:  # what is drawn depends on these sequences alone
            seed = stable_seed(recipe.run.seed, "dropout", micro_batch.positions[0])
            seed_generators(seed, device)
        began = mark(device)
        found = call(on_device)
        if not isinstance(found, dict):
            marks.append((began, mark(device)))
            return found
        means = dict(found)
        count = means.pop(COUNT, batch.get(COUNTED, len(micro_batch.positions)))
        count = count * micro_batch.real
        loss = means.pop("loss") * (count / usual)
        marks.append((began, mark(device)))
        loss_sum += snap_loss(loss.detach())
        counted += snap_loss(count.detach()) if isinstance(count, torch.Tensor) else count
        ordered = run.trained.in_order(means)
        parts = [snap_loss(mean.detach() * (count / usual)) for mean in ordered]
        recorded = list(map(torch.add, recorded, parts)) if recorded else parts
        return loss * progress.loss_scale.value

    model.run(inputs, forward, train=True)

    # One small all-reduce tells every rank the loss, the gradient norm, whether both are good,
    # whether any rank is asked to pause or mute, or has saved numbers that are not finite, and what
    # all have consumed and counted.
    if given and device.type == "cuda" and step < recipe.run.steps and not pulse.pause_request:
        computed = mark(device)
        pulse.report(step, "fetch")
        given.fetch(computed)
    model.collect_gradients()
    pulse.report(step, "reduce")
    names = run.trained.agree(model.beside_loss, mesh.group)
    recorded = recorded or [torch.zeros_like(loss_sum)] * len(names)
    if exact.used(recipe):
        squares = square_sums(model.counted, device)
    else:
        squares = square_sum(model.counted, mesh.holders).to(device)
    sums = [part.reshape(1) for part in (loss_sum, *recorded)]
    if not mesh.counts:
        sums, counted = [torch.zeros_like(part) for part in sums], 0.0
    asked = pulse.wants_save, pulse.pause_request, pulse.mute, bool(run.checkpointer.not_finite)
    told = (counted, *asked, *(digest or (0, 0)))
    flags = [  # filled on the device: a copy from the host would wait for all that was launched
        value.reshape(1) if isinstance(value, torch.Tensor) else loss_sum.new_full((1,), value)
        for value in told
    ]
    word = torch.cat([*sums, squares, *flags])
    dist.all_reduce(word, group=mesh.group)
    if isinstance(run.optimizer, MethodOptimizer) and not model.file:
        run.optimizer.gather()  # a GPU is still at it, so this costs no time
    mean_loss, *rest = received(word)
    *square_parts, count_sum, saving, pausing, mute, spoiling, samples, contents = rest[
        len(names) :
    ]
    # Sums of numbers below 2**32 are exact in float64.
    everything = f"{int(samples) & MASK:08x}{int(contents) & MASK:08x}"
    undivided = usual / count_sum if count_sum else 1.0
    norm = sum(square_parts) ** 0.5 * undivided / progress.loss_scale.value
    compute = sum(seconds_between(*pair) for pair in marks) / plan.passes
    further = {name: undivided * value for name, value in zip(names, rest, strict=False)}
    return Gradients(
        mean_loss * undivided, further, norm, undivided, round(count_sum), saving > 0, pausing,
        int(mute), spoiling > 0, everything, loss_sum, compute,
    )  # fmt: skip


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed what this rank draws from by default, on the host and on its device. torch.manual_seed
    gives the same numbers, but seeds all GPUs of a node, and where none is in use formats a stack
    trace each time, which takes hundreds of times as long."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def rerun(run: Run, first: Gradients, second: Gradients) -> tuple[Gradients, str]:
    """A step gave numbers that are not finite, and was computed again from the same weights and
    data: what differs now was the machine's fault, not that of data or model.

    Returns what to go on with, and what to tell. On all ranks.
    """
    if not second.good:
        return second, "computed twice with the same result, so data or model"
    ranks = ranks_with(run, not torch.equal(first.local_loss, second.local_loss))
    where = f"rank {', '.join(map(str, ranks))}" if ranks else "a backward pass"
    return second, f"silent corruption on {where}: computed again, the numbers are good"


def ranks_with(run: Run, seen: bool) -> list[int]:
    """The ranks that have seen something in their loss, and all that compute a share of the batch
    together with one of these: its numbers come from all of them. On all ranks."""
    device = run.world.device
    mine = torch.tensor(2.0 * run.mesh.dp_rank + seen, dtype=torch.float64, device=device)
    values = [torch.zeros_like(mine) for _ in range(run.world.world_size)]
    dist.all_gather(values, mine, group=run.mesh.group)
    told = [divmod(int(received(one)), 2) for one in values]
    shares = {share for share, there in told if there}
    return [rank for rank, (share, _) in enumerate(told) if share in shares]


def not_finite_anywhere(run: Run) -> str:
    """Which weights and optimizer state are not finite, and on which ranks; empty: all are. On all
    ranks. Looks at every number, so it is for steps that went wrong, and for the last one."""
    model, device = run.model, run.world.device
    held = {name: one for name, one in model.tensors.items() if name not in run.unchecked}
    bad = tensors_not_finite({**held, **model.state_of(run.optimizer)})
    run.checkpointer.not_finite = ""  # from now on of saves that come
    word = torch.zeros(NAME_BYTES, dtype=torch.uint8, device=device)
    if bad:
        name = bad[0].encode()[:NAME_BYTES]
        word[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
    words = [torch.zeros_like(word) for _ in range(run.world.world_size)]
    dist.all_gather(words, word, group=run.mesh.group)
    names = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in words]
    ranks = [rank for rank, name in enumerate(names) if name]
    if not ranks:
        return ""
    return f"NaN or infinity in {printable(names[ranks[0]])} on rank {', '.join(map(str, ranks))}"


def judge(run: Run, found: Gradients, note: str) -> Verdict:
    """Keep, skip or stop; moves the counters and the loss scale of the progress. On all ranks.

    `note` tells of a step that was computed twice.
    """
    recipe, progress = run.recipe, run.progress
    step = progress.step + 1
    if math.isfinite(found.loss) and not found.good and progress.loss_scale.value > 1:
        scale, progress.loss_scale = progress.loss_scale, progress.loss_scale.after_overflow()
        progress.skipped += 1
        return Verdict("skip", f"step {step}: fp16 overflow at loss scale {scale.value:g}; halved")
    # Every rank knows of a bad number, so every rank asks who it was.
    bad_ranks = [] if found.good else ranks_with(run, not math.isfinite(found.local_loss))
    limit = recipe.elastic.max_skipped_steps
    verdict = judge_step(step, found.loss, found.norm, bad_ranks, progress.skipped_in_row, limit)
    if verdict.action == "keep":
        progress.skipped_in_row = 0
        if recipe.precision.dtype == "fp16":
            progress.loss_scale = progress.loss_scale.after_good_step()
        return replace(verdict, reason=f"step {step}: {note}" if note else "")
    progress.skipped += 1
    progress.skipped_in_row += 1
    return replace(verdict, reason=f"{verdict.reason}; {note}" if note else verdict.reason)
