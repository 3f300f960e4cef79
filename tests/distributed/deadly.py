"""A schedule under which ranks die in the middle of what a step does. It is code of a user's, which
ranks run anyway."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch._dynamo.callback import on_compile_start
from torch.nn.modules.module import register_module_forward_hook

from checkpointing.save.staging import SaveStaging
from tests.distributed.jobs import wait_for_memory

Kills = dict[str, list[tuple[int, int, str]]]
"""By generation, (rank, step, where) of those who die in it. `where` is forward, backward, update
(after the gradients are reduced, before the weights change), save (of the step, in its copy), or
build (before any step)."""


def schedule(steps: int, lr: float, run: str, kills: Kills) -> Callable[[int], float]:
    """A rate that is `lr` from the fifth step on."""
    generation, rank = os.environ.get("PERDURE_GENERATION"), os.environ.get("RANK")
    on_compile_start(lambda _: print(f"process {os.getpid()} compiles", flush=True))
    deaths = kills.get(generation or "0", [])
    plans = {step: where for victim, step, where in deaths if f"{victim}" == rank}
    before = {step - 1 for _, step, where in deaths if where in ("forward", "backward")}
    if "build" in plans.values():
        _die()

    def rate(step: int) -> float:
        # Others ask, too. Training asks between the reduction and the update.
        if any(frame.name == "train_step" for frame in traceback.extract_stack()):
            now, soon = plans.get(step), plans.get(step + 1)
            if step in before:
                time.sleep(1)  # saves end, so that this step is copied to memory, too
            if now == "update":
                _die()
            if now == "save":
                SaveStaging._copy = _die
            if soon in ("forward", "backward"):
                _die_in(soon, lambda: _when_in_memory(Path(run), step))
        return lr * min(1.0, step / 5)

    return rate


def _die(*_: object) -> None:
    time.sleep(0.3)  # what the others do meanwhile is done
    os.kill(os.getpid(), signal.SIGKILL)


def _when_in_memory(run: Path, step: int) -> None:
    with suppress(AssertionError):
        wait_for_memory(run, step, 5)
    _die()


def _die_in(phase: str, die: Callable[[], None]) -> None:
    left = iter(range(9))  # calls of modules: then a step is in the middle of the model

    def after(_module: object, _inputs: object, output: object) -> None:
        if next(left, None) is not None:
            return
        if phase == "forward":
            die()
        elif isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: die())

    register_module_forward_hook(after)
