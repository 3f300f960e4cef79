"""TensorCheckpointer: saves and loads named tensors and JSON. Its methods run on all ranks; if one
rank fails, all ranks raise its error."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import (
    CheckpointError,
    DamagedCheckpoint,
    StorageError,
    UnreadableCheckpoint,
    explain,
)
from checkpointing.format.layout import ADAPTER, MODEL, TensorMeta, parse_step, step_name
from checkpointing.format.plan import SectionNumbers, by_section, not_finite
from checkpointing.load.memory import make_token
from checkpointing.load.restore import (
    GoalOf,
    LoadGoal,
    after_leftover_slots,
    check_memory,
    find_memory,
    load_memory,
    load_step,
    newest_step,
)
from checkpointing.options import CheckpointOptions
from checkpointing.ranks import RankError, RankGroup, failing_alike
from checkpointing.save import messages as msg
from checkpointing.save.link import SpareWriter, WriterGoneError
from checkpointing.save.peers import SavePuller
from checkpointing.save.planning import SavePlan, SavePlanner, signatures, unguarded
from checkpointing.save.saves import SaveTracker, WriterClient, checked_state
from checkpointing.save.staging import SaveStaging
from checkpointing.storage.folders import collect_memory
from checkpointing.storage.ownership import keep_to
from checkpointing.storage.place import StoragePlace, location
from checkpointing.storage.steps import list_steps, storage_of

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""Seconds for which a rank that leaves because of an exception waits for the running save and for
the other ranks."""

LOOKS = 5
"""`load` fails once another run has deleted this number of steps just before they were read."""

TargetsOf = Callable[[Mapping[str, Any], Mapping[str, TensorMeta]], Mapping[str, Tensor]]
"""(saved state, metadata of the saved optimizer tensors as far as known) → optimizer targets."""


@dataclass(frozen=True)
class _KnownSteps:
    """What a rank knows about the steps in storage."""

    damaged: frozenset[str] = frozenset()
    """Names of steps that failed to load."""
    verified: frozenset[str] = frozenset()
    """Names of steps that were loaded, with every byte checked."""
    newest: int | None = None
    """Newest step in storage, undamaged or not."""


@dataclass(frozen=True)
class _LoadOrigin:
    """The origin of the step that the last `load` loaded."""

    source: Literal["memory", "storage"] | None = None
    newer_than_storage: bool = False
    """Whether the step was in memory and not committed."""
    superseded: bool = False
    """Whether the step was in memory and is committed, and no slots were created since."""


class TensorCheckpointer:
    """Saves and loads the steps of a run, as named tensors and JSON. `Checkpointer` converts a
    loop's state to this form; the trainer uses this class directly. Methods are called on all ranks
    of the group, unless they say otherwise.

    Writers of different nodes authenticate each other by a secret, drawn on rank 0 and sent over
    the group. If the environment names the job's secret (`PERDURE_SECRET_FILE`), it is mixed in.

    A save blocks the caller only until all ranks agree on it. Parameters and optimizer state are
    copied while training continues, and a process of each node writes the copies. `wait_staged`
    must be called before they change, that is, before the optimizer step. Other tensors, such as a
    batch norm's statistics, may change once `save` returns.

    Args:
        directory: directory of the steps; created at the first save.
        group: process group that carries CPU tensors (gloo, or "cpu:gloo,cuda:nccl"); None for a
            single process. Used by `prepare` and `load`, in the calling thread; never during a
            save.
        adapter: whether the model's tensors are an adapter, with PEFT's names, to be saved in
            PEFT's format.
        read_only: whether this object only loads. Otherwise it deletes unfinished steps of dead
            runs.
    """

    def __init__(
        self,
        directory: str | Path,
        options: CheckpointOptions,
        group: dist.ProcessGroup | None,
        spare: SpareWriter | None = None,
        *,
        adapter: bool = False,
        read_only: bool = False,
    ) -> None:
        self.directory = location(directory).absolute()
        self.options = options
        keep_to(self.directory, options.trust)
        self._ranks = RankGroup(group)
        self._plan: SavePlan | None = None
        of_model = ADAPTER if adapter else MODEL
        self._planner = SavePlanner(self._ranks, options.max_shard_bytes, of_model)
        self._staging: SaveStaging | None = None
        self._note = ""
        self._saves = SaveTracker(options, self._ranks, self._committed)
        self._writers = WriterClient(self._ranks, options, self._saves, spare or SpareWriter())
        self._request_number = 0
        self._known, self._restored = _KnownSteps(), _LoadOrigin()
        self.memory_lasts = False
        """Whether copies in memory outlive this process, on all ranks. Known after `prepare`."""
        self._loaded = self._prepare_after_load = False
        self._moves = False
        """Whether `move` was called, so that memory may belong to several directories."""
        self.not_finite = ""
        """Message about NaN or infinity in tensors that this rank saved since the last `load`,
        because of which the save fails; "" if there are none. Known soon after the copy."""
        if self._ranks.is_main and not read_only:
            try:
                storage_of(self.directory).collect(self.directory)
            except (OSError, CheckpointError) as error:
                logger.warning("could not look for what dead runs left behind: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Like `close`. If only this rank raised an exception, the other ranks may wait for it in
        another collective, so wait for them at most LEAVE_SECONDS. An exception that all ranks
        raise has a true `of_all_ranks`."""
        together = kind is None or len(self._ranks.all) == 1 or getattr(kind, "of_all_ranks", False)
        self._close(kind is not None, None if together else LEAVE_SECONDS)

    @property
    def loaded_from(self) -> Literal["memory", "storage"] | None:
        """Origin of the step that `load` loaded; None: it loaded none."""
        return self._restored.source

    @property
    def newer_than_storage(self) -> bool:
        """Whether `load` loaded an uncommitted step from memory, which should be saved soon."""
        return self._restored.newer_than_storage

    def start_early(self) -> None:
        """Start this node's writer process, which takes a moment, while the caller builds its
        model. Otherwise the process is started when it is needed."""
        self._writers.start_early()

    def start_spare(self) -> None:
        """Start a spare writer process for this node's next checkpointer. Call it once this
        object's writer has started."""
        self._writers.start_spare()

    def move(self, directory: str | Path) -> None:
        """Save and load in another directory from now on. Waits for the running save. The first
        move ends the writers, whose slots belong to the old directory; later moves keep writers and
        slots. After a move no restart can use memory, as it could not know the directory that the
        memory belongs to."""
        self._saves.end(self._writers.link)
        # the slots are marked with the token of the old directory; new writers get no token
        if self._writers.has_token:
            self.close()
        self._moves, self._writers.has_token, self._loaded = True, False, False
        self.directory = location(directory).absolute()
        keep_to(self.directory, self.options.trust)
        self._known = _KnownSteps()

    def prepare(self, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> str:
        """Plan saves of these tensors, start the writers, and allocate the slots; otherwise the
        first `save` does this, or `load` if the previous run left memory that it must read. Returns
        a line for the log about the memory used. Raises StorageError if there is not enough memory,
        and ValueError, which says why, if tensors of some rank cannot be saved."""
        with failing_alike():
            first = self._staging is None and not self._loaded
            self._prepare_after_load = first and self._finds_memory()
        if self._prepare_after_load:
            return "checkpoint slots are made once `load` has read what the last run left in memory"
        self._prepared(model, optimizer)
        return self._note

    def _finds_memory(self) -> bool:
        with ExitStack() as held:
            _, left, _ = after_leftover_slots(self._ranks, self.directory, held, lambda: None)
            return bool(left)

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
        wait: bool = False,
        memory_only: bool = False,
        finite: Collection[str] | None = None,
        before: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Begin to save. Returns as soon as the copy has begun; `outcomes` reports the result.
        Returns False, on all ranks, if the step is not saved, as an earlier save is running, or a
        writer is gone or cannot make room; then `outcomes` has the reason.

        Args:
            model: tensors by Hugging Face's names, in module order: plain tensors, equal on all
                ranks, or DTensors on any mesh, on any device.
            optimizer: tensors of the same kinds, with names such as `<fqn>.exp_avg`.
            state: JSON values; those of rank 0 are saved.
            files: name → contents of other files, such as config.json; names may contain folders.
                Those of rank 0 are saved.
            wait: wait for an earlier save that is still running, whatever `options.when_busy` says.
            memory_only: only copy to memory, for a restart. Such a save has no outcome, and is
                skipped without a message while another save runs, or if this process's end would
                free the memory.
            finite: names in `model` of tensors that must not hold NaN or infinity; then all of
                `optimizer` must not, either. Else the save fails, and no restart uses its copy.
                None: do not check.
            before: path or URL → contents of files and objects to create before the step is
                committed; those of rank 0 are created. If that fails, the save fails. An object
                with the same bytes may exist already.

        Raises:
            ValueError: tensors, state or files of some rank cannot be saved; the message says which
                and why. Raised on all ranks; if a rank other than 0 fails, some may get the error
                as an outcome instead.
        """
        # every rank counts every call, so that the number identifies the same save on all ranks
        self._request_number += 1
        key = step, self._request_number
        contents = None
        try:
            plan, staging = self._prepared(model, optimizer, hurried=True)
            # A copy that ends with this process is useless for a restart. `memory_lasts` is equal
            # on all ranks, so all of them return here.
            if memory_only and not self.memory_lasts:
                return False
            staging.finish()
            if self._ranks.is_main:
                taken = {*plan.shared.indexes, *(file.name for file in plan.shared.files)}
                data = checked_state(state, files, taken)
                known, where = self._known, str(self.directory)
                contents = msg.SaveContents(
                    where, data, dict(files), sorted(known.damaged), sorted(known.verified),
                    known.newest, memory_only, dict(before or {}),
                )  # fmt: skip
        except Exception as error:
            # the other ranks also request this save, and would begin it without this rank
            self._refuse(key, error)
            raise
        wait = wait or (self.options.when_busy == "wait" and not memory_only)
        try:
            answer = self._writers.request(plan, staging, msg.SaveRequest(key, wait, contents))
        except (WriterGoneError, StorageError) as gone:
            # the loss of a writer costs this save, not the run
            answer = msg.SaveSkipped(key, str(gone))
        match answer:
            case msg.SaveRefused(_, failure):
                raise failure.kind(failure.message)
            case msg.SaveSkipped(_, reason):
                if not memory_only:
                    self._saves.skipped(step, reason)
                return False
        # The save is recorded before the copy begins, because the copy may fail at once.
        self._saves.begun(step, memory_only)
        try:
            tensors, at_once = by_section(model, optimizer), unguarded(model, optimizer)
            checked = _checked(finite, optimizer)
            staging.copy(answer.slot, tensors, at_once, checked, partial(self._copied, key))
        # The other ranks have begun the save, and get this error as its outcome.
        except Exception as error:
            self._copied(key, error)
        return True

    def _refuse(self, key: msg.Key, error: Exception) -> None:
        """Report that this rank cannot begin a save, which then fails on all ranks."""
        with suppress(WriterGoneError):  # the other ranks notice the loss of the writer themselves
            self._writers.send(msg.RefuseSave(key, RankError.of(self._ranks.rank, error)))

    def wait_staged(self) -> None:
        """Wait until the tensors of the last `save` may change. Each rank calls it by itself."""
        if self._staging:
            self._staging.wait()

    def _finish_staging(self) -> None:
        if self._staging:
            self._staging.finish()

    def outcomes(self) -> list[msg.SaveOutcome]:
        """Returns the outcomes of saves since the last call, without waiting. Any rank may call
        this by itself."""
        return self._saves.outcomes(self._writers.link)

    def wait(self) -> None:
        """Wait until no save is running. Each rank calls it by itself. Raises SaveFailed on all
        ranks if the last save failed, even if `outcomes` has reported it; earlier checkpoints are
        untouched."""
        self.wait_staged()
        self._saves.end(self._writers.link)
        self._saves.raise_last()

    def interrupt(self) -> None:
        """End the connection to this node's writer, so that waiting calls fail as if the writer had
        died. Callable from any thread; `abandon` must follow."""
        self._writers.interrupt()

    def abandon(self) -> None:
        """Drop the running save, and leave the last copy in memory, for this or another process to
        load. Each rank calls it by itself."""
        self.wait_staged()
        if self._staging:
            self._staging.release()
            self._staging = None
        self._writers.abandon()
        self._plan = None

    def close(self, *, keep_memory: bool = False) -> None:
        """Wait for the running save, and end the writer processes. Each rank calls it by itself.
        With `keep_memory`, the last copy stays in memory, for a restart."""
        self._close(keep_memory, None)

    def _close(self, keep_memory: bool, seconds: float | None) -> None:
        self._finish_staging()
        self._writers.close(keep_memory, seconds)
        if self._restored.superseded and not keep_memory and self._ranks.first_of_node:
            collect_memory(str(self.directory))  # no slots of this run have replaced that memory
        self._restored, self._plan = replace(self._restored, superseded=False), None
        if self._staging and seconds is None:  # otherwise the process ends, which unmaps faster
            self._staging.release()
            self._staging = None

    def load(
        self,
        *,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | TargetsOf,
        step: int | None = None,
        finite: Collection[str] | None = None,
        refuse: Callable[[Mapping[str, Any]], None] = lambda state: None,
        holds: Callable[[Mapping[str, Any]], bool] = lambda state: False,
    ) -> dict[str, Any] | None:
        """Load the newest good checkpoint into the given tensors, in place; or the step that the
        last run left in memory, if that is as new or newer (see `newer_than_storage`). With `step`,
        load that step from storage.

        A damaged checkpoint is logged, and the previous one is loaded. The checkpoint must have
        exactly the targets' tensors; it may be saved by any world size and strategy. Returns the
        saved `state`, equal on all ranks; None, with the targets unchanged, if there is no
        checkpoint.

        Args:
            model: targets by name.
            optimizer: targets by name; or a function that returns the targets for a checkpoint,
                called on each rank, if the optimizer's state is known only from the checkpoint.
            step: step to load; None: the newest good one.
            finite: names in `model` of tensors that must not hold NaN or infinity; then all of
                `optimizer` must not, either. Else the checkpoint counts as damaged. None: do not
                check.
            refuse: called on rank 0 with the saved state before any tensor is loaded; raises
                WrongModel if the state does not fit.
            holds: called on each rank with the saved state; returns whether this rank's targets,
                except buffers, still have the saved numbers. Then only buffers are read, if the
                step comes from memory.

        Raises:
            WrongModel: the newest good checkpoint has other tensors.
            DamagedCheckpoint: there are checkpoints, but no good one; or memory was lost during the
                load, and there is no checkpoint. The targets may have been partly overwritten.
            StorageError: a checkpoint cannot be read for a reason other than damage.
            CheckpointError: there is no such step.
        """
        self._finish_staging()  # a running copy must not see the loaded values
        goals: list[LoadGoal] = []

        def aim(saved: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> LoadGoal:
            # a function may return other targets for each checkpoint that is tried
            if callable(optimizer) or not goals:
                targets, described = self._planner.describe(
                    lambda: (model, optimizer(saved, metas) if callable(optimizer) else optimizer)
                )
                goals.append(LoadGoal(targets, described, _checked(finite, targets[1])))
            return goals[-1]

        with ExitStack() as held:
            if not callable(optimizer):
                with failing_alike():
                    aim({}, {})  # raises an error for unusable targets, even if storage is empty
            state = self._load(aim, step, held, refuse, holds)
        # the tensors no longer hold the numbers of earlier saves
        self._loaded, self.not_finite = True, ""
        if self._prepare_after_load and goals:
            self._prepared(*goals[-1].targets)
        self._prepare_after_load = False
        return state

    def reload(
        self,
        *,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | TargetsOf,
        finite: Collection[str] | None = None,
    ) -> dict[str, Any] | None:
        """Load like `load` after a restart: from the last copy in memory, if that is as new as the
        newest checkpoint or newer. Ends the writer processes, which hold that memory; the next
        `save` starts new writers."""
        self.close(keep_memory=True)
        return self.load(model=model, optimizer=optimizer, finite=finite)

    def _load(
        self,
        aim: GoalOf,
        step: int | None,
        held: ExitStack,
        refuse: Callable[[Mapping[str, Any]], None],
        holds: Callable[[Mapping[str, Any]], bool],
    ) -> dict[str, Any] | None:
        torn = ""
        with failing_alike():
            # Once this object has slots, memory holds only its own steps.
            if self._staging is None and step is None:
                memory = find_memory(self._ranks, self.directory, aim, held)
                # Other nodes may hold parts of the step.
                if memory and len(self._ranks.nodes()) > 1:
                    self._start()
                # Checked before targets are written to, so that storage can replace damaged memory.
                kept = check_memory(self._ranks, memory, refuse, holds) if memory else None
                pull = SavePuller(self._writers.addresses, self._writers.secret)
                try:
                    if memory and kept is not None:
                        load_memory(self._ranks, memory, pull, kept)
                        newer = memory.step != memory.newest
                        self._restored = _LoadOrigin("memory", newer, superseded=not newer)
                        self._known = replace(self._known, newest=memory.listed)
                        return memory.state
                except RankError as failed:
                    torn = f"what was left in memory was lost while it was loaded: {failed.message}"
                    if self._ranks.is_main:
                        logger.warning("%s; loading from storage instead", torn)
            state = self._load_stored(aim, step, refuse)
        if state is not None:
            return state
        # Loading from memory broke off, so the targets may be partly overwritten. No checkpoint
        # exists that could replace them.
        if torn:
            raise DamagedCheckpoint(f"{torn}; {self.directory} has no checkpoint: start again")
        return None

    def _load_stored(
        self, aim: GoalOf, step: int | None, refuse: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any] | None:
        """Load from storage. A step that another run deletes before it is read does not count as
        damaged, as there is a newer step by then."""
        damage: dict[StoragePlace, str] = {}
        gone = 0
        while gone < LOOKS and (left := [one for one in self._steps(step) if one not in damage]):
            path, verify = left[0], self.options.verify
            try:
                state = load_step(self._ranks, path, aim, verify, refuse)
                self._restored = replace(self._restored, source="storage")
                # so that retention does not read this step again
                if verify:
                    self._known = replace(self._known, verified=self._known.verified | {path.name})
                return state
            except RankError as failed:
                if not issubclass(failed.kind, DamagedCheckpoint):
                    raise
                problem = failed
            if path in self._steps():
                damage[path] = problem.message
                said = f"is passed over: {problem.message}"
                if problem.kind is not UnreadableCheckpoint:
                    self._known = replace(self._known, damaged=self._known.damaged | {path.name})
                    said = f"is damaged and {said.removeprefix('is ')}"
            else:
                gone += 1
                said = "was deleted before it could be read: another run saves there, too"
            if self._ranks.is_main:
                logger.warning("the checkpoint of step %s %s", parse_step(path.name), said)
        if gone:
            raise StorageError(
                f"{self.directory}: another run deletes checkpoints before they can be read; end "
                "it, or give this one a directory of its own"
            )
        if damage:
            raise DamagedCheckpoint(
                f"{self.directory}: no checkpoint can be loaded, the newest because: "
                f"{next(iter(damage.values()))}; bring a good copy back, or move the damaged "
                "checkpoints away to start afresh"
            )
        return None

    def _steps(self, step: int | None = None) -> list[StoragePlace]:
        """Returns the steps in storage now, newest first, or only `step`. Called on all ranks.
        Raises CheckpointError if there is no such step."""
        paths = self._ranks.on_main(lambda: list_steps(self.directory))
        self._known = replace(self._known, newest=newest_step(paths))
        chosen = [one for one in paths if step in (None, parse_step(one.name))]
        if step is not None and not chosen:
            there = ", ".join(f"{parse_step(one.name)}" for one in paths)
            raise CheckpointError(f"{self.directory} has no step {step}; it has {there or 'none'}")
        return chosen

    def _prepared(
        self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], hurried: bool = False
    ) -> tuple[SavePlan, SaveStaging]:
        signature = signatures(model, optimizer, strict=self._plan is not None)
        if self._plan and self._staging and self._plan.signature == signature:
            return self._plan, self._staging
        self._finish_staging()
        # The bytes of a running save are in the slots that are released now.
        self._saves.end(self._writers.link)
        if self._staging:
            self._staging.release()
        self._plan = self._staging = None
        with failing_alike():
            plan = self._planner.plan(signature, model, optimizer)
            self._start()
            devices = (tensor.device for tensor in (*model.values(), *optimizer.values()))
            device = next(devices, torch.device("cpu"))
            files = [file.name for file in plan.shared.files]
            # appended to by `allocate`, as `together` would send a staging to all ranks
            stagings: list[SaveStaging] = []

            def allocate() -> bool:
                slots = self._writers.slots(plan)
                stagings.append(SaveStaging(slots, plan.pieces, files, device, hurried=hurried))
                self._note = slots.note
                return slots.lasting

            # All ranks get slots or none: each save would wait for a rank without slots.
            lasting = self._ranks.together(allocate)
        # a step in memory is complete only with the parts of all nodes
        self.memory_lasts = self._writers.has_token and all(lasting)
        self._plan, self._staging = plan, stagings[0]
        # the new slots have replaced the memory of the previous run
        self._restored = replace(self._restored, superseded=False)
        return plan, stagings[0]

    def _start(self) -> None:
        """Start the writers unless they are started. Called on all ranks."""
        self._writers.start(str(self.directory), self._token)

    def _token(self) -> str:
        """Returns the token by which a restart identifies this run's memory; "" if there is none.
        Called on rank 0."""
        if self._moves:
            return ""
        try:
            return make_token(self.directory)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "%s cannot be written, so a restart cannot use memory: %s", self.directory, error
            )
            return ""

    def _committed(self, step: int) -> None:
        name, newest = step_name(step), max(step, self._known.newest or 0)
        damaged, verified = self._known.damaged - {name}, self._known.verified - {name}
        self._known = _KnownSteps(damaged, verified, newest)

    def _copied(
        self,
        key: msg.Key,
        progress: msg.Position | Exception,
        numbers: SectionNumbers | None = None,
    ) -> None:
        """Report the progress of a copy. Called in the copying thread."""
        if numbers and numbers.bad:
            self.not_finite = not_finite(numbers.bad)
        with suppress(WriterGoneError):  # the next request reports the loss of the writer
            if isinstance(progress, Exception):
                self._writers.send(msg.CopyFailed(key, explain(progress)))
            else:
                self._writers.send(msg.StagedReport(key, progress, numbers))


def _checked(finite: Collection[str] | None, optimizer: Mapping[str, Tensor]) -> Collection[str]:
    """Returns the names of tensors that must be finite, as `by_section` makes them: the model's in
    `finite`, and all of the optimizer; empty if `finite` is None."""
    return () if finite is None else by_section(dict.fromkeys(finite), dict.fromkeys(optimizer))
