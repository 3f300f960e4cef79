"""What a terminal is shown of texts by others."""

import io
import subprocess
import sys

import pytest

from trainer import text
from trainer.text import show_only_visible, visible

PLAIN = "Straße, 東京\u3000大阪, नमस्ते, سلام, 👩\u200d🚀, e\u0301\n\ttab"


def test_text_of_all_languages_stays_as_it_is():
    assert visible(PLAIN) == PLAIN


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("done\roops", r"done\roops"),
        ("a\u202egnp.exe", r"a\u202egnp.exe"),
        ("\u2066x\u2069\u200f", r"\u2066x\u2069\u200f"),
        ("\x00\x08\x7f", r"\x00\x08\x7f"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_steers_a_terminal_is_made_visible(given, shown):
    assert visible(given) == shown


def test_streams_write_only_what_is_visible(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(text.sys, "stdout", out)
    monkeypatch.setattr(text.sys, "stderr", err)
    show_only_visible()
    show_only_visible()  # once is enough
    print("a\x1b[31m", end="")
    print("5%\r10%\x1b[31m", file=sys.stderr, end="")
    assert out.getvalue() == r"a\x1b[31m"
    assert err.getvalue() == "5%\r10%\\x1b[31m"  # progress bars go back to the line's beginning


def test_a_command_shows_escapes_that_stand_in_files(tmp_path):
    (tmp_path / "ledger.jsonl").write_text(
        '{"kind":"start","step":0,"sequences":0,"global_batch":1,"world_size":1,"at":1,'
        '"monotonic":1,"boot":"","pid":1,"attempt":"a"}\n'
        '{"kind":"end","code":1,"reason":"\\u001b]0;owned\\u0007 \\u202e","step":0,"after":1,'
        '"attempt":"a"}\n'
    )
    command = [sys.executable, "-m", "trainer.cli", "report", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert r"\x1b]0;owned\x07 \u202e" in done.stdout
    assert not {"\x1b", "\x07", "\u202e"} & {*done.stdout, *done.stderr}
