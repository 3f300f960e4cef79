"""Where `perdure eval` finds the checkpoints of a run."""

from pathlib import Path

import pytest

from elastic.record.ledger import Ledger, StartLine
from tests.distributed.jobs import RECIPE
from trainer.tools.eval_lines import checkpoints_of, follow
from trainer.tools.generate import GenerateError


@pytest.fixture
def run(tmp_path):
    """run(checkpoint.directory) → a run that is done, and was started in `home`."""
    folder = tmp_path / "run"
    folder.mkdir()

    def run(directory):
        given = f"checkpoint: {{every: 0, directory: {directory}}}"
        (folder / "recipe.yaml").write_text(RECIPE.replace("checkpoint: {every: 0}", given))
        start = StartLine(
            step=0, sequences=0, global_batch=8, world_size=1, nodes=1, source="none",
            directory=str(tmp_path / "home"),
        )  # fmt: skip
        with Ledger(folder / "ledger.jsonl", start) as ledger:
            ledger.end(0, "done")
        return folder

    return run


def test_a_run_is_followed_where_its_recipe_puts_checkpoints(tmp_path, run):
    """In `checkpoints`, elsewhere by a whole path, or from where the run was started."""
    for number, directory in enumerate(("null", tmp_path / "disk", "relative")):
        where = checkpoints_of(folder := run(directory))
        steps = [where / f"step-{step:08}" for step in (10 + number, 20 + number)]
        for step in reversed(steps):
            step.mkdir(parents=True)
        assert list(follow(folder)) == [steps]
    assert where == tmp_path / "home/relative"


def test_checkpoints_in_an_object_store_are_refused(run):
    with pytest.raises(GenerateError, match="its checkpoints are in s3://bucket/run, but eval"):
        checkpoints_of(run("s3://bucket/run"))


def test_a_run_that_has_not_started_is_followed():
    assert checkpoints_of(Path("run")) == Path("run/checkpoints")
