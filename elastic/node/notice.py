"""Notices that this process, or its machine, is going to be taken away."""

import logging
import os
import signal
import threading

from elastic.exits import EXIT_PAUSED, SIGNALS, leave_at_once, leaving_code
from elastic.node.progress import Pulse
from elastic.world import supervised

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


def watch_signals(pulse: Pulse) -> None:
    """Take SIGTERM, SIGUSR1 and Ctrl-C as notices: the ranks agree on a last step, save and leave;
    a second Ctrl-C ends this process at once.

    A Python signal handler does not run while the main thread is in a collective, so the signals
    are blocked, here and in every thread and process started later (a data worker must not die of
    the group's SIGTERM before the last step has its data), and a thread waits for them. Somebody
    may let them through again: the resource tracker of multiprocessing does, up to Python 3.12,
    when the first shared memory is made. Then they are blocked and sent anew. To be called in the
    main thread, before there are others.

    An agent of ours takes Ctrl-C itself, and ends its ranks where they have nothing to save. Under
    torchrun's own agent SIGTERM is what ends a rank whose peers failed, possibly in a collective
    that will never end; there it stays deadly.
    """
    if "RANK" in os.environ and not supervised():
        return
    _block()
    for number in SIGNALS:
        signal.signal(number, _block)
    threading.Thread(target=_wait, args=(pulse,), name="perdure-notice", daemon=True).start()


def _block(number: int | None = None, _: object = None) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if number:
        os.kill(os.getpid(), number)


def pause_code(pulse: Pulse) -> int:
    """How a rank leaves that has paused."""
    return EXIT_PAUSED if supervised() else leaving_code(pulse.noticed)


def _wait(pulse: Pulse) -> None:
    number = signal.sigwait(SIGNALS)
    logger.warning("%s: saving after this step, then leaving", signal.Signals(number).name)
    pulse.notice(number)
    if supervised():
        return
    interrupted = number == signal.SIGINT
    while not pulse.safe:
        again = signal.sigtimedwait({signal.SIGINT}, LOOK_SECONDS)
        if again and interrupted:
            number = signal.SIGINT
            break
        interrupted = interrupted or again is not None
    leave_at_once(number)
