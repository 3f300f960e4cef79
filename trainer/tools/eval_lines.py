"""Writes what a run's checkpoints generate for prompts, or score on tasks, as JSON lines. Runs in
its own process, independent of training."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

from checkpointing.errors import DamagedCheckpoint
from checkpointing.format.layout import parse_step
from checkpointing.storage.place import ObjectPath, P, Place, local
from checkpointing.storage.steps import list_steps, open_step, reading_lock
from elastic import LEDGER
from elastic.exits import EXIT_DONE
from elastic.node.files import open_to_read
from elastic.record.history import last_start
from elastic.record.lines import LineFile, read_line
from trainer.recipe import load_recipe
from trainer.tools.generate import GenerateError, Sampling, continuations
from trainer.tools.mirror import local_model

LineSubject: TypeAlias = Mapping[str, Any]
"""Subject of a line, such as a prompt or task; its fields are part of the line, and identify it."""

LOOK_SECONDS = 1.0
TAIL_BYTES = 1 << 16


def read_prompts(file: Path) -> list[str]:
    """Read distinct prompts: the `prompt` of each line of a .jsonl file, or each non-empty line of
    a text. Raises GenerateError if the file cannot be read, has no prompts, or has a line without
    `prompt`."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise GenerateError(f"--prompts: cannot read {file}: {error}") from error
    prompts = list(lines)
    for number, line in enumerate(lines if file.suffix == ".jsonl" else []):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            prompts[number] = json.loads(line)["prompt"]
            if isinstance(prompts[number], str):
                continue
        raise GenerateError(f'--prompts: {file}: write each line as {{"prompt": "…"}}, not {line}')
    if not prompts:
        raise GenerateError(f"--prompts: {file} has no prompts; write one on each line")
    return list(dict.fromkeys(prompts))


def add_lines(
    steps: Sequence[P],
    wanted: Sequence[LineSubject],
    out: Path,
    make: Callable[[P, Sequence[LineSubject]], Iterable[Mapping[str, Any]]],
) -> Iterator[tuple[int, int]]:
    """Append one line per checkpoint and object in `wanted` to a file: `step`, the object's fields,
    and the result of `make`. Lines that the file has are not computed again.

    Args:
        steps: checkpoints, on a disk or in an object store.
        wanted: JSON objects with the same keys.
        out: file of JSON lines.
        make: (checkpoint, some of `wanted`) → fields to add to each object, in order.

    Yields:
        (step, number of lines written) of each checkpoint that lacked lines. A checkpoint that was
        deleted or is damaged is skipped, with 0 lines.

    Raises:
        GenerateError: a line cannot be written.
    """
    known = written(out, list(wanted[0]))
    for path in steps:
        step = parse_step(path.name) or 0
        missing = [item for item in wanted if (step, *item.values()) not in known]
        if not missing:
            continue
        try:
            # keeps the run from deleting the checkpoint meanwhile
            with reading_lock(path):
                open_step(path)
                results = list(make(path, missing))
        except DamagedCheckpoint:
            yield step, 0
            continue
        lines = LineFile(out)
        for item, more in zip(missing, results, strict=True):
            lines.add(json.dumps({"step": step, **item, **more}, ensure_ascii=False))
        lines.close()
        if lines.waiting:
            raise GenerateError(f"--out: {out} could not be written; see the warning above")
        yield step, len(missing)


def samples(
    sampling: Sampling, device: str, family: str | None = None
) -> Callable[[Place, Sequence[LineSubject]], Iterator[dict[str, str]]]:
    """Return a function for the argument `make` of `add_lines`, which continues the prompts in
    `wanted`. It adds the generated `text`, the Unix `time` at which the text was complete, and the
    name of the `checkpoint`."""

    def make(path: Place, wanted: Sequence[LineSubject]) -> Iterator[dict[str, Any]]:
        prompts = [item["prompt"] for item in wanted]
        on_disk = local_model(path) if isinstance(path, ObjectPath) else nullcontext(local(path))
        with on_disk as model:
            for pieces in continuations(model, prompts, sampling, device=device, family=family):
                yield {"text": "".join(pieces), "time": time.time(), "checkpoint": path.name}

    return make


def follow(run: Path) -> Iterator[list[Path]]:
    """Yield the checkpoints of a run as they are committed, oldest first, until the run ends with
    exit code 0. Raises GenerateError if the directory does not exist, and the errors of
    `checkpoints_of`."""
    if not run.is_dir():
        raise GenerateError(f"{run}: this run does not exist yet; start it first")
    seen: set[str] = set()
    while True:
        ended = has_ended(run)  # read before the checkpoints are listed, so that none is missed
        directory = checkpoints_of(run)
        listed = list_steps(directory) if directory.is_dir() else []
        new = [path for path in reversed(listed) if path.name not in seen]
        seen |= {path.name for path in new}
        if new:
            yield new
        elif ended:
            return
        else:
            time.sleep(LOOK_SECONDS)


def checkpoints_of(run: Path) -> Path:
    """Return the directory of a run's checkpoints, which need not exist yet. Raises GenerateError
    if they are in an object store, and RecipeError if the run's recipe cannot be read."""
    recipe = run / "recipe.yaml"
    given = load_recipe(recipe, kept=True).checkpoint.directory if recipe.is_file() else None
    if given is None:
        return run / "checkpoints"
    if "://" in given:
        raise GenerateError(
            f"{run}: its checkpoints are in {given}, but eval reads only those on a disk; try "
            f"`perdure generate {given} --prompt TEXT`"
        )
    start = last_start(run, trained=False)
    # relative to the directory in which the run was started
    return Path(start.directory if start else "", given)


def has_ended(run: Path) -> bool:
    """Whether the last line of the ledger records that the run is done."""
    try:
        with os.fdopen(open_to_read(run / LEDGER, follow=True), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            last = read_line(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return False
    return last.get("kind") == "end" and last.get("code") == EXIT_DONE


def written(out: Path, keys: Sequence[str]) -> set[tuple[Any, ...]]:
    """Return (step, values of `keys`) of each complete line of a file."""
    keys_written: set[tuple[Any, ...]] = set()
    with suppress(FileNotFoundError), out.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                record = json.loads(line)
                keys_written.add((record["step"], *(record[key] for key in keys)))
    return keys_written
