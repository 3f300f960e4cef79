"""Writes what a run's checkpoints generate for prompts, or score on tasks, as JSON lines."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

from checkpointing.errors import DamagedCheckpoint
from checkpointing.format.layout import parse_step
from checkpointing.storage.place import ObjectPath, P, StoragePlace, local
from checkpointing.storage.steps import list_steps, open_step, reading_lock
from elastic import LEDGER
from elastic.exits import EXIT_DONE
from elastic.record.history import last_start
from elastic.record.lines import RecordFile, last_lines, read_line
from trainer.recipe import load_recipe
from trainer.tools.generate import GenerateError, GenerationSampling, continuations
from trainer.tools.mirror import local_model

LineSubject: TypeAlias = Mapping[str, Any]
"""Fields that identify a line, such as a prompt."""


def read_prompts(file: Path) -> list[str]:
    """Return the distinct prompts of a file in order: the `prompt` of each line of a .jsonl file,
    or each line of another file, without blank lines. Raises GenerateError if there are none, or
    one cannot be read."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise GenerateError(f"--prompts: cannot read {file}: {error}") from error
    prompts = [_prompt_in(line, file) if file.suffix == ".jsonl" else line for line in lines]
    if not prompts:
        raise GenerateError(f"--prompts: {file} has no prompts; write one on each line")
    return list(dict.fromkeys(prompts))


def _prompt_in(line: str, file: Path) -> str:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        if isinstance(prompt := json.loads(line)["prompt"], str):
            return prompt
    raise GenerateError(f'--prompts: {file}: write each line as {{"prompt": "…"}}, not {line}')


def add_lines(
    steps: Sequence[P],
    wanted: Sequence[LineSubject],
    out: Path,
    make: Callable[[P, Sequence[LineSubject]], Iterable[Mapping[str, Any]]],
) -> Iterator[tuple[int, int]]:
    """Append a line for each checkpoint and each object in `wanted` to the file `out`: `step`, the
    object's fields, and those that `make` returns for it, unless the file has that line. Yields
    (step, number of new lines): 0 lines if a checkpoint is damaged."""
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
        lines = RecordFile(out)
        for item, more in zip(missing, results, strict=True):
            lines.add(json.dumps({"step": step, **item, **more}, ensure_ascii=False))
        lines.close()
        if lines.waiting:
            raise GenerateError(f"--out: {out} could not be written; see the warning above")
        yield step, len(missing)


def samples(
    sampling: GenerationSampling, device: str, family: str | None = None
) -> Callable[[StoragePlace, Sequence[LineSubject]], Iterator[dict[str, str]]]:
    """Return `make` of `add_lines` for prompts: it adds `text`, Unix `time` and `checkpoint`."""

    def make(path: StoragePlace, wanted: Sequence[LineSubject]) -> Iterator[dict[str, Any]]:
        prompts = [item["prompt"] for item in wanted]
        on_disk = local_model(path) if isinstance(path, ObjectPath) else nullcontext(local(path))
        with on_disk as model:
            for pieces in continuations(model, prompts, sampling, device=device, family=family):
                yield {"text": "".join(pieces), "time": time.time(), "checkpoint": path.name}

    return make


def follow(run: Path) -> Iterator[list[Path]]:
    """Yield the checkpoints of a run as they are committed, oldest first, until the run is done."""
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
            time.sleep(1.0)


def checkpoints_of(run: Path) -> Path:
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
    try:
        last = read_line(last_lines((run / LEDGER).resolve())[-1])
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
