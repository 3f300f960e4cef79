"""Slice 4: what a checkpoint of a large model costs the steps beside it. The model is its tensors:
weights and two moments of AdamW, in float32, of random numbers that can be drawn again."""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from statistics import median
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.setting import (
    PARAMETERS,
    RunFailedError,
    Setting,
    UnsupportedError,
    device_memory,
    free_host_memory,
)
from checkpointing import CheckpointOptions, TensorCheckpointer

KINDS = ("weight", "exp_avg", "exp_avg_sq")
BYTES = 4 * len(KINDS)
"""Bytes of a parameter."""
LAYERS = 36
ROOM = 1.05
"""Memory there must be, over the tensors' own."""
LAST = 3
"""The last of the saves is the one that is measured."""
BASE_STEPS = 20
INTERVAL = 60.0
"""Seconds between checkpoints that a stall is held against."""


def save(setting: Setting, model: str, to_disk: bool) -> dict[str, Any]:
    """Save beside steps, change nothing, wipe the tensors, load them again and compare."""
    parameters = LAYERS << 16 if setting.toy else PARAMETERS.get(model) or largest(setting)
    need_room(setting, BYTES * parameters, to_disk)
    state, step = State(parameters, setting.place()), Step(setting)
    options = CheckpointOptions(keep=1, slots=1, max_shard_size="2 GB")
    directory = setting.scratch / "run" / "checkpoints"
    with closing(TensorCheckpointer(directory, options, None)) as checkpointer:
        checkpointer.prepare(**state.sections())
        for number in range(1, LAST):  # meanwhile memory is touched and pinned
            one_save(checkpointer, state, step, number, to_disk)
        usual = median(step() for _ in range(BASE_STEPS))
        found = one_save(checkpointer, state, step, LAST, to_disk)
        checkpointer.close(keep_memory=not to_disk)
    beyond = sum(max(0.0, seconds - usual) for seconds in found.steps)
    lost = found.call + beyond
    state.wipe()
    with closing(TensorCheckpointer(directory, options, None)) as checkpointer:
        began = time.monotonic()
        loaded = checkpointer.load(**state.sections())
        load_seconds = time.monotonic() - began
    if loaded != {"step": LAST}:
        raise RunFailedError(f"what was loaded is {loaded}, not step {LAST}")
    return {
        "gigabytes": BYTES * parameters / 1e9,
        "held_up_seconds": found.call,
        "staged_seconds": found.staged,
        "to_host_gb_per_s": BYTES * parameters / 1e9 / found.staged,
        "committed_seconds": found.committed,
        "usual_step_ms": usual * 1e3,
        "slowest_step_ms": max(found.steps) * 1e3,
        "lost_seconds": lost,
        "share_of_a_minute": lost / INTERVAL,
        "load_seconds": load_seconds,
        "loaded_from_memory": int(checkpointer.loaded_from == "memory"),
        "wrong_tensors": len(state.wrong()),
    }


def largest(setting: Setting) -> int:
    """Parameters whose tensors fit on the GPU, and their copy into shared memory: up to 8B."""
    room = min(free_host_memory(), device_memory() if setting.on_gpu() else math.inf)
    return min(PARAMETERS["8B"], int(room / ROOM / BYTES))


def need_room(setting: Setting, nbytes: int, to_disk: bool) -> None:
    """Raises UnsupportedError where the tensors, or their copy, do not fit."""
    if setting.on_gpu() and nbytes * ROOM > device_memory():
        raise UnsupportedError(
            f"{nbytes / 1e9:.0f} GB of tensors, and {device_memory() / 1e9:.0f} GB on the GPU"
        )
    if nbytes * ROOM > free_host_memory():
        raise UnsupportedError(
            f"a copy of {nbytes / 1e9:.0f} GB, and {free_host_memory() / 1e9:.0f} GB of shared "
            "memory"
        )
    free = shutil.disk_usage(setting.scratch).free
    if to_disk and 2 * nbytes * ROOM > free:  # the one before goes once the next is there
        raise UnsupportedError(f"2 x {nbytes / 1e9:.0f} GB on disk, {free / 1e9:.0f} GB are free")


class State:
    """Tensors of a model that has so many parameters."""

    def __init__(self, parameters: int, device: str) -> None:
        rows = parameters // LAYERS // 1024
        self.tensors = {
            f"layers.{layer}.{kind}": torch.empty(rows, 1024, device=device)
            for layer in range(LAYERS)
            for kind in KINDS
        }
        for tensor, expected in self._with_expected():
            tensor.copy_(expected)

    def sections(self) -> dict[str, Any]:
        """As a TensorCheckpointer takes them."""
        model = {n: t for n, t in self.tensors.items() if n.endswith(".weight")}
        return {
            "model": model,
            "optimizer": {n: t for n, t in self.tensors.items() if n not in model},
        }

    def wipe(self) -> None:
        """Make every value wrong."""
        for tensor in self.tensors.values():
            tensor.fill_(-1.0)

    def wrong(self) -> list[Tensor]:
        """Tensors that differ in any bit from what they were."""
        return [tensor for tensor, expected in self._with_expected() if not tensor.equal(expected)]

    def _with_expected(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor, and what it should hold: drawn on the device, where it is fast."""
        for number, tensor in enumerate(self.tensors.values()):
            generator = torch.Generator(tensor.device).manual_seed(number)
            yield tensor, torch.empty_like(tensor).uniform_(generator=generator)


class Step:
    """Some matrix products, as large as those of a layer, and a wait for them."""

    def __init__(self, setting: Setting) -> None:
        size = 256 if setting.toy else 8192
        self._left, self._right = (
            torch.randn(size, size, device=setting.place()).bfloat16() for _ in range(2)
        )
        self._times = 4 if setting.toy else 40

    def __call__(self) -> float:
        """Seconds of it."""
        began = time.perf_counter()
        for _ in range(self._times):
            result = self._left @ self._right
        result[0, 0].item()
        return time.perf_counter() - began


class Saved:
    """What a save took, in seconds."""

    def __init__(self) -> None:
        self.call = self.staged = 0.0
        self.committed: float | None = None
        self.steps: list[float] = []
        """Those that ran beside it."""


def one_save(
    checkpointer: TensorCheckpointer, state: State, step: Step, number: int, to_disk: bool
) -> Saved:
    """Save, and take steps until the save has ended."""
    found, began = Saved(), time.perf_counter()
    saved = checkpointer.save(
        number, **state.sections(), state={"step": number}, files={}, memory_only=not to_disk
    )
    found.call = time.perf_counter() - began
    if not saved:
        raise RunFailedError(f"save {number} was not begun: {checkpointer.outcomes()}")

    def wait() -> None:
        checkpointer.wait_staged()
        found.staged = time.perf_counter() - began

    waiting = Thread(target=wait)
    waiting.start()
    found.steps.append(step())  # a small save may have ended before it
    while waiting.is_alive():
        found.steps.append(step())
    while to_disk and not (outcomes := checkpointer.outcomes()):
        found.steps.append(step())
    if to_disk:
        if outcomes[0].error:
            raise RunFailedError(str(outcomes[0].error))
        found.committed = outcomes[0].seconds
    checkpointer.wait()
    return found
