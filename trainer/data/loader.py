"""Positions → batches of tensors. The one module that knows torchdata.

torchdata runs the workers. It owns neither the order nor the saved state: its own state repeats or
drops samples when the number of ranks or workers changes, ours is one integer, the position.
"""

import hashlib
import json
import os
import shlex
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from elastic.group.batch_plan import BatchPlan
from elastic.process import die_with_parent
from trainer.data.documents import cu_seqlens_of
from trainer.data.order import ORDER_VERSION, Order, sample_digest
from trainer.data.shards import DataError, Reader, TokenDataset
from trainer.data.stream import CONSUMED, Accounted, Stream

MASK = 0xFFFFFFFF

Documents: TypeAlias = Literal["document_ids", "cu_seqlens"]
"""How a micro-batch tells which document each token belongs to: a number for each, (B, T) int32, or
boundaries, see `trainer.data.documents.cu_seqlens_of`."""


class TokenStream:
    """Packed sequences of `seq_len` tokens, by position. Shapes: B sequences, T = seq_len.

    Documents are packed back to back. Sample j of a source is its tokens jT to jT + T, one more
    than T because the labels are the inputs shifted by one: every label is a real next token.
    """

    def __init__(
        self,
        datasets: Sequence[TokenDataset],
        order: Order | None,
        seq_len: int,
        documents: Documents | None,
        fingerprint: str,
    ) -> None:
        """Use `open`. Without an order, position p is sample p of the sources one after another."""
        self._datasets, self._order = datasets, order
        self.seq_len, self._documents = seq_len, documents
        self.fingerprint = fingerprint
        """What the stream is: data, weights, seq_len and version of the order; not the seed, which
        callers keep beside it to be able to say which of the two changed."""
        self._sizes = [max(0, dataset.tokens - 1) // seq_len for dataset in datasets]
        self.sequences = sum(self._sizes)
        """Sequences in one epoch over all sources."""

    @classmethod
    def open(
        cls,
        sources: Sequence[tuple[str | Path, float]],
        *,
        split: str,
        seq_len: int,
        seed: int,
        shuffle: bool,
        documents: Documents | None = None,
        reader: Reader = "auto",
    ) -> "TokenStream":
        """Open prepared data sets as one stream.

        Args:
            sources: (directory, weight) of each data set.
            split: "train" or "validation".
            seq_len: tokens per sequence.
            seed: of the order.
            shuffle: in a keyed random order without end; else in file order, once.
            documents: tell documents apart, in this form.
            reader: see `TokenDataset`.

        Raises:
            DataError: a data set is damaged, was made with another tokenizer than the first, or
                (with shuffle) is too small to give a sequence.
        """
        datasets = [TokenDataset(path, split, reader) for path, _ in sources]
        for (path, _), dataset in zip(sources, datasets, strict=True):
            if dataset.tokenizer_sha256 != datasets[0].tokenizer_sha256:
                raise DataError(
                    f"{path}: was prepared with another tokenizer than {sources[0][0]}, so their "
                    f"tokens cannot be mixed; prepare it with --tokenizer {sources[0][0]}"
                )
            if documents:
                dataset.check_ends()
        weights = [float(weight) for _, weight in sources]
        order = None
        if shuffle:
            sizes = [max(0, dataset.tokens - 1) // seq_len for dataset in datasets]
            for (path, _), size, dataset in zip(sources, sizes, datasets, strict=True):
                if not size:
                    raise DataError(
                        f"{path}: its {split} split has {dataset.tokens} tokens, less than one "
                        f"sequence of {seq_len}; prepare more data, or lower data.seq_len"
                    )
            try:
                order = Order(sizes, weights, seed)
            except ValueError as error:
                raise DataError(f"data.sources: {error}") from error
        parts = [ORDER_VERSION, seq_len, weights, [dataset.fingerprint for dataset in datasets]]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return cls(datasets, order, seq_len, documents, f"sha256:{digest}")

    def fetch(self, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """input_ids and labels, (B, T) int64, and documents where asked for."""
        return self.fetch_with_digest(positions)[0]

    def fetch_with_digest(
        self, positions: Sequence[int]
    ) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
        """See `Accounted`: what `fetch` gives, and a digest, the second of which is of tokens."""
        length = self.seq_len
        numbers = np.asarray(positions, dtype=np.int64)
        sources, samples = self.locate(numbers)
        tokens = np.empty((len(positions), length + 1), dtype=np.int64)
        ids = np.empty((len(positions), length), dtype=np.int32)
        for row, (source, sample) in enumerate(zip(sources, samples, strict=True)):
            dataset, start = self._datasets[source], int(sample) * length
            tokens[row] = dataset.read(start, length + 1)
            if self._documents:
                numbers_here = dataset.document_ids(start, length)
                ids[row] = numbers_here - numbers_here[0]  # numbered within the sequence
            if int(tokens[row].max()) >= dataset.vocab_size:
                raise _outside_vocabulary(dataset, start, tokens[row])
        batch = {
            "input_ids": torch.from_numpy(tokens[:, :-1].copy()),
            "labels": torch.from_numpy(tokens[:, 1:].copy()),
        }
        if self._documents == "document_ids":
            batch["document_ids"] = torch.from_numpy(ids)
        elif self._documents == "cu_seqlens":
            batch["cu_seqlens"] = cu_seqlens_of(torch.from_numpy(ids))
        contents = sum(crc32(row.data) for row in tokens) & MASK
        return batch, (sample_digest(numbers, sources, samples), contents)

    def describe(self, global_batch: int) -> str:
        """See `Stream`."""
        tokens = global_batch * self.seq_len
        return f"of {self.seq_len} tokens = {tokens:,} tokens per step"

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample) of each position, (N,) int64 each."""
        if self._order:
            sources, _, samples = self._order.locate(positions)
            return sources, samples
        ends = np.cumsum(self._sizes)
        sources = np.searchsorted(ends, positions, side="right")
        return sources, positions - (ends - self._sizes)[sources]


class _Fetched(Dataset):
    """A stream as torch fetches from it, a whole batch at once.

    Args:
        stream: where positions lead.
        account: micro-batches say what they are made of, under CONSUMED.
    """

    def __init__(self, stream: Stream, account: bool) -> None:
        self._stream = stream
        self._accounted = stream if account and isinstance(stream, Accounted) else None

    def __getitems__(self, positions: Sequence[int]) -> dict[str, Any] | DataError:
        """Gives a DataError back for `load` to raise: torch would wrap one that a worker raises
        into a page of traceback."""
        try:
            if self._accounted is None:
                return self._stream.fetch(positions)
            batch, digest = self._accounted.fetch_with_digest(positions)
            return {**batch, CONSUMED: digest}
        except DataError as error:
            return error


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
        stream: where positions lead.
        requests: positions of each micro-batch; may be endless.
        workers: background processes that read ahead, started at once; 0 reads when asked.
        pin_memory: give page-locked tensors, for asynchronous copies to a GPU.
        account: give digests too, as CONSUMED, of a stream that is `Accounted`.

    Raises:
        DataError: when it is asked for a batch whose shard is damaged.
        RuntimeError: a worker was killed.
    """
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        loader = StatefulDataLoader(
            _Fetched(stream, account),
            batch_sampler=requests,
            num_workers=workers,
            collate_fn=_identity,
            pin_memory=pin_memory,
            prefetch_factor=4 if workers else None,
            # Python's own choice up to 3.13; from 3.14 on it would start a server, and pickle all.
            multiprocessing_context="fork" if workers else None,
            snapshot_every_n_steps=1 << 62,  # its snapshots are not used, and cost time
            worker_init_fn=partial(_die_with, os.getpid()) if workers else None,
        )
    return _raise_errors(iter(loader))


def requests(plan: BatchPlan, dp_rank: int, start: int) -> Iterator[list[int]]:
    """Positions of every micro-batch of a data-parallel rank, from the global batch at `start` on,
    for ever."""
    for batch_start in count(start, plan.global_batch):
        for micro_batch in plan.micro_batches(dp_rank, batch_start):
            yield list(micro_batch.positions)


def _die_with(parent: int, worker: int) -> None:
    """Have a worker end with the process that reads from it. By itself it would notice after
    seconds, and until then hold what it has inherited: among it the GPU, with all its memory."""
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


def _outside_vocabulary(dataset: TokenDataset, start: int, tokens: np.ndarray) -> DataError:
    place = start + int(tokens.argmax())
    return DataError(
        f"{dataset.file_of(place)}: token {int(tokens.max())} is outside the vocabulary of "
        f"{dataset.vocab_size}, so the file is damaged; see `perdure data inspect "
        f"{shlex.quote(str(dataset.file_of(place).parent))} --verify`"
    )
