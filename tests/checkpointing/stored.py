"""Committed checkpoints without an engine: what the format says, written byte by byte."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.format.layout import (
    COMMIT_RECORD,
    MODEL,
    OPTIMIZER,
    TRAINER_STATE,
    CommitRecord,
    FileRecord,
    TensorMeta,
    block_checksums,
    index_json,
    json_bytes,
    lay_out,
)
from checkpointing.format.tensors import TORCH_DTYPES

STORED = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digests(path: Path) -> dict[str, str]:
    """Names and digests of all files of a checkpoint."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file()
    }


def write_checkpoint(
    path: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    max_bytes: int = 1 << 40,
) -> Path:
    """A good checkpoint at `path`."""
    contents = {TRAINER_STATE: json_bytes({"step": step, **(state or {})}), **(files or {})}
    for section, tensors in ((MODEL, model), (OPTIMIZER, optimizer or {})):
        metas = {name: TensorMeta(STORED[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
        laid_out = lay_out(section, metas, max_bytes)
        contents[section.index] = index_json(laid_out)
        for file in laid_out:
            contents[file.name] = file.header + b"".join(
                raw(tensors[name]) for name in file.tensors
            )
            assert len(contents[file.name]) == file.size
    (path / OPTIMIZER.folder).mkdir(parents=True)
    for name, data in contents.items():
        (path / name).write_bytes(data)
    records = {
        name: FileRecord(len(data), block_checksums(data)) for name, data in contents.items()
    }
    (path / COMMIT_RECORD).write_bytes(CommitRecord(step, records).encode())
    return path


def flip(file: Path, position: int) -> None:
    """Flip a bit of one byte."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
