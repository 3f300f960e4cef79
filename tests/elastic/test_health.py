"""A machine that is fit finds nothing, fast; one that is not is found out, and never waited for."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from elastic import health
from elastic.health import (
    GOLDEN,
    check_compute,
    check_gpus,
    check_node,
    check_storage,
    pattern,
)


def check(directory=None, shm=1, store=None, device="cpu", **options):
    return [str(found) for found in check_node(directory, shm, store, device, **options)]


def problems(findings):
    return [f"{at}: {problem}" for at, problem in findings if problem]


def test_a_healthy_machine_has_no_problem(tmp_path):
    assert check(tmp_path / "not" / "there" / "yet", store=lambda: 0.01) == []
    assert list(tmp_path.iterdir()) == []


def test_every_problem_is_told_at_once():
    def lost():
        raise OSError("nobody there")

    found = check(Path("/proc/self"), shm=1 << 60, store=lost)
    assert len(found) == 3
    assert found[0].startswith("/dev/shm: ")
    assert "in a container, raise --shm-size" in found[0]
    assert found[1].startswith("/proc/self: cannot write a file")
    assert found[2] == "store: OSError: nobody there"


def test_a_slow_store_is_a_problem_and_a_hanging_one_is_not_waited_for():
    assert check(store=lambda: 3.0) == ["store: a round trip takes 3.0 s, more than 1 s"]
    started = time.monotonic()
    found = check(store=lambda: time.sleep(60) or 0.0, seconds=1)
    assert "store: no answer within 1 s" in found
    assert time.monotonic() - started < 30


@pytest.mark.skipif(
    not os.access("/dev/fuse", os.W_OK) or shutil.which("fusermount3") is None,
    reason="needs /dev/fuse and fuse3",
)
def test_a_hung_filesystem_is_found_and_not_waited_for(tmp_path):
    """The server of the filesystem is stopped: whoever touches it waits and cannot be killed."""
    mount, control = tmp_path / "mount", tmp_path / "control"
    (tmp_path / "root").mkdir()
    mount.mkdir()
    control.write_text("{}")
    command = [sys.executable, "-m", "tests.checkpointing.faulty_fs"]
    server = subprocess.Popen(
        [*command, str(tmp_path / "root"), str(mount), str(control)],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while not mount.is_mount():
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip("cannot mount a filesystem")
            time.sleep(0.02)
        assert check(mount) == []
        server.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert check(mount, seconds=1.5) == [f"{mount}: no answer within 1.5 s"]
        assert time.monotonic() - started < 3
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["fusermount3", "-uz", str(mount)], check=False, stderr=subprocess.DEVNULL)
        server.kill()
        server.wait()


def test_a_full_disk_and_one_that_loses_what_is_written_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "FREE_BYTES", 1 << 60)
    assert "MiB free" in problems(check_storage(tmp_path))[0]
    monkeypatch.setattr(health, "FREE_BYTES", 0)
    monkeypatch.setattr(os, "pread", lambda *_: bytes(health.PROBE_BYTES))
    assert "not what was written" in problems(check_storage(tmp_path))[0]

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in problems(check_storage(tmp_path))[0]


def test_no_more_processes_is_a_problem(monkeypatch):
    def refused(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert check() == ["compute: BlockingIOError: [Errno 11] Resource temporarily unavailable"]


def test_a_check_that_dies_is_a_problem(monkeypatch):
    monkeypatch.setattr(health.sys, "executable", "/bin/false")
    assert check() == ["compute: its process ended with code 1: no message"]


def test_golden_values_follow_from_integers_alone():
    for size, golden in GOLDEN.items():
        left, right, rows, columns = pattern(size, np)
        assert int((rows @ left) @ (right @ columns)) == golden
    left, right, rows, columns = (part[:9].tolist() for part in pattern(512, np))
    assert [row[:3] for row in left[:2]] == [[-8, -3, 2], [-5, 1, 7]]


def test_a_core_that_computes_wrongly_is_named(monkeypatch):
    assert problems(check_compute()) == []
    monkeypatch.setitem(GOLDEN, health.SIZE, GOLDEN[health.SIZE] + 1)
    cores = sorted(os.sched_getaffinity(0))
    assert problems(check_compute()) == [
        f"core {core}: a multiplication of matrices gave a wrong result; take this machine out"
        for core in cores
    ]


def test_gpus():
    """In this process there is a GPU or there is none; in both cases the check knows."""
    import torch

    if torch.cuda.is_available():
        assert check(device="cuda") == []
    else:
        assert problems(check_gpus("auto")) == []
        assert problems(check_gpus("cuda"))[0].startswith("gpu: none is visible")
