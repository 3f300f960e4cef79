"""Decides which process may write ledger and metrics of a run in a bucket. Imports no torch.

[Note: terms] Each start of rank 0 claims the next number, its *term*: it creates RUN/terms/<number>
on the condition that the object does not exist. It stores lines under its own number only, so two
processes never write one object. While it lives, it rewrites RUN/beats/<number>, its heartbeat,
every BEAT_SECONDS. The next term can be claimed at once by another process of the same job, or if
the newest term was released, or if its launch ran on this machine only and is dead. If that launch
ran on this machine only and is alive, the claim is refused at once. In all other cases the claimant
first watches the heartbeat for MISSED_BEATS times BEAT_SECONDS, and is refused if the heartbeat
changes. If another launch claims the next term meanwhile, the claimant watches that launch's
heartbeat instead. So clocks of two machines are never compared. A process that lost its term
without noticing does no harm: its lines have its own number, and it cannot commit a checkpoint.
"""

import json
import logging
import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from checkpointing.errors import CheckpointError, StorageError
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.ownership import is_alive, owner
from checkpointing.storage.place import ObjectPath
from elastic.node.occupancy import MISSED_BEATS, NodeDirectoryOccupiedError

logger = logging.getLogger(__name__)

TERMS, BEATS = "terms", "beats"
BEAT_SECONDS = 5.0
RELEASE_SECONDS = 5.0
"""Longest wait for a heartbeat that is being written."""
RELEASED = b"released"
_MOST_BYTES = 4096


@dataclass(frozen=True)
class RunTermHolder:
    """The process that claimed a term. Stored as JSON in RUN/terms/<number>."""

    job: str
    """Identity of a launch: equal in all its processes, different in every other launch."""
    owner: str
    """Id of the process, see checkpointing/storage/ownership.py [Note: owner]."""
    launcher: str
    """Id of the process that restarts ranks as long as it lives; "" in a job of several nodes."""
    since: float
    """Unix time of the claim."""
    token: str
    """Random digits that distinguish this term from a term of the same number, of a deleted run."""


def newest_term(run: ObjectPath) -> int:
    """Return the highest claimed term of a run; 0 if no term was claimed."""
    names = (place.name for place in store_of(run).children(run / TERMS))
    return max((int(name) for name in names if re.fullmatch(r"\d{6,}", name)), default=0)


def holder_of(run: ObjectPath, number: int) -> RunTermHolder | None:
    """Return the holder of a term; None if it is not claimed, or its object cannot be parsed."""
    try:
        data = store_of(run).read(_place(run, TERMS, number))
        holder = RunTermHolder(**json.loads(data[:_MOST_BYTES]))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    texts = holder.job, holder.owner, holder.launcher, holder.token
    valid = all(isinstance(text, str) for text in texts) and isinstance(holder.since, float)
    return holder if valid else None


class _Term:
    """A claimed term of this process. A thread writes its heartbeat until `release` or `stop`."""

    def __init__(
        self, run: ObjectPath, number: int, own: RunTermHolder, before: RunTermHolder | None
    ) -> None:
        self.number, self.token = number, own.token
        self.before = before
        """Holder of the term before this one; None if there was none, or it is not known."""
        self._run, self._own = run, own
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="perdure-term", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop writing the heartbeat, but do not release the term: another launch may first have to
        watch the heartbeat, see [Note: terms]."""
        self._end.set()

    def release(self) -> None:
        """Stop writing the heartbeat, and let any launch claim the next term at once."""
        self._end.set()
        self._thread.join(RELEASE_SECONDS)
        with suppress(CheckpointError, OSError):  # the next launch then waits for missed heartbeats
            store_of(self._run).write(_place(self._run, BEATS, self.number), RELEASED)

    def _renew(self) -> None:
        """Write the heartbeat until another process has claimed the next term."""
        store, count = store_of(self._run), 0
        while not self._end.is_set():
            with suppress(CheckpointError, OSError):  # the store may be unreachable for a moment
                if (newest := newest_term(self._run)) > self.number:
                    holder = holder_of(self._run, newest)
                    if holder and holder.job != self._own.job:
                        logger.warning(
                            "%s. Only that process can commit checkpoints now",
                            _occupied(self._run, holder),
                        )
                    return
                count += 1
                store.write(_place(self._run, BEATS, self.number), b"%d" % count)
            self._end.wait(BEAT_SECONDS)


def claim(run: ObjectPath, job: str, launcher: str) -> _Term:
    """Claim the next term of a run. `job`, `launcher`: see `RunTermHolder`. Raises
    NodeDirectoryOccupiedError if another launch trains this run, StorageError if the store does not
    answer or ignores conditional writes."""
    own = RunTermHolder(job, owner(), launcher, time.time(), secrets.token_hex(8))
    known = 0
    while True:
        newest = max(known, newest_term(run))
        before = holder_of(run, newest) if newest else None
        if newest:
            _wait_for_the_dead(run, newest, before, own)
        else:
            _check_conditions(run)
        try:
            store_of(run).write_new(
                _place(run, TERMS, newest + 1), json.dumps(asdict(own)).encode()
            )
        except FileExistsError:  # another process was faster; a listing may lack its term
            known = newest + 1
            continue
        return _Term(run, newest + 1, own, before)


def _wait_for_the_dead(
    run: ObjectPath, number: int, holder: RunTermHolder | None, own: RunTermHolder
) -> None:
    """Return once no other launch trains this run; raise NodeDirectoryOccupiedError if another
    does."""
    if holder and holder.job == own.job:
        return
    alive, beat = holder and is_alive(holder.launcher), _beat(run, number)
    if beat == RELEASED or alive is False:
        return
    if alive:
        raise _occupied(run, holder)
    if holder:
        logger.warning(
            "%s: %s was the last that trained here; checking for %.0f s whether it still does",
            run, _who(holder), MISSED_BEATS * BEAT_SECONDS,
        )  # fmt: skip
    deadline = time.monotonic() + MISSED_BEATS * BEAT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(BEAT_SECONDS / 4)
        if (now := _beat(run, number)) == RELEASED:
            return
        if now != beat:
            raise _occupied(run, holder)


def _check_conditions(run: ObjectPath) -> None:
    """Raise StorageError if the store lets `write_new` overwrite an existing object."""
    store, probe = store_of(run), run / TERMS / f"probe-{secrets.token_hex(8)}"
    store.write_new(probe, b"first")
    try:
        store.write_new(probe, b"second")
    except FileExistsError:
        return
    finally:
        store.delete([probe])
    raise StorageError(
        f"{run}: its store ignores the condition that an object must not exist (If-None-Match, "
        "ifGenerationMatch), so that two launches could train in one run; use a newer version of "
        "the store, or a run.dir on a filesystem"
    )


def _beat(run: ObjectPath, number: int) -> bytes:
    with suppress(FileNotFoundError):
        return store_of(run).read(_place(run, BEATS, number))
    return b""


def _occupied(run: ObjectPath, holder: RunTermHolder | None) -> NodeDirectoryOccupiedError:
    return NodeDirectoryOccupiedError(
        f"{run}: {_who(holder) if holder else 'another process'} trains there; end it first, or "
        "give this launch a run.dir of its own"
    )


def _who(holder: RunTermHolder) -> str:
    found = re.fullmatch(r"([\w.-]+)-[0-9a-f]{8}-(\d+)-\d+", holder.owner)
    name = f"process {found[2]} on {found[1]}" if found else "another process"
    since = ""
    with suppress(ValueError, OverflowError, OSError):
        since = time.strftime(", since %Y-%m-%d %H:%M:%S,", time.localtime(holder.since))
    return name + since


def _place(run: ObjectPath, kind: str, number: int) -> ObjectPath:
    return run / kind / f"{number:06}"
