"""Sealed values in stores: the keys of a job, and a store for the addresses of its ranks.

[Note: sealed] The store of a round is torch's TCPStore: whoever reaches it reads and writes every
key. Ranks put the addresses of their connections into the store (and NCCL's id), so whoever
replaces an address can intercept the traffic of two ranks. `SealedStore` derives the name of every
key, and a MAC over its value, from a secret of the job's round. A value that does not verify is
treated as missing, even if it was valid under another key, in another round or generation, or for
an earlier job. For GUARDED_SECONDS after a process has set a value, the process sets it again if it
has changed. So a stranger who overwrites or deletes values can delay a round, not change it.

Counters (`add`) are added up by the store itself and not sealed. Whoever lists the store's keys may
change a counter, so that a barrier opens early or never.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from elastic.group.job_secret import JobSecret
from elastic.group.store import StoreClient, run_store_thread

logger = logging.getLogger(__name__)

GUARDED_SECONDS = 60.0
"""Seconds after the last `set` in which values are checked and restored; peers read values soon
after `set`."""
FIRST_LOOK_SECONDS = 0.25
"""Seconds before the first check: by then undisturbed ranks have connected to each other."""
LOOK_SECONDS, MAX_LOOK_SECONDS = 0.02, 2.0
"""Shortest and longest time between two checks, which otherwise is a tenth of the time since
somebody last changed a value."""
FORGED_SECONDS = 0.005
"""Seconds between two reads of a value that does not verify."""


class JobKeys:
    """The keys of a job in the store, whose values are sealed."""

    def __init__(self, client: StoreClient, run_id: str, secret: JobSecret) -> None:
        self.client = client
        self.prefix, self.fingerprint = key_prefix(run_id, secret), secret.fingerprint
        self.dropped: Counter[str] = Counter()
        """Key → number of values read from it that had no valid seal."""
        self._secret = secret.derive("membership")

    def seal(self, key: str, text: bytes) -> bytes:
        return self._secret.seal(key, text)

    def open(self, key: str, data: bytes | None) -> bytes | None:
        """Returns the text in a stored value of `key`; None without a value or a valid seal."""
        text = self._secret.open(key, data) if data else None
        if data and text is None:
            self.dropped[key] += 1
            if self.dropped[key] == 1:
                logger.warning(
                    "the store's key %s holds a value that no node of this job has written (%d "
                    "bytes): it is ignored; further such values are ignored without a message",
                    key, len(data),
                )  # fmt: skip
        return text

    def put(self, name: str, text: bytes) -> None:
        key = f"{self.prefix}/{name}"
        self.client.set(key, self.seal(key, text))


def key_prefix(run_id: str, secret: JobSecret) -> str:
    """Prefix of a job's keys in the store. Jobs with different secrets have different keys."""
    return f"perdure/{run_id}/{secret.fingerprint}"


class SealedStore(dist.Store):
    """A torch store whose values are sealed, for process groups; see [Note: sealed].

    The caller keeps a reference for as long as process groups use it: torch holds none.

    Args:
        connect: opens a connection to the TCPStore.
        secret: secret of the job's round.
        scope: part of all key names, such as the generation, so that scopes do not share keys.
    """

    timeout: timedelta

    def __init__(self, connect: Callable[[], Any], secret: JobSecret, scope: str) -> None:
        super().__init__()
        self._connect, self._secret, self._scope = connect, secret, scope
        self._store = connect()
        self._written: dict[str, bytes] = {}
        """Name of a key in the store → sealed value that this process has set."""
        self._prefetched: dict[str, bytes] = {}
        """Key → value that `wait` has read; torch then calls `get` for each key."""
        self._set_at = 0.0
        self._guard_running = threading.Lock()
        """Held while a thread guards the values."""
        self._warned = False

    def set(self, key: str, value: bytes | str) -> None:
        name, secret = self._sealed_name(key)
        text = value.encode() if isinstance(value, str) else bytes(value)
        sealed = secret.seal(name, text)
        self._store.set(name, sealed)
        self._written[name], self._set_at = sealed, time.monotonic()
        if self._guard_running.acquire(blocking=False):
            end = threading.Event()
            run_store_thread(
                partial(self._guard, end), end.set, self._store.port, "perdure-addresses"
            )

    def get(self, key: str) -> bytes:
        value = self._prefetched.pop(key, None)
        return self._await(key, self._deadline(None)) if value is None else value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values that verify. Counters are not sealed: waiting for a counter times out."""
        deadline = self._deadline(timeout)
        for key in keys:
            self._prefetched[key] = self._await(key, deadline)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        deadline = self._deadline(None)
        return [self._await(key, deadline) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        names = [self._sealed_name(key)[0] for key in keys]
        # one request suffices while some keys are missing
        return self._store.check(names) and all(self._read(key) is not None for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        name, secret = self._sealed_name(key)
        old = secret.seal(name, expected.encode()) if expected else b""
        now = self._store.compare_set(name, old, secret.seal(name, desired.encode()))
        return secret.open(name, now) or b""

    def add(self, key: str, number: int) -> int:
        return int(self._store.add(self._sealed_name(key)[0], number))

    def delete_key(self, key: str) -> bool:
        name, _ = self._sealed_name(key)
        self._written.pop(name, None)
        return bool(self._store.delete_key(name))

    def num_keys(self) -> int:
        """Number of keys in the store, including keys that other programs have set."""
        return int(self._store.num_keys())

    def has_extended_api(self) -> bool:
        """False, so that torch does not append: a sealed value cannot grow."""
        return False

    def clone(self) -> dist.Store:
        return self

    def _sealed_name(self, key: str) -> tuple[str, JobSecret]:
        secret = self._secret.derive(f"{self._scope} {key}")
        return secret.derive("name").key.hex(), secret

    def _deadline(self, timeout: timedelta | None) -> float:
        return time.monotonic() + (timeout or self.timeout).total_seconds()

    def _read(self, key: str) -> bytes | None:
        name, secret = self._sealed_name(key)
        return self._verified(key, name, secret) if self._store.check([name]) else None

    def _await(self, key: str, deadline: float) -> bytes:
        name, secret = self._sealed_name(key)
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            self._store.wait([name], timedelta(seconds=left))
            value = self._verified(key, name, secret)
            if value is not None:
                return value
            if time.monotonic() > deadline:
                raise dist.DistStoreError(
                    f"{key}: the store keeps holding a value written by somebody who does not know "
                    "the secret of this job; find out who writes to the store"
                )
            time.sleep(FORGED_SECONDS)

    def _verified(self, key: str, name: str, secret: JobSecret) -> bytes | None:
        value = secret.open(name, self._store.get(name))
        if value is None and not self._warned:
            self._warned = True
            logger.warning(
                "the store of this round holds a value for %s that no rank of this job has set: "
                "somebody else writes to it; further such values are ignored without a message",
                key,
            )  # fmt: skip
        return value

    def _guard(self, end: threading.Event) -> None:
        """The thread that sets this process's values again if others change or delete them."""
        try:
            # `end` is set when the process ends, which must not wait for the first check.
            if end.wait(FIRST_LOOK_SECONDS):
                return
            store, well_since = self._connect(), self._set_at
            while (now := time.monotonic()) < self._set_at + GUARDED_SECONDS:
                for name, sealed in list(self._written.items()):
                    if not store.check([name]) or store.get(name) != sealed:
                        store.set(name, sealed)
                        well_since = now
                well = now - max(well_since, self._set_at)
                if end.wait(min(max(well / 10, LOOK_SECONDS), MAX_LOOK_SECONDS)):
                    return
        except (RuntimeError, OSError) as error:  # the store is gone, and with it this round
            logger.debug(
                "addresses in the store are no longer guarded: %s", f"{error}".partition("\n")[0]
            )
        finally:
            self._guard_running.release()
