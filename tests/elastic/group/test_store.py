"""The store's host may die, come back empty, or fall silent; its clients go on."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic.group import store as store_module
from elastic.group.store import StoreClient, StoreLostError, host_store
from tests.checkpointing.faults import until
from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import Forked


@pytest.fixture
def host(tmp_path):
    log = tmp_path / "host.log"
    process = Forked(["elastic.group.store", "0"], tmp_path, dict(os.environ), log)
    assert until(lambda: re.search(r"port \d+\n", log.read_text()), 60)
    process.port = int(re.search(r"port (\d+)\n", log.read_text())[1])
    yield process
    process.kill()
    process.wait()
    # A call that fails now has its stack written by torch, under a lock of the dynamic linker. A
    # rank forked meanwhile would wait for that lock for ever.
    for thread in threading.enumerate():
        if thread.name == "perdure-store":
            thread.join(60)


def state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def test_a_host_that_falls_silent_is_noticed_and_found_again(host, monkeypatch):
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 0.3)
    client = StoreClient("127.0.0.1", host.port, patience=1.0)
    client.set("key", "1")
    assert client.get_all(["key", "none"]) == [b"1", None]
    os.kill(host.pid, signal.SIGSTOP)
    while {state(thread) for thread in Path(f"/proc/{host.pid}/task").iterdir()} != {"T"}:
        time.sleep(0.01)  # it still answers
    started = time.monotonic()
    with monkeypatch.context() as lost:
        lost.setattr(store_module, "CONNECT_SECONDS", 0.3)
        with pytest.raises(StoreLostError, match=r"did not answer for 1 s: no answer within"):
            client.get("key")
    assert time.monotonic() - started < 10
    os.kill(host.pid, signal.SIGCONT)
    client.patience = 20.0
    assert client.swap("key", b"1", b"2") == b"2"
    assert client.connections > 1, "nobody waits for what the old one may still say"
    client.close()


def have_many_clients():
    limits = 128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    store = host_store("127.0.0.1", 0)
    waiting = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(200)]
    StoreClient("127.0.0.1", store.port, patience=10.0).set("key", b"1")
    return len(waiting)


def test_a_store_takes_more_clients_than_a_process_may_usually_have_files(tmp_path):
    assert run_ranks(1, lambda _: have_many_clients(), tmp_path) == [200]


ENDS = """
import atexit, os, signal, sys, threading, time
from functools import partial
atexit.register(time.sleep, 0.5)  # after the store's own end: time to connect again
from elastic.group import store
host, port = map(int, sys.argv[1:])
store.END_SECONDS = 0.01  # as on a machine that is fifty times slower
store.CONNECT_SECONDS = 1.0

class Last:
    def __del__(self, sleep=time.sleep, wake=partial(os.kill, host, signal.SIGCONT)):
        wake()
        sleep(1)  # the answer comes while the interpreter ends

sys.last = Last()
clients = [store.StoreClient("127.0.0.1", port, patience=60) for _ in range(3)]
for client in clients[:2]:
    client.set("key", b"1")
os.kill(host, signal.SIGSTOP)
for client in clients:  # two amid a call, one amid the first connection
    threading.Thread(target=client.get, args=("key",), daemon=True).start()
time.sleep(0.2)
sys.exit(7)
"""


def test_a_process_ends_with_its_exit_code_amid_a_call_of_a_slow_store(host):
    arguments = [sys.executable, "-c", ENDS, str(host.pid), str(host.port)]
    assert subprocess.run(arguments, timeout=60, check=False).returncode == 7
