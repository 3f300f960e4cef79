"""What the committed steps of a run make of prompts or tasks, as lines of JSON. It runs in a
process of its own, and training knows nothing of it."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from checkpointing.errors import DamagedCheckpoint
from checkpointing.format.layout import parse_step
from checkpointing.storage.place import location
from checkpointing.storage.steps import list_steps, open_step, reading_lock
from elastic import LEDGER
from elastic.exits import EXIT_DONE
from elastic.node.files import open_to_read
from elastic.record.lines import Lines, read_line
from trainer.tools.generate import GenerateError, Sampling, continuations

Wanted: TypeAlias = Mapping[str, Any]
"""What a line is about, such as a prompt: part of the line, by which it is known again."""

LOOK_SECONDS = 1.0
TAIL_BYTES = 1 << 16


def read_prompts(file: Path) -> list[str]:
    """Prompts, each once: of a .jsonl file the `prompt` of each line, else the lines that hold any.

    Raises:
        GenerateError: the file cannot be read, holds no prompts, or a line is no such object.
    """
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
        raise GenerateError(f"--prompts: {file} holds none; write one a line")
    return list(dict.fromkeys(prompts))


def add_lines(
    steps: Sequence[Path],
    wanted: Sequence[Wanted],
    out: Path,
    make: Callable[[Path, Sequence[Wanted]], Iterable[Mapping[str, Any]]],
) -> Iterator[tuple[int, int]]:
    """Append to `out` a line for each checkpoint and each thing that is wanted of it: `step`, what
    is wanted, and what is made of it. Lines that are there already are not made again.

    Args:
        steps: checkpoints.
        wanted: JSON objects, all with the same keys.
        out: file of JSON lines.
        make: (a checkpoint, some of `wanted`) → what is added to each, in order.

    Yields:
        (step, lines written) of each checkpoint that had something to write. One that is deleted
        or found damaged meanwhile is passed over, with 0 lines.

    Raises:
        GenerateError: a line cannot be written.
    """
    known = _written(out, list(wanted[0]))
    for path in steps:
        step = parse_step(path.name) or 0
        missing = [one for one in wanted if (step, *one.values()) not in known]
        if not missing:
            continue
        try:
            with reading_lock(location(path)):
                open_step(location(path))
                found = list(make(path, missing))
        except DamagedCheckpoint:
            yield step, 0
            continue
        lines = Lines(out)
        for one, more in zip(missing, found, strict=True):
            lines.add(json.dumps({"step": step, **one, **more}, ensure_ascii=False))
        lines.close()
        if lines.waiting:
            raise GenerateError(f"--out: {out} could not be written; see the warning above")
        yield step, len(missing)


def samples(
    sampling: Sampling, device: str, family: str | None = None
) -> Callable[[Path, Sequence[Wanted]], Iterator[dict[str, str]]]:
    """What `add_lines` makes of prompts: the `text` that a checkpoint writes after each."""

    def make(path: Path, wanted: Sequence[Wanted]) -> Iterator[dict[str, str]]:
        prompts = [one["prompt"] for one in wanted]
        for pieces in continuations(path, prompts, sampling, device=device, family=family):
            yield {"text": "".join(pieces)}

    return make


def follow(run: Path) -> Iterator[list[Path]]:
    """The checkpoints of a run, oldest first, each once, as they are committed; ends when the run
    has ended with code 0.

    Args:
        run: its directory.

    Raises:
        GenerateError: there is no such directory.
    """
    if not run.is_dir():
        raise GenerateError(f"{run}: there is no such run yet; start it, then follow it")
    seen: set[str] = set()
    while True:
        ended = has_ended(run)  # before one looks: what the run saved last is there
        there = list_steps(run / "checkpoints") if (run / "checkpoints").is_dir() else []
        new = [path for path in reversed(there) if path.name not in seen]
        seen |= {path.name for path in new}
        if new:
            yield new
        elif ended:
            return
        else:
            time.sleep(LOOK_SECONDS)


def has_ended(run: Path) -> bool:
    """Whether the last line of the ledger says that the run is done."""
    try:
        with os.fdopen(open_to_read(run / LEDGER, follow=True), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            last = read_line(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return False
    return last.get("kind") == "end" and last.get("code") == EXIT_DONE


def _written(out: Path, keys: Sequence[str]) -> set[tuple[Any, ...]]:
    """(step, values of `keys`) of the lines of a file. One that a killed process left unfinished is
    none."""
    found: set[tuple[Any, ...]] = set()
    with suppress(FileNotFoundError), out.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                record = json.loads(line)
                found.add((record["step"], *(record[key] for key in keys)))
    return found
