"""Steps in an object store: how one is written, deleted, and what the dead left is collected.

[Note: markers]
  step-00001000/…               the objects of a step; it is committed once index.json is there
  step-00001000.tmp-<owner>     an empty object: <owner> writes what lies under step-00001000/
  step-00001000.trash-<owner>   likewise: <owner> deletes it
As nothing can be renamed, objects have their final names from the start, and index.json alone makes
them a checkpoint. It is put with the condition that there is none, so that of several processes
that write the same step one at most commits it. Markers say who is at work; a process that takes
over removes those of others, and who finds its own marker gone neither commits nor cleans up.
"""

import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpointing.errors import CheckpointError, StorageError, explain
from checkpointing.layout import COMMIT_RECORD, LATEST, TensorFile, parse_step
from checkpointing.objects import ObjectPath, Store, Upload, UploadWriter, store_of
from checkpointing.owners import is_alive, is_owner, owner
from checkpointing.untrusted import printable

logger = logging.getLogger(__name__)

FOREIGN_SECONDS = 6 * 3600
"""What another machine has written, whose processes cannot be seen from here, counts as left behind
when nothing was added for so long. A file being uploaded shows no sign of life until it is
finished, so this must be longer than the longest upload of one file."""

_MARKER = re.compile(r"(?P<step>step-\d{8,})\.(?:tmp|trash)-.+")


@dataclass
class ObjectTarget:
    """See `checkpointing.target.Target`."""

    place: ObjectPath
    marker: ObjectPath
    uploads: dict[str, str] = field(default_factory=dict)
    """Tokens by file."""
    in_parts = False

    @staticmethod
    def of(place: ObjectPath) -> "ObjectTarget":
        """A target owned by this process."""
        return ObjectTarget(place, place.with_name(f"{place.name}.tmp-{owner()}"))

    @property
    def final(self) -> Path:
        """See Target."""
        return self.place.as_path()

    def begin(self, files: Sequence[TensorFile]) -> None:
        """Take the step over, remove what others have left of it, and begin all uploads.

        Raises:
            StorageError: it is committed, or another process of this machine writes it.
        """
        store = store_of(self.place)
        if store.find(self.place / COMMIT_RECORD) is not None:
            raise StorageError(f"{self.place} is committed already")
        others = _markers(store.children(self.place.parent)).get(self.place.name, [])
        others = [marker for marker in others if marker != self.marker]
        for marker in others:
            if is_alive(marker.name):
                raise StorageError(
                    f"{self.place}: another process of this machine writes it at this moment "
                    f"({printable(marker.name)}); end that run, or give this one a "
                    "checkpoint.directory of its own"
                )
        store.write(self.marker, b"")
        store.delete(others)
        _remove(self.place, store.uploads(self.place))
        tokens = store.begin_uploads([(self.place / file.name, file.size) for file in files])
        self.uploads = dict(zip((file.name for file in files), tokens, strict=True))

    def writer(self, file: str, size: int) -> UploadWriter:
        """See Target."""
        place = self.place / file
        return store_of(place).open_upload(place, self.uploads[file], size)

    def commit(
        self, files: Sequence[TensorFile], small: Mapping[str, bytes], record: bytes
    ) -> None:
        """See Target.

        Raises:
            StorageError: another process has taken over or committed this step.
        """
        store = store_of(self.place)
        found = store.walk(self.place)
        for file in files:
            size = found[file.name].st_size if file.name in found else 0
            if size != file.size:
                raise StorageError(
                    f"{self.place / file.name}: has {size} bytes, {file.size} were written"
                )
        taken = f"{self.place}: another process has taken over this step; two runs write to "
        taken += f"{self.place.parent}: end one of them"
        if store.find(self.marker) is None:
            raise StorageError(taken)
        try:
            for name, data in small.items():
                store.write_new(self.place / name, data)
            store.write_new(self.place / COMMIT_RECORD, record)
        except FileExistsError as error:
            raise StorageError(taken) from error
        try:
            store.write(self.place.with_name(LATEST), f"{self.place.name}\n".encode())
            store.delete([self.marker])
        except CheckpointError as error:  # the checkpoint itself is committed
            logger.warning("%s is committed, but: %s", self.place, error)

    def abort(self) -> None:
        """See Target. What cannot be removed now is left to `collect_steps`."""
        store = store_of(self.place)
        try:
            store.abort_uploads(
                [(self.place / file, token) for file, token in self.uploads.items()]
            )
            if store.find(self.marker) is None:  # what is there belongs to another
                return
            if store.find(self.place / COMMIT_RECORD) is None:
                _remove(self.place, ())
            store.delete([self.marker])
        except (CheckpointError, OSError) as error:
            logger.warning("could not remove all of %s: %s", self.place, explain(error))


def committed(steps: Sequence[ObjectPath]) -> list[ObjectPath]:
    """Those that have a commit record."""
    if not steps:
        return []
    records = store_of(steps[0]).find_all([step / COMMIT_RECORD for step in steps])
    return [step for step, record in zip(steps, records, strict=True) if record is not None]


def delete_step(step: ObjectPath) -> None:
    """Delete a committed step: the commit record first, so that it is never a checkpoint with
    something missing. What an error or a crash leaves, and what never was committed, is left to
    `collect_steps`."""
    store = store_of(step)
    record = step / COMMIT_RECORD
    if store.find(record) is None:
        return
    marker = step.with_name(f"{step.name}.trash-{owner()}")
    store.write(marker, b"")
    store.delete([record])
    _remove(step, ())
    store.delete([marker])


def collect_steps(directory: ObjectPath, lost: Collection[str] = ()) -> None:
    """Remove what processes that are dead have left of steps that they wrote or deleted, and
    uploads that nobody finishes; never anything of a committed step.

    Args:
        directory: of the checkpoints.
        lost: owners that may write here no more, whether or not they live.
    """
    store = store_of(directory)
    children = store.children(directory)
    markers = _markers(children)
    uploads: dict[str, list[Upload]] = {}
    for upload in store.uploads(directory):
        below = upload.path.key[len(directory.key) :].lstrip("/")
        uploads.setdefault(below.partition("/")[0], []).append(upload)
    names = {child.name for child in children} | set(markers) | set(uploads)
    steps = [directory / name for name in sorted(names) if parse_step(name) is not None]
    good = set(committed(steps))
    for step in steps:
        theirs, begun = markers.get(step.name, []), uploads.get(step.name, [])
        if step in good and not theirs and not begun:
            continue
        given_up = bool(theirs) and all(is_owner(marker.name, lost) for marker in theirs)
        if not given_up and not _is_abandoned(step, theirs, begun, step in good):
            continue
        logger.info("removing what a dead run left of %s", step)
        if step in good:
            store.abort_uploads([(upload.path, upload.token) for upload in begun])
        else:
            _remove(step, begun)
        store.delete(theirs)


def _is_abandoned(
    step: ObjectPath, markers: Sequence[ObjectPath], uploads: Sequence[Upload], good: bool
) -> bool:
    """Whether nobody works on a step any more."""
    mine = [marker.name.endswith(f".trash-{owner()}") for marker in markers]
    alive = [is_alive(marker.name) for marker in markers]
    if any(life and not own for life, own in zip(alive, mine, strict=True)):
        return False
    if markers and None not in alive:
        return True
    store = store_of(step)
    times = [upload.began for upload in uploads]
    times += [found.st_mtime for found in store.find_all(markers) if found]
    if not good:
        times += [found.st_mtime for found in store.walk(step).values()]
    return time.time() - max(times, default=0.0) > FOREIGN_SECONDS


def _remove(step: ObjectPath, uploads: Collection[Upload]) -> None:
    """Remove all that lies under a step that is not committed."""
    store: Store = store_of(step)
    store.abort_uploads([(upload.path, upload.token) for upload in uploads])
    store.delete([step / name for name in store.walk(step)])


def _markers(children: Sequence[ObjectPath]) -> dict[str, list[ObjectPath]]:
    """Markers in a directory by the name of their step."""
    found: dict[str, list[ObjectPath]] = {}
    for child in children:
        match = _MARKER.fullmatch(child.name)
        if match:
            found.setdefault(match["step"], []).append(child)
    return found
