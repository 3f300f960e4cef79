"""Order version 2: the order of samples where the mixture changes. numpy only.

[Note: stages] A table of mixtures, each from a position on, may grow at any position that is not
consumed yet. What comes before that position stays as it was. Each source has an endless stream of
*ranks* 0, 1, 2, …; a mixture hands them out in blocks as version 1 does, of which the first mixture
is a part, bit for bit. Three things are added:

- A mixture's blocks begin where it begins. From the second on, its number is part of their key.
- A mixture that ends inside a block leaves at most BLOCK ranks of a source behind, its *carry*. The
  next mixture with that source hands them out first. So no rank is lost, wherever a border is.
- A source that grows begins an *era*: the rest of its epoch is a new permutation of the old samples
  still to come and of all new ones.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import BLOCK, Blocks, Permutation, checked_positions

if TYPE_CHECKING:
    from trainer.recipe.stages import StageRow

STAGED_ORDER_VERSION = 2
NO_RANKS = np.empty(0, np.int64)


class Mixture(NamedTuple):
    """A row of the table: the mixture from a position on."""

    begin: int
    weights: Mapping[int, float]
    """Source → relative share. A source without one rests, and goes on where it was later."""
    sizes: Mapping[int, int]
    """Source → samples, of sources that are new or have grown."""


class StagedOrder:
    """The endless order of samples under a table of mixtures: position → sample. Like `Order`, a
    pure function of the table and the seed.

    Each source shows every sample once before it repeats one, whatever mixtures it takes part in.
    """

    def __init__(self, mixtures: Sequence[Mixture], seed: int) -> None:
        """Args:
            mixtures: in ascending order; the first begins at 0.

        Raises:
            ValueError: the table contradicts itself.
        """
        self._mixtures, self._seed = list(mixtures), seed
        self._sources: dict[int, _Source] = {}
        self._parts: list[_Part] = []
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
                self._sources.setdefault(source, _Source()).grow(source, size)
            self._parts.append(_Part(number, mixture, self._sources, seed))
        self._begins = np.array([part.begin for part in self._parts])
        self._permutation = lru_cache(maxsize=64)(lambda size, *key: Permutation(size, seed, *key))

    def __reduce__(self) -> tuple:
        # The caches hold lambdas, which cannot be pickled.
        return StagedOrder, (self._mixtures, self._seed)

    def locate(
        self, positions: NDArray | Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(source, epoch, sample) of each position, as `Order.locate`."""
        sources, ranks = self.ranks(positions)
        epochs, samples = np.empty_like(ranks), np.empty_like(ranks)
        for source in np.unique(sources):
            begins = [era.begin for era in self._sources[source].eras]
            mine = np.flatnonzero(sources == source)
            numbers = np.searchsorted(begins, ranks[mine], side="right") - 1
            for number in np.unique(numbers):
                now = mine[numbers == number]
                epochs[now], samples[now] = self._samples(int(source), int(number), ranks[now])
        return sources, epochs, samples

    def ranks(
        self, positions: NDArray | Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, rank in the stream of that source) of each position, (N,) int64 each."""
        positions = checked_positions(positions)
        sources, ranks = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted(self._begins, positions, side="right") - 1
        for number in np.unique(numbers):
            mine, part = numbers == number, self._parts[number]
            indices, ranks[mine] = part.ranks(positions[mine] - part.begin)
            sources[mine] = part.sources[indices]
        return sources, ranks

    def handed_out(self, source: int) -> tuple[int, NDArray[np.int64]]:
        """(N, carry) at the beginning of the last mixture: ranks 0 to N - 1 of a source are handed
        out, except those in `carry`."""
        known = self._sources[source]
        return known.base, known.carry

    def _samples(
        self, source: int, number: int, ranks: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epoch, sample) of ranks of one era of a source."""
        eras = self._sources[source].eras
        epochs, places = eras[number].place(ranks)
        samples = np.empty_like(ranks)
        # An era draws old samples by their ranks, which the era before resolves, and so on.
        left, of, which = np.arange(len(ranks)), epochs, places
        while len(left):
            era = eras[number]
            mixed = ranks - era.begin < era.rest
            for epoch in np.unique(of[~mixed]):
                now = ~mixed & (of == epoch)
                samples[left[now]] = self._permutation(era.size, 1 + source, int(epoch))(which[now])
            drawn = NO_RANKS
            if mixed.any():
                drawn = self._permutation(era.rest, 1 + source, era.epoch, number)(which[mixed])
                samples[left[mixed]] = drawn - era.old + eras[number - 1].size
            again = drawn < era.old
            left, ranks, number = left[mixed][again], era.begin + drawn[again], number - 1
            of, which = eras[number].place(ranks)
        return epochs, samples


class DataSetOrder:
    """The order of samples under stages, where data sets may extend others: position → sample of a
    data set. Like `Order` otherwise."""

    def __init__(self, rows: "Sequence[StageRow]", sizes: Sequence[int], seed: int) -> None:
        """Args:
            rows: stages of a recipe.
            sizes: samples in each data set.

        Raises:
            ValueError: a row names a data set that has too small a weight.
        """
        parts: dict[int, list[int]] = {}
        mixtures = []
        for row in rows:
            for data_set, extended in row.joins.items():
                parts.setdefault(extended, []).append(data_set)
            grown = set(row.joins.values())
            totals = {source: sum(sizes[one] for one in parts[source]) for source in grown}
            mixtures.append(Mixture(row.begin, row.weights, totals))
        self._order = StagedOrder(mixtures, seed)
        self._parts = {
            source: (np.array(several), np.cumsum([0, *(sizes[one] for one in several[:-1])]))
            for source, several in parts.items()
            if len(several) > 1
        }
        """Source that was extended → its data sets, and the first sample of each."""

    def locate(
        self, positions: NDArray | Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(data set, epoch of its source, sample of the data set) of each position, as
        `Order.locate`."""
        sources, epochs, samples = self._order.locate(positions)
        found = sources.copy()
        for source, (several, begins) in self._parts.items():
            mine = sources == source
            places = np.searchsorted(begins, samples[mine], side="right") - 1
            found[mine] = several[places]
            samples[mine] -= begins[places]
        return found, epochs, samples


def fingerprints_of(
    rows: "Sequence[StageRow]", first: str, contents: Sequence[Sequence[object]]
) -> list[tuple[int, str]]:
    """(first sequence, fingerprint) of each stage but the first. A fingerprint covers all stages up
    to its own, and none that follow, so that a table may grow.

    Args:
        rows: stages of a recipe.
        first: fingerprint of the first stage.
        contents: identity of each data set.
    """
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
    """The stream of a source while it has one size."""

    begin: int = 0
    """First rank."""
    size: int = 0
    epoch: int = 0
    """Epoch under way when the era begins."""
    old: int = 0
    """Samples of the era before that are still to come in that epoch."""
    rest: int = 0
    """Samples until the next epoch begins: `old` and all new ones; 0: an epoch begins here."""

    def place(self, ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epoch, place in its permutation) of ranks from `begin` on."""
        past = ranks - self.begin
        whole, place = np.divmod(past - self.rest, self.size)
        first = past < self.rest
        epochs = np.where(first, self.epoch, self.epoch + (self.rest > 0) + whole)
        return epochs, np.where(first, past, place)


@dataclass
class _Source:
    """A source at one border of the table."""

    eras: list[_Era] = field(default_factory=list)
    base: int = 0
    """Ranks handed out: all below it, except `carry`."""
    carry: NDArray[np.int64] = field(default_factory=lambda: NO_RANKS)

    def grow(self, source: int, size: int) -> None:
        """Set the number of samples, from rank `base` on."""
        era = self.eras[-1] if self.eras else _Era()
        if size <= era.size:
            raise ValueError(f"source {source} has {size} samples, after {era.size}; it must grow")
        if self.base == era.begin:  # nothing of that era was handed out
            rest = era.rest + (size - era.size if era.rest else 0)
            self.eras[-1:] = [_Era(era.begin, size, era.epoch, era.old, rest)]
            return
        (epoch,), (place,) = era.place(np.array([self.base]))
        length = era.rest if self.base - era.begin < era.rest else era.size
        old = int(length - place) if place else 0
        rest = old + size - era.size if old else 0
        self.eras.append(_Era(self.base, size, int(epoch), old, rest))


class _Part:
    """How one mixture hands out the ranks of its sources."""

    def __init__(
        self, number: int, mixture: Mixture, known: Mapping[int, _Source], seed: int
    ) -> None:
        self.begin, self.sources = mixture.begin, np.array(sorted(mixture.weights), np.int64)
        if not len(self.sources):
            raise ValueError(f"mixture {number} has no source")
        key = (number,) if number else ()  # the first mixture is version 1
        self._blocks = Blocks([mixture.weights[source] for source in self.sources], seed, *key)
        for source, count in zip(self.sources, self._blocks.counts, strict=True):
            if source not in known or not count:
                what = f"none of the {BLOCK} places in a block" if source in known else "no size"
                raise ValueError(f"mixture {number}: source {source} has {what}")
        self._bases = [known[source].base for source in self.sources]
        self._carries = [known[source].carry for source in self.sources]

    def ranks(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(index of the source, rank in its stream) of positions, counted from `begin`."""
        indices, turns = self._blocks.turns(positions)
        ranks = np.empty_like(positions)
        for index, (base, carry) in enumerate(zip(self._bases, self._carries, strict=True)):
            mine = indices == index
            places = turns[mine]
            ranks[mine] = base + places - len(carry)
            early = places < len(carry)
            ranks[np.flatnonzero(mine)[early]] = carry[places[early]]
        return indices, ranks

    def leave(self, length: int, known: Mapping[int, _Source]) -> None:
        """Bring the sources to where they are after `length` positions."""
        blocks, inside = divmod(length, BLOCK)
        turns = (blocks + (inside > 0)) * self._blocks.counts
        behind = np.arange(length, (blocks + 1) * BLOCK) if inside else NO_RANKS
        if len(self.sources) == 1:
            turns, behind = np.array([length]), NO_RANKS
        indices, ranks = self.ranks(behind)
        for index, source in enumerate(self.sources):
            carry, count = self._carries[index], int(turns[index])
            known[source].base = self._bases[index] + max(0, count - len(carry))
            left = ranks[indices == index]
            known[source].carry = np.concatenate([np.sort(left), carry[count:]])
