"""The order of the data: position → sample, a pure function. numpy only.

The sequence of samples is infinite, needs no memory, and allows random access. `Order.locate`
depends on the positions, the sizes and weights of the sources, and the seed; never on the number
of ranks, workers or steps. Its results are frozen as ORDER_VERSION 1: checkpoints store a position.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elastic.group.permutation import MASK, U64, SamplerPermutation, mix, splitmix64

ORDER_VERSION = 1
BLOCK = 1024
"""Number of consecutive positions in which a mixture has exact shares."""


class DataMixtureBlocks:
    """Distributes sources over blocks of BLOCK positions, with an exact number of each, by
    weight."""

    def __init__(self, weights: Sequence[float], seed: int, *key: int) -> None:
        """`weights`: relative shares of the sources. `key`: further integers that change the order.
        Raises ValueError as `block_counts`."""
        self.counts = block_counts(weights, BLOCK)
        """(sources,): positions of each source in a block; may be 0."""
        self._ends = np.cumsum(self.counts)
        self._starts = self._ends - self.counts
        self._block = lru_cache(maxsize=64)(
            lambda block: SamplerPermutation(BLOCK, seed, 0, block, *key)
        )

    def turns(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source, number of earlier samples of that source) of each position, (N,) each."""
        if len(self.counts) == 1:
            return np.zeros_like(positions), positions
        blocks, places = np.divmod(positions, BLOCK)
        slots = np.empty_like(positions)
        for block in np.unique(blocks):
            now = blocks == block
            slots[now] = self._block(int(block))(places[now])
        sources = np.searchsorted(self._ends, slots, side="right")
        # All blocks have the same counts, so earlier blocks need not be visited.
        return sources, blocks * self.counts[sources] + slots - self._starts[sources]


class Order:
    """The endless order of samples from one or several sources: position → sample.

    A pure function of the sizes, the weights and the seed. A training loop is correct if it uses
    the samples at positions 0, 1, 2, …, in any division over ranks. It saves only the number of
    samples used so far.

    A single source repeats in epochs, each in its own permutation. Several sources are mixed in
    blocks of BLOCK positions with an exact number of each, by weight. Each source has its own
    epochs, so it repeats no sample before all were used.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """Args:
            sizes: samples in each source, at least 1.
            weights: relative share of each source; [1.0] for a single source.

        Raises:
            ValueError: no source, an empty source, or a weight that is missing, not positive, or
                too small for a position in a block.
        """
        if not sizes or len(sizes) != len(weights):
            raise ValueError(
                f"{len(sizes)} source(s) with {len(weights)} weight(s); give at least one source, "
                "and one weight per source"
            )
        self._seed, self._sizes = seed, list(sizes)
        self._blocks = DataMixtureBlocks(weights, seed)
        for number, (size, count) in enumerate(zip(sizes, self._blocks.counts, strict=True)):
            if size < 1 or count < 1:
                raise ValueError(
                    f"source {number} has {size} samples and {count} of {BLOCK} places in a block; "
                    "both must be at least 1: raise its weight, or remove it"
                )
        # Keys of `DataMixtureBlocks` begin with 0, these with 1 + source, so no two are equal.
        self._epoch = lru_cache(maxsize=64)(
            lambda source, epoch: SamplerPermutation(self._sizes[source], seed, 1 + source, epoch)
        )

    def __reduce__(self) -> tuple:
        # Pickled by arguments, as the caches hold lambdas, which cannot be pickled. The block
        # counts serve as weights, as they give the same counts.
        return Order, (self._sizes, [float(count) for count in self._blocks.counts], self._seed)

    def locate(
        self, positions: NDArray | Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return (source, epoch, sample) of each position, int64 arrays of shape (N,). Raises
        ValueError if `positions` is no (N,) array of non-negative integers."""
        positions = checked_positions(positions)
        sources, turns = self._blocks.turns(positions)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        for source in np.unique(sources):
            mine = np.flatnonzero(sources == source)
            epoch, place = np.divmod(turns[mine], self._sizes[source])
            epochs[mine] = epoch
            # Positions may be on both sides of an epoch's end.
            for number in np.unique(epoch):
                now = epoch == number
                samples[mine[now]] = self._epoch(int(source), int(number))(place[now])
        return sources, epochs, samples


def checked_positions(positions: NDArray | Sequence[int]) -> NDArray[np.int64]:
    """Convert positions to int64. Raises ValueError as `Order.locate`."""
    positions = np.asarray(positions)
    whole = positions.ndim == 1 and (not positions.size or positions.dtype.kind in "iu")
    if not whole or (positions < 0).any():
        raise ValueError(f"positions must be a 1-D array of integers, 0 or more, not {positions!r}")
    return positions.astype(np.int64, copy=False)


def sample_digest(positions: NDArray, sources: NDArray, samples: NDArray) -> int:
    """Digest of the samples at positions, from (N,) int64 arrays: a sum of hashes modulo 2**32, so
    that the digests of parts sum to the digest of the whole."""
    with np.errstate(over="ignore"):
        hashes = mix(np.asarray(positions).astype(np.uint64), U64(1))
        hashes = mix(mix(sources.astype(np.uint64), hashes), samples.astype(np.uint64))
        return int((hashes >> U64(32)).sum()) & 0xFFFFFFFF


def block_counts(weights: Sequence[float], block: int) -> NDArray[np.int64]:
    """Integers that sum to `block`, in proportion to the weights, by largest remainders; ties go to
    the earlier weight. Raises ValueError if a weight is not positive, or their sum is not
    finite."""
    if not (all(weight > 0 for weight in weights) and sum(weights) < math.inf):
        raise ValueError(f"weights {list(weights)} must be positive numbers with a finite sum")
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum() * block
    counts = np.floor(shares).astype(np.int64)
    rest = np.argsort(-(shares - counts), kind="stable")[: block - counts.sum()]
    counts[rest] += 1
    return counts


def random_integers(positions: NDArray, size: int, *key: int) -> NDArray[np.int64]:
    """A random integer in range(size) for each position (N,), a pure function of position and key.
    `size`: at most 2**32; the bias is below size / 2**32."""
    state = 0
    for part in key:
        state = splitmix64(state ^ (part & MASK))
    with np.errstate(over="ignore"):
        high = mix(np.asarray(positions).astype(np.uint64), U64(state)) >> U64(32)
        # A multiplication instead of a division (Lemire 2019).
        return ((high * U64(size)) >> U64(32)).astype(np.int64)
