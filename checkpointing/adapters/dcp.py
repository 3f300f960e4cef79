"""`save` and `load` in the shape of torch.distributed.checkpoint: a nested state_dict and a
directory of its own for each checkpoint. In place of `import torch.distributed.checkpoint as dcp`:

    from checkpointing.adapters import dcp
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import CheckpointError, WrongModel
from checkpointing.format.layout import split_step
from checkpointing.state import Stateful

__all__ = ["load", "save"]
VALUES = "values"
"""What stands for all that is no tensor."""


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | Path,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save, and return when the checkpoint is in storage. On all ranks of the group.

    Args:
        state_dict: nested dictionaries and lists of tensors and plain values; objects with
            state_dict in the outermost. Names of tensors are joined by dots.
        checkpoint_id: a path or a URL. DIRECTORY/step-00000100 is that step of the directory, and
            is written once. In any other the checkpoint takes the place of one that is there.
        process_group: carries CPU tensors; None: all ranks.

    Raises:
        ValueError: something cannot be saved; says what and why.
        CheckpointError: that step, or a newer one of its directory, is there already.
        SaveFailed: it could not be written.
    """
    checkpointer, step = _opened(checkpoint_id, process_group)
    newest = checkpointer.newest()
    if step is not None and step == newest:
        raise CheckpointError(f"{checkpoint_id} is there already; move it away, or name another")
    if step is None:
        step = 0 if newest is None else newest + 1
    checkpointer.save(step, checkpointer.on_all(lambda: _state(_plain(state_dict))), wait=True)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | Path,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load what `save` saved: tensors in place, other values into the dictionaries and lists that
    hold them. On all ranks of the group, from whatever number of ranks it was saved.

    Raises:
        WrongModel: the state_dict has other names or shapes than were saved, or dtypes that do not
            convert; floating point numbers do. Unlike DCP, no part of a checkpoint is loaded alone.
        CheckpointError: there is no checkpoint, or no good one.
    """
    checkpointer, step = _opened(checkpoint_id, process_group)
    plain = checkpointer.on_all(lambda: _plain(state_dict))
    state = checkpointer.on_all(lambda: _state(plain))
    if checkpointer.load(state, step) is None:
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
"""By process, directory of steps, and group: their memory and writers serve the next save. One of
each group, by an empty name, serves all names that are no steps. One slot is enough, as each save
is waited for."""


def _opened(path: str | Path, group: dist.ProcessGroup | None) -> tuple[Checkpointer, int | None]:
    """(what saves and loads, the step if it names one) of a checkpoint_id."""
    directory, step = split_step(str(path))
    key = os.getpid(), "" if step is None else directory, group
    if key not in _KEPT:
        _KEPT[key] = Checkpointer(directory, group=group, keep=int(step is None), slots=1)
    if step is None:
        _KEPT[key].move(directory)
    return _KEPT[key], step


def _plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state_dict.items()
    }


class _Values:
    """All of a nested state_dict that is no tensor."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root

    def state_dict(self) -> dict[str, Any]:
        return {
            VALUES: [
                (path, value) for path, value in leaves(self._root) if not isinstance(value, Tensor)
            ]
        }

    def refuse_state(self, state_dict: dict[str, Any]) -> None:
        found = dict(state_dict[VALUES])
        wanted = {path for path, value in leaves(self._root) if not isinstance(value, Tensor)}
        if found.keys() != wanted:
            names = ", ".join(sorted(".".join(map(str, one)) for one in found.keys() ^ wanted))
            raise WrongModel(f"only the checkpoint or only this state_dict has {names}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for (*outer, last), value in state_dict[VALUES]:
            holder: Any = self._root
            for key in outer:
                holder = holder[key]
            holder[last] = value


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, leaf) of nested dictionaries and lists: tensors, and what holds no tensor."""
    children: Any = None
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    if children is None or (path and not _holds_tensors(value)):
        yield path, value
        return
    for key, child in children:
        yield from leaves(child, (*path, key))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, Tensor) or (
        isinstance(value, list) and any(map(_holds_tensors, value))
    )


def _state(root: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {VALUES: _Values(root)}
    for path, value in leaves(root):
        if isinstance(value, Tensor):
            name = ".".join(map(str, path))
            if name in state:
                raise ValueError(f"state_dict: two tensors, or `{VALUES}`, are called {name}")
            state[name] = value
    return state
