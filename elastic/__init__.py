"""What keeps a job alive: membership, batch plan, the verdict on bad steps. Imports no trainer.

Public names load on first use, so that `elastic.options` is read without importing torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "BatchPlan": "batch_plan",
    "MicroBatch": "batch_plan",
    "plan_batch": "batch_plan",
    "EXIT_DONE": "exits",
    "EXIT_DO_NOT_REQUEUE": "exits",
    "EXIT_FAILED": "exits",
    "EXIT_INTERRUPTED": "exits",
    "EXIT_PAUSED": "exits",
    "EXIT_PEER_GONE": "exits",
    "EXIT_REQUEUE": "exits",
    "EXIT_WRONG_INPUT": "exits",
    "ElasticOptions": "options",
    "SaveClock": "interval",
    "expected_mtbf": "interval",
    "describe_failure": "history",
    "read_history": "history",
    "reliability": "goodput",
    "LEDGER": "ledger",
    "Ledger": "ledger",
    "Start": "ledger",
    "LedgerError": "history",
    "Verdict": "guard",
    "judge_step": "guard",
    "watch_signals": "notice",
    "die_with_parent": "process",
    "usable_cores": "process",
    "PAUSE_TO_LEAVE": "progress",
    "Pulse": "progress",
    "job_secret": "secret",
    "Pace": "straggler",
    "compare_ranks": "straggler",
    "register_dumps": "watchdog",
    "diverged_ranks": "replicas",
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
