"""One world of a job: its nodes agree on a secret and a run directory before any of them is in a
round.

[Note: claim] A key of the store, under the name of the job, holds the fingerprint of the secret, a
counter and a mark. The first node of a job makes an empty file in the run directory, named by a
random mark, and writes the key by compare-and-swap. A node that finds the key there joins if it has
the same secret, and sees that file in its own run directory. Another node is refused as long as the
counter rises, for which the first node in the document sees. A key that stands still is of a job
that has ended, and is taken over.

Anybody can write to the key, so it decides about nodes that start, and never about a job that
trains. Where the store was restarted empty, another job may take the key before the one that trains
is back. It ends itself when it sees the key of that one; see `Member`.
"""

import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.group.job_secret import SECRET_FILE, Secret, SecretError
from elastic.group.store import StoreClient

STILL_SECONDS = 3.0
"""A key that has not changed for so long is of a job that has ended."""
VISIBLE_SECONDS = 5.0
"""Until when a file that another node has made is to be seen here, on a network filesystem."""
PREFIX = ".job-"
KEPT = 8
"""Marks that stay in a run directory: a job that trains may have the one before the newest."""
NO_MARK = "-"
"""Instead of a mark, where the run directory is not known, or cannot be written to."""


@dataclass(frozen=True)
class Claim:
    """What the key of a job says."""

    fingerprint: str
    """Fingerprint of the secret of the job."""
    counter: int
    mark: str
    """Names the file in the run directory."""

    def encode(self) -> bytes:
        """As the store has it."""
        return f"{self.fingerprint} {self.counter} {self.mark}".encode()

    @staticmethod
    def decode(data: bytes | None) -> "Claim | None":
        """From the store; None if it is none."""
        pattern = rb"([0-9a-f]{16}) ([0-9]{1,18}) (-|[0-9a-f]{16})"
        found = re.fullmatch(pattern, data or b"")
        if not found:
            return None
        fingerprint, counter, mark = found.groups()
        return Claim(fingerprint.decode(), int(counter), mark.decode())

    def same_world(self, other: "Claim") -> bool:
        """Whether both are of one secret and one run directory."""
        return (self.fingerprint, self.mark) == (other.fingerprint, other.mark)


def claim_key(run_id: str) -> str:
    """The key of a job of this name."""
    return f"perdure/{run_id}/secret"


def claim(client: StoreClient, run_id: str, secret: Secret, directory: str | None) -> Claim:
    """Begin the job of this name, or join it; returns what its key says. Takes STILL_SECONDS where
    the key is of a job that may have ended.

    Args:
        client: of the store.
        run_id: name of the job.
        secret: of this node.
        directory: of the run; None: not known.

    Raises:
        SecretError: another job of this name runs; says what differs, and what to do.
        StoreLostError: the store does not answer.
    """
    key, made = claim_key(run_id), ""
    mine: Claim | None = None
    try:
        while True:
            data = client.get(key)
            found = Claim.decode(data)
            why = found and _differs(found, run_id, secret, directory)
            if found and not why:
                return found
            if data and (now := _changed(client, key, data)):
                after = Claim.decode(now)
                if why and found and after and after.same_world(found):
                    raise SecretError(why)
                continue
            made = made or _make_mark(directory)
            wanted = Claim(secret.fingerprint, 0, made or NO_MARK)
            if client.swap(key, data, wanted.encode()) == wanted.encode():
                mine = wanted
                return mine
    finally:
        if directory and made:
            _tidy(directory, made, kept=mine is not None)


def _differs(found: Claim, run_id: str, secret: Secret, directory: str | None) -> str:
    """Why this node is not of the job that a key tells of; empty if it is."""
    here = f" ({directory})" if directory else ""
    cure = (
        f"put run.dir{here} on storage that all nodes of the job share, or give a job of its own "
        "another name (--rdzv-id)"
    )
    if found.fingerprint != secret.fingerprint:
        return (
            f"a job named {run_id!r} runs on this store with another secret than that of "
            f"{os.environ.get(SECRET_FILE, 'this node')}; {cure}; nodes may also be given one file "
            f"by {SECRET_FILE}"
        )
    if found.mark == NO_MARK or directory is None:
        return ""
    path, deadline = _path(directory, found.mark), time.monotonic() + VISIBLE_SECONDS
    while not path.exists():
        with suppress(OSError):
            os.listdir(directory)  # has a network filesystem look again
        if time.monotonic() > deadline:
            return (
                f"a job named {run_id!r} runs on this store in another run directory: {path}, "
                f"which its first node has made, is not seen by this node; {cure}"
            )
        time.sleep(0.1)
    return ""


def _changed(client: StoreClient, key: str, data: bytes) -> bytes | None:
    """The next value of a key; None if it stands still."""
    deadline = time.monotonic() + STILL_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if (now := client.get(key)) and now != data:
            return now
    return None


def _path(directory: str, mark: str) -> Path:
    return Path(directory) / f"{PREFIX}{mark}"


def _make_mark(directory: str | None) -> str:
    """Make a file with a random name; empty if that is not possible, which others tell of."""
    mark = secrets.token_hex(8)
    if directory is None:
        return ""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(_path(directory, mark), flags, 0o600))
    except OSError:
        return ""
    return mark


def _tidy(directory: str, made: str, kept: bool) -> None:
    """Remove the mark that was made in vain, or all but the newest."""
    with suppress(OSError):
        if not kept:
            _path(directory, made).unlink()
            return
        marks = [(path.stat().st_mtime, path) for path in Path(directory).glob(f"{PREFIX}*")]
        for _, path in sorted(marks)[:-KEPT]:
            path.unlink()
