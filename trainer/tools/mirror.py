"""What lies in a bucket, for tools that read local directories: copies in a temporary directory,
which are gone when the command ends. Imports no torch."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from checkpointing.errors import CheckpointError, explain
from checkpointing.format.layout import BLOCK_BYTES, OPTIMIZER, TRAINER_STATE
from checkpointing.format.untrusted import is_plain
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from checkpointing.storage.steps import CheckedBlocks, open_step, storage_of
from checkpointing.tools.inspect import StepChoice, find_checkpoint
from elastic.record.history import LedgerError
from trainer.run.parts import LocalCopy
from trainer.run.terms import TERMS

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Between two looks at a run in a bucket that is followed."""


@dataclass(frozen=True)
class LocalRun:
    """A run, and the directory to read it from."""

    run: Path | ObjectPath
    directory: Path

    def named(self, text: str) -> str:
        """Returns a text about the directory as one about the run."""
        return text.replace(str(self.directory), str(self.run))


@contextmanager
def local_runs(
    runs: Sequence[Path | ObjectPath], *, follow: bool = False
) -> Iterator[list[LocalRun]]:
    """Yields the directory of each run, or of its copy.

    Args:
        follow: keep copies up to date; a run may begin later.

    Raises:
        LedgerError: a run in a bucket has not begun.
        CheckpointError: its store does not answer.
    """
    with ExitStack() as stack:
        found: list[LocalRun] = []
        copies: list[LocalCopy] = []
        for run in runs:
            if isinstance(run, Path):
                found.append(LocalRun(run, run))
                continue
            directory = Path(stack.enter_context(_scratch()), run.name)
            directory.mkdir()
            found.append(LocalRun(run, directory))
            copies.append(LocalCopy(run, directory))
            if not copies[-1].refresh() and not follow:
                raise LedgerError(f"{run}: no attempt has begun; give the folder of a run that has")
        if follow and copies:
            stack.enter_context(_following(copies))
        yield found


def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="perdure-", ignore_cleanup_errors=True)


@contextmanager
def _following(copies: Sequence[LocalCopy]) -> Iterator[None]:
    end = threading.Event()

    def follow() -> None:
        failing = False
        while not end.wait(LOOK_SECONDS):
            try:
                for copy in copies:
                    copy.refresh()
                failing = False
            except (CheckpointError, OSError) as error:
                if not failing:
                    logger.warning("what is shown is not new: %s", explain(error))
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
    """Yields a directory with a copy of each run that lies directly in a folder of a bucket.

    Raises:
        CheckpointError: the store does not answer.
    """
    with _scratch() as scratch:
        top = Path(scratch, folder.name)
        top.mkdir()
        for run in store_of(folder).children(folder):
            if is_plain(run.name) and store_of(run).children(run / TERMS):
                (top / run.name).mkdir()
                LocalCopy(run, top / run.name).refresh()
        yield top


@contextmanager
def local_model(path: ObjectPath, step: StepChoice = None) -> Iterator[Path]:
    """Yields a directory with the model of a checkpoint in a bucket, every byte of it checked.

    Args:
        path: a run, a directory of checkpoints, or a checkpoint.
        step: which checkpoint of a run.

    Raises:
        CheckpointError: there is none, it is damaged, or the store does not answer.
    """
    found = open_step(find_checkpoint(path, step))
    storage = storage_of(found.path)
    with _scratch() as scratch:
        top = Path(scratch, found.path.name)
        for name, record in found.record.files.items():
            if name.startswith(OPTIMIZER.folder) or name == TRAINER_STATE:
                continue
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            place = found.path / name
            with storage.open(place) as stored, (top / name).open("xb") as file:
                blocks = CheckedBlocks(stored, place, record)
                for block in range(-(-record.size // BLOCK_BYTES)):
                    file.write(blocks.held(blocks.check(block)))
        yield top
