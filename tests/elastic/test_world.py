"""Which errors are another rank's, and how a rank leaves."""

import os

import pytest
import torch.distributed as dist

from elastic import EXIT_FAILED, EXIT_PAUSED, EXIT_WRONG_INPUT
from elastic.world import is_lost_peer, leave_world

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
