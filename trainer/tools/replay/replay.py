"""`perdure replay`: plans what is to be computed again, starts ranks for it, and says what came
out."""

import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from checkpointing.storage.place import Place, location
from elastic.exits import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT
from elastic.node.files import read_text
from elastic.process import usable_cores
from elastic.record.history import LedgerError, read_history
from elastic.record.ledger import StartLine
from trainer.recipe import Recipe
from trainer.recipe.strategies import exact
from trainer.tools.replay.line import (
    Lineage,
    StepSpan,
    beginning,
    draw,
    drawn,
    line_of,
    stored_states,
)
from trainer.tools.replay.request import OUTCOME, REQUEST, ReplayOutcome, Request
from trainer.tools.report.report import clock
from trainer.tools.torchrun import run_ranks, stop_on_sigterm


@dataclass(frozen=True)
class Options:
    """How steps are computed again."""

    ranks: int | None = None
    """None: see `_ranks`."""
    data: Sequence[Path] = ()
    """Where the data sets lie now, in the order of the recipe; empty: where the recipe says."""


def replay(run: Path, step: int, options: Options, *, why: bool) -> int:
    """Compute a step of a run again, say whether it is what the ledger says, and perhaps explain
    it. Returns the exit code.

    Raises:
        LedgerError, RecipeError, DataError, CheckpointError: it cannot be computed.
    """
    line = line_of(read_history(run))
    if not 0 < step <= line.last:
        raise LedgerError(f"--step {step}: the run has steps 1 to {line.last}")
    plan = _planned(run, line, step, options)
    states = stored_states(plan.storage, line)
    for damage in states.damaged:
        print(f"note: {damage}")
    span = StepSpan(beginning(line, states.steps, step), step)
    return _told(plan.compute([span], states.steps, look_at=step, why=why))


def audit(run: Path, count: int, seed: int | None, options: Options) -> int:
    """Compute some steps of a run again, up to the next save each, and say whether the ledger
    holds. Returns the exit code.

    Args:
        run: its directory.
        count: steps that are drawn.
        seed: by which they are drawn; None: by chance.
        options: how they are computed.

    Raises:
        LedgerError, RecipeError, CheckpointError: there is nothing to compute.
    """
    history = read_history(run)
    if history.problems:  # so that it is not known what to compute
        return _told(ReplayOutcome(history.problems))
    line = line_of(history)
    seed = secrets.randbits(32) if seed is None else seed
    steps = draw(line, count, seed)
    print(f"audit of {run}: steps {', '.join(map(str, steps))} of {line.last}, by --seed {seed}")
    _take_threads(line.attempt_of(steps[-1]).start)
    if contradictions := _other_recipes(run, line):
        return _told(ReplayOutcome(contradictions))
    plan = _planned(run, line, steps[-1], options, audit=True)
    states = stored_states(plan.storage, line)
    outcome = plan.compute(drawn(line, states.steps, steps), states.steps)
    outcome.problems[:0] = states.damaged
    return _told(outcome, "the ledger holds: what was computed again is what it says")


def _take_threads(start: StartLine) -> None:
    """Have torch, which is not loaded yet, use as many threads as an attempt did."""
    if start.threads:
        os.environ["OMP_NUM_THREADS"] = str(start.threads)


def _other_recipes(run: Path, line: Lineage) -> list[str]:
    """Recipes in the directory of a run that are not those that it trained with."""
    from trainer.run.provenance import digest_of, recipe_file

    found = []
    for attempt, _ in line.attempts:
        path = recipe_file(run, attempt.start.recipe)
        known = attempt.start.recipe and path.is_file()
        if known and digest_of(read_text(path)) != attempt.start.recipe:
            found.append(f"{path} is not the recipe that attempt {attempt.number} began with")
    newest, shown = line.attempts[-1][0].start.recipe, run / "recipe.yaml"
    if newest and shown.is_file() and digest_of(read_text(shown)) != newest:
        found.append(f"{shown} is not the recipe that the newest attempt began with")
    return found


def _planned(
    run: Path, line: Lineage, step: int, options: Options, *, audit: bool = False
) -> "_Plan":
    """What is known before ranks are started. `step`: the one whose recipe decides how many there
    are, and of which device.

    Raises:
        RecipeError: that recipe, or its data, is away; or so many ranks cannot compute it.
    """
    attempt = line.attempt_of(step)
    _take_threads(attempt.start)
    from trainer.parallel.mesh import mesh_shape
    from trainer.tools.replay.rebuild import Sources

    data = [str(path.absolute()) for path in options.data]
    sources = Sources(run.absolute(), data, Path())
    recipe = sources.recipe_of(attempt)
    ranks = options.ranks or _ranks(recipe, attempt.start, audit)
    mesh_shape(recipe, ranks, ranks)
    return _Plan(line, attempt.start, recipe, str(sources.states_of(recipe)), run, data, ranks)


@dataclass(frozen=True)
class _Plan:
    """Everything that ranks are started for, and with."""

    line: Lineage
    start: StartLine
    """StartLine line of the attempt that had the recipe."""
    recipe: Recipe
    states: str
    run: Path
    data: Sequence[str]
    ranks: int

    @property
    def storage(self) -> Place:
        """Where the checkpoints of the run lie."""
        return location(self.states)

    def compute(
        self,
        spans: Sequence[StepSpan],
        stored: Sequence[int],
        *,
        look_at: int = 0,
        why: bool = False,
    ) -> ReplayOutcome:
        """Say what it will cost, and have it computed.

        Raises:
            RecipeError, DataError, CheckpointError: it cannot be.
        """
        print(self._cost(spans), flush=True)
        with TemporaryDirectory(prefix="perdure-replay-") as scratch:
            request = Request(
                run=str(self.run.absolute()),
                scratch=scratch,
                device=self.recipe.run.device,
                timeout=self.recipe.elastic.timeout_seconds,
                spans=spans,
                stored=stored,
                data=self.data,
                look_at=look_at,
                why=why,
            )
            if self.ranks == 1:
                from trainer.tools.replay.ranks import replay_alone

                return replay_alone(request)
            return self._by_ranks(replace(request, secret=secrets.token_hex(32)))

    def _by_ranks(self, request: Request) -> ReplayOutcome:
        """StartLine ranks of this machine, and read what they leave."""
        stop_on_sigterm()
        scratch, threads = Path(request.scratch), self.start.threads
        environment = {REQUEST: request.to_json()}
        environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        log, answer = scratch / "errors.log", scratch / OUTCOME
        worker = ["-m", "trainer.tools.replay.ranks"]
        with log.open("wb") as errors:
            code = run_ranks(
                worker, self.ranks, output=None, errors=errors, environment=environment
            )
        if answer.is_file():
            return ReplayOutcome(**json.loads(answer.read_text()))
        print(log.read_text(errors="replace"), file=sys.stderr)
        return ReplayOutcome(errors=[f"the ranks ended with code {code}, see above"])

    def _cost(self, spans: Sequence[StepSpan]) -> str:
        """What is computed, from where, and how long the run took for that."""
        steps = sum(end - begin for begin, end in spans)
        lines = [self.line.recorded(n) for one in spans for n in range(one.begin + 1, one.end + 1)]
        seconds = sum(line.seconds for line in lines if line)
        begins = ", ".join(f"step {one.begin}" if one.begin else "the beginning" for one in spans)
        return (
            f"{steps} step(s) to compute, after {begins}, on {self.ranks} rank(s); the run took "
            f"{clock(seconds)} for them, on {self.start.world_size}"
        )


def _ranks(recipe: Recipe, start: StartLine, audit: bool) -> int:
    """Ranks for steps of an attempt, unless somebody says how many. In exact mode as few as hold
    the model, or in an audit another number than the run had; else as many as the run had, so that
    rounding is alike, if this machine has room for them."""
    import torch

    from elastic.group.batch_plan import most_ranks
    from trainer.parallel.mesh import replica_ranks

    least = replica_ranks(recipe)
    room = torch.cuda.device_count() if recipe.run.device == "cuda" else max(2, usable_cores())
    if not exact.used(recipe):
        return start.world_size if start.world_size <= room else least
    shares = most_ranks(recipe.batch.global_batch, recipe.micro_batch, fixed=True)
    other = 2 * least if start.world_size == least else least
    fits = other <= room and other <= shares * recipe.strategy.together
    return other if audit and fits else least


def _told(outcome: ReplayOutcome, holds: str = "") -> int:
    """Print what came out; returns the exit code."""
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
