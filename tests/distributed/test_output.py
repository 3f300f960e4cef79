"""Runs whose terminal is closed, and whose disk is full: under real terminals."""

import json
import os
import pty
import resource
import signal
import time

import pytest

from benchmarks.support import python_path
from elastic.record.history import read_history
from lab.local_nodes import LocalNode
from tests.distributed.jobs import ROOT, Forked, soak, wait_for_memory


class Terminal:
    """A `perdure train` that leads the session of a terminal of its own."""

    def __init__(self, workspace, log, hangup, *overrides):
        self._master, self._slave = pty.openpty()
        command = ["tests.distributed.on_terminal", os.ttyname(self._slave), hangup, "trainer.cli"]
        command += ["train", "recipe.yaml", *overrides]
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT, workspace)}
        self.process = Forked(command, workspace, environment, log)
        os.set_blocking(self._master, False)
        self.node = LocalNode(0, self.process, log)
        self.text = ""

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            try:
                self.text += os.read(self._master, 1 << 16).decode()
            except OSError:  # there is nothing to read
                time.sleep(0.01)
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text

    def at_step(self, step):
        found = self.node.progress(0)
        return found is not None and found.step >= step

    def close(self):
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal(workspace, tmp_path):
    """terminal(hangup, *overrides) → Terminal; `hangup`: what SIGHUP does."""
    started = []

    def terminal(hangup, *overrides):
        started.append(Terminal(workspace, tmp_path / "log", hangup, *overrides))
        return started[-1]

    yield terminal
    for one in started:
        one.node.kill()


def ledger(run):
    """Lines of a ledger, but for what is torn."""
    found = []
    for line in (run / "ledger.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def test_a_closed_terminal_is_a_notice(terminal, workspace):
    run = workspace / "closed"
    shell = terminal("SIG_DFL", "run.dir=closed", "run.steps=100000")
    shell.until(lambda: shell.at_step(4))
    shell.close()
    assert shell.process.wait(30) == 75
    last = read_history(run).step
    assert (run / f"checkpoints/step-{last:08}").exists()
    assert [line["code"] for line in ledger(run) if line["kind"] == "end"] == [76]


@soak
def test_under_nohup_a_run_outlives_its_terminal_and_a_full_disk(terminal, workspace):
    """The disk is full for rank 0 alone: no file of its process grows. It is killed meanwhile."""
    run = workspace / "nohup"
    options = "run.dir=nohup", "run.steps=100000", "elastic.snapshot_every=1", "run.log_every=5"
    shell = terminal("SIG_IGN", *options)
    shell.until(lambda: shell.at_step(4))
    shell.close()
    os.kill(shell.process.pid, signal.SIGHUP)
    lost = time.monotonic() + 30
    while not any(line.get("event") == "output lost" for line in ledger(run)):
        assert time.monotonic() < lost
        time.sleep(0.01)
    size, victim = (run / "ledger.jsonl").stat().st_size, shell.node.trainers()[0]
    resource.prlimit(victim, resource.RLIMIT_FSIZE, (size + 50, resource.RLIM_INFINITY))
    reached = shell.node.progress(0).step
    wait_for_memory(run, reached + 20)
    known = read_history(run).step
    assert known <= reached + 1, "the ledger was not full"
    os.kill(victim, signal.SIGKILL)
    while len(read_history(run).attempts) < 2:
        assert time.monotonic() < lost + 30
        time.sleep(0.01)
    os.kill(shell.process.pid, signal.SIGTERM)
    assert shell.process.wait(30) == 75
    history = read_history(run)
    assert history.problems == []
    assert history.attempts[1].start.step >= reached + 20
    assert history.attempts[1].start.source == "memory"
    assert history.unrecorded == 0
    lines = (run / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines))
