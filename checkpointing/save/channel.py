"""Authenticated messages between the processes of a run, and the secret that authenticates them.

[Note: channel] The listener sends a random number at once, and the caller answers with another.
Both numbers and the secret give a key for each direction, so a recording of another connection is
useless. A MAC over its number and its bytes precedes every message. A stranger can neither connect
nor change, repeat, drop or swap messages; it can only end the connection. No message is parsed
before its MAC is verified, and the first message is at most FIRST_BYTES long. Messages are typed
values (wire.py): even a peer that knows the secret sends no code.

The MAC is GMAC (AES-256-GCM over authenticated data alone, NIST SP 800-38D), with the message
number as the nonce: a key sees each nonce once. It takes a fifth of HMAC-SHA256's time, which
counts where a copy of every step travels to another node.

docs/elastic.md says who writes the file with the job's secret, and who is trusted. This package
imports nothing of `elastic`, and reads that file by the same rules.
"""

import hashlib
import hmac
import os
import socket
import stat
import struct
import threading
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from checkpointing.errors import StorageError
from checkpointing.storage.folders import is_private
from checkpointing.wire import WireError, pack, unpack

SILENT_SECONDS = 60
"""A machine that vanished without a word is noticed within so long, and so is a process that takes
nothing of what it is sent."""
NONCE_BYTES = 32
MAC_BYTES = 16
FIRST_BYTES = 4096
"""Longest message of one who is not known yet."""
PROOF = b"I know it, too"


class StrangerError(OSError):
    """The other side does not know the secret, or somebody has changed what it said."""


class Channel:
    """One side of a connection; see [Note: channel]. Made by `call` or `welcome`.

    Args:
        connection: to the other side.
        ours: key of what is sent.
        theirs: key of what is received.
    """

    def __init__(self, connection: Connection, ours: bytes, theirs: bytes) -> None:
        self._connection, self._ours, self._theirs = connection, AESGCM(ours), AESGCM(theirs)
        self._sent, self._received = 0, 0
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a value that `wire.pack` takes. From any thread."""
        self.send_bytes(pack(message))

    def recv(self) -> Any:
        """The next value.

        Raises:
            StrangerError: it is not what the other side sent, or no message.
            EOFError, OSError: the other side is gone.
        """
        return _message(self.recv_bytes())

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes, less than 2 GiB. From any thread.

        Raises:
            OSError: the other side is gone, or has taken nothing for SILENT_SECONDS; what follows
                half a message is lost, so that ends the connection.
        """
        with self._sending:
            self._sent += 1
            try:
                self._connection.send_bytes(_mac(self._ours, self._sent, data))
                self._connection.send_bytes(data)
            except OSError:
                self.shut()
                raise

    def recv_bytes(self, most: int | None = None) -> bytes:
        """The next bytes; raises as `recv`, and OSError before it takes more than `most`."""
        try:
            mac = self._connection.recv_bytes(MAC_BYTES)
            data = self._connection.recv_bytes(most)
        except BlockingIOError as error:
            raise TimeoutError("nothing came for too long") from error
        self._received += 1
        if not hmac.compare_digest(mac, _mac(self._theirs, self._received, data)):
            raise StrangerError("a message that the other side has not sent")
        return data

    def poll(self, seconds: float) -> bool:
        """Whether there is something to receive within so long."""
        return self._connection.poll(seconds)

    def limit(self, seconds: float) -> None:
        """Have `recv` fail when nothing came for so long; 0: never."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            _limit(same, seconds)

    def shut(self) -> None:
        """End the connection for both sides, also for threads that are in `send` or `recv`."""
        with (
            suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as same,
        ):
            same.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._connection.fileno()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def call(address: tuple[str, int] | str, secret: bytes, seconds: float = SILENT_SECONDS) -> Channel:
    """Connect to a process that listens, by TCP or at an abstract Unix socket.

    Args:
        address: where it listens.
        secret: of the run.
        seconds: how long it may stay silent, as a machine that is gone does for ever, while they
            make each other's acquaintance.

    Raises:
        StrangerError: it does not know the secret.
        EOFError, OSError: it is not there, or does not answer.
    """
    connection = _connect(address, seconds)
    try:
        _set_up(connection)
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            _limit(same, seconds)
        theirs, ours = connection.recv_bytes(NONCE_BYTES), os.urandom(NONCE_BYTES)
        connection.send_bytes(ours)
        channel = Channel(connection, *_keys(secret, theirs, ours)[::-1])
        if channel.recv_bytes(len(PROOF)) != PROOF:
            raise StrangerError("it does not speak as a process of this run")
        channel.limit(0)
        return channel
    except BaseException:
        connection.close()
        raise


def welcome(connection: Connection, secret: bytes, seconds: float) -> tuple[Channel, Any]:
    """Let in who knows the secret; returns the first message, by which they say who they are.

    Args:
        connection: to who has connected.
        secret: of the run.
        seconds: how long they may take.

    Raises:
        Exception: it is a stranger, or left, or said nothing for too long.
    """
    _set_up(connection)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        if same.family == socket.AF_UNIX:
            credentials = same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, uid, _ = struct.unpack("3i", credentials)
            if uid != os.geteuid():
                raise StrangerError(f"a process of uid {uid}")
        # Connections know no timeout, so the system is asked for one.
        _limit(same, seconds)
        ours = os.urandom(NONCE_BYTES)
        connection.send_bytes(ours)
        keys = _keys(secret, ours, connection.recv_bytes(NONCE_BYTES))
        channel = Channel(connection, *keys)
        channel.send_bytes(PROOF)
        message = _message(channel.recv_bytes(FIRST_BYTES))
        _limit(same, 0)
    return channel, message


def _connect(address: tuple[str, int] | str, seconds: float) -> Connection:
    if isinstance(address, tuple):
        with socket.create_connection(address, seconds) as connection:
            connection.setblocking(True)
            return Connection(connection.detach())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        return Connection(connection.detach())


def _message(data: bytes) -> Any:
    try:
        return unpack(data)
    except WireError as error:
        raise StrangerError(f"no message of this run: {error}") from error


def _set_up(connection: Connection) -> None:
    """Have sending fail when the other side takes nothing, and TCP notice a machine that is gone.
    Nor is TCP to hold small messages back until what went before is acknowledged, for which the
    other side takes 40 ms (Nagle's algorithm with delayed acknowledgements)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time(SILENT_SECONDS))
        if same.family != socket.AF_UNIX:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 3)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 6)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)


def _limit(connection: socket.socket, seconds: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time(seconds))


def _time(seconds: float) -> bytes:
    """A `struct timeval`."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _keys(secret: bytes, listener: bytes, caller: bytes) -> tuple[bytes, bytes]:
    """The key of what the listener says, and that of what the caller says."""
    both = listener + caller
    keyed = partial(blake2b, key=secret, digest_size=32)
    return keyed(b"listener" + both).digest(), keyed(b"caller" + both).digest()


def _mac(key: AESGCM, number: int, data: bytes | memoryview) -> bytes:
    return key.encrypt(number.to_bytes(12), b"", data)


# --- the secret of a job --------------------------------------------------------------------------

SECRET_FILE = "PERDURE_SECRET_FILE"
"""Environment variable: the file with the secret of this rank's job."""
MIN_BYTES = 16


def job_secret() -> bytes | None:
    """What that file gives for checkpoints (32 bytes); None if the environment names none.

    Raises:
        OSError: it cannot be read.
        StorageError: somebody else could have read or written it, or it is too short.
    """
    path = os.environ.get(SECRET_FILE)
    if not path:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status, data = os.fstat(descriptor), file.read(4096).strip()
    if not stat.S_ISREG(status.st_mode) or not is_private(status) or len(data) < MIN_BYTES:
        raise StorageError(
            f"the secret of the job: {path} is no file of at least {MIN_BYTES} bytes that belongs "
            f"to uid {os.geteuid()} and has mode 600; mend it, or name another by {SECRET_FILE}"
        )
    key = hashlib.sha256(data).digest()
    return hashlib.blake2b(b"purpose checkpoints", key=key, digest_size=32).digest()
