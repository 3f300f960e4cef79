"""Output that cannot be written is dropped: real pipes, real files, real processes."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from elastic import process
from elastic.process import _LossyOutput

PROGRAM = """
import sys
from elastic.process import lost_output, tolerate_lost_output
tolerate_lost_output()
for line in range(5000):
    print("line", line)
print("error", file=sys.stderr, flush=True)
sys.stdout.flush()
open("lost", "w").write(lost_output())
"""


def run(folder, redirection, program=PROGRAM, options=""):
    """(exit code of a program, what it says of its lost output)."""
    command = (
        f'"{sys.executable}" -P {options} -c "$PROGRAM" {redirection}; exit ${{PIPESTATUS[0]}}'
    )
    environment = {
        **os.environ,
        "PROGRAM": program,
        "PYTHONUNBUFFERED": "",
        "PYTHONPATH": str(Path(process.__file__).parents[1]),
    }
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, check=False)
    return done.returncode, (folder / "lost").read_text()


@pytest.mark.parametrize(
    ("redirection", "lost"),
    [
        ("2>&1 | true", "standard output: Broken pipe, standard error: Broken pipe"),
        (">/dev/full", "standard output: No space left on device"),
        (">&- 2>&- <&-", ""),
        (">/dev/null", ""),
    ],
)
@pytest.mark.parametrize("options", ["", "-u"])
def test_a_program_ends_well_whatever_becomes_of_its_output(tmp_path, redirection, lost, options):
    assert run(tmp_path, redirection, options=options) == (0, lost)


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path):
    program = PROGRAM + "open('lost', 'w').write(str(open('file', 'w').fileno() > 2))"
    assert run(tmp_path, ">&- 2>&- <&-", program) == (0, "True")


def test_output_resumes_with_a_note_of_what_is_missing(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        raw = _LossyOutput(log.fileno())
        assert raw.write(b"one\ntw") == 6
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))  # as a full disk cuts a write short
        try:
            assert (raw.write(b"o\nthree\n"), raw.write(b"four\n")) == (8, 5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert raw.why == "File too large"
        raw.write(b"five\n")
        raw.write(b"six\n")
    assert (tmp_path / "log").read_bytes() == (
        b"one\ntwo\n[11 bytes of output are missing here: File too large]\nfive\nsix\n"
    )


def test_a_reader_that_does_not_read_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(process, "PATIENCE_SECONDS", 0.1)
    reader, writer = os.pipe()
    raw = _LossyOutput(writer)
    text = b"x" * 99 + b"\n"
    for _ in range(2000):  # more than a pipe holds
        raw.write(text)
    assert raw.why == "nobody reads it"
    os.set_blocking(reader, False)
    got = len(os.read(reader, 1 << 20))
    raw.write(b"again\n")
    missing = f"[{2000 * len(text) - got} bytes of output are missing here: nobody reads it]\n"
    assert os.read(reader, 1 << 20).decode().endswith(missing + "again\n")
    os.close(reader)
    os.close(writer)


def test_a_program_of_a_user_prints_at_once(tmp_path):
    program = (
        "import os\n"
        "from elastic.process import tolerate_lost_output, unbuffer_output\n"
        "tolerate_lost_output()\n"
        "unbuffer_output()\n"
        "print('loss 3', end='')\n"
        "open('lost', 'w').close()\n"
        "os._exit(0)\n"  # what a buffer holds is lost
    )
    assert run(tmp_path, "| cat > out", program) == (0, "")
    assert (tmp_path / "out").read_text() == "loss 3"
