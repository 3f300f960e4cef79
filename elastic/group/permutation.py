"""Keyed pseudo-random permutations of range(size), in O(1) memory. numpy only.

Results must never change: checkpoints hold positions in orders of samples that depend on them."""

import numpy as np
from numpy.typing import NDArray

U64 = np.uint64
MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One step of the splitmix64 generator (Steele et al. 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


class SamplerPermutation:
    """A keyed pseudo-random permutation of range(size), in O(1) memory.

    A Feistel network over the next power of two. Its rounds change the two halves of a value in
    turn, by `mix` of the other half. Values outside the range are permuted again until they fall
    into it (Black & Rogaway 2002). There are six rounds, or eight for sizes below 4096: with these
    the permutations pass this project's statistical tests. Each integer of the `key` changes the
    whole permutation.
    """

    def __init__(self, size: int, *key: int, rounds: int | None = None) -> None:
        self.size = size
        # each half of a Feistel network needs at least one bit
        bits = max(2, (size - 1).bit_length())
        self._low_bits = U64(bits - bits // 2)
        self._low = U64((1 << (bits - bits // 2)) - 1)
        self._high = U64((1 << (bits // 2)) - 1)
        state = 0
        for part in key:
            state = splitmix64(state ^ (part & MASK))
        self._keys = []
        for _ in range(rounds or (6 if size >= 4096 else 8)):
            state = splitmix64(state)
            self._keys.append(U64(state))

    def __call__(self, positions: NDArray) -> NDArray[np.int64]:
        if self.size == 1:
            return np.zeros(np.shape(positions), dtype=np.int64)
        with np.errstate(over="ignore"):
            result = self._forward(np.asarray(positions).astype(np.uint64))
            # The network covers about twice the range at most, so few values remain outside.
            outside = np.flatnonzero(result >= U64(self.size))
            while outside.size:
                result[outside] = self._forward(result[outside])
                outside = outside[result[outside] >= U64(self.size)]
        return result.astype(np.int64)

    def _forward(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = x >> self._low_bits, x & self._low
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                high = high ^ (mix(low, key) & self._high)
            else:
                low = low ^ (mix(high, key) & self._low)
        return (high << self._low_bits) | low


def mix(half: NDArray[np.uint64], key: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns murmur3's 64-bit finaliser of each value, whose first xorshift is replaced by an XOR
    with `key`. Products wrap modulo 2**64: call it under np.errstate(over="ignore")."""
    mixed = (half ^ key) * U64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> U64(33)
    mixed *= U64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> U64(33))
