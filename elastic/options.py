"""The `elastic:` section of a recipe. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What a run does when something goes wrong."""

    max_skipped_steps: int = 5
    """Steps in a row that may be skipped for a non-finite loss or gradient before the run stops
    with exit code 93. A skipped step consumes its sequences and leaves the weights alone."""

    timeout_seconds: float = 600.0
    """How long a collective may wait for a missing rank before the process gives up."""
