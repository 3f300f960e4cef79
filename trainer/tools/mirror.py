"""Copies runs, checkpoints and folders from a bucket into temporary directories, for tools that
read local directories. A killed command cannot delete its temporary directory, so the next command
does. Imports no torch."""

import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import CheckpointError, explain
from checkpointing.format.layout import BLOCK_BYTES, OPTIMIZER, TRAINER_STATE
from checkpointing.format.untrusted import is_plain
from checkpointing.storage.folders import LockedStorageFolder, hold
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from checkpointing.storage.steps import StorageFileReader, open_step, storage_of
from checkpointing.tools.inspect import StepChoice, find_checkpoint
from elastic.record.history import LedgerError
from trainer.recipe import RecipeError
from trainer.run.parts import RunRecordCopy
from trainer.run.terms import TERMS

logger = logging.getLogger(__name__)

FOLLOW_SECONDS = 5.0
"""Seconds between two updates of the copy of a run."""


@dataclass(frozen=True)
class MirroredRun:
    """A run, and the local directory from which it is read."""

    run: Path | ObjectPath
    directory: Path

    def named(self, text: str) -> str:
        """Replace the local directory in a text by the run."""
        return text.replace(str(self.directory), str(self.run))


@contextmanager
def local_runs(
    runs: Sequence[Path | ObjectPath], *, follow: bool = False
) -> Iterator[list[MirroredRun]]:
    """Yield a local directory for each run: the run itself, or a copy if it is in a bucket. With
    `follow`, copies are kept up to date, and runs may start later.

    Raises:
        LedgerError: without `follow`, a run in a bucket has not started.
        CheckpointError: a bucket's store does not answer.
    """
    with ExitStack() as stack:
        found: list[MirroredRun] = []
        copies: list[RunRecordCopy] = []
        for run in runs:
            if isinstance(run, Path):
                found.append(MirroredRun(run, run))
                continue
            directory = stack.enter_context(scratch_folder()) / run.name
            directory.mkdir()
            found.append(MirroredRun(run, directory))
            copies.append(RunRecordCopy(run, directory))
            if not copies[-1].refresh() and not follow:
                raise LedgerError(f"{run}: no attempt has started; use the folder of a started run")
        if follow and copies:
            stack.enter_context(_following(copies))
        yield found


@contextmanager
def _following(copies: Sequence[RunRecordCopy]) -> Iterator[None]:
    end = threading.Event()

    def follow() -> None:
        failing = False
        while not end.wait(FOLLOW_SECONDS):
            try:
                for copy in copies:
                    copy.refresh()
                failing = False
            except (CheckpointError, OSError) as error:
                if not failing:
                    logger.warning("the display is out of date: %s", explain(error))
                failing = True

    thread = threading.Thread(target=follow, name="perdure-mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextmanager
def local_folder(folder: ObjectPath) -> Iterator[Path]:
    """Yield a directory with a copy of each run that is directly in a folder of a bucket. Raises
    CheckpointError if the store does not answer."""
    with scratch_folder() as scratch:
        top = scratch / folder.name
        top.mkdir()
        for run in store_of(folder).children(folder):
            if is_plain(run.name) and store_of(run).children(run / TERMS):
                (top / run.name).mkdir()
                RunRecordCopy(run, top / run.name).refresh()
        yield top


@contextmanager
def local_model(path: ObjectPath, step: StepChoice = None) -> Iterator[Path]:
    """Yield a directory with the model of a checkpoint in a bucket; every byte is checked. `path`
    may also be a run, of which `step` selects a checkpoint. Raises CheckpointError if the
    checkpoint is missing or damaged, or the store does not answer."""
    found = open_step(find_checkpoint(path, step))
    storage = storage_of(found.path)
    with scratch_folder() as scratch:
        top = scratch / found.path.name
        for name, record in found.record.files.items():
            if name.startswith(OPTIMIZER.folder) or name == TRAINER_STATE:
                continue
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            place = found.path / name
            with storage.open(place) as stored, (top / name).open("xb") as file:
                blocks = StorageFileReader(stored, place, record)
                for block in range(-(-record.size // BLOCK_BYTES)):
                    file.write(blocks.held(blocks.check(block)))
        yield top


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


def _locked_folder() -> tuple[Path, LockedStorageFolder | None]:
    """Create a folder, with a lock that shows other commands that the folder is in use. The lock is
    None where files cannot be locked; no command then deletes a folder of another."""
    for _ in range(TRIES):
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        if lock := hold(path):
            break
    return path, lock


def _delete(path: Path, lock: LockedStorageFolder | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if lock:
        lock.close()
