"""Workers of pytest-xdist, forked from a process that has imported what tests import, and one fork
server for the jobs of all workers.

Each worker and each server of its own would spend ten seconds of CPU time on the same imports.
"""

import atexit
import gc
import importlib
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import pytest
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

IMPORTED = (
    "tests.distributed.jobs", "tests.distributed.warm", "transformers.modeling_utils",
    "transformers.generation.utils", "transformers.models.qwen3.modeling_qwen3",
    "torch._dynamo.backends.debugging", "torchao.quantization",
)  # fmt: skip
"""None of these starts a thread, as pyarrow does: a fork would lack it."""
_waiting: list[tuple[int, BinaryIO, BinaryIO]] = []
"""(process, its standard input, its standard output) of forks that no gateway has yet."""


class ForkedIO(Popen2IO):
    """The controller's end of a worker."""

    def __init__(self, _arguments: list[str], execmodel: Any) -> None:
        self._process, stdin, stdout = _waiting.pop(0)
        super().__init__(stdin, stdout, execmodel=execmodel)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])

    def kill(self) -> None:
        os.kill(self._process, signal.SIGKILL)


@pytest.hookimpl(optionalhook=True)  # as there may be no pytest-xdist
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """All are forked before the first gateway, which starts threads. A worker that takes the place
    of one that crashed is an interpreter of its own."""
    for name in IMPORTED:
        with suppress(ImportError):  # what is not installed is not needed
            importlib.import_module(name)
    gc.freeze()  # a collection would write to pages that the workers share
    sys.stdout.flush()  # or each worker would print what waits here
    if len(list(Path("/proc/self/task").iterdir())) == 1:
        forkserver.ensure_running()
        for _ in specs:
            _waiting.append(_fork())
    interpreter = gateway_io.Popen2IOMaster

    def launched(arguments: list[str], execmodel: Any) -> Popen2IO:
        return (ForkedIO if _waiting else interpreter)(arguments, execmodel)

    gateway_io.Popen2IOMaster = launched


def _fork() -> tuple[int, BinaryIO, BinaryIO]:
    (reads, we_write), (we_read, writes) = os.pipe(), os.pipe()
    if process := os.fork():
        os.close(reads)
        os.close(writes)
        return process, os.fdopen(we_write, "wb"), os.fdopen(we_read, "rb")
    try:
        # A worker ends when nobody can write to its standard input any more.
        for file in (file for _, *files in _waiting for file in files):
            file.close()
        for descriptor, own in ((reads, 0), (writes, 1)):
            os.dup2(descriptor, own)
            os.close(descriptor)
        os.close(we_write)
        os.close(we_read)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        # It asks by waitpid whether the server still runs, which only its parent may.
        forkserver._forkserver.ensure_running = lambda: None
        # Not pytest's own, which processes that this one spawns would import, too.
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(gateway_io.popen_bootstrapline, vars(main))
        atexit._run_exitfuncs()  # as at the end of an interpreter
    finally:
        os._exit(0)
