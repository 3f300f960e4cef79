"""Checkpointer: the face for a loop of one's own. state.py takes apart what the loop gives it, and
tensor_checkpointer.py saves and loads that."""

import atexit
import hashlib
import json
import logging
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import CheckpointError, WrongModel
from checkpointing.format.layout import TensorMeta, parse_step
from checkpointing.format.optimizers import OptimizerTargets
from checkpointing.options import CheckpointOptions
from checkpointing.ranks import Ranks, failing_alike
from checkpointing.save.messages import SaveOutcome
from checkpointing.save.planning import refuse_different, replicas, tell
from checkpointing.state import (
    Parts,
    State,
    put_back,
    refuse_ties,
    refuse_values,
    take_apart,
    targets_of,
    unwrapped,
)
from checkpointing.storage.place import Place
from checkpointing.storage.steps import list_steps, newest_checkpoint
from checkpointing.tensor_checkpointer import TensorCheckpointer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Checkpointer:
    """Saves and loads what a training loop consists of. Methods are called on all ranks. A step
    whose trained parameters or optimizer state hold NaN or infinity is neither saved nor loaded.

        checkpointer = Checkpointer("checkpoints", keep=2)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        step = checkpointer.load(state) or 0
        checkpointer.guard(optimizer)
        …
        checkpointer.save(step, state)

    A save holds the loop up until it is agreed on: what may change soon is copied then, and the
    rest while training goes on, up to the next step of the optimizers that are guarded. A process
    of each node writes what was copied. When the program ends, it waits for the last save.

    Args:
        directory: holds the steps: a path, or a URL such as "s3://bucket/folder". Made at the first
            save.
        group: of the ranks that save and load together; it carries CPU tensors. None: all of the
            default process group, or this process alone where there is none.
        options: fields of `CheckpointOptions`, such as keep=2. `when_busy` is "wait" here, unless
            given.

    Raises:
        TypeError, ValueError: an option that there is not, or with a wrong value.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if of_recipes := sorted({"directory", "every"} & options.keys()):
            raise TypeError(f"{of_recipes[0]} is for recipes; the loop decides when it saves")
        given = CheckpointOptions(**{"when_busy": "wait", **options})
        group = group or _default_group()
        self._ranks = Ranks(group)
        self._tensors = TensorCheckpointer(directory, given, group)
        self._guarded: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._newest: int | None = None
        """The step that `load` would take now, once `_looked`."""
        self._own_step: int | None = None
        """The step that was last loaded or saved."""
        self._looked = False
        self._outcomes: list[SaveOutcome] = []
        self._process = os.getpid()
        atexit.register(self._at_exit)

    @property
    def directory(self) -> Place:
        """Where the steps lie, absolute: a path or the URL of an object store."""
        return self._tensors.directory

    @property
    def loaded_from(self) -> Literal["memory", "storage"] | None:
        """Where `load` found what it loaded."""
        return self._tensors.loaded_from

    def load(self, state: State, step: int | None = None) -> int | None:
        """Load into the objects of `state`, in place: the newest good checkpoint, or what the last
        run left in memory if that is newer. From whatever number of ranks it was saved.

        Args:
            state: modules, optimizers, tensors, and objects with state_dict and load_state_dict, by
                what they are called. Those that were saved.
            step: load this one, from storage; the first rank's word counts.

        Returns:
            The step; None if there is no checkpoint, and nothing was changed.

        Raises:
            WrongModel: the checkpoint is of other objects, names, shapes or parameter groups, or of
                dtypes that do not convert; floating point numbers do. Nothing was changed.
            DamagedCheckpoint: there are checkpoints, but no good one.
            StorageError: a checkpoint cannot be read.
            CheckpointError: there is no such step.
            ValueError: the state cannot be loaded into.
        """
        state = {key: unwrapped(value) for key, value in state.items()}
        parts = self.on_all(lambda: take_apart(state))
        wanted = self.on_main(lambda: None if step is None else _whole(step))

        def refuse(saved: Mapping[str, Any]) -> None:
            told = saved.get("groups", {}), saved.get("kinds", {})
            refuse_values(state, self._own(saved), parts.groups, *told)
            refuse_ties(parts.tied, saved.get("tied"))

        made: dict[str, OptimizerTargets] = {}

        def targets(saved: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> dict[str, Tensor]:
            made.update(targets_of(state, parts, saved.get("trees", {}), metas))
            return {name: one for of in made.values() for name, one in of.tensors.items()}

        def restore(saved: Mapping[str, Any]) -> None:
            refuse(saved)  # of other ranks than the first
            put_back(state, self._own(saved))
            for of in made.values():
                of.put()

        found = self._tensors.load(
            model=parts.model,
            optimizer=targets,
            step=wanted,
            finite=parts.trained,
            refuse=refuse,
        )
        if wanted is None:
            self._newest, self._looked = (int(found["step"]) if found else None), True
        if found is None:
            return None
        self.on_all(lambda: restore(found))
        self._own_step = int(found["step"])
        if self._tensors.newer_than_storage:  # memory may be lost with its machine
            self.save(found["step"], state)
        return int(found["step"])

    def guard(self, *optimizers: torch.optim.Optimizer) -> None:
        """Have each step of these optimizers wait until their tensors are copied. `save` then
        returns before they are, if all optimizers of its state are guarded; else it waits. The
        writer process starts meanwhile."""
        self._tensors.start_early()
        for optimizer in map(unwrapped, optimizers):
            if optimizer not in self._guarded:
                self._guarded.add(optimizer)
                optimizer.register_step_pre_hook(lambda *_: self.wait_staged())

    def save(
        self,
        step: int,
        state: State,
        *,
        wait: bool = False,
        files: Mapping[str, bytes] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Begin to save; what is saved is what the state is now, whatever happens to it afterwards.
        Buffers of modules become those of the first rank that has them, on all ranks.

        Args:
            step: names the checkpoint: a whole number, from 0 on, the same on all ranks.
            state: as for `load`. Objects whose state differs among ranks have all of it saved.
            wait: return when the checkpoint is in storage.
            files: others that are to lie beside the tensors, by name, such as config.json or
                additional_chat_templates/tool_use.jinja.
            metrics: such as {"validation_loss": 2.1}, for `keep_best`.

        Returns:
            False if it is not saved: an earlier one is still being saved and `when_busy` is "skip",
            or the writer process is gone. `outcomes` has the reason.

        Raises:
            ValueError: the step or the state cannot be saved, on whatever rank, or plain tensors
                differ by rank; says what and why.
            CheckpointError: storage has a newer step, which the next `load` would take; or this
                step, and it was neither loaded nor saved here.
            SaveFailed: with `wait`.
        """
        state = {key: unwrapped(value) for key, value in state.items()}
        optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        guarded = bool(optimizers) and all(one in self._guarded for one in optimizers)

        def take() -> tuple[int, Parts, bytes, tuple[int, bytes]]:
            number = _whole(step)
            parts = take_apart(state, self._guarded if guarded else ())
            buffers = {name: f"{one.dtype} {one.shape}" for name, one in parts.buffers.items()}
            nbytes = sum(one.nbytes for one in parts.buffers.values())
            digest = _digest([parts.values, parts.groups, parts.trees])
            return number, parts, digest, (nbytes, _digest(buffers))

        step, parts, digest, buffers = self.on_all(take)
        values = self._agreed(step, parts, digest, buffers)
        self._look()
        there = self._newest
        if there is not None and (step < there or step == there != self._own_step):
            how = f"older than step {there}" if step < there else "there already"
            raise CheckpointError(
                f"step {step} is {how} in {self.directory}, which the next load would take: call "
                "load before training, move newer steps away, or save elsewhere"
            )
        saved = self._tensors.save(
            step,
            model=parts.model,
            optimizer=parts.optimizer,
            state={**(metrics or {}), "step": step, **values},
            files=files or {},
            wait=wait,
            finite=parts.trained,
        )
        if saved:
            self._newest = self._own_step = step
        if not guarded:
            self.wait_staged()
        if wait:
            self.wait()
        self._hear()
        return saved

    def wait_staged(self) -> None:
        """Until everything may change again. `guard` sees to it; it is for a loop that changes
        parameters otherwise than by an optimizer. Asks no other rank."""
        self._tensors.wait_staged()

    def outcomes(self) -> list[SaveOutcome]:
        """Saves that ended since the last call, good or bad. Does not wait. Failures are logged as
        warnings, too."""
        self._hear()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Until nothing is being saved.

        Raises:
            SaveFailed: the last save failed; the checkpoints before it are untouched.
        """
        self._tensors.wait()

    def newest(self) -> int | None:
        """The newest step there is, good or not; None: there is none."""

        def newest() -> int | None:
            return next((parse_step(path.name) for path in list_steps(self.directory)), None)

        return self.on_main(newest)

    def move(self, directory: str | Path) -> None:
        """Save and load in another directory from now on, with the memory and the writer processes
        that there are. Waits for the save that is being written. Nothing in memory is left to a
        restart from then on."""
        self._tensors.move(directory)
        self._newest, self._own_step, self._looked = None, None, False

    def on_all(self, work: Callable[[], T]) -> T:
        """work() on every rank, such as what a state is taken from: an error of one is one of all,
        and no rank waits for another that has failed."""
        with failing_alike():
            return self._ranks.each(work)

    def on_main(self, work: Callable[[], T]) -> T:
        """work() on the first rank; its result, or its error, on all. The result is a plain value:
        None, a number, text, bytes, and lists, tuples and mappings of such."""
        with failing_alike():
            return self._ranks.on_main(work)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """work() on every rank; the results of all, in order of ranks, on all. Results as of
        `on_main`; an error of one rank is one of all."""
        with failing_alike():
            return self._ranks.together(work)

    def close(self) -> None:
        """Wait for the save that is being written, and end the writer processes."""
        atexit.unregister(self._at_exit)
        self._tensors.close()
        self._hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """As `close`; after an exception, which others may not have, it waits 10 s at most, unless
        it has a true `of_all_ranks`, as that of a job that pauses."""
        atexit.unregister(self._at_exit)
        self._tensors.__exit__(kind)
        self._hear()

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # no fork of it
            # What ended the interpreter stands there.
            self.__exit__(getattr(sys, "last_type", None))

    def _hear(self) -> None:
        """Take note of saves that have ended."""
        for outcome in self._tensors.outcomes():
            self._outcomes.append(outcome)
            if outcome.error and self._ranks.is_main:
                logger.warning("%s", outcome.error)

    def _look(self) -> None:
        """Learn the newest step in storage, before this run saves any."""
        if self._looked:
            return

        def newest() -> int | None:
            path = newest_checkpoint(self.directory)
            return parse_step(path.name) if path else None

        self._newest, self._looked = self.on_main(newest), True

    def _agreed(
        self, step: int, parts: Parts, digest: bytes, buffers: tuple[int, bytes]
    ) -> dict[str, Any]:
        """The values of all ranks, once where they are equal, as their digests tell, and their
        parameter groups. Buffers become those of the first rank.

        Raises:
            ValueError: ranks save different steps, or hold different replicas.
        """
        weights = {name: one for name, one in parts.model.items() if name not in parts.buffers}
        whole = replicas(weights, parts.optimizer, step) if len(self._ranks.all) > 1 else {}
        with failing_alike():
            told = self._ranks.together(
                lambda: (step, digest, buffers, parts.tied, tell(whole, step))
            )
        if len(steps := sorted({number for number, *_ in told})) > 1:
            raise ValueError(f"ranks save different steps: {', '.join(map(str, steps))}")
        refuse_different(self._ranks, whole, step, [held for *_, held in told])
        self._ranks.share(parts.buffers.values(), [buffers for _, _, buffers, *_ in told])
        tied = [list(names) for names in {tuple(one) for *_, own, _ in told for one in own}]
        same = {"kinds": parts.kinds, "tied": sorted(tied)}
        if len({of_values for _, of_values, *_ in told}) == 1:
            return {"values": parts.values, "groups": parts.groups, "trees": parts.trees, **same}
        ranks = self._ranks.together(lambda: (parts.values, parts.groups, parts.trees))
        first = ranks[0][0]
        differing = {key for key in first if any(one[key] != first[key] for one, *_ in ranks)}
        return {
            "values": {key: one for key, one in first.items() if key not in differing},
            "values_by_rank": {key: [one[key] for one, *_ in ranks] for key in sorted(differing)},
            "groups": {
                key: [
                    list(dict.fromkeys(chain(*of_ranks)))
                    for of_ranks in zip_longest(*(one[key] for _, one, _ in ranks), fillvalue=())
                ]
                for key in parts.groups
            },
            "trees": {key: _united(key, [one[key] for *_, one in ranks]) for key in parts.trees},
            **same,
        }

    def _own(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of what `_agreed` gave."""
        if "values" not in saved:
            raise WrongModel(
                f"{self.directory} holds checkpoints of another program, such as Perdure's trainer"
            )
        values, size = dict(saved["values"]), len(self._ranks.all)
        for key, of_ranks in saved.get("values_by_rank", {}).items():
            if len(of_ranks) != size:
                raise WrongModel(
                    f"{key}: its state differed among the {len(of_ranks)} ranks that saved it, and "
                    f"{size} load it; load with as many ranks, or let its state_dict be the same "
                    "on all"
                )
            values[key] = of_ranks[self._ranks.place]
        return values


def _united(key: str, of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks keep of an optimizer, by FQN.

    Raises:
        ValueError: they keep other numbers for the same parameter.
    """
    found: dict[str, Any] = {}
    for rank, trees in enumerate(of_ranks):
        for name, tree in trees.items():
            if found.setdefault(name, tree) != tree:
                raise ValueError(
                    f"{key}: the state of {name} on rank {rank} has other numbers, or another "
                    "form, than on a rank before: an optimizer keeps the same on all ranks"
                )
    return found


def _whole(step: Any) -> int:
    """A step, which numpy or torch may hold.

    Raises:
        ValueError: it is no whole number, or below 0.
    """
    try:
        number = int(operator.index(step))
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step {step!r}: name a checkpoint by a whole number, from 0 on")
    return number


def _digest(value: Any) -> bytes:
    """Digest of what JSON takes."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _default_group() -> dist.ProcessGroup | None:
    """All ranks, over a group that carries CPU tensors; None without a process group. On all
    ranks."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if world is not None and torch.device("cpu") in world._device_types:
        return world
    made: Any = dist.new_group(backend="gloo")  # of all ranks, so it is no number
    return made
