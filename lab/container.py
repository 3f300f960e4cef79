"""A container, which stands for the machine of a local node: it has shared memory of its own, which
is gone when it is killed, and a network interface of its own, whose cable can be pulled.

It is namespaces held by a process that only sleeps; the agent of the node enters them. That takes
root: without it all local nodes share the memory and the network of the real machine.

`python -m lab.container hold [net]` holds one. `python -m lab.container enter PID MODULE …` runs a
module in it, as `python -m` does.
"""

import ctypes
import os
import runpy
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from elastic.process import die_with_parent

SHARED_MEMORY = "/dev/shm"
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


@dataclass
class Container:
    """Namespaces, and the process that holds them."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, network: "Container | None" = None, address: str = "") -> Self:
        """Make one; ends with the calling process.

        Args:
            network: what `start_network` has made, to plug this one in; else it has the network of
                the real machine.
            address: its own there, such as 10.77.0.11.

        Raises:
            PermissionError: not root.
        """
        container = cls._hold(*(["net"] if network else []))
        if network:
            port = f"port-{address.rpartition('.')[2]}"
            network.command(
                f"ip link add {port} type veth peer name eth0 netns {container.process.pid}"
            )
            network.command(f"ip link set {port} master switch up")
            container.command("ip link set lo up")
            container.command(f"ip address add {address}/24 dev eth0")
            container.command("ip link set eth0 up")
        return container

    @classmethod
    def start_network(cls, address: str) -> Self:
        """Make the machine that the others are plugged into: a bridge with an address of its own.

        Raises:
            PermissionError: not root.
        """
        container = cls._hold("net")
        try:
            container.command("ip link set lo up")
            # With an address of its own: else a bridge takes that of one of its machines, another
            # one when machines come and go, and the old ones send to the address that it had.
            container.command("ip link add switch address 02:00:0a:4d:00:01 type bridge")
            container.command(f"ip address add {address}/24 dev switch")
            container.command("ip link set switch up")
        except OSError:
            container.kill()
            raise
        return container

    @classmethod
    def _hold(cls, *options: str) -> Self:
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.container", "hold", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        ready = process.stdout.readline() if process.stdout else b""
        if ready != b"ready\n":
            process.wait()
            raise PermissionError("memory or a network of its own for each local node takes root")
        return cls(process)

    def command(self, line: str) -> None:
        """Run a command in its network.

        Raises:
            OSError: it failed; says how.
        """
        inside = ["nsenter", f"--net=/proc/{self.process.pid}/ns/net", *line.split(" ")]
        done = subprocess.run(inside, check=False, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{line}: {done.stderr.strip()}")

    def cut(self, *, incoming: bool = True, outgoing: bool = True) -> None:
        """Let nothing in, or out, or neither: silently, as when a cable is pulled."""
        self.command("nft add table inet cut")
        for wanted, hook, way in ((incoming, "input", "iifname"), (outgoing, "output", "oifname")):
            if wanted:
                chain = f"{{ type filter hook {hook} priority 0 ; }}"
                self.command(f"nft add chain inet cut {hook} {chain}")
                self.command(f"nft add rule inet cut {hook} {way} eth0 drop")

    def heal(self) -> None:
        """Take back what `cut` did, if it is still there."""
        with suppress(OSError):
            self.command("nft delete table inet cut")

    @property
    def memory(self) -> Path:
        """Its /dev/shm, seen from here."""
        return Path(f"/proc/{self.process.pid}/root{SHARED_MEMORY}")

    @property
    def inside(self) -> list[str]:
        """What `python -m` wants before a module and its arguments to run it in there."""
        return ["lab.container", "enter", str(self.process.pid)]

    def kill(self) -> None:
        """Give it up; its memory goes with the last of its processes."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def possible() -> bool:
    """Whether this user can make containers."""
    return sys.platform == "linux" and os.geteuid() == 0


@cache
def network_possible() -> bool:
    """Whether this user can make containers with networks of their own, and cut them off."""
    if not possible() or not all(map(shutil.which, ("ip", "nft", "nsenter"))):
        return False
    try:
        container = Container.start_network("10.77.0.1")
    except OSError:
        return False
    try:
        container.cut()
    except OSError:  # a container that may have namespaces, but no filters
        return False
    finally:
        container.kill()
    return True


def _hold(network: bool) -> None:
    die_with_parent()
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS | (_CLONE_NEWNET if network else 0)))
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"tmpfs", SHARED_MEMORY.encode(), b"tmpfs", 0, b"mode=1777"))
    print("ready", flush=True)
    while True:
        signal.pause()


def _enter(pid: int) -> None:
    directory = os.getcwd()
    for kind, flag in (("net", _CLONE_NEWNET), ("mnt", _CLONE_NEWNS)):
        namespace = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        _check(ctypes.CDLL(None, use_errno=True).setns(namespace, flag))
        os.close(namespace)
    os.chdir(directory)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        try:
            _hold("net" in sys.argv)
        except OSError:
            sys.exit(1)
    die_with_parent()
    _enter(int(sys.argv[2]))
    del sys.argv[:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
