"""`elastic.sampler`: the samples that a rank takes in each step, at any world size."""

from collections.abc import Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic.group.batch_plan import plan_batch
from elastic.group.permutation import Permutation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ORDER_VERSION = 1
"""Version of the order, in the state of a sampler."""


class Sampler:
    """This rank's sample indices, by step. `elastic.sampler` creates it. Iterating yields a list of
    indices for each forward pass, without end, from step `done` + 1 on; so it is a `batch_sampler`
    of torch's `DataLoader`.

    Args:
        size: samples of the data set.
        global_batch: samples per optimizer step, over all ranks.
        micro_batch: most samples of a rank in one pass; None: a step is one pass.
        seed: of the order; None: the samples in their own order.
        rank: of this process among those that share the batch.
        ranks: how many share it.

    Raises:
        ValueError: there are fewer samples than `global_batch`, or `global_batch` is smaller than
            `ranks`.
    """

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
                f"{size}: it must have at least one sample for each rank, and at most the data set"
            )
        even = global_batch % ranks == 0
        # Passes of one sample do not share out an uneven batch: some rank would have an empty one.
        micro = min(global_batch, max(micro_batch or global_batch, 1 if even else 2))
        self._plan = plan_batch(global_batch, ranks, micro)
        self._size, self._seed, self._rank = size, seed, rank
        self.done = 0
        """Steps that are done, the one under way included. `Job.steps` and the adapters set it;
        other loops add 1 in each step, before they save."""
        self.passes = self._plan.passes
        """Forward passes of each rank in a step, for gradient accumulation."""
        self.weights = [len(rows) * ranks / global_batch for rows in self._rows(0)]
        """Weight of each pass of a step. The mean loss of a pass times its weight, summed over the
        passes and averaged over the ranks as DDP and FSDP do, is the mean over the global batch."""
        self.even = global_batch % (ranks * self.passes) == 0
        """Whether all passes of all ranks have equally many samples."""

    def step(self, step: int) -> list[list[int]]:
        """This rank's sample indices of a step, counted from 1, by pass. A function of the step
        alone: nothing is remembered."""
        first = (step - 1) * self._plan.global_batch
        return [self._samples(rows) for rows in self._rows(first)]

    def __iter__(self) -> Iterator[list[int]]:
        return self._passes(self.done)  # as of now, and not as of the first batch

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes, at any world size: a few numbers, equal on all ranks."""
        return {"done": self.done, **self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue after the steps that are done there.

        Raises:
            ValueError: the state is of another data set, global batch, seed or order; says which.
        """
        own = self._identity()
        changed = [
            f"{key} was {state_dict.get(key)}, and is {value}"
            for key, value in own.items()
            if state_dict.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"the sampler cannot continue exactly once: {'; '.join(changed)}; keep these, or "
                "start anew"
            )
        self.done = int(state_dict["done"])

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
        """Positions of this rank's passes in the global batch that begins at position `first`."""
        return [micro.positions for micro in self._plan.micro_batches(self._rank, first)]

    def _samples(self, positions: tuple[int, ...]) -> list[int]:
        epochs, places = np.divmod(np.array(positions, dtype=np.int64), self._size)
        if self._seed is None:
            return [int(place) for place in places]
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):  # at most two
            now = epochs == epoch
            # keyed like the first source of trainer.Order, whose order this is
            samples[now] = Permutation(self._size, self._seed, 1, int(epoch))(places[now])
        return [int(sample) for sample in samples]


def sampler(
    dataset: Sized,
    global_batch: int,
    *,
    micro_batch: int | None = None,
    seed: int | None = 0,
    group: "ProcessGroup | None" = None,
) -> Sampler:
    """A sampler of which each step takes the same samples at every world size: each sample once in
    an epoch, epoch after epoch, shuffled anew in each.

        sampler = elastic.sampler(data, global_batch=48)
        batches = DataLoader(data, batch_sampler=sampler)
        state = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpointer.load(state)
        for step, batch in zip(job.steps(sampler, 1000), batches):
            …

    Args:
        dataset: has a length; its samples are taken by index.
        global_batch: samples per optimizer step, over all ranks.
        micro_batch: most samples of a rank in one pass. Where ranks have unequal parts it is 2 at
            least. None: a step is one pass.
        seed: of the order; None: the samples in their own order.
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
