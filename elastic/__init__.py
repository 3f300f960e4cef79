"""Membership of nodes, supervision of ranks, batch plan and ledger of an elastic job.

Public names load on first use, so that `elastic.options` is read without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.exits import (
        EXIT_DO_NOT_REQUEUE,
        EXIT_DONE,
        EXIT_FAILED,
        EXIT_INTERRUPTED,
        EXIT_MENDED,
        EXIT_OUTVOTED,
        EXIT_PAUSED,
        EXIT_PEER_GONE,
        EXIT_REQUEUE,
        EXIT_WRONG_INPUT,
    )
    from elastic.group.sampler import Sampler, sampler
    from elastic.job import Job, join, run
    from elastic.node.progress import PAUSE_TO_LEAVE, Pulse, watch_signals
    from elastic.options import ElasticOptions
    from elastic.process import die_with_parent, usable_cores
    from elastic.record.history import LedgerError, describe_failure, read_history
    from elastic.record.ledger import LEDGER, Ledger, StartLine
    from elastic.record.reliability import SaveClock, expected_mtbf, reliability
    from elastic.world import (
        World,
        join_world,
        leave_world,
        read_environment,
        refuse_stale_store,
        supervised,
    )

_NAMES = {
    "exits": (
        "EXIT_DONE EXIT_DO_NOT_REQUEUE EXIT_FAILED EXIT_INTERRUPTED EXIT_MENDED "
        "EXIT_OUTVOTED EXIT_PAUSED EXIT_PEER_GONE EXIT_REQUEUE EXIT_WRONG_INPUT"
    ),
    "options": "ElasticOptions",
    "record.history": "describe_failure read_history LedgerError",
    "record.reliability": "SaveClock expected_mtbf reliability",
    "record.ledger": "LEDGER Ledger StartLine",
    "process": "die_with_parent usable_cores",
    "node.progress": "PAUSE_TO_LEAVE Pulse watch_signals",
    "job": "Job join run",
    "group.sampler": "Sampler sampler",
    "world": "World join_world leave_world read_environment refuse_stale_store supervised",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    return getattr(import_module(f"elastic.{_HOME[name]}"), name)
