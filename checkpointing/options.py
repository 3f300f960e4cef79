"""The `checkpoint:` section of a recipe. Imports no torch."""

import re
from dataclasses import dataclass

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When checkpoints are written and how large their files are."""

    every: int = 500
    """Steps between checkpoints; the last step of a run is always saved. 0: only the last."""

    keep: int = 3
    """How many committed checkpoints stay on disk, newest first; 0 keeps all."""

    max_shard_size: int | str = "4 GB"
    """Largest safetensors file, in bytes or as "4 GB" (10^9) or "4 GiB" (2^30). A tensor larger
    than this gets a file of its own: tensors are never split."""

    verify: bool = True
    """Check the CRC-32 of every block that is read when a checkpoint is loaded."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 0:
            raise ValueError("every and keep must not be negative")
        if self.max_shard_bytes < 1:
            raise ValueError("max_shard_size must be at least one byte")

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes."""
        if isinstance(self.max_shard_size, int):
            return self.max_shard_size
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", self.max_shard_size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(
                f"max_shard_size is {self.max_shard_size!r}; write bytes, or a number and a unit "
                'such as "4 GB" or "512 MiB"'
            )
        return int(float(match[1]) * _UNITS[match[2].upper()])
