"""The `elastic:` section of a recipe, read without torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Le

Count: TypeAlias = Annotated[int, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """How a run responds to failures and to non-finite or differing numbers."""

    max_skipped_steps: Count = 5
    """Consecutive steps that may be skipped for a non-finite loss or gradient before the run rolls
    back. Each such step is computed a second time before it is skipped."""

    max_rollbacks: Count = 2
    """Roll-backs to the newest checkpoint before the run stops with exit code 93. After a roll-back
    the run continues with the data that follow the skipped steps. Non-finite weights after an
    update also cause a roll-back, to the newest copy in memory if there is one."""

    snapshot_every: Count = 0
    """Steps between copies of the state in shared memory. A process that dies costs at most this
    many steps. 0: copies only with checkpoints. Needs `checkpoint.slots` above 0, best 2."""

    check_replicas_every: Count = 0
    """Steps between checksum comparisons of replicated weights (DDP, HYBRID_SHARD, tp, tied weights
    of pp). A rank that differs is reported. 0: never."""

    witness: Annotated[float, Ge(0), Le(1)] = 0.0
    """Fraction of the micro-batches that a second rank computes too, to find machines that compute
    wrongly. The two gradients must have the same bits; if not, a third rank decides. A rank that is
    outvoted twice is reported, and its node leaves. Needs `run.determinism: exact` (see
    docs/elastic.md). 0: none."""

    recovery: Literal["in_place", "rebuild", "refork"] = "in_place"
    """How ranks continue after another rank or node has failed. in_place: they keep their
    processes, and where possible model and optimizer. rebuild: they keep their processes and build
    model and optimizer anew. refork: all ranks are forked anew (see docs/elastic.md)."""

    timeout_seconds: Annotated[float, Ge(1)] = 600.0
    """Seconds that a collective waits for a missing rank before the process gives up."""
