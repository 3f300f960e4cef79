"""Checkpointer: the face that most callers see. Runs the phases of a save and of a load on all
ranks, and makes every failure of one rank an error of all."""

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import (
    CheckpointError,
    DamagedCheckpoint,
    SaveFailed,
    StorageError,
    explain,
)
from checkpointing.layout import (
    COMMIT_RECORD,
    LATEST,
    MODEL,
    OPTIMIZER,
    TRAINER_STATE,
    CommitRecord,
    Section,
    StoredTensor,
    TensorFile,
    index_json,
    json_bytes,
    lay_out,
    step_name,
)
from checkpointing.options import CheckpointOptions
from checkpointing.plan import Piece, TensorSpec, merge_specs, plan_writes
from checkpointing.reader import read_tensors, refuse_differences
from checkpointing.retention import collect, delete, prune, tmp_path
from checkpointing.steps import list_steps, open_step, read_state, stored_tensors
from checkpointing.tensors import specs_of
from checkpointing.writer import checksum_files, commit, create_files, write_pieces

logger = logging.getLogger(__name__)

T = TypeVar("T")
Specs = dict[str, TensorSpec]


@dataclass(frozen=True)
class SavePlan:
    """Everything about a save that follows from names, shapes, dtypes and meshes."""

    specs: tuple[Specs, Specs]
    """Of model and optimizer."""
    files: list[TensorFile]
    """All tensor files."""
    indexes: dict[str, bytes]
    """The index JSONs by name."""
    pieces: tuple[list[Piece], list[Piece]]
    """What this rank writes of the model and of the optimizer."""


class Checkpointer:
    """Saves and loads the steps of one run. All methods are called on all ranks of the group.

    Args:
        directory: holds the steps; made at the first save.
        options: the `checkpoint:` section.
        group: carries CPU tensors (gloo, or "cpu:gloo,cuda:nccl"); None for a single process. It
            is used from the calling thread only, and not between calls.
    """

    def __init__(
        self, directory: str | Path, options: CheckpointOptions, group: dist.ProcessGroup | None
    ) -> None:
        self.directory = Path(directory)
        self.options = options
        self._group = group
        self._ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._rank = 0 if group is None else dist.get_rank()
        self._place = self._ranks.index(self._rank)
        self._plan: SavePlan | None = None
        self._damaged: set[str] = set()
        if self._is_main:
            try:
                collect(self.directory)
            except OSError as error:
                logger.warning("could not look for what dead runs left behind: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what the Checkpointer holds; nothing is being written between calls."""
        self._plan = None

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> Path:
        """Write and commit a checkpoint; returns its directory. Returns when it is on the disk.

        A step that is already committed is not written again. Old steps are deleted afterwards.

        Args:
            step: names the checkpoint.
            model: by Hugging Face's names, in module order: plain tensors, equal on all ranks, or
                DTensors on any mesh, on any device.
            optimizer: likewise, such as `<fqn>.exp_avg`.
            state: JSON values; taken from rank 0.
            files: other files by name, such as config.json; taken from rank 0.

        Raises:
            SaveFailed: on all ranks, if any rank fails; the half-written directory is removed, the
                checkpoints before it are untouched.
        """
        final = self.directory / step_name(step)
        try:
            plan = self._save_plan(model, optimizer)
            tmp = self._on_main(lambda: self._begin(final, plan))
            if tmp is None:
                return final
            model_pieces, optimizer_pieces = plan.pieces

            def write() -> None:
                write_pieces(tmp, model_pieces, model)
                write_pieces(tmp, optimizer_pieces, optimizer)

            self._together(write)
            checksums = self._together(
                lambda: checksum_files(tmp, plan.files, self._place, len(self._ranks))
            )
            self._on_main(lambda: self._commit(tmp, final, step, plan, checksums, state, files))
        except _RankError as failed:
            self._on_main(lambda: shutil.rmtree(tmp_path(final), ignore_errors=True))
            raise SaveFailed(
                f"saving step {step} failed on rank {failed.rank}: {failed.message}; earlier "
                "checkpoints are untouched",
                failed.rank,
                failed.path,
                failed.errno,
            ) from failed.__cause__
        return final

    def load(
        self, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> dict[str, Any] | None:
        """Load the newest good checkpoint into the given tensors, in place.

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
            for path in self._on_main(lambda: list_steps(self.directory)):
                try:
                    return self._load_step(path, specs, (model, optimizer))
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

    # --- phases ------------------------------------------------------------------------------

    def _begin(self, final: Path, plan: SavePlan) -> Path | None:
        """Prepare to write `final`; None if it is committed already. On rank 0."""
        if final.exists():
            if final.name not in self._damaged and _is_good(final):
                logger.warning("%s is committed already; not written again", final)
                return None
            delete(final)
        tmp = tmp_path(final)
        shutil.rmtree(tmp, ignore_errors=True)
        create_files(tmp, plan.files)
        return tmp

    def _commit(
        self,
        tmp: Path,
        final: Path,
        step: int,
        plan: SavePlan,
        checksums: list[dict[str, dict[int, int]]],
        state: Mapping[str, Any],
        files: Mapping[str, bytes],
    ) -> None:
        """Commit, then apply retention. On rank 0."""
        ours = {TRAINER_STATE: json_bytes(dict(state)), **plan.indexes}
        reserved = {*ours, *(file.name for file in plan.files), COMMIT_RECORD, LATEST}
        for name in files:
            if name in reserved or Path(name).name != name:
                raise ValueError(f"files: {name!r} is not a plain name, or is taken")
        commit(tmp, final, step, plan.files, checksums, {**files, **ours})
        self._damaged.discard(final.name)
        try:
            prune(self.directory, self.options.keep, self._damaged)
        except (OSError, CheckpointError) as error:  # the save itself has succeeded
            logger.warning("could not delete old checkpoints: %s", error)

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
                stored_tensors(step, section, verify=verify) for section in (MODEL, OPTIMIZER)
            )
            return step.record, stored, read_state(path)

        record, stored, state = self._on_main(look)

        def read() -> None:
            records = record.files if verify else {}
            for what, there, wanted in zip(("model", "optimizer"), stored, specs, strict=True):
                refuse_differences(path, there, wanted, what)
            for there, wanted, tensors in zip(stored, specs, targets, strict=True):
                read_tensors(path, there, wanted, tensors, records, self._rank)

        self._together(read)
        return state

    def _save_plan(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> SavePlan:
        specs = self._specs(model), self._specs(optimizer)
        if self._plan is None or self._plan.specs != specs:
            self._plan = self._together(lambda: self._make_plan(specs))[self._place]
        return self._plan

    def _make_plan(self, specs: tuple[Specs, Specs]) -> SavePlan:
        def of_section(section: Section, wanted: Specs) -> tuple[list[TensorFile], list[Piece]]:
            metas = {name: spec.meta for name, spec in wanted.items()}
            files = lay_out(section, metas, self.options.max_shard_bytes)
            stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
            return files, plan_writes(wanted, stored, self._rank)

        model_files, model_pieces = of_section(MODEL, specs[0])
        optimizer_files, optimizer_pieces = of_section(OPTIMIZER, specs[1])
        return SavePlan(
            specs,
            model_files + optimizer_files,
            {MODEL.index: index_json(model_files), OPTIMIZER.index: index_json(optimizer_files)},
            (model_pieces, optimizer_pieces),
        )

    def _specs(self, tensors: Mapping[str, Tensor]) -> Specs:
        """What all ranks together hold. One digest a rank tells whether there is anything to
        exchange: where every rank sees all tensors, there is not."""
        specs: Specs = {}

        def digest() -> str:
            specs.update(specs_of(tensors, self._ranks))
            return hashlib.sha256(repr(list(specs.items())).encode()).hexdigest()

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


def _is_good(path: Path) -> bool:
    try:
        open_step(path)
    except DamagedCheckpoint:
        return False
    return True
