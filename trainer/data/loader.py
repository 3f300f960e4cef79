"""Loads positions as batches of tensors. The only module that uses torchdata.

torchdata runs the workers, but neither the order nor the saved state: its own state repeats or
drops samples when the number of ranks or workers changes. Ours is one integer, the position.
"""

import hashlib
import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from checkpointing.storage.place import Place
from elastic.group.batch_plan import BatchPlan
from elastic.process import die_with_parent
from trainer.data.documents import cu_seqlens_of
from trainer.data.order import BLOCK, ORDER_VERSION, Order, block_counts, sample_digest
from trainer.data.packing import (
    PACKING_VERSION,
    Bins,
    Pack,
    Sequenced,
    Windows,
    packing_of,
)
from trainer.data.samples import IGNORED_LABEL
from trainer.data.shards import DataError, Reader, TokenDataset
from trainer.data.stages import DataSetOrder, fingerprints_of
from trainer.data.stream import CONSUMED, COUNTED, Accounted, Stream

if TYPE_CHECKING:
    from trainer.recipe.sections import DataCache
    from trainer.recipe.stages import StageRow

MASK = 0xFFFFFFFF
READ_AHEAD = 4
"""Micro-batches that a worker is asked for before they are used."""

Documents: TypeAlias = Literal["document_ids", "cu_seqlens"]
"""Form of a micro-batch's document boundaries: an id per token, (B, T) int32, or
`trainer.data.documents.cu_seqlens_of`."""


class TokenStream:
    """Sequences of `seq_len` tokens, by position. Shapes: B sequences, T = seq_len.

    Documents are packed by trainer.data.packing. Every label is the next token of its input.
    """

    def __init__(
        self,
        packings: Sequence[Windows | Bins],
        order: Order | DataSetOrder | None,
        seq_len: int,
        documents: Documents | None,
        fingerprint: str,
        ahead: int = 0,
        stages: Sequence[tuple[int, str]] = (),
        first: int | None = None,
    ) -> None:
        """Use `open`. Without an order, position p is sample p of the concatenated sources."""
        self._packings, self._order = packings, order
        self.seq_len, self._documents = seq_len, documents
        self.fingerprint = fingerprint
        """Identity of the stream: data, weights, seq_len and version of the order. The seed is not
        part of it: callers compare it separately, to say which of the two changed. With stages, of
        the first."""
        self.stages = stages
        """(first sequence, fingerprint) of further stages, see `fingerprints_of`."""
        self.ahead = ahead
        """Micro-batches whose tokens `load` requests before they are needed; 0: all is on disk."""
        self._first = packings[:first]
        """The data sets of the first stage."""
        self._sizes = [packing.sequences for packing in packings]
        self.sequences = sum(self._sizes)
        """Sequences in one epoch over all sources."""
        self.counted = any(packing.counted for packing in packings)
        """Whether sequences differ in their number of labels; batches then have COUNTED."""
        self.paired = any(isinstance(one, Bins) and one.together > 1 for one in packings)
        """Whether they hold pairs of answers; COUNTED is then of pairs, and batches have `segments`
        and `answer_labels`."""
        self.reference: NDArray[np.float32] | None = None
        """For pairs, the reference log-probability of each document over all sources, which batches
        have as `reference`; None: without."""
        self._first_documents = np.cumsum([0, *(packing.documents for packing in packings)])

    @classmethod
    def open(
        cls,
        sources: Sequence[tuple[str | Place, float]],
        *,
        split: str,
        seq_len: int,
        seed: int,
        shuffle: bool,
        documents: Documents | None = None,
        reader: Reader = "auto",
        pack: Pack = "auto",
        ahead: int = 8,
        cache: "DataCache | None" = None,
        stages: "Sequence[StageRow]" = (),
    ) -> "TokenStream":
        """Open prepared data sets as one stream.

        Args:
            sources: (directory, weight) of each data set.
            split: "train" or "validation".
            seq_len: tokens per sequence.
            shuffle: endless keyed random order; else file order, once.
            documents: form of document boundaries; None: without.
            reader: see `TokenDataset`.
            pack: whole documents, or a stream of them; auto: whole for chats, stream for others.
            ahead: see `ahead`, for data sets in an object store.
            cache: where copies of their shards lie.
            stages: rows of a table of `sources`, with their weights; empty: one mixture.

        Raises:
            StorageError: a store does not answer, or gives no access.
            DataError: a data set is damaged, was made with another tokenizer than the first, holds
                pairs where others do not, or (with shuffle) is too small for a sequence.
        """
        datasets = [TokenDataset(path, split, reader, cache) for path, _ in sources]
        for (path, _), dataset in zip(sources, datasets, strict=True):
            if dataset.tokenizer_sha256 != datasets[0].tokenizer_sha256:
                raise DataError(
                    f"{path}: was prepared with another tokenizer than {sources[0][0]}, so their "
                    f"tokens cannot be mixed; prepare it with --tokenizer {sources[0][0]}"
                )
            if (dataset.kind == "pairs") != (datasets[0].kind == "pairs"):
                raise DataError(
                    f"{path}: holds {dataset.kind}, and {sources[0][0]} {datasets[0].kind}, which "
                    "cannot be mixed; leave one of them out of data.sources"
                )
            # Damage shows at the start, rather than in the middle of a run.
            if documents or dataset.masked:
                dataset.check_ends()
        packings = [packing_of(dataset, seq_len, pack) for dataset in datasets]
        first = len(stages[0].joins) if stages else len(sources)
        # 1 and 1.0 must give the same fingerprint.
        weights = [float(weight) for _, weight in sources[:first]]
        if stages:
            weights = [float(stages[0].weights[number]) for number in range(first)]
        order: Order | DataSetOrder | None = None
        if shuffle:
            sizes = [packing.sequences for packing in packings]
            for (path, _), size, dataset in zip(sources, sizes, datasets, strict=True):
                if not size:
                    raise DataError(
                        f"{path}: its {split} split has {dataset.tokens} tokens, less than one "
                        f"sequence of {seq_len}; prepare more data, or lower data.seq_len"
                        if not dataset.tokens or not dataset.masked
                        else f"{path}: all of its {dataset.documents} documents in the {split} "
                        f"split are longer than a sequence of {seq_len}; raise data.seq_len"
                    )
            try:
                if stages:
                    check_weights(stages, [path for path, _ in sources])
                    order = DataSetOrder(stages, sizes, seed)
                else:
                    order = Order(sizes, weights, seed)
            except ValueError as error:
                raise DataError(f"data.sources: {error}") from error
        prints = [dataset.fingerprint for dataset in datasets]
        packed = [isinstance(packing, Bins) for packing in packings]
        parts = [ORDER_VERSION, seq_len, weights, prints[:first]]
        # Left out otherwise, so that streams without bins keep their fingerprint.
        if any(packed[:first]):
            parts += [PACKING_VERSION, packed[:first]]
        digest = f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"
        contents = [[PACKING_VERSION, *one] for one in zip(prints, packed, strict=True)]
        later = fingerprints_of(stages, digest, contents)
        ahead = ahead if any(dataset.remote for dataset in datasets) else 0
        return cls(packings, order, seq_len, documents, digest, ahead, later, first)

    @property
    def documents(self) -> int:
        """Documents in all sources."""
        return int(self._first_documents[-1])

    @property
    def pairs_per_sequence(self) -> float:
        """Mean number of pairs in a sequence, of the first stage."""
        pairs = sum(one.items for one in self._first if isinstance(one, Bins))
        return pairs / max(1, sum(one.sequences for one in self._first))

    @property
    def labels_per_sequence(self) -> float:
        """Approximate mean number of labels in a sequence, of the first stage: losses are divided
        by it, and a stage that is added later must not change how earlier steps round."""
        sequences = sum(packing.sequences for packing in self._first)
        return sum(packing.labels for packing in self._first) / max(1, sequences)

    @property
    def fullness(self) -> float:
        """Share of the sequences that is not padding."""
        room = self.sequences * self.seq_len
        padding = sum(
            packing.sequences * self.seq_len - packing.tokens
            for packing in self._packings
            if isinstance(packing, Bins)
        )
        return 1 - padding / max(1, room)

    @property
    def left_out(self) -> int:
        """Documents, or pairs, that are longer than a sequence and in none."""
        return sum(one.left_out for one in self._packings if isinstance(one, Bins))

    def begin(self, positions: Sequence[int]) -> list[object]:
        """Begin to fetch the tokens of a micro-batch from object stores. What is fetched is kept as
        long as the result is."""
        if not self.ahead:
            return []
        sources, samples = self.locate(np.asarray(positions, dtype=np.int64))
        return [
            one
            for source in np.unique(sources)
            for one in self._packings[source].begin(samples[sources == source].tolist())
        ]

    def fetch(self, positions: Sequence[int]) -> dict[str, Any]:
        """input_ids and labels, (B, T) int64, and document boundaries if requested; if `counted`,
        also COUNTED. For P pairs also `segments` (B, T) int64, the answer of each label,
        `answer_labels` (2 P) int64, labels per answer, and `reference` (2 P) float32."""
        return self.fetch_with_digest(positions)[0]

    def fetch_with_digest(self, positions: Sequence[int]) -> tuple[dict[str, Any], tuple[int, int]]:
        """See `Accounted`: the batch of `fetch`, and a digest whose second number covers tokens."""
        numbers = np.asarray(positions, dtype=np.int64)
        begun = self.begin(positions)  # all at once, unless that was done before
        sources, samples = self.locate(numbers)
        rows = [
            self._packings[source].read(int(sample), documents=self._documents is not None)
            for source, sample in zip(sources, samples, strict=True)
        ]
        del begun
        labels = np.stack([row.labels for row in rows])
        batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(np.stack([row.input_ids for row in rows])),
            "labels": torch.from_numpy(labels),
        }
        if self.counted:
            batch[COUNTED] = int((labels != IGNORED_LABEL).sum())
            if not batch[COUNTED]:  # a mean over no labels is NaN in some models, even times 0
                labels[-1, -1] = 0
        if self.paired:
            batch |= self._answers(numbers, rows, labels)
        if self._documents:
            ids = torch.from_numpy(np.stack([row.documents for row in rows]).astype(np.int32))
            if self._documents == "document_ids":
                batch["document_ids"] = ids
            else:
                batch["cu_seqlens"] = cu_seqlens_of(ids)
        contents = sum(row.digest for row in rows) & MASK
        return batch, (sample_digest(numbers, sources, samples), contents)

    def _answers(
        self, positions: np.ndarray, rows: Sequence[Sequenced], labels: NDArray[np.int64]
    ) -> dict[str, Any]:
        """Further entries of a micro-batch of pairs."""
        answers = self.documents_at(positions)
        counts = [len(documents) for documents in answers]
        begins = np.cumsum([0, *counts[:-1]])
        # Padding comes after the last answer of a row, and has no labels.
        segments = np.stack(
            [
                begin + np.minimum(row.documents, count - 1)
                for begin, row, count in zip(begins, rows, counts, strict=True)
            ]
        )
        each = np.bincount(segments[labels != IGNORED_LABEL], minlength=sum(counts))
        found = {
            COUNTED: sum(counts) // 2,
            "segments": torch.from_numpy(segments),
            "answer_labels": torch.from_numpy(each),
        }
        if self.reference is not None:
            found["reference"] = torch.from_numpy(self.reference[np.concatenate(answers)])
        return found

    def documents_at(self, positions: np.ndarray) -> list[NDArray[np.int64]]:
        """Indices of the whole documents in each sequence, counted over all sources."""
        found = []
        for source, sample in zip(*self.locate(positions), strict=True):
            packing = self._packings[source]
            assert isinstance(packing, Bins)
            found.append(packing.documents_in(int(sample)) + self._first_documents[source])
        return found

    def documents_of(self, position: int) -> tuple[int, NDArray[np.int64]]:
        """The source of a sequence, and (T,) the index in that source of each input's document; -1
        for padding."""
        (source,), (sample,) = self.locate(np.array([position]))
        return int(source), self._packings[source].documents_of(int(sample))

    @property
    def in_file_order(self) -> "TokenStream":
        """The sequences of the sources in file order, each once."""
        return TokenStream(
            self._packings, None, self.seq_len, self._documents, self.fingerprint, self.ahead,
            self.stages, len(self._first),
        )  # fmt: skip

    def describe(self, global_batch: int) -> str:
        tokens = global_batch * self.seq_len
        found = f"of {self.seq_len} tokens = {tokens:,} tokens per step"
        if self.paired:
            pairs = round(global_batch * self.pairs_per_sequence)
            return f"{found}, about {pairs:,} pairs, {1 - self.fullness:.1%} padding"
        if not self.counted:
            return found
        trained = round(global_batch * self.labels_per_sequence)
        return f"{found}, about {trained:,} of them trained, {1 - self.fullness:.1%} padding"

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample) of each position, (N,) int64 each."""
        if self._order:
            sources, _, samples = self._order.locate(positions)
            return sources, samples
        ends = np.cumsum(self._sizes)
        sources = np.searchsorted(ends, positions, side="right")
        return sources, positions - (ends - self._sizes)[sources]


def later_stages(stream: Stream) -> list[list[Any]]:
    """[first sequence, fingerprint] of each stage of a stream but the first."""
    return [[*stage] for stage in stream.stages] if isinstance(stream, TokenStream) else []


def identity_of(stream: Stream) -> str:
    """A fingerprint of a stream that covers all its stages."""
    return str([stream.fingerprint, *(print_ for _, print_ in later_stages(stream))][-1])


def check_weights(stages: "Sequence[StageRow]", paths: Sequence[str | Place]) -> None:
    """Raise DataError for a weight with which a data set would never come; `paths` are those of
    all."""
    for number, row in enumerate(stages):
        counts = block_counts([*row.weights.values()], BLOCK)
        for source, places in zip(row.weights, counts, strict=True):
            if not places:
                raise DataError(
                    f"data.stages.{number}.weights: {paths[source]} would have none of "
                    f"{BLOCK} sequences; raise its weight, or leave it out"
                )


_Request: TypeAlias = tuple[tuple[int, ...], list[tuple[int, ...]]]
"""Positions of a micro-batch, and those of micro-batches that the same worker gets later and may
begin to read."""


class _Fetched(Dataset):
    """A stream as a torch Dataset that fetches whole batches.

    Args:
        stream: maps positions to samples.
        account: whether micro-batches have a digest, under CONSUMED.
    """

    def __init__(self, stream: Stream, account: bool) -> None:
        self._stream = stream
        self._accounted = stream if account and isinstance(stream, Accounted) else None
        self._begun: dict[tuple[int, ...], list[object]] = {}
        """Reads from object stores that have begun, by the positions of a later request."""

    def __getitems__(self, request: _Request) -> dict[str, Any] | DataError:
        """Fetch a batch. A DataError is returned, for `load` to raise: torch would wrap an error of
        a worker into a page of traceback."""
        positions, later = request
        try:
            if self._accounted is None:
                return self._stream.fetch(positions)
            batch, digest = self._accounted.fetch_with_digest(positions)
            return {**batch, CONSUMED: digest}
        except DataError as error:
            return error
        finally:
            # after the fetch: the threads that send requests would hold it up
            if later:
                assert isinstance(self._stream, TokenStream)
                begin, begun = self._stream.begin, self._begun
                self._begun = {one: begun.get(one) or begin(one) for one in later}


def load(
    stream: Stream,
    requests: Iterable[Sequence[int]],
    *,
    workers: int,
    pin_memory: bool,
    account: bool = False,
) -> Generator[dict[str, torch.Tensor], None, None]:
    """Fetch each request, in order. Closing or dropping the iterator ends the workers.

    Args:
        stream: maps positions to samples.
        requests: positions of each micro-batch; may be endless.
        workers: background processes that read ahead, started at once; 0 reads on demand.
        pin_memory: return page-locked tensors, for asynchronous copies to a GPU.
        account: also return digests, as CONSUMED, if the stream is `Accounted`.

    Raises:
        DataError: when a batch of a damaged shard is requested.
        RuntimeError: a worker was killed.
    """
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        loader = StatefulDataLoader(
            _Fetched(stream, account),
            batch_sampler=_with_later(requests, _begun_ahead(stream, workers), max(1, workers)),
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=pin_memory,
            prefetch_factor=READ_AHEAD if workers else None,
            # Python's default up to 3.13; later defaults start a server, and pickle everything.
            multiprocessing_context="fork" if workers else None,
            snapshot_every_n_steps=1 << 62,  # its snapshots are unused, and cost time
            worker_init_fn=partial(_die_with, os.getpid()) if workers else None,
        )
    return _raise_errors(iter(loader))


def _with_later(
    requests: Iterable[Sequence[int]], ahead: int, stride: int
) -> Generator[_Request, None, None]:
    """Yields each request with those of the next `ahead` whose distance is a multiple of `stride`:
    torch deals requests to its workers in turn."""
    window: deque[tuple[int, ...]] = deque()
    for request in requests:
        window.append(tuple(request))
        if len(window) > ahead:
            yield window[0], [*islice(window, stride, None, stride)]
            window.popleft()
    while window:
        yield window[0], [*islice(window, stride, None, stride)]
        window.popleft()


def _begun_ahead(stream: Stream, workers: int) -> int:
    """Micro-batches whose reads begin before they are fetched: `stream.ahead`, rounded up so that
    each worker has as many."""
    ahead, stride = stream.ahead if isinstance(stream, TokenStream) else 0, max(1, workers)
    return -(-ahead // stride) * stride


def requests(plan_at: Callable[[int], BatchPlan], dp_rank: int, start: int) -> Iterator[list[int]]:
    """Yield the positions of every micro-batch of a data-parallel rank, endlessly from the global
    batch at `start` on.

    Args:
        plan_at: returns the plan of the global batch that begins at a position.
    """
    while True:
        plan = plan_at(start)
        for micro_batch in plan.micro_batches(dp_rank, start):
            yield list(micro_batch.positions)
        start += plan.global_batch


def requested_ahead(stream: Stream, workers: int) -> int:
    """Most micro-batches that `load` requests before they are used."""
    return READ_AHEAD * workers + _begun_ahead(stream, workers)


def _die_with(parent: int, worker: int) -> None:
    """End a worker with the process that reads from it. By itself it would notice after seconds,
    and meanwhile hold what it inherited, such as a GPU with all its memory."""
    die_with_parent(parent)


def _raise_errors(
    batches: Iterator[dict[str, torch.Tensor] | DataError],
) -> Generator[dict[str, torch.Tensor], None, None]:
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (EOFError, ConnectionError) as error:  # a worker was killed while it sent a batch
        raise RuntimeError("DataLoader worker is killed: it broke off in a batch") from error
    finally:
        del batches  # ends the workers, even while a traceback keeps this frame


def _identity(batch: dict[str, torch.Tensor] | DataError) -> dict[str, torch.Tensor] | DataError:
    return batch
