"""Position → sample: the order of the data as a pure function. numpy only.

The stream of samples is infinite, needs no memory, and is read at random: `Order.locate(positions)`
depends on the sizes of the sources, their weights and the seed, never on the number of ranks,
workers or steps. What it computes is frozen as ORDER_VERSION 1: a checkpoint is a position in it.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = 1
BLOCK = 1024
"""Positions over which a mixture keeps its exact shares."""

_U = np.uint64
_MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One step of the splitmix64 generator (Steele et al. 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class Permutation:
    """A keyed pseudo-random permutation of range(size), in O(1) memory.

    A Feistel network over the next power of two with alternating halves, whose round function is
    murmur3's 64-bit finaliser; values outside the range walk their cycle back into it (Black &
    Rogaway 2002). Six rounds pass the statistical tests of the suite; below 4096, eight.
    """

    def __init__(self, size: int, *key: int, rounds: int | None = None) -> None:
        """
        Args:
            size: at least 1.
            key: any integers; each changes the whole permutation.
            rounds: for tests only.
        """
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = _U(bits - bits // 2)
        self._low = _U((1 << (bits - bits // 2)) - 1)
        self._high = _U((1 << (bits // 2)) - 1)
        state = 0
        for part in key:
            state = splitmix64(state ^ (part & _MASK))
        self._keys = []
        for _ in range(rounds or (6 if size >= 4096 else 8)):
            state = splitmix64(state)
            self._keys.append(_U(state))

    def __call__(self, positions: NDArray) -> NDArray[np.int64]:
        """Where each position goes."""
        if self.size == 1:
            return np.zeros(np.shape(positions), dtype=np.int64)
        with np.errstate(over="ignore"):
            result = self._forward(np.asarray(positions).astype(np.uint64))
            outside = np.flatnonzero(result >= _U(self.size))
            while outside.size:
                result[outside] = self._forward(result[outside])
                outside = outside[result[outside] >= _U(self.size)]
        return result.astype(np.int64)

    def _forward(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = x >> self._low_bits, x & self._low
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                high = high ^ (_mix(low, key) & self._high)
            else:
                low = low ^ (_mix(high, key) & self._low)
        return (high << self._low_bits) | low


def _mix(half: NDArray[np.uint64], key: np.uint64 | NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (half ^ key) * _U(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> _U(33)
    mixed *= _U(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> _U(33))


class Order:
    """The endless order of samples drawn from one or several sources: which sample stands at which
    position.

    It is a pure function of the sizes, the weights and the seed. A loop has done what it should if
    it trains, in whatever way, on the samples at positions 0, 1, 2, …; "how many positions are
    done" is all that it has to save.

    One source runs through epoch after epoch, each in a permutation of its own. Several are mixed
    in blocks of BLOCK positions that hold exact counts of each source, by weight; each source runs
    through its own epochs, so none repeats a sample before it has shown all.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """
        Args:
            sizes: samples in each source, at least 1.
            weights: share of the positions that each source takes, relative to the others; as many
                as there are sources, and [1.0] for a single one.
            seed: of the run.

        Raises:
            ValueError: no source, an empty one, or a weight that is missing, no positive number, or
                too small for a place in a block.
        """
        if not sizes or len(sizes) != len(weights):
            raise ValueError(f"{len(sizes)} source(s) with {len(weights)} weight(s); give as many")
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"weights {list(weights)} must be positive numbers")
        self._seed, self._sizes = seed, list(sizes)
        self._counts = block_counts(weights, BLOCK)
        for number, (size, count) in enumerate(zip(sizes, self._counts, strict=True)):
            if size < 1 or count < 1:
                raise ValueError(
                    f"source {number} has {size} samples and {count} of {BLOCK} places in a block; "
                    "both must be at least 1: raise its weight, or remove it"
                )
        self._ends = np.cumsum(self._counts)
        self._starts = self._ends - self._counts
        self._epoch = lru_cache(maxsize=64)(
            lambda source, epoch: Permutation(self._sizes[source], seed, 1 + source, epoch)
        )
        self._block = lru_cache(maxsize=64)(lambda block: Permutation(BLOCK, seed, 0, block))

    def __reduce__(self) -> tuple:
        return Order, (self._sizes, [float(count) for count in self._counts], self._seed)

    def locate(
        self, positions: NDArray | Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(source, epoch, sample) of each position, as int64 arrays of the same shape (N,).

        Args:
            positions: (N,) whole numbers, not negative.

        Raises:
            ValueError: they are something else.
        """
        positions = np.asarray(positions)
        whole = positions.ndim == 1 and (not positions.size or positions.dtype.kind in "iu")
        if not whole or (positions < 0).any():
            raise ValueError(f"positions {positions!r} are no array of whole numbers from 0 on")
        positions = positions.astype(np.int64, copy=False)
        if len(self._sizes) == 1:
            sources, ranks = np.zeros_like(positions), positions
        else:
            sources, ranks = self._mixture(positions)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            epoch, place = np.divmod(ranks[mine], self._sizes[source])
            epochs[mine] = epoch
            for number in np.unique(epoch):
                now = epoch == number
                samples[mine[now]] = self._epoch(int(source), int(number))(place[now])
        return sources, epochs, samples

    def _mixture(self, positions: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
        """Source of each position, and how many of that source came before it."""
        blocks, places = np.divmod(positions, BLOCK)
        slots = np.empty_like(positions)
        for block in np.unique(blocks):
            now = blocks == block
            slots[now] = self._block(int(block))(places[now])
        sources = np.searchsorted(self._ends, slots, side="right")
        before = blocks * self._counts[sources] + slots - self._starts[sources]
        return sources, before


def sample_digest(positions: NDArray, sources: NDArray, samples: NDArray) -> int:
    """A digest of which sample stands at which position, (N,) int64 each: the sum, modulo 2**32, of
    a hash of each, so that the digests of parts sum to that of the whole."""
    with np.errstate(over="ignore"):
        found = _mix(np.asarray(positions).astype(np.uint64), _U(1))
        found = _mix(_mix(sources.astype(np.uint64), found), samples.astype(np.uint64))
        return int((found >> _U(32)).sum()) & 0xFFFFFFFF


def block_counts(weights: Sequence[float], block: int) -> NDArray[np.int64]:
    """Whole numbers that sum to `block`, as near to the weights' shares as possible (largest
    remainders; the earlier of two equal ones first)."""
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum() * block
    counts = np.floor(shares).astype(np.int64)
    rest = np.argsort(-(shares - counts), kind="stable")[: block - counts.sum()]
    counts[rest] += 1
    return counts


def random_integers(positions: NDArray, size: int, *key: int) -> NDArray[np.int64]:
    """A number in range(size) for each position (N,), a function of position and key alone.

    Args:
        positions: int64, not negative.
        size: at most 2**32; the bias is below size / 2**32.
        key: any integers; each changes all numbers.
    """
    state = 0
    for part in key:
        state = splitmix64(state ^ (part & _MASK))
    with np.errstate(over="ignore"):
        high = _mix(np.asarray(positions).astype(np.uint64), _U(state)) >> _U(32)
        return ((high * _U(size)) >> _U(32)).astype(np.int64)
