"""The secret of a job, by which the writers of its nodes know each other.

docs/elastic.md says who makes the file, and who is trusted. This package imports nothing of
`elastic`, and reads the file by the same rules.
"""

import hashlib
import os
import stat

from checkpointing.errors import StorageError
from checkpointing.storage.folders import is_private

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
