"""What keeps a job alive: membership, batch plan, the verdict on bad steps. Imports no trainer.

Public names load on first use, so that `elastic.options` is read without importing torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "BatchPlan": "batch_plan",
    "MicroBatch": "batch_plan",
    "plan_batch": "batch_plan",
    "ElasticOptions": "options",
    "Verdict": "guard",
    "judge_step": "guard",
    "World": "world",
    "die_with_parent": "world",
    "join_world": "world",
    "leave_world": "world",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    return getattr(import_module(f"elastic.{_HOME[name]}"), name)
