"""Decisions of a block's forward pass that recomputation reuses.

[Note: decisions] A router's choice is a decision: integers without a gradient, small compared with
the activations that recomputation frees. Computing it again takes kernels and, where the host needs
sizes, a wait for the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Decision = TypeVar("Decision")
Answer = Callable[[Callable[[], Any]], Any]
"""A function that receives a function computing a decision, and returns the decision."""

# A context variable per thread: autograd recomputes on threads of its own.
_answer: ContextVar[Answer | None] = ContextVar("answer", default=None)


def decided(decide: Callable[[], Decision]) -> Decision:
    """Return the result of `decide`: tensors without gradients, and numbers. When a block is
    recomputed, return the result that its forward pass stored."""
    # Compiled code computes decisions again: a graph break would cost more than the kernels.
    if torch.compiler.is_compiling():
        return decide()
    answer = _answer.get()
    decision: Decision = answer(decide) if answer else decide()
    return decision


def keeping_decisions(
    forward: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Wrap the context managers of a block's forward pass and of its recomputations, so that
    `decided` stores decisions in the former and repeats them in the latter."""
    decisions: list[Any] = []

    def keep() -> Answer:
        def answer(decide: Callable[[], Any]) -> Any:
            decisions.append(decide())
            return decisions[-1]

        return answer

    def repeat() -> Answer:
        remaining = iter(decisions)
        return lambda _: next(remaining)

    return _DecisionContext(keep, forward), _DecisionContext(repeat, again)


class _DecisionContext(AbstractContextManager[None]):
    """Enters a context, and sets how `decided` obtains decisions in it. Reusable."""

    def __init__(self, begin: Callable[[], Answer], inner: AbstractContextManager[Any]) -> None:
        self._begin, self._inner = begin, inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._token = _answer.set(self._begin())

    def __exit__(self, *error: Any) -> None:
        _answer.reset(self._token)
        self._inner.__exit__(*error)
