"""Recomputes steps of a run on one rank of a replay, and compares them with the ledger. Rank 0
prints. `python -m trainer.tools.replay.recompute` runs a rank. Its `ReplayRequest` is in the
environment, as other users can read the secret in a command line."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from checkpointing.errors import CheckpointError, SaveFailed, WrongModel
from checkpointing.format.layout import step_name
from checkpointing.ranks import RankGroup, failing_alike
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.steps import list_steps
from checkpointing.tools.digests import InspectedDigests, digests_in_memory, stored_digests
from elastic import World
from elastic.exits import EXIT_DONE, EXIT_WRONG_INPUT
from elastic.node.files import write_whole
from elastic.process import die_with_parent, tolerate_lost_output
from elastic.record.history import LedgerStepLine, RecordedAttempt, read_history
from elastic.world import drop_world, join_world, leave_world, read_environment
from trainer.data.loader import load, requests
from trainer.data.shards import DataError
from trainer.recipe.errors import known_errors, lines
from trainer.recipe.strategies import exact
from trainer.run.evaluate import evaluate
from trainer.run.provenance import RunProvenanceError
from trainer.run.state import Run
from trainer.run.step import (
    StepGradients,
    StepInputs,
    consumed,
    gradients,
    not_finite_anywhere,
    train_step,
)
from trainer.tools.compare.compare import TOLERANCE
from trainer.tools.replay.compared import (
    Proof,
    ReplayNumbers,
    differences,
    other_means,
    relative,
    unrecorded,
)
from trainer.tools.replay.lineage import (
    OUTCOME,
    REQUEST,
    ReplayLineage,
    ReplayOutcome,
    ReplayRequest,
    ReplaySpan,
    beginning,
    newest_lineage,
)
from trainer.tools.replay.rebuild import ReplaySources, go_back, keep_state, rebuilt
from trainer.tools.replay.why import why

SHOWN = 5
"""Largest number of problems of a span of steps that are printed."""


@dataclass
class _SpanReplay:
    """The recomputation of one span of steps: progress, kept states and problems."""

    request: ReplayRequest
    sources: ReplaySources
    lineage: ReplayLineage
    world: World
    outcome: ReplayOutcome
    span: ReplaySpan
    proof: Proof = "bits"
    """How far the current state must agree with the run's."""
    kept: set[int] = field(default_factory=set)
    """Steps whose states are in `states`."""
    compared_count: int = 0
    problem_count: int = 0
    furthest: float = 0.0
    """Largest relative difference so far between a recomputed loss and that of the run."""

    @property
    def states(self) -> Path:
        """Folder of the states that later steps of the span load."""
        return self.sources.scratch / f"after-{self.span.begin}"

    def keep(self, run: Run) -> None:
        """Save the state of the step just done, once. Collective."""
        if run.progress.step not in self.kept:
            keep_state(run, self.states)
            self.kept.add(run.progress.step)

    def problems(self, found: Iterable[str]) -> None:
        """Count problems, and record the first SHOWN. A wrong state makes all later steps wrong, so
        these suffice."""
        for problem in found:
            self.problem_count += 1
            if self.problem_count <= SHOWN:
                self.outcome.problem(problem)

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)


def recompute(request: ReplayRequest, outcome: ReplayOutcome) -> None:
    """Join the ranks, recompute the spans of a request, and record the result in `outcome`.
    Collective.

    Raises:
        RecipeError, DataError, CheckpointError, LedgerError: the requested step cannot be
            recomputed. An audit records these errors in `outcome`. It raises only a DataError that
            one of several ranks may have alone.
    """
    torch.set_grad_enabled(True)
    run = Path(request.run)
    world = join_world(request.device, request.timeout, bytes.fromhex(request.secret))
    sources = ReplaySources(run, request.data, Path(request.scratch))
    lineage = newest_lineage(read_history(run))
    for span in request.spans:
        replay = _SpanReplay(request, sources, lineage, world, outcome, span)
        if request.examined:
            _walk_from_good_state(replay)
            continue
        try:
            _walk(replay)
            result = _summary(replay)
        except RunProvenanceError as error:
            result = _named(span) + ": not compared"
            outcome.miss(str(error))
        except known_errors() as error:
            if _checkpoint_deleted(replay):
                outcome.miss(f"{_named(span)}: the run has deleted that checkpoint meanwhile")
                continue
            result = _named(span) + ": refused"
            outcome.problem(f"{_named(span)}: {error}")
            if isinstance(error, DataError) and world.world_size > 1:
                raise  # ranks without this error wait in a collective, until this rank ends
        replay.say(result)


def _walk_from_good_state(replay: _SpanReplay) -> None:
    """Recompute a span. If its checkpoint cannot be loaded, begin from an older one."""
    stored = set(replay.request.stored)
    while True:
        try:
            return _walk(replay)
        except CheckpointError as error:
            begin, end = replay.span
            if isinstance(error, WrongModel | SaveFailed) or begin not in stored:
                raise
            stored.remove(begin)
            older = ReplaySpan(beginning(replay.lineage, stored, end), end)
            replay = _SpanReplay(
                replay.request, replay.sources, replay.lineage, replay.world, replay.outcome, older
            )
            replay.say(f"note: {error}; now computing {_named(older)}")


def _walk(replay: _SpanReplay) -> None:
    """Recompute a span, rebuilding the run for each attempt on the way."""
    lineage, span, at = replay.lineage, replay.span, replay.span.begin
    first = replay.sources.recipe_of(lineage.attempt_of(at + 1))
    storage = states = replay.sources.states_of(first)
    if not replay.request.examined:
        _check_stored(replay, storage)
    while at < span.end:
        attempt, until = lineage.stretch(at + 1, span.end)
        _stretch(replay, attempt, at, until, states, storage)
        at, states = until, replay.states


def _checkpoint_deleted(replay: _SpanReplay) -> bool:
    with suppress(*known_errors()):
        recipe = replay.sources.recipe_of(replay.lineage.attempt_of(replay.span.begin + 1))
        names = {path.name for path in list_steps(replay.sources.states_of(recipe))}
        return replay.span.begin > 0 and step_name(replay.span.begin) not in names
    return False


def _stretch(
    replay: _SpanReplay,
    attempt: RecordedAttempt,
    begin: int,
    until: int,
    states: StoragePlace,
    storage: StoragePlace,
) -> None:
    """Recompute steps that share a recipe, from the state of step `begin` in `states`."""
    recipe = replay.sources.recipe_of(attempt)
    with rebuilt(replay.sources, attempt, recipe, states, begin, replay.world) as (run, kind):
        _steps(replay, run, kind, until, storage)
        if until < replay.span.end:
            replay.keep(run)


def _steps(
    replay: _SpanReplay, run: Run, kind: Mapping[str, str], until: int, storage: StoragePlace
) -> None:
    """Recompute and compare the steps of one rebuilt run. `kind`: code, torch and hardware of this
    replay."""
    lineage, backs = replay.lineage, replay.lineage.rollbacks
    # The states to which a roll-back of the span returns.
    targets = {to for after, to in backs.items() if to < after <= replay.span.end}
    with _inputs(run) as inputs:
        while run.progress.step < until:
            step = run.progress.step + 1
            if run.progress.step in targets:
                replay.keep(run)
            attempt, expected = lineage.attempt_of(step), lineage.recorded(step)
            # A rounding difference stays in all later states.
            replay.proof = _weaker(replay.proof, _provable(replay, run, attempt, kind))
            if step == replay.request.examined:
                _explain_step(replay, run, inputs, step)
                return
            # In the original run, a save had found NaN or infinity.
            if expected and expected.skipped == "weights":
                run.checkpointer.not_finite = "the ledger says so"
            first, result = run.progress.sequences, train_step(run, inputs)
            found = result.gradients
            recomputed = ReplayNumbers(found.loss, found.norm, result.skipped, found.consumed)
            _compare(replay, run, step, first, recomputed)
            if step in backs:
                to = backs[step]
                go_back(run, replay.states if to in replay.kept else storage, to)
            if run.task.after_step:
                run.task.after_step(run.model, run.progress.sequences)
            if not replay.request.examined:
                _check_validation(replay, run, attempt)
                _check_state(replay, run, storage)


@contextmanager
def _inputs(run: Run) -> Iterator[StepInputs]:
    """Yield the `StepInputs` of this rank, from the run's cursor on; then close their loader."""
    batches = load(
        run.task.stream,
        requests(run.plan_at, run.mesh.dp_rank, run.progress.sequences),
        workers=0,
        pin_memory=run.world.device.type == "cuda",
        account=True,
    )
    try:
        yield StepInputs(batches, run.passes)
    finally:
        batches.close()


def _provable(
    replay: _SpanReplay, run: Run, attempt: RecordedAttempt, kind: Mapping[str, str]
) -> Proof:
    """Return how far a step of an attempt must agree with its recomputation here."""
    start, world = attempt.start, run.world
    unlike = [
        f"{key} was {then}, and is now {kind.get(key, 'none')}"
        for key, then in start.computed_by.items()
        if kind.get(key) != then
    ]
    if unlike:
        replay.outcome.miss(
            f"attempt {attempt.number} cannot be compared, as other code or machines computed it: "
            f"{', '.join(unlike)}"
        )
        return "none"
    if exact.used(run.recipe):
        return "bits"
    same = (start.world_size, start.nodes) == (world.world_size, world.nodes)
    on_cpu = world.device.type == "cpu" and start.threads == torch.get_num_threads()
    # The shares of `batch.balance: speed` group the sums of a step; a replay has equal ones.
    batch = run.written.batch
    known = batch.micro_batch != "auto" and batch.balance == "equal"
    return "bits" if same and on_cpu and known else "rounding"


def _weaker(one: Proof, other: Proof) -> Proof:
    order: list[Proof] = ["bits", "rounding", "none"]
    return max(one, other, key=order.index)


# --- comparing -------------------------------------------------------------------------------


def _compare(
    replay: _SpanReplay, run: Run, step: int, first: int, recomputed: ReplayNumbers
) -> list[str]:
    """Compare a step, whose first sequence is `first`, with the ledger. Return the differences."""
    line = replay.lineage.recorded(step)
    if line is None:  # lost with a killed process; any other gap is in `RecordHistory.problems`
        return []
    after = first + run.plan.global_batch
    tolerance = TOLERANCE[run.recipe.precision.dtype]
    clauses = list(differences(recomputed, line, replay.proof, tolerance))
    if (first, after) != (line.first, line.after_last):
        clauses.insert(
            0,
            f"its sequences are {first} to {after - 1}, and the ledger says {line.first} to "
            f"{line.after_last - 1}",
        )
    if line.loss is not None and replay.proof != "none":
        replay.furthest = max(replay.furthest, relative(recomputed.loss, line.loss))
    if absent := unrecorded(recomputed, line):
        attempt = replay.lineage.attempt_of(step).number
        replay.outcome.miss(f"lines of attempt {attempt} have no {' and no '.join(absent)}")
    replay.compared_count += 1
    replay.problems(f"step {step}: {one}" for one in clauses)
    return clauses


def _check_validation(replay: _SpanReplay, run: Run, attempt: RecordedAttempt) -> None:
    """If the attempt validated the weights after this step, do so, and compare the means.
    Collective."""
    recorded = attempt.validations.get(run.progress.step)
    if recorded is None or run.task.validation is None or replay.proof == "none":
        return
    means = evaluate(run, run.task.validation, heed=False) or {}
    tolerance = TOLERANCE[run.recipe.precision.dtype]
    replay.problems(
        f"the validation after step {run.progress.step}: {one}"
        for one in other_means(means, recorded, replay.proof, tolerance)
    )


def _check_state(replay: _SpanReplay, run: Run, storage: StoragePlace) -> None:
    """Compare weights and moments after a step with their digests in the ledger, else with the
    checkpoint, if the step was saved. Collective."""
    step = run.progress.step
    recorded = replay.lineage.digests.get(step)
    if replay.proof != "bits" or not (recorded or step in replay.request.stored):
        return
    origin = "its save recorded"
    if not recorded:
        origin = "its checkpoint has, of which the ledger says nothing"
        with failing_alike():
            recorded = RankGroup(dist.group.WORLD).on_main(lambda: _stored(storage, step))
    tensors = run.model.state_of(run.optimizer)
    digests = digests_in_memory(dist.group.WORLD, model=run.model.saved, optimizer=tensors)
    replay.problems(
        f"step {step}: the {what} after it have another digest, {ours}, than {origin}: {theirs}"
        for what, ours, theirs in zip(digests._fields, digests, recorded or digests, strict=True)
        if ours != theirs
    )


def _check_stored(replay: _SpanReplay, storage: StoragePlace) -> None:
    """Compare the checkpoints at both ends of a span with their digests in the ledger. Collective;
    rank 0 reads."""

    def look() -> list[str]:
        problems = []
        for step in replay.span:
            recorded = replay.lineage.digests.get(step)
            if not recorded or step not in replay.request.stored:
                continue
            problems += [
                f"the checkpoint of step {step} holds other {what} than its save wrote: their "
                f"digest is {ours}, and the ledger says {theirs}"
                for what, ours, theirs in zip(
                    InspectedDigests._fields,
                    _stored(storage, step) or recorded,
                    recorded,
                    strict=True,
                )
                if ours != theirs
            ]
        return problems

    with failing_alike():
        replay.problems(RankGroup(dist.group.WORLD).on_main(look))


def _stored(storage: StoragePlace, step: int) -> InspectedDigests | None:
    """Return the digests of the tensors in a checkpoint; None if the run has deleted it."""
    path = storage / step_name(step)
    try:
        return stored_digests(path)
    except CheckpointError:
        if path in list_steps(storage):
            raise
        return None


def _named(span: ReplaySpan) -> str:
    origin = f"the checkpoint of step {span.begin}" if span.begin else "the beginning"
    return f"steps {span.begin + 1} to {span.end} from {origin}"


def _summary(replay: _SpanReplay) -> str:
    how = {
        "bits": "compared bit by bit",
        "rounding": f"compared but for rounding, losses differ by {replay.furthest:.1e} at most",
        "none": "not compared",
    }
    problems = f"; {replay.problem_count} problem(s), see below" if replay.problem_count else ""
    return f"{_named(replay.span)}: {replay.compared_count} step(s), {how[replay.proof]}{problems}"


# --- one step --------------------------------------------------------------------------------


def _explain_step(replay: _SpanReplay, run: Run, inputs: StepInputs, step: int) -> None:
    """Compute a step again. Print its loss, norm and digest, their comparison with the ledger, and
    on request an explanation (why.py)."""
    line = replay.lineage.recorded(step)
    batches, _ = inputs.take()
    result = gradients(run, batches, consumed(batches, run.micro_batches, run.mesh.witness))
    numbers = ReplayNumbers(result.loss, result.norm, _skipped(run, result, line), result.consumed)
    own = {name: p.grad for name, p in run.model.parameters.items() if p.grad is not None}
    digest, _ = digests_in_memory(dist.group.WORLD, model=own, optimizer={})
    clauses = _compare(replay, run, step, run.progress.sequences, numbers)
    if line is None:
        replay.outcome.miss(f"the ledger has no line of step {step}")
    attempt = replay.lineage.attempt_of(step)
    replay.say(
        f"step {step} of attempt {attempt.number}, on {replay.world.world_size} rank(s); "
        f"the run had {attempt.start.world_size}"
    )
    verdict = f"skipped, for its {numbers.skipped}" if numbers.skipped else "kept"
    for name, value in (
        ("loss", repr(result.loss)),
        ("gradient norm", f"{result.norm!r} ({result.norm.hex()})"),
        ("gradients' digest", digest),
        ("verdict", verdict),
        ("compared", _sentence(replay, line is not None, clauses)),
    ):
        replay.say(f"  {name:<18} {value}")
    if replay.request.why:
        for text in why(run, result, replay.lineage, replay.sources):
            replay.say(text)


def _skipped(run: Run, result: StepGradients, line: LedgerStepLine | None) -> str:
    """Return the verdict on a step in the ledger's words; "" if the step is kept. Collective."""
    if not math.isfinite(result.loss):
        return "loss"
    if not math.isfinite(result.norm):
        return "norm"
    suspected = line is not None and line.skipped == "weights"
    return "weights" if suspected and not_finite_anywhere(run) else ""


def _sentence(replay: _SpanReplay, recorded: bool, clauses: Sequence[str]) -> str:
    if not recorded:
        return "not at all: the ledger has no line of this step"
    if clauses:
        return "; ".join(clauses)
    if replay.proof == "none":
        return "not at all: it cannot be compared, see below"
    if replay.proof == "bits":
        return "loss, norm and verdict are those of the ledger, to the last bit"
    return (
        f"loss and norm are those of the ledger but for rounding: losses differ by "
        f"{replay.furthest:.1e}. A run in fast mode repeats its bits only on a CPU, with as many "
        "ranks and threads as it had"
    )


# --- a rank ----------------------------------------------------------------------------------


def replay_alone(request: ReplayRequest) -> ReplayOutcome:
    """Do `recompute` in this process as the only rank."""
    outcome = ReplayOutcome()
    try:
        recompute(request, outcome)
    finally:
        drop_world()
    return outcome


def main() -> NoReturn:
    die_with_parent()
    tolerate_lost_output()  # the reader of the output may end, as in `perdure replay … | head`
    request, outcome, code = (
        ReplayRequest.from_json(os.environ[REQUEST]),
        ReplayOutcome(),
        EXIT_DONE,
    )
    try:
        recompute(request, outcome)
    except known_errors() as error:
        outcome.errors, code = lines(error), EXIT_WRONG_INPUT
    # The outcome of rank 0 is that of all ranks. A rank that fails alone writes its own.
    if code or read_environment()[0] == 0:
        write_whole(Path(request.scratch) / OUTCOME, json.dumps(asdict(outcome)))
    leave_world(code)


if __name__ == "__main__":
    main()
