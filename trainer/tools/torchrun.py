"""Ranks on this machine, for commands that need some."""

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
"""How long processes that are killed may take to go."""


def run_ranks(
    worker: Sequence[str],
    ranks: int,
    *,
    output: IO[bytes] | None,
    errors: IO[bytes] | int = subprocess.STDOUT,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a worker under torchrun to the end; nothing of it is left then, however this ends.

    Args:
        worker: arguments of Python, such as `-m trainer`.
        ranks: of this machine.
        output: where they print; None: where this process does.
        errors: likewise, of what goes to stderr.
        environment: added to that of this process.

    Returns:
        The exit code of torchrun.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic.process", *torchrun, *worker],
        env={
            "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **os.environ,
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,  # Ctrl-C is for this process; it ends the others
    )
    try:
        return process.wait()
    finally:
        family = signal_family(process.pid, signal.SIGKILL) if process.poll() is None else []
        process.wait()
        paths = [Path(f"/proc/{pid}") for pid in family]
        remaining(lambda: [str(path) for path in paths if path.exists()], GONE_SECONDS)


def stop_on_sigterm() -> None:
    """SIGTERM ends this process as Ctrl-C does: with all that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
