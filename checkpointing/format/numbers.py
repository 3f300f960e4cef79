"""What is known of the numbers of a step, as bits.py finds it. Imports no numpy, for which a writer
process would take 0.1 s more to start."""

from collections.abc import Sequence
from dataclasses import dataclass

_MASK = (1 << 64) - 1


def not_finite(names: Sequence[str]) -> str:
    """What is told of tensors that hold a number that is not finite, and must not."""
    more = " and other tensors" if len(names) > 1 else ""
    return f"NaN or infinity in {names[0]}{more}"


@dataclass(frozen=True)
class Numbers:
    """What is known of the numbers of a step, or of a part of it."""

    weights: int = 0
    """Digest of the model's tensors; see bits.py [Note: digest]."""
    moments: int = 0
    """Digest of the optimizer's."""
    bad: tuple[str, ...] = ()
    """The first two tensors that hold a number that is not finite, and must not."""
    odd: tuple[str, ...] = ()
    """Tensors that hold one, and may."""

    def __add__(self, other: "Numbers") -> "Numbers":
        return Numbers(
            (self.weights + other.weights) & _MASK,
            (self.moments + other.moments) & _MASK,
            tuple(dict.fromkeys(self.bad + other.bad))[:2],
            tuple(dict.fromkeys(self.odd + other.odd)),
        )
