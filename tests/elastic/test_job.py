"""What a loop of the user's own asks of its job."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import elastic
from elastic import EXIT_REQUEUE, Job, Pulse, World, watch_signals
from elastic.job import JobPaused
from elastic.node.progress import NodeProgressPage
from tests.checkpointing.worlds import run_ranks


def job_of(rank: int, ranks: int, page: NodeProgressPage) -> Job:
    world = World(rank, rank, ranks, ranks, 1, 0, 0, None, torch.device("cpu"))
    return Job(world, Pulse(page, rank))


def test_ranks_pause_after_the_same_step_and_any_of_them_may_ask(tmp_path):
    """Rank 1 is asked within step 3; rank 0 never asks, rank 2 does so twice in a step."""
    page = NodeProgressPage.make()

    def work(rank):
        job, steps = job_of(rank, 3, page), []
        try:
            for step in job.steps(0, 9):
                steps.append((step, rank and job.due_to_pause() and job.due_to_pause()))
                if (rank, step) == (1, 3):
                    page.request_pause(1, leaving=False)
        except JobPaused as left:
            return left.code, steps
        return None

    for rank, (code, steps) in enumerate(run_ranks(3, work, tmp_path)):
        assert code == EXIT_REQUEUE
        assert steps == [(step, rank and step == 4) for step in (1, 2, 3, 4)]


def test_nobody_leaves_after_the_last_step(tmp_path):
    page = NodeProgressPage.make()
    page.request_pause(0, leaving=True)

    def work(rank):
        job = job_of(rank, 1, page)
        return [job.due_to_pause() for _ in job.steps(4, 5)]

    assert run_ranks(1, work, tmp_path) == [[False]]


def test_a_rank_says_what_it_does(tmp_path):
    page = NodeProgressPage.make()

    def work(rank):
        job, said = job_of(rank, 1, page), []

        def look():
            told = page.read(0)
            said.append((told.step, told.phase, told.safe))

        Pulse(page, 0).safe = True
        look()
        for _ in job.steps(6, 7):
            look()
            with job.during("data"):
                look()
            with job.during("step"):
                look()
            look()
        look()
        return said

    assert run_ranks(1, work, tmp_path)[0] == [
        (0, "start", True),
        *((7, phase, False) for phase in ("data", "data", "step", "after", "end")),
    ]


@given(rows=st.integers(1, 60), ranks=st.integers(1, 9), micro=st.integers(1, 60))
def test_passes_of_all_ranks_weigh_every_row_alike(rows, ranks, micro):
    page, passes = NodeProgressPage.make(), []
    for rank in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_rank", lambda _, rank=rank: rank)
            patch.setattr(dist, "get_world_size", lambda _: ranks)
            job = job_of(rank, ranks, page)
            passes.append(job.passes(rows, micro))
            assert job.passes(rows, rows) == [job.share(rows)]
    assert len({len(one) for one in passes}) == 1, "collectives match"
    weights = torch.zeros(rows, dtype=torch.float64)
    for one in passes:
        for mine, weight in one:
            assert 1 <= len(mine) <= micro
            weights[mine] += weight / len(mine) / ranks
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / rows))


def test_outside_of_steps_there_is_nothing_to_be_due():
    with pytest.raises(RuntimeError, match=r"for step in job\.steps"):
        job_of(0, 1, NodeProgressPage.make()).due_to_pause()


def test_a_second_process_group_is_refused(tmp_path):
    def work(rank):
        with pytest.raises(RuntimeError, match="in place of init_process_group"):
            elastic.join()
        return "said"

    assert run_ranks(1, work, tmp_path) == ["said"]


def test_a_process_that_only_stands_in_imports_no_torch():
    said = subprocess.run(
        [sys.executable, "-c", "import sys, elastic.job; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "False\n"


def test_a_notice_that_an_older_thread_receives():
    """A thread of a library that was there before `watch_signals` has not blocked the signals."""
    page = NodeProgressPage.make()

    def work():
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        pulse = Pulse(page, 0)
        watch_signals(pulse)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            while not pulse.noticed:
                time.sleep(0.01)
        pulse.safe = True
        time.sleep(60)

    if not (pid := os.fork()):
        try:
            work()
        finally:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_REQUEUE
