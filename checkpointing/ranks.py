"""Collective operations on values in host memory: an error of one rank is raised on all."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import RankFailure
from checkpointing.format.plan import Nodes, TensorLayout, TensorSpec, merge_specs
from checkpointing.format.tensors import broadcast, specs_of
from checkpointing.storage.ownership import machine
from checkpointing.wire import MAX_BYTES, WireError, pack, unpack

T = TypeVar("T")

WORD_BYTES = 256
"""Bytes that each rank sends in the first round of `exchange`. Most values need no second round."""


class RankError(Exception):
    """A rank failed in a joint operation. Raised on all ranks."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure)
        self.failure, self.kind, self.message = failure, failure.kind, failure.message

    @staticmethod
    def of(rank: int, error: Exception) -> RankFailure:
        return error.failure if isinstance(error, RankError) else RankFailure.of(rank, error)


@contextmanager
def failing_alike() -> Iterator[None]:
    """Convert a RankError that the block raises to an exception of the class that the failed rank
    raised."""
    try:
        yield
    except RankError as failed:
        raise failed.kind(failed.message) from failed.__cause__


class RankGroup:
    """The ranks of a process group that carries CPU tensors, or this process alone, with its rank
    in the default group if there is one. Methods are called on all ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.all = [self.rank] if group is None else dist.get_process_group_ranks(group)
        self.place = self.all.index(self.rank)
        self._nodes: Nodes | None = None

    def on_main(self, work: Callable[[], T]) -> T:
        """Run work() on the first rank; returns its result on all ranks."""
        results: list[Any] = self.together(work if self.is_main else lambda: None)
        return results[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run work() on every rank; returns all results in the order of ranks. Also a barrier.
        Raises RankError on all ranks, with the error of the first rank that failed."""
        outcome: Any = None
        cause = None
        try:
            outcome = work()
        except Exception as error:
            outcome, cause = RankError.of(self.rank, error), error
        outcomes = [outcome]
        if self.group is not None:
            outcomes = exchange(outcome, len(self.all), self.group)
        # raised after the exchange: a failed rank must take part in it, else all others would hang
        for failure in outcomes:
            if isinstance(failure, RankFailure):
                raise RankError(failure) from (cause if failure.rank == self.rank else None)
        return outcomes

    def each(self, work: Callable[[], T]) -> T:
        """Like `together`, but returns this rank's result. Only failures are exchanged."""
        result: list[T] = []
        self.together(lambda: result.append(work()))
        return result[0]

    def share(self, tensors: Iterable[Tensor], held: Sequence[tuple[int, bytes]]) -> None:
        """Copy tensors to all ranks whose tensors have the same names and shapes, from the first of
        these ranks. `held` has for each rank the size of its tensors in bytes, and a digest of
        their names and shapes."""
        # All ranks must take part in every broadcast, even of tensors that a rank lacks.
        for one in dict.fromkeys(held):
            nbytes, first = one[0], held.index(one)
            if nbytes and held.count(one) > 1:
                mine = held[self.place] == one
                heard = tensors if mine else [torch.empty(nbytes, dtype=torch.uint8)]
                broadcast(heard, first, self.group, torch.device("cpu"))

    def nodes(self) -> Nodes:
        """Returns the ranks of each node: ranks with the same machine and elastic agent (torchrun's
        GROUP_RANK)."""
        if self._nodes is None:
            agent = os.environ.get("GROUP_RANK", "")
            # Two agents on one machine are two nodes, as each can be lost without the other.
            identities = self.together(lambda: f"{machine()}-{agent}")
            self._nodes = tuple(
                tuple(rank for rank, of in zip(self.all, identities, strict=True) if of == one)
                for one in dict.fromkeys(identities)
            )
        return self._nodes

    @property
    def node(self) -> int:
        """Number of this rank's node. Requires an earlier call of `nodes`."""
        return next(node for node, ranks in enumerate(self._nodes or ()) if self.rank in ranks)

    @property
    def first_of_node(self) -> bool:
        """Whether this is the first rank of its node. Requires an earlier call of `nodes`."""
        return any(ranks[0] == self.rank for ranks in self._nodes or ())

    @property
    def is_main(self) -> bool:
        return self.place == 0

    def specs(
        self, sections: Callable[[], Sequence[Mapping[str, Tensor]]]
    ) -> list[dict[str, TensorSpec]]:
        """Returns, for each collection of tensors, the specs merged over all ranks; without a
        group, those of this rank. The specs themselves are exchanged only if their digests differ.
        Calls `sections`, which returns this rank's collections, once. Raises RankError if it
        failed, a tensor cannot be stored, or ranks contradict each other."""
        specs: list[dict[str, TensorSpec]] = []
        # DTensors name ranks of the whole world, even if this process acts alone.
        alone = self.group is None and dist.is_initialized()
        known = range(dist.get_world_size()) if alone else self.all

        def digest() -> str:
            specs.extend(specs_of(tensors, known) for tensors in sections())
            return " ".join(map(specs_digest, specs))

        if len(set(self.together(digest))) == 1:
            return specs
        everyone = self.together(lambda: specs)

        def merge() -> list[dict[str, TensorSpec]]:
            by_section = zip(*everyone, strict=True)
            return [merge_specs(dict(zip(self.all, of, strict=True))) for of in by_section]

        return self.each(merge)


def exchange(value: Any, size: int, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks of a group of `size`, in order. Called on all its ranks.
    Takes one collective if all values are short, else two. Raises RuntimeError if the bytes are not
    from a rank of this run, and TypeError if `wire.pack` does not accept `value`."""
    data = pack(value)
    room = WORD_BYTES - 8
    heads = _gathered(data[:room], len(data), room, size, group)
    lengths = [length for length, _ in heads]
    for rank, length in enumerate(lengths):
        if not 0 <= length <= MAX_BYTES:  # checked before so many bytes are allocated
            raise RuntimeError(
                f"{length} bytes are announced in the name of rank {rank} of a group: {_STRANGE}"
            )
    if max(lengths) > room:
        heads = _gathered(data, len(data), max(lengths), size, group)
    try:
        return [unpack(held[:length]) for length, (_, held) in zip(lengths, heads, strict=True)]
    except WireError as error:
        raise RuntimeError(f"from another rank of a group: {error}: {_STRANGE}") from error


_STRANGE = "no rank of this run sends that; somebody else does (docs/elastic.md, who is trusted)"


def _gathered(
    data: bytes, length: int, room: int, size: int, group: dist.ProcessGroup
) -> list[tuple[int, bytes]]:
    """Returns (`length`, `data` padded to `room` bytes) of each rank. Called on all ranks."""
    word = torch.zeros(8 + room, dtype=torch.uint8)
    word[:8].view(torch.int64).fill_(length)  # separates the data from the padding
    word[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    words = [torch.empty_like(word) for _ in range(size)]
    dist.all_gather(words, word, group=group)
    return [(int(word[:8].view(torch.int64)), word[8:].numpy().tobytes()) for word in words]


def specs_digest(specs: Mapping[str, TensorSpec]) -> str:
    """Returns a digest of specs. Each layout is digested once, as it is large and shared."""
    layouts: dict[TensorLayout, int] = {}
    lines = []
    for name, spec in specs.items():
        numbers = [layouts.setdefault(layout, len(layouts)) for layout in spec.layouts]
        lines.append(f"{name} {spec.meta} {numbers}")
    return hashlib.sha256("\n".join([*map(repr, layouts), *lines]).encode()).hexdigest()
