"""A rank that hangs is found, by how far it is and, between equals, by its stack."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkpointing.options import CheckpointOptions
from elastic.node.exchange import received
from elastic.node.progress import PHASES, NodeProgressPage, NodeRankProgress, Pulse
from elastic.node.vitals import (
    NodeRankVitals,
    classify_dump,
    in_collective,
    is_compiling,
    register_dumps,
    take_dumps,
)
from elastic.node.watchdog import (
    MIN_SECONDS,
    ORDER,
    NodePhaseTimes,
    NodeRankStatus,
    blame,
    overdue,
    rank_statuses,
)
from tests.checkpointing.faults import Job, until


def at(step, phase="step", when=0.0):
    return NodeRankProgress(step, phase, when, noticed=False)


def standing(rank, step, phase="step", seconds=9.0, where="unknown"):
    return NodeRankStatus(rank, step, phase, seconds, limit=5.0, where=where)


def taught(step_seconds, steps=20, **options):
    """The times of a node whose rank 0 has done some steps, and the time afterwards."""
    times = NodePhaseTimes(**options)
    times.begin(0)
    now = 0.0
    for step in range(1, steps + 1):
        times.follow({0: at(step, when=now)}, now)
        now += step_seconds
    return times, now


# --- time-outs -------------------------------------------------------------------------------


def test_every_phase_has_its_place():
    assert set(PHASES) <= set(ORDER)


def test_time_outs_are_learned_from_what_is_usual():
    assert taught(0.2)[0].limit(0, at(21)) == MIN_SECONDS
    assert taught(0.2, floor=0.5)[0].limit(0, at(21)) == pytest.approx(2.4)
    assert taught(0.2, steps=3)[0].limit(0, at(21)) == 300.0  # too few to tell


def test_what_happens_once_has_more_time_however_quick_it_was_before():
    times, _ = taught(0.2)
    for _ in range(9):
        for kind in {*PHASES, "first step", "first evaluate"} - {"step", "reduce", "update"}:
            times.add(kind, 0.1)
    assert times.limit(0, at(0, "start")) == times.limit(0, at(0, "init")) == 300
    # Data is read again for half a minute before it is given up.
    for phase in ("load", "after", "data"):
        assert times.limit(0, at(9, phase)) == 600
    assert times.save_seconds == CheckpointOptions().deadline
    for times.save_seconds in (2.0, 1200.0, 90_000.0):
        for phase in ("staging", "save", "end"):  # the last rank hears after 1.2 times the deadline
            waits = 2 if phase == "end" else 1
            assert times.limit(0, at(9, phase)) == pytest.approx(
                600 + waits * 1.2 * times.save_seconds
            )
    times.follow({0: at(9, "evaluate")}, 10)
    assert times.limit(0, at(9, "evaluate")) == 600  # compiles
    assert times.limit(0, at(12, "evaluate")) == MIN_SECONDS
    times.begin(0)
    times.follow({0: at(20)}, 100)
    times.follow({0: at(20, "evaluate")}, 100)
    assert times.limit(0, at(20)) == times.limit(0, at(20, "update")) == 300
    assert times.limit(0, at(20, "evaluate")) == 600
    assert times.limit(0, at(21)) == MIN_SECONDS
    times.forget_steps()
    assert times.limit(0, at(21)) == 300
    assert times.limit(0, at(9, "evaluate")) == 600


def test_waiting_for_a_peer_may_take_as_long_as_its_step():
    times, _ = taught(0.9)
    for _ in range(9):
        times.add("step", 4.0)
        times.add("reduce", 0.01)
    assert times.limit(0, at(30, "reduce")) == times.limit(0, at(30)) == 48


def test_a_rank_is_overdue_only_after_its_time():
    times, now = taught(0.2)
    assert overdue({0: at(21, when=now)}, now + 3.4, times) == []
    (late,) = overdue({0: at(21, when=now), 1: at(9, "save", now)}, now + 3.6, times)
    assert (late.rank, late.step, late.phase, round(late.seconds, 1)) == (0, 21, "step", 3.6)


def test_time_in_which_the_whole_machine_stood_still_does_not_count():
    times, now = taught(0.2)
    progress = {0: at(21, when=now)}
    times.follow(progress, now)
    times.follow(progress, now + 60)
    assert overdue(progress, now + 63, times) == []
    assert overdue(progress, now + 66, times)
    times.follow({0: at(22, when=now + 66)}, now + 66)
    assert times.limit(0, at(23)) == MIN_SECONDS


def test_a_rank_that_asks_for_patience_has_it_where_it_waits():
    page = NodeProgressPage.make()
    pulse = Pulse(page, 0)
    pulse.request_patience(1800)
    times = NodePhaseTimes()
    limits = {}
    for step, phase in ((0, "load"), (1, "data"), (1, "step"), (2, "step")):
        pulse.report(step, phase)
        times.follow({0: page.read(0)}, time.monotonic())
        limits[phase, step] = times.limit(0, page.read(0))
    assert limits.pop(("step", 2)) == times.patience
    assert set(limits.values()) == {1800}


# --- blame -----------------------------------------------------------------------------------


def test_a_rank_that_says_it_failed_is_waited_for_and_nobody_blamed():
    page = NodeProgressPage.make()
    pulse = Pulse(page, 1)
    pulse.report(21, "step")
    pulse.fail("OutOfMemoryError: " + "é" * 200)
    failed = page.read(1)
    assert (failed.step, failed.phase) == (21, "failed")
    assert failed.error.startswith("OutOfMemoryError: éé")
    times, now = taught(0.2)
    progress = {0: at(21, when=now), 1: replace(failed, at=now)}
    assert blame(rank_statuses(progress, now + 30, times)) is None
    assert blame(rank_statuses(progress, now + 301, times)).ranks == (1,)
    page.clear(1)
    assert page.read(1).error == ""


def test_who_did_not_enter_the_collective_is_to_blame():
    found = blame([standing(0, 7, "reduce"), standing(1, 7), standing(2, 7, "reduce")])
    assert found.ranks == (1,)
    assert found.reason == (
        "rank 1 in step 7, phase step, for 9.0 s (allowed: 5.0 s); behind all others"
    )


def test_who_is_behind_and_still_has_time_is_waited_for():
    waiting = [standing(0, 8, "reduce"), standing(1, 7, "save", seconds=1)]
    assert blame(waiting) is None


def test_between_equals_the_stack_tells():
    inside = [standing(rank, 7, where="collective") for rank in range(3)]
    assert blame([*inside, standing(3, 7, where="elsewhere")]).ranks == (3,)
    assert blame([*inside, standing(3, 7, where="unclear")]).ranks == (3,)
    assert blame([*inside, standing(3, 7, where="silent")]).ranks == (3,)
    assert blame(inside).ranks == ()
    assert "all 3 ranks stand in the same place" in blame(inside).reason
    assert blame(inside[:1]).ranks == (0,)


def test_who_waits_for_a_rank_that_was_just_stopped_is_not_taken_for_it():
    """No dump is asked of that one, and its time is not up yet."""
    times, now = taught(0.1)
    there = {0: at(20, when=now - 0.2), 1: at(20, when=now)}
    inside = 'Thread 1:\n  File "/torch/distributed/distributed_c10d.py", line 1 in all_reduce\n'
    for after, found in (MIN_SECONDS - 0.1, None), (MIN_SECONDS + 0.1, (1,)):
        stopped = {1: NodeRankVitals(stopped=after - 0.6)}
        ranks = rank_statuses(there, now + after, times, {0: inside}, stopped)
        assert [one.where for one in ranks] == ["collective", "stopped"]
        assert ranks[0].overdue
        blamed = blame(ranks)
        assert (blamed and blamed.ranks) == found


def test_a_rank_without_a_sign_of_life_is_to_blame_wherever_it_is():
    found = blame([standing(0, 7), standing(1, 7, "reduce", where="silent")])
    assert found.ranks == (1,)
    assert "no sign of life" in found.reason


@pytest.mark.parametrize(
    ("phase", "where", "blamed"),
    [("step", "silent", True), ("save", "silent", False), ("step", "elsewhere", False)],
)
def test_a_node_that_has_learned_nothing_yet_goes_by_what_others_have(phase, where, blamed):
    fresh = NodeRankStatus(
        1, 6 if phase == "save" else 7, phase, seconds=4.0, limit=120.0, where=where
    )
    learned = NodeRankStatus(0, 7, "reduce", seconds=3.6, limit=3.5, where="collective")
    found = blame([learned, fresh])
    assert (found is not None) == blamed
    if found:
        assert found.ranks == (1,)
        assert "for 4.0 s (allowed: 3.5 s); no sign of life" in found.reason


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(ORDER)), min_size=2, max_size=6),
    st.data(),
)
def test_only_ranks_that_are_furthest_behind_are_blamed(positions, data):
    ranks = [
        standing(rank, step, phase, seconds=data.draw(st.sampled_from([1.0, 9.0])))
        for rank, (step, phase) in enumerate(positions)
    ]
    found = blame(ranks)
    behind = min(rank.position for rank in ranks)
    last = [rank for rank in ranks if rank.position == behind]
    late = [rank.overdue for rank in last]
    assert (found is not None) == (any(late) if len(last) < len(ranks) else all(late))
    if found:
        assert found.ranks == (tuple(rank.rank for rank in last) if len(last) < len(ranks) else ())


# --- dumps of real ranks ---------------------------------------------------------------------


def sharded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


INPUT = torch.ones(2, 4)


def all_reduce(hang):
    hang()
    dist.all_reduce(torch.ones(3))


def functional_collective(hang):
    hang()
    functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).add_(1)


def fsdp_forward(hang):
    model = sharded()
    hang()
    model(INPUT)


def fsdp_backward(hang):
    loss = sharded()(INPUT).sum()
    hang()
    loss.backward()


def fsdp_prefetch(hang):
    model = sharded()
    hang()
    model[0].unshard(async_op=True).wait()


def wait_for_device(hang):
    """As on a GPU, where a collective is only launched: the wait is in a call into C."""
    hang()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    received(SimpleNamespace(tolist=work.wait))


def ddp_backward(hang):
    model = DistributedDataParallel(nn.Linear(4, 4))
    loss = model(INPUT).sum()
    hang()
    loss.backward()


def sleep():
    time.sleep(60)


def busy():
    while True:
        pass


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("step", "hang", "seen"),
    [
        (all_reduce, sleep, ("collective", "elsewhere")),
        (all_reduce, busy, ("collective", "elsewhere")),
        (all_reduce, stop, ("collective", "silent")),
        (functional_collective, sleep, ("collective", "elsewhere")),
        (wait_for_device, busy, ("collective", "elsewhere")),
        (fsdp_forward, busy, ("collective", "elsewhere")),
        (fsdp_backward, stop, ("collective", "silent")),
        (fsdp_backward, sleep, ("collective", "elsewhere")),
        (fsdp_prefetch, sleep, ("collective", "elsewhere")),
        (ddp_backward, sleep, ("unclear", "elsewhere")),
    ],
)
def test_the_hanging_rank_is_found_among_real_ones(tmp_path, monkeypatch, step, hang, seen):
    if "silent" not in seen:  # then nobody is waited for so long
        monkeypatch.setattr("elastic.node.vitals.SILENT_SECONDS", 60.0)

    def work(rank):
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # ranks have others
        register_dumps(tmp_path / f"dump-{rank}")

        def there():
            (tmp_path / f"ready-{rank}").touch()
            if rank == 1:
                hang()

        step(there)

    with Job(2, work, tmp_path / "job") as job:
        assert until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 20)
        ranks = {rank: (pid, tmp_path / f"dump-{rank}") for rank, pid in enumerate(job.ranks)}

        dumps = {}

        def are_seen():
            dumps.clear()
            dumps.update(sorted(take_dumps(ranks).items()))
            return tuple(map(classify_dump, dumps.values())) == seen

        # A rank is on its way to the place where it hangs for a moment.
        assert until(are_seen, 20), dumps
        now = time.monotonic()
        progress = {rank: at(7, when=now - 301) for rank in range(2)}
        found = blame(rank_statuses(progress, now, NodePhaseTimes(), dumps))
        assert found.ranks == (1,)
        assert len(job.running()) == 2  # asking for stacks ends nobody


def test_a_hang_in_a_backward_hook_is_no_collective(tmp_path):
    def work(rank):
        register_dumps(tmp_path / "dump")
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(lambda _: sleep())
        y.backward()

    with Job(1, work, tmp_path / "job") as job:
        path = tmp_path / "dump"
        assert until(path.exists, 20)
        ranks = {0: (job.ranks[0], path)}
        assert until(lambda: classify_dump(take_dumps(ranks).get(0, "")) == "elsewhere", 20)


def test_a_rank_that_compiles_has_patience(tmp_path):
    def slow(graph, inputs):
        sleep()
        return graph

    def work(rank):
        register_dumps(tmp_path / "dump")
        torch.compile(lambda x: x + 1, backend=slow)(torch.ones(2))

    with Job(1, work, tmp_path / "job") as job:
        path = tmp_path / "dump"
        assert until(path.exists, 20)
        ranks = {0: (job.ranks[0], path)}
        dumps: dict[int, str] = {}
        # Dynamo imports parts of torch.distributed on its way to the backend.
        assert until(lambda: dumps.update(take_dumps(ranks)) or "in slow" in dumps.get(0, ""), 20)
        assert is_compiling(dumps[0])
        times, now = taught(0.2)
        (found,) = rank_statuses({0: at(21, when=now)}, now + 4, times, dumps)
        assert (found.where, found.limit) == ("elsewhere", 300)


def test_a_rank_that_cannot_answer_yet_is_not_killed_by_the_question(tmp_path):
    with Job(1, lambda rank: sleep(), tmp_path / "job") as job:
        assert take_dumps({0: (job.ranks[0], Path("none"))}) == {}
        assert job.running()
    assert take_dumps({0: (job.ranks[0], Path("none"))}) == {}


def test_a_rank_that_has_ended_is_not_called_silent(tmp_path):
    dump = tmp_path / "dump"
    pid = os.fork()
    if pid == 0:
        register_dumps(dump)
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert take_dumps({0: (pid, dump)}) == {}
    os.waitpid(pid, 0)


def test_the_main_thread_counts_and_not_one_that_was_started_later():
    dump = (
        "Current thread 0x01 (most recent call first):\n"
        '  File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce\n'
        "\nThread 0x02 (most recent call first):\n"
        '  File "/x/torch/_ops.py", line 1 in __call__\n'
        '  File "/x/train.py", line 1 in train\n'
    )
    assert in_collective(dump) is False
    assert in_collective("Thread 0x01 (most recent call first):\n  <no Python frame>") is None
