"""What makes training state durable: named tensors and a process group in, safetensors out.

Imports neither trainer nor elastic. Public names load on first use, so that
`checkpointing.options` is read, and checkpoints are listed, without importing torch.
"""

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
    from checkpointing.format.tensors import optimizer_tensors
    from checkpointing.load.reader import load_model
    from checkpointing.options import CheckpointOptions
    from checkpointing.save.link import Spare
    from checkpointing.save.messages import SaveOutcome
    from checkpointing.state import Stateful
    from checkpointing.storage.steps import newest_checkpoint, read_state
    from checkpointing.tensor_checkpointer import TensorCheckpointer

_HOME = {
    "Checkpointer": "checkpointer",
    "TensorCheckpointer": "tensor_checkpointer",
    "Stateful": "state",
    "CheckpointOptions": "options",
    "load_model": "load.reader",
    "newest_checkpoint": "storage.steps",
    "read_state": "storage.steps",
    "optimizer_tensors": "format.tensors",
    "CheckpointError": "errors",
    "WrongModel": "errors",
    "DamagedCheckpoint": "errors",
    "SaveFailed": "errors",
    "SaveOutcome": "save.messages",
    "StorageError": "errors",
    "Spare": "save.link",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'checkpointing' has no attribute {name!r}")
    return getattr(import_module(f"checkpointing.{_HOME[name]}"), name)
