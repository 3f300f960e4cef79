"""Checkpointer: the face that most callers see. Runs the phases of a save and of a load on all
ranks, and makes every failure of one rank an error of all."""

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.coordinator import Key, SaveOutcome
from checkpointing.errors import (
    CheckpointError,
    DamagedCheckpoint,
    SaveFailed,
    StorageError,
    WrongModel,
    explain,
)
from checkpointing.fill import read_tensors
from checkpointing.layout import (
    COMMIT_RECORD,
    LATEST,
    MODEL,
    OPTIMIZER,
    TRAINER_STATE,
    CommitRecord,
    StoredTensor,
    TensorFile,
    index_json,
    json_bytes,
    lay_out,
    parse_step,
    step_name,
)
from checkpointing.link import Link, WriterGoneError
from checkpointing.memory import Left, check, newest_whole, open_parts, survey
from checkpointing.options import CheckpointOptions
from checkpointing.owners import machine
from checkpointing.plan import (
    Layout,
    Piece,
    TensorSpec,
    merge_specs,
    own_files,
    plan_pieces,
)
from checkpointing.pulls import Puller
from checkpointing.reader import refuse_differences
from checkpointing.retention import collect
from checkpointing.slots import Slots
from checkpointing.staging import Staging
from checkpointing.steps import list_steps, open_step, read_state, stored_tensors
from checkpointing.storage import location, open_file
from checkpointing.tensors import specs_of
from checkpointing.writer import Nodes, PlanInput, Setup

logger = logging.getLogger(__name__)

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
    """

    def __init__(
        self, directory: str | Path, options: CheckpointOptions, group: dist.ProcessGroup | None
    ) -> None:
        self.directory = location(directory).absolute()
        self.options = options
        self._group = group
        self._ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._rank = 0 if group is None else dist.get_rank()
        self._place = self._ranks.index(self._rank)
        self._plan: SavePlan | None = None
        self._link: Link | None = None
        self._staging: Staging | None = None
        self._note = ""
        self._nodes: Nodes = ()
        self._addresses: list[tuple[str, int]] = []
        self._running: int | None = None
        """The step that is being saved."""
        self._asked = 0
        """How many saves were asked for."""
        self._outcomes: list[SaveOutcome] = []
        self._damaged: set[str] = set()
        self._newest: int | None = None
        """Newest committed step, as far as is known here."""
        self.newer_than_storage = False
        """Whether `load` found a step in memory that is not committed: save it soon."""
        if self._is_main:
            try:
                collect(self.directory)
            except (OSError, CheckpointError) as error:
                logger.warning("could not look for what dead runs left behind: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(keep_memory=kind is not None)

    def prepare(self, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> str:
        """Plan saves of these tensors, start the writers, and make the memory that saves are copied
        into; the first `save` does it otherwise. Returns what to tell people about that memory.

        Raises:
            StorageError: there is not enough memory.
            ValueError: the tensors cannot be saved, on whatever rank; says which and why.
        """
        self._prepared(model, optimizer)
        return self._note

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
        wait: bool = False,
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

        Returns:
            False, on all ranks, if the step is not saved, because an earlier one is still being
            saved or because a writer is gone; `outcomes` has the reason.
        """
        plan, staging = self._prepared(model, optimizer)
        staging.wait()
        self._asked += 1
        key = step, self._asked
        payload = None
        if self._is_main:
            payload = _payload(plan, state, files)
            payload |= {"damaged": sorted(self._damaged), "previous": self._newest}
        wait = wait or self.options.when_busy == "wait"
        try:
            kind, _, *answer = self._ask(plan, ("begin", key, wait, payload))
        except WriterGoneError as gone:
            kind, answer = "skip", [str(gone)]
        if kind == "skip":
            error = f"step {step} is not saved: {answer[0]}"
            self._outcomes.append(SaveOutcome(step, None, error))
            return False
        self._running = step
        tensors = _by_section(model, optimizer)
        staging.copy(answer[0], tensors, lambda error: self._copied(key, error))
        return True

    def wait_staged(self) -> None:
        """Until the tensors of the last `save` may change. On each rank; asks no other."""
        if self._staging:
            self._staging.wait()

    def outcomes(self) -> list[SaveOutcome]:
        """Saves that ended since the last call, good or bad. On any rank; does not wait."""
        try:
            while self._link and self._running is not None:
                message = self._link.receive(timeout=0)
                if message is None:
                    break
                self._heard(message)
        except WriterGoneError:
            self._lost_writer()
        ended, self._outcomes = self._outcomes, []
        return ended

    def wait(self) -> None:
        """Until nothing is being saved. On each rank.

        Raises:
            SaveFailed: the last save failed, on all ranks alike; the checkpoints before it are
                untouched.
        """
        self.wait_staged()
        try:
            while self._link and self._running is not None:
                message = self._link.receive()
                if message:
                    self._heard(message)
        except WriterGoneError:
            self._lost_writer()
        if self._outcomes and self._outcomes[-1].error:
            last = self._outcomes[-1]
            raise SaveFailed(str(last.error), last.node or 0, last.file, last.errno)

    def close(self, *, keep_memory: bool = False) -> None:
        """Wait for the save that is being written, and end the writer processes. On each rank.

        Args:
            keep_memory: leave what was copied last in memory, for a restart to begin from.
        """
        self.wait_staged()
        if self._link:
            try:
                self._link.send(("close", keep_memory))
                while True:
                    message = self._link.receive()
                    if message and message[0] == "closed":
                        break
                    if message:
                        self._heard(message)
            except WriterGoneError:
                self._lost_writer()
            self._link.end()
        self._link = self._staging = self._plan = None

    def load(
        self, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> dict[str, Any] | None:
        """Load the newest good checkpoint into the given tensors, in place; or what the last run
        left in memory, if that is as new or newer (`newer_than_storage` tells).

        A damaged one is logged and passed over for the one before. Every byte of every target is
        read exactly once from a checkpoint whose tensors are exactly those of the targets, from
        whatever world size and strategy it was saved.

        Returns:
            The `state` that was saved, equal on all ranks; None if there is no checkpoint.

        Raises:
            WrongModel: the newest good checkpoint has other tensors.
            DamagedCheckpoint: there are checkpoints, but no good one.
            StorageError: a checkpoint cannot be read, and is not known to be damaged.
        """
        damage: list[DamagedCheckpoint] = []
        try:
            specs = self._specs(model), self._specs(optimizer)
            paths = self._on_main(lambda: list_steps(self.directory))
            state = self._load_memory(paths, specs, (model, optimizer))
            if state is not None:
                return state
            for path in paths:
                try:
                    state = self._load_step(path, specs, (model, optimizer))
                    self._newest = parse_step(path.name)
                    return state
                except _RankError as failed:
                    if failed.kind is not DamagedCheckpoint:
                        raise
                    damage.append(DamagedCheckpoint(failed.message))
                    self._damaged.add(path.name)
                    if self._is_main:
                        logger.warning(
                            "checkpoint %s is damaged and passed over: %s",
                            path.name,
                            failed.message,
                        )
        except _RankError as failed:
            raise failed.kind(failed.message) from failed.__cause__
        if damage:
            raise DamagedCheckpoint(
                f"{self.directory}: all checkpoints are damaged, the newest so: {damage[0]}; "
                "bring a good copy back, or move them away to start afresh"
            )
        return None

    @property
    def _is_main(self) -> bool:
        return self._place == 0

    # --- saving ------------------------------------------------------------------------------

    def _prepared(
        self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> tuple[SavePlan, Staging]:
        signature = _signature(model), _signature(optimizer)
        if self._plan and self._staging and self._plan.signature == signature:
            return self._plan, self._staging
        try:
            self._plan = plan = self._make_plan(signature, model, optimizer)
            link = self._start()
            slots = self._together(lambda: self._take_slots(link, plan))[self._place]
        except _RankError as failed:
            self._plan = None
            kind = failed.kind if issubclass(failed.kind, CheckpointError) else ValueError
            raise kind(failed.message) from failed.__cause__
        devices = (tensor.device for tensor in (*model.values(), *optimizer.values()))
        self._staging = staging = Staging(slots, plan.pieces, next(devices, torch.device("cpu")))
        self._note = slots.note
        return plan, staging

    def _make_plan(
        self,
        signature: Signature,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
    ) -> SavePlan:
        specs = self._specs(model), self._specs(optimizer)
        if not self._nodes:
            self._nodes = _group_by_node(self._together(_node_identity), self._ranks)

        def make() -> SavePlan:
            shared = _lay_out(specs, self.options.max_shard_bytes)
            stored = _stored(shared.files)
            owners = own_files(shared.files, len(self._nodes))
            near = {file: self._nodes[node] for file, node in owners.items()}
            pieces = plan_pieces(shared.specs, stored, near, self._rank)
            digest = hashlib.sha256(
                f"{_digest(shared.specs)} {shared.tensors} {self._nodes}".encode()
            ).hexdigest()
            return SavePlan(signature, shared, digest, pieces)

        return self._together(make)[self._place]

    def _start(self) -> Link:
        """Start the writer of each node and connect to it, once."""
        if self._link:
            return self._link
        secret = self._on_main(lambda: os.urandom(16))
        node = next(node for node, ranks in enumerate(self._nodes) if self._rank in ranks)
        name = f"\0perdure-{secret[:8].hex()}-{node}"
        host = _host() if len(self._nodes) > 1 else ""
        setup = Setup(
            0, node, self._nodes, str(self.directory), self.options, name, host, 0, secret
        )
        link = Link(setup, self._rank, starts=self._rank == self._nodes[node][0])
        addresses = self._together(link.start)
        by_rank = dict(zip(self._ranks, addresses, strict=True))
        self._addresses = [by_rank[ranks[0]] for ranks in self._nodes]
        self._together(link.connect)
        self._link = link
        return link

    def _take_slots(self, link: Link, plan: SavePlan) -> Slots:
        """Give the node's writer the plan, and get the slots that it makes."""
        first = any(ranks[0] == self._rank for ranks in self._nodes)
        link.send(("addresses", self._addresses))
        link.send(("plan", plan.digest, plan.shared if first else None))
        while True:
            message = link.receive()
            if message is None:
                continue
            if message[0] == "refused":
                raise StorageError(message[1])
            if message[0] == "slots" and message[1] == plan.digest:
                return cast(Slots, message[2])
            self._heard(message)

    def _ask(self, plan: SavePlan, request: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send a request about a step to the node's writer, and wait for its answer. A writer that
        is gone is started again once."""
        link = self._link
        if link is None:
            raise WriterGoneError("closed")
        try:
            return self._answer(link, request)
        except WriterGoneError:
            self._lost_writer()
        link.restart()
        slots = self._take_slots(link, plan)
        if self._staging:
            self._staging.move(slots)
        return self._answer(link, request)

    def _answer(self, link: Link, request: tuple[Any, ...]) -> tuple[Any, ...]:
        link.send(request)
        while True:
            message = link.receive()
            if message and message[0] in ("go", "skip") and message[1] == request[1]:
                return message
            if message:
                self._heard(message)

    def _copied(self, key: Key, error: Exception | None) -> None:
        """A copy has ended. In the copying thread."""
        with suppress(WriterGoneError):  # whoever asks next finds out
            if self._link and error:
                self._link.send(("failed", key, explain(error)))
            elif self._link:
                self._link.send(("staged", key))

    def _heard(self, message: tuple[Any, ...]) -> None:
        if message[0] != "outcome":
            return
        outcome = message[1]
        if outcome.step == self._running:
            self._running = None
            self._outcomes.append(outcome)
            if outcome.path:
                self._newest = outcome.step
                self._damaged.discard(step_name(outcome.step))

    def _lost_writer(self) -> None:
        if self._running is not None:
            step, self._running = self._running, None
            error = (
                f"saving step {step} failed: the checkpoint writer process of this node died; "
                "earlier checkpoints are untouched"
            )
            self._outcomes.append(SaveOutcome(step, None, error))

    # --- loading -----------------------------------------------------------------------------

    def _load_memory(
        self,
        paths: Sequence[Path],
        specs: tuple[Specs, Specs],
        targets: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    ) -> dict[str, Any] | None:
        """Load what the last run left in memory, if it is whole and not older than storage."""
        if self._link:  # this run has saved already: storage has what it knows to be good
            return None
        if not self._nodes:
            self._nodes = _group_by_node(self._together(_node_identity), self._ranks)
        home = next(node for node, ranks in enumerate(self._nodes) if self._rank in ranks)
        first = self._nodes[home][0] == self._rank

        def look() -> list[Left]:
            return survey(str(self.directory), home) if first else []

        left = [part for of_rank in self._together(look) for part in of_rank]
        if not left:
            return None
        newest = self._on_main(lambda: _newest_good(paths))
        layout = _lay_out(specs, self.options.max_shard_bytes)
        found = newest_whole(left, layout.tensors, newest)
        if found is None:
            return None
        step, parts = found
        if any(part.home != home for part in parts):
            self._start()
        stored = _stored(layout.files)
        pull = Puller(self._addresses, self._link.secret if self._link else b"")

        def read() -> None:
            if first:
                for part in parts:
                    if part.home == home:
                        check(part)

        try:
            self._together(read)
            self._together(
                lambda: read_tensors(
                    self.directory,
                    lambda name: open_parts(name, parts, home, pull),
                    stored,
                    _by_section(*specs),
                    _by_section(*targets),
                    {},
                    self._group,
                    self._nodes,
                )
            )
        except _RankError as failed:
            if self._is_main:
                logger.warning("memory of step %d is not used: %s", step, failed.message)
            return None
        self._newest, self.newer_than_storage = newest, step != newest
        if self._is_main:
            there = "which storage has too" if step == newest else f"storage has {newest}"
            logger.warning("restored step %d from memory (%s)", step, there)
        return dict(json.loads(parts[0].manifest.state))

    def _load_step(
        self,
        path: Path,
        specs: tuple[Specs, Specs],
        targets: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    ) -> dict[str, Any]:
        verify = self.options.verify

        def look() -> tuple[CommitRecord, tuple[dict[str, StoredTensor], ...], dict[str, Any]]:
            step = open_step(path)
            stored = tuple(
                stored_tensors(step, section, verify=False) for section in (MODEL, OPTIMIZER)
            )
            return step.record, stored, read_state(path)

        record, stored, state = self._on_main(look)

        def refuse() -> None:
            for section, there, wanted in zip((MODEL, OPTIMIZER), stored, specs, strict=True):
                try:
                    refuse_differences(path, there, wanted, section.stem)
                except WrongModel:
                    if verify:  # it is not known yet that the headers are good
                        stored_tensors(open_step(path), section, verify=True)
                    raise

        def read() -> None:
            read_tensors(
                path,
                lambda name: open_file(path / name),
                _by_section(*stored),
                _by_section(*specs),
                _by_section(*targets),
                record.files if verify else {},
                self._group,
                self._nodes or None,
            )

        self._on_main(refuse)
        self._together(read)
        return state

    def _specs(self, tensors: Mapping[str, Tensor]) -> Specs:
        """What all ranks together hold. One digest a rank tells whether there is anything to
        exchange: where every rank sees all tensors, there is not."""
        specs: Specs = {}

        def digest() -> str:
            specs.update(specs_of(tensors, self._ranks))
            return _digest(specs)

        if len(set(self._together(digest))) == 1:
            return specs
        everyone = dict(zip(self._ranks, self._together(lambda: specs), strict=True))
        return self._together(lambda: merge_specs(everyone))[self._place]

    # --- ranks together ----------------------------------------------------------------------

    def _on_main(self, work: Callable[[], T]) -> T:
        """work() on rank 0; its result on all ranks."""
        results: list[Any] = self._together(work if self._is_main else lambda: None)
        return results[0]

    def _together(self, work: Callable[[], T]) -> list[T]:
        """work() on every rank; the results of all, in order. Also a barrier.

        Raises:
            _RankError: on all ranks, if any rank failed: the first of them.
        """
        result, failure, cause = None, None, None
        try:
            result = work()
        except Exception as error:
            failure, cause = _RankError.of(self._rank, error).args, error
        outcomes: list[Any] = [(result, failure)]
        if self._group is not None:
            outcomes = [None] * len(self._ranks)
            dist.all_gather_object(outcomes, (result, failure), group=self._group)
        for _, arguments in outcomes:
            if arguments:
                first = _RankError(*arguments)
                raise first from (cause if first.rank == self._rank else None)
        return [value for value, _ in outcomes]


class _RankError(Exception):
    """A rank failed in a phase; the same on all ranks. Its arguments travel between ranks."""

    def __init__(
        self,
        rank: int,
        kind: type[Exception],
        message: str,
        path: str | None,
        number: int | None,
    ) -> None:
        super().__init__(rank, kind, message, path, number)
        self.rank, self.kind, self.message, self.path, self.errno = self.args

    @staticmethod
    def of(rank: int, error: Exception) -> "_RankError":
        """What the other ranks are told of an error on this one."""
        if isinstance(error, OSError):
            path = error.filename and str(error.filename)
            return _RankError(rank, StorageError, explain(error), path, error.errno)
        kind = type(error) if isinstance(error, CheckpointError) else RuntimeError
        return _RankError(rank, kind, explain(error), None, None)


def _payload(
    plan: SavePlan, state: Mapping[str, Any], files: Mapping[str, bytes]
) -> dict[str, Any]:
    """What rank 0 alone contributes."""
    reserved = {TRAINER_STATE, COMMIT_RECORD, LATEST, *plan.shared.indexes}
    reserved |= {file.name for file in plan.shared.files}
    for name in files:
        if name in reserved or Path(name).name != name:
            raise ValueError(f"files: {name!r} is not a plain name, or is taken")
    return {"state": json_bytes(dict(state)), "files": dict(files)}


def _lay_out(specs: tuple[Specs, Specs], max_shard_bytes: int) -> PlanInput:
    """Where everything is stored, which follows from names, dtypes and shapes alone."""
    files: list[TensorFile] = []
    indexes: dict[str, bytes] = {}
    for section, wanted in zip((MODEL, OPTIMIZER), specs, strict=True):
        metas = {name: spec.meta for name, spec in wanted.items()}
        of_section = lay_out(section, metas, max_shard_bytes)
        indexes[section.index] = index_json(of_section)
        files += [
            replace(file, tensors=_prefixed(section.stem, file.tensors)) for file in of_section
        ]
    digest = hashlib.sha256(b"".join(file.header for file in files)).hexdigest()
    return PlanInput(_by_section(*specs), files, indexes, digest)


def _stored(files: Sequence[TensorFile]) -> dict[str, StoredTensor]:
    return {name: tensor for file in files for name, tensor in file.tensors.items()}


# --- tensors by section ----------------------------------------------------------------------


def _signature(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What a plan depends on, cheap to make and to compare."""
    return tuple(
        (
            name,
            tensor.dtype,
            tensor.shape,
            (id(tensor.device_mesh), tensor.placements) if isinstance(tensor, DTensor) else None,
        )
        for name, tensor in tensors.items()
    )


def _prefixed(section: str, values: Mapping[str, T]) -> dict[str, T]:
    """Names that tell a tensor of the model from one of the optimizer."""
    return {f"{section}/{name}": value for name, value in values.items()}


def _by_section(model: Mapping[str, T], optimizer: Mapping[str, T]) -> dict[str, T]:
    return {**_prefixed("model", model), **_prefixed("optimizer", optimizer)}


def _digest(specs: Mapping[str, TensorSpec]) -> str:
    """Stands for specs. Layouts are digested once each: at 16,384 ranks they are large, but few."""
    layouts: dict[Layout, int] = {}
    lines = []
    for name, spec in specs.items():
        numbers = [layouts.setdefault(layout, len(layouts)) for layout in spec.layouts]
        lines.append(f"{name} {spec.meta} {numbers}")
    return hashlib.sha256("\n".join([*map(repr, layouts), *lines]).encode()).hexdigest()


def _newest_good(paths: Sequence[Path]) -> int | None:
    """The newest step in storage whose record is good. Reads no tensors."""
    for path in paths:
        try:
            return open_step(path).record.step
        except DamagedCheckpoint:
            continue
    return None


# --- ranks by node ---------------------------------------------------------------------------


def _node_identity() -> str:
    """Equal on ranks that share memory and an elastic agent (torchrun's GROUP_RANK)."""
    return f"{machine()}-{os.environ.get('GROUP_RANK', '')}"


def _group_by_node(identities: Sequence[str], ranks: Sequence[int]) -> Nodes:
    nodes: dict[str, list[int]] = {}
    for identity, rank in zip(identities, ranks, strict=True):
        nodes.setdefault(identity, []).append(rank)
    return tuple(tuple(of_node) for of_node in nodes.values())


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
