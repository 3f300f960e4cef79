"""The writer of a node without its process: what its ranks, the coordinator and the loss of either
make of each other in orders that real processes seldom meet."""

import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.errors import StorageError
from checkpointing.options import CheckpointOptions
from checkpointing.save import messages as msg
from checkpointing.save import serving
from checkpointing.save.channel import SaveChannelError, call
from checkpointing.save.link import WriterGoneError, WriterLink
from checkpointing.save.messages import SlotInUse
from checkpointing.save.peers import SavePuller
from checkpointing.save.writer import ALONE_SECONDS, Writer
from tests.checkpointing.forked_writer import start_new


class Peer:
    """Stands for a connection: keeps all that is sent."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def send(self, message: Any) -> None:
        self.told.append(message)


def node_1(directory: Path) -> tuple[Writer, dict[int, Peer], Peer]:
    """The writer of ranks 1 and 2, on another node than rank 0; the ranks and the coordinator."""
    nodes = (0,), (1, 2)
    writer = Writer(
        msg.WriterSetup(0, 1, nodes, str(directory), "run", CheckpointOptions(), "", "", 0, b"1")
    )
    ranks, uplink = {1: Peer(), 2: Peer()}, Peer()
    writer._connected |= ranks
    writer.joined(uplink)
    return writer, ranks, uplink


def test_ranks_that_close_are_let_go_when_the_coordinator_is_lost(tmp_path):
    writer, ranks, uplink = node_1(tmp_path)
    writer.on_rank(1, msg.RankClosing(False))
    writer.lost_coordinator()
    assert not ranks[1].told, "one of them may still save"
    writer.joined(uplink)
    writer.on_rank(2, msg.RankClosing(False))
    assert uplink.told == [msg.WriterClosing()]
    assert not ranks[1].told, "the coordinator may need this node"
    writer.lost_coordinator()
    assert ranks[1].told == ranks[2].told == [msg.AllClosed()]


def test_a_request_waits_for_a_coordinator_that_is_started_again(tmp_path, monkeypatch):
    writer, ranks, uplink = node_1(tmp_path)
    begin = msg.SaveRequest((7, 1), False, None)
    for rank in ranks:
        writer.on_rank(rank, begin)
    writer.lost_coordinator()
    uplink.told.clear()
    writer.joined(uplink)
    assert uplink.told == [begin]
    writer.lost_coordinator()
    assert not ranks[1].told, "had it an answer now, it would go on"
    monkeypatch.setattr(writer, "_alone_since", time.monotonic() - ALONE_SECONDS - 1)
    writer.lost_coordinator()
    (answer,) = ranks[1].told
    assert ranks[2].told == [answer]
    assert isinstance(answer, msg.SaveSkipped), "rank 0's node may never start it again"


def test_what_the_writer_before_may_have_answered_to_some_is_skipped(tmp_path):
    setup = msg.WriterSetup(
        0, 0, ((0, 1), (2,)), str(tmp_path), "run", CheckpointOptions(), "", "", 0, b"1", voided=3
    )
    writer, peer = Writer(setup), Peer()
    writer._connected[1] = writer._peers[1] = peer
    for number, told in ((3, [msg.SaveSkipped]), (4, [])):
        begin = msg.SaveRequest((7, number), False, None)
        peer.told.clear()
        writer.on_rank(1, begin)
        writer._on_node(1, begin)
        assert [type(answer) for answer in peer.told] == told * 2, "a rank and a node"


def test_a_refusal_is_of_one_attempt(tmp_path):
    writer, ranks, _ = node_1(tmp_path)
    writer.on_rank(1, msg.WantSlots("digest", "plan"))
    writer._on_slots(msg.WantSlots("digest", "plan"), StorageError("full"))
    assert ranks[1].told == [msg.NoSlots("full")]
    writer.on_rank(1, msg.WantSlots("digest", "plan"))
    writer.on_rank(2, msg.WantSlots("digest", None))  # it had not asked before
    assert not ranks[2].told


def test_a_save_does_not_wait_for_a_rank_that_never_comes(tmp_path):
    """It gave up to reach a writer that was started again."""
    writer, _, uplink = node_1(tmp_path)
    writer.memory.plan = SimpleNamespace(files=["a file"])
    del writer._connected[2]
    writer.on_coordinator(msg.SaveAdmitted((7, 1), 0, b"", None))
    assert uplink.told == []
    ((moment, _, look),) = writer.loop._timers
    assert moment > time.monotonic() + msg.ANSWER_SECONDS / 2
    look()
    (failed,) = uplink.told
    assert isinstance(failed, msg.NodeCannotSave)
    assert failed.key == (7, 1)
    assert "rank 2" in failed.failure.message
    writer.on_coordinator(msg.SaveEnded((7, 1), msg.SaveOutcome(7, None)))
    look()
    assert len(uplink.told) == 1


def test_a_rank_that_is_lost_is_given_no_slots(tmp_path):
    writer, ranks, _ = node_1(tmp_path)
    writer.on_rank(2, msg.WantSlots("digest", None))
    writer.on_rank(1, msg.WantSlots("digest", "plan"))
    writer._lost_rank(2, ranks[2])
    writer._on_slots(msg.WantSlots("digest", "plan"), StorageError("full"))
    assert ranks[1].told == [msg.NoSlots("full")]
    assert not ranks[2].told


def test_who_connects_and_says_nothing_keeps_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "WELCOME_SECONDS", 1)
    writer, _, _ = node_1(tmp_path)
    listener = Listener(("127.0.0.1", 0))
    writer.acceptor.listen(listener)
    with (
        socket.create_connection(listener.address, timeout=5) as silent,
        socket.create_connection(listener.address, timeout=5) as other,
    ):
        assert other.recv(1), "it is asked who it is"
        call(listener.address, writer.setup.secret).send(msg.SaveCallerGreeting("node", 3))
        writer.loop.turn(5)
        assert 3 in writer._peers
        with pytest.raises(SaveChannelError):
            call(listener.address, b"wrong")
        while silent.recv(1000):
            pass  # until it is shown out


def test_bytes_of_another_node_are_not_taken_for_this_ones(tmp_path):
    """All writers of a run know its secret: whoever stands between them may connect any two."""
    writer, _, _ = node_1(tmp_path)
    writer.memory._filled[0] = SimpleNamespace(key=(7, 1))
    writer.memory.files = [SimpleNamespace(maps={"file": b"of node 1"})]
    listener = Listener(("127.0.0.1", 0))
    writer.acceptor.listen(listener)
    pull = SavePuller([listener.address] * 2, writer.setup.secret)
    assert list(pull(1, SlotInUse(0), "file", [(0, 9)])) == [b"of node 1"]
    with pytest.raises(StorageError, match="node 0 does not send its part"):
        list(pull(0, SlotInUse(0), "file", [(0, 9)]))


def test_a_thread_of_a_run_at_a_lower_priority_keeps_it():
    def priority():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)  # as under `nice -n 15`
        serving.give_way()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(priority).result() == 15


def test_a_writer_that_gets_no_threads_ends_at_once_and_says_why(tmp_path, capfd):
    setup = msg.WriterSetup(
        os.getpid(), 0, ((0,),), str(tmp_path), "run", CheckpointOptions(), f"\0{tmp_path}", "", 0,
        b"1",
    )  # fmt: skip
    process = start_new()
    link = WriterLink(setup, 0, process)
    link.start()
    # From now on no stack of a thread fits (8 MiB).
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (2 << 20)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))
    with pytest.raises(WriterGoneError, match="ended with code 1 as soon as it had started"):
        link.connect()
    link.end(1)
    assert "can't start new thread; raise the limit of processes" in capfd.readouterr().err
