"""Two launches into one folder: the second is refused, unless the first is dead."""

import json
import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.node import occupancy
from elastic.node.occupancy import RECORD, NodeDirectoryHold, NodeDirectoryOccupiedError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(occupancy, "BEAT_SECONDS", 0.05)


@contextmanager
def another(folder, job="first"):
    """A process that trains in a folder; its process id."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        NodeDirectoryHold(folder, job)
        os.write(writing, b"!")
        signal.pause()
    os.close(writing)
    assert os.read(reading, 1)
    os.close(reading)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_second_launch_is_told_who_the_first_is(tmp_path, monkeypatch):
    with another(tmp_path) as pid:
        with pytest.raises(
            NodeDirectoryOccupiedError, match=rf"process {pid} on {os.uname().nodename}, since"
        ):
            NodeDirectoryHold(tmp_path, "second")
        NodeDirectoryHold(tmp_path, "first").release()  # the next round of the same job
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(NodeDirectoryOccupiedError):  # who is stopped is not dead
            NodeDirectoryHold(tmp_path, "second")
    monkeypatch.setattr(occupancy, "BEAT_SECONDS", 10.0)
    started = time.monotonic()
    NodeDirectoryHold(tmp_path, "second").release()
    assert time.monotonic() - started < 10, "the kernel says at once that it is dead"
    assert not (tmp_path / RECORD).exists()


def test_who_is_about_to_leave_is_waited_for(tmp_path, monkeypatch):
    """A node that hands the folder to another of its job drops its record first, then its lock."""
    with another(tmp_path) as pid:
        os.kill(pid, signal.SIGSTOP)  # it renews nothing
        (tmp_path / RECORD).unlink()
        with pytest.raises(NodeDirectoryOccupiedError, match="another process trains there"):
            NodeDirectoryHold(tmp_path, "first")  # it does not leave
        monkeypatch.setattr(occupancy, "BEAT_SECONDS", 2.0)
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        NodeDirectoryHold(tmp_path, "first").release()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_is_told_too(monkeypatch):
    """The lock is closed to him, and the record is not."""
    monkeypatch.setattr(occupancy, "BEAT_SECONDS", 0.2)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        with another(Path(folder)) as first:
            pid = os.fork()
            if pid == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                try:
                    NodeDirectoryHold(Path(folder), "second")
                except NodeDirectoryOccupiedError as told:
                    os._exit(7 if f"process {first} on" in str(told) else 8)
                os._exit(9)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_on_another_machine_a_record_that_changes_is_a_life(tmp_path, monkeypatch):
    # Two locks, as where the filesystem does not pass them on to other machines.
    monkeypatch.setattr(occupancy, "LOCK", "lock of this machine")
    monkeypatch.setattr(occupancy, "boot_id", lambda: "another machine")
    with another(tmp_path) as pid:
        monkeypatch.setattr(occupancy, "LOCK", "lock of that machine")
        monkeypatch.setattr(occupancy, "boot_id", lambda: "that machine")
        with monkeypatch.context() as patient:  # a busy machine may keep it from beating for long
            patient.setattr(occupancy, "BEAT_SECONDS", 2.0)
            with pytest.raises(NodeDirectoryOccupiedError, match=f"process {pid} on"):
                NodeDirectoryHold(tmp_path, "second")
        os.kill(pid, signal.SIGSTOP)
        NodeDirectoryHold(tmp_path, "second").release()


def test_a_launch_that_wakes_up_after_another_took_over_leaves_it_alone(tmp_path):
    with another(tmp_path):
        pass
    first = NodeDirectoryHold(tmp_path, "first")
    record = {**json.loads((tmp_path / RECORD).read_text()), "job": "second", "pid": 1}
    (tmp_path / RECORD).write_text(json.dumps(record))
    time.sleep(0.2)
    first.release()
    assert json.loads((tmp_path / RECORD).read_text()) == record
