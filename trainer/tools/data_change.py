"""`perdure data change`: sends a change of data to a running run, and waits for the answer."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic.node.files import write_whole
from elastic.record.history import RecordHistory, read_history
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.data_change import (
    REQUEST,
    RecipeDataChange,
    plain,
    refuse_taken_names,
    with_changes,
)
from trainer.recipe.sections import SourceSection

PATIENCE_SECONDS, PATIENCE_STEPS = 30.0, 3
"""A run has to answer within PATIENCE_SECONDS plus the time of PATIENCE_STEPS steps."""


def change_data(
    run: Path,
    step: int,
    weights: Mapping[str, float],
    added: Sequence[tuple[str, str]],
    appended: Sequence[tuple[str, str]],
) -> str:
    """Request a new stage of the data of a run, and return the run's answer.

    Args:
        run: run directory.
        step: last step before the new stage.
        weights: source → weight; empty: unchanged.
        added: (name, path) of new sources; for an empty name, the last part of the path.
        appended: (name of a source, path of a data set to append to it).

    Raises:
        LedgerError, RecipeError, DataError: the change is wrong, or the run rejects it.
    """
    history = read_history(run)
    under_way = history.step + 1
    if step <= under_way:
        raise RecipeError(
            f"--at-step {step}: the run has recorded {history.step} steps, and may be in step "
            f"{under_way}; choose a later one"
        )
    start = history.attempts[-1].start
    sources = [SourceSection(path=_absolute(path), name=name or None) for name, path in added]
    append: dict[str, tuple[str, ...]] = {}
    for name, path in appended:
        sources.append(SourceSection(path=_absolute(path)))
        append[name] = (*append.get(name, ()), sources[-1].called)
    change = RecipeDataChange(
        name=secrets.token_hex(8),
        begin=history.sequences + (step - history.step) * start.global_batch,
        weights=dict(weights or {}) or None,
        append=append,
        sources=tuple(sources),
    )
    _check(run, change, start.directory)
    request = run / REQUEST
    if request.exists():
        raise RecipeError(f"{request}: another change waits for its answer; try again later")
    write_whole(request, json.dumps(plain([change])[0]))
    last = sum(step_line.seconds for step_line in history.attempts[-1].steps[-1:])
    deadline = time.monotonic() + PATIENCE_SECONDS + PATIENCE_STEPS * last
    try:
        while request.exists():
            if time.monotonic() > deadline:
                request.unlink()
                raise RecipeError(
                    f"{run}: no answer; if the run does not train now, add the stage to its recipe"
                )
            time.sleep(0.1)
    except FileNotFoundError:  # the run answered just before `unlink`
        pass
    except KeyboardInterrupt:  # otherwise a later start of the run would carry out the request
        request.unlink(missing_ok=True)
        raise
    return _answer(read_history(run), change.name, step)


def _check(run: Path, change: RecipeDataChange, directory: str) -> None:
    """Open the changed data as the run will, so that a wrong change fails now, not in the run."""
    from trainer.run.provenance import where_it_lies
    from trainer.tasks.task import open_streams

    recipe = load_recipe(run / "recipe.yaml", kept=True)
    refuse_taken_names(recipe, change, directory)
    recipe, away = where_it_lies(with_changes(recipe, [change], "the change"), directory)
    if away:
        raise RecipeError(
            f"there is no data in {away}, which has no index.json; correct the path, or prepare "
            "the data with perdure data prepare"
        )
    open_streams(recipe)


def _answer(history: RecordHistory, name: str, step: int) -> str:
    for attempt in reversed(history.attempts):
        for event in attempt.events:
            if event.get("request") != name:
                continue
            if refused := event.get("refused"):
                raise RecipeError(f"the run rejects it: {refused}")
            return f"accepted: {event.get('what')}, after step {step}; the run pauses once for it"
    raise RecipeError("the run's ledger has no answer; see its console")


def _absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).absolute())
