"""`batch.micro_batch: auto`: as many sequences as the plan has room for, halved if memory runs out.

[Note: auto] The number is chosen when a world begins: every rank plans for its own device, and the
smallest result counts. A rank whose memory runs out during a pass cannot inform the others, which
wait for it in a collective. So it writes half the number to the run directory and fails, and the
next start or generation of the job reads it. No weight has changed by then. The agents count no
such failure: the number soon reaches 1, and at 1 the error is reported as one.

The file also keeps the number that was chosen, so that a restart needs no plan. An exact run must
name a number, because its results and its largest number of ranks depend on it.
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
"""File in the run directory: {"of": digest, "sequences": {kind of world: number}}."""


def settled(recipe: Recipe, world: World) -> Recipe:
    """Return the recipe with a number for `batch.micro_batch`, the same on all ranks.

    Raises:
        RecipeError: the plan cannot trace the model.
    """
    if recipe.batch.micro_batch != "auto":
        return recipe
    noted, kind = _recorded(recipe), _kind(world)
    number = torch.tensor(noted.get(kind) or _planned(recipe, world), device=world.device)
    # Devices may differ, and not all nodes may see the file.
    dist.all_reduce(number, dist.ReduceOp.MIN)
    agreed = received(number)
    if noted.get(kind) != agreed and world.local_rank == 0:
        _note(recipe, {**noted, kind: agreed})
    batch = dataclasses.replace(recipe.batch, micro_batch=agreed)
    return dataclasses.replace(recipe, batch=batch)


def noted(recipe: Recipe, world: World) -> int | None:
    """The number in the run directory that `settled` chose for such a world; None if there is none.
    Writes nothing."""
    return _recorded(recipe).get(_kind(world))


class HalvedError(MemoryError):
    """Memory ran out, and the next start uses half as many sequences."""


@contextmanager
def halving(run: Run) -> Iterator[None]:
    """Around a step: if memory runs out in the first step of an attempt, write half the micro-batch
    to the run directory for the next start.

    Raises:
        HalvedError: memory ran out; its message says which number comes next.
    """
    first = run.first_step
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        number = run.recipe.micro_batch
        auto = first and run.written.batch.micro_batch == "auto" and number > 1
        if not auto or not _is_out_of_memory(error):
            raise
        if not _note(run.written, {**_recorded(run.written), _kind(run.world): number // 2}):
            raise  # without the file every start would fail alike
        raise HalvedError(
            f"out of memory with {number} sequences in a pass; the next start takes {number // 2} "
            "(batch.micro_batch: auto)"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch's allocator, malloc, CUDA, cuBLAS, cuDNN or NCCL reports a lack of memory."""
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
    """The properties of a world that determine the number. A host's free memory is not among them:
    it changes from start to start."""
    kind = f"{world.world_size} rank(s), {world.local_world_size} on a node, {world.device.type}"
    if world.device.type == "cuda":
        kind += f" of {torch.cuda.get_device_properties(world.device).total_memory >> 20} MiB"
    return kind


def _recorded(recipe: Recipe) -> dict[str, int]:
    """The numbers in the run directory for this recipe, by kind of world."""
    try:
        note = json.loads(read_text(recipe.directory / NOTE))
    except (OSError, ValueError):
        return {}
    return dict(note["sequences"]) if note["of"] == _digest(recipe) else {}


def _note(recipe: Recipe, sequences: dict[str, int]) -> bool:
    """Write the numbers to the run directory; False if it cannot be written."""
    note: dict[str, Any] = {"of": _digest(recipe), "sequences": sequences}
    directory = recipe.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / NOTE, json.dumps(note, indent=2) + "\n")
    except OSError:  # a full disk: only costs a plan at the next start
        return False
    return True


def _digest(recipe: Recipe) -> str:
    """Digest of the recipe values that determine the number."""
    values = resolved(recipe)
    counted = [values["model"], values["data"]["seq_len"], values["data"]["document_mask"]]
    counted += [values["batch"]["global_batch"], values["strategy"], values["precision"]]
    return hashlib.blake2b(json.dumps(counted).encode(), digest_size=8).hexdigest()
