"""Decisions of a block's forward pass that recomputation reuses.

[Note: decisions] A decision is a small result without a gradient, such as a router's choice of
experts. It is stored, because computing it again would take kernels and, if the host needs sizes, a
wait for the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Decision = TypeVar("Decision")
Answer = Callable[[Callable[[], Any]], Any]
"""Maps a function that computes a decision to the decision, which may be a stored one."""

# A context variable, so that each thread has its own: autograd recomputes on other threads.
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
    `decided` stores decisions in the forward pass and repeats them in a recomputation."""
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
    """Context that sets how `decided` obtains decisions. Can be entered several times."""

    def __init__(self, begin: Callable[[], Answer], inner: AbstractContextManager[Any]) -> None:
        self._begin, self._inner = begin, inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._token = _answer.set(self._begin())

    def __exit__(self, *error: Any) -> None:
        _answer.reset(self._token)
        self._inner.__exit__(*error)
