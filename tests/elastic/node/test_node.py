"""What an agent does with the training processes of its node: real ones, forked by its zygote."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

import elastic.world
from benchmarks.support import python_path
from elastic.group.membership import Membership, MembershipFailure
from elastic.node.agent import NodeAgent
from elastic.node.program import NodeProgram
from elastic.node.recall import NodeRecallSocket
from elastic.node.standin import NODE_SOCKET
from elastic.node.zygote import MAX_MESSAGE
from tests.checkpointing.faults import until

ROOT = Path(__file__).parents[3]
STAND_IN = """
import sys
import threading
from elastic.node.standin import stand_in

function = f"tests.elastic.node.ranks:{sys.argv[1]}"
stand_in(function, function + "_prepared", sys.argv[2:])
"""


@dataclass
class Group:
    """A membership of one node, each failure of which begins a generation."""

    name: str = "here"
    failures: list[MembershipFailure] = field(default_factory=list)
    state: Membership = field(
        default_factory=lambda: Membership(version=1, round=1, members=("here",), size=1)
    )

    def change(self, change):
        self.state = change(self.state)

    def report(self, round, generation, failure):
        self.failures.append(failure)
        if (round, generation) == (self.state.round, self.state.generation):
            self.state = replace(
                self.state, generation=generation + 1, failures=(*self.state.failures, failure)
            )


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    monkeypatch.setenv(NODE_SOCKET, "")
    # xdist's thread would make the zygote a new program, which imports torch for two seconds.
    monkeypatch.setattr("elastic.node.zygote._can_fork", lambda: True)
    node = NodeAgent(Group(), NodeProgram())
    node.start()
    yield node
    node.stop()


@pytest.fixture
def start_rank(node):
    """start_rank(rank, function, *arguments) → its stand-in: the node runs a function of ranks.py
    as one of its ranks."""
    started = []

    def start_rank(rank, function, *arguments, round=1):
        environment = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "PERDURE_ROUND": f"{round}"}
        command = [sys.executable, "-c", STAND_IN, function, *map(str, arguments)]
        started.append(subprocess.Popen(command, env={**os.environ, **environment}))
        return started[-1]

    yield start_rank
    for stand_in in started:
        stand_in.kill()
        stand_in.wait()


def test_who_does_not_let_go_in_time_is_forked_anew_and_the_others_stay(
    node, start_rank, tmp_path, monkeypatch
):
    monkeypatch.setattr("elastic.node.agent.READY_SECONDS", 0.5)
    places = [tmp_path / f"rank-{rank}" for rank in range(3)]
    for rank, path in enumerate(places):
        start_rank(rank, "stay", path, *(["stubborn"] if rank == 1 else []))

    def works(rank, generation):
        lines = places[rank].read_text().splitlines() if places[rank].exists() else []
        found = [line.split() for line in lines]
        return next((int(pid) for pid, number in found if number == f"{generation}"), None)

    assert until(lambda: all(works(rank, 0) for rank in range(3)), 60)
    assert until(
        lambda: all(rank.process and rank.process.able for rank in node._ranks.values()), 20
    )
    os.kill(works(2, 0), signal.SIGKILL)
    assert until(lambda: all(works(rank, 1) for rank in range(3)), 20)
    assert [works(rank, 0) == works(rank, 1) for rank in range(3)] == [True, False, False]
    assert [(failure.rank, failure.why) for failure in node.group.failures] == [(2, "SIGKILL")]


def test_a_process_that_has_closed_its_socket_waits_for_no_round(node, start_rank, tmp_path):
    """The zygote may report its end only after its stand-in has ended."""
    stand_in = start_rank(0, "stay", tmp_path / "rank")
    ranks = node._ranks
    assert until(lambda: 0 in ranks and ranks[0].process and ranks[0].process.able, 60)
    process = ranks[0].process
    os.kill(node._zygote.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    assert until(lambda: process.recall is None, 20)
    node.expect_stop()
    stand_in.kill()
    assert until(lambda: process.key in node._ending, 20), "it is not killed"
    assert not node._kept
    os.kill(node._zygote.pid, signal.SIGCONT)
    assert until(lambda: not node._ending, 20)


def test_the_end_of_a_process_is_not_taken_for_that_of_the_next(
    node, start_rank, tmp_path, monkeypatch
):
    """A stand-in registers again in its round, on a machine that reports the end too late."""
    monkeypatch.setattr("elastic.node.agent.GONE_SECONDS", 0.0)
    for name in ("first", "second"):
        start_rank(0, "stay", tmp_path / name)
        assert until((tmp_path / name).exists, 60)
    assert until(lambda: not node._ending, 20)
    assert not node.group.failures
    os.kill(int((tmp_path / "second").read_text().split()[0]), signal.SIGKILL)
    assert until(lambda: node.group.failures, 20)


def test_a_rank_is_forked_only_when_the_one_before_is_gone(node, start_rank, tmp_path):
    """Until then it may hold the memory of a device, of which two do not fit."""
    path = tmp_path / "starts"
    for rank in range(2):
        start_rank(rank, "hold", f"{path}-{rank}")
    starts = [Path(f"{path}-{rank}") for rank in range(2)]
    for number in range(1, 3):

        def all_started(number=number):
            return all(s.exists() and len(s.read_text().split()) == number for s in starts)

        assert until(all_started, 60)
        node.group.report(1, number - 1, MembershipFailure("here", 0, 0, "the test", 0.0))
        node.wake()
    assert all("taken" not in start.read_text() for start in starts)


def test_an_attempt_is_over_when_all_of_it_is_aborted():
    """Else what is aborted late is the next attempt's."""
    agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recall, begun, events = NodeRecallSocket(own), threading.Event(), []

    def stop():
        begun.set()
        time.sleep(0.1)
        events.append("aborted")

    recall.stop = stop
    with suppress(ConnectionError), recall.attempt():
        agent.send(b'{"stop": true}')
        assert begun.wait(10)
        raise ConnectionError
    assert events == ["aborted"]
    agent.close()


@pytest.mark.parametrize("caller", [distributed_c10d.__file__, elastic.world.__file__])
def test_a_wait_that_no_abort_ends_is_reported(monkeypatch, caller):
    """The agent ends such a process at once, and not after READY_SECONDS, whatever other threads do
    meanwhile."""
    monkeypatch.setattr("elastic.node.recall.STUCK_SECONDS", 0.2)
    agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.settimeout(10)
    recall, told = NodeRecallSocket(own), []
    ended = threading.Event()

    def hear():
        told.append(json.loads(agent.recv(MAX_MESSAGE)))
        ended.set()

    def compute():
        while not ended.is_set():
            pass

    with recall.attempt():
        agent.send(b'{"stop": true}')
        time.sleep(0.5)  # computes, and may yet come back
        threading.Thread(target=hear).start()
        assert not told
        threading.Thread(target=compute, daemon=True).start()
        waiting = compile("ended.wait(10)", caller, "exec")
        exec(waiting, {"ended": ended})
    assert told == [{"stuck": True}]
    agent.close()


def test_an_attempt_that_is_recalled_before_it_connects_waits_for_nobody():
    agent, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recall, aborted = NodeRecallSocket(own), threading.Event()
    recall.stop = aborted.set
    with socket.create_server(("127.0.0.1", 0)) as silent, recall.attempt():
        agent.send(b'{"stop": true}')
        assert aborted.wait(10)
        time.sleep(0.1)
        with socket.create_connection(silent.getsockname(), 10) as connection:
            assert connection.recv(1) == b"", "the connection was ended here"
    agent.close()
