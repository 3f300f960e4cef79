"""Compares the sequences that a run consumed, by its ledger, with those that its data prescribes.

[Note: consumption] Each rank hashes the sequences that it passes to the model: the sample at each
position, and its tokens. The sum over ranks is part of the step's all-reduce, and is written to the
ledger. Ranks that compute the same sequences together (tp, pp, cp) all take part, with weights that
sum to 1 (`Mesh.witness`). So the sum can be recomputed from recipe and data alone. Another order,
other data, or another rank's sequences are detected, with the step; the sum does not identify the
rank. Errors after the tokens reach the model are not covered.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from checkpointing.errors import StorageError
from elastic.node.files import read_text
from elastic.record.attempt import LedgerStepLine
from elastic.record.history import RecordedAttempt, RecordHistory
from trainer.data.loader import TokenStream
from trainer.data.order import Order, sample_digest
from trainer.data.sample_stream import size_in
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.errors import known_errors
from trainer.run.provenance import (
    RunProvenanceError,
    digest_of,
    kept_recipe,
    numbers_of,
    other_data,
    recipe_file,
    where_it_lies,
)
from trainer.tasks.task import open_streams

MOST_SAMPLES, MOST_TOKENS = 5_000_000, 100_000_000
"""Largest number of samples located, and of tokens read, for one check. In a longer run only evenly
spaced steps are checked."""


@dataclass
class _ConsumptionFindings:
    """Result of comparing a ledger with recipes and data."""

    problems: list[str] = field(default_factory=list)
    """Contradictions between ledger, recipes and data."""
    missing: dict[str, list[RecordedAttempt]] = field(default_factory=dict)
    """Reason → attempts that were not compared for this reason."""
    proved: list[str] = field(default_factory=list)
    """What the comparison has shown, a statement each."""

    def miss(self, what: str, attempts: Sequence[RecordedAttempt]) -> None:
        """Add attempts to `missing`."""
        self.missing.setdefault(what, []).extend(attempts)

    @property
    def left_out(self) -> list[str]:
        """A line for each reason in `missing`, with its attempts."""
        return [f"{what} ({numbers_of(attempts)})" for what, attempts in self.missing.items()]


def check_consumption(run: Path, history: RecordHistory) -> _ConsumptionFindings:
    """Compare the surviving steps of a run with their recipes and data."""
    findings = _ConsumptionFindings()
    newest = history.attempts[-1].start.recipe
    shown = run / "recipe.yaml"
    if newest and shown.is_file() and digest_of(read_text(shown)) != newest:
        findings.problems.append(
            f"{shown} is not the recipe of the newest attempt, which is {recipe_file(run, newest)}"
        )
    by_recipe: dict[str, list[RecordedAttempt]] = {}
    for attempt in history.attempts:
        # steps that a restart discarded are compared in the attempt that repeated them
        if any(history.survives(attempt, step) for step in attempt.steps):
            by_recipe.setdefault(attempt.start.recipe, []).append(attempt)
    counts = _ComparedSteps()
    for attempts in by_recipe.values():
        if recipe := _recipe(run, attempts, findings):
            _compare(recipe, attempts, history, findings, counts)
    if counts.located and not findings.problems:
        samples, tokens = (
            f"all {some} steps" if some == counts.steps else f"{some} of {counts.steps} steps"
            for some in (counts.located, counts.read)
        )
        line = f"the data says: samples of {samples}, tokens of {tokens}"
        if not counts.read:
            line = f"the order says: samples of {samples}; their contents are not compared"
        findings.proved.append(f"the ranks consumed what {line}")
    if stages := history.attempts[-1].start.stages:
        begins = ", ".join(["0", *(str(stage[0]) for stage in stages)])
        findings.proved.append(f"the data has {1 + len(stages)} stages, from sequences {begins}")
    if counts.silent:
        findings.proved.append(f"no digest of the consumed samples: {counts.silent} steps")
    return findings


@dataclass
class _ComparedSteps:
    """Numbers of surviving steps: with a digest; with compared samples; with compared tokens;
    without a digest."""

    steps: int = 0
    located: int = 0
    read: int = 0
    silent: int = 0


def _recipe(
    run: Path, attempts: Sequence[RecordedAttempt], findings: _ConsumptionFindings
) -> Recipe | None:
    """Read the recipe of some attempts, and compare their start lines with it; on failure record
    the reason, and return None."""
    try:
        recipe = kept_recipe(run, attempts)
    except RunProvenanceError as error:
        findings.miss(str(error), attempts)
        return None
    except RecipeError as error:
        findings.problems.append(str(error))
        return None
    for attempt in attempts:
        if attempt.start.recipe and attempt.start.global_batch != recipe.batch.global_batch:
            findings.problems.append(
                f"attempt {attempt.number} (line {attempt.line}) has a global batch of "
                f"{attempt.start.global_batch}, its recipe of {recipe.batch.global_batch}"
            )
        in_our_order = not recipe.data.factory or size_in(attempt.start.data)
        if attempt.start.recipe and in_our_order and "consumed" not in attempt.start.records:
            findings.problems.append(
                f"attempt {attempt.number} (line {attempt.line}) does not record the samples that "
                "the ranks consumed, although its data requires it"
            )
    return recipe


def _compare(
    recipe: Recipe,
    attempts: Sequence[RecordedAttempt],
    history: RecordHistory,
    findings: _ConsumptionFindings,
    counts: _ComparedSteps,
) -> None:
    """Check that `attempts` consumed the samples that `recipe` gives for their positions, by the
    digests of surviving steps in the ledger. Adds problems to `findings` and steps to `counts`."""
    steps = [
        (attempt.number, step)
        for attempt in attempts
        for step in attempt.steps
        if history.survives(attempt, step)
    ]
    counts.silent += sum(not step.consumed for _, step in steps)
    steps = [(number, step) for number, step in steps if step.consumed]
    if not steps:
        return
    counts.steps += len(steps)
    claimed = {attempt.start.data for attempt in attempts}
    # A report runs no user code, so of a factory's samples only the order is compared.
    if recipe.data.factory:
        size = size_in(*claimed) if len(claimed) == 1 else 0
        if size:  # else attempts differ (`read_history` reports it), or user code sets the order
            order = Order([size], [1.0], recipe.run.seed)
            located = _spread(steps, MOST_SAMPLES, 1)
            findings.problems += _other_samples(located, lambda at: order.locate(at)[::2])
            counts.located += len(located)
        return
    try:
        recipe, away = where_it_lies(recipe, attempts[0].start.directory)
        if away:
            findings.miss(f"there is no data in {away}, which has no index.json", attempts)
            return
        stream, _ = open_streams(recipe)
        for attempt in attempts:
            if what := other_data(attempt.start, stream):
                findings.problems.append(
                    f"the data in {', '.join(source.path for source in recipe.data.sources)} is "
                    f"not what attempt {attempt.number} trained on: {what}"
                )
                return
        located = _spread(steps, MOST_SAMPLES, 1)
        read = _spread(steps, MOST_TOKENS, stream.seq_len)
        findings.problems += _other_samples(located, stream.locate)
        findings.problems += _other_tokens(read, stream)
    except (OSError, StorageError) as error:
        findings.miss(f"the data cannot be read: {error}", attempts)
        return
    except known_errors() as error:
        findings.problems.append(f"the data is not what {numbers_of(attempts)} trained on: {error}")
        return
    counts.located += len(located)
    counts.read += len(read)


Steps = Sequence[tuple[int, LedgerStepLine]]
"""Pairs of the number of an attempt and a step of it."""


def _spread(steps: Steps, most: int, each: int) -> Steps:
    """Choose evenly spaced steps whose sequences, times `each`, are at most `most`."""
    total = sum(step.after_last - step.first for _, step in steps) * each
    return steps[:: max(1, -(-total // most))]


def _other_samples(
    steps: Steps, locate: Callable[[np.ndarray], Sequence[np.ndarray]]
) -> Iterator[str]:
    """Yield a problem for each step with another digest of its samples. `locate` maps positions to
    (sources, samples)."""
    for attempt, step in steps:
        positions = np.arange(step.first, step.after_last)
        sources, samples = locate(positions)
        if sample_digest(positions, sources, samples) != _numbers(step)[0]:
            yield f"{_describe(attempt, step)}: a rank consumed other sequences"


def _other_tokens(steps: Steps, stream: TokenStream) -> Iterator[str]:
    for attempt, step in steps:
        positions = range(step.first, step.after_last)
        if stream.fetch_with_digest(positions)[1][1] != _numbers(step)[1]:
            yield f"{_describe(attempt, step)}: a rank consumed other tokens than the data has"


def _numbers(step: LedgerStepLine) -> tuple[int, int]:
    # eight hexadecimal digits for the samples, then eight for their tokens
    digest = step.consumed or ""
    return int(digest[:8], 16), int(digest[8:], 16)


def _describe(attempt: int, step: LedgerStepLine) -> str:
    return (
        f"step {step.step} (attempt {attempt}, line {step.line}), sequences {step.first} to "
        f"{step.after_last - 1}"
    )
