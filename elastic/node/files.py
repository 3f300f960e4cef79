"""Files in a directory that others may write to, such as a project folder of mode 2775.

[Note: a shared directory] Another user of the group can create any name first: as a link to a file
of the user who trains, a pipe, or a file. So a new file is created under a random name (O_EXCL) and
renamed, which replaces a link instead of following it. A file that is appended to must be a regular
file of this user; if it has further hard links, a copy replaces it. Anything else under its name is
renamed, with a warning."""

import errno
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_MOST_BYTES = 16 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.EACCES)


def write_whole(path: Path, text: str) -> None:
    """Replace a file. A reader sees the old or the new text, even after a crash."""
    with _replacement(path) as aside, aside.open("x", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def _replacement(path: Path) -> Iterator[Path]:
    """Context with the path of a new file, which replaces `path` at the end."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield aside
        os.replace(aside, path)
    # Otherwise the file with a random name would stay for ever.
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def write_new(path: Path, text: str) -> None:
    """Create a file. A link under this name is not followed."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def read_text(path: Path) -> str:
    """Returns the text of a regular file of at most 16 MiB. Never blocks, even if `path` is a pipe.
    Raises OSError as `read_bytes` does, or ValueError if the file is not UTF-8."""
    return read_bytes(path).decode()


def read_bytes(path: Path, most: int = _MOST_BYTES, *, follow: bool = False) -> bytes:
    """Returns all bytes of a regular file. Never blocks, even if `path` is a pipe. `follow`: follow
    links, for a path that the user has named. Raises OSError if the file is missing, a link, not
    regular, or larger than `most` bytes."""
    with os.fdopen(open_to_read(path, follow=follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {most} are read", str(path))
        return file.read(most)


def open_to_read(path: Path, *, follow: bool = False) -> int:
    """Open a regular file for reading; returns the descriptor. `follow`: follow links, for a path
    that the user has named. Raises OSError if the file is missing, a link, or not regular."""
    descriptor = os.open(path, _READ & ~os.O_NOFOLLOW if follow else _READ)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ENXIO, "not a regular file", str(path))


def open_to_append(path: Path, trusted: Container[int] = ()) -> int:
    """Open a regular file of this user for appending, created if missing; returns the descriptor.
    Anything else under this name is renamed, and a file with further hard links is first replaced
    by a copy. `trusted`: other users (uids) who may own the file.
    Raises OSError if that is not possible."""
    for _ in range(_ATTEMPTS):
        try:
            descriptor = os.open(path, _APPEND, 0o666)
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and is_ours(status, path.parent, trusted):
                raise
        else:
            status = os.fstat(descriptor)
            is_own = stat.S_ISREG(status.st_mode) and is_ours(status, path.parent, trusted)
            if is_own and status.st_nlink <= 1:
                return descriptor
            try:
                # The file has further hard links: by a backup, or by another user who wants to have
                # this user's process write to some other file.
                if is_own:
                    _take_copy(descriptor, path)
                    continue
            finally:
                os.close(descriptor)
        put_aside(path, status)
    raise PermissionError(errno.EPERM, "other users keep creating files of this name", str(path))


def _take_copy(descriptor: int, path: Path) -> None:
    """Replace one name of an open file by a copy; its other hard links keep the original. The copy
    has the same mode, so that nobody can read more than before."""
    opener = partial(os.open, mode=stat.S_IMODE(os.fstat(descriptor).st_mode))
    with (
        _replacement(path) as aside,
        os.fdopen(os.dup(descriptor), "rb") as old,
        open(aside, "xb", opener=opener) as new,
    ):
        shutil.copyfileobj(old, new)


def own_directory(path: Path, trusted: Container[int] = ()) -> None:
    """Create a directory that only this user may write to. If this user's directory exists already,
    remove the right of other users to write to it. Follows links of this user; renames a link,
    file or directory of another user. `trusted`: other users (uids) who may own the directory.
    Raises OSError if that is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_ATTEMPTS):
        with suppress(FileExistsError):
            path.mkdir(mode=0o755)
            return
        link = os.lstat(path)
        status = path.stat() if stat.S_ISLNK(link.st_mode) and path.exists() else link
        is_own = all(is_ours(entry, path.parent, trusted) for entry in (link, status))
        if is_own:
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(path))
            with suppress(OSError):  # the filesystem may have no modes
                path.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
            return
        put_aside(path, link)
    raise PermissionError(errno.EPERM, "other users keep creating files of this name", str(path))


def put_aside(path: Path, status: os.stat_result) -> None:
    """Rename a file that is not this user's, so that its name is free, and log that. Raises
    PermissionError if the directory forbids it (mode +t)."""
    kind = {stat.S_IFLNK: "a link", stat.S_IFREG: "a file", stat.S_IFDIR: "a directory"}
    what = kind.get(stat.S_IFMT(status.st_mode), "no regular file")
    what += f" of uid {status.st_uid}"
    aside = path.with_name(f"{path.name}.not-ours-{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except OSError as error:
        why = f"is {what}, not a file of uid {os.geteuid()}, and cannot be renamed; remove it"
        raise PermissionError(errno.EPERM, why, str(path)) from error
    logger.warning(
        "%s was %s, not a file of uid %d alone; it is now called %s, and a new file is created. If "
        "you trust the old one, copy it back",
        path, what, os.geteuid(), aside.name,
    )  # fmt: skip


def is_ours(status: os.stat_result, directory: Path, trusted: Container[int] = ()) -> bool:
    """Whether a file belongs to this user, to root, or to one of `trusted` (uids). `status`: result
    of stat() for the file; `directory`: a folder on the same filesystem."""
    if status.st_uid in (os.geteuid(), 0) or status.st_uid in trusted:
        return True
    # With root_squash, NFS shows files of root as owned by nobody. So compare with the owner of a
    # file that this process creates there.
    with suppress(OSError), tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_uid == status.st_uid
    return False
