"""`perdure report`: a run with failures, as text and as a page; the proof, by exit code."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from elastic.record.history import LedgerError, read_history
from elastic.record.ledger import Ledger, StartLine
from trainer.tools.report.html import MAX_POINTS, report_html, thin
from trainer.tools.report.report import check, clock, report
from trainer.tools.svg import ticks

PERDURE = Path(sys.executable).parent / "perdure"
BATCH = 8
DAY_ONE = 1_795_248_000.0


def write_run(folder):
    """20 steps: rank 1 is killed after step 12, steps 11 and 12 are done again on more nodes, and a
    day after step 16 the run goes on."""
    plan = [
        {"at": DAY_ONE, "steps": range(1, 13), "saved": 10, "world": 2},
        {"at": DAY_ONE + 13, "steps": range(11, 17), "saved": 16, "world": 4},
        {"at": DAY_ONE + 86400, "steps": range(17, 21), "saved": 20, "world": 2},
    ]
    for number, part in enumerate(plan):
        at, steps = part["at"], part["steps"]
        clock = iter(range(1, 1000))
        cause = {"rank": 1, "node": "n0", "step": 13, "why": "SIGKILL", "at": DAY_ONE + 12.5}
        start = StartLine(
            step=steps[0] - 1,
            sequences=(steps[0] - 1) * BATCH,
            global_batch=BATCH,
            world_size=part["world"],
            nodes=part["world"] // 2,
            source="storage" if number else "none",
            cause=cause if number == 1 else None,
            phases={"imports": 0.2, "load": 0.1},
            at=at,
            monotonic=at,
            boot="a boot",
        )
        with pytest.MonkeyPatch.context() as patch:
            # One second of its clock passes between two lines.
            patch.setattr(
                "elastic.record.ledger.clock", lambda at=at, clock=clock: at + next(clock)
            )
            with Ledger(folder / "ledger.jsonl", start) as ledger:
                for step in steps:
                    ledger.step(step, (step - 1) * BATCH, step * BATCH, 0.9)
                if number:
                    ledger.save(part["saved"], 0.4)
                    ledger.save(part["saved"] + 1, 0.1, error="No space left on device")
                    ledger.end(130 if number == 1 else 0, "interrupted" if number == 1 else "done")
        with (folder / "metrics.jsonl").open("a") as metrics:
            for second, step in enumerate(steps, 1):
                record = {"step": step, "time": at + second, "loss": 8 - step / 4}
                record |= {"tokens_per_second": 5000 + step, "peak_memory": 3e9}
                metrics.write(json.dumps(record) + "\n")
            metrics.write(json.dumps({"step": step, "time": at, "validation_loss": None}) + "\n")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 21, "ti')


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a <run> & more"
    folder.mkdir()
    write_run(folder)
    return folder


def perdure(*arguments):
    done = subprocess.run(
        [PERDURE, "report", *map(str, arguments)],
        env={**os.environ, "TZ": "UTC"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_as_text(run):
    text = report(run)
    assert "20 steps, 160 sequences, 3 attempts, world size 2 → 4 → 2" in text
    assert re.search(r"goodput 60\.8% of 29\.6 s up; 0\.0% of 24:00:\d\d h since", text)
    assert re.search(r"steps whose result survived +18\.0 s", text)
    assert re.search(r"steps lost to failures +2\.3 s", text)
    assert re.search(r"start and recovery .* imports 0\.\d s", text)
    assert "failures: 1, one every" in text
    assert "back at a new step after 3.5 s on average" in text
    assert "saves: 2, 0.40 s on average, the newest of step 20; 2 failed, the last" in text
    assert "5,011 tokens/s (median)" in text
    assert re.search(r"\n +2 .* 2 +4 +11 to 16 +step 10 from storage +3\.5 s +interrupted\n", text)
    assert re.search(r"\n +1 .* 1 +2 +1 to 12 +fresh weights +rank 1: SIGKILL\n", text)


def test_a_run_on_a_graph_counts_samples(run):
    (run / "recipe.yaml").write_text("data: {graph: data/ml100k, sources: []}\n")
    assert "5,011 samples/s (median)" in report(run)
    assert "Throughput (samples/s)" in report_html(run)


def test_on_the_console(run, tmp_path):
    code, text, _ = perdure(run, "--check")
    assert (code, text) == (
        0,
        "every sequence exactly once: 160 sequences in 20 steps over 3 attempts\n",
    )
    code, text, _ = perdure(run)
    assert code == 0
    assert "every sequence exactly once" in text
    code, text, _ = perdure(run, "--html", tmp_path / "report.html")
    assert code == 0
    assert (tmp_path / "report.html").stat().st_size > 5000

    lines = (run / "ledger.jsonl").read_text().splitlines()
    (run / "ledger.jsonl").write_text("\n".join(lines[:5] + lines[6:]) + "\n")
    code, text, _ = perdure(run, "--check")
    assert (code, text) == (
        1,
        "problem: step 6 (attempt 1, line 6) follows step 4: no record of 5\n",
    )
    code, text, error = perdure(tmp_path, "--check")
    assert (code, text) == (2, "")
    assert "ledger.jsonl: No such file or directory; give the directory of a run" in error


def test_steps_without_a_line_are_told(run):
    lines = (run / "ledger.jsonl").read_text().splitlines()
    last = next(n for n, line in enumerate(lines) if '"step":16' in line)
    after = next(n for n, line in enumerate(lines) if n > last and '"start"' in line)
    (run / "ledger.jsonl").write_text("\n".join(lines[:last] + lines[after:]) + "\n")
    fine, text = check(read_history(run))
    assert fine
    assert "not recorded: 1 step, whose" in text
    # Who dies writes nothing after it.
    (run / "ledger.jsonl").write_text("\n".join(lines[:last] + lines[last + 1 :]) + "\n")
    fine, text = check(read_history(run))
    assert fine is False
    assert text == "problem: attempt 2 saved step 16, but its record ends at step 15"


def test_the_page_needs_nothing_but_itself(run):
    page = report_html(run)
    assert not re.search(r"https?:|src=|<script|<link|@import|url\(", page)
    assert "a &lt;run&gt; &amp; more" in page
    assert "<run>" not in page
    charts = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    titles = [chart.get("aria-label") for chart in charts]
    assert [title.split()[0] for title in titles] == [
        "Loss",
        "Throughput",
        "Peak",
        "Checkpoints",
        "World",
        "Goodput",
    ]
    for chart in charts:
        _, _, width, height = map(float, chart.get("viewBox").split())
        for line in chart.iter("polyline"):
            points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
            assert points == sorted(points, key=lambda point: point[0])
            assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
        assert list(chart.iter("circle"))
    # The day in which nothing ran takes no room.
    assert "time up (s)" in page
    assert page.count('class="failure"') == 5
    assert page.count('class="restart"') == 5


def test_a_run_that_has_just_begun(tmp_path):
    Ledger(tmp_path / "ledger.jsonl", StartLine(step=0, sequences=0, global_batch=8, world_size=1))
    assert "0 steps, 0 sequences, 1 attempt" in report(tmp_path)
    assert "nothing recorded" in report_html(tmp_path)
    with pytest.raises(LedgerError):
        report(tmp_path / "elsewhere")


def test_thinning_keeps_spikes_and_order():
    points = [(float(n), 0.0) for n in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    kept = list(thin(points))
    assert len(kept) <= MAX_POINTS + 2
    assert (54_321.0, 9.0) in kept
    assert kept == sorted(kept)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.3, 2.31), (0, 9999), (5, 5), (0, 0), (-3, 8)])
def test_ticks_are_few_and_span(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low <= high <= marks[-1]
    assert 2 <= len(marks) <= 9


def test_durations_in_words():
    assert [clock(s) for s in (0.0123, 3.14, 75, 3600 * 25 + 61)] == [
        "12 ms",
        "3.1 s",
        "1:15 min",
        "25:01:01 h",
    ]
