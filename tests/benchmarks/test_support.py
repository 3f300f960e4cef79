"""What the benchmark programs share."""

import subprocess
import sys
from pathlib import Path

from benchmarks.support import ROOT, environment, python_path, run
from benchmarks.support.processes import CpuCount
from tests.checkpointing.faults import until


def test_a_job_finds_what_was_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "from_a_wheel.py").write_text("here = 'here'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "carried"))
    seen = "import from_a_wheel, trainer; print(from_a_wheel.here)"
    assert run([sys.executable, "-c", seen], tmp_path) == "here\n"
    assert python_path(ROOT, "data") == f"{ROOT}:data:{tmp_path / 'carried'}"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path(ROOT) == str(ROOT)


def test_whoever_ends_a_benchmark_ends_what_it_started(tmp_path):
    """Also grandchildren, whose parent does not tell them."""
    starts = "from benchmarks.support import end_children_at_sigterm, run; "
    starts += (
        "end_children_at_sigterm(); run(['sh', '-c', 'sleep 99 & echo $$ $! > pids; wait'], '.')"
    )
    command = [sys.executable, "-c", starts]
    with subprocess.Popen(command, cwd=tmp_path, env=environment()) as benchmark:
        pids = tmp_path / "pids"
        assert until(lambda: pids.exists() and pids.read_text().endswith("\n"), 60)
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + 15
    assert until(lambda: not [pid for pid in pids.read_text().split() if alive(pid)], 5)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_cpu_time_of_a_process_that_ended_is_not_taken_back():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        taken = CpuCount(lambda: [busy.pid])
        assert until(lambda: taken() > 0.05, 20)
        before = taken()
        busy.kill()
    assert taken() >= before
