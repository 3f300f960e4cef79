"""Notices that this process, or its machine, is going to be taken away."""

import logging
import os
import signal
import threading

from elastic.progress import Pulse
from elastic.world import supervised

logger = logging.getLogger(__name__)

SIGNALS = {signal.SIGTERM, signal.SIGUSR1}
"""SIGUSR1 is what Slurm's `--signal=USR1@60` sends."""


def watch_signals(pulse: Pulse) -> None:
    """Take SIGTERM and SIGUSR1 as notices: the ranks agree on a last step, save and leave.

    A Python signal handler does not run while the main thread is in a collective, so the signals
    are blocked, here and in every thread and process started later (a data worker must not die of
    the group's SIGTERM before the last step has its data), and a thread waits for them. To be
    called in the main thread, before there are others.

    Under torchrun's own agent SIGTERM is what ends a rank whose peers failed, possibly in a
    collective that will never end; there it stays deadly.
    """
    if "RANK" in os.environ and not supervised():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_wait, args=(pulse,), name="perdure-notice", daemon=True).start()


def _wait(pulse: Pulse) -> None:
    while True:
        number = signal.sigwait(SIGNALS)
        logger.warning("%s: saving after this step, then leaving", signal.Signals(number).name)
        pulse.notice()
