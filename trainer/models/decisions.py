"""What a block decides in its forward pass, and does not decide again where it is recomputed.

[Note: decisions] A router's choice is a decision: integers without a gradient, small beside the
activations that recomputation frees. To make it again takes kernels of its own and, where the host
has to know sizes, a wait for the device. So recomputation reuses it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")
Answer = Callable[[Callable[[], Any]], Any]
"""From what would decide to what is decided."""

# A context variable: autograd recomputes on threads of its own.
_answer: ContextVar[Answer | None] = ContextVar("answer", default=None)


def decided(decide: Callable[[], Made]) -> Made:
    """What `decide` returns: tensors without gradients, and numbers. In the repetition of a block
    that is recomputed, what it returned in the forward pass."""
    # Compiled code decides again: to leave it would cost more than its kernels do.
    if torch.compiler.is_compiling():
        return decide()
    answer = _answer.get()
    made: Made = answer(decide) if answer else decide()
    return made


def keeping_decisions(
    forward: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a block's forward pass and of each of its repetitions, around those given, in
    which `decided` keeps and repeats what the block decides."""
    made: list[Any] = []

    def keep() -> Answer:
        def answer(decide: Callable[[], Any]) -> Any:
            made.append(decide())
            return made[-1]

        return answer

    def repeat() -> Answer:
        left = iter(made)
        return lambda _: next(left)

    return _Answering(keep, forward), _Answering(repeat, again)


class _Answering(AbstractContextManager[None]):
    """Within it `decided` asks what `begin` returns. It may be entered several times."""

    def __init__(self, begin: Callable[[], Answer], inner: AbstractContextManager[Any]) -> None:
        self._begin, self._inner = begin, inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._token = _answer.set(self._begin())

    def __exit__(self, *error: Any) -> None:
        _answer.reset(self._token)
        self._inner.__exit__(*error)
