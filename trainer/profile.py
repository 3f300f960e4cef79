"""torch's profiler around the steps of a run: one Chrome trace per rank."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from elastic.world import World
from trainer.recipe import Recipe

TRACES = "profile"
"""Directory in the run directory; the trace of rank 3 is rank-3.json.gz in it."""
SKIPPED = 4
"""Steps before the first traced one: warm-up of memory, caches and compilation, and of the
profiler itself."""


@contextmanager
def traced(recipe: Recipe, world: World) -> Iterator[Callable[[], None]]:
    """Trace `tracking.profile_steps` steps of this rank. On all ranks.

    Gives what is to be called after each step; it does nothing when there is nothing to trace.
    """
    steps = recipe.tracking.profile_steps
    if not steps:
        yield lambda: None
        return
    path = Path(recipe.run.dir) / TRACES / f"rank-{world.rank}.json.gz"

    def write(profiler: profile) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a trace must not cost a run
            logging.getLogger(__name__).warning("%s: cannot write the trace: %s", path, error)

    activities = [ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=SKIPPED - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=write,
    ) as profiler:
        yield profiler.step
