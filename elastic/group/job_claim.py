"""Agreement of a job's nodes on one secret and one run directory, before any of them is in a round.

[Note: claim] A key of the store, named after the job, holds the fingerprint of the secret, a
counter and a mark. The first node of a job creates an empty file in the run directory, named by a
random mark, and writes the key by compare-and-swap. Another node joins if it has the same secret
and sees that file in its own run directory. Otherwise that node is refused while the counter rises,
which the first node of the membership raises. A key whose counter stands still belongs to a job
that has ended, and is overwritten.

Anybody can write to the key, so it decides only about nodes that start, never about a job that
trains. After the store has restarted without its data, a new job may take the key before the job
that trains has written it again. The new job ends itself when it sees the older job's key; see
`Member._renew_claim`.
"""

import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.group.job_secret import SECRET_FILE, JobSecret, JobSecretError
from elastic.group.store import StoreClient

STALE_SECONDS = 3.0
"""Seconds without a change after which a key belongs to a job that has ended."""
VISIBLE_SECONDS = 5.0
"""Longest time until a network filesystem shows a file that another node created."""
PREFIX = ".job-"
KEPT_MARKS = 8
"""Number of newest mark files kept in a run directory, as a running job may not use the newest."""
NO_MARK = "-"
"""`JobClaim.mark` of a job whose first node knows no run directory, or cannot write to it."""


@dataclass(frozen=True)
class JobClaim:
    """The value of a job's key in the store, see [Note: claim]."""

    fingerprint: str
    counter: int
    """Rises while the job runs."""
    mark: str
    """Random part of the name of the mark file in the run directory."""

    def encode(self) -> bytes:
        return f"{self.fingerprint} {self.counter} {self.mark}".encode()

    @staticmethod
    def decode(data: bytes | None) -> "JobClaim | None":
        pattern = rb"([0-9a-f]{16}) ([0-9]{1,18}) (-|[0-9a-f]{16})"
        existing = re.fullmatch(pattern, data or b"")
        if not existing:
            return None
        fingerprint, counter, mark = existing.groups()
        return JobClaim(fingerprint.decode(), int(counter), mark.decode())


def claim_key(run_id: str) -> str:
    return f"perdure/{run_id}/secret"


def claim(client: StoreClient, run_id: str, secret: JobSecret, directory: str | None) -> JobClaim:
    """Join the job that holds the claim in the store, or write a claim for a new job; returns the
    job's claim. Takes STALE_SECONDS where the existing claim may be that of a job that has ended.
    Raises JobSecretError if another job of this name runs, or StoreLostError."""
    key, created = claim_key(run_id), ""
    own: JobClaim | None = None
    try:
        while True:
            data = client.get(key)
            existing = JobClaim.decode(data)
            why = existing and _mismatch(existing, run_id, secret, directory)
            if existing and not why:
                return existing
            if data and (now := _next_value(client, key, data)):
                after = JobClaim.decode(now)
                # The counter rises: the other job runs, unless a third job has written the claim.
                if why and existing and after and after == replace(existing, counter=after.counter):
                    raise JobSecretError(why)
                continue
            created = created or _make_mark(directory)
            proposed = JobClaim(secret.fingerprint, 0, created or NO_MARK)
            if client.swap(key, data, proposed.encode()) == proposed.encode():
                own = proposed
                return own
    finally:
        if directory and created:
            _remove_marks(directory, created, kept=own is not None)


def _mismatch(existing: JobClaim, run_id: str, secret: JobSecret, directory: str | None) -> str:
    """Returns why this node does not belong to the job of `existing`; empty if it does."""
    place = f" ({directory})" if directory else ""
    cure = (
        f"put run.dir{place} on storage that all nodes of the job share, or give a job of its own "
        "another name (--rdzv-id)"
    )
    if existing.fingerprint != secret.fingerprint:
        return (
            f"a job named {run_id!r} runs on this store with another secret than that of "
            f"{os.environ.get(SECRET_FILE, 'this node')}; {cure}; or set {SECRET_FILE} to one file "
            "for all nodes"
        )
    if existing.mark == NO_MARK or directory is None:
        return ""
    path, deadline = _path(directory, existing.mark), time.monotonic() + VISIBLE_SECONDS
    while not path.exists():
        with suppress(OSError):
            # Listing the directory makes a network filesystem refresh its cache.
            os.listdir(directory)
        if time.monotonic() > deadline:
            return (
                f"a job named {run_id!r} runs on this store in another run directory: its first "
                f"node has created {path}, which this node does not see; {cure}"
            )
        time.sleep(0.1)
    return ""


def _next_value(client: StoreClient, key: str, data: bytes) -> bytes | None:
    """Wait until the value of a key is no longer `data`; None after STALE_SECONDS."""
    deadline = time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if (now := client.get(key)) and now != data:
            return now
    return None


def _path(directory: str, mark: str) -> Path:
    return Path(directory) / f"{PREFIX}{mark}"


def _make_mark(directory: str | None) -> str:
    """Create a mark file in `directory`; returns its random mark, or "" if that fails."""
    mark = secrets.token_hex(8)
    if directory is not None:
        # The code that writes to the run directory later reports an error.
        with suppress(OSError):
            Path(directory).mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(_path(directory, mark), flags, 0o600))
            return mark
    return ""


def _remove_marks(directory: str, created: str, kept: bool) -> None:
    """If `kept`, remove all but the newest marks; else remove the unused mark `created`."""
    with suppress(OSError):
        if not kept:
            _path(directory, created).unlink()
            return
        marks = [(path.stat().st_mtime, path) for path in Path(directory).glob(f"{PREFIX}*")]
        for _, path in sorted(marks)[:-KEPT_MARKS]:
            path.unlink()
