"""A node's slots in its writer process: made for a plan, filled by saves, left to a restart."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from checkpointing.errors import explain
from checkpointing.format.sections import Numbers, PlanInput
from checkpointing.save.blocks import NodePlan, plan_node
from checkpointing.save.messages import CopySlot, Go, Key, Manifest, Position, Setup, SlotInUse
from checkpointing.save.peers import Pull, copy_slot, write_manifest
from checkpointing.save.serving import Loop, give_way
from checkpointing.save.slots import SlotFiles, Slots, close_slots, give_back, make_room, make_slots
from checkpointing.storage.folders import Folder, collect_memory, forget

logger = logging.getLogger(__name__)

MOST_THREADS = 4
"""Threads that take the checksums of a save that was copied."""
Made = tuple[NodePlan, Folder | None, Slots]


@dataclass
class Filling:
    """A save that is copied into a slot."""

    key: Key
    slot: int
    state: str
    newest: int | None
    """Newest step in storage when it began."""
    staged: dict[int, Position] = field(default_factory=dict)
    """Up to where each rank has copied its pieces."""
    numbers: dict[int, Numbers] = field(default_factory=dict)
    """What the pieces hold, by rank that has copied all."""
    stopped: bool = False


class NodeMemory:
    """All methods run in the writer's loop.

    Args:
        setup: of the writer.
        directory: of the checkpoints.
        loop: of the writer.
    """

    def __init__(self, setup: Setup, directory: str, loop: Loop) -> None:
        self._setup, self._directory, self._loop = setup, directory, loop
        self._ranks = setup.nodes[setup.node]
        self.plan: NodePlan | None = None
        self.slots: Slots | None = None
        self._folder: Folder | None = None
        self.files: list[SlotFiles] = []
        self._filled: dict[int, Filling] = {}
        """Which save was the last to be copied into a slot: to its end, even if it failed."""
        self._manifests: dict[str, Manifest] = {}
        """What a restart is told of each slot, and of copies of others."""
        self.remembering = 0
        """Slots whose checksums are made."""
        self._committed: int | None = None
        """Newest step that was committed."""

    # --- making ----------------------------------------------------------------------------------

    def make(self, digest: str, plan: PlanInput, done: Callable[[Made | Exception], None]) -> None:
        """Make slots for a plan aside; `take` takes what `done` is told."""
        self._filled.clear()
        self._manifests.clear()
        self.files = []  # their memory is free only when nobody maps it

        def work() -> Made:
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

    def take(self, made: Made | None) -> None:
        """Use the slots that were made; None: there are none."""
        if made is None:
            self.plan = self.slots = None
            return
        self.plan, self._folder, self.slots = made
        self.files = [SlotFiles(paths) for paths in self.slots.paths]
        if not self.slots.transient:
            self._write_headers(self.plan)

    def touch(self) -> None:
        """In the background: have the pages at hand, and clean up after dead runs."""
        if self.plan is None or self.slots is None:
            return
        files, ranges = self.files if self.slots.resident else [], self.plan.ranges

        def work() -> None:
            give_way()
            for slot in files:
                slot.touch(ranges)
            collect_memory(self._directory)

        threading.Thread(target=work).start()

    def _write_headers(self, plan: NodePlan) -> None:
        for files in self.files:
            for name in plan.sources:
                header = plan.files[name].header
                files.maps[name][: len(header)] = header

    # --- filling ---------------------------------------------------------------------------------

    @property
    def end(self) -> Position:
        """Where a rank is that has copied everything."""
        return (len(self.plan.files) if self.plan else 0), 0

    def fill(self, go: Go) -> Filling:
        """A save begins to be copied into a slot; `make_room` comes next."""
        filling = self._filled[go.slot] = Filling(go.key, go.slot, go.state.decode(), go.newest)
        if self._folder:
            name = f"slot-{go.slot}"
            self._manifests.pop(name, None)
            write_manifest(self._folder.path, name, None, self._setup.run)
        return filling

    def make_room(self) -> None:
        """See slots.py [Note: no slots].

        Raises:
            StorageError: there is none.
        """
        if self.slots and self.slots.transient and self.plan:
            make_room(self.slots, self.plan.ranges, self._setup.options.slot_directory)
            self._write_headers(self.plan)

    def give_back(self, lost: set[int]) -> None:
        """What a save has taken that has ended, once no rank that is not lost copies to it."""
        plan, slots = self.plan, self.slots
        if plan is None or slots is None or not slots.transient:
            return
        for slot, filled in self._filled.items():
            if all(filled.staged.get(rank) == self.end or rank in lost for rank in self._ranks):
                give_back(self.files[slot], plan.ranges)

    def filling(self, key: Key) -> Filling | None:
        """The save of that key, if a slot still holds it."""
        return next((held for held in self._filled.values() if held.key == key), None)

    def slot_of(self, slot: int, key: Key | None) -> SlotFiles:
        """A slot that a save is copied into; a process that was started again in the middle of it
        has nothing of that.

        Raises:
            EOFError: it holds another save than `key`.
        """
        held = self._filled.get(slot)
        if held is None or key not in (None, held.key):
            raise EOFError
        return self.files[slot]

    # --- what outlives the process ---------------------------------------------------------------

    def remember(self, filling: Filling, done: Callable[[Manifest | None], None]) -> None:
        """Make a whole slot one that a restart may begin from, as soon as its checksums are known.
        `done` is told what it holds, or None if a restart cannot use it."""
        plan, folder, files = self.plan, self._folder, self.files[filling.slot]
        if plan is None or folder is None or not self._setup.run:
            done(None)
            return
        name, exact, tensors = f"slot-{filling.slot}", plan.exact, plan.tensors

        def checked(checksums: dict[str, list[int]] | Exception) -> None:
            self.remembering -= 1
            if self.filling(filling.key) is not filling:  # these may be of bytes of two saves
                done(None)
                return
            if isinstance(checksums, Exception):
                error = checksums
            else:
                manifest = Manifest(
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
                except OSError as full:  # shared memory
                    error = full
            logger.warning("a restart cannot use memory: %s", explain(error))
            done(None)

        # Until they are known a failure costs the steps since the copy before. The other cores are
        # for the ranks.
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 4))
        self.remembering += 1
        self._loop.later(lambda: files.checksums(exact, threads), checked)

    def keep_copy(self, copy: CopySlot, pull: Callable[[], Pull], done: Callable[[], None]) -> None:
        """Keep a copy of what another node has staged; `done` is called also if that fails."""
        folder, name = self._folder, f"peer-{copy.source}-{copy.slot}"
        if folder is None:
            done()
            return
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
            fetch = partial(pull(), copy.source, SlotInUse(copy.slot))
            copy_slot(folder.path, name, copy.manifest, fetch, self._setup.run)

        self._loop.later(work, copied)

    def confirm(self, step: int | None) -> None:
        """Say in memory that a step is committed, and leave nothing older: should somebody delete
        it, memory is to bring neither it nor one before it back."""
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
                except OSError:  # shared memory is full
                    write_manifest(path, slot, None, run)

    def forget(self) -> None:
        """Leave nothing to a restart."""
        if self._folder:
            forget(self._folder)
            self._folder = None
            collect_memory(self._directory)
