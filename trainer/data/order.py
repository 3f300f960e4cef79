"""The order of the data: position → sample, a pure function. numpy only.

The sequence of samples is infinite, needs no memory, and allows random access. `Order.locate`
depends on the positions, the sizes and weights of the sources, and the seed; never on the number
of ranks, workers or steps. Its results are frozen as ORDER_VERSION 1: checkpoints store a position.

Version 2 is the order of samples when the mixture changes.

[Note: stages] The order follows a table of mixtures, each with the position where it begins. The
table may grow at any position that is not consumed yet; samples at earlier positions stay the same.
Each source has an endless stream of samples; the place of a sample in this stream, 0, 1, 2, …, is
its *turn*. A mixture assigns turns to positions in blocks, as version 1 does; the first mixture
equals version 1 bit for bit. Three rules are added:

- A mixture's blocks begin where the mixture begins. From the second mixture on, its number is part
  of the random key.
- A mixture that ends inside a block leaves at most BLOCK turns of a source unassigned, its *carry*.
  The next mixture with that source assigns them first. So no turn is lost at any border.
- A source that grows begins an *era*: the rest of its epoch is a new permutation of the remaining
  old samples and of all new ones.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elastic.group.sampler import MASK, U64, SamplerPermutation, mix, splitmix64

if TYPE_CHECKING:
    from trainer.recipe.stages import RecipeStageRow


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


STAGED_ORDER_VERSION = 2
NO_TURNS = np.empty(0, np.int64)


class DataMixture(NamedTuple):
    """The mixture of sources from a position on, until the next mixture begins."""

    begin: int
    weights: Mapping[int, float]
    """Source → relative share. An absent source pauses, and resumes in a later mixture."""
    sizes: Mapping[int, int]
    """Source → number of samples, for sources that are new or have grown."""


class StagedDataOrder:
    """The endless order of samples under a table of mixtures: position → sample. Like `Order`, a
    pure function of the table and the seed. Each source yields every sample once before it repeats
    one, whichever mixtures it is in."""

    def __init__(self, mixtures: Sequence[DataMixture], seed: int) -> None:
        """`mixtures`: in ascending order; the first begins at 0. Raises ValueError if a mixture
        contradicts an earlier one."""
        self._mixtures, self._seed = list(mixtures), seed
        self._sources: dict[int, _SourceState] = {}
        self._parts: list[_MixtureTurns] = []
        for number, mixture in enumerate(mixtures):
            if not number and mixture.begin:
                raise ValueError(f"mixture 0 begins at {mixture.begin}; it must begin at 0")
            if number:
                before = self._parts[-1]
                if mixture.begin <= before.begin:
                    raise ValueError(
                        f"mixture {number} begins at {mixture.begin}; it must begin after "
                        f"{before.begin}"
                    )
                before.leave(mixture.begin - before.begin, self._sources)
            for source, size in mixture.sizes.items():
                self._sources.setdefault(source, _SourceState()).grow(source, size)
            self._parts.append(_MixtureTurns(number, mixture, self._sources, seed))
        self._begins = np.array([part.begin for part in self._parts])
        self._permutation = lru_cache(maxsize=64)(
            lambda size, *key: SamplerPermutation(size, seed, *key)
        )

    def __reduce__(self) -> tuple:
        # The caches hold lambdas, which cannot be pickled.
        return StagedDataOrder, (self._mixtures, self._seed)

    def locate(
        self, positions: NDArray | Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return (source, epoch, sample) of each position, (N,) int64 each; see `Order.locate`."""
        sources, turns = self.turns(positions)
        epochs, samples = np.empty_like(turns), np.empty_like(turns)
        for source in np.unique(sources):
            begins = [era.begin for era in self._sources[source].eras]
            mine = np.flatnonzero(sources == source)
            numbers = np.searchsorted(begins, turns[mine], side="right") - 1
            for number in np.unique(numbers):
                now = mine[numbers == number]
                epochs[now], samples[now] = self._samples(int(source), int(number), turns[now])
        return sources, epochs, samples

    def turns(
        self, positions: NDArray | Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (source, turn in that source's stream) of each position, (N,) int64 each."""
        positions = checked_positions(positions)
        sources, turns = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted(self._begins, positions, side="right") - 1
        for number in np.unique(numbers):
            mine, part = numbers == number, self._parts[number]
            indices, turns[mine] = part.turns(positions[mine] - part.begin)
            sources[mine] = part.sources[indices]
        return sources, turns

    def assigned_turns(self, source: int) -> tuple[int, NDArray[np.int64]]:
        """Return (N, carry) of a source where the last mixture begins: turns 0 to N - 1 are
        assigned to earlier positions, except those in `carry`."""
        known = self._sources[source]
        return known.base, known.carry

    def _samples(
        self, source: int, number: int, turns: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (epoch, sample) of turns within era `number` of a source."""
        eras = self._sources[source].eras
        epochs, places = eras[number].place(turns)
        samples = np.empty_like(turns)
        # A sample that was left over from the previous era is looked up there, by its turn in that
        # era. It may have been left over from a still earlier era.
        left, of, which = np.arange(len(turns)), epochs, places
        while len(left):
            era = eras[number]
            mixed = turns - era.begin < era.rest
            for epoch in np.unique(of[~mixed]):
                now = ~mixed & (of == epoch)
                samples[left[now]] = self._permutation(era.size, 1 + source, int(epoch))(which[now])
            drawn = NO_TURNS
            if mixed.any():
                drawn = self._permutation(era.rest, 1 + source, era.epoch, number)(which[mixed])
                samples[left[mixed]] = drawn - era.old + eras[number - 1].size
            again = drawn < era.old
            left, turns, number = left[mixed][again], era.begin + drawn[again], number - 1
            of, which = eras[number].place(turns)
        return epochs, samples


class DataSetOrder:
    """The order of samples under the stages of a recipe: position → sample of a data set. A data
    set may extend an earlier one: both are then one source."""

    def __init__(self, rows: "Sequence[RecipeStageRow]", sizes: Sequence[int], seed: int) -> None:
        """`rows`: stages of a recipe. `sizes`: number of samples in each data set. Raises
        ValueError if the weight of a data set is too small."""
        parts: dict[int, list[int]] = {}
        mixtures = []
        for row in rows:
            for data_set, extended in row.joins.items():
                parts.setdefault(extended, []).append(data_set)
            grown = set(row.joins.values())
            totals = {source: sum(sizes[part] for part in parts[source]) for source in grown}
            mixtures.append(DataMixture(row.begin, row.weights, totals))
        self._order = StagedDataOrder(mixtures, seed)
        self._parts = {
            source: (np.array(several), np.cumsum([0, *(sizes[part] for part in several[:-1])]))
            for source, several in parts.items()
            if len(several) > 1
        }
        """Extended source → (its data sets, the first sample of each)."""

    def locate(
        self, positions: NDArray | Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return (data set, epoch of its source, sample of the data set) of each position, (N,)
        int64 each."""
        sources, epochs, samples = self._order.locate(positions)
        data_sets = sources.copy()
        for source, (several, begins) in self._parts.items():
            mine = sources == source
            places = np.searchsorted(begins, samples[mine], side="right") - 1
            data_sets[mine] = several[places]
            samples[mine] -= begins[places]
        return data_sets, epochs, samples


def fingerprints_of(
    rows: "Sequence[RecipeStageRow]", first: str, contents: Sequence[Sequence[object]]
) -> list[tuple[int, str]]:
    """Return (first position, fingerprint) of each stage after the first. A fingerprint covers all
    stages up to its own, but no later ones, so that the table may grow. `first`: fingerprint of the
    first stage; `contents`: identity of each data set."""
    found, last = list[tuple[int, str]](), first
    for row in rows[1:]:
        joins = [[new, source, *contents[new]] for new, source in sorted(row.joins.items())]
        weights = [[source, float(weight)] for source, weight in sorted(row.weights.items())]
        parts = [STAGED_ORDER_VERSION, last, row.begin, weights, joins]
        last = f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"
        found.append((row.begin, last))
    return found


@dataclass(frozen=True)
class _Era:
    """The stream of a source while its number of samples is constant."""

    begin: int = 0
    """First turn of the era."""
    size: int = 0
    epoch: int = 0
    """Epoch in progress when the era begins."""
    old: int = 0
    """Samples of the previous era that remain in `epoch`."""
    rest: int = 0
    """Turns until the next epoch begins: `old` plus all new samples; 0: an epoch begins with the
    era."""

    def place(self, turns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (epoch, place in the epoch's permutation) of turns from `begin` on."""
        past = turns - self.begin
        whole, place = np.divmod(past - self.rest, self.size)
        first = past < self.rest
        epochs = np.where(first, self.epoch, self.epoch + (self.rest > 0) + whole)
        return epochs, np.where(first, past, place)


@dataclass
class _SourceState:
    """State of a source where a mixture begins."""

    eras: list[_Era] = field(default_factory=list)
    base: int = 0
    """All turns below `base` are assigned to positions, except those in `carry`."""
    carry: NDArray[np.int64] = field(default_factory=lambda: NO_TURNS)

    def grow(self, source: int, size: int) -> None:
        """Give source number `source` a size of `size` samples from turn `base` on."""
        era = self.eras[-1] if self.eras else _Era()
        if size <= era.size:
            raise ValueError(
                f"source {source} has {size} samples, after {era.size} before; a source must grow"
            )
        # no turn of the last era has a position yet ([Note: stages]): replace the era
        if self.base == era.begin:
            rest = era.rest + (size - era.size if era.rest else 0)
            self.eras[-1:] = [_Era(era.begin, size, era.epoch, era.old, rest)]
            return
        (epoch,), (place,) = era.place(np.array([self.base]))
        length = era.rest if self.base - era.begin < era.rest else era.size
        old = int(length - place) if place else 0
        rest = old + size - era.size if old else 0
        self.eras.append(_Era(self.base, size, int(epoch), old, rest))


class _MixtureTurns:
    """The assignment of the sources' turns to the positions of one mixture."""

    def __init__(
        self, number: int, mixture: DataMixture, known: Mapping[int, _SourceState], seed: int
    ) -> None:
        self.begin, self.sources = mixture.begin, np.array(sorted(mixture.weights), np.int64)
        if not len(self.sources):
            raise ValueError(f"mixture {number} has no source")
        key = (number,) if number else ()  # the first mixture is ordered as in order version 1
        self._blocks = DataMixtureBlocks(
            [mixture.weights[source] for source in self.sources], seed, *key
        )
        for source, count in zip(self.sources, self._blocks.counts, strict=True):
            if source not in known or not count:
                what = (
                    f"none of the {BLOCK} places in a block; raise its weight, or leave it out"
                    if source in known
                    else "no size; add it to the sizes of this mixture or an earlier one"
                )
                raise ValueError(f"mixture {number}: source {source} has {what}")
        self._bases = [known[source].base for source in self.sources]
        self._carries = [known[source].carry for source in self.sources]

    def turns(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (index in `sources`, turn in that source's stream) of positions, which are counted
        from `begin`."""
        indices, inside = self._blocks.turns(positions)
        turns = np.empty_like(positions)
        for index, (base, carry) in enumerate(zip(self._bases, self._carries, strict=True)):
            mine = indices == index
            places = inside[mine]
            turns[mine] = base + places - len(carry)
            early = places < len(carry)
            turns[np.flatnonzero(mine)[early]] = carry[places[early]]
        return indices, turns

    def leave(self, length: int, known: Mapping[int, _SourceState]) -> None:
        """Set the state of each source to that after the first `length` positions of this
        mixture."""
        blocks, inside = divmod(length, BLOCK)
        counts = (blocks + (inside > 0)) * self._blocks.counts
        behind = np.arange(length, (blocks + 1) * BLOCK) if inside else NO_TURNS
        if len(self.sources) == 1:
            counts, behind = np.array([length]), NO_TURNS
        indices, turns = self.turns(behind)
        for index, source in enumerate(self.sources):
            carry, count = self._carries[index], int(counts[index])
            known[source].base = self._bases[index] + max(0, count - len(carry))
            left = turns[indices == index]
            known[source].carry = np.concatenate([np.sort(left), carry[count:]])
