"""Ranks that act together: results and errors of all, on all."""

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import CheckpointError, StorageError, explain
from checkpointing.owners import machine
from checkpointing.plan import Layout, Nodes, TensorSpec, merge_specs
from checkpointing.tensors import specs_of

T = TypeVar("T")


class RankError(Exception):
    """A rank failed in what all did together; the same on all ranks. Its arguments travel between
    ranks."""

    def __init__(
        self,
        rank: int,
        kind: type[Exception],
        message: str,
        path: str | None = None,
        number: int | None = None,
    ) -> None:
        super().__init__(rank, kind, message, path, number)
        self.rank, self.kind, self.message, self.path, self.errno = self.args

    @staticmethod
    def of(rank: int, error: Exception) -> "RankError":
        """What the other ranks are told of an error on this one."""
        if isinstance(error, RankError):
            return error
        if isinstance(error, OSError):
            path = error.filename and str(error.filename)
            return RankError(rank, StorageError, explain(error), path, error.errno)
        if isinstance(error, CheckpointError):
            return RankError(rank, type(error), explain(error))
        if isinstance(error, ValueError):  # subclasses take other arguments
            return RankError(rank, ValueError, str(error))
        return RankError(rank, RuntimeError, explain(error))


class Ranks:
    """The ranks of a process group, or this process alone. Methods are called on all of them.

    Args:
        group: carries CPU tensors; None: this process alone, which has its rank in the default
            group if there is one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.all = [self.rank] if group is None else dist.get_process_group_ranks(group)
        self.place = self.all.index(self.rank)
        self._nodes: Nodes | None = None

    def on_main(self, work: Callable[[], T]) -> T:
        """work() on the first rank; its result on all."""
        results: list[Any] = self.together(work if self.is_main else lambda: None)
        return results[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """work() on every rank; the results of all, in order. Also a barrier.

        Raises:
            RankError: on all ranks, if any rank failed: the first of them.
        """
        result, failure, cause = None, None, None
        try:
            result = work()
        except Exception as error:
            failure, cause = RankError.of(self.rank, error).args, error
        outcomes: list[Any] = [(result, failure)]
        if self.group is not None:
            outcomes = [None] * len(self.all)
            dist.all_gather_object(outcomes, (result, failure), group=self.group)
        for _, arguments in outcomes:
            if arguments:
                first = RankError(*arguments)
                raise first from (cause if first.rank == self.rank else None)
        return [value for value, _ in outcomes]

    def each(self, work: Callable[[], T]) -> T:
        """work() on every rank, each with its own result: only whether it failed is exchanged.

        Raises:
            RankError: as `together`.
        """
        result: list[T] = []
        self.together(lambda: result.append(work()))
        return result[0]

    def nodes(self) -> Nodes:
        """The ranks of each node: those that share a machine and an elastic agent (torchrun's
        GROUP_RANK)."""
        if self._nodes is None:
            agent = os.environ.get("GROUP_RANK", "")
            identities = self.together(lambda: f"{machine()}-{agent}")
            self._nodes = tuple(
                tuple(rank for rank, of in zip(self.all, identities, strict=True) if of == one)
                for one in dict.fromkeys(identities)
            )
        return self._nodes

    @property
    def node(self) -> int:
        """Number of this rank's node, once `nodes` was called."""
        return next(node for node, ranks in enumerate(self._nodes or ()) if self.rank in ranks)

    @property
    def first_of_node(self) -> bool:
        """Whether this is the first rank of its node, once `nodes` was called."""
        return any(ranks[0] == self.rank for ranks in self._nodes or ())

    @property
    def is_main(self) -> bool:
        """Whether this is the first rank of all."""
        return self.place == 0

    def specs(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """What all ranks together hold; without a group, what this one sees of it. One digest a
        rank tells whether there is anything to exchange: where every rank sees all, there is not.

        Raises:
            RankError: a tensor cannot be stored, or the ranks contradict each other.
        """
        specs: dict[str, TensorSpec] = {}
        alone = self.group is None and dist.is_initialized()
        known = range(dist.get_world_size()) if alone else self.all

        def digest() -> str:
            specs.update(specs_of(tensors, known))
            return specs_digest(specs)

        if len(set(self.together(digest))) == 1:
            return specs
        everyone = dict(zip(self.all, self.together(lambda: specs), strict=True))
        return self.each(lambda: merge_specs(everyone))


def specs_digest(specs: Mapping[str, TensorSpec]) -> str:
    """Stands for specs. Layouts are digested once each: at 16,384 ranks they are large, but few."""
    layouts: dict[Layout, int] = {}
    lines = []
    for name, spec in specs.items():
        numbers = [layouts.setdefault(layout, len(layouts)) for layout in spec.layouts]
        lines.append(f"{name} {spec.meta} {numbers}")
    return hashlib.sha256("\n".join([*map(repr, layouts), *lines]).encode()).hexdigest()
