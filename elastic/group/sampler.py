"""The samples that a rank takes in each step, at any world size (`elastic.sampler`), in the order
of a keyed pseudo-random permutation. numpy only. The results of a permutation must never change,
because checkpoints hold positions in orders of samples that depend on them."""

from collections.abc import Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic.group.batch_plan import plan_batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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


ORDER_VERSION = 1
"""Part of a sampler's state; changes if the order of samples ever does."""


class Sampler:
    """The sample indices of this rank in each step; created by `elastic.sampler`. Iterating yields
    a list of indices for each forward pass, without end, from step `done` + 1 on. Thus a sampler
    can be the `batch_sampler` of torch's `DataLoader`."""

    def __init__(
        self,
        size: int,
        global_batch: int,
        micro_batch: int | None,
        seed: int | None,
        rank: int,
        ranks: int,
    ) -> None:
        if not ranks <= global_batch <= size:
            raise ValueError(
                f"a global batch of {global_batch} samples, with {ranks} rank(s) and a data set of "
                f"{size} samples: choose a batch with at least one sample for each rank, and at "
                "most all samples of the data set"
            )
        even = global_batch % ranks == 0
        # With passes of one sample, some rank would have an empty pass if the batch is uneven.
        micro = min(global_batch, max(micro_batch or global_batch, 1 if even else 2))
        self._plan = plan_batch(global_batch, ranks, micro)
        self._size, self._seed, self._rank = size, seed, rank
        self.done = 0
        """Number of steps begun, so that a save at the end of a step counts this step as done.
        `Job.steps` and the adapters set it; other loops add 1 in each step, before they save."""
        self.passes = self._plan.passes
        """Forward passes of each rank per step, for gradient accumulation."""
        self.weights = [len(rows) * ranks / global_batch for rows in self._rows(0)]
        """Weight of each pass of a step. The mean loss of a pass times its weight, summed over the
        passes and averaged over the ranks as DDP and FSDP do, is the mean over the global batch."""
        self.even = global_batch % (ranks * self.passes) == 0
        """Whether all passes of all ranks have equally many samples."""

    def step(self, step: int) -> list[list[int]]:
        """Returns this rank's sample indices for each pass of step number `step`, from 1 on. No
        state is read or changed."""
        first = (step - 1) * self._plan.global_batch
        return [self._samples(rows) for rows in self._rows(first)]

    def __iter__(self) -> Iterator[list[int]]:
        # Begin after the steps done when iter() is called, not when the first batch is read.
        return self._passes(self.done)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`: a few numbers, equal on all ranks and at every
        world size."""
        return {"done": self.done, **self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after the last complete step of `state_dict`.

        Raises:
            ValueError: data set size, global batch, seed or order differ, or `done` is no number of
                steps; the message says which.
        """
        own = self._identity()
        changed = [
            f"{key} was {state_dict.get(key)}, and is {value}"
            for key, value in own.items()
            if state_dict.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"the sampler cannot continue with each sample exactly once: {'; '.join(changed)}; "
                "restore the earlier values, or start a new run"
            )
        done = state_dict.get("done")
        if not (isinstance(done, int) and done >= 0):
            raise ValueError(
                f"the sampler's state says done={done!r}, which is no number of steps; load what "
                "Sampler.state_dict returned"
            )
        self.done = done

    def _identity(self) -> dict[str, Any]:
        return {
            "size": self._size,
            "global_batch": self._plan.global_batch,
            "seed": self._seed,
            "order": ORDER_VERSION,
        }

    def _passes(self, done: int) -> Iterator[list[int]]:
        while True:
            done += 1
            yield from self.step(done)

    def _rows(self, first: int) -> list[tuple[int, ...]]:
        return [micro.positions for micro in self._plan.micro_batches(self._rank, first)]

    def _samples(self, positions: tuple[int, ...]) -> list[int]:
        epochs, places = np.divmod(np.array(positions, dtype=np.int64), self._size)
        if self._seed is None:
            return [int(place) for place in places]
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):  # at most two epochs in one step
            now = epochs == epoch
            # The key is that of the first source of `trainer.Order`, so that a sampler and an
            # `Order` of one source give the same order.
            samples[now] = SamplerPermutation(self._size, self._seed, 1, int(epoch))(places[now])
        return [int(sample) for sample in samples]


def sampler(
    dataset: Sized,
    global_batch: int,
    *,
    micro_batch: int | None = None,
    seed: int | None = 0,
    group: "ProcessGroup | None" = None,
) -> Sampler:
    """Create a sampler whose steps take the same samples at every world size. Each epoch takes
    every sample once and is shuffled anew; epochs follow each other without end.

        sampler = elastic.sampler(data, global_batch=48)
        batches = DataLoader(data, batch_sampler=sampler)
        state = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpointer.load(state)
        for step, batch in zip(job.steps(sampler, 1000), batches):
            …

    Args:
        dataset: has a length; its samples are taken by index.
        global_batch: samples per optimizer step, over all ranks.
        micro_batch: largest number of samples of a rank in one pass, raised to 2 where ranks have
            unequal parts. None: a step is one pass.
        seed: seed of the order; None: the samples in the order of the data set.
        group: ranks that share the batch; None: all ranks.

    Raises:
        ValueError: the batch is smaller than the number of ranks, or larger than the data set.
        TypeError: the data set has no length.
    """
    import torch.distributed as dist

    rank, ranks = 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return Sampler(len(dataset), global_batch, micro_batch, seed, rank, ranks)
