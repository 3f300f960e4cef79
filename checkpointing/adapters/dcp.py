"""`save` and `load` in the shape of torch.distributed.checkpoint: a nested state_dict and a
directory of its own for each checkpoint. In place of `import torch.distributed.checkpoint as dcp`:

    from checkpointing.adapters import dcp
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import CheckpointError, WrongModel
from checkpointing.format.layout import split_step
from checkpointing.save.link import Spare
from checkpointing.state import Stateful

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
            what it was saved with is kept for the next. In any other the checkpoint is
            `step-00000000`, which takes the place of one that is there.
        process_group: carries CPU tensors; None: all ranks.

    Raises:
        ValueError: something cannot be saved; says what and why.
        SaveFailed: it could not be written.
    """
    with _opened(checkpoint_id, process_group) as (checkpointer, step):
        checkpointer.save(step or 0, _state(_plain(state_dict)), wait=True)
        if step is None:
            checkpointer.start_spare()


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | Path,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load what `save` saved: tensors in place, other values into the dictionaries and lists that
    hold them. On all ranks of the group, from whatever number of ranks it was saved.

    Raises:
        WrongModel: the state_dict has other names, shapes or dtypes than were saved. Unlike DCP,
            no part of a checkpoint is loaded alone.
        CheckpointError: there is no checkpoint, or no good one.
    """
    plain = _plain(state_dict)
    with _opened(checkpoint_id, process_group) as (checkpointer, step):
        if checkpointer.load(_state(plain), step) is None:
            raise CheckpointError(f"{checkpointer.directory} has no checkpoint; save one first")
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(plain[key])
        else:
            state_dict[key] = plain[key]


_Key = tuple[int, str, dist.ProcessGroup | None]
_KEPT: dict[_Key, Checkpointer] = {}
"""By process, directory of steps, and group: their memory and writers serve the next save. One slot
is enough, as each save is waited for."""
_SPARE = Spare()
"""Of the saves whose directories name no step: a writer serves one of them."""


@contextmanager
def _opened(
    path: str | Path, group: dist.ProcessGroup | None
) -> Iterator[tuple[Checkpointer, int | None]]:
    """(what saves and loads, the step if it names one) of a checkpoint_id."""
    directory, step = split_step(str(path))
    if step is None:
        with Checkpointer(directory, group=group, spare=_SPARE, keep=1, slots=1) as checkpointer:
            yield checkpointer, None
        return
    key = os.getpid(), directory, group
    if key not in _KEPT:
        _KEPT[key] = Checkpointer(directory, group=group, keep=0, slots=1)
    yield _KEPT[key], step


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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found = dict(state_dict[VALUES])
        wanted = {path for path, value in leaves(self._root) if not isinstance(value, Tensor)}
        if found.keys() != wanted:
            names = ", ".join(sorted(".".join(map(str, one)) for one in found.keys() ^ wanted))
            raise WrongModel(f"only the checkpoint or only this state_dict has {names}")
        for (*outer, last), value in found.items():
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
