"""Exit codes of a run, as schedulers see them, and the signals that lead to some of them."""

import os
import signal
from contextlib import suppress
from typing import NoReturn

EXIT_DONE = 0
"""All steps are done."""
EXIT_FAILED = 1
"""Anything else went wrong: an error, with its traceback in the log."""
EXIT_WRONG_INPUT = 2
"""Wrong recipe or input, found before any rendezvous."""
EXIT_REQUEUE = 75
"""Told to go, state saved: start the same command again (EX_TEMPFAIL of sysexits.h)."""
EXIT_PAUSED = 76
"""From a training process to the agent that asked it to pause: its state is saved."""
EXIT_PEER_GONE = 77
"""From a training process to its agent: it lost the connection to another rank."""
EXIT_MENDED = 78
"""From a training process to its agent: it failed, and has seen to it that the next attempt does
not fail in the same way. That is no failure to count."""
EXIT_DO_NOT_REQUEUE = 93
"""A restart would not mend it: no progress, bad numbers that persist."""
EXIT_INTERRUPTED = 130
"""Ctrl-C; state saved if there was time for it."""


def leaving_code(number: int) -> int:
    """How a process leaves that was told to go by a signal."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE


SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}
"""By which a process is told to go. SIGUSR1 is what Slurm's `--signal=USR1@60` sends, SIGINT is
Ctrl-C, SIGHUP says that the terminal is closed."""


def heeded() -> set[signal.Signals]:
    """The SIGNALS that this process is to take; to be asked before it takes one. A SIGHUP that it
    was started to ignore, as `nohup` has it, stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return SIGNALS - ({signal.SIGHUP} if ignored else set())


def leave_at_once(number: int, _: object = None) -> NoReturn:
    """Leave as when told to go, with nothing to save; a handler of SIGNALS. What this process has
    started dies with it."""
    name = signal.Signals(number).name
    with suppress(OSError):  # nobody reads it
        os.write(2, f"{name}: ended, with nothing to save\n".encode())
    os._exit(leaving_code(number))
