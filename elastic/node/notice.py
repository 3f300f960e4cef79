"""Notices that this process, or its machine, is going to be taken away."""

import logging
import os
import signal
import threading
from collections.abc import Set
from functools import partial
from types import FrameType

from elastic.exits import EXIT_PAUSED, heeded, leave_at_once, leaving_code
from elastic.node.progress import Pulse
from elastic.world import supervised

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1


def watch_signals(pulse: Pulse) -> None:
    """Take SIGTERM, SIGUSR1, SIGHUP and Ctrl-C as notices: the ranks agree on a last step, save and
    leave; a second Ctrl-C ends this process at once. A SIGHUP that is ignored stays ignored.

    A Python signal handler does not run while the main thread is in a collective, so the signals
    are blocked, here and in every thread and process started later (a data worker must not die of
    the group's SIGTERM before the last step has its data), and a thread waits for them. Somebody
    may let them through again: the resource tracker of multiprocessing does, up to Python 3.12,
    when the first shared memory is made. Then they are blocked and sent anew. To be called in the
    main thread, before there are others.

    An agent of ours takes Ctrl-C itself, and ends its ranks where they have nothing to save. Under
    torchrun's own agent SIGTERM is what ends a rank whose peers failed, possibly in a collective
    that will never end; there it stays deadly. So does all but SIGHUP, which that agent passes on
    when its terminal is closed; it kills what has not ended 30 s later.
    """
    notices = heeded()
    if "RANK" in os.environ and not supervised():
        notices &= {signal.SIGHUP}
    if not notices:
        return

    def block(number: int | None = None, _: FrameType | None = None) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, notices)
        if number:
            os.kill(os.getpid(), number)

    block()
    for number in notices:
        signal.signal(number, block)
    take = partial(_wait, pulse, notices)
    threading.Thread(target=take, name="perdure-notice", daemon=True).start()


def pause_code(pulse: Pulse) -> int:
    """How a rank leaves that has paused."""
    return EXIT_PAUSED if supervised() else leaving_code(pulse.noticed)


def _wait(pulse: Pulse, notices: Set[signal.Signals]) -> None:
    number = signal.sigwait(notices)
    logger.warning("%s: saving after this step, then leaving", signal.Signals(number).name)
    pulse.notice(number)
    if supervised():
        return
    interrupted = number == signal.SIGINT
    while not pulse.safe:
        again = signal.sigtimedwait({signal.SIGINT} & notices, LOOK_SECONDS)
        if again and interrupted:
            number = signal.SIGINT
            break
        interrupted = interrupted or again is not None
    leave_at_once(number)
