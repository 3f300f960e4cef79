"""Only what an agent has started is a rank of its node."""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.support import python_path
from elastic.group.membership import Membership
from elastic.node.agent import NodeAgent
from elastic.node.program import NodeProgram
from elastic.node.standin import NODE_SOCKET
from tests.checkpointing.faults import until

ROOT = Path(__file__).parents[3]
STRANGER = """
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path
from elastic.node.standin import NODE_SOCKET, stand_in

where, *ways = Path(sys.argv[1]), *sys.argv[2:]
if where.name == "user":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "PERDURE_ROUND": "1"}
asking, ran = set(), False
for way in ways:
    asking.add(pid := os.fork())
    if pid == 0:
        signal.alarm(15)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.environ[NODE_SOCKET] = way
        stand_in("subprocess:call", "subprocess:call", ["touch", str(where)])
while asking and not ran:  # a rank is there once: others that ask to be it wait
    for pid in list(asking):
        ended, status = os.waitpid(pid, os.WNOHANG)
        asking -= {ended}
        ran |= ended and status == 0
    time.sleep(0.01)
with suppress(PermissionError):
    where.with_suffix(".done").touch()
"""


@dataclass
class Group:
    """A membership of one node, with one rank."""

    name: str = "here"
    state: Membership = field(
        default_factory=lambda: Membership(version=1, round=1, members=("here",), size=1)
    )

    def change(self, change):
        self.state = change(self.state)

    def report(self, round, generation, failure):
        pass


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


def ways_in():
    """Paths to the node: as its own ranks know it, the names of its sockets, and what it has open
    that may be one. Sockets of other jobs of this machine are left in peace: they need not answer.
    """
    here, files = Path(f"/proc/{os.getpid()}/fd"), {}
    for number in os.listdir(here):
        with suppress(OSError):  # the one of this listing
            link = os.readlink(here / number)
            if not (link.startswith(("pipe:", "anon_inode:", "/dev/")) or Path(link).exists()):
                files[number] = link
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = [name for *_, inode, name in sockets if f"socket:[{inode}]" in files.values()]
    names = [name.lstrip("@") for name in names]
    return [os.environ[NODE_SOCKET], *names, *(f"{here}/{number}" for number in files)]


def ask(node, folder, kind):
    """Have a process ask the node to run a job; returns whether it ran, once that is known."""
    where = folder / kind
    command = [sys.executable, "-c", STRANGER, str(where), *ways_in()]
    if kind == "orphan":
        command = ["setsid", "--fork", *command]
    # No pipe: a way that nobody answers keeps the streams that were sent along it open.
    subprocess.run(command, cwd=ROOT, check=True, timeout=100, stdout=subprocess.DEVNULL)
    assert kind != "orphan" or until(where.with_suffix(".done").exists, 100)
    return where.exists()


def test_no_stranger_runs_code_as_this_user_or_ends_its_job(node, tmp_path, caplog):
    assert not ask(node, tmp_path, "orphan")
    assert node.group.state.closed is None
    assert (refused := node.refused) > 0
    assert f"of user {os.getuid()}, which this node's agent has not started" in caplog.text
    if os.getuid() == 0:
        assert not ask(node, tmp_path, "user")
        assert node.group.state.closed is None
        assert node.refused == refused  # it did not even find the way
    assert ask(node, tmp_path, "child")
    assert node.group.state.closed.code == 0
