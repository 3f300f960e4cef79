"""A request to change the data of a run: accepted in time, else refused with a reason."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from elastic import Pulse, StartLine
from elastic.node.progress import PAUSE, PAUSE_TO_LEAVE
from elastic.world import ROUND
from trainer.recipe import RecipeError
from trainer.recipe.data_change import CHANGES, REQUEST, RecipeDataChange, plain
from trainer.recipe.sections import SourceSection
from trainer.run.data_changes import RunDataChanges
from trainer.run.metrics import RunLog
from trainer.run.provenance import read_changes

NEW = (SourceSection(path="/no/new"),)
CHANGE = RecipeDataChange(name="x", begin=24, weights={"data": 1.0})


@pytest.fixture
def asked(recipe, tmp_path, monkeypatch):
    """asked(request) → (the ledger's answer, recipe, pulse) of a run whose second step of 8
    sequences begins."""
    monkeypatch.setenv(ROUND, "1")
    monkeypatch.setattr("trainer.run.data_changes.LOOK_SECONDS", 60.0)
    (tmp_path / "run").mkdir()
    one, pulse = recipe(f"run.dir={tmp_path / 'run'}"), Pulse.from_environment()
    return lambda request: (answer(one, pulse, request), one, pulse)


def answer(recipe, pulse, request):
    """The line of the ledger with the answer of a run to a request."""
    path = recipe.directory / REQUEST
    text = request if isinstance(request, str) else json.dumps(request)
    path.write_text(text)
    start = StartLine(step=0, sequences=0, global_batch=8, world_size=1)
    with RunLog(recipe, start, silent=False) as log:
        changes = RunDataChanges(
            SimpleNamespace(
                recipe=recipe, written=recipe, world=SimpleNamespace(is_main=True), pulse=pulse,
                progress=SimpleNamespace(step=1, sequences=8), log=log,
                plan=SimpleNamespace(global_batch=8),
            )
        )  # fmt: skip
        changes.look()
        assert not path.exists()
        path.write_text(text)
        changes.look()  # the next look is LOOK_SECONDS later, or after the pause
        assert path.exists()
    return json.loads((recipe.directory / "ledger.jsonl").read_text().splitlines()[-1])


def test_a_change_in_time_is_accepted_once(asked):
    line, one, pulse = asked(plain([CHANGE])[0])
    assert line["event"] == "data change"
    assert line["what"] == "from sequence 24: data=1"
    assert "refused" not in line
    assert pulse.pause_request == PAUSE
    assert read_changes(one) == [CHANGE]
    pulse.notice(15)
    assert pulse.pause_request == PAUSE_TO_LEAVE
    pulse.forget()
    assert not pulse.wants_pause
    asked(plain([CHANGE])[0])  # of a rank 0 that ended before it could answer
    assert read_changes(one) == [CHANGE]
    assert not pulse.wants_pause


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replace(CHANGE, begin=15), "begins at sequence 15, but step 2 goes up to 16"),
        (replace(CHANGE, weights={"date": 1.0}), "no source 'date'; did you mean 'data'?"),
        (replace(CHANGE, begin=2**53 + 1), "0.begin: Input should be less than"),
        (replace(CHANGE, weights={"new": 1.0}, sources=NEW), "rank 0 sees no data set at /no/new"),
        (replace(CHANGE, weights={"data": 1, "new": 1e-9}, sources=NEW), "new would have none of"),
        (
            replace(CHANGE, sources=(SourceSection(path="/no/data"),)),
            "has a data set named 'data' in /",
        ),
        ({"begin": 24}, "not a valid change of the data"),
        ("[" * 100_000, "nested too deep"),
        ("alone", "nothing starts this run again after a pause"),
    ],
)
def test_another_is_refused_with_a_reason(asked, monkeypatch, change, why):
    if change == "alone":
        monkeypatch.delenv(ROUND)
        change = CHANGE
    line, one, pulse = asked(plain([change])[0] if isinstance(change, RecipeDataChange) else change)
    assert why in line["refused"]
    assert pulse.pause_request == 0
    assert read_changes(one) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read(recipe, tmp_path):
    path, one = tmp_path / CHANGES, recipe(f"run.dir={tmp_path}")
    path.write_text(json.dumps(plain([CHANGE])))
    assert read_changes(one) == [CHANGE]
    os.chown(path, 12345, -1)
    with pytest.raises(RecipeError, match="belongs to uid 12345, who is not in checkpoint"):
        read_changes(one)
