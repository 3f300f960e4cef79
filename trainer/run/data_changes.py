"""Changes of the training data that a user requests while the run trains.

[Note: data changes] `perdure data change` writes a request to the run directory. Rank 0 looks for
it once a second. It accepts a stage that begins after the present step, and adds it to the file
CHANGES; it refuses a stage that begins earlier. The ledger records either answer. After an
acceptance all ranks pause at the end of the step, as they do when a node joins. At the next start
rank 0 reads CHANGES and sends it to all ranks. So the order of samples never changes under a
running loader, and no rank has begun an accepted stage, whatever fails meanwhile. CHANGES of a run
in a bucket is in the bucket before the answer is given, so it outlives rank 0's machine.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from checkpointing.ranks import RankGroup, failing_alike
from elastic.world import supervised
from trainer.data.loader import check_weights
from trainer.data.shards import is_prepared
from trainer.recipe import Recipe, RecipeError, data_change
from trainer.recipe.data_change import RecipeDataChange
from trainer.recipe.errors import known_errors
from trainer.recipe.stages import ordered, table
from trainer.run.provenance import read_changes, trusted_json, write_changes

if TYPE_CHECKING:
    from trainer.run.state import Run

LOOK_SECONDS = 1.0


def shared_changes(recipe: Recipe, changes: Sequence[RecipeDataChange]) -> Recipe:
    """Return the recipe with the accepted changes, which rank 0 broadcasts. On all ranks. Raises
    RecipeError if they do not fit the recipe."""
    with failing_alike():
        values = RankGroup(dist.group.WORLD).on_main(lambda: json.dumps(data_change.plain(changes)))
    changes = data_change.parsed(json.loads(values))
    return data_change.with_changes(recipe, changes, data_change.CHANGES)


class RunDataChanges:
    """Answers requests to change the data of a run. Does nothing on ranks other than 0."""

    def __init__(self, run: "Run") -> None:
        self._run, self._folder = run, run.recipe.directory
        answers = run.world.is_main and bool(run.recipe.data.sources)
        self._next = 0.0 if answers else math.inf
        """When to look for a request next, in seconds of `time.monotonic`."""

    def look(self) -> None:
        """Answer a request if there is one. Called before each step."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        path = self._folder / data_change.REQUEST
        if not path.exists():
            return
        name, what, refused = "", "a request that cannot be read", ""
        pauses = False
        try:
            (change,) = data_change.parsed([trusted_json(path, self._run.recipe)])
            name, what = change.name, describe(change)
            pauses = self._accept(change)
        except (*known_errors(), OSError, ValueError) as error:
            refused = str(error)
        self._run.log.data_change(self._run.progress.step, name, what, refused)
        try:
            path.unlink()
        except OSError:  # another user's file, in a directory of mode +t: do not answer it again
            self._next = math.inf
        if pauses:
            self._run.pulse.wants_pause = True
            self._next = math.inf

    def _accept(self, change: RecipeDataChange) -> bool:
        """Save a change for the next start; returns False if it was saved before. Raises
        RecipeError or DataError if nothing would start the run again, or if the change comes too
        late or does not fit the recipe and its data; OSError or StorageError if it cannot be
        saved."""
        run = self._run
        if not supervised():
            raise RecipeError(
                "nothing starts this run again after a pause; end it, add the stage to its recipe, "
                "and start it"
            )
        changes = read_changes(run.recipe)
        if change in changes:  # rank 0 was killed after saving it and before answering
            return False
        # The change takes effect after the pause, which follows the step that begins now.
        done = run.progress.sequences + run.plan.global_batch
        if change.begin < done:
            raise RecipeError(
                f"its stage begins at sequence {change.begin}, but step {run.progress.step + 1} "
                f"goes up to {done}; give a later step"
            )
        data_change.refuse_taken_names(run.written, change, os.getcwd())
        changes.append(change)
        _check_data(data_change.with_changes(run.written, changes, data_change.CHANGES), change)
        # A bucket may take seconds to answer; the time limit of a save allows for that.
        with run.pulse.during("save"):
            write_changes(run.recipe, changes)
        return True


def _check_data(recipe: Recipe, change: RecipeDataChange) -> None:
    """Raise RecipeError or DataError for a stage with which no rank could start. `perdure data
    change` has opened the data, which may take longer than other ranks wait in a step."""
    check_weights(table(recipe.data), [source.path for source in ordered(recipe.data)])
    for source in change.sources:
        if not is_prepared(source.path):
            raise RecipeError(
                f"rank 0 sees no data set at {source.path} (it has no index.json); put it where "
                "all machines of the run have it"
            )


def describe(change: RecipeDataChange) -> str:
    parts = [f"from sequence {change.begin:,}"]
    if change.weights:
        parts.append(" ".join(f"{name}={weight:g}" for name, weight in change.weights.items()))
    parts += [f"{name} with {', '.join(more)}" for name, more in change.append.items()]
    return ": ".join([parts[0], "; ".join(parts[1:])])
