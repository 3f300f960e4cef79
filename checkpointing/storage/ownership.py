"""Owners of a file: the process that wrote it, which may still live, and the user, who may be
trusted.

[Note: owner] An owner is a process, written as <host>-<machine>-<pid>-<start>. `start` is its start
time; `machine` identifies the boot of its machine and its process namespace. With these a process
on that machine sees whether the owner still lives, even after its process id was reused.

[Note: trust] A user who can write to a checkpoint directory can put a step there, whose weights
would be trained on. So a run reads only steps of its own user, of root, and of the users that
`checkpoint.trust` names. The rule belongs to the directory: a process that trains sets it once, and
it applies to every read of a step below. Each part of a path below the
directory is opened without following links, and
the owner of the open descriptor is checked, so that no file can be exchanged in between. A hard
link, as backups make them, changes nothing: only trusted users can write to the folder of a trusted
user's step, so nobody else can place a link there.

A directory that a user names for reading, such as `model.init_from`, has no rule: files of any user
are read there."""

import errno
import grp
import hashlib
import os
import pwd
import re
import socket
import stat
import tempfile
from collections.abc import Collection, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from checkpointing.errors import UnreadableCheckpoint
from checkpointing.format.layout import parse_step
from checkpointing.storage.place import StoragePlace

_OWNER = re.compile(r".*-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)")


def owner(pid: int | None = None) -> str:
    """Returns the identity of a living process (default: this one), see [Note: owner]."""
    host, pid = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname()), pid or os.getpid()
    return f"{host}-{machine()}-{pid}-{_start_time(pid)}"


def is_alive(name: str) -> bool | None:
    """Whether the owner at the end of a name lives; None if it is on another machine, or the name
    contains no owner."""
    match = _OWNER.fullmatch(name)
    if match is None or match["machine"] != machine():
        return None
    return _start_time(int(match["pid"])) == int(match["start"])


def is_owner(name: str, owners: Collection[str]) -> bool:
    """Whether one of `owners` is the owner at the end of a name."""
    return any(bool(_OWNER.fullmatch(one)) and name.endswith(f"-{one}") for one in owners)


@cache
def machine() -> str:
    """Returns the identity of this boot of this machine and of the process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        boot, namespace = "", ""
    return hashlib.sha256(f"{socket.gethostname()} {boot} {namespace}".encode()).hexdigest()[:8]


def _start_time(pid: int) -> int | None:
    """Returns the start time of a living process in clock ticks since boot (0 if /proc hides it);
    None if there is no such process."""
    try:
        os.kill(pid, 0)  # only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:  # the process lives, under another user
        pass
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # /proc hides other users' processes
        return 0
    fields = status.rpartition(")")[2].split()  # the name before the bracket may contain spaces
    return None if fields[0] == "Z" else int(fields[19])  # a zombie writes no more


# --- users ----------------------------------------------------------------------------------------

GROUP = "group"
OVERFLOW = 65534
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class TrustedStorageOwners(Container[int]):
    """User ids whose files a process accepts: its own (also as NFS maps it), root's, and those of
    `names`, in which "group" stands for the members of the directory's group."""

    names: tuple[str | int, ...]
    directory: Path

    def __contains__(self, uid: object) -> bool:
        if not isinstance(uid, int):
            return False
        if uid in (os.geteuid(), 0) or uid in self.names or _name(uid) in self.names:
            return True
        if GROUP in self.names and _is_member(uid, self.directory):
            return True
        return uid == _owner_of_new_files(self.directory)


_rules: dict[Path, TrustedStorageOwners] = {}


def keep_to(directory: StoragePlace, names: Sequence[str | int]) -> None:
    """From now on, make this process read only steps in `directory` that trusted users wrote."""
    if isinstance(directory, Path):
        _rules[directory] = TrustedStorageOwners(tuple(names), directory)


def require_own_link(directory: Path) -> None:
    """Raises PermissionError if another user has made a checkpoint directory a link."""
    rule = _rules.get(directory)
    with suppress(FileNotFoundError):
        found = os.lstat(directory)
        if rule and stat.S_ISLNK(found.st_mode) and found.st_uid not in rule:
            why = f"is a link of {_who(found.st_uid)}, which is not followed; remove it"
            raise PermissionError(errno.EPERM, why, str(directory))


def lets_group_write(directory: Path) -> bool:
    """Whether members of a directory's group may change files that are written in it."""
    rule = _rules.get(directory)
    return bool(rule and GROUP in rule.names)


def is_foreign(step: Path) -> bool:
    """Whether an entry named as a step is a link, or belongs to a user who is not trusted."""
    rule = _rules.get(step.parent)
    found = os.lstat(step)
    return stat.S_ISLNK(found.st_mode) or bool(rule and found.st_uid not in rule)


def open_to_read(path: Path, flags: int) -> int:
    """Like os.open(path, flags), but inside a step raise UnreadableCheckpoint for links, and for
    files of users whom the checkpoint directory does not trust."""
    found = next(((root, rule) for root, rule in _rules.items() if root in path.parents), None)
    parts = path.relative_to(found[0]).parts if found else ()
    if not found or len(parts) < 2 or (step := parse_step(parts[0])) is None:
        return os.open(path, flags)
    root, rule = found
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts):
            what = f"{root}: " + " of ".join([*parts[number:0:-1], f"step {step}"])
            last = number == len(parts) - 1
            try:
                inner = os.open(part, flags | os.O_NOFOLLOW if last else _FOLDER, dir_fd=folder)
            except OSError as error:
                with suppress(FileNotFoundError):
                    if stat.S_ISLNK(os.lstat(part, dir_fd=folder).st_mode):
                        raise UnreadableCheckpoint(
                            f"{what} is a link, which is not followed; remove it"
                        ) from error
                error.filename = str(path)
                raise
            os.close(folder)
            # Each part is opened relative to the last, so that a rename cannot divert the path.
            folder = inner
            owner = os.fstat(folder).st_uid
            if owner not in rule:
                raise UnreadableCheckpoint(f"{what} {_refusal(owner)}")
    except BaseException:
        os.close(folder)
        raise
    return folder


def _refusal(owner: int) -> str:
    name = _name(owner) or owner
    unknown = " (it may stand for any user whom this container or NFS server does not know)"
    return (
        f"was written by {_who(owner)}{unknown if owner == OVERFLOW else ''}, not by "
        f"{_who(os.geteuid())}, and is not loaded; to trust its writer, set checkpoint.trust: "
        f"[{name}], or [group] for all members of the directory's group"
    )


def _who(uid: int) -> str:
    name = _name(uid)
    return f"{name} (uid {uid})" if name else f"uid {uid}"


def _name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return None


def _is_member(uid: int, directory: Path) -> bool:
    try:
        group, user = directory.stat().st_gid, pwd.getpwuid(uid)
        if group in (user.pw_gid, *os.getgrouplist(user.pw_name, user.pw_gid)):
            return True
        return user.pw_name in grp.getgrgid(group).gr_mem
    except (KeyError, OSError):
        return False


def _owner_of_new_files(directory: Path) -> int | None:
    """Returns the owner (uid) of files that this process creates in `directory`. On NFS with
    root_squash, files of root belong to nobody."""
    with suppress(OSError), tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_uid
    return None
