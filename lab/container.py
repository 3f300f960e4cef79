"""Containers that stand for the machines of local nodes.

A container has its own /dev/shm, which is lost when it is killed, and its own network interface,
which can be cut off. A sleeping process holds its namespaces, and the agent of the node enters
them. Containers need root. Without root, all local nodes share the memory and network of this
machine.

`python -m lab.container hold [net]` holds a container. `python -m lab.container enter PID MODULE …`
runs a module in it, as `python -m` does.
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
    """Linux namespaces, and the process that holds them."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, network: "Container | None" = None, address: str = "") -> Self:
        """Create a container, which ends with the calling process.

        Args:
            network: from `start_network`; the container is connected to it. None: the container
                uses this machine's network.
            address: IP address in that network, such as 10.77.0.11.

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
        """Create a container with a bridge, to which other containers connect. Raises
        PermissionError if the user is not root."""
        container = cls._hold("net")
        try:
            container.command("ip link set lo up")
            # Fixed MAC address: by default it changes with the ports, and peers keep using the old.
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
            raise PermissionError("separate memory or networks for local nodes need root")
        return cls(process)

    def command(self, line: str) -> None:
        """Run a command in the container's network namespace. Raises OSError with its stderr if the
        command failed."""
        inside = ["nsenter", f"--net=/proc/{self.process.pid}/ns/net", *line.split(" ")]
        done = subprocess.run(inside, check=False, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{line}: {done.stderr.strip()}")

    def cut(self, *, incoming: bool = True, outgoing: bool = True) -> None:
        """Drop incoming packets, outgoing packets, or both, silently as a pulled cable does."""
        self.command("nft add table inet cut")
        for wanted, hook, way in ((incoming, "input", "iifname"), (outgoing, "output", "oifname")):
            if wanted:
                chain = f"{{ type filter hook {hook} priority 0 ; }}"
                self.command(f"nft add chain inet cut {hook} {chain}")
                self.command(f"nft add rule inet cut {hook} {way} eth0 drop")

    def heal(self) -> None:
        """Undo `cut`; without a cut, do nothing."""
        with suppress(OSError):
            self.command("nft delete table inet cut")

    @property
    def memory(self) -> Path:
        """Path of the container's /dev/shm from outside."""
        return Path(f"/proc/{self.process.pid}/root{SHARED_MEMORY}")

    @property
    def inside(self) -> list[str]:
        """Arguments of `python -m` that go before a module to run it in the container."""
        return ["lab.container", "enter", str(self.process.pid)]

    def kill(self) -> None:
        """Kill the holding process; the memory is freed with the last process inside."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def possible() -> bool:
    """Whether this user can create containers."""
    return sys.platform == "linux" and os.geteuid() == 0


@cache
def network_possible() -> bool:
    """Whether this user can create containers with their own networks, and cut them off."""
    if not possible() or not all(map(shutil.which, ("ip", "nft", "nsenter"))):
        return False
    try:
        container = Container.start_network("10.77.0.1")
    except OSError:
        return False
    try:
        container.cut()
    # inside some outer containers, namespaces are allowed but packet filters are not
    except OSError:
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
