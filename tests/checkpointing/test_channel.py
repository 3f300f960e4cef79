"""Between processes that share a secret a stranger on the way changes and gets in nothing."""

import os
import pickle
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Listener

import pytest

from checkpointing.channel import StrangerError, call, welcome

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

    threads = [threading.Thread(target=work) for work in (listen, between)]
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
        assert heard(way)[0] == [SAID[0], StrangerError], what
    assert heard(lambda _: recorded)[0] == [StrangerError], "recorded of another connection"
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

    thread = threading.Thread(target=listen)
    thread.start()
    with pytest.raises(StrangerError):
        call(listener.address, b"wrong")
    with Client(listener.address) as stranger:
        stranger.recv_bytes()
        stranger.send_bytes(bytes(32))
        stranger.send_bytes(bytes(32))
        stranger.send_bytes(pickle.dumps(Trap(tmp_path / "trap")))
        thread.join(10)
    assert refused == [EOFError, StrangerError]
    assert not (tmp_path / "trap").exists()
    listener.close()
