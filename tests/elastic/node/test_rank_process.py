"""What the exit of a training process means for its job, and why."""

import signal

import pytest

from elastic.exits import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MENDED,
    EXIT_OUTVOTED,
    EXIT_PAUSED,
    EXIT_PEER_GONE,
    EXIT_WRONG_INPUT,
)
from elastic.group.membership import MembershipEnd, MembershipFailure
from elastic.node.progress import NodeRankProgress
from elastic.node.rank_process import judge_exit

BLANK = MembershipFailure("here", None, 7, "", 9.0)
KILLED = -signal.SIGKILL


def judge(code, *, error="", step=7, done=False, first=False, memory=False):
    progress = NodeRankProgress(step, "step", 0.0, noticed=False, error=error)
    return judge_exit(
        3, code, progress, BLANK, job_done=done, first_start=first, out_of_memory=memory
    )


@pytest.mark.parametrize(
    ("code", "given", "end"),
    [
        (EXIT_DONE, {}, MembershipEnd(0, "the run is finished")),
        (KILLED, {"done": True}, MembershipEnd(0, "the run is finished")),
        (EXIT_PAUSED, {}, None),
        (
            EXIT_DO_NOT_REQUEUE,
            {"error": "no"},
            MembershipEnd(93, "rank 3 ended with exit code 93 (no)"),
        ),
        (
            EXIT_WRONG_INPUT,
            {"first": True, "step": 0},
            MembershipEnd(2, "rank 3 ended with exit code 2"),
        ),
    ],
)
def test_an_exit_ends_the_job_or_pauses(code, given, end):
    assert judge(code, **given) == end


@pytest.mark.parametrize(
    ("code", "given", "rank", "why", "error", "mended", "outside"),
    [
        (EXIT_FAILED, {"error": "bad"}, 3, "exit code 1 (bad)", "bad", False, False),
        (EXIT_WRONG_INPUT, {"first": True}, 3, "exit code 2", "", False, False),
        (EXIT_WRONG_INPUT, {"step": 0}, 3, "exit code 2", "", False, False),
        (EXIT_MENDED, {}, 3, "exit code 78", "", True, False),
        (-signal.SIGSEGV, {}, 3, "SIGSEGV", "", False, False),
        (KILLED, {}, 3, "SIGKILL", "", False, True),
        (KILLED, {"error": "bad"}, 3, "SIGKILL (bad)", "bad", False, False),
        (
            KILLED,
            {"memory": True},
            *(3, "SIGKILL (the kernel killed it: out of memory)"),
            *("the kernel killed it: out of memory", False, False),
        ),
        (
            EXIT_PEER_GONE,
            {"error": "reset"},
            *(None, "rank 3 lost its connection to another", "", False, False),
        ),
    ],
)
def test_a_failure_counts_against_whose_it_is(code, given, rank, why, error, mended, outside):
    expected = MembershipFailure("here", rank, 7, why, 9.0, error, mended, outside)
    assert judge(code, **given) == expected


def test_a_rank_that_others_contradicted_is_unfit():
    error = "GradientDisputeError: two others contradicted rank 3: twice"
    why = "two others contradicted rank 3: twice"
    assert judge(EXIT_OUTVOTED, error=error) == MembershipFailure(
        "here", 3, 7, why, 9.0, error, unfit=True
    )
