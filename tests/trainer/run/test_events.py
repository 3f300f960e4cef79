"""Events are what the ledger says, in its order."""

import math

from elastic import Ledger, StartLine
from trainer.run import events
from trainer.run.events import End, Restart, RollBack, RunEventReader, Save, Step, Validation


def test_a_run_in_events(tmp_path):
    path, size = tmp_path / "ledger.jsonl", {"global_batch": 8, "world_size": 2}
    with Ledger(path, StartLine(step=0, sequences=0, at=100.0, **size)) as ledger:
        ledger.phases({"data": 1.0})
        ledger.step(1, 0, 8, 0.5, loss=2.5)
        ledger.step(2, 8, 16, 0.5, loss=math.inf, norm=1.0, skipped="loss")
        ledger.rollback(2, 1, "memory")
        ledger.validation(2, {"validation_loss": 3.0, "accuracy": None})
        ledger.save(2, 1.5)
        ledger.save(3, 1.5, error="disk full")
        ledger.end(0, "finished")
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # a process was killed
    cause = {"rank": 1, "why": "SIGKILL"}
    with Ledger(path, StartLine(step=1, sequences=8, at=200.0, cause=cause, **size)):
        pass
    reader = RunEventReader()
    found = [reader.event(line) for line in path.read_bytes().splitlines()]
    begun, step, skipped, back, validation, saved, failed, end, restart = filter(None, found)
    assert begun == events.Start(0, 100.0, 2, 1)
    assert 100.0 <= step.at < 101.0
    assert step == Step(1, step.at, 2.5, 0.5, False)
    assert (skipped.skipped, math.isnan(skipped.loss)) == (True, True)
    assert back == RollBack(2, back.at, 1, "memory")
    assert isinstance(validation, Validation)
    assert validation.values["validation_loss"] == 3.0
    assert math.isnan(validation.values["accuracy"])
    assert saved == Save(2, saved.at, 1.5, "")
    assert failed == Save(3, failed.at, 1.5, "disk full")
    assert end == End(2, end.at, 0, "finished")
    assert restart == Restart(1, 200.0, 2, 1, 1, "rank 1: SIGKILL")
