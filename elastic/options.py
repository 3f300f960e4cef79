"""The `elastic:` section of a recipe. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge

Count: TypeAlias = Annotated[int, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What a run does when something goes wrong."""

    max_skipped_steps: Count = 5
    """Steps in a row that may be skipped for a non-finite loss or gradient before the run rolls
    back. Each was computed twice before it is skipped."""

    max_rollbacks: Count = 2
    """How often a run may go back to its newest checkpoint, and on with the data after the bad
    steps, before it stops with exit code 93. Also where an update left weights that are not finite:
    then it takes the newest copy in memory, if there is one."""

    snapshot_every: Count = 0
    """Steps between copies of the state in shared memory: a process that dies costs at most so many
    steps. 0: only with checkpoints. Needs `checkpoint.slots: 2`."""

    check_replicas_every: Count = 0
    """Steps between comparisons of replicated weights (DDP, HYBRID_SHARD, tp, ties of pp) by
    checksum. A rank that differs computes wrongly, and is named. 0: never."""

    recovery: Literal["in_place", "rebuild", "refork"] = "in_place"
    """What ranks do after another rank or node has failed. in_place: they keep their processes, and
    where they can, model and optimizer. rebuild: they keep their processes, and build both anew.
    refork: all are forked anew (see docs/elastic.md)."""

    timeout_seconds: Annotated[float, Ge(1)] = 600.0
    """How long a collective may wait for a missing rank before the process gives up."""
