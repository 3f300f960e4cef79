"""A rank's part in saves: its requests to the writer of its node, and the outcomes."""

import hashlib
import math
import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from checkpointing.errors import SaveFailed, StorageError
from checkpointing.format.layout import COMMIT_RECORD, LATEST, OPTIMIZER, TRAINER_STATE, json_bytes
from checkpointing.format.untrusted import is_plain
from checkpointing.options import CheckpointOptions
from checkpointing.ranks import RankGroup
from checkpointing.save import messages as msg
from checkpointing.save.channel import job_secret
from checkpointing.save.link import (
    END_SECONDS,
    GONE,
    SpareWriter,
    WriterGoneError,
    WriterLink,
    WriterUnansweredError,
    end,
    own_address,
)
from checkpointing.save.planning import SavePlan
from checkpointing.save.slots import SaveSlots
from checkpointing.save.staging import SaveStaging

POLL_SECONDS = 60.0
"""Longest wait in seconds for a message before the deadlines are checked again."""


class SaveTracker:
    """Follows the saves of a rank by the messages of its node's writer: which save is running, and
    how each ended. Calls `committed` with each committed step. Methods with a `link` raise
    WriterGoneError if it is broken, unless they say otherwise."""

    def __init__(
        self, options: CheckpointOptions, ranks: RankGroup, committed: Callable[[int], None]
    ) -> None:
        self._options, self._ranks, self._committed = options, ranks, committed
        self._running: tuple[int, bool] | None = None
        """(step of the running save, whether it is only to memory); None: no save is running."""
        self._overdue_at = 0.0
        """Time, by time.monotonic(), at which this rank abandons the running save."""
        self._outcomes: list[msg.SaveOutcome] = []
        self._last_returned: msg.SaveOutcome | None = None
        """Outcome of the last save, once `outcomes` has returned it."""

    def begun(self, step: int, memory_only: bool) -> None:
        self._running, self._last_returned = (step, memory_only), None
        self._overdue_at = time.monotonic() + self._patience(self._options.deadline)

    def skipped(self, step: int, reason: str) -> None:
        self._outcomes.append(msg.SaveOutcome(step, None, f"step {step} is not saved: {reason}"))

    def outcomes(self, link: WriterLink | None) -> list[msg.SaveOutcome]:
        """Returns the outcomes since the last call. Neither waits nor raises."""
        self._receive(link, 0)
        ended, self._outcomes = self._outcomes, []
        self._last_returned = ended[-1] if ended else self._last_returned
        return ended

    def end(self, link: WriterLink | None) -> None:
        """Wait until no save is running. Raises nothing."""
        self._receive(link, math.inf)

    def raise_last(self) -> None:
        """Raises SaveFailed if the last save failed."""
        last = self._outcomes[-1] if self._outcomes else self._last_returned
        if last and last.error:
            raise SaveFailed(str(last.error), last.node or 0, last.file, last.errno)

    def _receive(self, link: WriterLink | None, until: float) -> None:
        try:
            while link and self._running is not None:
                message = self._next(link, until)
                if message:
                    self._handle(message)
                elif not until:
                    break
        except WriterGoneError:
            self.lost_writer()

    def close(self, link: WriterLink, keep_memory: bool, seconds: float | None) -> bool:
        """Tell the writer that no save will follow, and whether to keep the slots for a restart.
        Wait for its work, at most `seconds`; None: as long as a save may take. Returns whether the
        work is done or the writer is gone. Raises nothing."""
        closed = False
        most = self._patience(self._options.deadline) if seconds is None else seconds
        until = time.monotonic() + most
        try:
            link.send(msg.RankClosing(keep_memory))
            while not closed and time.monotonic() < until:
                message = self._next(link, until)
                if message:
                    closed = isinstance(message, msg.AllClosed)
                    self._handle(message)
        except WriterGoneError:
            closed = True
            self.lost_writer()
        return closed

    def slots(
        self, link: WriterLink, addresses: msg.SaveAddresses, want: msg.WantSlots
    ) -> SaveSlots:
        """Request slots for a plan, and wait for them. Raises StorageError if the writer cannot
        make them."""
        # The addresses are sent each time, as a restarted writer does not know the other nodes.
        link.send(addresses)
        link.send(want)
        until = time.monotonic() + self._patience(self._options.deadline)
        while True:
            message = self._await_answer(link, until)
            if isinstance(message, msg.NoSlots):
                raise StorageError(message.reason)
            if isinstance(message, msg.SlotsMade) and message.digest == want.digest:
                return message.slots
            self._handle(message)

    def request(self, link: WriterLink, begin: msg.SaveRequest) -> msg.RankAnswer:
        """Request a save; returns the answer. Raises WriterUnansweredError if the writer is lost
        after the request was sent."""
        link.send(begin)
        patience = self._patience(min(self._options.deadline, 2 * msg.ANSWER_SECONDS))
        # a running save may delay the answer until its own deadline
        until = max(self._overdue_at if self._running else 0, time.monotonic()) + patience
        try:
            while True:
                message = self._await_answer(link, until)
                if isinstance(message, msg.RankAnswer) and message.key == begin.key:
                    return message
                self._handle(message)
        except WriterGoneError as gone:
            raise WriterUnansweredError(str(gone)) from gone

    def _await_answer(self, link: WriterLink, until: float) -> msg.ToRank:
        """Returns the next message of a writer from which an answer is expected. Kills the writer
        if none comes before `until`."""
        while True:
            message = self._next(link, until)
            if message:
                return message
            if time.monotonic() >= until:
                link.kill()  # the process may hang in a system call; the next request restarts it
                raise WriterGoneError("the checkpoint writer process of this node does not answer")

    def _next(self, link: WriterLink, until: float) -> msg.ToRank | None:
        """Returns the next message; None if none comes before `until`. If the running save is
        overdue, kills this node's writer, which may be stopped or hang in an uninterruptible
        call."""
        limit = min(until, self._overdue_at) if self._running else until
        message = link.receive(min(max(0.0, limit - time.monotonic()), POLL_SECONDS))
        if message is None and self._running and time.monotonic() >= self._overdue_at:
            link.kill()
            self.lost_writer(msg.overdue(self._options))
            raise WriterGoneError(GONE)
        return message

    def _patience(self, seconds: float) -> float:
        """Returns the seconds that this rank waits for a message that is due after `seconds`. The
        coordinator gives up first, since it knows what is missing. The ranks of its node give up
        next, and kill it if it hangs. The other ranks give up last, as their writers may not learn
        that it was killed."""
        return seconds * (1.1 if self._ranks.node == 0 else 1.2)

    def _handle(self, message: msg.ToRank) -> None:
        if not isinstance(message, msg.SaveEnded):
            return
        outcome = message.outcome
        if self._running and outcome.step == self._running[0]:
            # not outcome.memory_only, which a writer that has lost the coordinator does not know
            (_, memory_only), self._running = self._running, None
            if memory_only:
                return
            self._outcomes.append(outcome)
            if outcome.path:
                self._committed(outcome.step)

    def lost_writer(self, why: str = "the checkpoint writer process of this node died") -> None:
        """Record that the running save has failed, as the writer is lost."""
        if self._running is not None:
            (step, memory_only), self._running = self._running, None
            if memory_only:
                return
            error = f"saving step {step} failed: {why}; earlier checkpoints are untouched"
            self._outcomes.append(msg.SaveOutcome(step, None, error))


class WriterClient:
    """Starts, restarts and talks to the writer process of a rank's node. Each rank calls the
    methods by itself, unless they say otherwise. `tracker` follows the saves that this rank
    requests; `spare` is the source of writer processes."""

    def __init__(
        self, ranks: RankGroup, options: CheckpointOptions, tracker: SaveTracker, spare: SpareWriter
    ) -> None:
        self._ranks, self._options, self._tracker, self._spare = ranks, options, tracker, spare
        self.link: WriterLink | None = None
        self.addresses: list[msg.Address] = []
        """Addresses of the writers of all nodes, once these have started."""
        self.has_token = False
        """Whether a restart can identify the memory of these writers by the run's token."""
        self._process: subprocess.Popen[bytes] | None = None
        """The node's writer process if it was started early; else None."""

    @property
    def secret(self) -> bytes:
        """Key that authenticates the processes of this run; empty before `start`."""
        return self.link.secret if self.link else b""

    def start_early(self) -> None:
        """Start the writer process of this node without a configuration. Called on all ranks."""
        self._ranks.nodes()
        if self._ranks.first_of_node and not self._process and not self.link:
            with suppress(OSError):  # `start` tries again, and raises the error on all ranks
                self._process = self._spare.take()

    def start_spare(self) -> None:
        """Start a spare writer process, for the next WriterClient of this node."""
        if self._ranks.first_of_node:
            self._spare.start()

    def start(self, directory: str, make_token: Callable[[], str]) -> None:
        """Configure and connect to the writer of each node, once. Called on all ranks; calls
        `make_token`, which returns the token of the run or "", on rank 0."""
        if self.link:
            return
        drawn, name, run = self._ranks.on_main(
            lambda: (os.urandom(32), os.urandom(8).hex(), make_token())
        )
        self.has_token = bool(run)
        nodes, node = self._ranks.nodes(), self._ranks.node
        # an abstract socket, so that a crash leaves no file behind
        name = f"\0perdure-{name}-{node}"
        host = own_address() if len(nodes) > 1 else ""
        started: list[WriterLink] = []

        def start() -> tuple[str, int]:
            # A stranger may read `drawn` in the group's messages, but not the job's secret.
            known = job_secret() or b""
            secret = hashlib.blake2b(drawn, key=known, digest_size=32).digest()
            setup = msg.WriterSetup(
                0, node, nodes, directory, run, self._options, name, host, 0, secret
            )
            process, self._process = self._process, None
            if self._ranks.first_of_node and process is None:
                process = self._spare.take()
            started.append(WriterLink(setup, self._ranks.rank, process))
            return started[0].start()

        addresses = self._ranks.together(start)
        by_rank = dict(zip(self._ranks.all, addresses, strict=True))
        self.addresses = [by_rank[ranks[0]] for ranks in nodes]
        self._ranks.together(started[0].connect)
        self.link = started[0]

    def send(self, message: msg.FromRank) -> None:
        """Send a message, or nothing if no writer was started. Callable from any thread. Raises
        WriterGoneError if the connection is broken."""
        if link := self.link:
            link.send(message)

    def slots(self, plan: SavePlan) -> SaveSlots:
        """Send the plan to the node's writer, and wait for its slots. A lost writer is restarted
        once. Raises StorageError if the writer cannot make the slots, and WriterGoneError if it
        cannot be restarted or is lost again."""
        link = self._connected()
        addresses = msg.SaveAddresses(self.addresses)
        want = msg.WantSlots(plan.digest, plan.shared if self._ranks.first_of_node else None)
        try:
            return self._tracker.slots(link, addresses, want)
        except WriterGoneError:
            self._tracker.lost_writer()
        link.restart()
        return self._tracker.slots(link, addresses, want)

    def request(
        self, plan: SavePlan, staging: SaveStaging, begin: msg.SaveRequest
    ) -> msg.RankAnswer:
        """Send a request to the node's writer, and wait for its answer. A lost writer is restarted
        once. If the new one cannot make slots, the next request tries again. Rank 0 does not repeat
        a request that other nodes may have an answer to, see coordinator.py [Note: a save]. Raises
        the errors of `slots`."""
        link = self._connected()
        lost: WriterUnansweredError | None = None
        if staging.has_slots:
            try:
                return self._tracker.request(link, begin)
            except WriterUnansweredError as error:
                lost = error if self._ranks.is_main and len(self.addresses) > 1 else None
                self._tracker.lost_writer()
            except WriterGoneError:
                self._tracker.lost_writer()
            # The new process makes new slots, or gives old ones new paths; so this rank lets go of
            # the old.
            staging.release()
            link.restart(begin.key[1] if lost else 0)
        staging.move(self.slots(plan))
        # only now, when this rank has slots again and its next request can succeed
        if lost:
            raise lost
        return self._tracker.request(link, begin)

    def _connected(self) -> WriterLink:
        if self.link is None:
            raise WriterGoneError("this checkpointer is closed")
        return self.link

    def interrupt(self) -> None:
        """End the connection, so that waiting calls fail. Callable from any thread."""
        if link := self.link:
            link.interrupt()

    def abandon(self) -> None:
        """End the connection to the node's writer process. The rank that owns the process kills it,
        even if it is working."""
        if self.link:
            self.link.kill()
            self.link.end(0)
        elif self._process:
            self._process.kill()
            end(self._process, END_SECONDS)
        self.link = self._process = None

    def close(self, keep_memory: bool, seconds: float | None) -> None:
        """End the writer process once its work is done, see `SaveTracker.close`."""
        if self.link:
            closed = self._tracker.close(self.link, keep_memory, seconds)
            self.link.end(END_SECONDS if closed else 0)
        elif self._process:
            end(self._process, END_SECONDS)
            self._process = None
        self.link = None


def checked_state(
    state: Mapping[str, Any], files: Mapping[str, bytes], used: Collection[str]
) -> bytes:
    """Returns the bytes of trainer_state.json. Raises ValueError if the state or `files` cannot be
    saved, or a file has one of the names `used`; the message says which and why."""
    reserved = {TRAINER_STATE, COMMIT_RECORD, LATEST, OPTIMIZER.stem, *used}
    for name in files:
        if name in reserved or name.startswith(OPTIMIZER.folder) or not is_plain(name):
            raise ValueError(f"files: {name!a} is not a plain name, or is taken; choose another")
        if not isinstance(files[name], bytes):
            raise ValueError(f"files: {name} is {type(files[name]).__name__}, not bytes")
    try:
        return json_bytes(dict(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"state: cannot be written as JSON: {error}") from error
