"""Lines of any type in ledger.jsonl and metrics.jsonl: told or left out, never a traceback."""

import json
import time

import pytest

from elastic.record.history import read_history, read_starts
from elastic.record.ledger import Ledger, StartLine
from tests.distributed.jobs import SOAK
from trainer.run.events import RunEventReader
from trainer.run.trackers import RunMetricsTail
from trainer.tools.report.report import check, report
from trainer.tools.seeing.server import embedded
from trainer.tools.seeing.terminal import parts
from trainer.tools.seeing.view import SeenRun

WRONG = ["x", None, [], {}, [[[[]]]], True, -1, 1.5, 10**18, 10**300, float("nan"), float("inf")]
STEP = 1 if SOAK else 12
"""A field takes every STEP-th value of WRONG; the next field and line begin with the next value."""
RAW = [
    b"[" * 10_000,
    b'{"step":' * 10_000,
    b"\xff\xfe",
    b"null",
    b'{"kind":[]}',
    b'{"kind":"start","step":' + b"9" * 5000 + b"}",
    b'{"step":1,"time":' + b"9" * 5000 + b"}",
]


@pytest.fixture
def run(tmp_path):
    start = {"global_batch": 4, "world_size": 2, "data": "x"}
    with Ledger(tmp_path / "ledger.jsonl", StartLine(step=0, sequences=0, **start)) as ledger:
        for step in (1, 2):
            ledger.step(step, 4 * step - 4, 4 * step, 0.1, loss=1.0, norm=0.5, consumed="0" * 16)
        ledger.save(2, 0.1, stall=0.1)
        ledger.rollback(2, 1, "memory")
        ledger.phases({"build": 1.0})
    cause = {"rank": 1, "why": "killed", "at": time.time()}
    with Ledger(
        tmp_path / "ledger.jsonl", StartLine(step=2, sequences=8, cause=cause, **start)
    ) as ledger:
        ledger.step(3, 8, 12, 0.1, loss=1.0)
        ledger.end(0, "done")
    metrics = {"loss": 1.0, "tokens_per_second": 5.0, "peak_memory": 1e9, "validation_loss": 2.0}
    metrics["attempt"] = next(reversed(read_starts(tmp_path)))
    lines = [json.dumps({"step": step, "time": time.time(), **metrics}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def read_all(run):
    """All that reads these files."""
    report(run)
    looked = SeenRun(run)
    looked.look()
    embedded(looked.all())
    parts(looked, 80)
    check(read_history(run))
    events = RunEventReader()
    for line in (run / "ledger.jsonl").read_bytes().splitlines(keepends=True):
        events.event(line)
    for record in RunMetricsTail(run, 0.0).read()[1]:
        assert all(
            value is None or isinstance(value, str | int | float) for value in record.values()
        )


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
def test_a_wrong_value_in_any_field_is_no_traceback(run, name):
    path = run / name
    lines = path.read_text().splitlines()
    for number in range(0 if name == "ledger.jsonl" else 1, len(lines)):
        values = json.loads(lines[number])
        for place, field in enumerate(values):
            for wrong in WRONG[(number + place) % STEP :: STEP]:
                changed = json.dumps({**values, field: wrong})
                path.write_text("\n".join([*lines[:number], changed, *lines[number + 1 :], ""]))
                try:
                    read_all(run)
                except Exception as error:
                    error.add_note(f"{name}, line {number + 1}: {changed[:200]}")
                    raise


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
def test_what_is_no_record_is_left_out(run, name):
    path = run / name
    whole = path.read_bytes()
    for raw in RAW:
        path.write_bytes(whole + raw + b"\n")
        read_all(run)
        assert read_history(run).step == 3


def test_a_value_that_no_run_writes_is_a_problem(run):
    path = run / "ledger.jsonl"
    path.write_text(path.read_text().replace('"sequences":[4,8]', '"sequences":"4, 8"'))
    assert "line 3: a step line with a wrong sequences" in read_history(run).problems
