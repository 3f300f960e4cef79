"""`batch.micro_batch: auto`: as many sequences as the plan has room for, fewer once memory ran out.

[Note: auto] The number is chosen when a world begins: every rank asks the plan for its own device,
and the smallest answer counts. Ranks whose memory runs out in a pass cannot tell the others, which
wait for them in a collective. So such a rank notes half the number in the run directory and fails,
as it would without the note, and the next start, or generation, of the job takes what is noted. No
weight has changed by then: the step was not done. The agents count no failure, however often it
happens: the number reaches 1 soon, and at 1 an error is one.

The note also keeps what was chosen, so that a restart asks no plan. An exact run, whose results and
greatest number of ranks depend on it, is to name one.
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
"""In the run directory: {"of": digest, "sequences": {kind of world: number}}."""


def settled(recipe: Recipe, world: World) -> Recipe:
    """The recipe with a number for `batch.micro_batch`, on all ranks the same.

    Raises:
        RecipeError: the plan cannot trace the model.
    """
    if recipe.batch.micro_batch != "auto":
        return recipe
    noted, kind = _noted(recipe), _kind(world)
    number = torch.tensor(noted.get(kind) or _planned(recipe, world), device=world.device)
    dist.all_reduce(number, dist.ReduceOp.MIN)  # not all nodes may have the note
    agreed = received(number)
    if noted.get(kind) != agreed and world.local_rank == 0:
        _note(recipe, {**noted, kind: agreed})
    batch = dataclasses.replace(recipe.batch, micro_batch=agreed)
    return dataclasses.replace(recipe, batch=batch)


def noted(recipe: Recipe, world: World) -> int | None:
    """What `settled` has chosen for such a world, by the note in the run directory; None if there
    is no such note. Reads only."""
    return _noted(recipe).get(_kind(world))


class HalvedError(MemoryError):
    """Memory ran out, and the next start takes fewer sequences."""


@contextmanager
def halving(run: Run) -> Iterator[None]:
    """Around a step: if memory runs out in the first one of an attempt, note half the micro-batch
    for the next start.

    Raises:
        HalvedError: with what comes next, in place of the error that says so in torch's words.
    """
    first = run.first_step
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        number = run.recipe.micro_batch
        auto = first and run.given.batch.micro_batch == "auto" and number > 1
        if not auto or not _is_out_of_memory(error):
            raise
        if not _note(run.given, {**_noted(run.given), _kind(run.world): number // 2}):
            raise  # or the same would come again and again
        raise HalvedError(
            f"out of memory with {number} sequences in a pass; the next start takes {number // 2} "
            "(batch.micro_batch: auto)"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Whatever says so: torch's allocator, malloc, CUDA, cuBLAS, cuDNN or NCCL."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    words = r"(?i)out of memory|can't allocate memory|STATUS_ALLOC_FAILED"
    return isinstance(error, kinds) or re.search(words, str(error)) is not None


def _planned(recipe: Recipe, world: World) -> int:
    ranks = (recipe, world.world_size, world.local_world_size)
    if world.device.type == "cpu":
        return largest_micro_batch(*ranks, available_bytes(), "cpu")
    memory = torch.cuda.get_device_properties(world.device).total_memory
    return largest_micro_batch(*ranks, memory, "cuda")


def _kind(world: World) -> str:
    """What the number depends on besides the recipe. Not a host's free memory, which changes."""
    kind = f"{world.world_size} rank(s), {world.local_world_size} on a node, {world.device.type}"
    if world.device.type == "cuda":
        kind += f" of {torch.cuda.get_device_properties(world.device).total_memory >> 20} MiB"
    return kind


def _noted(recipe: Recipe) -> dict[str, int]:
    """What the run directory knows of this recipe."""
    try:
        note = json.loads(read_text(recipe.directory / NOTE))
    except (OSError, ValueError):
        return {}
    return dict(note["sequences"]) if note["of"] == _digest(recipe) else {}


def _note(recipe: Recipe, sequences: dict[str, int]) -> bool:
    """Returns whether it could be written."""
    note: dict[str, Any] = {"of": _digest(recipe), "sequences": sequences}
    directory = recipe.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / NOTE, json.dumps(note, indent=2) + "\n")
    except OSError:  # a full disk: it costs a plan at the next start
        return False
    return True


def _digest(recipe: Recipe) -> str:
    """A digest of all that a number is good for, and of nothing else."""
    values = resolved(recipe)
    counted = [values["model"], values["data"]["seq_len"], values["data"]["document_mask"]]
    counted += [values["batch"]["global_batch"], values["strategy"], values["precision"]]
    return hashlib.blake2b(json.dumps(counted).encode(), digest_size=8).hexdigest()
