"""What torchrun starts in each rank: argv → Recipe → process group → train → exit code.

`torchrun … -m trainer RECIPE.yaml [key.sub=value …]`, or without torchrun for a single process.
Exit codes: 0 done; 1 an unexpected error; 2 wrong recipe or input; 93 do not requeue.
"""

import logging
import sys
import time
from pathlib import Path
from typing import NoReturn

from trainer.recipe import Recipe, RecipeError, dump_recipe, load_recipe

EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: list[str]) -> NoReturn:
    """Run one rank; never returns."""
    from elastic.world import die_with_parent, join_world, leave_world, read_environment

    rank, local_rank, world_size, local_world_size, _ = read_environment()
    if world_size > 1:
        die_with_parent()
    logging.basicConfig(format=f"%(levelname)s rank {rank} %(name)s: %(message)s")
    if not arguments:
        print("usage: python -m trainer RECIPE.yaml [key.sub=value ...]", file=sys.stderr)
        leave_world(EXIT_WRONG_INPUT)
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
        from trainer.metrics import Startup

        startup = Startup()
        from trainer.preflight import check_inputs
        from trainer.train import train

        startup.mark("imports")
        task = check_inputs(recipe, rank, world_size, local_world_size)
        startup.mark("checks")
        if rank == 0:
            prepare_run_directory(recipe)
        world = join_world(recipe.run.device, recipe.elastic.timeout_seconds)
        startup.mark("rendezvous")
        code = train(recipe, task, world, startup)
    except KeyboardInterrupt:
        leave_world(EXIT_INTERRUPTED)  # the launcher says so, once
    except known_errors() as error:
        from checkpointing import SaveFailed

        if isinstance(error, SaveFailed):  # the last one: nothing is wrong with the input
            if rank == 0:
                print(f"error: {error}; the same command resumes", file=sys.stderr, flush=True)
            leave_world(1)
        if local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(
                10
            )  # torchrun ends all ranks with the first; let that be the one that speaks
        leave_world(EXIT_WRONG_INPUT)
    leave_world(code)


def known_errors() -> tuple[type[Exception], ...]:
    """Errors of the user's input; anything else is a fault of ours and keeps its traceback."""
    from checkpointing import CheckpointError
    from trainer.data.shards import DataError
    from trainer.generate import GenerateError
    from trainer.models.hf import ConfigError

    return RecipeError, ConfigError, DataError, CheckpointError, GenerateError


def prepare_run_directory(recipe: Recipe) -> None:
    """Make the run directory and leave the resolved recipe in it. On rank 0."""
    directory = Path(recipe.run.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"run.dir: cannot write to {directory}: {error.strerror}; choose another run.dir"
        ) from error


if __name__ == "__main__":
    main(sys.argv[1:])
