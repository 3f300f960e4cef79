"""What a rank could not help is not held against it, on machines as busy as they come."""

import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from elastic.node.progress import NodeRankProgress
from elastic.node.vitals import (
    INTERVAL_SECONDS,
    MAX_STARVED_SHARE,
    NodeProcessCounters,
    NodeRankVitals,
    NodeVitalsWatch,
    read_vitals,
)
from elastic.node.watchdog import (
    BUSY_SECONDS,
    MIN_SECONDS,
    NodePhaseTimes,
    NodeRankStatus,
    blame,
    overdue,
    rank_statuses,
)

HEALTHY = NodeProcessCounters(stopped=False, runs=9, worked=1.0, starved=0.0)


def watch(*vitals, entered=0.0):
    """Signs of a rank that was looked at a second after it entered its phase, and each second from
    then on."""
    vigil = NodeVitalsWatch()
    return [vigil.note(0, 7, entered, entered + 1 + n, one) for n, one in enumerate(vitals)]


def taught():
    """Times of a node whose steps take 0.1 s."""
    times = NodePhaseTimes()
    for _ in range(20):
        times.add("step", 0.1)
    times.follow({0: NodeRankProgress(1, "step", 0.0, noticed=False)}, 0.0)
    return times


# --- recorded vitals -------------------------------------------------------------------------


def test_a_rank_without_a_core_has_used_no_time_of_its_own():
    signs = watch(*[replace(HEALTHY, starved=0.9 * n, worked=1 + 0.1 * n) for n in range(31)])
    assert signs[-1] == NodeRankVitals(starved=pytest.approx(27.0), busy=True)
    progress = {0: NodeRankProgress(30, "step", 0.0, noticed=False)}
    asleep = {0: replace(signs[-1], busy=False)}
    assert overdue(progress, 31.0, taught()), "by the clock on the wall its time is up"
    assert not overdue(progress, 30.0, taught(), asleep)
    assert overdue(progress, 27.0 + MIN_SECONDS + 0.1, taught(), asleep)


def test_a_tenth_of_all_time_is_its_own():
    """Many threads wait for more time than there is; who spins in them for ever is found."""
    signs = watch(HEALTHY, replace(HEALTHY, starved=900.0))
    assert signs[-1].starved == pytest.approx(MAX_STARVED_SHARE * 2)


def test_a_rank_that_computes_has_more_time():
    spinning = {0: watch(HEALTHY, replace(HEALTHY, worked=1.9))[-1]}
    waiting = {0: watch(HEALTHY, replace(HEALTHY, worked=1.1))[-1]}
    assert (spinning[0].busy, waiting[0].busy) == (True, False)
    progress = {0: NodeRankProgress(30, "step", 0.0, noticed=False)}
    assert overdue(progress, MIN_SECONDS + 0.1, taught(), waiting)
    assert not overdue(progress, BUSY_SECONDS, taught(), spinning)
    assert overdue(progress, BUSY_SECONDS + 0.1, taught(), spinning)


def test_who_was_stopped_and_went_on_between_two_looks_is_not_stopped():
    stopped = replace(HEALTHY, stopped=True)
    assert [one.stopped for one in watch(HEALTHY, *[stopped] * 4)] == [0, 0, 1, 2, 3]
    turns = [replace(stopped, runs=n) for n in range(5)]
    assert not any(one.stopped for one in watch(HEALTHY, *turns))


# --- blame -----------------------------------------------------------------------------------


def standing(rank, where, phase="step", seconds=9.0, limit=5.0, starved=0.0):
    return NodeRankStatus(rank, 7, phase, seconds, limit, where, starved)


def test_who_is_stopped_is_to_blame_in_every_phase():
    progress = {
        0: NodeRankProgress(7, "reduce", 0.0, noticed=False),
        1: NodeRankProgress(7, "data", 0.0, noticed=False),
    }
    found = rank_statuses(
        progress, 5.0, taught(), signs={1: NodeRankVitals(stopped=4.0, starved=3.0)}
    )
    assert blame(found).ranks == (1,)
    assert blame(found).reason.endswith("stopped by a signal")
    short = rank_statuses(progress, 5.0, taught(), signs={1: NodeRankVitals(stopped=2.0)})
    assert blame(short) is None, "it waits for data, and was stopped for a moment"


def test_who_has_no_core_is_waited_for():
    waits = standing(0, "collective")
    assert blame([waits, standing(1, "elsewhere")]).ranks == (1,)
    assert blame([waits, standing(1, "elsewhere", starved=6.0)]) is None
    assert blame([standing(0, "collective", "reduce"), standing(1, "silent", starved=6.0)]) is None


def test_ranks_in_one_place_wait_for_the_cores_of_all_of_them():
    inside = [standing(rank, "collective", starved=1.5) for rank in range(3)]
    assert blame(inside) is None
    assert blame([replace(one, seconds=9.6) for one in inside]).ranks == ()
    assert blame([*inside, standing(3, "collective", seconds=1.0)]) is None, "one has just come"


def test_a_world_of_one_rank_has_no_others():
    assert blame([standing(0, "unclear")]).reason.endswith("; it is the only one")


# --- real processes --------------------------------------------------------------------------


@contextmanager
def processes(*works):
    """Process ids of forks that do these works on one core, and end with the block."""
    core = {min(os.sched_getaffinity(0))}
    pids = []
    try:
        for work in works:
            pid = os.fork()
            if pid == 0:
                os.sched_setaffinity(0, core)
                work()
                os._exit(0)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def spin():
    while True:
        pass


def sleep():
    time.sleep(60)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def test_the_kernel_tells_who_spins_sleeps_and_is_stopped():
    with processes(spin, spin, sleep, stop) as pids:
        ranks = dict(enumerate(pids))
        progress = {rank: NodeRankProgress(1, "step", time.monotonic(), False) for rank in ranks}
        assert NodeVitalsWatch().look(ranks, progress, time.monotonic()) == dict.fromkeys(
            ranks, NodeRankVitals()
        )
        vigil, end = NodeVitalsWatch(), time.monotonic() + 2
        while time.monotonic() < end:
            signs = vigil.look(ranks, progress, time.monotonic())
            time.sleep(INTERVAL_SECONDS / 2)
    assert [signs[rank].busy for rank in ranks] == [True, True, False, False]
    assert all(signs[rank].starved > 0.3 for rank in (0, 1))
    assert all(signs[rank].starved < signs[0].starved / 2 for rank in (2, 3))
    assert [signs[rank].stopped > 0.9 for rank in ranks] == [False, False, False, True]
    assert read_vitals(pids[0]) is None
