"""The slots of a node in its writer process: creates them, tracks the saves in them, and leaves
them to a restart."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from checkpointing.errors import explain
from checkpointing.format.plan import SavePlanInput, SectionNumbers
from checkpointing.save import messages as msg
from checkpointing.save.blocks import SaveNodePlan, plan_node
from checkpointing.save.peers import Pull, copy_slot, write_manifest
from checkpointing.save.serving import WriterEventLoop, give_way, start_thread
from checkpointing.save.slots import (
    SaveSlotFiles,
    SaveSlots,
    close_slots,
    give_back,
    make_room,
    make_slots,
)
from checkpointing.storage.folders import LockedStorageFolder, collect_memory, forget

logger = logging.getLogger(__name__)

MOST_THREADS = 4
"""Largest number of threads that compute the checksums of a slot."""
NewSlots = tuple[SaveNodePlan, LockedStorageFolder | None, SaveSlots]


@dataclass
class SaveSlotFilling:
    """A save whose tensors are being copied into a slot, or have been."""

    key: msg.Key
    slot: int
    state: str
    newest: int | None
    """Newest step in storage when the save began."""
    staged: dict[int, msg.Position] = field(default_factory=dict)
    """Rank → position up to which it has copied its pieces."""
    numbers: dict[int, SectionNumbers] = field(default_factory=dict)
    """Rank that has copied everything → summary of the numbers."""
    stopped: bool = False


class SaveNodeMemory:
    """A node's slots in its writer process. Methods run in the thread of the writer's loop."""

    def __init__(self, setup: msg.WriterSetup, directory: str, loop: WriterEventLoop) -> None:
        self._setup, self._directory, self._loop = setup, directory, loop
        self._ranks = setup.nodes[setup.node]
        self.plan: SaveNodePlan | None = None
        self.slots: SaveSlots | None = None
        self._folder: LockedStorageFolder | None = None
        self.files: list[SaveSlotFiles] = []
        self._filled: dict[int, SaveSlotFilling] = {}
        """Slot → the last save copied into it, even if that has ended or failed."""
        self._manifests: dict[str, msg.SaveManifest] = {}
        """Name of a slot, or of a copy of another node's slot → its valid manifest."""
        self.remembering = 0
        """Number of slots whose checksums are being computed."""
        self._committed: int | None = None

    def make(
        self, digest: str, plan: SavePlanInput, done: Callable[[NewSlots | Exception], None]
    ) -> None:
        """Create slots for a plan in another thread, then call done(slots or an exception)."""
        # Contents of the old slots must not be taken for contents of the new slots.
        self._filled.clear()
        self._manifests.clear()
        self.files = []  # memory is freed only when no process maps it

        def work() -> NewSlots:
            # in this thread, as the kernel takes a while to free the pages
            if self._folder:
                forget(self._folder)
                self._folder = None
            if self.slots:
                close_slots(self.slots)
            part = plan_node(plan, digest, self._setup.nodes, self._setup.node)
            options = self._setup.options
            folder, slots = make_slots(
                self._directory, part.files, part.ranges, options.slots, digest, self._setup.node,
                options.slot_directory,
            )  # fmt: skip
            return part, folder, slots

        self._loop.later(work, done)

    def use(self, slots: NewSlots | None) -> None:
        """Use these slots from now on."""
        if slots is None:
            self.plan = self.slots = None
            return
        self.plan, self._folder, self.slots = slots
        self.files = [SaveSlotFiles(paths) for paths in self.slots.paths]
        if not self.slots.transient:
            self._write_headers(self.plan)

    def touch(self) -> None:
        """Fault in the pages of all slots, and delete memory of dead runs, in another thread."""
        if self.plan is None or self.slots is None:
            return
        files, ranges = self.files if self.slots.resident else [], self.plan.ranges

        def work() -> None:
            give_way()
            for slot in files:
                slot.touch(ranges)
            collect_memory(self._directory)

        start_thread(threading.Thread(target=work).start)

    def _write_headers(self, plan: SaveNodePlan) -> None:
        for files in self.files:
            for name in plan.sources:
                header = plan.files[name].header
                files.maps[name][: len(header)] = header

    @property
    def end(self) -> msg.Position:
        """Position of a rank that has copied everything."""
        return (len(self.plan.files) if self.plan else 0), 0

    def fill(self, go: msg.SaveAdmitted) -> SaveSlotFilling:
        """Begin to fill a slot, whose manifest becomes invalid. `make_room` must be called next."""
        # replaces the earlier save, so that a pull that names the earlier save is refused now
        filling = self._filled[go.slot] = SaveSlotFilling(
            go.key, go.slot, go.state.decode(), go.newest
        )
        if self._folder:  # first, so that no restart reads a slot that is being overwritten
            name = f"slot-{go.slot}"
            self._manifests.pop(name, None)
            write_manifest(self._folder.path, name, None, self._setup.run)
        return filling

    def make_room(self) -> None:
        """Allocate the memory of a transient slot, see slots.py [Note: no slots]. Raises
        StorageError if memory, or the disk, has no room."""
        if self.slots and self.slots.transient and self.plan:
            make_room(self.slots, self.plan.ranges, self._setup.options.slot_directory)
            # The new pages are empty.
            self._write_headers(self.plan)

    def give_back(self, lost: set[int]) -> None:
        """Free a transient slot whose save has ended, once every rank has copied or is `lost`."""
        plan, slots = self.plan, self.slots
        if plan is None or slots is None or not slots.transient:
            return
        for slot, filled in self._filled.items():
            if all(filled.staged.get(rank) == self.end or rank in lost for rank in self._ranks):
                give_back(self.files[slot], plan.ranges)

    def filling(self, key: msg.Key) -> SaveSlotFilling | None:
        return next((held for held in self._filled.values() if held.key == key), None)

    def slot_of(self, slot: int, key: msg.Key | None) -> SaveSlotFiles:
        """Returns the files of a slot in use. Raises EOFError if it does not hold the save `key`: a
        restarted process has lost the saves of its predecessor."""
        held = self._filled.get(slot)
        if held is None or key not in (None, held.key):
            raise EOFError
        return self.files[slot]

    def remember(
        self, filling: SaveSlotFilling, done: Callable[[msg.SaveManifest | None], None]
    ) -> None:
        """Compute the checksums of a complete slot and write its manifest, so that a restart may
        use it. Calls done(manifest), or done(None) if a restart cannot use the slot."""
        plan, folder, files = self.plan, self._folder, self.files[filling.slot]
        if plan is None or folder is None or not self._setup.run:
            done(None)
            return
        name, exact, tensors = f"slot-{filling.slot}", plan.exact, plan.tensors

        def checked(checksums: dict[str, list[int]] | Exception) -> None:
            self.remembering -= 1
            # Another save has begun in this slot, so the bytes may be of both.
            if self.filling(filling.key) is not filling:
                done(None)
                return
            if isinstance(checksums, Exception):
                error = checksums
            else:
                manifest = msg.SaveManifest(
                    # The secret is new at each start and equal on all nodes; so is its digest.
                    hashlib.sha256(self._setup.secret).hexdigest()[:16],
                    filling.key[0], filling.newest, tensors,
                    self._setup.node, len(self._setup.nodes), exact, checksums, filling.state,
                )  # fmt: skip
                try:
                    write_manifest(folder.path, name, manifest, self._setup.run)
                    self._manifests[name] = manifest
                    self.confirm(self._committed)
                    done(manifest)
                    return
                except OSError as full:  # shared memory is full
                    error = full
            logger.warning("a restart cannot use memory: %s", explain(error))
            done(None)

        # Several threads, as a failure before their end costs the steps since the previous copy;
        # only a few, as the ranks need the other cores.
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 4))
        self.remembering += 1
        self._loop.later(lambda: files.checksums(exact, threads), checked)

    def keep_copy(self, copy: msg.CopySlot, pull: Pull, done: Callable[[], None]) -> None:
        """Copy another node's slot in another thread, then call done(), even if that failed."""
        folder, name = self._folder, f"peer-{copy.source}-{copy.slot}"
        if folder is None:
            done()
            return
        # invalid until the copy is complete; `copy_slot` removes the file
        self._manifests.pop(name, None)

        def copied(error: Exception | None) -> None:
            if error is None:
                self._manifests[name] = copy.manifest
                self.confirm(self._committed)
            else:
                node = self._setup.node
                logger.warning("node %d keeps no copy of node %d: %s", node, copy.source, error)
            done()

        def work() -> None:
            fetch = partial(pull, copy.source, msg.SlotInUse(copy.slot))
            copy_slot(folder.path, name, copy.manifest, fetch, self._setup.run)

        self._loop.later(work, copied)

    def confirm(self, step: int | None) -> None:
        """Record in the manifests that `step` is committed (None: none yet), and invalidate older
        slots. By this record a restart notices that a user has deleted that checkpoint, and loads
        neither it nor an earlier step from memory."""
        self._committed = step
        if self._folder is None or step is None:
            return
        path, run = self._folder.path, self._setup.run
        for slot, manifest in [*self._manifests.items()]:
            if manifest.step < step:
                del self._manifests[slot]
                write_manifest(path, slot, None, run)
            elif manifest.step == step != manifest.committed:
                self._manifests[slot] = replace(manifest, committed=step)
                try:
                    write_manifest(path, slot, self._manifests[slot], run)
                except OSError:  # shared memory is full: better no copy than an outdated one
                    write_manifest(path, slot, None, run)

    def forget(self) -> None:
        """Delete the slots, so that no restart uses them."""
        if self._folder:
            forget(self._folder)
            self._folder = None
            collect_memory(self._directory)
