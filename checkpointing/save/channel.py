"""Authenticated messages between the processes of a run, and the secret that authenticates them.

[Note: channel] The listener sends a random number at once, and the caller answers with another.
Both numbers and the secret give a key for each direction, so a recording of another connection is
useless. A MAC over its number and its bytes precedes every message. A stranger can neither connect
nor change, repeat, drop or swap messages; it can only end the connection. No message is parsed
before its MAC is verified, and the first message is at most FIRST_BYTES long. Messages are typed
values (wire.py): even a peer that knows the secret sends no code.

The MAC is GMAC (AES-256-GCM over authenticated data alone, NIST SP 800-38D), with the message
number as the nonce: a key sees each nonce once. GMAC takes a fifth of HMAC-SHA256's time. That
matters where a copy of every step travels to another node.

docs/elastic.md says who writes the file with the job's secret, and who is trusted. This package
imports nothing of `elastic`, and reads that file by the same rules."""

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
"""Seconds after which a vanished machine, or a process that does not read, is detected."""
NONCE_BYTES = 32
MAC_BYTES = 16
FIRST_BYTES = 4096
"""Longest message in bytes accepted from a caller that is not authenticated yet."""
PROOF = b"I know it, too"


class SaveChannelError(OSError):
    """The peer does not know the secret, or its messages were tampered with."""


class SaveChannel:
    """One side of an authenticated connection, see [Note: channel]. Created by `call` and
    `welcome`. `ours` is the key of messages that this side sends, `theirs` of those it receives."""

    def __init__(self, connection: Connection, ours: bytes, theirs: bytes) -> None:
        self._connection, self._ours, self._theirs = connection, AESGCM(ours), AESGCM(theirs)
        self._sent, self._received = 0, 0
        self._sending = threading.Lock()  # so that MAC and message follow each other

    def send(self, message: Any) -> None:
        """Send a value that `wire.pack` accepts. Callable from any thread."""
        self.send_bytes(pack(message))

    def recv(self) -> Any:
        """Returns the next value. Raises SaveChannelError if the MAC is wrong or the message is not
        a packed value, and EOFError or OSError if the other side is gone."""
        return _message(self.recv_bytes())

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes, fewer than 2 GiB. Callable from any thread. Raises OSError if the peer is
        gone, or has read nothing for SILENT_SECONDS."""
        with self._sending:
            self._sent += 1
            try:
                self._connection.send_bytes(_mac(self._ours, self._sent, data))
                self._connection.send_bytes(data)
            except OSError:
                self.shut()  # after half a message the receiver cannot find the next one
                raise

    def recv_bytes(self, most: int | None = None) -> bytes:
        """Returns the next message as bytes. Raises errors like `recv`, and OSError if the message
        is longer than `most` bytes."""
        try:
            mac = self._connection.recv_bytes(MAC_BYTES)
            data = self._connection.recv_bytes(most)
        except BlockingIOError as error:  # SO_RCVTIMEO has passed
            raise TimeoutError("nothing came for too long") from error
        # both sides count messages: a repeated, dropped or swapped message has a wrong MAC
        self._received += 1
        if not hmac.compare_digest(mac, _mac(self._theirs, self._received, data)):
            raise SaveChannelError("a message that the other side has not sent")
        return data

    def poll(self, seconds: float) -> bool:
        return self._connection.poll(seconds)

    def limit(self, seconds: float) -> None:
        """Make `recv` fail after `seconds` without a byte; 0: never."""
        with _socket(self._connection) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time(seconds))

    def shut(self) -> None:
        """End the connection for both sides, and wake threads blocked in `send` or `recv`."""
        with suppress(OSError), _socket(self._connection) as same:
            same.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def call(
    address: tuple[str, int] | str, secret: bytes, seconds: float = SILENT_SECONDS
) -> SaveChannel:
    """Connect to a listening process of the run, over TCP or an abstract Unix socket.

    Args:
        address: (host, port), or the name of the socket.
        seconds: longest silence during the handshake, as a machine that is gone never answers.

    Raises:
        SaveChannelError: the listener does not know the secret.
        EOFError, OSError: nobody listens at `address`, or the handshake times out.
    """
    connection = _connect(address, seconds)
    try:
        _set_up(connection, seconds)
        theirs, ours = connection.recv_bytes(NONCE_BYTES), os.urandom(NONCE_BYTES)
        connection.send_bytes(ours)
        listener_key, caller_key = _keys(secret, theirs, ours)
        channel = SaveChannel(connection, caller_key, listener_key)
        # The listener proves itself first, so that a stranger gets no message of this process.
        if channel.recv_bytes(len(PROOF)) != PROOF:
            raise SaveChannelError(
                f"the listener at {address} knows the secret of this run, but begins with another "
                "message than expected; run one version of perdure on all nodes"
            )
        channel.limit(0)
        return channel
    except BaseException:
        connection.close()
        raise


def welcome(connection: Connection, secret: bytes, seconds: float) -> tuple[SaveChannel, Any]:
    """Authenticate a caller; returns the channel and the caller's first message, which identifies
    it. Raises an exception if the caller does not know the secret, has disconnected, or is silent
    for `seconds`."""
    _set_up(connection, seconds)
    with _socket(connection) as same:
        # abstract sockets have no file mode, so ask the kernel for the user of the peer
        if same.family == socket.AF_UNIX:
            credentials = same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _, uid, _ = struct.unpack("3i", credentials)
            if uid != os.geteuid():
                raise SaveChannelError(f"its process has uid {uid}, and this one {os.geteuid()}")
    ours = os.urandom(NONCE_BYTES)
    connection.send_bytes(ours)
    channel = SaveChannel(connection, *_keys(secret, ours, connection.recv_bytes(NONCE_BYTES)))
    channel.send_bytes(PROOF)
    message = _message(channel.recv_bytes(FIRST_BYTES))
    channel.limit(0)
    return channel, message


def _connect(address: tuple[str, int] | str, seconds: float) -> Connection:
    if isinstance(address, tuple):
        with socket.create_connection(address, seconds) as connection:
            connection.setblocking(True)  # the timeout was for connecting only
            return Connection(connection.detach())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        return Connection(connection.detach())


def _message(data: bytes) -> Any:
    try:
        return unpack(data)
    except WireError as error:
        raise SaveChannelError(f"no message of this run: {error}") from error


def _socket(connection: Connection) -> socket.socket:
    # dup(), as a socket object closes its descriptor
    return socket.socket(fileno=os.dup(connection.fileno()))


def _set_up(connection: Connection, seconds: float) -> None:
    """Make a read fail after `seconds` without a byte, and a send if the peer reads nothing or its
    machine is gone. multiprocessing's Connection has no timeout, so the socket gets one."""
    with _socket(connection) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time(seconds))
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time(SILENT_SECONDS))
        if same.family != socket.AF_UNIX:
            # otherwise a small message waits 40 ms for an acknowledgement (Nagle's algorithm)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 3)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 6)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)


def _time(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _keys(secret: bytes, listener: bytes, caller: bytes) -> tuple[bytes, bytes]:
    """Returns (key for the listener's messages, key for the caller's messages)."""
    both = listener + caller
    keyed = partial(blake2b, key=secret, digest_size=32)
    return keyed(b"listener" + both).digest(), keyed(b"caller" + both).digest()


def _mac(key: AESGCM, number: int, data: bytes | memoryview) -> bytes:
    return key.encrypt(number.to_bytes(12), b"", data)


# --- the secret of a job --------------------------------------------------------------------------

SECRET_FILE = "PERDURE_SECRET_FILE"
"""Environment variable: path of the file with the job's secret."""
MIN_BYTES = 16


def job_secret() -> bytes | None:
    """Returns the key (32 bytes) for checkpoints derived from the job's secret; None if the
    environment names no file. Raises OSError if the file cannot be read, and StorageError if it is
    too short, or another user could have read or written it."""
    path = os.environ.get(SECRET_FILE)
    if not path:
        return None
    # O_NONBLOCK: opening a pipe would wait for its other end
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status, data = os.fstat(descriptor), file.read(4096).strip()
    if not stat.S_ISREG(status.st_mode) or not is_private(status) or len(data) < MIN_BYTES:
        raise StorageError(
            f"the secret of the job: {path} is no file of at least {MIN_BYTES} bytes that belongs "
            f"to uid {os.geteuid()} and has mode 600; correct it, or name another in {SECRET_FILE}"
        )
    key = hashlib.sha256(data).digest()
    # a key derived for checkpoints only, so that no other use of the secret reveals it
    return hashlib.blake2b(b"purpose checkpoints", key=key, digest_size=32).digest()
