"""The `elastic:` section of a recipe. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What a run does when something goes wrong."""

    max_skipped_steps: int = 5
    """Steps in a row that may be skipped for a non-finite loss or gradient before the run stops
    with exit code 93. A skipped step consumes its sequences and leaves the weights alone."""

    snapshot_every: int = 0
    """Steps between copies of the state in shared memory, from which a run goes on after a process
    has died: at most so many steps are lost then, instead of `checkpoint.every`. 0: only with
    checkpoints. Takes `checkpoint.slots: 2`, or the memory of a process that dies while copying
    holds nothing."""

    timeout_seconds: float = 600.0
    """How long a collective may wait for a missing rank before the process gives up."""
