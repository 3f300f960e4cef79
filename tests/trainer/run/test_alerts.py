"""People are told of what begins to hold, once; and how a run stands is what its ledger says."""

import json
import re
import time
from pathlib import Path

import pytest
import yaml

from elastic import Ledger, StartLine
from trainer.recipe.value_types import (
    RecipeFailureAlert,
    RecipeSilenceAlert,
    RecipeThresholdAlert,
    parse_condition,
)
from trainer.run.alerts import AlertSink
from trainer.run.events import RunEventSummary
from trainer.run.trackers import to_sink

SIZE = {"global_batch": 8, "world_size": 2}
CAUSE = {"rank": 1, "why": "SIGKILL"}


def test_the_standing_of_a_run(tmp_path):
    """Steps 1 to 3 of a second each; a failure takes one back, a roll-back another."""
    path, now = tmp_path / "ledger.jsonl", time.time()
    assert RunEventSummary(tmp_path).at(now) == {}
    with Ledger(path, StartLine(step=0, sequences=0, at=now - 10, **SIZE)) as ledger:
        for step in (1, 2, 3):
            ledger.step(step, 8 * (step - 1), 8 * step, 1.0, loss=2.5, skipped="")
    standing = RunEventSummary(tmp_path)
    first = standing.at(now)
    assert first.pop("goodput") == pytest.approx(0.3)
    assert first == {"attempt": 1, "world_size": 2, "failures": 0, "steps_lost": 0}
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # a process was killed
    with Ledger(path, StartLine(step=2, sequences=16, at=now + 10, cause=CAUSE, **SIZE)) as ledger:
        ledger.step(3, 16, 24, 1.0, loss=2.5, skipped="loss")
        ledger.rollback(3, 1, "memory")
    assert standing.at(now + 9)["failures"] == 0
    second = standing.at(now + 20)
    assert second.pop("goodput") == pytest.approx(1 / 30)
    assert second == {"attempt": 2, "world_size": 2, "failures": 1, "steps_lost": 1}


def test_conditions_say_what_they_mean():
    assert parse_condition("loss > 8") == RecipeThresholdAlert("loss", True, 8.0)
    assert parse_condition("goodput<9e-1") == RecipeThresholdAlert("goodput", False, 0.9)
    assert parse_condition("no step for 10 min") == RecipeSilenceAlert(600.0)
    assert parse_condition(" failure ") == RecipeFailureAlert()
    for wrong in ("loss", "loss > high", "loss >= 8", "no step for 10 days", "failures"):
        assert parse_condition(wrong) is None


def test_alerts_come_once_until_it_is_over(tmp_path, capsys):
    told = tmp_path / "told"
    run = f'echo "$PERDURE_ALERT" >> {told}'
    whens = ("loss > 8", "failure", "no step for 1 min")
    alerts = [{"when": when, "run": run, "post": None} for when in whens]
    alerts.append({"when": "loss > 8", "run": None, "post": "env:NOWHERE"})
    recipe = {"tracking": {"name": None, "alerts": alerts}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    metrics, moment = tmp_path / "metrics.jsonl", time.time()
    sink = AlertSink(tmp_path)
    turns = to_sink(sink, tmp_path, 0.0)

    def turn(*losses):
        nonlocal moment
        with metrics.open("a") as file:
            for loss in losses:
                moment += 1e-3
                file.write(json.dumps({"step": 1, "time": moment, "loss": loss}) + "\n")
        next(turns)
        return told.read_text().splitlines() if told.exists() else []

    name = tmp_path.name
    assert turn(2.0) == []
    high = [f"{name}, step 1: loss 9 (loss > 8)", f"{name}, step 1: loss nan (loss > 8)"]
    assert turn(9.0, 9.5) == high[:1]
    assert turn(2.0, None) == high
    with Ledger(tmp_path / "ledger.jsonl", StartLine(step=0, sequences=0, at=1.0, **SIZE)):
        pass
    with Ledger(
        tmp_path / "ledger.jsonl", StartLine(step=0, sequences=0, at=2.0, cause=CAUSE, **SIZE)
    ):
        pass
    high.append(f"{name}, step 1: 1 failure(s) by now (failure)")
    assert turn(2.0, 2.0) == high
    sink._heard -= 61  # as if that many seconds had passed
    *before, silent = turn()
    assert before == high
    assert re.fullmatch(r".*, step 1: no step for \d+ s \(no step for 1 min\)", silent)
    assert turn() == [*high, silent]
    (warning,) = capsys.readouterr().out.splitlines()
    why = "the environment variable NOWHERE is not set"
    assert warning == f"warning: tracking.alerts.3: {why}; training continues"


@pytest.mark.parametrize(
    ("command", "seconds", "why"),
    [
        ("yes SECRET & echo $! > PID; wait", 1.0, "took longer than 1 s, and was killed"),
        ("yes SECRET | head -c 1000000 >&2; exit 3 # SECRET", 60.0, "ended with exit code 3"),
    ],
)
def test_commands_that_hang_or_flood(tmp_path, monkeypatch, capfd, command, seconds, why):
    monkeypatch.setattr("trainer.run.alerts.COMMAND_SECONDS", seconds)
    command = command.replace("PID", str(tmp_path / "pid"))
    alerts = [{"when": "loss > 8", "run": command, "post": None}]
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"tracking": {"name": None, "alerts": alerts}})
    )
    AlertSink(tmp_path).record(1, {"time": time.time(), "loss": 9.0})
    said = capfd.readouterr()
    assert said.err == ""
    assert said.out == f"warning: tracking.alerts.0: its command {why}; training continues\n"
    if (tmp_path / "pid").exists():
        forked = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
        deadline = time.monotonic() + 10
        while forked.exists() and forked.read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
