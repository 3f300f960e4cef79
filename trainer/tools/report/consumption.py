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
from pathlib import Path

import numpy as np

from elastic.record.history import History, StepLine
from trainer.data.loader import TokenStream
from trainer.data.order import Order, sample_digest
from trainer.data.sample_stream import size_in
from trainer.recipe import Recipe, load_recipe
from trainer.recipe.errors import known_errors
from trainer.tasks.task import open_streams

MOST_SAMPLES, MOST_TOKENS = 5_000_000, 100_000_000
"""Looked up, and read, for one check; of a longer run so many, evenly spread over its steps."""


def check_consumption(run: Path, history: History) -> tuple[list[str], str]:
    """(problems, one line of proof) for the steps whose result survived. The line is empty where no
    step has a digest.

    Args:
        run: directory of the run; its recipe.yaml names the data.
        history: its ledger.
    """
    steps = [
        (attempt.number, step)
        for attempt in history.attempts
        for step in attempt.steps
        if step.consumed and history.survives(attempt, step)
    ]
    if not steps:
        return [], ""
    numbers = {number for number, _ in steps}
    claimed = {attempt.start.data for attempt in history.attempts if attempt.number in numbers}
    try:
        recipe = load_recipe(run / "recipe.yaml")
        if recipe.data.factory:
            return _of_own_data(steps, claimed, recipe)
        stream, _ = open_streams(recipe)
    except (*known_errors(), OSError) as error:
        return [], f"not compared with the data: {error}"
    if {stream.fingerprint} != claimed:
        return [], "not compared with the data: what lies there now is not what the run began with"
    located = _spread(steps, MOST_SAMPLES, 1)
    read = _spread(steps, MOST_TOKENS, stream.seq_len)
    problems = [*_other_samples(located, stream.locate), *_other_tokens(read, stream)]
    line = (
        f"what the ranks took is what the data says: samples of {_share(located, steps)}, tokens "
        f"of {_share(read, steps)}"
    )
    return problems, line


Steps = Sequence[tuple[int, StepLine]]
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Positions → source and sample of each."""


def _of_own_data(steps: Steps, claimed: set[str], recipe: Recipe) -> tuple[list[str], str]:
    """Without the user's code: what a data set holds is not asked, and its size is known."""
    if len(claimed) > 1:
        return [], "not compared with the data: attempts began with different data"
    order = Order([size_in(*claimed)], [1.0], recipe.run.seed)

    def locate(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, _, samples = order.locate(positions)
        return sources, samples

    located = _spread(steps, MOST_SAMPLES, 1)
    return [*_other_samples(located, locate)], (
        f"what the ranks took is what the order says: samples of {_share(located, steps)}; what "
        "they hold is not compared"
    )


def _spread(steps: Steps, most: int, each: int) -> Steps:
    """As many steps, evenly, as hold at most `most`, with `each` a sequence."""
    total = sum(step.after_last - step.first for _, step in steps) * each
    return steps[:: max(1, -(-total // most))]


def _share(some: Steps, steps: Steps) -> str:
    return f"all {len(steps)} steps" if len(some) == len(steps) else f"{len(some)} of {len(steps)}"


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
