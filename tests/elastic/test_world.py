"""Which errors are another rank's, and how a rank leaves."""

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from elastic import EXIT_FAILED, EXIT_PAUSED, EXIT_WRONG_INPUT
from elastic.process import plain_text
from elastic.world import (
    FREED_SECONDS,
    is_lost_peer,
    leave_world,
    limit_waits,
    wait_until_freed,
)

SYSTEM_ERROR = (
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
    "error. It can be also caused by unexpected exit of a remote peer, you can check NCCL warnings "
    "for failure reason and see if there is connection closure by a peer.\nLast error:\n"
)


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        (dist.DistBackendError, SYSTEM_ERROR + "Connection closed by remote peer x<1>", True),
        (dist.DistBackendError, SYSTEM_ERROR + "Error while creating shared memory", False),
        (dist.DistBackendError, "ncclInvalidUsage: …\nDuplicate GPU detected : rank 0", False),
        (dist.DistBackendError, "ncclRemoteError: A call failed possibly due to a net…", True),
        (dist.DistBackendError, "NCCL communicator was aborted on rank 1.", True),
        (dist.DistNetworkError, "failed to recv, got 0 bytes", True),
        (RuntimeError, "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9", True),
        (RuntimeError, "a timeout of the user's own", False),
    ],
)
def test_only_what_another_rank_may_have_caused_is_a_lost_peer(kind, text, lost):
    assert is_lost_peer(kind(text)) == lost


def test_gloo_has_not_the_last_word():
    told = "Connection closed by peer [127.0.0.1]:59073"
    advice = ". This is typically caused by a remote worker crashing. Check the logs … GLHF!"
    place = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    assert plain_text(RuntimeError(place + told + advice)) == told
    assert plain_text(f"{told}{advice}\nsecond line") == f"{told}\nsecond line"
    assert (
        plain_text(RuntimeError("[rank 1] a message of its own")) == "[rank 1] a message of its own"
    )


@pytest.mark.parametrize(
    ("code", "together"), [(EXIT_PAUSED, True), (EXIT_FAILED, False), (EXIT_WRONG_INPUT, False)]
)
def test_a_rank_that_leaves_alone_does_not_wait_for_the_others(monkeypatch, code, together):
    destroyed = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    with pytest.raises(SystemExit, match=str(code)):
        leave_world(code)
    assert bool(destroyed) == together


def test_groups_made_later_wait_as_long_as_was_said():
    seconds = timedelta(seconds=7)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=seconds)
    try:
        backend = dist.new_group([0])._get_backend(torch.device("cpu"))
        assert backend.options._timeout > seconds, "torch hands it on by now"
        limit_waits(7)
        assert backend.options._timeout == seconds
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("most", "readings", "freed"),
    [
        (10 << 30, [2 << 30] * 20 + [6 << 30] * 20 + [10 << 30], 10 << 30),
        (10 << 30, [2 << 30], 2 << 30),  # another job has it: that has no end
        (0, [2 << 30], 2 << 30),  # nobody knows how much there was
    ],
)
def test_memory_that_a_killed_rank_had_is_waited_for(monkeypatch, most, readings, freed):
    monkeypatch.setattr("elastic.world.STILL_SECONDS", 0.5)
    coming = itertools.chain(readings, itertools.repeat(readings[-1]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(coming), 16 << 30))
    began = time.monotonic()
    assert wait_until_freed(torch.device("cuda", 0), most) == freed
    assert time.monotonic() - began < FREED_SECONDS


FORKS_WITH_AN_OLD_GROUP = """
import gc, os
import torch.distributed as dist
import elastic.world

gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
circle = [dist.group.WORLD]
circle.append(circle)
dist.destroy_process_group()
del circle
if not (child := os.fork()):
    gc.collect()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_what_a_rank_forks_waits_for_no_thread_of_an_old_group():
    command = [sys.executable, "-c", FORKS_WITH_AN_OLD_GROUP]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            assert process.wait(30) == 0
        finally:
            with suppress(ProcessLookupError):  # the child too, if it waits for ever
                os.killpg(process.pid, signal.SIGKILL)
