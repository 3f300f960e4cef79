"""Lines that a disk does not take: none is lost, none is written twice."""

import json
import resource
from contextlib import contextmanager

import pytest

from elastic.record.history import read_history
from elastic.record.ledger import Ledger, StartLine


@contextmanager
def cut_off(path, size):
    """No file of this process grows beyond `size` bytes: as on a full disk, a write is cut short
    and the next one fails."""
    path.touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_no_line(tmp_path, caplog):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, StartLine(step=0, sequences=0, global_batch=8, world_size=1))
    with cut_off(path, path.stat().st_size + 30):
        for step in range(1, 400):
            ledger.step(step, 8 * step - 8, 8 * step, 0.01)
    assert caplog.text.count("File too large") == 1
    assert len(ledger.unwritten) == 399
    ledger.step(400, 3192, 3200, 0.01)
    assert ledger.unwritten == []
    history = read_history(tmp_path)
    assert [step.step for step in history.attempts[0].steps] == [*range(1, 401)]
    assert history.problems == []


@pytest.mark.parametrize("taken", range(0, 500, 11))
def test_lines_that_came_with_a_state_are_written_once_whatever_the_writer_before_wrote(
    tmp_path, taken
):
    """The one before was killed when the disk had taken `taken` bytes more."""
    path, start = tmp_path / "ledger.jsonl", {"sequences": 0, "global_batch": 8, "world_size": 1}
    first = Ledger(path, StartLine(step=0, **start))
    first.step(1, 0, 8, 0.01)
    written = path.read_bytes()
    with cut_off(path, len(written)):
        first.step(2, 8, 16, 0.01)
        first.event("of step 2")
        first.step(3, 16, 24, 0.01)
        unwritten = first.unwritten  # a snapshot of step 3 is made here
        first.step(4, 24, 32, 0.01)
        rest = "".join(f"{line}\n" for line in first.unwritten).encode()
    assert [json.loads(line)["kind"] for line in unwritten] == ["step", "event", "step"]
    path.write_bytes(written + rest[:taken])
    state = {**start, "sequences": 24}
    with Ledger(path, StartLine(step=3, source="memory", **state), unwritten) as second:
        assert second.reached >= 3
        assert second.unwritten == []
        second.step(4, 24, 32, 0.01)
    lines = path.read_text().splitlines()
    assert len(lines) == len(set(lines))
    assert set(unwritten) <= set(lines)
    history = read_history(path)
    assert history.problems == []
    assert history.unrecorded == 0
    assert [step.step for step in history.attempts[0].steps][:3] == [1, 2, 3]


def test_lines_outlive_several_attempts_that_cannot_write_them(tmp_path):
    path, start = tmp_path / "ledger.jsonl", {"global_batch": 8, "world_size": 1}
    unwritten: list[str] = []
    with cut_off(path, 0):
        for step in range(3):
            begin = StartLine(step=step, sequences=8 * step, source="memory", **start)
            with Ledger(path, begin, unwritten) as ledger:
                ledger.step(step + 1, 8 * step, 8 * step + 8, 0.01)
                unwritten = ledger.unwritten
    assert path.stat().st_size == 0
    with Ledger(path, StartLine(step=3, sequences=24, source="memory", **start), unwritten):
        pass
    history = read_history(path)
    assert (history.problems, history.unrecorded, len(history.attempts)) == ([], 0, 4)
