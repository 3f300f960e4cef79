"""`perdure ckpt ls | show | verify | prune`. Reads without torch; every result prints as text.

Each function takes a run directory (which holds `checkpoints/`), a directory of checkpoints, or a
checkpoint; or the URL of any of these in an object store."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, TypeAlias

from checkpointing.errors import CheckpointError, DamagedCheckpoint, StorageError
from checkpointing.format.layout import (
    ADAPTER,
    COMMIT_RECORD,
    LATEST,
    MODEL,
    TRAINER_STATE,
    CommitRecord,
    LayoutTensor,
    parse_step,
)
from checkpointing.format.untrusted import printable
from checkpointing.options import CheckpointOptions
from checkpointing.storage import retention
from checkpointing.storage.place import StoragePlace, location
from checkpointing.storage.source import open_source
from checkpointing.storage.steps import (
    SINGLE_FILE,
    latest,
    list_steps,
    open_step,
    step_state,
    storage_of,
    stored_tensors,
)
from checkpointing.storage.verification import is_damage, verify_step


def find_steps(path: str | StoragePlace) -> list[StoragePlace]:
    """Returns the checkpoints that a path names, newest first. Raises StorageError if there are
    none."""
    path = location(path)
    if storage_of(path).exists(path / COMMIT_RECORD) or parse_step(path.name) is not None:
        return [path]
    steps = list_steps(path / "checkpoints") or list_steps(path)
    if not steps:
        raise StorageError(
            f"{path}: holds no checkpoints; give a run directory, or a step-… directory in it"
        )
    return steps


StepChoice: TypeAlias = int | Literal["best"] | None
"""Which checkpoint of a run: its step, "best" (lowest `checkpoint.best_by`), None (newest)."""


def find_checkpoint(path: str | StoragePlace, step: StepChoice = None) -> StoragePlace:
    """Returns the good checkpoint that a path names: a run, a directory of checkpoints, or a
    checkpoint. Reads headers, but no tensors. Raises StorageError if there is no checkpoint, or not
    the one that `step` names, and DamagedCheckpoint, which describes the newest, if none is good.
    """
    steps = find_steps(path)
    if step == "best":
        steps = [_best(path, [_row(one) for one in steps])]
    elif step is not None:
        there = {parse_step(one.name): one for one in steps}
        if step not in there:
            known = ", ".join(map(str, there))
            raise StorageError(f"{path}: has no checkpoint of step {step}, but of {known}")
        steps = [there[step]]
    damage: list[DamagedCheckpoint] = []
    for one in steps:
        try:
            found = open_step(one)
            step_state(found)
            # a step whose headers contradict its index cannot be loaded
            for section in found.sections:
                stored_tensors(found, section, verify=False)
        except DamagedCheckpoint as error:
            damage.append(error)
        else:
            return found.path
    # the damage of the newest step
    raise damage[0]


def find_source(path: str | StoragePlace, step: StepChoice = None) -> StoragePlace:
    """Returns what `open_source` can open: a plain Hugging Face directory, or what
    `find_checkpoint` returns. Raises the errors of `find_checkpoint`."""
    path = location(path)
    weights = MODEL.index, SINGLE_FILE, ADAPTER.file(1, 1)
    plain = any(storage_of(path).exists(path / name) for name in weights)
    if plain and parse_step(path.name) is None and step is None:
        return path
    return find_checkpoint(path, step)


@dataclass(frozen=True)
class _ListingRow:
    """A checkpoint in a listing."""

    path: StoragePlace
    saved: float | None
    """Unix time of the commit."""
    state: dict[str, Any]
    """Trainer state; empty if damaged."""
    size: int
    """Bytes of all files."""
    files: int
    problem: str | None
    """Description of the problem; None if the step is committed and all files have their sizes. The
    command `verify` checks the bytes."""


@dataclass(frozen=True)
class _CheckpointListing:
    """Checkpoints, newest first."""

    rows: list[_ListingRow]

    def __str__(self) -> str:
        header = ["checkpoint", "saved", "tokens", "val loss", "size", "files", "ranks", ""]
        ranking = retention.best_of([_judged(row) for row in self.rows if row.problem is None])
        best = ranking[0].path if len(self.rows) > 1 and ranking else None
        return table([header, *(_cells(row, best=row.path == best) for row in self.rows)])


def ls(path: str | StoragePlace) -> _CheckpointListing:
    """List checkpoints, with what can be checked without reading tensors."""
    return _CheckpointListing([_row(step) for step in find_steps(path)])


def _row(path: StoragePlace) -> _ListingRow:
    try:
        step = open_step(path)
        saved = storage_of(path).stat(path / COMMIT_RECORD).st_mtime
        size = sum(file.size for file in step.record.files.values())
        return _ListingRow(path, saved, step_state(step), size, len(step.record.files), None)
    except CheckpointError as error:
        return _ListingRow(path, None, {}, 0, 0, str(error))


def _judged(row: _ListingRow) -> retention.StorageRetentionStep:
    """Returns the input of retention for a checkpoint, by the `best_by` of the run's recipe."""
    recipe = row.state.get("recipe")
    options = recipe.get("checkpoint") if isinstance(recipe, dict) else None
    key = options.get("best_by") if isinstance(options, dict) else None
    key = key if isinstance(key, str) else CheckpointOptions.best_by
    return retention.StorageRetentionStep(
        row.path, parse_step(row.path.name) or 0, retention.number_of(row.state, key)
    )


def _best(path: str | StoragePlace, rows: Sequence[_ListingRow]) -> StoragePlace:
    """Returns the best of these checkpoints, which are sorted newest first. Raises StorageError if
    none has a validation loss."""
    for found in retention.best_of([_judged(row) for row in rows if row.problem is None]):
        return found.path
    raise StorageError(
        f"{path}: no good checkpoint has a validation loss, so none is the best; name its step"
    )


def _cells(row: _ListingRow, *, best: bool) -> list[str]:
    if row.problem is not None:
        return [row.path.name, "", "", "", "", "", "", f"DAMAGED: {row.problem}"]
    tokens, loss = row.state.get("tokens"), row.state.get("validation_loss")
    return [
        row.path.name,
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved)),
        f"{tokens:,}" if isinstance(tokens, int) else "",
        f"{loss:.4f}" if isinstance(loss, float) else "",
        human_bytes(row.size),
        str(row.files),
        _world(row.state),
        "best" if best else "",
    ]


def _world(state: dict[str, Any]) -> str:
    world = state.get("world")
    if not isinstance(world, dict):
        return ""
    keys = ("world_size", "sharding")
    return " ".join(printable(str(world[key])) for key in keys if key in world)


@dataclass(frozen=True)
class _CheckpointContents:
    """The tensors and trainer state of a checkpoint."""

    path: StoragePlace
    record: CommitRecord
    model: dict[str, LayoutTensor]
    optimizer: dict[str, LayoutTensor]
    state: dict[str, Any]
    is_adapter: bool = False

    def __str__(self) -> str:
        lines = [f"{self.path}: step {self.record.step}", ""]
        kind = "adapter" if self.is_adapter else "model"
        for title, tensors in ((kind, self.model), ("optimizer", self.optimizer)):
            size = sum(tensor.meta.nbytes for tensor in tensors.values())
            numbers = sum(prod(tensor.meta.shape) for tensor in tensors.values())
            dtypes = Counter(tensor.meta.dtype for tensor in tensors.values())
            lines.append(
                f"{title}: {len(tensors)} tensors, {numbers:,} elements, {human_bytes(size)}, "
                + ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
            )
        if self.is_adapter:
            lines.append(f"trained over {_base(self.state)}")
        rows = [
            [f"  {name}", tensor.meta.dtype, str(list(tensor.meta.shape)), tensor.file]
            for name, tensor in self.model.items()
        ]
        lines += ["", table([["  tensor", "dtype", "shape", "file"], *rows])]
        lines += ["", f"{TRAINER_STATE}:"]
        lines += [f"  {printable(key)}: {short(value)}" for key, value in self.state.items()]
        return "\n".join(lines)


def show(path: str | StoragePlace, step: StepChoice = None) -> _CheckpointContents:
    """Returns the tensors and trainer state of a checkpoint, or of the one that `find_checkpoint`
    finds in a run. Raises DamagedCheckpoint or StorageError if it is damaged or cannot be read."""
    found = open_step(find_checkpoint(path, step))
    with open_source(found.path) as source:
        state = source.state or {}
        return _CheckpointContents(
            found.path, found.record, source.model, source.optimizer, state, source.is_adapter
        )


def _base(state: dict[str, Any]) -> str:
    base = state.get("base")
    if not isinstance(base, dict):
        return "a model that trainer_state.json does not name"
    path, *rest = (printable(str(base.get(key))) for key in ("path", "fingerprint", "format"))
    return f"{path} (fingerprint {rest[0]}) in {rest[1]}"


def short(value: Any, limit: int = 100) -> str:
    """Returns a JSON value in one line, cut at `limit` characters."""
    text = printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


@dataclass(frozen=True)
class _CheckpointProblem:
    """A defect of a checkpoint."""

    checkpoint: StoragePlace
    message: str
    """Message that names the file, and the block if the defect is in a block."""
    is_damage: bool = True
    """False if the checkpoint could not be read."""

    def __str__(self) -> str:
        return f"{self.checkpoint.name}: {self.message}"


@dataclass
class _Verification:
    """Result of checking every byte."""

    checked: list[StoragePlace]
    size: int = 0
    """Number of bytes read."""
    problems: list[_CheckpointProblem] = field(default_factory=list)

    @property
    def good(self) -> list[StoragePlace]:
        bad = {problem.checkpoint for problem in self.problems}
        return [path for path in self.checked if path not in bad]

    @property
    def known(self) -> retention.StorageRetentionVerdicts:
        """The result in the form that retention uses."""
        lost = {problem.checkpoint.name for problem in self.problems if problem.is_damage}
        return retention.StorageRetentionVerdicts(
            damaged=lost,
            unreadable={problem.checkpoint.name for problem in self.problems} - lost,
            verified={path.name for path in self.good},
        )

    def add(self, step: StoragePlace) -> None:
        size, problems = verify_step(step)
        self.checked.append(step)
        self.size += size
        self.problems += [
            _CheckpointProblem(step, str(problem), is_damage(problem)) for problem in problems
        ]

    def __str__(self) -> str:
        bad = {problem.checkpoint for problem in self.problems}
        verdicts = [f"{path.name}: {'DAMAGED' if path in bad else 'good'}" for path in self.checked]
        summary = (
            f"{len(self.checked)} checkpoint(s), {human_bytes(self.size)}: "
            f"{len(self.problems)} problem(s)"
        )
        return "\n".join([*map(str, self.problems), *verdicts, summary])


def verify(path: str | StoragePlace) -> _Verification:
    """Verify a checkpoint, or all checkpoints of a run: every byte against the commit record, then
    the contents, and the pointer `latest`. Goes on after a problem, to report all."""
    result = _Verification([])
    for step in find_steps(path):
        result.add(step)
    result.problems += _verify_latest(result.checked)
    return result


def _verify_latest(steps: Sequence[StoragePlace]) -> list[_CheckpointProblem]:
    """Check that the pointer file beside `steps`, if it exists, names a committed checkpoint."""
    pointer = steps[0].with_name(LATEST)
    try:
        named = latest(pointer.parent)
    except CheckpointError as error:
        return [_CheckpointProblem(pointer, str(error))]
    if named is None:
        return []
    is_step = parse_step(named) is not None
    if is_step and storage_of(pointer).exists(pointer.with_name(named) / COMMIT_RECORD):
        return []
    return [_CheckpointProblem(pointer, f"{pointer}: names {named!r}, which is no checkpoint")]


@dataclass(frozen=True)
class _PruneResult:
    """Retention's decision on each checkpoint, newest first."""

    decisions: list[retention.StorageRetentionDecision]
    dry_run: bool
    verification: _Verification
    """Result of reading the newest checkpoints that are kept."""

    def __str__(self) -> str:
        verbs = ("goes" if self.dry_run else "deleted", "stays")
        rows = [[item.path.name, verbs[item.stays], item.reason] for item in self.decisions]
        going = [item for item in self.decisions if not item.stays]
        size = human_bytes(sum(item.size for item in going))
        would = "would be deleted (dry run)" if self.dry_run else "deleted"
        lines = [*map(str, self.verification.problems), table(rows)]
        if going:
            good = [path.name for path in self.verification.good]
            lines.append(f"every byte read and found right: {', '.join(good) or 'none'}")
        return "\n".join([*lines, f"{len(going)} of {len(rows)} {would}: {size}"])


def pruned(path: str | StoragePlace, options: CheckpointOptions, *, dry_run: bool) -> _PruneResult:
    """Apply retention to a run, even while it is training. Before a deletion, every byte of the
    newest checkpoints that stay is read: a damaged one does not count as kept. Raises StorageError
    if there is no checkpoint, or `path` is itself a checkpoint.

    Args:
        path: run directory, or the directory of its checkpoints.
        options: keep, keep_every, keep_best and best_by.
    """
    path = location(path)
    steps = find_steps(path)
    if steps == [path]:
        raise StorageError(f"{path}: is one checkpoint; give the run that it belongs to")
    directory = steps[0].parent
    checked = _Verification([])
    while True:
        known = checked.known
        found = retention.inspect_steps(directory, options.best_by, known)
        decisions = retention.decide(found, options)
        if all(
            item.stays
            for item in retention.decide([replace(f, verified=True) for f in found], options)
        ):
            break  # nothing will be deleted, so nothing needs to be read
        newest = [item.path for item in found if item.is_good][: options.keep]
        unknown = [path for path in newest if path not in checked.checked]
        if not unknown:
            break
        # one at a time, as the decision changes if the step is damaged
        checked.add(unknown[0])
    if not dry_run:
        decisions = retention.prune(directory, options, known)
    return _PruneResult(decisions, dry_run, checked)


def human_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0  # the last column may be long
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
