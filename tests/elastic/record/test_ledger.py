"""A ledger proves that every sequence was consumed exactly once, and says where the time went."""

import json
import math
import os
import re
import signal
import time

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from elastic.record.history import LedgerError, LedgerReader, read_history
from elastic.record.ledger import Ledger, StartLine
from elastic.record.reliability import goodput, idle_spans, reliability

BATCH = 8
COUNTERS = ("skipped", "rollbacks")


class Run:
    """Writes what a run would, with a clock of its own; `counted` as runs of today do, which name
    parents, count, and record a loss and a norm of each step."""

    def __init__(self, *, counted=False):
        self.counted = counted
        self.lines = []
        self.now = 1_700_000_000.0
        self.skew = 0.0
        """Of the wall clock."""
        self.boot = "boot-1"

    def start(self, step, *, sequences=None, nodes=1, startup=3.0, cause=None, source="storage"):
        self.now += startup
        self.started = self.now
        counted = self._counted(step) if self.counted else {}
        self.lines.append(
            {
                "kind": "start",
                "step": step,
                "sequences": step * BATCH if sequences is None else sequences,
                "global_batch": BATCH,
                "world_size": 2 * nodes,
                "nodes": nodes,
                "source": source if step else "none",
                "cause": cause,
                "phases": {"imports": startup * 0.75, "load": startup * 0.25},
                "at": self.now + self.skew,
                "monotonic": self.now - 1_600_000_000,
                "boot": self.boot,
                "pid": 1,
                "attempt": f"{len(self.lines):08x}",
                **counted,
            }
        )
        self.attempt = self.lines[-1]["attempt"]
        return self

    def _counted(self, step):
        """What a start line says of the state of `step`, in the lineage of the newest attempt."""
        parent, skipped, rollbacks, at = "", 0, 0, step
        own = [line for line in self.lines if "attempt" in line]
        name = self.attempt if own else None
        while name:
            lines = [line for line in own if line["attempt"] == name]
            begun = lines[0]
            if at > begun["step"]:
                parent = parent or (name if step else "")
                skipped += sum(bool(x.get("skipped")) for x in lines[1:] if self._until(x, at))
                rollbacks += sum(x["kind"] == "rollback" and x["step"] <= at for x in lines)
                at = begun["step"]
            name = begun["parent"]
        records = ["loss", "norm"]
        return {"parent": parent, "skipped": skipped, "rollbacks": rollbacks, "records": records}

    @staticmethod
    def _until(line, step):
        return line["kind"] == "step" and line["step"] <= step

    def counters(self):
        """What a save or an end says of now."""
        if not self.counted:
            return {}
        own = [line for line in self.lines if line["attempt"] == self.attempt]
        skipped = sum(line["kind"] == "step" and "skipped" in line for line in own)
        rollbacks = sum(line["kind"] == "rollback" for line in own)
        begun = own[0]
        return {
            "skipped": begun["skipped"] + skipped,
            "rollbacks": begun["rollbacks"] + rollbacks,
        }

    def add(self, kind, **values):
        after = self.now - self.started
        self.lines.append({"kind": kind, **values, "after": after, "attempt": self.attempt})
        return self

    def steps(self, first, last, seconds=0.5, skipped=()):
        for step in range(first, last + 1):
            self.now += seconds
            values = {"loss": 2.0, "norm": (1 / 3).hex()} if self.counted else {}
            if self.counted and step in skipped:
                kind = ("loss", "norm", "weights")[step % 3]
                bad = {"loss": {"loss": None}, "norm": {"norm": "nan"}, "weights": {}}[kind]
                values |= {"skipped": True, "why": kind, **bad}
            sequences = [(step - 1) * BATCH, step * BATCH]
            self.add("step", step=step, sequences=sequences, seconds=seconds, **values)
        return self

    def failure(self, after=0.25, detect=0.1):
        """A rank dies; returns the cause that the next start tells."""
        self.now += after
        cause = {"rank": 1, "node": "n0", "step": 0, "why": "SIGKILL", "at": self.now + self.skew}
        self.now += detect
        return cause

    def history(self, folder, lines=None):
        path = folder / "ledger.jsonl"
        lines = self.lines if lines is None else lines
        text = [json.dumps(line, separators=(",", ":")) for line in lines]
        path.write_text("".join(line + "\n" for line in text))
        return read_history(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ledger")


# --- writing ---------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    with Ledger(
        tmp_path / "ledger.jsonl", StartLine(step=0, sequences=0, global_batch=8, world_size=2)
    ) as ledger:
        ledger.step(1, 0, 8, 0.01, loss=0.1 + 0.2, norm=1 / 3, consumed="0" * 16)
        ledger.phases({"imports": 1.0, "first step": 0.2})
        ledger.step(2, 8, 16, 0.01, loss=math.nan, norm=math.inf, skipped="loss")
        ledger.rollback(2, 1, "memory")
        ledger.save(2, 0.5, stall=0.01)
        ledger.notice("SIGTERM", node="n0")
        ledger.event("straggler", rank=3)
        ledger.end(0, "done")
        ledger.end(1, "not the first")
    history = read_history(tmp_path)
    attempt = history.attempts[0]
    assert history.problems == []
    assert (history.step, history.sequences) == (2, 16)
    first, second = attempt.steps
    assert (first.skipped, first.loss, first.norm) == ("", 0.1 + 0.2, 1 / 3)  # every bit
    assert (second.skipped, math.isnan(second.loss), second.norm) == ("loss", True, math.inf)
    assert attempt.rollbacks == [(2, 1, "memory", 2, 5)]
    assert attempt.saves[0]["ok"]
    assert [event.get("event") for event in attempt.events] == [None, "straggler"]
    assert attempt.end["reason"] == "done"
    assert attempt.phases == {"imports": 1.0, "first step": 0.2}
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert all(len(line) < 200 for line in lines if '"step",' in line)


def test_a_torn_line_is_left_out_and_never_glued_to(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path, StartLine(step=0, sequences=0, global_batch=8, world_size=1))
    first.step(1, 0, 8, 0.01)
    first.step(2, 8, 16, 0.01)
    os.truncate(path, path.stat().st_size - 9)
    with Ledger(path, StartLine(step=1, sequences=8, global_batch=8, world_size=1)) as second:
        second.step(2, 8, 16, 0.01)
    history = read_history(path)
    assert history.problems == []
    assert [len(attempt.steps) for attempt in history.attempts] == [1, 1]
    assert history.sequences == 16


def test_a_killed_writer_leaves_every_line(tmp_path):
    process = os.fork()
    if process == 0:
        ledger = Ledger(
            tmp_path / "ledger.jsonl", StartLine(step=0, sequences=0, global_batch=1, world_size=1)
        )
        for step in range(1, 101):
            ledger.step(step, step - 1, step, 0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    assert read_history(tmp_path).step == 100


def test_an_error_is_how_an_attempt_ends(tmp_path):
    start = StartLine(step=0, sequences=0, global_batch=8, world_size=1)
    with pytest.raises(RuntimeError), Ledger(tmp_path / "ledger.jsonl", start):
        raise RuntimeError("out of luck")
    with pytest.raises(KeyboardInterrupt), Ledger(tmp_path / "ledger.jsonl", start):
        raise KeyboardInterrupt
    first, second = read_history(tmp_path).attempts
    assert (first.end["code"], first.end["reason"]) == (1, "RuntimeError: out of luck")
    assert second.end["code"] == 130


def test_no_ledger(tmp_path):
    with pytest.raises(LedgerError, match=r"ledger\.jsonl: No such file"):
        read_history(tmp_path)
    (tmp_path / "ledger.jsonl").write_text("not json\n[1]\n\n{}\n")
    with pytest.raises(LedgerError, match="no attempt has begun"):
        read_history(tmp_path)


# --- the proof -------------------------------------------------------------------------------


def test_a_step_that_lost_its_line_is_proved_by_the_start_after_it(folder):
    run = Run().start(0).steps(1, 5)
    history = run.start(6, source="memory", cause=run.failure()).steps(7, 9).history(folder)
    assert history.problems == []
    assert (history.unrecorded, history.step, history.sequences) == (1, 9, 72)
    # Not with another cursor, nor so many.
    run = Run().start(0).steps(1, 5)
    assert "no attempt computed" in run.start(6, sequences=47).history(folder).problems[0]
    run = Run().start(0).steps(1, 5)
    assert (
        "no attempt computed: the record ends at step 5"
        in run.start(15).history(folder).problems[0]
    )
    # A machine that crashes loses what was not on its disk yet.
    run = Run().start(0).steps(1, 5)
    run.boot = "boot-2"
    assert run.start(15).history(folder).problems == []


def test_a_lost_branch_that_is_found_again(folder):
    """The checkpoint of step 9 turns up after a start had to go on from step 5."""
    run = Run().start(0).steps(1, 9)
    run.start(5, cause=run.failure()).steps(6, 7)
    history = run.start(9, cause=run.failure()).steps(10, 12).history(folder)
    assert history.problems == []
    assert history.kept == {3: 12, 1: 9}
    assert goodput(history).kept == pytest.approx(12 * 0.5)
    assert goodput(history).redone == pytest.approx(2 * 0.5 + 2 * 0.25)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            Run().start(4).steps(5, 6),
            r"attempt 1 \(line 1\) loaded step 4, which no attempt computed",
        ),
        (
            Run().start(0).steps(1, 4).start(4, sequences=24).steps(5, 5),
            "continued after step 4 from sequence 24, but that step ended before 32: sequences 24 "
            "to 31 are consumed twice",
        ),
        (Run().start(0).steps(1, 4).start(0, sequences=8), "fresh weights at sequence 8"),
        (Run().start(0).steps(1, 3).steps(3, 4), "recorded after step 3: it was computed twice"),
        (
            Run().start(0).steps(1, 3).steps(6, 7),
            r"step 6 \(attempt 1, line 5\) follows step 3: no record of 4 to 5",
        ),
        (
            Run().start(0).steps(1, 3).add("step", step=4, sequences=[24, 33], seconds=0.5),
            "step 4 .* consumed 9 sequences, but the global batch is 8",
        ),
    ],
)
def test_problems_are_named(folder, lines, problem):
    assert any(re.search(problem, found) for found in lines.history(folder).problems)


@st.composite
def runs(draw):
    """Kills, pauses, resumes and clocks that jump."""
    run = Run(counted=draw(st.booleans())).start(0)
    done, saved, cause = 0, [0], None
    skipped = draw(st.sets(st.integers(1, 40), max_size=4))
    for _ in range(draw(st.integers(0, 6))):
        count = draw(st.integers(0, 12))
        run.steps(done + 1, done + count, skipped=skipped)
        done += count
        if run.counted and count and draw(st.booleans()):
            if draw(st.booleans()):
                to = draw(st.integers(0, done - 1))
                run.add("rollback", step=done, to=to, source="memory")
            run.add("save", step=done, ok=True, seconds=0.1, **run.counters())
        if count:
            saved = [step for step in saved if step <= done] + [
                done - draw(st.integers(0, count - 1))
            ]
        run.skew += draw(st.sampled_from([0, 0, 0.4, -0.4, 90, -90]))
        how = draw(st.sampled_from(["kill", "kill", "torn", "pause", "resume"]))
        cause, step, source = None, draw(st.sampled_from(saved)), "storage"
        if how == "pause":
            step = done
            run.add("end", code=76, reason="paused", step=done, **run.counters())
        elif how == "resume":
            run.now += draw(st.sampled_from([100.0, 3 * 86400.0]))
            run.boot = draw(st.sampled_from(["boot-1", "boot-2"]))
        else:
            cause = run.failure()
            if how == "torn" and run.lines[-1]["kind"] == "step":
                step, source = done, "memory"  # although its line is lost
                run.lines.pop()
        run.start(step, nodes=draw(st.integers(1, 3)), cause=cause, source=source)
        done, saved = step, [old for old in saved if old <= step]
    run.steps(done + 1, done + draw(st.integers(2, 8)), skipped=skipped)
    if run.counted:
        done = run.lines[-1]["step"]
        run.add("end", code=0, reason="finished", step=done, **run.counters())
    return run


def test_who_was_cut_off_may_write_beside_the_next_attempt(folder):
    run = Run().start(0).steps(1, 8)
    cut_off, began = run.attempt, run.started
    run.start(4).steps(5, 5)
    run.attempt, run.started, after = cut_off, began, (run.attempt, run.started)
    run.steps(9, 10)
    run.attempt, run.started = after
    history = run.steps(6, 12).history(folder)
    assert history.problems == []
    assert (history.step, len(history.attempts)) == (12, 2)
    assert [step.step for step in history.attempts[0].steps] == [*range(1, 11)]
    assert sum(history.survives(a, s) for a in history.attempts for s in a.steps) == 12
    run.lines = [line for line in run.lines if line["kind"] != "start" or line["step"] == 0]
    assert "which has no start" in run.history(folder).problems[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs())
def test_any_history_of_kills_and_resumes_passes(folder, run):
    history = run.history(folder)
    assert history.problems == []
    # Its claim, checked number by number.
    consumed = [
        sequence
        for attempt in history.attempts
        for step in attempt.steps
        if history.survives(attempt, step)
        for sequence in range(step.first, step.after_last)
    ]
    done = [line for line in run.lines if line["kind"] == "step"]
    assert (history.step, history.sequences) == (done[-1]["step"], done[-1]["sequences"][1])
    assert len(consumed) == len(set(consumed)) == history.sequences - history.unrecorded * BATCH
    assert max(consumed) == history.sequences - 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs(), st.data())
def test_any_single_corruption_is_named(folder, run, data):
    lines = [dict(line) for line in run.lines]
    steps = [n for n, line in enumerate(lines) if line["kind"] == "step"]
    middle = [n for n in steps if n + 1 in steps]
    kinds = ["drop", "duplicate", "shift", "cursor"]
    how = data.draw(st.sampled_from([*kinds, *(run.counted * ["mark", "unmark", "counter"])]))
    if how == "drop":
        del lines[data.draw(st.sampled_from(middle))]
    elif how == "duplicate":
        n = data.draw(st.sampled_from(steps))
        lines.insert(n, lines[n])
    elif how == "shift":
        n = data.draw(st.sampled_from(steps))
        by = data.draw(st.sampled_from([-BATCH, -1, 1, BATCH]))
        lines[n]["sequences"] = [value + by for value in lines[n]["sequences"]]
    elif how == "mark":
        fine = [n for n in steps if "skipped" not in lines[n]]
        assume(fine)
        reason = data.draw(st.sampled_from([{}, {"why": "loss"}, {"why": "norm"}]))
        lines[data.draw(st.sampled_from(fine))].update({"skipped": True, **reason})
    elif how == "unmark":
        skipped = [n for n in steps if "skipped" in lines[n]]
        assume(skipped)
        del lines[data.draw(st.sampled_from(skipped))]["skipped"]
    elif how == "counter":
        counts = [n for n, line in enumerate(lines) if "rollbacks" in line]
        n, name = data.draw(st.sampled_from(counts)), data.draw(st.sampled_from(COUNTERS))
        lines[n][name] += data.draw(st.sampled_from([-1, 2]))
    else:
        starts = [n for n, line in enumerate(lines) if line["kind"] == "start"]
        n = data.draw(st.sampled_from(starts))
        lines[n]["sequences"] += data.draw(st.sampled_from([-BATCH, -1, 1, BATCH]))
    try:
        problems = run.history(folder, lines).problems
    except LedgerError as error:  # the only start line says what none says
        problems = [str(error)] * ("line 1: a start line with" in str(error))
    assert problems


# --- where the time went ---------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs())
def test_every_second_is_accounted_for_once(folder, run):
    history = run.history(folder)
    account, trust = goodput(history), reliability(history)
    parts = [account.kept, account.redone, account.skipped, account.stalled, account.between]
    parts += [account.idle, *account.starting.values()]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(account.wall, abs=1e-3)
    assert trust.failures == sum(
        history.failed(attempt) is not None for attempt in history.attempts
    )
    assert all(seconds > 0 for seconds in trust.recoveries.values())
    if "boot-2" not in {line.get("boot") for line in run.lines}:  # no jump of a clock shows
        assert account.wall == pytest.approx(run.now - (run.lines[0]["at"] - 3.0), abs=1e-3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs(), st.floats(0.05, 0.95))
def test_reading_on_is_as_reading_all(folder, run, share):
    """Also from the middle of a line on; and a file in its place is read from the beginning."""
    whole = run.history(folder)
    path = folder / "ledger.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\n") + 1 + int(share * len(data))])
    reader = LedgerReader(folder)
    reader.read()
    with path.open("wb") as file:  # the same file, as by its writer
        file.write(data)
    followed = reader.read()
    path.rename(folder / "aside.jsonl")
    path.write_bytes(data)
    for other in (followed, reader.read()):
        assert (other.problems, other.kept) == (whole.problems, whole.kept)
        assert goodput(other) == goodput(whole)
        steps = [repr(list(one.steps)) for one in other.attempts]  # NaN is not NaN
        assert steps == [repr(list(one.steps)) for one in whole.attempts]


def test_a_failure_and_its_cost(folder):
    run = Run().start(0).steps(1, 10)
    run.add("save", step=8, ok=True, seconds=1.0, stall=0.2)
    cause = run.failure(after=0.25, detect=0.15)
    run.start(8, cause=cause, startup=1.0).steps(9, 20)
    history = run.history(folder)
    account, trust = goodput(history), reliability(history)
    assert account.kept == pytest.approx(20 * 0.5)
    assert account.redone == pytest.approx(2 * 0.5 + 0.25)
    assert account.starting == pytest.approx(
        {"imports": 3.0, "load": 1.0, "detect and restart": 0.15}
        | {"imports": 2.25 + 0.75, "load": 0.75 + 0.25}
    )
    # Detected, started, steps 9 and 10 done again, step 11 is the first new one.
    assert trust.mttr == pytest.approx(0.15 + 1.0 + 3 * 0.5)
    assert (trust.failures, trust.recoveries) == (1, {2: trust.mttr})
    assert trust.mtbf == pytest.approx(account.wall)
    assert history.failed(history.attempts[0]) == "rank 1: SIGKILL"


def test_days_between_attempts_are_not_time_up(folder):
    run = Run().start(0).steps(1, 10)
    run.add("end", code=130, reason="interrupted", step=10)
    run.now += 3 * 86400
    history = run.start(10).steps(11, 20).history(folder)
    account = goodput(history)
    assert account.idle == pytest.approx(3 * 86400)
    assert account.share_of_uptime == pytest.approx(10 / 16)
    assert len(idle_spans(history)) == 1
    assert reliability(history).failures == 0
    assert reliability(history).node_seconds == pytest.approx(16)


def test_phases_that_reach_back_before_the_attempt_are_cut(folder):
    """A process forked later knows when its job was launched."""
    run = Run().start(0).steps(1, 10)
    run.start(10, cause=run.failure(), startup=0.5)
    run.lines[-1]["phases"] = {"launcher": 500.0, "load": 0.5}
    run.steps(11, 12)
    account = goodput(run.history(folder))
    assert account.starting["load"] == pytest.approx(0.75 + 0.5)
    assert account.starting["launcher"] < 1


def test_reading_is_fast_enough_for_a_restart(folder):
    """A long ledger costs a few times what its JSON does: 4 times was seen."""
    run = Run().start(0).steps(1, 10_000, seconds=0.01)
    began = time.process_time()
    for line in run.lines:
        json.loads(json.dumps(line))
    plain = time.process_time() - began
    assert run.history(folder).step == 10_000
    assert time.process_time() - began - plain < 15 * plain


def test_a_ledger_knows_how_far_the_attempts_before_came(tmp_path):
    path, start = tmp_path / "ledger.jsonl", {"sequences": 0, "global_batch": 8, "world_size": 1}
    with Ledger(path, StartLine(step=0, **start)) as ledger:
        assert ledger.reached == 0
        ledger.step(1, 0, 8, 0.1)
        ledger.step(2, 8, 16, 0.1)
        ledger.save(2, 0.1)
    with path.open("a") as file:
        file.write('{"kind":"step","st')
    assert Ledger(path, StartLine(step=1, **start)).reached == 2
