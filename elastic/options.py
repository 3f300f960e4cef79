"""The `elastic:` section of a recipe. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What a run does when something goes wrong."""

    max_skipped_steps: int = 5
    """Steps in a row that may be skipped for a non-finite loss or gradient before the run rolls
    back. A skipped step consumes its sequences and leaves the weights alone; it was computed twice
    before, and counts only if it came out bad again."""

    max_rollbacks: int = 2
    """How often a run may take weights and optimizer state back to those of its newest checkpoint,
    and go on with the data after the bad steps, before it stops with exit code 93."""

    snapshot_every: int = 0
    """Steps between copies of the state in shared memory, from which a run goes on after a process
    has died: at most so many steps are lost then, instead of `checkpoint.every`. 0: only with
    checkpoints. Takes `checkpoint.slots: 2`, or the memory of a process that dies while copying
    holds nothing."""

    check_replicas_every: int = 0
    """Steps between comparisons of the bits of replicated weights (DDP, HYBRID_SHARD) by checksum;
    a rank that differs computes wrongly and is named. 0: never."""

    timeout_seconds: float = 600.0
    """How long a collective may wait for a missing rank before the process gives up."""
