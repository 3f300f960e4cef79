"""`perdure report`: a run with failures, as text and as a page; the proof, by exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.record.history import LedgerError, read_history
from elastic.record.ledger import Ledger, StartLine
from trainer.cli.main import main
from trainer.tools.report.report import check, clock, report

PERDURE = Path(sys.executable).parent / "perdure"


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
    assert re.search(
        r"\n +2 .* 2 +4 +11 to 16 +step 10 from storage +3\.5 s +Stopped by Ctrl-C\n", text
    )
    assert re.search(r"\n +1 .* 1 +2 +1 to 12 +fresh weights +Rank 1 on n0 was killed", text)


def test_a_run_on_a_graph_counts_samples(run):
    (run / "recipe.yaml").write_text("data: {graph: data/ml100k, sources: []}\n")
    assert "5,011 samples/s (median)" in report(run)


def test_on_the_console(run, tmp_path, monkeypatch, capsys):
    code, text, _ = perdure(run, "--check")
    assert (code, text) == (
        0,
        "every sequence exactly once: 160 sequences in 20 steps over 3 attempts\n",
    )
    assert "every sequence exactly once" in report(run)
    lines = (run / "ledger.jsonl").read_text().splitlines()
    (run / "ledger.jsonl").write_text("\n".join(lines[:5] + lines[6:]) + "\n")
    code, text, _ = perdure(run, "--check")
    assert (code, text) == (
        1,
        "problem: step 6 (attempt 1, line 6) follows step 4: no record of 5\n",
    )
    monkeypatch.setattr(sys, "argv", ["perdure", "report", str(tmp_path), "--check"])
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    with pytest.raises(SystemExit, match="2"):
        main()
    text, error = capsys.readouterr()
    assert text == ""
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


def test_a_run_that_has_just_begun(tmp_path):
    Ledger(tmp_path / "ledger.jsonl", StartLine(step=0, sequences=0, global_batch=8, world_size=1))
    assert "0 steps, 0 sequences, 1 attempt" in report(tmp_path)
    with pytest.raises(LedgerError):
        report(tmp_path / "elsewhere")


def test_durations_in_words():
    assert [clock(s) for s in (0.0123, 3.14, 75, 3600 * 25 + 61)] == [
        "12 ms",
        "3.1 s",
        "1:15 min",
        "25:01:01 h",
    ]
