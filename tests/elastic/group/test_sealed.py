"""What a stranger writes into the store of a round is as if it were not there."""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic.group.job_secret import JobSecret
from elastic.group.sealed import SealedStore
from elastic.group.store import _end_threads as end_calls

SECRET = JobSecret(b"of the round")
ROOT = Path(__file__).parents[3]
PATIENCE = 200
"""Seconds that ranks wait for each other beside the stranger, who takes a core."""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def client(port, seconds=5):
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=seconds))


@pytest.fixture
def host():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store
    end_calls()  # while it is there


def store_at(port, secret=SECRET, scope="generation 0", seconds=0.1):
    store = SealedStore(partial(client, port), secret, scope)
    store.set_timeout(timedelta(seconds=seconds))
    return store


def test_it_is_a_store_like_any_to_who_knows_the_secret(host):
    ours, theirs = store_at(host.port), store_at(host.port)
    ours.set("a", b"\0\xff")
    ours.set("b", "text")
    assert theirs.get("a") == b"\0\xff"
    assert theirs.multi_get(["b", "a"]) == [b"text", b"\0\xff"]
    theirs.wait(["a", "b"], timedelta(seconds=1))
    assert theirs.check(["a", "b"])
    assert not theirs.check(["a", "c"])
    assert [ours.add("n", 2), theirs.add("n", 3)] == [2, 5]
    assert ours.compare_set("c", "", "first") == b"first"
    assert theirs.compare_set("c", "", "second") == b"first"
    assert theirs.compare_set("c", "first", "second") == b"second"
    assert ours.get("c") == b"second"
    ours.set("d", b"")
    assert ours.delete_key("d")
    with pytest.raises(dist.DistStoreError):
        theirs.get("d")
    assert not any(key in "abcn" for key in host.list_keys()), "names say nothing"


def test_what_does_not_verify_is_as_absent(host, caplog):
    ours = store_at(host.port)
    ours.set("address", b"right")
    (name,) = (key for key in host.list_keys() if len(key) == 64)
    held = host.get(name)
    store_at(host.port, scope="generation 1").set("address", b"of the next")
    store_at(host.port, JobSecret(b"of another job")).set("address", b"of another job")
    ours.set("other", b"of another key")
    others = [host.get(key) for key in host.list_keys() if len(key) == 64 and key != name]
    reader = store_at(host.port)
    ours._written.clear()  # so that it does not put it right
    forgeries = [b"", b"right", held[:-1], held[:64] + b"wrong", held + b"x", b"0" * 64 + b"right"]
    for forged in (*forgeries, *others, pickle.dumps("right")):
        host.set(name, forged)
        assert not reader.check(["address"])
        with pytest.raises(dist.DistStoreError, match="does not know the secret"):
            reader.get("address")
    warned = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert [text.count("address") for text in warned] == [1], "said once"
    host.set(name, held)
    assert reader.get("address") == b"right"
    for secret, scope in ((SECRET, "generation 2"), (JobSecret(b"of a third"), "generation 0")):
        with pytest.raises(dist.DistStoreError):
            store_at(host.port, secret, scope).get("address")


def test_what_was_overwritten_or_deleted_is_set_again_while_others_may_need_it(host):
    ours, reader = store_at(host.port), store_at(host.port, seconds=10)
    ours.set("address", b"right")
    (name,) = (key for key in host.list_keys() if len(key) == 64)
    for spoil in (partial(host.set, name, b"forged"), partial(host.delete_key, name)):
        spoil()
        assert reader.get("address") == b"right"
    end_calls()  # the time is over
    host.set(name, b"forged")
    time.sleep(0.2)
    assert host.get(name) == b"forged"


def tamper(port):
    """Overwrite, exchange and delete whatever is in the store, again and again."""
    store = client(port)
    store.set("a stranger is here", b"")
    while True:
        names = [name for name in store.list_keys() if len(name) == 64]
        values = [store.get(name) for name in names if store.check([name])]
        for name, value in zip(names, reversed(values), strict=False):
            store.set(name, value)
            store.set(name, value[:64] + bytes(len(value) - 64))
        for name in names[::2]:
            store.delete_key(name)
        time.sleep(0.001)  # on cores that others use, too, ranks would have no turn


def meet(rank, size, port):
    """Be a rank: join the others, and a group of some of them; 0 if all is well."""
    logging.disable()
    client(port, PATIENCE).wait(["a stranger is here"])
    store = SealedStore(partial(client, port, PATIENCE), SECRET, "generation 0")
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=PATIENCE))
    total, half = torch.tensor([rank + 1.0]), torch.tensor([1.0])
    dist.all_reduce(total)
    if rank < 2:
        dist.all_reduce(half, group=pair)
    dist.barrier()
    return int(total.item() != size * (size + 1) / 2 or half.item() != 1 + (rank < 2))


def test_ranks_meet_while_a_stranger_tampers_with_every_key():
    size, port = 3, free_port()

    def forked(work):
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                code = work()
            finally:
                os._exit(code)
        return pid

    # Forked before there is a store here, whose threads they would not have.
    ranks = [forked(partial(meet, rank, size, port)) for rank in range(size)]
    stranger = forked(partial(tamper, port))
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    try:
        assert [os.waitpid(pid, 0)[1] for pid in ranks] == [0] * size
        assert os.waitpid(stranger, os.WNOHANG) == (0, 0), "it went on all the time"
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)
    del store


def test_a_process_that_has_set_values_ends_well_at_any_moment(host):
    """Its thread may be in a call of torch's just then."""
    program = (
        "import sys, time; from functools import partial; import torch.distributed as dist\n"
        "from elastic.group import sealed; sealed.FIRST_LOOK_SECONDS = sealed.LOOK_SECONDS = 0.0\n"
        "from elastic.group.job_secret import JobSecret\n"
        "connect = partial(dist.TCPStore, '127.0.0.1', int(sys.argv[1]), is_master=False)\n"
        "sealed.MAX_LOOK_SECONDS = 0.0\n"
        "store = sealed.SealedStore(connect, JobSecret(b'x'), 'generation 0')\n"
        "[store.set(f'{n}', b'x') for n in range(20)]; time.sleep(0.1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(host.port)], capture_output=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, b"")
