"""Durable training state: named tensors and a process group in, safetensors out.

Imports neither trainer nor elastic. Public names load on first use, so that
`checkpointing.options` is read, and checkpoints are listed, without importing torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointing.checkpointer import Checkpointer
    from checkpointing.errors import (
        CheckpointError,
        DamagedCheckpoint,
        SaveFailed,
        StorageError,
        WrongModel,
    )
    from checkpointing.format.optimizers import optimizer_tensors
    from checkpointing.load.reader import load_model
    from checkpointing.options import CheckpointOptions
    from checkpointing.save.link import SpareWriter
    from checkpointing.save.messages import SaveOutcome
    from checkpointing.state import Stateful
    from checkpointing.storage.steps import newest_checkpoint, read_state
    from checkpointing.tensor_checkpointer import TensorCheckpointer

_NAMES = {
    "checkpointer": "Checkpointer",
    "tensor_checkpointer": "TensorCheckpointer",
    "state": "Stateful",
    "options": "CheckpointOptions",
    "load.reader": "load_model",
    "storage.steps": "newest_checkpoint read_state",
    "format.optimizers": "optimizer_tensors",
    "errors": "CheckpointError WrongModel DamagedCheckpoint SaveFailed StorageError",
    "save.messages": "SaveOutcome",
    "save.link": "SpareWriter",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'checkpointing' has no attribute {name!r}")
    return getattr(import_module(f"checkpointing.{_HOME[name]}"), name)
