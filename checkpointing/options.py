"""The `checkpoint:` section of a recipe. Imports no torch."""

import math
import re
from dataclasses import dataclass
from typing import Literal

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When checkpoints are written and deleted, and how they are written."""

    directory: str | None = None
    """Where the checkpoints lie: a path, or the URL of an object store such as
    "s3://bucket/folder"; null: `checkpoints` in the run directory."""
    every: int | Literal["auto"] = 500
    """Steps between checkpoints; the last step is always saved. 0: only the last step. auto: the
    interval that loses the least time, computed from the measured cost of a checkpoint and the
    failures so far (Daly 2006), at most 30 minutes; multiples of `keep_every` are saved as well."""
    when_busy: Literal["skip", "wait"] = "skip"
    """What to do when a checkpoint is due while the previous one is still being written: skip it,
    or wait. The last step always waits."""
    keep: int = 3
    """Number of newest committed checkpoints that are kept; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of this number are always kept; 0: none."""
    keep_best: int = 0
    """Number of checkpoints with the lowest `best_by` that are kept in addition; 0: none."""
    best_by: str = "validation_loss"
    """Name of the value in trainer_state.json that `keep_best` compares; lower is better."""
    max_shard_size: int | str = "4 GB"
    """Largest safetensors file, in bytes or as "4 GB" (10^9) or "4 GiB" (2^30). Tensors are never
    split: a larger tensor gets a file of its own."""
    max_writers: int | None = None
    """Largest number of files, or parts of files, that all nodes together write at the same time.
    null: the filesystem decides (see docs/checkpoints.md)."""
    max_bandwidth: int | str | None = None
    """Largest number of bytes per second of all writers together, as 500000000 or "500 MB"; null:
    no limit."""
    slots: int = 2
    """Copies of the state that each node holds in shared memory. 2: a complete copy always exists
    for a restart. 1: each save overwrites the only copy. 0: no copy between saves, so a restart
    reads storage. If memory does not suffice, fewer copies are held, and the log says so."""
    slot_directory: str | None = None
    """Directory on a local disk for these copies instead of shared memory; a restart then reads
    storage. null: shared memory, or strategy.offload_directory with strategy.offload: nvme."""
    peer_copy: bool = False
    """Also keep each node's copy in the memory of the next node, so that a run restarts from memory
    when a node is lost. Doubles the memory for copies."""
    deadline: float = 1200.0
    """Seconds that a checkpoint may take. After that the save fails, the writers that block it are
    restarted, and training continues."""
    trust: tuple[str | int, ...] = ()
    """Users whose checkpoints are loaded, besides the user who trains and root: names or uids, and
    `group` for the members of the group of the checkpoint directory. Checkpoints of other users are
    skipped."""
    verify: bool = True
    """Check the CRC-32 of every block that is read when a checkpoint is loaded."""
    trace: bool = False
    """Append what each writer does, with times, to `trace.jsonl` beside the checkpoints."""

    def __post_init__(self) -> None:
        for name in ("every", "keep", "keep_every", "keep_best"):
            if getattr(self, name) != "auto" and getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, but it is {getattr(self, name)}")
        if self.max_writers is not None and not (
            isinstance(self.max_writers, int) and self.max_writers > 0
        ):
            raise ValueError(
                "max_writers must be a whole number above 0, or null (the filesystem decides), but "
                f"it is {self.max_writers!r}"
            )
        if self.slots not in (0, 1, 2):
            raise ValueError(f"slots must be 0, 1 or 2, but it is {self.slots!r}")
        if self.peer_copy and not self.slots:
            raise ValueError("peer_copy copies slots: it needs slots: 1 or 2")
        if self.max_shard_bytes < 1:
            raise ValueError(
                f"max_shard_size must be at least 1 byte, but it is {self.max_shard_size!r}"
            )
        if not 0 < self.deadline < math.inf:
            raise ValueError(f"deadline must be finite and above 0 s, but it is {self.deadline!r}")
        if self.bytes_per_second is not None and self.bytes_per_second < 1:
            raise ValueError(
                f"max_bandwidth must be at least 1 byte/s, but it is {self.max_bandwidth!r}"
            )

    @property
    def max_shard_bytes(self) -> int:
        return number_of_bytes("max_shard_size", self.max_shard_size)

    @property
    def bytes_per_second(self) -> int | None:
        if self.max_bandwidth is None:
            return None
        return number_of_bytes("max_bandwidth", self.max_bandwidth)


def number_of_bytes(name: str, size: int | str) -> int:
    """Returns a size in bytes, which may be written as "4 GB" (10^9) or "4 GiB" (2^30). Raises
    ValueError, with `name`, the recipe key, if `size` is no size."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(
            f"{name} is {size!r}; write a number of bytes, or a number with a unit, such as "
            '"4 GB" or "512 MiB"'
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])
