"""Python runs this at the start of every process that finds it on its path: the functions that make
and compare MACs, and the checks, note when they ended, how long they took, and what it cost of a
core. benchmarks/support/macs.py reads the notes."""

import os
import sys
import time
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

TIMED = {
    "hmac": ("compare_digest",),
    "checkpointing.save.channel": ("_mac",),
    "checkpointing.save.peers": ("_mac",),
    "checkpointing.load.memory": ("check",),
    "elastic.group.job_secret": ("read_secret", "_keyed"),
    "elastic.node.agent": ("descends",),
    "trainer.run.identity": ("check_agreement",),
}
FOLDER = os.environ["PERDURE_BENCH_MACS"]
_command = " ".join(sys.orig_argv)
_files: dict[int, int] = {}
"""By process: its descriptor."""


class Finder:
    """Finds the modules of `TIMED` before others do."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What Python asks of each entry of its meta path."""
        spec = PathFinder.find_spec(name, path, target) if name in TIMED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for function in TIMED[name]:
                setattr(module, function, timed(f"{name}.{function}", getattr(module, function)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # timed
        return spec


def timed(name: str, function: Any) -> Any:
    """Notes its calls."""

    @wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **more)
        finally:
            took = time.perf_counter() - wall, time.thread_time() - cpu
            line = f"{time.time():.6f} {name} {took[0]:.9f} {took[1]:.9f}\n"
            os.write(_notes(), line.encode())

    return call


def _notes() -> int:
    """The file of this process."""
    pid = os.getpid()
    if pid not in _files:  # also after a fork
        with open("/proc/self/comm") as comm:  # of a thread, but those are started later
            _, prefix, role = comm.read().strip().partition("perdure-")
        if not prefix:
            role = "writer" if "writer" in _command else "agent"
        path = f"{FOLDER}/{role}-{pid}-{time.time_ns()}"
        _files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return _files[pid]


sys.meta_path.insert(0, Finder)
