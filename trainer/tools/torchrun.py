"""Starts ranks on this machine, for commands that need them."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

from elastic.process import remaining, signal_family, usable_cores

GONE_SECONDS = 5.0
"""Seconds that killed processes may take to exit."""


def run_ranks(
    worker: Sequence[str],
    ranks: int,
    *,
    output: IO[bytes] | None = None,
    errors: IO[bytes] | int = subprocess.STDOUT,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a worker under torchrun to its end, and return torchrun's exit code. No process remains,
    even after an exception.

    Args:
        worker: arguments of Python, such as `-m trainer`.
        ranks: number of processes.
        output: file for the stdout of the ranks; None: this process's stdout.
        errors: file for their stderr; by default that of their stdout.
        environment: added to this process's environment.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))}
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic.process", *torchrun, *worker],
        env={**threads, "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        # own session: Ctrl-C reaches only this process, which then kills torchrun and all ranks
        start_new_session=True,
    )
    try:
        return process.wait()
    finally:
        family = signal_family(process.pid, signal.SIGKILL) if process.poll() is None else []
        process.wait()
        paths = [Path(f"/proc/{pid}") for pid in family]
        remaining(lambda: [str(path) for path in paths if path.exists()], GONE_SECONDS)


def stop_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does, with all its children."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
