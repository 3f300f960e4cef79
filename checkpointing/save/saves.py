"""A rank's saves, as the writer of its node tells of them: which is running, how each ended, and
how long to wait for a word."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from checkpointing.errors import SaveFailed, StorageError
from checkpointing.format.layout import (
    COMMIT_RECORD,
    LATEST,
    OPTIMIZER,
    TRAINER_STATE,
    json_bytes,
)
from checkpointing.format.untrusted import is_plain
from checkpointing.options import CheckpointOptions
from checkpointing.ranks import Ranks
from checkpointing.save import messages as msg
from checkpointing.save.link import GONE, Link, UnansweredError, WriterGoneError
from checkpointing.save.slots import Slots

POLL_SECONDS = 60.0
"""Longest wait for a message before clocks are looked at again."""


class Saves:
    """What a rank hears of its saves. Methods that take a link raise WriterGoneError when nobody is
    there, unless they say otherwise.

    Args:
        options: the `checkpoint:` section.
        ranks: by which it is known how long this one waits.
        committed: told of each step that was committed.
    """

    def __init__(
        self, options: CheckpointOptions, ranks: Ranks, committed: Callable[[int], None]
    ) -> None:
        self._options, self._ranks, self._committed = options, ranks, committed
        self._running: tuple[int, bool] | None = None
        """The step that is being saved, and whether to memory only."""
        self._overdue_at = 0.0
        """When that is to be given up here."""
        self._outcomes: list[msg.SaveOutcome] = []
        self._last_given: msg.SaveOutcome | None = None
        """How the last save ended, once `outcomes` has given that out."""

    def begun(self, step: int, memory_only: bool) -> None:
        """A save is running from now on."""
        self._running, self._last_given = (step, memory_only), None
        self._overdue_at = time.monotonic() + self._patience(self._options.deadline)

    def skipped(self, step: int, reason: str) -> None:
        """A save was left out."""
        self._outcomes.append(msg.SaveOutcome(step, None, f"step {step} is not saved: {reason}"))

    def outcomes(self, link: Link | None) -> list[msg.SaveOutcome]:
        """Saves that ended since the last call, good or bad. Does not wait, nor raise."""
        self._listen(link, 0)
        ended, self._outcomes = self._outcomes, []
        self._last_given = ended[-1] if ended else self._last_given
        return ended

    def end(self, link: Link | None) -> None:
        """Until nothing is being saved, however that ends. Does not raise."""
        self._listen(link, math.inf)

    def raise_last(self) -> None:
        """Raises SaveFailed: the last save failed."""
        last = self._outcomes[-1] if self._outcomes else self._last_given
        if last and last.error:
            raise SaveFailed(str(last.error), last.node or 0, last.file, last.errno)

    def _listen(self, link: Link | None, until: float) -> None:
        try:
            while link and self._running is not None:
                message = self._next(link, until)
                if message:
                    self._hear(message)
                elif not until:
                    break
        except WriterGoneError:
            self.lost_writer()

    def close(self, link: Link, keep_memory: bool, seconds: float | None) -> bool:
        """Tell the writer that nothing more is to be saved, and wait until all is done; whether it
        is, or the writer is gone. Does not raise.

        Args:
            link: to the writer.
            keep_memory: whether what was copied last stays in memory.
            seconds: how long to wait; None: as long as a save may take.
        """
        closed = False
        most = self._patience(self._options.deadline) if seconds is None else seconds
        until = time.monotonic() + most
        try:
            link.send(msg.Close(keep_memory))
            while not closed and time.monotonic() < until:
                message = self._next(link, until)
                if message:
                    closed = isinstance(message, msg.Closed)
                    self._hear(message)
        except WriterGoneError:
            closed = True
            self.lost_writer()
        return closed

    def slots(self, link: Link, addresses: msg.Addresses, want: msg.WantSlots) -> Slots:
        """The slots that the writer makes for a plan.

        Raises:
            StorageError: it makes none.
        """
        link.send(addresses)
        link.send(want)
        until = time.monotonic() + self._patience(self._options.deadline)
        while True:
            message = self._answered(link, until)
            if isinstance(message, msg.NoSlots):
                raise StorageError(message.reason)
            if isinstance(message, msg.SlotsMade) and message.digest == want.digest:
                return message.slots
            self._hear(message)

    def ask(self, link: Link, begin: msg.Begin) -> msg.RankAnswer:
        """Ask to save; the answer.

        Raises:
            UnansweredError: nobody is there any more, after the request was sent.
        """
        link.send(begin)
        patience = self._patience(min(self._options.deadline, 2 * msg.ANSWER_SECONDS))
        until = max(self._overdue_at if self._running else 0, time.monotonic()) + patience
        try:
            while True:
                message = self._answered(link, until)
                if isinstance(message, msg.RankAnswer) and message.key == begin.key:
                    return message
                self._hear(message)
        except WriterGoneError as gone:
            raise UnansweredError(str(gone)) from gone

    def _answered(self, link: Link, until: float) -> msg.ToRank:
        """The next message of a writer that owes an answer. One that gives none is ended."""
        while True:
            message = self._next(link, until)
            if message:
                return message
            if time.monotonic() >= until:
                link.kill()
                raise WriterGoneError("the checkpoint writer process of this node does not answer")

    def _next(self, link: Link, until: float) -> msg.ToRank | None:
        """The next message of the writer, waited for until then at most. If the save that is
        running is overdue, the writer of this node is ended: it may be stopped, or what holds it
        up may be nothing that a process can be woken from."""
        limit = min(until, self._overdue_at) if self._running else until
        message = link.receive(min(max(0.0, limit - time.monotonic()), POLL_SECONDS))
        if message is None and self._running and time.monotonic() >= self._overdue_at:
            link.kill()
            self.lost_writer(msg.overdue(self._options))
            raise WriterGoneError(GONE)
        return message

    def _patience(self, seconds: float) -> float:
        """How long this rank waits for what is due after so long. The coordinator gives up first,
        as it knows what is missing; then the ranks of its node, who end it if it hangs; then the
        others, to whom it is news when their writers do not hear of that."""
        return seconds * (1.1 if self._ranks.node == 0 else 1.2)

    def _hear(self, message: msg.ToRank) -> None:
        if not isinstance(message, msg.Ended):
            return
        outcome = message.outcome
        if self._running and outcome.step == self._running[0]:
            # Not the outcome's: a writer that has lost the coordinator does not know.
            (_, memory_only), self._running = self._running, None
            if memory_only:
                return
            self._outcomes.append(outcome)
            if outcome.path:
                self._committed(outcome.step)

    def lost_writer(self, why: str = "the checkpoint writer process of this node died") -> None:
        """The save that is running has failed."""
        if self._running is not None:
            (step, memory_only), self._running = self._running, None
            if memory_only:
                return
            error = f"saving step {step} failed: {why}; earlier checkpoints are untouched"
            self._outcomes.append(msg.SaveOutcome(step, None, error))


def checked_state(
    state: Mapping[str, Any], files: Mapping[str, bytes], taken: Collection[str]
) -> bytes:
    """trainer_state.json, if it and the other files can be saved.

    Args:
        state: JSON values.
        files: by name.
        taken: names that these files may not have.

    Raises:
        ValueError: they cannot; says which and why.
    """
    reserved = {TRAINER_STATE, COMMIT_RECORD, LATEST, OPTIMIZER.stem, *taken}
    for name in files:
        if name in reserved or name.startswith(OPTIMIZER.folder) or not is_plain(name):
            raise ValueError(f"files: {name!a} is not a plain name, or is taken")
        if not isinstance(files[name], bytes):
            raise ValueError(f"files: {name} is {type(files[name]).__name__}, not bytes")
    try:
        return json_bytes(dict(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"state: JSON does not take it: {error}") from error
