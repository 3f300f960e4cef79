"""The secret of a job, by which its nodes tell each other from strangers.

[Note: trust] Whoever reaches the store can write to it. So every value by which a node decides
something carries a MAC (keyed BLAKE2b, RFC 7693) over the name of its key and its text, under a
secret that only the user who started the job can read. What does not verify is as if it were not
there. An old value that is written again does not win: versions and counters only rise, and a new
job begins at a version that is its time of birth. What strangers can still do is to destroy:
whoever floods the store, or keeps overwriting its keys, holds up joins and restarts.
"""

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECRET_FILE = "PERDURE_SECRET_FILE"
"""Environment variable: the file with the secret of the job. Agents set it for their ranks."""
DEFAULT_NAME = ".secret"
"""The file in a run's directory that is made if no other is named."""
MIN_BYTES = 16
MAC_CHARACTERS = 64


class SecretError(Exception):
    """There is no secret that can be used; says what to do, in one line."""


@dataclass(frozen=True)
class Secret:
    """What all nodes of a job know, and nobody else."""

    key: bytes

    def derive(self, purpose: str) -> "Secret":
        """Another secret, for one purpose; the one is not found out from the other."""
        return Secret(_keyed(self.key, b"purpose " + purpose.encode()).digest())

    @property
    def fingerprint(self) -> str:
        """By which secrets are told apart; says nothing about them."""
        return self.derive("fingerprint").key[:8].hex()

    def seal(self, name: str, text: bytes) -> bytes:
        """`text` with a MAC that holds under this name only."""
        return self._mac(name, text) + text

    def open(self, name: str, sealed: bytes) -> bytes | None:
        """What was sealed under a name; None if it was not."""
        mac, text = sealed[:MAC_CHARACTERS], sealed[MAC_CHARACTERS:]
        return text if hmac.compare_digest(mac, self._mac(name, text)) else None

    def _mac(self, name: str, text: bytes) -> bytes:
        length = len(name.encode()).to_bytes(4)
        return _keyed(self.key, length + name.encode() + text).hexdigest().encode()


def _keyed(key: bytes, data: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(data, key=key, digest_size=32)


def find_secret(named: str | None, directory: str | None) -> Secret:
    """The secret of the job that this agent is for: of the file that is named, or is in the
    environment, or else of one in the run's directory, made if there is none. Tells the ranks which
    file it is by the environment.

    Raises:
        SecretError: there is none, or others could know it.
    """
    path = named or os.environ.get(SECRET_FILE) or (directory and f"{directory}/{DEFAULT_NAME}")
    if not path:
        raise SecretError(
            "nodes must share a secret: name a file that only you can read by --rdzv-conf "
            f"secret=FILE or {SECRET_FILE}; (umask 077; openssl rand -hex 32 > FILE) makes one"
        )
    if not (named or os.environ.get(SECRET_FILE)):
        make_secret(Path(path))
    os.environ[SECRET_FILE] = os.path.abspath(path)
    return read_secret(Path(path))


def read_secret(path: Path) -> Secret:
    """The secret in a file.

    Raises:
        SecretError: it cannot be read, or somebody else could have read or written it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status, data = os.fstat(descriptor), file.read(4096).strip()
    except OSError as error:
        raise SecretError(
            f"the secret of the job: {path}: {error.strerror}; name a file of yours by "
            f"{SECRET_FILE}"
        ) from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise SecretError(
            f"the secret of the job: {path} is not a file of yours (uid {os.geteuid()}) but of uid "
            f"{status.st_uid}; remove it, or name another file by {SECRET_FILE}"
        )
    if status.st_mode & 0o077:
        raise SecretError(
            f"the secret of the job: others may read {path} (mode {status.st_mode & 0o777:o}); if "
            f"nobody has, chmod 600 it; else remove it, or name another file by {SECRET_FILE}"
        )
    if len(data) < MIN_BYTES:
        raise SecretError(
            f"the secret of the job: {path} has {len(data)} bytes, not {MIN_BYTES}; remove it"
        )
    return Secret(hashlib.sha256(data).digest())


def make_secret(path: Path) -> None:
    """Make a secret file that only this user can read, unless there is one: nodes that start at
    once make one between them.

    Raises:
        SecretError: that is not possible.
    """
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "w") as file:
                    file.write(secrets.token_hex(32) + "\n")
                    file.flush()
                    os.fsync(descriptor)
                with suppress(FileExistsError):  # another node was faster
                    os.link(aside, path)
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise SecretError(
            f"the secret of the job: cannot make {path}: {error.strerror}; name a file by "
            f"{SECRET_FILE}"
        ) from error
