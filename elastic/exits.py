"""Exit codes of a run, as schedulers see them, and the signals that ask a run to leave."""

import os
import signal
from contextlib import suppress
from typing import NoReturn

EXIT_DONE = 0
"""All steps of the run are done."""
EXIT_FAILED = 1
"""An error that has no exit code of its own; the log has its traceback."""
EXIT_WRONG_INPUT = 2
"""Wrong recipe or input, noticed before the first rendezvous."""
EXIT_REQUEUE = 75
"""The run left on a notice and saved its state: start the same command again (EX_TEMPFAIL)."""
EXIT_PAUSED = 76
"""From a training process to its agent: paused as requested, with its state saved."""
EXIT_PEER_GONE = 77
"""From a training process to its agent: it lost the connection to another rank."""
EXIT_MENDED = 78
"""From a training process to its agent: it failed, and has removed the cause."""
EXIT_OUTVOTED = 79
"""From a training process to its agent: other ranks found twice that it computes wrongly."""
EXIT_DO_NOT_REQUEUE = 93
"""A restart would not help: the job makes no progress, or its numbers stay non-finite."""
EXIT_INTERRUPTED = 130
"""The user ended the run by Ctrl-C. Its state is saved unless a second Ctrl-C came first."""


def leaving_code(number: int) -> int:
    """Exit code of a process that leaves because of signal `number`."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE


SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}
"""Signals that ask a process to leave. Slurm's `--signal=USR1@60` sends SIGUSR1, Ctrl-C is SIGINT,
and SIGHUP says that the terminal is closed."""


def handled_signals() -> set[signal.Signals]:
    """The SIGNALS that this process handles. Call it before the first handler is installed: a
    SIGHUP that the process was started to ignore, as `nohup` does, stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return SIGNALS - ({signal.SIGHUP} if ignored else set())


def leave_at_once(number: int, _: object = None) -> NoReturn:
    """Signal handler of a process that has nothing to save: leave with `leaving_code(number)`.
    Child processes started with `die_with_parent` die with it."""
    name = signal.Signals(number).name
    with suppress(OSError):  # standard error may have no reader
        os.write(2, f"{name}: ended, with nothing to save\n".encode())
    os._exit(leaving_code(number))
