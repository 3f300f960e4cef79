"""What keeps a job alive: membership, batch plan, the verdict on bad steps. Imports no trainer.

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
        EXIT_PAUSED,
        EXIT_PEER_GONE,
        EXIT_REQUEUE,
        EXIT_WRONG_INPUT,
    )
    from elastic.group.secret import job_secret
    from elastic.job import Job, join
    from elastic.node.notice import watch_signals
    from elastic.node.progress import PAUSE_TO_LEAVE, Pulse
    from elastic.options import ElasticOptions
    from elastic.process import die_with_parent, usable_cores
    from elastic.record.goodput import reliability
    from elastic.record.history import LedgerError, describe_failure, read_history
    from elastic.record.interval import SaveClock, expected_mtbf
    from elastic.record.ledger import LEDGER, Ledger, Start
    from elastic.world import (
        World,
        join_world,
        leave_world,
        read_environment,
        refuse_stale_store,
        supervised,
    )

_HOME = {
    "EXIT_DONE": "exits",
    "EXIT_DO_NOT_REQUEUE": "exits",
    "EXIT_FAILED": "exits",
    "EXIT_INTERRUPTED": "exits",
    "EXIT_MENDED": "exits",
    "EXIT_PAUSED": "exits",
    "EXIT_PEER_GONE": "exits",
    "EXIT_REQUEUE": "exits",
    "EXIT_WRONG_INPUT": "exits",
    "ElasticOptions": "options",
    "SaveClock": "record.interval",
    "expected_mtbf": "record.interval",
    "describe_failure": "record.history",
    "read_history": "record.history",
    "reliability": "record.goodput",
    "LEDGER": "record.ledger",
    "Ledger": "record.ledger",
    "Start": "record.ledger",
    "LedgerError": "record.history",
    "watch_signals": "node.notice",
    "die_with_parent": "process",
    "usable_cores": "process",
    "PAUSE_TO_LEAVE": "node.progress",
    "Pulse": "node.progress",
    "job_secret": "group.secret",
    "Job": "job",
    "join": "job",
    "World": "world",
    "join_world": "world",
    "leave_world": "world",
    "read_environment": "world",
    "refuse_stale_store": "world",
    "supervised": "world",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    return getattr(import_module(f"elastic.{_HOME[name]}"), name)
