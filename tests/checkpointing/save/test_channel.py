"""Between processes that share a secret a stranger on the way changes and gets in nothing."""

import os
import pickle
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Listener

import pytest

from checkpointing.errors import StorageError
from checkpointing.save import peers
from checkpointing.save.channel import (
    MAC_BYTES,
    NONCE_BYTES,
    SILENT_SECONDS,
    SaveChannelError,
    call,
    welcome,
)
from checkpointing.save.messages import SlotInUse

SECRET = b"of the run"
SAID = [("node", 1), ("staged", 2), ("written", 3)]


class Trap:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def heard(way):
    """What the listener hears of SAID if somebody stands between who sends `way(frames)` instead of
    the frames that were sent; then the kind of error with which it ends. And those frames."""
    inside, outside = Listener(("127.0.0.1", 0)), Listener(("127.0.0.1", 0))
    found, frames = [], []

    def listen():
        with inside.accept() as connection:
            try:
                channel, who = welcome(connection, SECRET, 5)
                found.append(who)
                while True:
                    found.append(channel.recv())
            except (EOFError, OSError) as error:
                found.append(type(error))

    def between():
        with outside.accept() as caller, Client(inside.address) as onwards:
            caller.send_bytes(onwards.recv_bytes())
            onwards.send_bytes(caller.recv_bytes())
            for _ in range(2):
                caller.send_bytes(onwards.recv_bytes())
            frames.extend(caller.recv_bytes() for _ in range(2 * len(SAID)))
            with suppress(OSError):
                for frame in way(frames):
                    onwards.send_bytes(frame)

    threads = [threading.Thread(target=work, daemon=True) for work in (listen, between)]
    for thread in threads:
        thread.start()
    channel = call(outside.address, SECRET)
    for message in SAID:
        channel.send(message)
    for thread in threads:
        thread.join(10)
    for one in (channel, inside, outside):
        one.close()
    return found, frames


def test_nobody_on_the_way_changes_repeats_drops_or_swaps_messages(tmp_path):
    assert heard(list)[0] == [*SAID, EOFError]
    trap = tmp_path / "trap"
    _, recorded = heard(list)
    ways = {
        "changes": lambda frames: [*frames[:3], frames[3][:-1] + b"\0", *frames[4:]],
        "makes up": lambda frames: [*frames[:3], pickle.dumps(Trap(trap))],
        "repeats": lambda frames: [*frames[:2], *frames[:2]],
        "drops": lambda frames: [*frames[:2], *frames[4:]],
        "swaps": lambda frames: [*frames[:2], *frames[4:], *frames[2:4]],
    }
    for what, way in ways.items():
        assert heard(way)[0] == [SAID[0], SaveChannelError], what
    assert heard(lambda _: recorded)[0] == [SaveChannelError], "recorded of another connection"
    assert not trap.exists()


def test_who_does_not_know_the_secret_learns_nothing_and_says_nothing(tmp_path):
    listener = Listener(("127.0.0.1", 0))
    refused = []

    def listen():
        for _ in range(2):
            with listener.accept() as connection:
                try:
                    welcome(connection, SECRET, 5)
                except (EOFError, OSError) as error:
                    refused.append(type(error))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    with pytest.raises(SaveChannelError):
        call(listener.address, b"wrong")
    with Client(listener.address) as stranger:
        stranger.recv_bytes()
        stranger.send_bytes(bytes(NONCE_BYTES))
        stranger.send_bytes(bytes(MAC_BYTES))
        stranger.send_bytes(pickle.dumps(Trap(tmp_path / "trap")))
        thread.join(10)
    assert refused == [EOFError, SaveChannelError]
    assert not (tmp_path / "trap").exists()
    listener.close()


def test_no_more_than_a_first_message_is_taken_of_who_is_not_known():
    with Listener(("127.0.0.1", 0)) as listener, Client(listener.address) as stranger:
        stranger.send_bytes(bytes(NONCE_BYTES))
        stranger.send_bytes(bytes(MAC_BYTES))
        os.write(stranger.fileno(), struct.pack("!i", 1 << 30))  # so many bytes are to follow
        with listener.accept() as connection, pytest.raises(OSError, match="bad message length"):
            welcome(connection, SECRET, 0.5)


def test_what_one_says_does_not_come_back_as_an_answer():
    inside, outside = Listener(("127.0.0.1", 0)), Listener(("127.0.0.1", 0))

    def listen():
        with suppress(EOFError, OSError), inside.accept() as connection:
            welcome(connection, SECRET, 5)[0].recv()

    def between():
        with outside.accept() as caller, Client(inside.address) as onwards:
            caller.send_bytes(onwards.recv_bytes())
            onwards.send_bytes(caller.recv_bytes())
            for _ in range(2):
                caller.send_bytes(onwards.recv_bytes())
            frames = [caller.recv_bytes() for _ in range(4)]
            for frame in frames[2:]:  # of the number that the caller waits for
                caller.send_bytes(frame)

    for work in (listen, between):
        threading.Thread(target=work, daemon=True).start()
    caller = call(outside.address, SECRET)
    caller.limit(5)
    for message in SAID[:2]:
        caller.send(message)
    with pytest.raises(SaveChannelError):
        caller.recv()
    for one in (caller, inside, outside):
        one.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_who_knows_the_secret_does_not_get_in():
    listener = Listener(f"\0perdure-test-{os.getpid()}", family="AF_UNIX")
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with suppress(Exception):
            call(listener.address, SECRET).send("hello")
        os._exit(0)
    with listener.accept() as connection, pytest.raises(SaveChannelError, match="has uid 65534"):
        welcome(connection, SECRET, 5)
    os.waitpid(pid, 0)
    listener.close()


def test_who_falls_silent_is_not_waited_for(monkeypatch):
    """A pull ends when nothing comes. Whether the other side takes what it is sent, and whether its
    machine is still there, the kernel is asked to find out."""
    monkeypatch.setattr(peers, "SILENT_SECONDS", 0.5)
    listener, welcomed = Listener(("127.0.0.1", 0)), []

    def listen():
        welcomed.append(welcome(listener.accept(), SECRET, 5)[0])

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    puller = peers.SavePuller([listener.address], SECRET)
    with pytest.raises(StorageError, match=r"node 0 does not send its part of a: .*for too long"):
        list(puller(0, SlotInUse(0), "a", [(0, 1)]))
    thread.join(10)
    with socket.socket(fileno=os.dup(welcomed[0]._connection.fileno())) as same:
        limit = same.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
        assert struct.unpack("ll", limit) == (SILENT_SECONDS, 0)
        assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        dead_after = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert dead_after == 1000 * SILENT_SECONDS
    welcomed[0].close()
    listener.close()
