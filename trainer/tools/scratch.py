"""Temporary folders of commands. A killed command cannot delete its folder, so the next command
does. Imports no torch."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointing.storage.folders import LockedFolder, hold
from trainer.recipe import RecipeError

PREFIX = "perdure-scratch-"
TRIES = 3
"""Attempts to lock a new folder, which another command may find and delete first."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder, and delete it afterwards. First delete the folders that killed
    commands of this user have left. Raises RecipeError if no folder can be created."""
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
    """Create a folder, with a lock that shows other commands that the folder is in use. The lock is
    None where files cannot be locked; no command then deletes a folder of another."""
    for _ in range(TRIES):
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        if lock := hold(path):
            break
    return path, lock


def _delete(path: Path, lock: LockedFolder | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if lock:
        lock.close()
