"""TensorCheckpointer: named tensors and JSON, saved and loaded. Runs the phases of a save and of a
load on all ranks, and makes every failure of one rank an error of all."""

import hashlib
import logging
import os
import subprocess
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

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
from checkpointing.format.sections import Numbers, by_section, not_finite
from checkpointing.load.memory import make_token, token
from checkpointing.load.restore import (
    Aim,
    Goal,
    find_memory,
    load_memory,
    load_step,
    look_at,
    newest_step,
    survey_all,
)
from checkpointing.options import CheckpointOptions
from checkpointing.ranks import RankError, Ranks, failing_alike
from checkpointing.save import messages as msg
from checkpointing.save.channel import job_secret
from checkpointing.save.link import (
    END_SECONDS,
    Link,
    Spare,
    UnansweredError,
    WriterGoneError,
    end,
    own_address,
)
from checkpointing.save.peers import Puller
from checkpointing.save.planning import Planner, SavePlan, signatures, unguarded
from checkpointing.save.saves import Saves, checked_state
from checkpointing.save.slots import Slots
from checkpointing.save.staging import Staging
from checkpointing.storage.folders import collect_memory
from checkpointing.storage.ownership import keep_to
from checkpointing.storage.place import Place, location
from checkpointing.storage.steps import list_steps, storage_of

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""How long a rank that leaves by an exception waits for what is being written, and for the others
to leave too."""

LOOKS = 5
"""So many steps may be deleted by another run just before `load` reads them."""

T = TypeVar("T")
TargetsOf = Callable[[Mapping[str, Any], Mapping[str, TensorMeta]], Mapping[str, Tensor]]
"""(state that was saved, optimizer tensors that were, as far as that is known) → targets."""


class TensorCheckpointer:
    """Saves and loads the steps of one run, as named tensors and JSON. `Checkpointer` makes those
    of what a loop consists of; the trainer has its own names for them, and uses this. Methods are
    called on all ranks of the group, unless they say otherwise.

    The writers of nodes know each other by a secret that rank 0 draws and tells the others over the
    group. Where the environment names the secret of a job (`PERDURE_SECRET_FILE`), it takes that,
    too, to know it.

    A save holds the caller up only until it is agreed on: tensors are copied while training goes
    on, and a process of each node writes what was copied. `wait_staged` must be called before the
    tensors change, that is, before the optimizer step.

    Args:
        directory: holds the steps; made at the first save.
        options: the `checkpoint:` section.
        group: carries CPU tensors (gloo, or "cpu:gloo,cuda:nccl"); None for a single process. It
            is used by `prepare` and `load`, from the calling thread; never during a save.
        spare: where writer processes are taken from.
        adapter: the tensors of the model are those of an adapter, by PEFT's names: they are saved
            in its file.
    """

    def __init__(
        self,
        directory: str | Path,
        options: CheckpointOptions,
        group: dist.ProcessGroup | None,
        spare: Spare | None = None,
        *,
        adapter: bool = False,
    ) -> None:
        self.directory = location(directory).absolute()
        self.options = options
        keep_to(self.directory, options.trust)
        self._ranks = Ranks(group)
        self._spare = spare or Spare()
        self._plan: SavePlan | None = None
        of_model = ADAPTER if adapter else MODEL
        self._planner = Planner(self._ranks, options.max_shard_bytes, of_model)
        self._link: Link | None = None
        self._staging: Staging | None = None
        self._note = ""
        self._addresses: list[msg.Address] = []
        self._saves = Saves(options, self._ranks, self._committed)
        self._asked = 0
        """How many saves were asked for."""
        self._damaged: set[str] = set()
        self._right: set[str] = set()
        """Names of steps that were loaded, every byte of them checked."""
        self._newest: int | None = None
        """Newest step in storage, good or not, as far as is known here."""
        self.loaded_from: Literal["memory", "storage"] | None = None
        """Where `load` found what it loaded."""
        self.newer_than_storage = False
        """Whether `load` found a step in memory that is not committed: save it soon."""
        self._superseded = False
        """Whether `load` found a step in memory that is committed, and no slots were made since."""
        self.memory_lasts = False
        """Whether what `save` copies to memory outlives this process, on all ranks; known after
        `prepare`."""
        self._loaded = self._put_off = False
        """Whether `load` was called, and whether `prepare` waits for that."""
        self._has_token = False
        """Whether a restart can tell whose memory it finds."""
        self._moves = False
        """Whether its memory is of no one directory."""
        self.not_finite = ""
        """Which tensors of a save held NaN or infinity on this rank, since the last `load`: that
        save fails. Known soon after it was copied."""
        self._process: subprocess.Popen[bytes] | None = None
        if self._ranks.is_main:
            try:
                storage_of(self.directory).collect(self.directory)
            except (OSError, CheckpointError) as error:
                logger.warning("could not look for what dead runs left behind: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """As `close`. After an exception of one rank alone, the others may wait for it where they
        are: it waits for them no longer than LEAVE_SECONDS. One that all ranks raise alike says so
        by a true `of_all_ranks`."""
        together = kind is None or len(self._ranks.all) == 1 or getattr(kind, "of_all_ranks", False)
        self._close(kind is not None, None if together else LEAVE_SECONDS)

    def start_early(self) -> None:
        """Start the writer process of this node, which takes a moment, while the caller makes what
        there is to save and load; otherwise that happens when it is needed."""
        self._ranks.nodes()
        if self._ranks.first_of_node and not self._process and not self._link:
            with suppress(OSError):  # `_start` tries again, and all ranks learn of it
                self._process = self._spare.take()

    def start_spare(self) -> None:
        """Have a writer process for this node's next checkpointer. Once this one has started."""
        if self._ranks.first_of_node:
            self._spare.start()

    def move(self, directory: str | Path) -> None:
        """Save and load in another directory from now on, with the memory and the writers that
        there are. Waits for the save that is being written; from then on nothing in memory is left
        to a restart, as it would not know of which directory that is."""
        self._saves.end(self._link)
        if self._has_token:
            self.close()
        self._moves, self._has_token, self._loaded = True, False, False
        self.directory = location(directory).absolute()
        keep_to(self.directory, self.options.trust)
        self._damaged, self._right, self._newest = set(), set(), None

    def prepare(self, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> str:
        """Plan saves of these tensors, start the writers, and make the memory that saves are copied
        into; the first `save` does it otherwise. Returns what to tell people about that memory.

        If the run before has left memory that `load` is yet to read, `load` does all this.

        Raises:
            StorageError: there is not enough memory.
            ValueError: the tensors cannot be saved, on whatever rank; says which and why.
        """
        with failing_alike():
            self._put_off = self._staging is None and not self._loaded and self._finds_memory()
        if self._put_off:
            return "checkpoint slots are made when what the run before left in memory is loaded"
        self._prepared(model, optimizer)
        return self._note

    def _finds_memory(self) -> bool:
        """Whether the run before has left any. On all ranks."""
        run = self._ranks.on_main(lambda: token(self.directory))
        with ExitStack() as held:
            return run is not None and bool(survey_all(self._ranks, self.directory, run, held))

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
    ) -> bool:
        """Begin to save; returns as soon as the copy has begun. `outcomes` tells how it ended.

        Args:
            step: names the checkpoint.
            model: by Hugging Face's names, in module order: plain tensors, equal on all ranks, or
                DTensors on any mesh, on any device.
            optimizer: likewise, such as `<fqn>.exp_avg`.
            state: JSON values; taken from rank 0.
            files: other files by name, such as config.json, folders included; taken from rank 0.
            wait: if an earlier step is still being saved, wait for it to end, whatever
                `options.when_busy` says.
            memory_only: leave it at the copy in memory, for a restart to begin from; has no
                outcome, and is skipped in silence while another save goes on.
            finite: names in `model` of tensors that must not hold NaN or infinity, as `optimizer`
                must not then. A save in which one does fails, and no restart begins from its copy.
                None: any tensor may.

        Returns:
            False, on all ranks, if the step is not saved, because an earlier one is still being
            saved or because a writer is gone; `outcomes` has the reason.

        Raises:
            ValueError: the tensors, the state or the files cannot be saved, on whatever rank; says
                which and why. On all ranks alike; of an error of another rank than 0 some may hear
                by the outcome instead.
        """
        self._asked += 1
        key = step, self._asked
        contents = None
        try:
            plan, staging = self._prepared(model, optimizer, hurried=True)
            if memory_only and not self.memory_lasts:
                return False
            staging.finish()
            if self._ranks.is_main:
                taken = {*plan.shared.indexes, *(file.name for file in plan.shared.files)}
                data = checked_state(state, files, taken)
                known = sorted(self._damaged), sorted(self._right), self._newest
                where = str(self.directory)
                contents = msg.Contents(where, data, dict(files), *known, memory_only)
        except Exception as error:
            self._refuse(key, error)
            raise
        wait = wait or (self.options.when_busy == "wait" and not memory_only)
        try:
            answer = self._ask(plan, staging, msg.Begin(key, wait, contents))
        except (WriterGoneError, StorageError) as gone:
            answer = msg.Skip(key, str(gone))
        match answer:
            case msg.Refused(_, failure):
                raise failure.kind(failure.message)
            case msg.Skip(_, reason):
                if not memory_only:
                    self._saves.skipped(step, reason)
                return False
        self._saves.begun(step, memory_only)
        try:
            tensors, at_once = by_section(model, optimizer), unguarded(model, optimizer)
            checked = _checked(finite, optimizer)
            staging.copy(answer.slot, tensors, at_once, checked, partial(self._copied, key))
        except Exception as error:  # the others have begun, and hear of it by the outcome
            self._copied(key, error)
        return True

    def _refuse(self, key: msg.Key, error: Exception) -> None:
        """Have a save fail on all ranks that fails on this one before it has begun."""
        with suppress(WriterGoneError):  # then the others find that, too
            if self._link:
                self._link.send(msg.Refuse(key, RankError.of(self._ranks.rank, error)))

    def wait_staged(self) -> None:
        """Until the tensors of the last `save` may change. On each rank; asks no other."""
        if self._staging:
            self._staging.wait()

    def _finish_staging(self) -> None:
        if self._staging:
            self._staging.finish()

    def outcomes(self) -> list[msg.SaveOutcome]:
        """Saves that ended since the last call, good or bad. On any rank; does not wait."""
        return self._saves.outcomes(self._link)

    def wait(self) -> None:
        """Until nothing is being saved. On each rank.

        Raises:
            SaveFailed: the last save failed, on all ranks alike, whether or not `outcomes` has said
                so; the checkpoints before it are untouched.
        """
        self.wait_staged()
        self._saves.end(self._link)
        self._saves.raise_last()

    def give_up(self) -> None:
        """End what waits for the writer of this node, by errors or as if it had died. From any
        thread; to be followed by `abandon`."""
        if self._link:
            self._link.give_up()

    def abandon(self) -> None:
        """Give up what is being written, and leave what was copied last in memory, for this process
        or another to begin from. On each rank by itself; asks no other."""
        self.wait_staged()
        if self._staging:
            self._staging.release()
            self._staging = None
        if self._link:
            self._link.kill()
            self._link.end(0)
        elif self._process:
            self._process.kill()
            end(self._process, END_SECONDS)
        self._link = self._plan = self._process = None

    def close(self, *, keep_memory: bool = False) -> None:
        """Wait for the save that is being written, and end the writer processes. On each rank.

        Args:
            keep_memory: leave what was copied last in memory, for a restart to begin from.
        """
        self._close(keep_memory, None)

    def _close(self, keep_memory: bool, seconds: float | None) -> None:
        self._finish_staging()
        if self._link:
            closed = self._saves.close(self._link, keep_memory, seconds)
            self._link.end(END_SECONDS if closed else 0)
        elif self._process:
            end(self._process, END_SECONDS)
        superseded, self._superseded = self._superseded, False
        if superseded and not keep_memory and self._ranks.first_of_node:
            collect_memory(str(self.directory))  # no save has made it this run's
        self._link = self._plan = None
        if self._staging and seconds is None:  # else the process ends, which takes less time
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
        """Load the newest good checkpoint into the given tensors, in place; or what the last run
        left in memory, if that is as new or newer (`newer_than_storage` tells). With `step` that
        one, from storage.

        A damaged one is logged and passed over for the one before. Every byte of every target is
        read exactly once from a checkpoint whose tensors are exactly those of the targets, from
        whatever world size and strategy it was saved.

        Args:
            model: targets by name.
            optimizer: likewise; or what gives these for a checkpoint, on each rank: of what an
                optimizer keeps only a checkpoint may know.
            step: load this one.
            finite: names in `model` of tensors that must not hold NaN or infinity, as `optimizer`
                must not then. A checkpoint in which one does counts as damaged. None: any may.
            refuse: is given the state that was saved, on rank 0, and raises WrongModel if that does
                not fit, before anything is loaded.
            holds: is given the state that was saved, on each rank, and says whether the targets of
                this rank are what was saved with it, but for buffers. Then only these are read, if
                it comes from memory.

        Returns:
            The `state` that was saved, equal on all ranks; None if there is no checkpoint, and the
            targets are as they were.

        Raises:
            WrongModel: the newest good checkpoint has other tensors.
            DamagedCheckpoint: there are checkpoints, but no good one; or memory was lost while it
                was loaded, and there is no checkpoint. The targets may hold parts of it.
            StorageError: a checkpoint cannot be read, and is not known to be damaged.
            CheckpointError: there is no such step.
        """
        self._finish_staging()  # a save holds what was there when it was asked for
        goals: list[Goal] = []

        def aim(saved: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> Goal:
            if callable(optimizer) or not goals:
                targets, described = self._planner.describe(
                    lambda: (model, optimizer(saved, metas) if callable(optimizer) else optimizer)
                )
                goals.append(Goal(targets, described, _checked(finite, targets[1])))
            return goals[-1]

        with ExitStack() as held:
            if not callable(optimizer):
                with failing_alike():
                    aim({}, {})  # what cannot be loaded into is refused, whatever there is
            state = self._load(aim, step, held, refuse, holds)
        self._loaded, self.not_finite = True, ""
        if self._put_off and goals:
            self._prepared(*goals[-1].targets)
        self._put_off = False
        return state

    def reload(
        self,
        *,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | TargetsOf,
        finite: Collection[str] | None = None,
    ) -> dict[str, Any] | None:
        """Load as `load` does after a restart, from what was copied to memory last if that is as
        new as the newest checkpoint or newer. Ends the writer processes, as they hold that memory;
        the next `save` starts others."""
        self.close(keep_memory=True)
        return self.load(model=model, optimizer=optimizer, finite=finite)

    def _load(
        self,
        aim: Aim,
        step: int | None,
        held: ExitStack,
        refuse: Callable[[Mapping[str, Any]], None],
        holds: Callable[[Mapping[str, Any]], bool],
    ) -> dict[str, Any] | None:
        torn = ""
        with failing_alike():
            # A staging's memory is for saves; nothing else was there.
            if self._staging is None and step is None:
                memory = find_memory(self._ranks, self.directory, aim, held)
                if memory and len(self._ranks.nodes()) > 1:  # parts of it may be elsewhere
                    self._start()
                kept = look_at(self._ranks, memory, refuse, holds) if memory else None
                pull = Puller(self._addresses, self._link.secret if self._link else b"")
                try:
                    if memory and kept is not None:
                        load_memory(self._ranks, memory, pull, kept)
                        self.loaded_from = "memory"
                        self.newer_than_storage = memory.step != memory.newest
                        self._superseded = not self.newer_than_storage
                        self._newest = memory.listed
                        return memory.state
                except RankError as failed:
                    torn = f"what was left in memory was lost while it was loaded: {failed.message}"
                    if self._ranks.is_main:
                        logger.warning("%s; going on from storage", torn)
            state = self._load_stored(aim, step, refuse)
        if state is not None:
            return state
        if torn:  # nothing has overwritten its parts
            raise DamagedCheckpoint(f"{torn}; {self.directory} has no checkpoint: start again")
        return None

    def _load_stored(
        self,
        aim: Aim,
        step: int | None,
        refuse: Callable[[Mapping[str, Any]], None],
    ) -> dict[str, Any] | None:
        """`_load` from storage. A step that another run deletes before it is read is not damaged:
        there is a newer one by then."""
        damage: dict[Place, str] = {}
        gone = 0
        while gone < LOOKS and (left := [one for one in self._steps(step) if one not in damage]):
            path, verify = left[0], self.options.verify
            try:
                state = load_step(self._ranks, path, aim, verify, refuse)
                self.loaded_from = "storage"
                if verify:
                    self._right.add(path.name)
                return state
            except RankError as failed:
                if not issubclass(failed.kind, DamagedCheckpoint):
                    raise
                problem = failed
            if path in self._steps():
                damage[path] = problem.message
                said = f"is passed over: {problem.message}"
                if problem.kind is not UnreadableCheckpoint:
                    self._damaged.add(path.name)
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
                f"{next(iter(damage.values()))}; bring a good copy back, or move them away to "
                "start afresh"
            )
        return None

    def _steps(self, step: int | None = None) -> list[Place]:
        """What is in storage now, newest first, or this step of it. On all ranks.

        Raises:
            CheckpointError: there is no such step.
        """
        paths = self._ranks.on_main(lambda: list_steps(self.directory))
        self._newest = newest_step(paths)
        chosen = [one for one in paths if step in (None, parse_step(one.name))]
        if step is not None and not chosen:
            there = ", ".join(f"{parse_step(one.name)}" for one in paths)
            raise CheckpointError(f"{self.directory} has no step {step}; it has {there or 'none'}")
        return chosen

    # --- saving ------------------------------------------------------------------------------

    def _prepared(
        self,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        *,
        hurried: bool = False,
    ) -> tuple[SavePlan, Staging]:
        signature = signatures(model, optimizer, strict=self._plan is not None)
        if self._plan and self._staging and self._plan.signature == signature:
            return self._plan, self._staging
        self._finish_staging()
        self._saves.end(self._link)  # its bytes are in the slots that are given up now
        if self._staging:
            self._staging.release()
        self._plan = self._staging = None
        with failing_alike():
            plan = self._planner.plan(signature, model, optimizer)
            link = self._start()
            devices = (tensor.device for tensor in (*model.values(), *optimizer.values()))
            device = next(devices, torch.device("cpu"))
            files = [file.name for file in plan.shared.files]
            made: list[Staging] = []

            def take() -> bool:
                slots = self._take_slots(link, plan)
                made.append(Staging(slots, plan.pieces, files, device, hurried=hurried))
                self._note = slots.note
                return slots.lasting

            lasting = self._ranks.together(take)
        self.memory_lasts = self._has_token and all(lasting)
        self._plan, self._staging = plan, made[0]
        self._superseded = False
        return plan, made[0]

    def _start(self) -> Link:
        """Tell the writer of each node what to be, and connect to it, once."""
        if self._link:
            return self._link
        drawn, name, run = self._ranks.on_main(
            lambda: (os.urandom(32), os.urandom(8).hex(), self._token())
        )
        self._has_token = bool(run)
        nodes, node = self._ranks.nodes(), self._ranks.node
        name = f"\0perdure-{name}-{node}"
        host = own_address() if len(nodes) > 1 else ""
        directory = str(self.directory)
        started: list[Link] = []

        def start() -> tuple[str, int]:
            known = job_secret() or b""  # who listens in on the group does not know it
            secret = hashlib.blake2b(drawn, key=known, digest_size=32).digest()
            setup = msg.Setup(0, node, nodes, directory, run, self.options, name, host, 0, secret)
            started.append(Link(setup, self._ranks.rank, self._take_process()))
            return started[0].start()

        addresses = self._ranks.together(start)
        by_rank = dict(zip(self._ranks.all, addresses, strict=True))
        self._addresses = [by_rank[ranks[0]] for ranks in nodes]
        link = started[0]
        self._ranks.together(link.connect)
        self._link = link
        return link

    def _token(self) -> str:
        """By which a restart knows that what is in memory is of this run; on rank 0."""
        if self._moves:
            return ""
        try:
            return make_token(self.directory)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "%s cannot be written, so a restart cannot use memory: %s", self.directory, error
            )
            return ""

    def _take_process(self) -> "subprocess.Popen[bytes] | None":
        """The node's writer process, on its first rank."""
        process, self._process = self._process, None
        if self._ranks.first_of_node and process is None:
            process = self._spare.take()
        return process

    def _take_slots(self, link: Link, plan: SavePlan) -> Slots:
        """Give the node's writer the plan, and get the slots that it makes. A writer that is gone
        is started again once."""
        addresses = msg.Addresses(self._addresses)
        want = msg.WantSlots(plan.digest, plan.shared if self._ranks.first_of_node else None)
        try:
            return self._saves.slots(link, addresses, want)
        except WriterGoneError:
            self._saves.lost_writer()
        link.restart()
        return self._saves.slots(link, addresses, want)

    def _ask(self, plan: SavePlan, staging: Staging, begin: msg.Begin) -> msg.RankAnswer:
        """Send a request about a step to the node's writer, and wait for its answer. A writer that
        is gone is started again once; should its slots be refused, the next request tries again.

        Rank 0 does not ask again for what other nodes may have been told of: see
        save/coordinator.py [Note: a save]."""
        link = self._link
        if link is None:
            raise WriterGoneError("closed")
        lost: UnansweredError | None = None
        if staging.has_slots:
            try:
                return self._saves.ask(link, begin)
            except UnansweredError as error:
                lost = error if self._ranks.is_main and len(self._addresses) > 1 else None
                self._saves.lost_writer()
            except WriterGoneError:
                self._saves.lost_writer()
            staging.release()
            link.restart(begin.key[1] if lost else 0)
        staging.move(self._take_slots(link, plan))
        if lost:
            raise lost
        return self._saves.ask(link, begin)

    def _committed(self, step: int) -> None:
        """A save of this rank was."""
        self._newest = max(step, self._newest or 0)
        self._damaged.discard(step_name(step))
        self._right.discard(step_name(step))

    def _copied(
        self, key: msg.Key, progress: msg.Position | Exception, numbers: Numbers | None = None
    ) -> None:
        """How far a copy is. In the copying thread."""
        if numbers and numbers.bad:
            self.not_finite = not_finite(numbers.bad)
        with suppress(WriterGoneError):  # whoever asks next finds out
            if self._link is None:
                return
            if isinstance(progress, Exception):
                self._link.send(msg.CopyFailed(key, explain(progress)))
            else:
                self._link.send(msg.Staged(key, progress, numbers))


def _checked(finite: Collection[str] | None, optimizer: Mapping[str, Tensor]) -> Collection[str]:
    """Names by section of what must not hold NaN or infinity; see `TensorCheckpointer.save`."""
    return () if finite is None else by_section(dict.fromkeys(finite), dict.fromkeys(optimizer))
