"""Loads batches of tensors by position. torchdata runs the workers, but its saved state is unused,
because it repeats or drops samples when the number of ranks or workers changes. Our state is one
integer, the position."""

import hashlib
import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from checkpointing.storage.place import StoragePlace
from elastic.group.batch_plan import GroupBatchPlan
from elastic.process import die_with_parent
from trainer.data.order import (
    BLOCK,
    ORDER_VERSION,
    DataSetOrder,
    Order,
    block_counts,
    fingerprints_of,
    sample_digest,
)
from trainer.data.packing import (
    PACKING_VERSION,
    DocumentBins,
    Pack,
    PackedSequence,
    TokenWindows,
    cu_seqlens_of,
    packing_of,
)
from trainer.data.shards import DataError, Reader, TokenDataset
from trainer.data.stream import CONSUMED, COUNTED, IGNORED_LABEL, AccountedStream, Stream

if TYPE_CHECKING:
    from trainer.recipe.sections import DataCacheSection
    from trainer.recipe.stages import RecipeStageRow

MASK = 0xFFFFFFFF
READ_AHEAD = 4
"""Micro-batches per worker that are fetched ahead."""

SENT_BYTES = 1 << 20
"""Largest tensor in bytes that a worker sends by value."""

DocumentForm: TypeAlias = Literal["document_ids", "cu_seqlens"]
"""Form of a micro-batch's document boundaries: an id per token, (B, T) int32, or
`trainer.data.packing.cu_seqlens_of`."""


class TokenStream:
    """Sequences of `seq_len` tokens from prepared data sets, by position. Shapes: B sequences, T =
    seq_len. trainer.data.packing packs documents into sequences. Every label is the token after its
    input, or IGNORED_LABEL if that token is not trained."""

    def __init__(
        self,
        packings: Sequence[TokenWindows | DocumentBins],
        order: Order | DataSetOrder | None,
        seq_len: int,
        documents: DocumentForm | None,
        fingerprint: str,
        ahead: int = 0,
        stages: Sequence[tuple[int, str]] = (),
        first: int | None = None,
    ) -> None:
        """Internal; call `open`. Without an order, position p is sequence p of the concatenated
        sources. `first`: number of data sets in the first stage; None: all."""
        self._packings, self._order = packings, order
        self.seq_len, self._documents = seq_len, documents
        self.fingerprint = fingerprint
        """Identity of data, weights, seq_len and version of the order; with stages, of the first
        stage. The seed is not part of it: it is compared alone, so that a message can name it."""
        self.stages = stages
        """(first position, fingerprint) of each stage after the first, from `fingerprints_of`."""
        self.ahead = ahead
        """Micro-batches whose tokens `load` requests before they are needed; 0 if all data is on
        disk."""
        self._first = packings[:first]
        """Data sets of the first stage."""
        self._sizes = [packing.sequences for packing in packings]
        self.sequences = sum(self._sizes)
        """Sequences in one epoch over all sources."""
        self.counted = any(packing.counted for packing in packings)
        """Whether sequences differ in their number of labels; batches then have COUNTED."""
        self.paired = any(isinstance(p, DocumentBins) and p.together > 1 for p in packings)
        """Whether the data are pairs of answers. COUNTED then counts pairs, and batches have
        `segments` and `answer_labels`."""
        self.reference: NDArray[np.float32] | None = None
        """For pairs: log-probability of each document, counted over all sources, under the
        reference model. None: batches have no `reference`."""
        self._first_documents = np.cumsum([0, *(packing.documents for packing in packings)])

    @classmethod
    def open(
        cls,
        sources: Sequence[tuple[str | StoragePlace, float]],
        *,
        split: str,
        seq_len: int,
        seed: int,
        shuffle: bool,
        documents: DocumentForm | None = None,
        reader: Reader = "auto",
        pack: Pack = "auto",
        ahead: int = 8,
        cache: "DataCacheSection | None" = None,
        stages: "Sequence[RecipeStageRow]" = (),
    ) -> "TokenStream":
        """Open prepared data sets as one stream.

        Args:
            sources: (directory, weight) of each data set.
            split: "train" or "validation".
            seq_len: tokens per sequence.
            shuffle: True: endless random order by seed; False: file order, once.
            documents: form of document boundaries; None: no boundaries.
            reader: see `TokenDataset`.
            pack: "whole" documents, or a "stream" that is cut; "auto": whole for chats, else
                stream.
            ahead: `TokenStream.ahead` for data sets in an object store.
            cache: place of local copies of shards in an object store; None: no copies.
            stages: stages of the mixture over `sources`, with their weights, which replace those
                of `sources`; empty: one mixture.

        Raises:
            StorageError: a store does not answer, or denies access.
            DataError: a data set is damaged, or was prepared with another tokenizer than the first;
                pairs are mixed with other kinds; or (with shuffle) a data set has less than one
                sequence, or too small a weight.
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
            # Damaged files are reported at the start, rather than in the middle of a run.
            if documents or dataset.masked:
                dataset.check_ends()
        packings = [packing_of(dataset, seq_len, pack) for dataset in datasets]
        first = len(stages[0].joins) if stages else len(sources)
        # 1 and 1.0 must give the same fingerprint
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
        packed = [isinstance(packing, DocumentBins) for packing in packings]
        parts = [ORDER_VERSION, seq_len, weights, prints[:first]]
        # Only added for bins, so that streams without bins keep the fingerprint of older versions.
        if any(packed[:first]):
            parts += [PACKING_VERSION, packed[:first]]
        digest = f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"
        contents = [[PACKING_VERSION, *pair] for pair in zip(prints, packed, strict=True)]
        later = fingerprints_of(stages, digest, contents)
        ahead = ahead if any(dataset.remote for dataset in datasets) else 0
        return cls(packings, order, seq_len, documents, digest, ahead, later, first)

    @property
    def documents(self) -> int:
        """Number of documents in all sources."""
        return int(self._first_documents[-1])

    @property
    def pairs_per_sequence(self) -> float:
        """Mean number of preference pairs per sequence in the first stage, over the sequences of
        all its sources, each counted once. Only for streams of pairs."""
        pairs = sum(p.items for p in self._first if isinstance(p, DocumentBins))
        return pairs / max(1, sum(p.sequences for p in self._first))

    @property
    def labels_per_sequence(self) -> float:
        """Approximate mean number of labels per sequence in the first stage. Losses are divided by
        it, so a stage that is added later must not change it."""
        sequences = sum(packing.sequences for packing in self._first)
        return sum(packing.labels for packing in self._first) / max(1, sequences)

    @property
    def fullness(self) -> float:
        """Share of tokens that are not padding."""
        bins = [packing for packing in self._packings if isinstance(packing, DocumentBins)]
        padding = sum(one.sequences * self.seq_len - one.tokens for one in bins)
        return 1 - padding / max(1, self.sequences * self.seq_len)

    @property
    def left_out(self) -> int:
        """Number of documents or pairs that are in no sequence, because they are longer than a
        sequence or have less than two tokens."""
        return sum(p.left_out for p in self._packings if isinstance(p, DocumentBins))

    def begin(self, positions: Sequence[int]) -> list[object]:
        """Start to fetch the tokens of a micro-batch from object stores. They stay in memory as
        long as the returned list."""
        if not self.ahead:
            return []
        sources, samples = self.locate(np.asarray(positions, dtype=np.int64))
        return [
            read
            for source in np.unique(sources)
            for read in self._packings[source].begin(samples[sources == source].tolist())
        ]

    def fetch(self, positions: Sequence[int]) -> dict[str, Any]:
        """Read a micro-batch: input_ids and labels, (B, T) int64, and document boundaries if
        requested. If `counted`, it also has COUNTED. For P pairs it also has `segments` (B, T)
        int64, the index of each label's answer; `answer_labels` (2 P,) int64, labels per answer;
        and `reference` (2 P,) float32, unless `TokenStream.reference` is None."""
        return self.fetch_with_digest(positions)[0]

    def fetch_with_digest(self, positions: Sequence[int]) -> tuple[dict[str, Any], tuple[int, int]]:
        """Read a micro-batch as `fetch` does, and its digest; see `AccountedStream`."""
        numbers = np.asarray(positions, dtype=np.int64)
        begun = self.begin(positions)  # starts all requests at once, unless they are under way
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
            # A model may give NaN for a mean over no labels, which multiplication by the batch's
            # weight 0 would not remove. So one label is set.
            if not batch[COUNTED]:
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
        self, positions: np.ndarray, rows: Sequence[PackedSequence], labels: NDArray[np.int64]
    ) -> dict[str, Any]:
        """Return the additional entries of a micro-batch of pairs; see `fetch`."""
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
        entries = {
            COUNTED: sum(counts) // 2,
            "segments": torch.from_numpy(segments),
            "answer_labels": torch.from_numpy(each),
        }
        if self.reference is not None:
            entries["reference"] = torch.from_numpy(self.reference[np.concatenate(answers)])
        return entries

    def documents_at(self, positions: np.ndarray) -> list[NDArray[np.int64]]:
        """Return the indices of the documents in each sequence, counted over all sources. Only for
        sequences of whole documents."""
        found = []
        for source, sample in zip(*self.locate(positions), strict=True):
            packing = self._packings[source]
            assert isinstance(packing, DocumentBins)
            found.append(packing.documents_in(int(sample)) + self._first_documents[source])
        return found

    def documents_of(self, position: int) -> tuple[int, NDArray[np.int64]]:
        """Return (source, index in that source of each label's document, (T,)) of a sequence. In
        sequences of whole documents it is -1 at each document's last token and in padding."""
        (source,), (sample,) = self.locate(np.array([position]))
        return int(source), self._packings[source].documents_of(int(sample))

    @property
    def in_file_order(self) -> "TokenStream":
        """A stream of the same sequences in file order, each once."""
        return TokenStream(
            self._packings, None, self.seq_len, self._documents, self.fingerprint, self.ahead,
            self.stages, len(self._first),
        )  # fmt: skip

    def describe(self, global_batch: int) -> str:
        tokens = global_batch * self.seq_len
        text = f"of {self.seq_len} tokens = {tokens:,} tokens per step"
        if self.paired:
            pairs = round(global_batch * self.pairs_per_sequence)
            return f"{text}, about {pairs:,} pairs, {1 - self.fullness:.1%} padding"
        if not self.counted:
            return text
        trained = round(global_batch * self.labels_per_sequence)
        return f"{text}, about {trained:,} of them trained, {1 - self.fullness:.1%} padding"

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, sample) of each position, (N,) int64 each."""
        if self._order:
            sources, _, samples = self._order.locate(positions)
            return sources, samples
        ends = np.cumsum(self._sizes)
        sources = np.searchsorted(ends, positions, side="right")
        return sources, positions - (ends - self._sizes)[sources]


def later_stages(stream: Stream) -> list[list[Any]]:
    """[first position, fingerprint] of each stage of a stream after the first."""
    return [[*stage] for stage in stream.stages] if isinstance(stream, TokenStream) else []


def identity_of(stream: Stream) -> str:
    """Fingerprint of a stream that covers all its stages."""
    return str([stream.fingerprint, *(print_ for _, print_ in later_stages(stream))][-1])


def check_weights(stages: "Sequence[RecipeStageRow]", paths: Sequence[str | StoragePlace]) -> None:
    """Check that in every stage each data set gets at least one of BLOCK sequences. `paths`: the
    data sets' paths, for messages. Raises DataError if a weight is too small."""
    for number, row in enumerate(stages):
        counts = block_counts([*row.weights.values()], BLOCK)
        for source, places in zip(row.weights, counts, strict=True):
            if not places:
                raise DataError(
                    f"data.stages.{number}.weights: {paths[source]} would have none of "
                    f"{BLOCK} sequences; raise its weight, or leave it out"
                )


_Request: TypeAlias = tuple[tuple[int, ...], list[tuple[int, ...]]]
"""(positions of a micro-batch, positions of the same worker's next micro-batches)."""


class _BatchDataset(Dataset):
    """A stream as a torch Dataset that fetches whole micro-batches."""

    def __init__(self, stream: Stream, account: bool) -> None:
        self._stream = stream
        self._accounted = stream if account and isinstance(stream, AccountedStream) else None
        self._begun: dict[tuple[int, ...], list[object]] = {}
        """Positions of a later request → its reads that have started."""

    def __getitems__(self, request: _Request) -> dict[str, Any] | DataError:
        """Fetch a micro-batch. Returns a DataError instead of raising it: torch would wrap the
        error of a worker in a page of traceback."""
        positions, later = request
        try:
            if self._accounted is None:
                return self._stream.fetch(positions)
            batch, digest = self._accounted.fetch_with_digest(positions)
            return {**batch, CONSUMED: digest}
        except DataError as error:
            return error
        finally:
            # After the fetch, because the threads of later requests would slow it down.
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
    """Yield the micro-batch of each request, in order. Closing or dropping the generator ends the
    workers.

    Args:
        requests: positions of each micro-batch; may be endless.
        workers: processes that read ahead, started at once; 0: read in this process, on demand.
        pin_memory: return page-locked tensors, for asynchronous copies to a GPU.
        account: also return digests, as CONSUMED, if the stream is `AccountedStream`.

    Raises:
        DataError: the requested data are damaged.
        RuntimeError: a worker was killed.
    """
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        loader = StatefulDataLoader(
            _BatchDataset(stream, account),
            batch_sampler=_with_later(requests, _begun_ahead(stream, workers), max(1, workers)),
            num_workers=workers,
            collate_fn=lambda batch: batch,
            pin_memory=pin_memory,
            prefetch_factor=READ_AHEAD if workers else None,
            # Python's default up to 3.13. Later defaults start a server and pickle everything.
            multiprocessing_context="fork" if workers else None,
            # disables torchdata's snapshots, which are unused and cost time
            snapshot_every_n_steps=1 << 62,
            worker_init_fn=partial(_prepare_worker, os.getpid()) if workers else None,
        )
    return _raise_errors(iter(loader))


def _with_later(
    requests: Iterable[Sequence[int]], ahead: int, stride: int
) -> Generator[_Request, None, None]:
    """Yield each request, with those of the next `ahead` requests that the same worker will get.
    torch assigns requests to the `stride` workers in turn."""
    following = map(tuple, requests)
    window: deque[tuple[int, ...]] = deque(islice(following, ahead + 1))
    while window:
        yield window[0], [*islice(window, stride, None, stride)]
        window.popleft()
        window.extend(islice(following, 1))


def _begun_ahead(stream: Stream, workers: int) -> int:
    """Number of micro-batches whose reads start before they are fetched: `stream.ahead`, rounded up
    to a multiple of `workers`."""
    ahead, stride = stream.ahead if isinstance(stream, TokenStream) else 0, max(1, workers)
    return -(-ahead // stride) * stride


def requests(
    plan_at: Callable[[int], GroupBatchPlan], dp_rank: int, start: int
) -> Iterator[list[int]]:
    """Yield the positions of each micro-batch of a data-parallel rank, endlessly. `plan_at` returns
    the plan of the global batch that begins at a position. `start`: position of the first one."""
    while True:
        plan = plan_at(start)
        for micro_batch in plan.micro_batches(dp_rank, start):
            yield list(micro_batch.positions)
        start += plan.global_batch


def requested_ahead(stream: Stream, workers: int) -> int:
    """Largest number of micro-batches that `load` requests before they are used."""
    return READ_AHEAD * workers + _begun_ahead(stream, workers)


def _prepare_worker(parent: int, worker: int) -> None:
    """Make a worker end with the process that reads from it, and send small tensors by value."""
    # By itself a worker would notice only after seconds that its parent has ended, and until then
    # hold inherited resources, such as all memory of a GPU.
    die_with_parent(parent)
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    """Describe a tensor to the pickler of a worker's queue. Small tensors are copied through the
    pipe. torch would send a file descriptor of shared memory, which takes longer: for each tensor
    the reader exchanges messages with a thread of the worker."""
    with suppress(TypeError, RuntimeError):  # numpy does not have every dtype and layout
        if tensor.nbytes <= SENT_BYTES:
            return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)


def _raise_errors(
    batches: Iterator[dict[str, torch.Tensor] | DataError],
) -> Generator[dict[str, torch.Tensor], None, None]:
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (EOFError, ConnectionError) as error:  # a worker was killed while it sent a batch
        raise RuntimeError(
            "a DataLoader worker was killed while it sent a batch, perhaps for lack of memory; "
            "lower data.workers"
        ) from error
    finally:
        del batches  # ends the workers even if a traceback keeps this frame
