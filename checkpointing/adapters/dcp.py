"""`save`, `async_save` and `load` with the arguments of torch.distributed.checkpoint's functions: a
nested state_dict, and the path of a checkpoint. In place of
`import torch.distributed.checkpoint as dcp` write:

    from checkpointing.adapters import dcp"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import CheckpointError, SaveFailed, WrongModel
from checkpointing.format.layout import split_step
from checkpointing.state import Stateful

__all__ = ["async_save", "load", "save"]
VALUES = "values"
"""Key of the object that holds everything except tensors."""


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | Path,
    process_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> None:
    """Save; returns once the checkpoint is in storage. Called on all ranks of the group.

    Args:
        state_dict: nested dictionaries and lists of tensors and plain values; at the top level also
            objects with state_dict. Names of tensors are joined by dots.
        checkpoint_id: a path or a URL. DIRECTORY/step-00000100 names a step of that directory,
            which can be written once. At any other path a new checkpoint replaces the previous one.
        process_group: carries CPU tensors; None: all ranks.
        others: DCP's other arguments, such as planner, which are not supported.

    Raises:
        TypeError: one of `others` is given.
        ValueError: part of the state_dict cannot be saved; the message says which and why.
        CheckpointError: the step, or a newer step in its directory, exists.
        SaveFailed: the checkpoint could not be written.
    """
    _refuse("save", others)
    _begin(state_dict, checkpoint_id, process_group, wait=True)


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | Path,
    process_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> "Future[None]":
    """Begin to save; returns once the state_dict is copied and may change. Arguments and errors are
    those of `save`, except SaveFailed. Returns a future, done when the checkpoint is in storage.
    Its `result` waits for that, and raises SaveFailed if the checkpoint could not be written. The
    next save to its directory waits for it."""
    _refuse("async_save", others)
    checkpointer = _begin(state_dict, checkpoint_id, process_group, wait=False)
    _PENDING[checkpointer] = _Saving(checkpointer)
    return _PENDING[checkpointer]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | Path,
    process_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> None:
    """Load what `save` saved: tensors in place, other values into the dictionaries and lists that
    hold them. Called on all ranks of the group; the number of ranks that saved does not matter.

    Raises:
        WrongModel: the state_dict has other names or shapes than were saved, or dtypes that do not
            convert; floating point numbers do. Unlike DCP, no part of a checkpoint is loaded alone.
        CheckpointError: there is no checkpoint, or no good one.
        TypeError: one of `others` is given: DCP's other arguments are not supported.
    """
    _refuse("load", others)
    checkpointer, step = _opened(checkpoint_id, process_group)
    plain = checkpointer.on_all(lambda: _plain(state_dict))
    state = checkpointer.on_all(lambda: _state(plain))
    try:
        found = checkpointer.load(state, step)
    except WrongModel as error:
        raise WrongModel(
            f"{error}; give dcp.load all that was saved, or load some tensors with "
            "checkpointing.load_model"
        ) from error
    if found is None:
        raise CheckpointError(f"{checkpointer.directory} has no checkpoint; save one first")

    def put_back() -> None:
        for key, value in state_dict.items():
            if isinstance(value, Stateful):
                value.load_state_dict(plain[key])
            else:
                state_dict[key] = plain[key]

    checkpointer.on_all(put_back)


_Key = tuple[int, str, dist.ProcessGroup | None]
_KEPT: dict[_Key, Checkpointer] = {}
"""(process, directory, group) → Checkpointer, whose memory and writers the next save reuses. Paths
that name no step share one Checkpointer of their group, under directory "". Each Checkpointer has a
single slot, as its saves wait for each other."""

_PENDING: dict[Checkpointer, "_Saving"] = {}
"""Checkpointer → its last save, until the next call has waited for this save."""


class _Saving(Future[None]):
    """A running save. No thread completes this future: `result` and `exception` wait for the save
    themselves, on each rank."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        super().__init__()
        self._checkpointer = checkpointer

    def settle(self) -> None:
        if super().done():
            return
        try:
            self._checkpointer.wait()
            self.set_result(None)
        except SaveFailed as failed:
            self.set_exception(failed)

    def done(self) -> bool:
        if not super().done() and self._checkpointer.outcomes():
            self.settle()
        return super().done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is in storage; ignores the timeout. Raises SaveFailed if it
        could not be written."""
        self.settle()
        super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended; returns why there is no checkpoint, or None."""
        self.settle()
        return super().exception()


def _refuse(name: str, others: Mapping[str, Any]) -> None:
    given = [key for key, value in others.items() if value not in (None, False)]
    if given:
        raise TypeError(
            f"dcp.{name}({given[0]}=…): is not supported, as only whole state_dicts are saved and "
            "loaded, under a checkpoint_id; leave it out"
        )


def _begin(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | Path,
    group: dist.ProcessGroup | None,
    *,
    wait: bool,
) -> Checkpointer:
    checkpointer, step = _opened(checkpoint_id, group)
    newest = checkpointer.newest()
    if step is not None and step == newest:
        raise CheckpointError(f"{checkpoint_id} exists already; move it away, or name another")
    if step is None:
        step = 0 if newest is None else newest + 1  # keep=1 then deletes the previous checkpoint
    state = checkpointer.on_all(lambda: _state(_plain(state_dict)))
    checkpointer.save(step, state, wait=wait)
    return checkpointer


def _opened(path: str | Path, group: dist.ProcessGroup | None) -> tuple[Checkpointer, int | None]:
    """Returns the Checkpointer for a checkpoint_id, and the step if it names one."""
    directory, step = split_step(str(path))
    key = os.getpid(), "" if step is None else directory, group
    if key not in _KEPT:
        _KEPT[key] = Checkpointer(directory, group=group, keep=int(step is None), slots=1)
    # End the running save first: `done` of a future takes any outcome for its own.
    if pending := _PENDING.pop(_KEPT[key], None):
        pending.settle()
    _KEPT[key].outcomes()  # drops the outcomes of earlier saves
    if step is None:
        _KEPT[key].move(directory)
    return _KEPT[key], step


def _plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state_dict.items()
    }


class _Values:
    """Everything in a nested state_dict except tensors."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root

    def state_dict(self) -> dict[str, Any]:
        found = leaves(self._root)
        return {VALUES: [(path, value) for path, value in found if not isinstance(value, Tensor)]}

    def refuse_state(self, state_dict: dict[str, Any]) -> None:
        found = dict(state_dict[VALUES])
        wanted = {path for path, value in leaves(self._root) if not isinstance(value, Tensor)}
        if found.keys() != wanted:
            names = ", ".join(sorted(".".join(map(str, one)) for one in found.keys() ^ wanted))
            raise WrongModel(f"in the checkpoint or in this state_dict, but not in both: {names}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for (*outer, last), value in state_dict[VALUES]:
            holder: Any = self._root
            for key in outer:
                holder = holder[key]
            holder[last] = value


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields (path, leaf) of nested dictionaries and lists: tensors, and values without tensors."""
    children: Any = None
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    # a subtree without tensors is one leaf, saved unchanged
    if children is None or (path and not _holds_tensors(value)):
        yield path, value
        return
    for key, child in children:
        yield from leaves(child, (*path, key))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)


def _state(root: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {VALUES: _Values(root)}
    for path, value in leaves(root):
        if isinstance(value, Tensor):
            name = ".".join(map(str, path))
            if name in state:
                raise ValueError(
                    f"state_dict: the name {name} occurs twice, or is reserved ({VALUES}); rename "
                    "that tensor"
                )
            state[name] = value
    return state
