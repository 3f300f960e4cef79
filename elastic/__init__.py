"""What keeps a job alive: membership, batch plan, the verdict on bad steps. Imports no trainer.

Public names load on first use, so that `elastic.options` is read without importing torch.
"""

from importlib import import_module
from typing import Any

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
    "register_dumps": "node.watchdog",
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
