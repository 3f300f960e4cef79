"""A store in which ranks find each other, and strangers find nothing to use.

[Note: sealed] The store of a round is torch's TCPStore: whoever reaches it reads and writes every
key. Ranks put the addresses of their connections there (and NCCL's id), so whoever replaces one
stands between two ranks. Here the name of every key and a MAC over its value come from a secret of
this round of this job. What does not verify is as if it were not there, also what was right under
another key, in another round or generation, or for an earlier job. While a value was just set, its
process looks whether it still stands, and sets it again: so a stranger who overwrites or deletes
values delays a round, and does not decide it.

Counters (`add`) are numbers that the store itself adds up. They are not sealed: who lists the keys
may change one, so that a barrier opens early or never.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from elastic.group.job_secret import Secret
from elastic.group.store import call_stores

logger = logging.getLogger(__name__)

GUARDED_SECONDS = 60.0
"""How long values are looked after since the last was set: others read them soon."""
FIRST_LOOK_SECONDS = 0.25
"""Until the first look: ranks that nobody disturbs have met by then, and need the cores."""
LOOK_SECONDS, MOST_LOOK_SECONDS = 0.02, 2.0
"""Between two looks: a tenth of the time that all has been well, within these bounds."""
FORGED_SECONDS = 0.005
"""Between two looks of a reader at a value that does not verify."""


class SealedStore(dist.Store):
    """A store whose values are sealed; see [Note: sealed]. torch's process groups use it as any.

    The caller keeps it for as long as process groups do: torch keeps no reference to what Python
    knows of it.

    Args:
        connect: makes a connection to the store.
        secret: of this round of this job.
        scope: what the names of keys are bound to besides.
    """

    timeout: timedelta
    """torch's; `set_timeout` sets it."""

    def __init__(self, connect: Callable[[], Any], secret: Secret, scope: str) -> None:
        super().__init__()
        self._connect, self._secret, self._scope = connect, secret, scope
        self._store = connect()
        self._ours: dict[str, bytes] = {}
        """What this process has set, by name in the store."""
        self._waited: dict[str, bytes] = {}
        """Values that `wait` has found, by key: torch gets each next."""
        self._set_at = 0.0
        self._guarding = threading.Lock()
        """Held while a thread looks after these."""
        self._warned = False

    def set(self, key: str, value: bytes | str) -> None:
        """See torch.distributed.Store."""
        name, secret = self._named(key)
        text = value.encode() if isinstance(value, str) else bytes(value)
        sealed = secret.seal(name, text)
        self._store.set(name, sealed)
        self._ours[name], self._set_at = sealed, time.monotonic()
        if self._guarding.acquire(blocking=False):
            end = threading.Event()
            call_stores(partial(self._guard, end), end.set, self._store.port, "perdure-addresses")

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store."""
        value = self._waited.pop(key, None)
        return self._await(key, self._deadline(None)) if value is None else value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store. Keys that hold a counter are waited for in vain."""
        deadline = self._deadline(timeout)
        for key in keys:
            self._waited[key] = self._await(key, deadline)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See torch.distributed.Store."""
        deadline = self._deadline(None)
        return [self._await(key, deadline) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """See torch.distributed.Store."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """See torch.distributed.Store."""
        names = [self._named(key)[0] for key in keys]
        # One call while some are missing.
        return self._store.check(names) and all(self._held(key) is not None for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See torch.distributed.Store."""
        name, secret = self._named(key)
        old = secret.seal(name, expected.encode()) if expected else b""
        now = self._store.compare_set(name, old, secret.seal(name, desired.encode()))
        return secret.open(name, now) or b""

    def add(self, key: str, number: int) -> int:
        """See torch.distributed.Store; not sealed."""
        return int(self._store.add(self._named(key)[0], number))

    def delete_key(self, key: str) -> bool:
        """See torch.distributed.Store."""
        name, _ = self._named(key)
        self._ours.pop(name, None)
        return bool(self._store.delete_key(name))

    def num_keys(self) -> int:
        """See torch.distributed.Store; with those of strangers."""
        return int(self._store.num_keys())

    def has_extended_api(self) -> bool:
        """See torch.distributed.Store: nothing is appended, as no seal grows."""
        return False

    def clone(self) -> dist.Store:
        """See torch.distributed.Store."""
        return self

    def _named(self, key: str) -> tuple[str, Secret]:
        """The name of a key in the store, and the secret of its value."""
        secret = self._secret.derive(f"{self._scope} {key}")
        return secret.derive("name").key.hex(), secret

    def _deadline(self, timeout: timedelta | None) -> float:
        return time.monotonic() + (timeout or self.timeout).total_seconds()

    def _held(self, key: str) -> bytes | None:
        """The value of a key; None if there is none, or it does not verify."""
        name, secret = self._named(key)
        return self._opened(key, name, secret) if self._store.check([name]) else None

    def _await(self, key: str, deadline: float) -> bytes:
        """The value of a key, once there is one that verifies."""
        name, secret = self._named(key)
        while True:
            left = max(deadline - time.monotonic(), 0.1)
            self._store.wait([name], timedelta(seconds=left))
            value = self._opened(key, name, secret)
            if value is not None:
                return value
            if time.monotonic() > deadline:
                raise dist.DistStoreError(
                    f"{key}: what the store holds was written by somebody who does not know the "
                    "secret of this job, all the time"
                )
            time.sleep(FORGED_SECONDS)

    def _opened(self, key: str, name: str, secret: Secret) -> bytes | None:
        value = secret.open(name, self._store.get(name))
        if value is None and not self._warned:
            self._warned = True
            logger.warning(
                "the store of this round holds a value for %s that no rank of this job has set: "
                "somebody else writes there; it is ignored, as others will be without a word", key,
            )  # fmt: skip
        return value

    def _guard(self, end: threading.Event) -> None:
        """Look after what this process has set, until others have had the time to read it."""
        try:
            if end.wait(FIRST_LOOK_SECONDS):
                return
            store, well_since = self._connect(), self._set_at
            while (now := time.monotonic()) < self._set_at + GUARDED_SECONDS:
                for name, sealed in list(self._ours.items()):
                    if not store.check([name]) or store.get(name) != sealed:
                        store.set(name, sealed)
                        well_since = now
                well = now - max(well_since, self._set_at)
                if end.wait(min(max(well / 10, LOOK_SECONDS), MOST_LOOK_SECONDS)):
                    return
        except (RuntimeError, OSError) as error:  # the store is gone, and with it this round
            logger.debug("addresses are no longer looked after: %s", f"{error}".partition("\n")[0])
        finally:
            self._guarding.release()
