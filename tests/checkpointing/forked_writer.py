"""A writer process that is forked from its rank, which has its modules: a new interpreter takes a
fifth of a second of a core to import them."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

from checkpointing.save import link, writer

start_new = link.launch


def launch() -> "subprocess.Popen[bytes] | ForkedWriter":
    """As link.launch. Faults are planted in new interpreters alone."""
    return start_new() if "WRITER_FAULTS" in os.environ else ForkedWriter()


class ForkedWriter:
    """What of a `Popen` is used of a writer."""

    def __init__(self) -> None:
        setup, given = os.pipe()
        told, port = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become_writer(setup, port)
        os.close(setup)
        os.close(port)
        self.stdin, self.stdout = os.fdopen(given, "wb"), os.fdopen(told, "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the writer", timeout)
            time.sleep(0.002)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_writer(setup: int, port: int) -> None:
    """Run a writer with nothing of this process but modules, environment and stderr."""
    try:
        gc.freeze()  # objects of torch would wait for threads that are not here
        os.setsid()
        os.dup2(setup, 0)
        os.dup2(port, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        logging.root.handlers.clear()
        threading.excepthook = threading.__excepthook__  # pytest collects errors of threads
        writer.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
