"""Simulated goodput: arithmetic by hand, and counting step by step."""

import math
from dataclasses import replace
from itertools import chain, repeat
from random import Random

import pytest

from benchmarks.support.failure_traces import KINDS, TRACES
from benchmarks.support.simulated_run import JOIN, Job, System, Window, simulate

JOB = Job(nodes=32, step=10.0, replica_nodes=8, replica_sequences=8, repair_days=0.5)
SYSTEM = System(
    name="by hand",
    stall=1.0,
    save=1.0,
    own_copy=0.0,
    peer_copy=20.0,
    written=150.0,
    memory_load=0.0,
    storage_load=7.0,
    restart=dict.fromkeys((*KINDS, JOIN), 50.0),
    checkpoint_steps=10,
)


@pytest.mark.parametrize(
    ("kind", "kept", "redone", "saving", "restarting"),
    [
        # Checkpoints begin at 100, 201, 302, 403 and 504 s. The failure at 555 s comes after 55
        # steps, so the last costs 5 steps, and the one at 403 s, the newest in storage, 15.
        ("process", 890, 5 * 10 + 2, 5 + 3, 50),
        ("node", 890, 5 * 10 + 2, 5 + 3, 50),
        ("rack", 780, 15 * 10 + 5, 5 + 3, 57),
        ("notice", 940, 1, 5 + 4, 50),
    ],
)
def test_goodput_is_that_by_hand(kind, kept, redone, saving, restarting):
    failures = chain([(555.0, kind)], repeat((math.inf, kind)))
    account = simulate(SYSTEM, JOB, failures, 1000.0, Random(0))
    assert account.kept == pytest.approx(kept)
    assert account.redone == pytest.approx(redone)
    assert account.restarting == restarting
    assert account.saving == pytest.approx(saving)
    assert account.goodput == pytest.approx(kept / 1000)


def test_windows_count_as_a_loop_does():
    draw = Random(7)
    for _ in range(200):
        first, later = draw.randint(1, 9), draw.randint(1, 9)
        window = Window(begin=5.0, step=1.0, first=first, later=later, save=draw.choice([0.25, 3]))
        at, now, steps, saves = draw.uniform(0, 80), 5.0, 0, 0
        while now + 1.0 <= at:
            now, steps = now + 1.0, steps + 1
            if steps == first + saves * later:
                assert window.saved(saves + 1) == steps
                saves += 1
                now += window.save
        assert (window.steps(at), window.saves(at)) == (steps, saves)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_time_adds_up_without_spares(trace):
    system = replace(SYSTEM, spares=False, checkpoint_steps=0, snapshot_steps=3)
    one, other = (
        simulate(system, JOB, trace.failures(1024, Random("a")), 2e6, Random("b")) for _ in range(2)
    )
    parts = one.kept + one.redone + one.saving + one.restarting + one.short
    assert parts == pytest.approx(one.wall)
    assert one == other
    assert one.short > 0
    assert (
        0
        < one.goodput
        < simulate(
            replace(system, spares=True), JOB, trace.failures(1024, Random("a")), 2e6, Random("b")
        ).goodput
    )


def test_fewer_replicas_share_the_sequences():
    assert [JOB.slowdown(away) for away in (0, 1, 8, 9)] == [1, 11 / 8, 11 / 8, 16 / 8]
