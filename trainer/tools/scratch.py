"""Temporary folders of commands. A command that is killed cannot delete its folder, so the next
command does. Imports no torch."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointing.storage.folders import LockedFolder, hold
from trainer.recipe import RecipeError

PREFIX = "perdure-scratch-"
"""Prefix of the names of scratch folders, in the temporary directory."""
TRIES = 3
"""Attempts to lock a new folder, which another command may find and delete first."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder, and delete it afterwards. Folders that killed commands of this user
    have left are deleted first.

    Raises:
        RecipeError: the temporary directory cannot be written.
    """
    try:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if lock := hold(left):
                _delete(left, lock)
        path, lock = _locked_folder()
    except OSError as error:
        raise RecipeError(
            f"no temporary folder: {error.strerror}; set TMPDIR to a directory with room"
        ) from error
    try:
        yield path
    finally:
        _delete(path, lock)


def _locked_folder() -> tuple[Path, LockedFolder | None]:
    """Create a folder. Its lock shows other commands that the folder is in use. Where files cannot
    be locked, the lock is None, and no command deletes a folder of another."""
    for _ in range(TRIES):
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        if lock := hold(path):
            break
    return path, lock


def _delete(path: Path, lock: LockedFolder | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if lock:
        lock.close()
