"""Checkpointer: the interface for any training loop. state.py converts the loop's state to named
tensors, which tensor_checkpointer.py saves and loads."""

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
from torch.distributed import distributed_c10d

from checkpointing.errors import CheckpointError, WrongModel
from checkpointing.format.layout import TensorMeta, parse_step
from checkpointing.format.optimizers import OptimizerFormatTargets
from checkpointing.options import CheckpointOptions
from checkpointing.ranks import RankGroup, failing_alike
from checkpointing.save.messages import SaveOutcome
from checkpointing.save.planning import (
    SampleDigest,
    replicas_to_compare,
    require_equal,
    sample_digest,
)
from checkpointing.state import (
    State,
    StateParts,
    put_back,
    refuse_ties,
    refuse_values,
    take_apart,
    targets_of,
    unwrapped,
)
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.steps import list_steps, newest_checkpoint
from checkpointing.tensor_checkpointer import TensorCheckpointer

logger = logging.getLogger(__name__)
T = TypeVar("T")

SaveReport = tuple[int, bytes, tuple[int, bytes], list[list[str]], SampleDigest]
"""Values of a save that the ranks compare: step, digest of plain values, (bytes and digest of
buffers), names of tied tensors, digest of replicas."""


class Checkpointer:
    """Saves and loads the state of a training loop. Methods are called on all ranks. A step with
    NaN or infinity in trained parameters or optimizer state is neither saved nor loaded.

        checkpointer = Checkpointer("checkpoints", keep=2)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        step = checkpointer.load(state) or 0
        checkpointer.guard(optimizer)
        …
        checkpointer.save(step, state)

    `save` blocks the loop until all ranks agree on it. It then copies the tensors that no guarded
    optimizer updates. If all optimizers of the state are guarded, the other tensors are copied
    while training continues, and the next step of these optimizers waits for this copy; else `save`
    waits for it. A writer process of each node writes the copies. At its exit the program waits for
    the last save.

    After its process group was destroyed, a process may create a second Checkpointer for the same
    directory. A running save of the first is then given up. The second can load the last copy that
    the first left in memory.

    Args:
        directory: directory of the steps: a path, or a URL such as "s3://bucket/folder". Created at
            the first save.
        group: the ranks that save and load together; its backend must support CPU tensors, as gloo
            does. None: the default process group, or this process alone if there is none.
        options: fields of `CheckpointOptions`, such as keep=2. Unlike in recipes, the default of
            `when_busy` is "wait".

    Raises:
        TypeError, ValueError: an option does not exist, or has a wrong value.
    """

    def __init__(
        self, directory: str | Path, *, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        if of_recipes := sorted({"directory", "every"} & options.keys()):
            raise TypeError(f"{of_recipes[0]} is for recipes; the loop decides when it saves")
        given = CheckpointOptions(**{"when_busy": "wait", **options})
        group = group or _default_group()
        self._ranks = RankGroup(group)
        self._tensors = TensorCheckpointer(directory, given, group)
        # Weak references, so that a replaced optimizer and its state can be freed.
        self._guarded: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._newest: int | None = None
        """The step that `load` would load now. Valid once `_looked` is true."""
        self._own_step: int | None = None
        """The step that this object loaded or saved last."""
        self._looked = False
        self._outcomes: list[SaveOutcome] = []
        self._process = os.getpid()
        for last in [one for one in _open if one._is_left_behind(self.directory)]:
            last._abandon()
        _open.add(self)
        atexit.register(self._at_exit)  # a loop without `with` must not lose its last save

    @property
    def directory(self) -> StoragePlace:
        """Directory of the checkpoints: an absolute path, or the URL of an object store."""
        return self._tensors.directory

    @property
    def loaded_from(self) -> Literal["memory", "storage"] | None:
        """Origin of the step that `load` loaded; None: it loaded none."""
        return self._tensors.loaded_from

    def load(self, state: State, step: int | None = None) -> int | None:
        """Load into the objects of `state`, in place: the newest good checkpoint, or a newer step
        that the last run left in memory, which is then saved. Any number of ranks may have saved
        the step.

        Args:
            state: the objects that were saved, by key: modules, optimizers, tensors, and objects
                with state_dict and load_state_dict.
            step: load this step, from storage; the value on the first rank is used.

        Returns:
            The step; None if there is no checkpoint, with nothing changed.

        Raises:
            WrongModel: the checkpoint is of other objects, names, shapes or parameter groups, or of
                dtypes that do not convert; floating point numbers do. Nothing was changed.
            DamagedCheckpoint: there are checkpoints, but no good one.
            StorageError: a checkpoint cannot be read.
            CheckpointError: there is no such step.
            ValueError: part of `state` cannot be loaded into; the message says which and why.
        """
        state = {key: unwrapped(value) for key, value in state.items()}
        parts = self.on_all(lambda: take_apart(state))
        wanted = self.on_main(lambda: None if step is None else _whole(step))

        def refuse(saved: Mapping[str, Any]) -> None:
            saved_parts = saved.get("groups", {}), saved.get("kinds", {})
            refuse_values(state, self._own(saved), parts.groups, *saved_parts)
            refuse_ties(parts.tied, saved.get("tied"))

        loading: dict[str, OptimizerFormatTargets] = {}

        def targets(saved: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> dict[str, Tensor]:
            loading.update(targets_of(state, parts, saved.get("trees", {}), metas))
            return {name: one for of in loading.values() for name, one in of.tensors.items()}

        def restore(saved: Mapping[str, Any]) -> None:
            refuse(saved)  # the load called `refuse` on the first rank only
            put_back(state, self._own(saved))
            for of in loading.values():
                of.put()

        found = self._tensors.load(
            model=parts.model, optimizer=targets, step=wanted, finite=parts.trained, refuse=refuse
        )
        if wanted is None:
            self._newest, self._looked = (int(found["step"]) if found else None), True
        if found is None:
            return None
        self.on_all(lambda: restore(found))
        self._own_step = int(found["step"])
        # A step that is only in memory would be lost with its machine.
        if self._tensors.newer_than_storage:
            self.save(found["step"], state)
        return int(found["step"])

    def guard(self, *optimizers: torch.optim.Optimizer) -> None:
        """Make each step of these optimizers wait until their tensors are copied. If all optimizers
        in the state are guarded, `save` returns before the copy is complete; else `save` waits for
        the copy. Also starts the writer process."""
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
        """Begin to save the state as it is now; later changes have no effect. Buffers of modules
        are first overwritten on all ranks with those of the first rank that has them.

        Args:
            step: names the checkpoint: a whole number from 0 on, equal on all ranks.
            state: the objects to save, by key: modules, optimizers, tensors, and objects with
                state_dict and load_state_dict. If the state_dict of such an object differs among
                ranks, that of each rank is saved.
            wait: return only once the checkpoint is in storage.
            files: other files to store beside the tensors, by name, such as config.json or
                additional_chat_templates/tool_use.jinja.
            metrics: values for `keep_best`, such as {"validation_loss": 2.1}.

        Returns:
            False if nothing is saved: an earlier save is running and `when_busy` is "skip", or the
            writer process is gone. `outcomes` has the reason.

        Raises:
            ValueError: the step or the state of some rank cannot be saved, or plain tensors differ
                between ranks. The message says which and why.
            CheckpointError: storage has a newer step, which the next `load` would load; or storage
                has this step, which this object has neither loaded nor saved.
            SaveFailed: with `wait`, if the checkpoint could not be written.
        """
        state = {key: unwrapped(value) for key, value in state.items()}
        optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        # An optimizer that does not wait could change tensors during the copy.
        guarded = bool(optimizers) and all(one in self._guarded for one in optimizers)

        held: list[StateParts] = []

        def report() -> SaveReport:
            number = _whole(step)
            held.append(take_apart(state, self._guarded if guarded else ()))
            return self._report(number, held[0])

        # one exchange carries all values that ranks must agree on, and the error of any rank
        reports, parts = self.gather(report), held[0]
        step, values = reports[0][0], self._agreed(parts, reports)
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
        # without guards only this wait keeps the next update from changing tensors during the copy
        if not guarded:
            self.wait_staged()
        if wait:
            self.wait()
        self._collect_outcomes()
        return saved

    def wait_staged(self) -> None:
        """Wait until all tensors are copied and may change. Optimizers that were given to `guard`
        call this. Call it yourself before the loop changes tensors in another way. Each rank calls
        it by itself."""
        self._tensors.wait_staged()

    def outcomes(self) -> list[SaveOutcome]:
        """Returns the outcomes of saves that ended since the last call. Does not wait. Failures are
        also logged as warnings."""
        self._collect_outcomes()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> None:
        """Wait until no save is running. Raises SaveFailed if the last save failed."""
        self._tensors.wait()

    def newest(self) -> int | None:
        """Returns the newest step in storage, undamaged or not; None if there is none."""

        def newest() -> int | None:
            return next((parse_step(path.name) for path in list_steps(self.directory)), None)

        return self.on_main(newest)

    def move(self, directory: str | Path) -> None:
        """Save and load in another directory from now on. Waits for the running save. The first
        move ends the writer processes; later moves keep processes and memory. After a move no
        restart can use the copies in memory."""
        self._tensors.move(directory)
        self._newest, self._own_step, self._looked = None, None, False

    def on_all(self, work: Callable[[], T]) -> T:
        """Run work() on every rank, such as a function that collects a state; returns this rank's
        result. An error on one rank is raised on all, so that no rank waits for a failed one."""
        with failing_alike():
            return self._ranks.each(work)

    def on_main(self, work: Callable[[], T]) -> T:
        """Run work() on the first rank; returns its result, or raises its error, on all. The result
        is a plain value: None, a number, text, bytes, or lists, tuples and mappings of these."""
        with failing_alike():
            return self._ranks.on_main(work)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run work() on every rank; returns all results, in the order of ranks, on all. The results
        are plain values as for `on_main`; an error on one rank is raised on all."""
        with failing_alike():
            return self._ranks.together(work)

    def close(self) -> None:
        """Wait for the running save, and end the writer process of each node."""
        self._forget()
        self._tensors.close()
        self._collect_outcomes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Like `close`. After an exception, wait at most 10 s for the running save and other ranks,
        unless its class sets `of_all_ranks = True`, which says that every rank raises it."""
        self._forget()
        self._tensors.__exit__(kind)
        self._collect_outcomes()

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # not in a forked child
            # sys.last_type is the exception that ended the interpreter.
            self.__exit__(getattr(sys, "last_type", None))

    def _forget(self) -> None:
        _open.discard(self)
        atexit.unregister(self._at_exit)

    def _is_left_behind(self, directory: StoragePlace) -> bool:
        """Whether this object saves in `directory` for a process group that no longer exists: the
        loop that created it has failed, and the process starts another attempt."""
        group = self._ranks.group
        known = distributed_c10d._world.pg_map
        return self.directory == directory and group is not None and group not in known

    def _abandon(self) -> None:
        """End the running save without a checkpoint, and leave the last copy in memory, for this
        process to load."""
        self._forget()
        self._tensors.interrupt()
        self._tensors.abandon()

    def _collect_outcomes(self) -> None:
        for outcome in self._tensors.outcomes():
            self._outcomes.append(outcome)
            if outcome.error and self._ranks.is_main:
                logger.warning("%s", outcome.error)

    def _look(self) -> None:
        """Read the newest step in storage, unless `load` or an earlier `save` has read it."""
        # Once read, it changes only by this run's own saves, which `save` records.
        if self._looked:
            return

        def newest() -> int | None:
            path = newest_checkpoint(self.directory)
            return parse_step(path.name) if path else None

        self._newest, self._looked = self.on_main(newest), True

    def _report(self, step: int, parts: StateParts) -> SaveReport:
        buffers = {name: f"{one.dtype} {one.shape}" for name, one in parts.buffers.items()}
        nbytes = sum(one.nbytes for one in parts.buffers.values())
        digest = _digest([parts.values, parts.groups, parts.trees])
        sample = sample_digest(self._replicas(step, parts), step)
        return step, digest, (nbytes, _digest(buffers)), parts.tied, sample

    def _replicas(self, step: int, parts: StateParts) -> dict[str, Tensor]:
        """Returns the tensors whose replicas the ranks compare: all plain weights, without buffers,
        and the plain optimizer tensors that `step` selects. {} if there is only one rank."""
        weights = {name: one for name, one in parts.model.items() if name not in parts.buffers}
        several = len(self._ranks.all) > 1
        return replicas_to_compare(weights, parts.optimizer, step) if several else {}

    def _agreed(self, parts: StateParts, reports: list[SaveReport]) -> dict[str, Any]:
        """Returns the plain values of all ranks, stored once if all ranks have the same, and the
        parameter groups. Buffers become those of the first rank. Called on all ranks. Raises
        ValueError if ranks save different steps, or hold different replicas."""
        if len(steps := sorted({number for number, *_ in reports})) > 1:
            raise ValueError(f"ranks save different steps: {', '.join(map(str, steps))}")
        samples = [sample for *_, sample in reports]
        require_equal(self._ranks, self._replicas(steps[0], parts), steps[0], samples)
        self._ranks.share(parts.buffers.values(), [buffers for _, _, buffers, *_ in reports])
        tied = [list(names) for names in {tuple(one) for *_, own, _ in reports for one in own}]
        same = {"kinds": parts.kinds, "tied": sorted(tied)}
        if len({of_values for _, of_values, *_ in reports}) == 1:
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
        """Returns this rank's plain values from the result of `_agreed`."""
        if "values" not in saved:
            raise WrongModel(
                f"{self.directory} holds checkpoints of another program, such as Perdure's trainer;"
                " load them with that program, or give another directory"
            )
        values, size = dict(saved["values"]), len(self._ranks.all)
        for key, of_ranks in saved.get("values_by_rank", {}).items():
            if len(of_ranks) != size:
                raise WrongModel(
                    f"{key}: its state differed among the {len(of_ranks)} ranks that saved it, but "
                    f"{size} ranks load it; load with as many ranks, or let its state_dict be the "
                    "same on all ranks"
                )
            values[key] = of_ranks[self._ranks.place]
        return values


_open: WeakSet[Checkpointer] = WeakSet()
"""Checkpointers of this process that are not closed."""


def _united(key: str, of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge `CheckpointOptimizerState.trees` (FQN → tree as JSON) of all ranks. Raises ValueError
    if ranks have different trees for one parameter."""
    found: dict[str, Any] = {}
    for rank, trees in enumerate(of_ranks):
        for name, tree in trees.items():
            if found.setdefault(name, tree) != tree:
                raise ValueError(
                    f"{key}: the state of {name} on rank {rank} has other numbers, or another "
                    "form, than on an earlier rank: keep this state equal on all ranks"
                )
    return found


def _whole(step: Any) -> int:
    """Returns a step, which may be a numpy or torch integer, as an int. Raises ValueError if it is
    no whole number, or is negative."""
    try:
        number = int(operator.index(step))
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step {step!r}: name a checkpoint by a whole number, from 0 on")
    return number


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _default_group() -> dist.ProcessGroup | None:
    """Returns a group of all ranks that carries CPU tensors; None without a process group. Called
    on all ranks."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if world is not None and torch.device("cpu") in world._device_types:
        return world
    # Not NON_GROUP_MEMBER, as all ranks are in the group.
    group: Any = dist.new_group(backend="gloo")
    return group
