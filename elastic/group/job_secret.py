"""The secret by which the nodes of a job recognise each other.

[Note: trust] Whoever reaches the store can write to it. So every value that affects a node's
decisions carries a MAC (keyed BLAKE2b, RFC 7693) over its key and text, under a secret that only
the user who started the job can read. A value that does not verify is treated as missing. Replaying
an old value has no effect: versions and counters only rise, and a new job begins with its start
time as version. Strangers can still delay joins and restarts, by flooding the store or overwriting
its keys."""

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SECRET_FILE = "PERDURE_SECRET_FILE"
"""Environment variable: path of the file with the job's secret. An agent sets it for its ranks."""
DEFAULT_NAME = ".secret"
"""Name of the secret file in the run directory, used if no other file is named."""
MIN_BYTES, MAC_CHARACTERS = 16, 64


class JobSecretError(Exception):
    """There is no usable secret; the message is one line that says what to do."""


@dataclass(frozen=True)
class JobSecret:
    """Key material that all nodes of a job know, and nobody else."""

    key: bytes

    def derive(self, purpose: str) -> "JobSecret":
        """Returns a secret for one purpose, from which this secret cannot be computed."""
        return JobSecret(_keyed(self.key, b"purpose " + purpose.encode()).digest())

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that distinguish secrets and reveal nothing about them."""
        return self.derive("fingerprint").key[:8].hex()

    def seal(self, name: str, text: bytes) -> bytes:
        """Return `text` preceded by a MAC that holds under `name` only."""
        return self._mac(name, text) + text

    def open(self, name: str, sealed: bytes) -> bytes | None:
        """Return the text that was sealed under `name`; None if the MAC does not verify."""
        mac, text = sealed[:MAC_CHARACTERS], sealed[MAC_CHARACTERS:]
        # constant time: comparing must not reveal the MAC
        return text if hmac.compare_digest(mac, self._mac(name, text)) else None

    def _mac(self, name: str, text: bytes) -> bytes:
        # the length prevents that the end of a name passes as the start of a text
        length = len(name.encode()).to_bytes(4)
        return _keyed(self.key, length + name.encode() + text).hexdigest().encode()


def _keyed(key: bytes, data: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(data, key=key, digest_size=32)


def find_secret(named: str | None, directory: str | None) -> JobSecret:
    """Returns the secret of this agent's job: from the file `named`, else from
    $PERDURE_SECRET_FILE, else from a file in the run's `directory`, created if missing. Sets
    $PERDURE_SECRET_FILE, for the ranks. Raises JobSecretError if there is no usable file."""
    path = named or os.environ.get(SECRET_FILE) or (directory and f"{directory}/{DEFAULT_NAME}")
    if not path:
        raise JobSecretError(
            "nodes must share a secret: name a file that only you can read by --rdzv-conf "
            f"secret=FILE or {SECRET_FILE}; (umask 077; openssl rand -hex 32 > FILE) makes one"
        )
    if not (named or os.environ.get(SECRET_FILE)):
        make_secret(Path(path))
    os.environ[SECRET_FILE] = os.path.abspath(path)
    return read_secret(Path(path))


def read_secret(path: Path) -> JobSecret:
    """Read the secret in a file. Raises JobSecretError if the file cannot be read, is too short, or
    another user could have read or written it."""
    try:
        # O_NONBLOCK: opening a pipe must not block
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status, data = os.fstat(descriptor), file.read(4096).strip()
    except OSError as error:
        raise JobSecretError(
            f"the secret of the job: {path}: {error.strerror}; set {SECRET_FILE} to a file of yours"
        ) from error
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise JobSecretError(
            f"the secret of the job: {path} is not a file of yours (uid {os.geteuid()}) but of uid "
            f"{status.st_uid}; remove it, or set {SECRET_FILE} to another file"
        )
    if status.st_mode & 0o077:
        raise JobSecretError(
            f"the secret of the job: others may read {path} (mode {status.st_mode & 0o777:o}); if "
            f"nobody has, chmod 600 it; else remove it, or set {SECRET_FILE} to another file"
        )
    if len(data) < MIN_BYTES:
        raise JobSecretError(
            f"the secret of the job: {path} has {len(data)} bytes, fewer than {MIN_BYTES}; remove "
            f"it, or set {SECRET_FILE} to another file"
        )
    return JobSecret(hashlib.sha256(data).digest())  # a key of BLAKE2b has at most 64 bytes


def make_secret(path: Path) -> None:
    """Create a file with a new secret that only this user can read, unless the file exists. If
    nodes call this at the same time, one of them creates the file, and all use its secret. Raises
    JobSecretError if that fails."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "w") as file:
                    file.write(secrets.token_hex(32) + "\n")
                    file.flush()
                    os.fsync(descriptor)  # no reader may see an empty file after a crash
                # link() and not rename(): all nodes read the secret of the first of them.
                with suppress(FileExistsError):  # another node was faster
                    os.link(aside, path)
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise JobSecretError(
            f"the secret of the job: cannot create {path}: {error.strerror}; set {SECRET_FILE} to "
            "another file"
        ) from error
