"""A machine that is fit finds nothing, fast; one that is not is found out, and never waited for."""

import errno
import os
import subprocess
import time

import numpy as np

from elastic.group import health
from elastic.group.health import (
    GOLDEN,
    check_compute,
    check_gpus,
    check_node,
    pattern,
)


def check(store=lambda: 0.01, **options):
    return [str(found) for found in check_node(store, **options).problems]


def problems(findings):
    return [f"{at}: {problem}" for at, problem in findings if problem]


def test_a_healthy_machine_has_no_problem():
    assert check() == []


def test_every_problem_is_told_at_once(monkeypatch):
    def lost():
        raise OSError("nobody there")

    monkeypatch.setattr(health.sys, "executable", "/bin/false")
    assert check(store=lost) == [
        "compute: its process ended with code 1: no message",
        "store: OSError: nobody there",
    ]


def test_what_is_slow_is_told_and_what_others_would_wait_for_keeps_a_node_out(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    (tmp_path / "loop").symlink_to("loop")
    found = check_node(
        lambda: 0.01, folders={"run.dir": f"{tmp_path}/loop"}, network=True, root=tmp_path
    ).problems
    assert [(one.check, one.refuses) for one in found] == [("run.dir", True), ("network", False)]


def test_a_slow_store_is_a_problem_and_a_hanging_one_is_not_waited_for():
    (slow,) = check(store=lambda: 3.0)
    assert slow.startswith("store: a round trip to the job's store takes 3.0 s, more than 1 s")
    started = time.monotonic()
    found = check(store=lambda: time.sleep(60) or 0.0, seconds=1)
    assert "store: no answer within 1 s" in found
    assert time.monotonic() - started < 30


def test_a_check_that_hangs_is_found_and_not_waited_for(tmp_path, monkeypatch):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(health.sys, "executable", str(hanging))
    started = time.monotonic()
    assert check(seconds=1.5) == ["compute: no answer within 1.5 s"]
    assert time.monotonic() - started < 30


def test_no_more_processes_is_a_problem(monkeypatch):
    def refused(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert check() == ["compute: BlockingIOError: [Errno 11] Resource temporarily unavailable"]


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
    """In this process there is a GPU or there is none; in both cases nothing is wrong with it."""
    assert problems(check_gpus()) == []
