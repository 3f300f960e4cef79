"""`perdure replay`: plans a recomputation, starts its ranks, and prints the result."""

import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointing.format.untrusted import printable
from checkpointing.storage.place import StoragePlace
from elastic.exits import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT
from elastic.node.files import read_text
from elastic.process import usable_cores
from elastic.record.history import LedgerError, read_history
from elastic.record.ledger import StartLine
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.strategies import exact, together
from trainer.tools.mirror import scratch_folder
from trainer.tools.replay.lineage import (
    OUTCOME,
    REQUEST,
    ReplayLineage,
    ReplayOutcome,
    ReplayRequest,
    ReplaySpan,
    beginning,
    draw,
    drawn,
    newest_lineage,
    stored_states,
)
from trainer.tools.report.report import clock
from trainer.tools.torchrun import run_ranks


def replay(run: Path, step: int, ranks: int | None, data: Sequence[str], *, why: bool) -> int:
    """Recompute a step of a run, compare it with the ledger, and return the exit code.

    Args:
        run: run directory.
        step: number of the step.
        ranks: number of ranks; None: as many as suit recipe and machine.
        data: absolute paths of the data sets, in the order of the recipe; empty: the recipe's.
        why: whether to explain the step, too (why.py).

    Raises:
        LedgerError, RecipeError, DataError, CheckpointError: the step cannot be recomputed.
    """
    lineage = newest_lineage(read_history(run))
    if not 0 < step <= lineage.last:
        raise LedgerError(f"--step {step}: the run has steps 1 to {lineage.last}")
    plan = _planned(run, lineage, step, ranks, data)
    states = stored_states(plan.states, lineage)
    for damage in states.damaged:
        print(f"note: {damage}")
    span = ReplaySpan(beginning(lineage, states.steps, step), step)
    return _print_outcome(plan.compute([span], states.steps, examined=step, why=why))


def audit(run: Path, count: int, seed: int | None, ranks: int | None, data: Sequence[str]) -> int:
    """Recompute `count` randomly drawn steps of a run, each up to the next save, and report whether
    they agree with the ledger. Other arguments and exit code: as for `replay`.

    Raises:
        LedgerError, RecipeError, CheckpointError: nothing can be recomputed.
    """
    history = read_history(run)
    if history.problems:  # a contradictory ledger does not define what to recompute
        return _print_outcome(ReplayOutcome(history.problems))
    lineage = newest_lineage(history)
    seed = secrets.randbits(32) if seed is None else seed
    steps = draw(lineage, count, seed)
    print(f"audit of steps {', '.join(map(str, steps))} of {lineage.last}, by --seed {seed}")
    _take_threads(lineage.attempt_of(steps[-1]).start)
    if contradictions := _other_recipes(run, lineage):
        return _print_outcome(ReplayOutcome(contradictions))
    plan = _planned(run, lineage, steps[-1], ranks, data, audit=True)
    states = stored_states(plan.states, lineage)
    outcome = plan.compute(drawn(lineage, states.steps, steps), states.steps)
    # read again, because the run may have started anew meanwhile
    known = {one.start.attempt for one in read_history(run).attempts}
    foreign = [
        f"the checkpoint of step {step} is of attempt {printable(name)}, which the ledger lacks"
        for step, name in states.aside.items()
        if name not in known
    ]
    outcome.problems = [*states.damaged, *foreign, *outcome.problems]
    return _print_outcome(outcome, "the ledger holds: what was computed again is what it says")


def _take_threads(start: StartLine) -> None:
    # The order of CPU reductions, and so rounding, depends on the number of threads, which torch
    # reads when it is loaded.
    if start.threads:
        os.environ["OMP_NUM_THREADS"] = str(start.threads)


def _other_recipes(run: Path, lineage: ReplayLineage) -> list[str]:
    """Describe recipes in the run directory that are not those of the attempts."""
    from trainer.run.provenance import digest_of, recipe_file

    def differs(path: Path, digest: str) -> bool:
        try:
            return bool(digest) and digest_of(read_text(path)) != digest
        except OSError:  # missing or unreadable: reported by a recomputation that needs the file
            return False
        except ValueError:  # the file is not text
            return True

    digests = [
        (f"attempt {attempt.number}", attempt.start.recipe) for attempt, _ in lineage.attempts
    ]
    files = [(recipe_file(run, digest), who, digest) for who, digest in digests]
    files.append((run / "recipe.yaml", "the newest attempt", digests[-1][1]))
    return [
        f"{path} is not the recipe that {who} began with"
        for path, who, digest in files
        if differs(path, digest)
    ]


def _planned(
    run: Path,
    lineage: ReplayLineage,
    step: int,
    ranks: int | None,
    data: Sequence[str],
    *,
    audit: bool = False,
) -> "_Plan":
    """Prepare a recomputation before ranks start. The recipe of `step` determines the number of
    ranks and their device. Raises RecipeError if that recipe or its data is missing, or the ranks
    cannot divide its work."""
    attempt = lineage.attempt_of(step)
    _take_threads(attempt.start)
    from trainer.parallel.mesh import mesh_shape
    from trainer.tools.replay.rebuild import ReplaySources

    sources = ReplaySources(run.absolute(), data, Path())
    recipe = sources.recipe_of(attempt)
    ranks = ranks or _ranks(recipe, attempt.start, audit)
    try:
        mesh_shape(recipe, ranks, ranks)
        exact.batch_plan(recipe, ranks // together(recipe.strategy))
    except RecipeError as error:
        raise RecipeError(f"--nproc {ranks}: {error}") from error
    return _Plan(lineage, attempt.start, recipe, sources.states_of(recipe), run, data, ranks)


@dataclass(frozen=True)
class _Plan:
    """A recomputation that is ready to start."""

    lineage: ReplayLineage
    start: StartLine
    """Ledger line of the start of the attempt that had the recipe."""
    recipe: Recipe
    states: StoragePlace
    """The directory of the run's checkpoints."""
    run: Path
    data: Sequence[str]
    ranks: int

    def compute(
        self,
        spans: Sequence[ReplaySpan],
        stored: Sequence[int],
        *,
        examined: int = 0,
        why: bool = False,
    ) -> ReplayOutcome:
        """Print the expected cost, and recompute; for the arguments see `ReplayRequest`. Raises
        RecipeError, DataError or CheckpointError if recomputation is impossible."""
        print(self._cost(spans), flush=True)
        with scratch_folder() as scratch:
            request = ReplayRequest(
                run=str(self.run.absolute()),
                scratch=str(scratch),
                device=self.recipe.run.device,
                timeout=self.recipe.elastic.timeout_seconds,
                spans=spans,
                stored=stored,
                data=self.data,
                examined=examined,
                why=why,
            )
            if self.ranks == 1:
                from trainer.tools.replay.recompute import replay_alone

                return replay_alone(request)
            return self._by_ranks(replace(request, secret=secrets.token_hex(32)))

    def _by_ranks(self, request: ReplayRequest) -> ReplayOutcome:
        """Start ranks on this machine, and read the outcome that they write."""
        scratch, threads = Path(request.scratch), self.start.threads
        environment = {REQUEST: request.to_json()}
        environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        log, answer = scratch / "errors.log", scratch / OUTCOME
        worker = ["-m", "trainer.tools.replay.recompute"]
        with log.open("wb") as errors:
            code = run_ranks(worker, self.ranks, errors=errors, environment=environment)
        if answer.is_file():
            return ReplayOutcome(**json.loads(answer.read_text()))
        # Without an outcome, only the ranks' log tells why they broke off.
        print(log.read_text(errors="replace"), file=sys.stderr)
        return ReplayOutcome(errors=[f"the ranks ended with code {code}, see above"])

    def _cost(self, spans: Sequence[ReplaySpan]) -> str:
        """Describe the steps, their starting states, and the time that the run took for them."""
        steps = [step for begin, end in spans for step in range(begin + 1, end + 1)]
        seconds = sum(line.seconds for line in map(self.lineage.recorded, steps) if line)
        begins = ", ".join(f"step {one.begin}" if one.begin else "the beginning" for one in spans)
        return (
            f"{len(steps)} step(s) to compute, after {begins}, on {self.ranks} rank(s); the run "
            f"took {clock(seconds)} for them, on {self.start.world_size}"
        )


def _ranks(recipe: Recipe, start: StartLine, audit: bool) -> int:
    """Choose the number of ranks. In exact mode it is the fewest that hold the model, or in an
    audit another than the run's. Otherwise it is the run's own number, for equal rounding, if this
    machine has room for it, else the fewest."""
    import torch

    from trainer.parallel.mesh import replica_ranks

    least = replica_ranks(recipe)
    room = torch.cuda.device_count() if recipe.run.device == "cuda" else max(2, usable_cores())
    if not exact.used(recipe):
        return start.world_size if start.world_size <= room else least
    other = 2 * least if start.world_size == least else least
    fits = other <= room and other <= exact.most_shares(recipe) * together(recipe.strategy)
    return other if audit and fits else least


def _print_outcome(outcome: ReplayOutcome, holds: str = "") -> int:
    for problem in outcome.problems:
        print(f"problem: {problem}")
    for what in outcome.missing:
        print(f"not compared: {what}")
    for error in outcome.errors:
        print(f"error: {error}", file=sys.stderr)
    if outcome.problems:
        return EXIT_FAILED
    if outcome.missing or outcome.errors:
        return EXIT_WRONG_INPUT
    if holds:
        print(holds)
    return EXIT_DONE
