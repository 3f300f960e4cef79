"""What the ranks of a run have consumed, by its ledger, against what its data says that it must be.

[Note: consumption] Each rank hashes the sequences that it hands to the model: which sample stands
at which position, and the tokens in it. The sum over all ranks rides on the all-reduce of the step
and stands in the ledger. Ranks that compute the same sequences together (tp, pp, cp) all take part,
each with a weight of its own, and these weights sum to 1 (`Mesh.witness`). So the sum can be
computed again from recipe and data alone. A rank that had another order, other data, or sequences
that were not its own is found out, by step; which rank it was, a sum does not tell. What becomes of
the tokens later, in the model, is not in it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from elastic.node.files import read_text
from elastic.record.history import Attempt, History
from elastic.record.steps import StepLine
from trainer.data.loader import TokenStream
from trainer.data.order import Order, sample_digest
from trainer.data.sample_stream import size_in
from trainer.recipe import Recipe, load_recipe
from trainer.recipe.errors import known_errors
from trainer.run.provenance import digest_of, recipe_file
from trainer.tasks.task import open_streams

MOST_SAMPLES, MOST_TOKENS = 5_000_000, 100_000_000
"""Looked up, and read, for one check; of a longer run so many, evenly spread over its steps."""


@dataclass
class Findings:
    """What a comparison of a ledger with recipes and data gave."""

    problems: list[str] = field(default_factory=list)
    """Contradictions."""
    missing: dict[str, list[Attempt]] = field(default_factory=dict)
    """What could not be compared, as it is not there → the attempts that it matters for."""
    proved: list[str] = field(default_factory=list)

    def miss(self, what: str, attempts: Sequence[Attempt]) -> None:
        """Note that `what` is not there to compare some attempts with."""
        self.missing.setdefault(what, []).extend(attempts)

    @property
    def left_out(self) -> list[str]:
        """One line for each thing that is not there."""
        return [f"{what} ({_numbers_of(attempts)})" for what, attempts in self.missing.items()]


def check_consumption(run: Path, history: History) -> Findings:
    """Compare the steps on the line of the newest attempt with the recipes that they were trained
    with and the data that these name.

    Args:
        run: directory of the run, which holds the recipes.
        history: its ledger.
    """
    found = Findings()
    newest = history.attempts[-1].start.recipe
    shown = run / "recipe.yaml"
    if newest and shown.is_file() and digest_of(read_text(shown)) != newest:
        found.problems.append(
            f"{shown} is not the recipe that the newest attempt began with, which is "
            f"{recipe_file(run, newest)}"
        )
    by_recipe: dict[str, list[Attempt]] = {}
    for attempt in history.attempts:
        if any(history.survives(attempt, step) for step in attempt.steps):
            by_recipe.setdefault(attempt.start.recipe, []).append(attempt)
    counts = _Counts()
    for digest, attempts in by_recipe.items():
        recipe = _recipe(run, digest, attempts, found)
        if recipe:
            _compare(recipe, attempts, history, found, counts)
    if counts.located and not found.problems:
        of = "the data says" if counts.read else "the order says"
        line = f"what the ranks took is what {of}: samples of {_share(counts.located, counts)}"
        line += f", tokens of {_share(counts.read, counts)}" if counts.read else ""
        found.proved.append(line if counts.read else f"{line}; what they hold is not compared")
    if counts.silent:
        found.proved.append(f"no digest of what was taken: {counts.silent} steps")
    return found


@dataclass
class _Counts:
    """Steps on the line: that have a digest, whose samples and tokens were compared, without."""

    steps: int = 0
    located: int = 0
    read: int = 0
    silent: int = 0


def _recipe(run: Path, digest: str, attempts: Sequence[Attempt], found: Findings) -> Recipe | None:
    """The recipe that some attempts trained with; None, and why, if it cannot be had. An attempt
    that names none is older than the folder of recipes, and had recipe.yaml."""
    path = recipe_file(run, digest) if digest else run / "recipe.yaml"
    who = _numbers_of(attempts)
    try:
        if digest and digest_of(read_text(path)) != digest:
            found.problems.append(f"{path} is not the recipe that {who} began with")
            return None
        recipe = load_recipe(path, kept=True)
    except OSError as error:
        found.miss(f"{path}: {error.strerror}", attempts)
        return None
    except known_errors() as error:
        found.miss(f"{path} cannot be read by this version: {error}", attempts)
        return None
    for attempt in attempts:
        if digest and attempt.start.global_batch != recipe.batch.global_batch:
            found.problems.append(
                f"attempt {attempt.number} (line {attempt.line}) has a global batch of "
                f"{attempt.start.global_batch}, its recipe of {recipe.batch.global_batch}"
            )
        in_our_order = not recipe.data.factory or size_in(attempt.start.data)
        if digest and in_our_order and "consumed" not in attempt.start.records:
            found.problems.append(
                f"attempt {attempt.number} (line {attempt.line}) does not record what the ranks "
                "took, which its data makes every run record"
            )
    return recipe


def _compare(
    recipe: Recipe,
    attempts: Sequence[Attempt],
    history: History,
    found: Findings,
    counts: _Counts,
) -> None:
    """Compare what the ranks took in some attempts with the data of their recipe."""
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
    if recipe.data.factory:  # its code is not run here: what a data set holds is not asked
        size = size_in(*claimed) if len(claimed) == 1 else 0
        if size:  # else `read_history` has found that they differ, or the order is the data's own
            order = Order([size], [1.0], recipe.run.seed)
            located = _spread(steps, MOST_SAMPLES, 1)
            found.problems += _other_samples(located, _of_one_source(order))
            counts.located += len(located)
        return
    recipe, away = _where_it_lies(recipe, attempts[0].start.directory)
    if away:
        found.miss(f"there is no data in {away}, which has no index.json", attempts)
        return
    try:
        stream, _ = open_streams(recipe)
        for attempt in attempts:
            if attempt.start.data != stream.fingerprint:
                found.problems.append(
                    f"the data in {', '.join(source.path for source in recipe.data.sources)} is "
                    f"not what attempt {attempt.number} trained on: its fingerprint is another"
                )
                return
        located = _spread(steps, MOST_SAMPLES, 1)
        read = _spread(steps, MOST_TOKENS, stream.seq_len)
        found.problems += _other_samples(located, stream.locate)
        found.problems += _other_tokens(read, stream)
    except OSError as error:
        found.miss(f"the data cannot be read: {error}", attempts)
        return
    except known_errors() as error:
        found.problems.append(f"the data is not what {_numbers_of(attempts)} trained on: {error}")
        return
    counts.located += len(located)
    counts.read += len(read)


def _where_it_lies(recipe: Recipe, directory: str) -> tuple[Recipe, str]:
    """The recipe with its sources where they lie now, and the first that is away, or "". Relative
    paths start from the working directory of the run, or from here."""
    sources = []
    for source in recipe.data.sources:
        places = [Path(directory) / source.path, Path(source.path)]
        place = next((one for one in places if (one / "index.json").is_file()), None)
        if place is None:
            return recipe, str(places[0])
        sources.append(replace(source, path=str(place)))
    data = replace(recipe.data, sources=type(recipe.data.sources)(sources))
    # No validation data is needed.
    return replace(recipe, data=data, run=replace(recipe.run, evaluate_every=0)), ""


def _numbers_of(attempts: Sequence[Attempt]) -> str:
    numbers = ", ".join(str(attempt.number) for attempt in attempts[:8])
    more = f" and {len(attempts) - 8} more" if len(attempts) > 8 else ""
    return f"attempt {numbers}{more}"


Steps = Sequence[tuple[int, StepLine]]
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Positions → source and sample of each."""


def _of_one_source(order: Order) -> Locate:
    def locate(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, _, samples = order.locate(positions)
        return sources, samples

    return locate


def _spread(steps: Steps, most: int, each: int) -> Steps:
    """As many steps, evenly, as hold at most `most`, with `each` a sequence."""
    total = sum(step.after_last - step.first for _, step in steps) * each
    return steps[:: max(1, -(-total // most))]


def _share(some: int, counts: _Counts) -> str:
    return f"all {some} steps" if some == counts.steps else f"{some} of {counts.steps} steps"


def _other_samples(steps: Steps, locate: Locate) -> Iterator[str]:
    for attempt, step in steps:
        positions = np.arange(step.first, step.after_last)
        if sample_digest(positions, *locate(positions)) != _numbers(step)[0]:
            yield f"{_where(attempt, step)}: a rank took other sequences than these"


def _other_tokens(steps: Steps, stream: TokenStream) -> Iterator[str]:
    for attempt, step in steps:
        positions = range(step.first, step.after_last)
        if stream.fetch_with_digest(positions)[1][1] != _numbers(step)[1]:
            yield f"{_where(attempt, step)}: a rank took other tokens than the data holds there"


def _numbers(step: StepLine) -> tuple[int, int]:
    digest = step.consumed or ""
    return int(digest[:8], 16), int(digest[8:], 16)


def _where(attempt: int, step: StepLine) -> str:
    return (
        f"step {step.step} (attempt {attempt}, line {step.line}), sequences {step.first} to "
        f"{step.after_last - 1}"
    )
