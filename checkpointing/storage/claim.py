"""Who may commit: the process that claimed a run's checkpoint directory last.

A machine that was cut off or frozen may come back after the others went on without it, with a save
that it believes to be the newest. Each coordinator therefore claims the directory at its first
save, and looks whether the claim is still the newest at the beginning of every save and right
before its commit (a fencing token; Kleppmann, Designing Data-Intensive Applications, 2017, chapter
8). So do two runs that were given the same directory by mistake notice each other.
"""

import logging
import re
import time
from contextlib import suppress

from checkpointing.errors import StorageError
from checkpointing.format.untrusted import printable
from checkpointing.storage.kinds import storage_of
from checkpointing.storage.owners import is_alive, owner
from checkpointing.storage.place import P, Place

logger = logging.getLogger(__name__)

_MOST_BYTES = 4096
_CLAIM = re.compile(r"\.writer-(\d+)")


def hold(directory: P, mine: P | None) -> P:
    """Claim a checkpoint directory (`mine` is None, or all claims are gone), or make sure that
    nobody has claimed it since; returns the file that stands for the claim. It stays when the run
    has ended, for whoever wakes up then. What those before were writing, wherever they are and
    whether or not they live, is removed: they commit nothing any more.

    Raises:
        StorageError: somebody has; says who and when.
        OSError: the directory cannot be read or written.
    """
    storage = storage_of(directory)
    storage.make_directory(directory)
    while True:
        claims = _claims(directory)
        if mine and claims:
            if claims[-1][1].name == mine.name:
                return mine
            raise StorageError(_words(claims[-1][1], "another process has taken over this run"))
        new = directory / f".writer-{claims[-1][0] + 1 if claims else 1:06}"
        with suppress(FileExistsError):  # another was faster: be newer than that one
            storage.create(new, f"{owner()} {time.time():.3f}\n".encode())
            lost = [_owner(old)[0] for _, old in claims]
            if lost and lost[-1] != owner() and is_alive(lost[-1]):
                what = "taken over from a process that lives, and can commit no more"
                logger.warning("%s", _words(claims[-1][1], what))
            storage.collect(directory, lost=lost)
            for _, old in claims:
                storage.remove(old)
            return new


def _words(path: Place, what: str) -> str:
    name, moment = _owner(path)
    since = ""
    with suppress(ValueError, OverflowError, OSError):  # whatever stands there, it is taken
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(float(moment)))
    return (
        f"{path.parent}: {what} ({printable(name) or 'it'} saves there{since}); if these are two "
        "runs, end one or give it a checkpoint.directory of its own"
    )


def _owner(path: Place) -> tuple[str, str]:
    """Who made a claim, and when; empty if it does not say."""
    text = ""
    with suppress(FileNotFoundError):  # somebody newer has removed it
        text = storage_of(path).read(path, _MOST_BYTES).decode(errors="replace")
    name, _, moment = text.strip().rpartition(" ")
    return name, moment


def _claims(directory: P) -> list[tuple[int, P]]:
    """All that are there, oldest first."""
    found = (
        (_CLAIM.fullmatch(path.name), path) for path in storage_of(directory).children(directory)
    )
    return sorted(
        ((int(match[1]), path) for match, path in found if match), key=lambda claim: claim[0]
    )
