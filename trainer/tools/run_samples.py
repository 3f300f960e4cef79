"""Continues the prompts of `run.samples` from a run's checkpoints: `python -m
trainer.tools.run_samples RUN_DIRECTORY STEPS`, a companion process of rank 0, like trackers
(trainer/run/trackers.py). It writes the same lines as `perdure eval`. The random draws are the same
at each step, so texts of two steps differ only by the weights."""

import math
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from checkpointing.errors import CheckpointError
from checkpointing.format.layout import parse_step
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath, location
from checkpointing.storage.steps import list_steps, storage_of
from elastic.node.companion import until_input_ends
from elastic.record.lines import SAMPLES
from trainer.recipe import load_recipe
from trainer.run.trackers import describe_failure, mark_of, persist

LOOK_SECONDS = 5.0
"""Least seconds between two listings of the checkpoints in a bucket."""


def due(committed: Collection[int], sampled: Collection[int], every: int, last: int) -> list[int]:
    """Return the steps whose checkpoints should continue the prompts, newest first: the first saved
    step at or after each validation pass, and the last step of the run.

    Args:
        committed: steps whose checkpoints exist.
        sampled: steps that have samples; their checkpoints may be deleted.
        every: steps between validation passes; 1 if there are none.
        last: last step of the run.
    """
    # keeps the smallest step of each interval between two passes
    firsts = {step // every: step for step in sorted({*committed, *sampled}, reverse=True)}
    wanted = {step for stretch, step in firsts.items() if stretch} | {last}
    return sorted(wanted & {*committed}, reverse=True)


def continue_prompts(
    run_dir: Path, last: int, ended: threading.Event, position: float
) -> Iterator[float]:
    """Write the samples of one checkpoint per iteration, newest checkpoint first. If the run is in
    a bucket, its samples are stored there, too.

    Args:
        run_dir: absolute path of the run's directory on this machine.
        last: last step of the run.
        ended: set when there will be no more checkpoints.
        position: initial number.

    Yields:
        `position` plus the number of sampled checkpoints.

    Raises:
        GenerateError: a prompt does not fit the model, or the file cannot be written.
        CheckpointError, ModelConfigError: the model cannot be loaded.
    """
    recipe = load_recipe(run_dir / "recipe.yaml", kept=True)
    own = recipe.checkpoint.directory or run_dir / "checkpoints"
    directory = location(recipe.checkpoint_directory if recipe.in_bucket else own)
    looked, stored = -math.inf, 0
    every = recipe.run.evaluate_every or 1
    wanted = [{"prompt": prompt} for prompt in recipe.run.samples]
    tried: set[int] = set()
    seen: set[int] = set()
    while True:
        now = time.monotonic()
        # each listing of a bucket is a request that costs money
        remote = isinstance(directory, ObjectPath)
        if remote and now - looked < LOOK_SECONDS and not ended.is_set():
            yield position
            continue
        looked = now
        found = list_steps(directory) if remote or storage_of(directory).exists(directory) else []
        paths = {step: path for path in found if (step := parse_step(path.name)) is not None}
        if not paths.keys() <= seen:
            # imported once there is a checkpoint, as importing torch takes seconds
            import torch

            from trainer.tools.eval_lines import add_lines, samples, written
            from trainer.tools.generate import GenerationSampling

            torch.set_num_threads(1)
            lines = written(run_dir / SAMPLES, ["prompt"])
            sampled = {step for step, prompt in lines if prompt in recipe.run.samples}
            steps = due(paths, sampled, every, last)
            step = next((step for step in steps if step not in tried), None)
            if step is None:
                seen |= paths.keys()
            else:
                tried.add(step)
                make = samples(GenerationSampling(), "cpu", recipe.model.family)
                for _ in add_lines([paths[step]], wanted, run_dir / SAMPLES, make):
                    pass
                position += 1
        if recipe.in_bucket and (run_dir / SAMPLES).exists():
            data = (run_dir / SAMPLES).read_bytes()
            if len(data) > stored:
                place = ObjectPath.of(recipe.run.dir) / SAMPLES
                store_of(place).write(place, data)
                stored = len(data)
        yield position


def main(directory: str, last: str) -> None:
    """Continue prompts until standard input ends, that is, until rank 0 ends. `directory` is the
    run directory, absolute; `last` the last step of the run."""
    ended = until_input_ends(niceness=19)
    with suppress(OSError):
        # the kernel should kill this process, which loads a large model, before a rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    run_dir = Path(directory)
    persist(
        mark_of(run_dir, "samples"),
        lambda position: (continue_prompts(run_dir, int(last), ended, position), lambda: None),
        ended,
        lambda error: describe_failure("run.samples", error),
        lambda error: isinstance(error, OSError | CheckpointError),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
