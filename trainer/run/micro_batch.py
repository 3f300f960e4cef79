"""`batch.micro_batch: auto`: as many sequences as fit by prediction, halved if memory runs out.

[Note: auto] The number of sequences is chosen at the start: each rank predicts what fits on its own
device, and all use the smallest result. A rank whose memory runs out during a pass cannot inform
the other ranks, which wait for it in a collective. So it writes half the number to a file in the
run directory and fails; the restarted ranks read the file. No weight has changed by then. Agents do
not count this as a failure, because it happens only a few times: with 1 sequence per pass, the
error is reported to the user. The file also keeps the number that was chosen, so that restarts need
no prediction. The recipe of an exact run must name a number, because results depend on it.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.save.slots import available_bytes
from elastic import World
from elastic.node.exchange import received
from elastic.node.files import read_text, write_whole
from trainer.plan.search import largest_micro_batch
from trainer.recipe import Recipe, resolved
from trainer.run.state import Run

NOTE = "micro_batch.json"
"""JSON file in the run directory: {"of": digest of recipe values, "sequences": {world: number}}."""


def settled(recipe: Recipe, world: World) -> Recipe:
    """Return the recipe with a number in place of `batch.micro_batch: auto`, the same on all ranks.
    Raises RecipeError if the prediction cannot trace the model."""
    if recipe.batch.micro_batch != "auto":
        return recipe
    noted, kind = _recorded(recipe), _kind(world)
    number = torch.tensor(noted.get(kind) or _planned(recipe, world), device=world.device)
    # All ranks take the minimum: devices may differ, and some nodes may not see the file.
    dist.all_reduce(number, dist.ReduceOp.MIN)
    agreed = received(number)
    if noted.get(kind) != agreed and world.local_rank == 0:
        _note(recipe, {**noted, kind: agreed})
    batch = dataclasses.replace(recipe.batch, micro_batch=agreed)
    return dataclasses.replace(recipe, batch=batch)


def noted(recipe: Recipe, world: World) -> int | None:
    """Return the sequences per micro-batch that `settled` has written to the run directory for
    worlds of this kind (`_kind`); None if there are none."""
    return _recorded(recipe).get(_kind(world))


class RunOutOfMemoryError(MemoryError):
    """Memory ran out in a pass; the next start uses half as many sequences per micro-batch."""


@contextmanager
def halving(run: Run) -> Iterator[None]:
    """Context around a step. If memory runs out in the first step of an attempt, write half the
    micro-batch to the run directory for the next start, and raise RunOutOfMemoryError."""
    first = run.first_step
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        number = run.recipe.micro_batch
        auto = first and run.written.batch.micro_batch == "auto" and number > 1
        if not auto or not _is_out_of_memory(error):
            raise
        if not _note(run.written, {**_recorded(run.written), _kind(run.world): number // 2}):
            raise  # without the file, each restart would fail in the same way
        raise RunOutOfMemoryError(
            f"out of memory with {number} sequences in a pass; the next start takes {number // 2} "
            "(batch.micro_batch: auto)"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The words of malloc, CUDA, cuBLAS, cuDNN and NCCL.
    words = r"(?i)out of memory|can't allocate memory|STATUS_ALLOC_FAILED"
    return re.search(words, str(error)) is not None


def _planned(recipe: Recipe, world: World) -> int:
    ranks = (recipe, world.world_size, world.local_world_size)
    if world.device.type == "cpu":
        return largest_micro_batch(*ranks, available_bytes(), "cpu")
    memory = torch.cuda.get_device_properties(world.device).total_memory
    return largest_micro_batch(*ranks, memory, "cuda")


def _kind(world: World) -> str:
    """Return a key for worlds that can use the same micro-batch."""
    # The host's free memory is not part of the key, because it changes from start to start.
    kind = f"{world.world_size} rank(s), {world.local_world_size} on a node, {world.device.type}"
    if world.device.type == "cuda":
        kind += f" of {torch.cuda.get_device_properties(world.device).total_memory >> 20} MiB"
    return kind


def _recorded(recipe: Recipe) -> dict[str, int]:
    """Read from the run directory the sequences per micro-batch for each kind of world (result of
    `_kind`); {} if the file is missing, damaged or of another recipe."""
    try:
        note = json.loads(read_text(recipe.directory / NOTE))
    except (OSError, ValueError):
        return {}
    return dict(note["sequences"]) if note["of"] == _digest(recipe) else {}


def _note(recipe: Recipe, sequences: dict[str, int]) -> bool:
    """Write `sequences` where `_recorded` reads them; returns False if that fails."""
    note: dict[str, Any] = {"of": _digest(recipe), "sequences": sequences}
    directory = recipe.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / NOTE, json.dumps(note, indent=2) + "\n")
    except OSError:  # such as a full disk; without the file, the next start predicts again
        return False
    return True


def _digest(recipe: Recipe) -> str:
    values = resolved(recipe)
    counted = [values["model"], values["data"]["seq_len"], values["data"]["document_mask"]]
    counted += [values["batch"]["global_batch"], values["strategy"], values["precision"]]
    return hashlib.blake2b(json.dumps(counted).encode(), digest_size=8).hexdigest()
