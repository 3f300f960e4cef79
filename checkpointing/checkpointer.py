"""Checkpointer: the face that most callers see. Runs the phases of a save and of a load on all
ranks, and makes every failure of one rank an error of all."""

import hashlib
import hmac
import logging
import math
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.blocks import PlanInput
from checkpointing.coordinator import ANSWER_SECONDS, Key, Position, SaveOutcome, overdue
from checkpointing.errors import (
    CheckpointError,
    DamagedCheckpoint,
    SaveFailed,
    StorageError,
    UnreadableCheckpoint,
    explain,
)
from checkpointing.layout import (
    COMMIT_RECORD,
    LATEST,
    TRAINER_STATE,
    json_bytes,
    parse_step,
    step_name,
)
from checkpointing.link import END_SECONDS, GONE, Link, WriterGoneError, end, launch
from checkpointing.memory import make_token, token
from checkpointing.options import CheckpointOptions
from checkpointing.plan import (
    Piece,
    TensorSpec,
    own_files,
    plan_pieces,
)
from checkpointing.pulls import Puller
from checkpointing.ranks import RankError, Ranks, specs_digest
from checkpointing.restore import find_memory, load_memory, load_step, survey_all
from checkpointing.retention import collect
from checkpointing.sections import by_section, plan_input, stored_by_name
from checkpointing.slots import Slots
from checkpointing.staging import Staging
from checkpointing.steps import list_steps
from checkpointing.storage import location
from checkpointing.untrusted import is_plain
from checkpointing.writer import Setup

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0
"""How long a rank that leaves by an exception waits for what is being written, and for the others
to leave too."""

POLL_SECONDS = 60.0
"""Longest wait for a message before clocks are looked at again."""

T = TypeVar("T")
Specs = dict[str, TensorSpec]
Signature = tuple[tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class SavePlan:
    """Everything about a save that follows from names, shapes, dtypes and meshes."""

    signature: Signature
    """By which it is known whether the tensors are the same as last time."""
    shared: PlanInput
    """Equal on all ranks."""
    digest: str
    pieces: list[Piece]
    """What this rank contributes."""


class Checkpointer:
    """Saves and loads the steps of one run. Methods are called on all ranks of the group, unless
    they say otherwise.

    A save holds the caller up only until it is agreed on: tensors are copied while training goes
    on, and a process of each node writes what was copied. `wait_staged` must be called before the
    tensors change, that is, before the optimizer step.

    Args:
        directory: holds the steps; made at the first save.
        options: the `checkpoint:` section.
        group: carries CPU tensors (gloo, or "cpu:gloo,cuda:nccl"); None for a single process. It
            is used by `prepare` and `load`, from the calling thread; never during a save.
        secret: by which the writers of nodes know each other, equal on all ranks; None: rank 0
            draws one, and tells the others over the group.
    """

    def __init__(
        self,
        directory: str | Path,
        options: CheckpointOptions,
        group: dist.ProcessGroup | None,
        secret: bytes | None = None,
    ) -> None:
        self.directory = location(directory).absolute()
        self.options = options
        self._ranks = Ranks(group)
        self._secret = secret
        self._plan: SavePlan | None = None
        self._link: Link | None = None
        self._staging: Staging | None = None
        self._note = ""
        self._addresses: list[tuple[str, int]] = []
        self._running: tuple[int, bool] | None = None
        """The step that is being saved, and whether to memory only."""
        self._overdue_at = 0.0
        """When that is to be given up here."""
        self._asked = 0
        """How many saves were asked for."""
        self._outcomes: list[SaveOutcome] = []
        self._told: SaveOutcome | None = None
        """How the last save ended, once `outcomes` has given that out."""
        self._damaged: set[str] = set()
        self._right: set[str] = set()
        """Names of steps that were loaded, every byte of them checked."""
        self._newest: int | None = None
        """Newest step in storage, good or not, as far as is known here."""
        self.loaded_from: Literal["memory", "storage"] | None = None
        """Where `load` found what it loaded."""
        self.newer_than_storage = False
        """Whether `load` found a step in memory that is not committed: save it soon."""
        self.memory_lasts = False
        """Whether what `save` copies to memory outlives this process, on all ranks; known after
        `prepare`."""
        self._loaded = self._put_off = False
        """Whether `load` was called, and whether `prepare` waits for that."""
        self._has_token = False
        """Whether a restart can tell whose memory it finds."""
        self._process: subprocess.Popen[bytes] | None = None
        if self._ranks.is_main:
            try:
                collect(self.directory)
            except (OSError, CheckpointError) as error:
                logger.warning("could not look for what dead runs left behind: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """As `close`. After an exception of one rank alone, the others may wait for it where they
        are: it waits for them no longer than LEAVE_SECONDS."""
        together = kind is None or len(self._ranks.all) == 1
        self._close(kind is not None, None if together else LEAVE_SECONDS)

    def start_early(self) -> None:
        """Start the writer process of this node, which takes a moment, while the caller makes what
        there is to save and load; otherwise that happens when it is needed."""
        self._ranks.nodes()
        if self._ranks.first_of_node and not self._process and not self._link:
            with suppress(OSError):  # `_start` tries again, and all ranks learn of it
                self._process = launch()

    def prepare(self, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> str:
        """Plan saves of these tensors, start the writers, and make the memory that saves are copied
        into; the first `save` does it otherwise. Returns what to tell people about that memory.

        If the run before has left memory that `load` is yet to read, `load` does all this.

        Raises:
            StorageError: there is not enough memory.
            ValueError: the tensors cannot be saved, on whatever rank; says which and why.
        """
        try:
            self._put_off = self._staging is None and not self._loaded and self._finds_memory()
        except RankError as failed:
            raise failed.kind(failed.message) from failed.__cause__
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
    ) -> bool:
        """Begin to save; returns as soon as the copy has begun. `outcomes` tells how it ended.

        Args:
            step: names the checkpoint.
            model: by Hugging Face's names, in module order: plain tensors, equal on all ranks, or
                DTensors on any mesh, on any device.
            optimizer: likewise, such as `<fqn>.exp_avg`.
            state: JSON values; taken from rank 0.
            files: other files by name, such as config.json; taken from rank 0.
            wait: if an earlier step is still being saved, wait for it to end, whatever
                `options.when_busy` says.
            memory_only: leave it at the copy in memory, for a restart to begin from; has no
                outcome, and is skipped in silence while another save goes on.

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
        payload = None
        try:
            plan, staging = self._prepared(model, optimizer)
            if memory_only and not self.memory_lasts:
                return False
            staging.wait()
            if self._ranks.is_main:
                payload = _payload(plan, state, files)
                payload |= {"damaged": sorted(self._damaged), "right": sorted(self._right)}
                payload |= {"newest": self._newest}
                payload |= {"memory_only": memory_only}
        except Exception as error:
            self._refuse(key, error)
            raise
        wait = wait or (self.options.when_busy == "wait" and not memory_only)
        try:
            kind, _, *answer = self._ask(plan, staging, ("begin", key, wait, payload))
        except (WriterGoneError, StorageError) as gone:
            kind, answer = "skip", [str(gone)]
        if kind == "refused":
            failed = RankError(*answer[0])
            raise failed.kind(failed.message)
        if kind == "skip" and memory_only:
            return False
        if kind == "skip":
            reason = f"step {step} is not saved: {answer[0]}"
            self._outcomes.append(SaveOutcome(step, None, reason))
            return False
        self._running, self._told = (step, memory_only), None
        self._overdue_at = time.monotonic() + self._patience(self.options.deadline)
        try:
            tensors, at_once = by_section(model, optimizer), _unguarded(model, optimizer)
            staging.copy(answer[0], tensors, at_once, lambda told: self._copied(key, told))
        except Exception as error:  # the others have begun, and hear of it by the outcome
            self._copied(key, error)
        return True

    def _refuse(self, key: Key, error: Exception) -> None:
        """Have a save fail on all ranks that fails on this one before it has begun."""
        with suppress(WriterGoneError):  # then the others find that, too
            if self._link:
                self._link.send(("refuse", key, RankError.of(self._ranks.rank, error).args))

    def wait_staged(self) -> None:
        """Until the tensors of the last `save` may change. On each rank; asks no other."""
        if self._staging:
            self._staging.wait()

    def outcomes(self) -> list[SaveOutcome]:
        """Saves that ended since the last call, good or bad. On any rank; does not wait."""
        try:
            while self._link and self._running is not None:
                message = self._next(self._link, 0)
                if message is None:
                    break
                self._heard(message)
        except WriterGoneError:
            self._lost_writer()
        ended, self._outcomes = self._outcomes, []
        self._told = ended[-1] if ended else self._told
        return ended

    def wait(self) -> None:
        """Until nothing is being saved. On each rank.

        Raises:
            SaveFailed: the last save failed, on all ranks alike, whether or not `outcomes` has said
                so; the checkpoints before it are untouched.
        """
        self._ended()
        last = self._outcomes[-1] if self._outcomes else self._told
        if last and last.error:
            raise SaveFailed(str(last.error), last.node or 0, last.file, last.errno)

    def _ended(self) -> None:
        """Until nothing is being saved, however that ends."""
        self.wait_staged()
        try:
            while self._link and self._running is not None:
                message = self._next(self._link, math.inf)
                if message:
                    self._heard(message)
        except WriterGoneError:
            self._lost_writer()

    def close(self, *, keep_memory: bool = False) -> None:
        """Wait for the save that is being written, and end the writer processes. On each rank.

        Args:
            keep_memory: leave what was copied last in memory, for a restart to begin from.
        """
        self._close(keep_memory, None)

    def _close(self, keep_memory: bool, seconds: float | None) -> None:
        self.wait_staged()
        if self._link:
            closed = False
            most = self._patience(self.options.deadline) if seconds is None else seconds
            until = time.monotonic() + most
            try:
                self._link.send(("close", keep_memory))
                while not closed and time.monotonic() < until:
                    message = self._next(self._link, until)
                    if message:
                        closed = message[0] == "closed"
                        self._heard(message)
            except WriterGoneError:
                closed = True
                self._lost_writer()
            self._link.end(END_SECONDS if closed else 0)
        elif self._process:
            end(self._process, END_SECONDS)
        self._link = self._plan = None
        if self._staging and seconds is None:  # else the process ends, which takes less time
            self._staging.release()
            self._staging = None

    def load(
        self, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> dict[str, Any] | None:
        """Load the newest good checkpoint into the given tensors, in place; or what the last run
        left in memory, if that is as new or newer (`newer_than_storage` tells).

        A damaged one is logged and passed over for the one before. Every byte of every target is
        read exactly once from a checkpoint whose tensors are exactly those of the targets, from
        whatever world size and strategy it was saved.

        Returns:
            The `state` that was saved, equal on all ranks; None if there is no checkpoint, and the
            targets are as they were.

        Raises:
            WrongModel: the newest good checkpoint has other tensors.
            DamagedCheckpoint: there are checkpoints, but no good one; or memory was lost while it
                was loaded, and there is no checkpoint. The targets may hold parts of it.
            StorageError: a checkpoint cannot be read, and is not known to be damaged.
        """
        self.wait_staged()  # a save holds what was there when it was asked for
        with ExitStack() as held:
            state = self._load((model, optimizer), held)
        self._loaded = True
        if self._put_off:
            self._put_off = False
            self._prepared(model, optimizer)
        return state

    def _load(
        self, targets: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], held: ExitStack
    ) -> dict[str, Any] | None:
        damage: list[DamagedCheckpoint] = []
        torn = ""
        try:
            specs = self._ranks.specs(targets[0]), self._ranks.specs(targets[1])
            paths, run = self._ranks.on_main(
                lambda: (list_steps(self.directory), token(self.directory))
            )
            self._newest = parse_step(paths[0].name) if paths else None
            if self._staging is None:  # else its memory is for saves; nothing else was there
                memory = find_memory(
                    self._ranks, self.directory, run, paths, specs, self.options, held
                )
                if memory and len(self._ranks.nodes()) > 1:  # parts of it may be elsewhere
                    self._start()
                pull = Puller(self._addresses, self._link.secret if self._link else b"")
                try:
                    if memory and load_memory(self._ranks, memory, pull, specs, targets):
                        self.loaded_from = "memory"
                        self.newer_than_storage = memory.step != memory.newest
                        return memory.state
                except RankError as failed:
                    torn = f"what was left in memory was lost while it was loaded: {failed.message}"
                    if self._ranks.is_main:
                        logger.warning("%s; going on from storage", torn)
            for path in paths:
                try:
                    state = load_step(self._ranks, path, specs, targets, self.options.verify)
                    self.loaded_from = "storage"
                    if self.options.verify:
                        self._right.add(path.name)
                    return state
                except RankError as failed:
                    if not issubclass(failed.kind, DamagedCheckpoint):
                        raise
                    damage.append(DamagedCheckpoint(failed.message))
                    if failed.kind is not UnreadableCheckpoint:
                        self._damaged.add(path.name)
                    if self._ranks.is_main:
                        logger.warning(
                            "checkpoint %s is damaged and passed over: %s",
                            path.name,
                            failed.message,
                        )
        except RankError as failed:
            raise failed.kind(failed.message) from failed.__cause__
        if damage:
            raise DamagedCheckpoint(
                f"{self.directory}: all checkpoints are damaged, the newest so: {damage[0]}; "
                "bring a good copy back, or move them away to start afresh"
            )
        if torn:  # nothing has overwritten its parts
            raise DamagedCheckpoint(f"{torn}; {self.directory} has no checkpoint: start again")
        return None

    # --- saving ------------------------------------------------------------------------------

    def _prepared(
        self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> tuple[SavePlan, Staging]:
        signature: Signature = (), ()
        try:
            signature = _signature(model), _signature(optimizer)
        except Exception:
            if self._plan:
                raise
            # Else all ranks are about to plan, and learn of it there.
        if self._plan and self._staging and self._plan.signature == signature:
            return self._plan, self._staging
        self._ended()  # its bytes are in the slots that are given up now
        if self._staging:
            self._staging.release()
        try:
            self._plan = plan = self._make_plan(signature, model, optimizer)
            link = self._start()
            slots = self._ranks.each(lambda: self._take_slots(link, plan))
            lasting = self._ranks.together(lambda: slots.lasting)
            devices = (tensor.device for tensor in (*model.values(), *optimizer.values()))
            device = next(devices, torch.device("cpu"))
            files = [file.name for file in plan.shared.files]
            staging = self._ranks.each(lambda: Staging(slots, plan.pieces, files, device))
        except RankError as failed:
            self._plan = self._staging = None
            raise failed.kind(failed.message) from failed.__cause__
        self.memory_lasts = self._has_token and all(lasting)
        self._staging = staging
        self._note = slots.note
        return plan, staging

    def _make_plan(
        self,
        signature: Signature,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
    ) -> SavePlan:
        specs = self._ranks.specs(model), self._ranks.specs(optimizer)
        nodes = self._ranks.nodes()

        def make() -> SavePlan:
            shared = plan_input(*specs, self.options.max_shard_bytes)
            owners = own_files(shared.files, len(nodes))
            near = {file: nodes[node] for file, node in owners.items()}
            stored = stored_by_name(shared.files)
            pieces = plan_pieces(shared.specs, stored, near, self._ranks.rank)
            digest = hashlib.sha256(
                f"{specs_digest(shared.specs)} {shared.tensors} {nodes}".encode()
            ).hexdigest()
            return SavePlan(signature, shared, digest, pieces)

        return self._ranks.each(make)

    def _start(self) -> Link:
        """Tell the writer of each node what to be, and connect to it, once."""
        if self._link:
            return self._link
        secret, name, run = self._ranks.on_main(
            lambda: (os.urandom(32), os.urandom(8).hex(), self._token())
        )
        if self._secret:  # who listens in on the group does not know it
            secret = hmac.digest(self._secret, secret, "sha256")
        self._has_token = bool(run)
        nodes, node = self._ranks.nodes(), self._ranks.node
        name = f"\0perdure-{name}-{node}"
        host = _host() if len(nodes) > 1 else ""
        directory = str(self.directory)
        setup = Setup(0, node, nodes, directory, run, self.options, name, host, 0, secret)
        link = self._ranks.each(lambda: Link(setup, self._ranks.rank, self._take_process()))
        addresses = self._ranks.together(link.start)
        by_rank = dict(zip(self._ranks.all, addresses, strict=True))
        self._addresses = [by_rank[ranks[0]] for ranks in nodes]
        self._ranks.together(link.connect)
        self._link = link
        return link

    def _token(self) -> str:
        """By which a restart knows that what is in memory is of this run; on rank 0."""
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
            process = launch()
        return process

    def _take_slots(self, link: Link, plan: SavePlan) -> Slots:
        """Give the node's writer the plan, and get the slots that it makes. A writer that is gone
        is started again once."""
        try:
            return self._slots_of(link, plan)
        except WriterGoneError:
            self._lost_writer()
        link.restart()
        return self._slots_of(link, plan)

    def _slots_of(self, link: Link, plan: SavePlan) -> Slots:
        link.send(("addresses", self._addresses))
        link.send(("plan", plan.digest, plan.shared if self._ranks.first_of_node else None))
        until = time.monotonic() + self._patience(self.options.deadline)
        while True:
            message = self._answered(link, until)
            if message[0] == "refused":
                raise StorageError(message[1])
            if message[0] == "slots" and message[1] == plan.digest:
                return cast(Slots, message[2])
            self._heard(message)

    def _ask(self, plan: SavePlan, staging: Staging, request: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send a request about a step to the node's writer, and wait for its answer. A writer that
        is gone is started again once; should its slots be refused, the next request tries again."""
        link = self._link
        if link is None:
            raise WriterGoneError("closed")
        if staging.has_slots:
            try:
                return self._answer(link, request)
            except WriterGoneError:
                self._lost_writer()
            staging.release()
            link.restart()
        staging.move(self._take_slots(link, plan))
        return self._answer(link, request)

    def _answer(self, link: Link, request: tuple[Any, ...]) -> tuple[Any, ...]:
        link.send(request)
        patience = self._patience(min(self.options.deadline, 2 * ANSWER_SECONDS))
        until = max(self._overdue_at if self._running else 0, time.monotonic()) + patience
        while True:
            message = self._answered(link, until)
            if message[0] in ("go", "skip", "refused") and message[1] == request[1]:
                return message
            self._heard(message)

    def _answered(self, link: Link, until: float) -> tuple[Any, ...]:
        """The next message of a writer that owes an answer. One that gives none is ended.

        Raises:
            WriterGoneError: it is gone.
        """
        while True:
            message = self._next(link, until)
            if message:
                return message
            if time.monotonic() >= until:
                link.kill()
                raise WriterGoneError("the checkpoint writer process of this node does not answer")

    def _next(self, link: Link, until: float) -> tuple[Any, ...] | None:
        """The next message of the writer, waited for until then at most. If the save that is
        running is overdue, the writer of this node is ended: it may be stopped, or what holds it
        up may be nothing that a process can be woken from.

        Raises:
            WriterGoneError: it is gone.
        """
        limit = min(until, self._overdue_at) if self._running else until
        message = link.receive(min(max(0.0, limit - time.monotonic()), POLL_SECONDS))
        if message is None and self._running and time.monotonic() >= self._overdue_at:
            link.kill()
            self._lost_writer(overdue(self.options))
            raise WriterGoneError(GONE)
        return message

    def _patience(self, seconds: float) -> float:
        """How long this rank waits for what is due after so long. The coordinator gives up first,
        as it knows what is missing; then the ranks of its node, who end it if it hangs; then the
        others, to whom it is news when their writers do not hear of that."""
        return seconds * (1.1 if self._ranks.node == 0 else 1.2)

    def _copied(self, key: Key, progress: Position | Exception) -> None:
        """How far a copy is. In the copying thread."""
        with suppress(WriterGoneError):  # whoever asks next finds out
            if self._link and isinstance(progress, Exception):
                self._link.send(("failed", key, explain(progress)))
            elif self._link:
                self._link.send(("staged", key, progress))

    def _heard(self, message: tuple[Any, ...]) -> None:
        if message[0] != "outcome":
            return
        outcome = message[1]
        if self._running and outcome.step == self._running[0]:
            # Not the outcome's: a writer that has lost the coordinator does not know.
            (_, memory_only), self._running = self._running, None
            if memory_only:
                return
            self._outcomes.append(outcome)
            if outcome.path:
                self._newest = max(outcome.step, self._newest or 0)
                self._damaged.discard(step_name(outcome.step))
                self._right.discard(step_name(outcome.step))

    def _lost_writer(self, why: str = "the checkpoint writer process of this node died") -> None:
        if self._running is not None:
            (step, memory_only), self._running = self._running, None
            if memory_only:
                return
            error = f"saving step {step} failed: {why}; earlier checkpoints are untouched"
            self._outcomes.append(SaveOutcome(step, None, error))


def _payload(
    plan: SavePlan, state: Mapping[str, Any], files: Mapping[str, bytes]
) -> dict[str, Any]:
    """What rank 0 alone contributes."""
    reserved = {TRAINER_STATE, COMMIT_RECORD, LATEST, *plan.shared.indexes}
    reserved |= {file.name for file in plan.shared.files}
    for name in files:
        if name in reserved or "/" in name or not is_plain(name):
            raise ValueError(f"files: {name!a} is not a plain name, or is taken")
        if not isinstance(files[name], bytes):
            raise ValueError(f"files: {name} is {type(files[name]).__name__}, not bytes")
    try:
        return {"state": json_bytes(dict(state)), "files": dict(files)}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"state: JSON does not take it: {error}") from error


def _unguarded(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> set[str]:
    """What may change before the next optimizer step, such as a batch norm's statistics: whatever
    is neither a parameter nor has state in the optimizer. By the names of `by_section`."""
    trained = {name.rpartition(".")[0] for name in optimizer}
    buffers = {
        name: tensor
        for name, tensor in model.items()
        if name not in trained and not isinstance(tensor, torch.nn.Parameter)
    }
    return set(by_section(buffers, {}))


def _signature(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What a plan depends on, cheap to make and to compare."""
    return tuple(
        (
            name,
            tensor.dtype,
            tensor.shape,
            (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None,
        )
        for name, tensor in tensors.items()
    )


def _host() -> str:
    """The address of this machine that others of the job reach: the one that faces the store."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())
