"""One optimizer step: forward and backward over a global batch, checks of the result, update."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from checkpointing.format.tensors import tensors_not_finite
from checkpointing.format.untrusted import printable
from elastic.group.batch_plan import GroupBatchPlanPass
from elastic.node.exchange import gathered, received
from trainer.data.loader import MASK
from trainer.data.stream import CONSUMED, COUNTED
from trainer.optim.exact import snap_loss, square_sums
from trainer.optim.method import MethodOptimizer, update
from trainer.optim.optimizer import set_rate, square_sum
from trainer.parallel.passes import COUNT, ParallelForwardPass, mark, reached, seconds_between
from trainer.recipe.seeds import stable_seed
from trainer.recipe.strategies import exact
from trainer.run.guard import StepVerdict, judge_step, judge_weights
from trainer.run.state import Run

if TYPE_CHECKING:
    from trainer.run.witness import WitnessComparison

NAME_BYTES = 256
"""Longest tensor name that a rank sends to other ranks, in bytes."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. Equal on all ranks, except for times, which are seconds."""

    gradients: "StepGradients"
    lr: float
    verdict: StepVerdict
    seconds: float
    data_wait: float

    @property
    def skipped(self) -> str:
        """Why the step's update was skipped or undone, in the ledger's words: "loss", "norm" or
        "weights"; "" if the update holds."""
        if self.verdict.action == "keep":
            return ""
        if not math.isfinite(self.gradients.loss):
            return "loss"
        return "weights" if math.isfinite(self.gradients.norm) else "norm"


class StepInputs:
    """Fetches the micro-batches of this rank, one step at a time. On a GPU those of the next step
    are fetched while the GPU computes this step. `batches`: all micro-batches of this rank, in
    order. `passes`: number of micro-batches in each step."""

    def __init__(self, batches: Iterator[dict[str, torch.Tensor]], passes: Iterator[int]) -> None:
        self._batches, self._passes = batches, passes
        self._ahead: list[dict[str, torch.Tensor]] | Exception | None = None
        self._seconds = 0.0

    def take(self) -> tuple[list[dict[str, torch.Tensor]], float]:
        """Return the micro-batches of the next step, and the seconds that the step waited for them.
        Raises the error with which fetching failed, now or earlier in `fetch`."""
        if self._ahead is None:
            began = time.perf_counter()
            self._ahead = [next(self._batches) for _ in range(next(self._passes))]
            self._seconds = time.perf_counter() - began
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, Exception):
            raise ahead
        return ahead, self._seconds

    def fetch(self, computed: Any) -> None:
        """Fetch the micro-batches of the next step while the device computes. `computed` marks the
        end of this step's work on the device; only fetching after that counts as waiting."""
        ahead, self._seconds = [], 0.0
        try:
            for _ in range(next(self._passes)):
                began, late = time.perf_counter(), reached(computed)
                ahead.append(next(self._batches))
                self._seconds += late * (time.perf_counter() - began)
            self._ahead = ahead
        except Exception as error:  # raised later by `take`, so that this step can complete
            self._ahead = error


def train_step(run: Run, source: StepInputs) -> StepResult:
    """Run one optimizer step over one global batch, and advance `run.progress`. On all ranks."""
    recipe, plan, pulse = run.recipe, run.plan, run.pulse
    model, optimizer, progress = run.model, run.optimizer, run.progress
    started, step, options = time.perf_counter(), progress.step + 1, recipe.optimizer
    pulse.report(step, "data")
    inputs, data_wait = source.take()
    digest = consumed(inputs, run.micro_batches, run.mesh.witness)
    outcome = undisputed_gradients(run, inputs, digest, source)
    note = spoiled = ""
    # With fp16 an overflow of the gradients is normal, and no reason to search for NaN.
    overflow = progress.loss_scale.value > 1 and math.isfinite(outcome.loss)
    if outcome.spoiled or not (outcome.good or overflow):
        spoiled = not_finite_anywhere(run)
    if not outcome.good and not spoiled and progress.loss_scale.value == 1:
        model.zero_gradients()
        outcome, note = rerun(run, outcome, undisputed_gradients(run, inputs, digest))
    # The gradients were computed with this scale; `judge` may change it for the next step.
    scale = progress.loss_scale.value
    verdict = judge_weights(step, False, spoiled) if spoiled else judge(run, outcome, note)

    lr = run.rate(step)
    pulse.report(step, "staging")
    run.recall.check()
    # The update changes state that storage lacks: a signal must not end this rank at once.
    pulse.safe = False
    with record_function("wait for checkpoint"):
        # The update writes into the tensors that the last save is still copying.
        run.checkpointer.wait_staged()
    pulse.report(step, "update")
    # `progress` advances before the weights change. A rank that loses a peer during the update then
    # differs from its snapshot, so that `restore` does not keep half-updated weights.
    progress.sequences += plan.global_batch
    whole = plan.global_batch * recipe.data.seq_len
    progress.tokens += outcome.counted if run.task.counts_labels else whole
    if verdict.action == "keep":
        clip = options.clip_norm and options.clip_norm < outcome.norm
        factor = (options.clip_norm / outcome.norm if clip else 1.0) * outcome.undivided / scale
        set_rate(optimizer, lr)
        # A user's optimizer may draw random numbers, which replicas and resumed runs must share.
        if options.factory:
            seed_generators(stable_seed(recipe.run.seed, "update", step), run.world.device)
        seed = stable_seed(recipe.run.seed, "rounding", step)
        update(optimizer, model.portions(optimizer), factor, seed)
        model.publish_weights()
        # NaN in a saved state is noticed in the step after the save. No step follows the last step,
        # so its state is checked now.
        last = run.may_end_with(step) or outcome.pause > 0
        if last and (spoiled := not_finite_anywhere(run)):
            verdict = judge_weights(step, True, spoiled)
    if verdict.action == "undo":
        progress.skipped += 1
    model.zero_gradients()

    progress.step = step
    pulse.report(step, "after")
    seconds = time.perf_counter() - started
    return StepResult(outcome, lr, verdict, seconds, data_wait)


def consumed(
    inputs: Sequence[dict[str, Any]], micro_batches: Iterable[GroupBatchPlanPass], witness: int
) -> tuple[int, int] | None:
    """Remove the digests of samples from the inputs of a step, and return their sums (samples,
    contents) over real micro-batches, times `Mesh.witness`; None if there are no digests."""
    samples = contents = 0
    for batch, micro_batch in zip(inputs, micro_batches, strict=True):
        if CONSUMED not in batch:
            return None
        part = batch.pop(CONSUMED)
        if micro_batch.real:
            samples, contents = samples + part[0], contents + part[1]
    return samples * witness & MASK, contents * witness & MASK


@dataclass(frozen=True)
class StepGradients:
    """Result of forward and backward over one global batch, besides the gradients, which are in the
    model. Equal on all ranks, except for `local_loss` and `compute`."""

    loss: float
    """Mean loss over the target tokens of the global batch."""
    means: Mapping[str, float]
    """Means of the other scalars that the model returned, weighted as the loss is."""
    norm: float
    """Norm of the whole gradient before clipping, with all factors applied."""
    undivided: float
    """Factor still to be applied to the gradients: usual count / actual count."""
    counted: int
    """Labels or samples that the loss of the global batch is the mean of."""
    save: bool
    """Whether rank 0 requests a save after this step."""
    pause: float
    """Sum of `Pulse.pause_request` over the ranks. Unless it is 0, all ranks end after the step."""
    mute: int
    """Number of ranks whose agent dropped output (`Pulse.mute`)."""
    spoiled: bool
    """Whether a save on some rank found NaN or infinity in the state since the last check."""
    consumed: str | None
    """Digest of the samples that all ranks read, 16 hexadecimal digits; None if the data has no
    digests. See `TokenStream.fetch_with_digest`."""
    local_loss: torch.Tensor
    """This rank's part of the loss."""
    compute: float
    """Mean seconds of this rank's forward passes. Backward passes also wait for other ranks."""
    dispute: "WitnessComparison | None" = None
    """Digests of two ranks' gradients of one micro-batch, if they differ; see witness.py."""

    @property
    def good(self) -> bool:
        """Whether loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def undisputed_gradients(
    run: Run,
    inputs: Sequence[Mapping[str, torch.Tensor]],
    digest: tuple[int, int] | None,
    upcoming: StepInputs | None = None,
) -> StepGradients:
    """Call `gradients` until ranks agree on the gradients of each micro-batch. On all ranks."""
    outcome = gradients(run, inputs, digest, upcoming)
    while run.witness and outcome.dispute:  # `settle` raises once a rank is contradicted twice
        run.witness.settle(run, outcome.dispute)
        run.model.zero_gradients()
        outcome = gradients(run, inputs, digest)
    return outcome


def gradients(
    run: Run,
    inputs: Sequence[Mapping[str, torch.Tensor]],
    digest: tuple[int, int] | None,
    upcoming: StepInputs | None = None,
) -> StepGradients:
    """Compute forward and backward over one global batch; leaves the gradients in the model.
    `digest`: result of `consumed`, to be summed over the ranks. `upcoming`: on a GPU, its
    micro-batches of the next step are fetched during this step. On all ranks."""
    recipe, mesh, device = run.recipe, run.mesh, run.world.device
    model, progress, pulse = run.model, run.progress, run.pulse
    step, marks = progress.step + 1, []
    # The loss is a sum over the global batch divided by the number of labels. All ranks together
    # know that number only at the end of the step, if labels are masked. So losses are divided by
    # the number without masking at first, and gradients are multiplied by usual / actual later.
    usual = usual_count(run)
    # float64: the losses join one all-reduce with digests below 2**32, which float32 would round.
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    counted: float | torch.Tensor = 0.0
    recorded: list[torch.Tensor] = []
    micro_batches = run.micro_batches
    with run.witness.watch(run) if run.witness else nullcontext() as comparison:
        for forward in model.run(inputs, train=True):
            number = forward.number
            if comparison:
                comparison.begin_pass(number)
            done = compute_pass(run, micro_batches[number], inputs[number], forward)
            marks.append(done.marks)
            if done.loss is None:
                continue
            loss_sum += snap_loss(done.loss)
            count = done.count
            counted += snap_loss(count) if isinstance(count, torch.Tensor) else count
            ordered = run.trained.in_order(done.means)
            parts = [snap_loss(mean * (count / usual)) for mean in ordered]
            recorded = list(map(torch.add, recorded, parts)) if recorded else parts

    if upcoming and device.type == "cuda" and step < recipe.run.steps and not pulse.pause_request:
        computed = mark(device)
        pulse.report(step, "fetch")
        upcoming.fetch(computed)
    model.collect_gradients()
    pulse.report(step, "reduce")
    names = run.trained.agree(model.beside_loss, mesh.group)
    # Only the last pipeline stage has scalars.
    recorded = recorded or [torch.zeros_like(loss_sum)] * len(names)
    if exact.used(recipe):
        squares = square_sums(model.counted, device)
    else:
        squares = square_sum(model.counted, mesh.holders).to(device)
    sums = [part.reshape(1) for part in (loss_sum, *recorded)]
    # Ranks that compute one share together have equal sums. Only one of them adds its sums.
    if not mesh.counts:
        sums, counted = [torch.zeros_like(part) for part in sums], 0.0
    requests = pulse.wants_save, pulse.pause_request, pulse.mute, bool(run.checkpointer.not_finite)
    compared = [comparison.word()] if comparison else []
    values = (counted, *requests, *(digest or (0, 0)), *compared)
    # Filled on the device, because a copy from the host would wait for all launched kernels.
    flags = [
        value.reshape(1) if isinstance(value, torch.Tensor) else loss_sum.new_full((1,), value)
        for value in values
    ]
    paces = run.balance.to_sum(loss_sum) if run.balance else []
    word = torch.cat([*sums, squares, *flags, *paces])
    # One all-reduce for all values, because each collective costs a round trip between all ranks.
    dist.all_reduce(word, group=mesh.group)
    if isinstance(run.optimizer, MethodOptimizer) and not model.file:
        # here, before `received` waits: the host prepares the update while the GPU computes
        run.optimizer.gather()
    mean_loss, *rest = run.balance.take_from_sum(received(word)) if run.balance else received(word)
    dispute = None
    if run.witness and comparison:
        dispute = run.witness.disputed(comparison, step, int(rest.pop()))
    *square_parts, count_sum, saving, pausing, mute, spoiling, samples, contents = rest[
        len(names) :
    ]
    # Sums of digests below 2**32 are exact in float64.
    digests = f"{int(samples) & MASK:08x}{int(contents) & MASK:08x}" if digest else None
    undivided = usual / count_sum if count_sum else 1.0
    # The gradients are still multiplied by the loss scale.
    norm = sum(square_parts) ** 0.5 * undivided / progress.loss_scale.value
    compute = sum(seconds_between(*pair) for pair in marks) / len(micro_batches)
    other_means = {name: undivided * value for name, value in zip(names, rest, strict=False)}
    return StepGradients(
        mean_loss * undivided, other_means, norm, undivided, round(count_sum), saving > 0, pausing,
        int(mute), spoiling > 0, digests, loss_sum, compute, dispute,
    )  # fmt: skip


def usual_count(run: Run) -> float:
    """Return the number of labels (or samples) of a global batch if none is masked."""
    return run.plan.global_batch * run.task.usual_count


@dataclass(frozen=True)
class _PassSums:
    """What a forward pass adds to the sums of its step, detached."""

    marks: tuple[Any, Any]
    """`mark` before and after the call of the model."""
    loss: torch.Tensor | None = None
    """Divided by the usual count of a global batch; None in a pipeline stage before the last."""
    count: float | torch.Tensor = 0.0
    """Labels or samples over which the means were taken."""
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The other scalars that the model returned."""


def compute_pass(
    run: Run,
    micro_batch: GroupBatchPlanPass,
    batch: Mapping[str, Any],
    forward: ParallelForwardPass,
) -> _PassSums:
    """Call the model for a micro-batch, whose inputs are `batch`, and set `forward.root`, the loss
    from which backward begins."""
    device = run.world.device
    # Reported for each pass, because the watchdog's time limit is for one pass.
    run.pulse.report(run.progress.step + 1, "step")
    on_device = {
        key: tensor.to(device, non_blocking=True) for key, tensor in batch.items() if key != COUNTED
    }
    if run.model.draws:  # seeded by the sequences, so dropout is equal for any world size
        seed = stable_seed(run.recipe.run.seed, "dropout", micro_batch.positions[0])
        seed_generators(seed, device)
    began = mark(device)
    result = forward(on_device)
    marks = began, mark(device)
    if not isinstance(result, dict):
        return _PassSums(marks)
    # A micro-batch that only fills up a rank's passes counts 0.
    count = result.pop(COUNT, batch.get(COUNTED, len(micro_batch.positions))) * micro_batch.real
    # Weighted by the count, so that micro-batches with unequal counts add up to one mean.
    loss = result.pop("loss") * (count / usual_count(run))
    # Scaled, because fp16 would round small gradients to 0.
    forward.root = loss * run.progress.loss_scale.value
    count = count.detach() if isinstance(count, torch.Tensor) else count
    means = {name: mean.detach() for name, mean in result.items()}
    return _PassSums(marks, loss.detach(), count, means)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the host and of this rank's device."""
    # torch.manual_seed is hundreds of times slower: it seeds all GPUs of the node, and formats a
    # stack trace where CUDA is not initialized.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def rerun(run: Run, first: StepGradients, second: StepGradients) -> tuple[StepGradients, str]:
    """Compare two computations of one step, the first of which was not finite. Weights and data
    were the same, so a difference is a fault of a machine. Returns the second result, and a
    sentence for the log. On all ranks."""
    if not second.good:
        return second, "computed twice, not finite both times, so data or model is the cause"
    ranks = ranks_with(run, not torch.equal(first.local_loss, second.local_loss))
    where = f"rank {', '.join(map(str, ranks))}" if ranks else "a backward pass"
    return second, f"silent corruption on {where}: computed again, the numbers are good"


def ranks_with(run: Run, seen: bool) -> list[int]:
    """Return the ranks where `seen` is true, with all ranks that compute a share of the batch
    together with them: the loss of a share comes from all of these. On all ranks."""
    mine = torch.tensor(2 * run.mesh.dp_rank + seen, device=run.world.device)
    reports = [divmod(value, 2) for value in gathered(mine, run.mesh.group)]
    shares = {share for share, reported in reports if reported}
    return [rank for rank, (share, _) in enumerate(reports) if share in shares]


def not_finite_anywhere(run: Run) -> str:
    """Return a message that names a tensor of the state with NaN or infinity, and the ranks; "" if
    all are finite. Reads all state, which takes long. On all ranks."""
    model, device = run.model, run.world.device
    held = {name: x for name, x in model.tensors.items() if name not in run.unchecked}
    bad = tensors_not_finite({**held, **model.state_of(run.optimizer)})
    run.checkpointer.not_finite = ""  # this check covers all saves so far
    # Names are sent in a fixed length: object collectives would unpickle other ranks' bytes.
    word = torch.zeros(NAME_BYTES, dtype=torch.uint8, device=device)
    if bad:
        name = bad[0].encode()[:NAME_BYTES]
        word[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
    sent = gathered(word, run.mesh.group)
    names = [bytes(values).rstrip(b"\0").decode(errors="replace") for values in sent]
    ranks = [rank for rank, name in enumerate(names) if name]
    if not ranks:
        return ""
    return f"NaN or infinity in {printable(names[ranks[0]])} on rank {', '.join(map(str, ranks))}"


def judge(run: Run, outcome: StepGradients, note: str) -> StepVerdict:
    """Decide to keep or skip a step, or to stop; update the counters and the loss scale in
    `run.progress`. On all ranks. `note`: result of `rerun`, for the log."""
    recipe, progress = run.recipe, run.progress
    step = progress.step + 1
    if math.isfinite(outcome.loss) and not outcome.good and progress.loss_scale.value > 1:
        scale, progress.loss_scale = progress.loss_scale, progress.loss_scale.after_overflow()
        progress.skipped += 1
        what = f"fp16 overflow at loss scale {scale.value:g}; halved"
        return StepVerdict("skip", f"step {step}: {what}")
    # Loss and norm are equal on all ranks, so all enter this collective or none.
    bad_ranks = [] if outcome.good else ranks_with(run, not math.isfinite(outcome.local_loss))
    skipped, limit = progress.skipped_in_row, recipe.elastic.max_skipped_steps
    verdict = judge_step(step, outcome.loss, outcome.norm, bad_ranks, skipped, limit)
    if verdict.action == "keep":
        progress.skipped_in_row = 0
        if recipe.precision.dtype == "fp16":
            progress.loss_scale = progress.loss_scale.after_good_step()
        return replace(verdict, reason=f"step {step}: {note}" if note else "")
    progress.skipped += 1
    progress.skipped_in_row += 1
    return replace(verdict, reason=f"{verdict.reason}; {note}" if note else verdict.reason)
