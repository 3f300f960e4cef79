"""An error of one rank is told at once, to people and to the agent, and only once."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpointing import SaveFailed, SaveOutcome
from elastic import EXIT_DO_NOT_REQUEUE, EXIT_FAILED, EXIT_WRONG_INPUT, StartLine
from elastic.node.progress import NodeProgressPage, Pulse
from elastic.node.recall import NodeRecallSocket
from trainer.data.shards import DataError
from trainer.recipe import load_recipe
from trainer.recipe.factory import RecipeFactoryError
from trainer.run.metrics import RunLog
from trainer.run.saves import caught_up, finish_saves
from trainer.run.state import RunProgress
from trainer.run.worker import RunFailureReport

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def test_steps_that_are_computed_again_are_not_saved_and_no_report_keeps_a_run_from_saving():
    assert caught_up(failed=13, resumed=10, snapshot_every=5) == 12
    assert caught_up(failed=10**12, resumed=10, snapshot_every=5) == 20
    assert caught_up(failed=0, resumed=10, snapshot_every=5) < 10


def test_why_the_last_save_failed_is_said_once(capsys, tmp_path):
    """Its record, its rank and its agent all tell of it."""
    page, errors = (
        NodeProgressPage.make(),
        [f"saving step {step} failed: disk full" for step in (6, 7)],
    )

    def wait():
        raise SaveFailed(errors[1], 0)

    recipe = load_recipe(RECIPE, [f"run.dir={tmp_path}", "tracking.tensorboard=false"])
    start = StartLine(step=0, sequences=0, global_batch=8, world_size=1, data="")
    with RunLog(recipe, start, [], silent=False) as log:
        run = SimpleNamespace(
            checkpointer=SimpleNamespace(
                wait=wait, outcomes=lambda: [SaveOutcome(6 + n, None, errors[n], 0) for n in (0, 1)]
            ),
            log=log,
            progress=RunProgress(step=7),
            pulse=Pulse(page, 0),
        )
        with pytest.raises(SaveFailed) as failed:
            finish_saves(run)
    assert (
        RunFailureReport(Pulse(page, 0), 0, NodeRecallSocket(None)).send(failed.value)
        == EXIT_FAILED
    )
    said = capsys.readouterr()
    assert said.out == f"warning: {errors[0]}\n"
    assert said.err == f"error: {errors[1]}; the same command resumes\n"
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["event"] for record in records] == errors
    assert page.read(0).error == "SaveFailed: saving step 7 failed"


def raised_from(cause, error):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "first", "last"),
    [
        (
            MemoryError("CUDA out of memory.\nTried to"),
            EXIT_FAILED,
            "rank 3 failed:\nTraceback",
            "MemoryError: CUDA out of memory.\nTried to\n",
        ),
        (
            DataError("train-0.tokens: token 9"),
            EXIT_WRONG_INPUT,
            "error: train",
            "0.tokens: token 9\n",
        ),
        (
            raised_from(KeyError("rows"), RecipeFactoryError("data.factory: sample 3 fails")),
            EXIT_DO_NOT_REQUEUE,
            "KeyError: 'rows'",
            "error: data.factory: sample 3 fails\n",
        ),
    ],
)
def test_an_error_is_told_before_what_it_unwinds_waits(capsys, error, code, first, last):
    page = NodeProgressPage.make()
    pulse = Pulse(page, 0)
    pulse.report(15, "step")
    failure_report = RunFailureReport(pulse, 3, NodeRecallSocket(None))

    class Waits:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            told = capsys.readouterr().err
            assert told.startswith(first)
            assert told.endswith(last)
            assert page.read(0).phase == "failed"

    with pytest.raises(type(error)), Waits(), failure_report:
        raise error
    assert failure_report.send(error, wait=60) == code
    assert capsys.readouterr().err == ""
    assert page.read(0).error == f"{type(error).__name__}: {error}".partition("\n")[0]
