"""A pretended machine for a local node: shared memory of its own, which is gone when it is killed.

A mount namespace with a /dev/shm of its own, held by a process that only sleeps; takes root. The
agent of the node enters it. Without root all local nodes share the memory of the real machine.

`python -m elastic.machine hold` is the one, `python -m elastic.machine enter PID MODULE ARGUMENT …`
runs a module like `python -m` in the other.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elastic.process import die_with_parent

SHARED_MEMORY = "/dev/shm"
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


@dataclass
class Machine:
    """The process that holds one."""

    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls) -> Self:
        """Make one; ends with the calling process.

        Raises:
            PermissionError: not root.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic.machine", "hold"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        ready = process.stdout.readline() if process.stdout else b""
        if ready != b"ready\n":
            process.wait()
            raise PermissionError("shared memory of its own for each local node takes root")
        return cls(process)

    @property
    def memory(self) -> Path:
        """Its /dev/shm, seen from here."""
        return Path(f"/proc/{self.process.pid}/root{SHARED_MEMORY}")

    @property
    def run(self) -> list[str]:
        """Command that runs a module and its arguments on it."""
        return [sys.executable, "-m", "elastic.machine", "enter", str(self.process.pid)]

    def kill(self) -> None:
        """Give it up; its memory goes with the last of its processes."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def possible() -> bool:
    """Whether this user can make machines."""
    return sys.platform == "linux" and os.geteuid() == 0


def _hold() -> None:
    die_with_parent()
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"tmpfs", SHARED_MEMORY.encode(), b"tmpfs", 0, b"mode=1777"))
    print("ready", flush=True)
    while True:
        signal.pause()


def _enter(pid: int) -> None:
    directory = os.getcwd()
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    _check(ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNS))
    os.close(namespace)
    os.chdir(directory)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    if sys.argv[1:] == ["hold"]:
        try:
            _hold()
        except OSError:
            sys.exit(1)
    die_with_parent()
    _enter(int(sys.argv[2]))
    del sys.argv[:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
