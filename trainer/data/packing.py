"""Packs documents into sequences: back to back, or whole documents together; and finds the
boundaries of documents in micro-batches of packed sequences."""

import bisect
import shlex
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastic.group.sampler import SamplerPermutation
from trainer.data.shards import DataError, TokenDataset
from trainer.data.stream import IGNORED_LABEL

PACKING_VERSION = 1
"""Version of the results of `best_fit` and `DocumentBins`. They must not change while it stays the
same, because a checkpoint's position refers to the order of the bins."""


Pack: TypeAlias = Literal["auto", "whole", "stream"]


class PackedSequence(NamedTuple):
    """One sequence of T tokens with its labels."""

    input_ids: NDArray[np.int64]
    """Shape (T,)."""
    labels: NDArray[np.int64]
    """(T,): the token after each input; -100 where it does not count in the loss."""
    documents: NDArray[np.int64]
    """(T,): number of each input's document in this sequence; attention stays inside a document."""
    digest: int
    """CRC-32 of inputs and labels."""


class TokenWindows:
    """Sequences of T tokens from documents that are joined back to back, and cut where a sequence
    ends. Sequence j uses the data set's tokens jT to jT + T: T + 1 tokens, because labels are the
    inputs shifted by one."""

    def __init__(self, dataset: TokenDataset, seq_len: int) -> None:
        self._dataset, self._length = dataset, seq_len
        self.documents = dataset.documents
        self.sequences = max(0, dataset.tokens - 1) // seq_len
        self.counted = dataset.masked
        """Whether sequences differ in their number of labels."""
        self.labels = self.sequences * seq_len
        """Approximate number of labels in one epoch."""
        if dataset.masked:
            self.labels = min(self.labels, dataset.trained)

    def begin(self, samples: Iterable[int]) -> list[object]:
        """Start to fetch sequences for later calls of `read`; see `TokenDataset.begin`."""
        size = self._length
        return [*self._dataset.begin((sample * size, size + 1) for sample in samples)]

    def read(self, sample: int, *, documents: bool) -> PackedSequence:
        """Read a sequence by its index.

        Args:
            sample: index of the sequence.
            documents: whether to number its documents.

        Raises:
            DataError: a file is damaged.
        """
        dataset, length = self._dataset, self._length
        start = sample * length
        row = _known(dataset, start, length + 1)
        numbers = np.zeros(length, np.int64)
        if documents:
            numbers = dataset.documents_in(start, row[:-1])
        if not dataset.masked:
            # Labels are the shifted inputs, so one digest covers both.
            return PackedSequence(row[:-1], row[1:], numbers, crc32(row.data))
        counts = dataset.read_trained(start + 1, length)
        labels = np.where(counts, row[1:], IGNORED_LABEL)
        return PackedSequence(row[:-1], labels, numbers, crc32(labels.data, crc32(row.data)))

    def documents_of(self, sample: int) -> NDArray[np.int64]:
        """For each label of a sequence, the index of its document in the data set, (T,). Raises
        DataError if a file is damaged."""
        # The label of a document's last token is the first token of the next document.
        return self._dataset.document_ids(sample * self._length + 1, self._length)


class DocumentBins:
    """Sequences of whole documents or pairs, filled up with a padding document without labels."""

    def __init__(self, dataset: TokenDataset, seq_len: int) -> None:
        self._dataset, self._length = dataset, seq_len
        self.together = 2 if dataset.kind == "pairs" else 1
        """Number of consecutive documents that stay in one sequence."""
        self.documents = dataset.documents
        self._lengths = lengths = dataset.lengths()
        self._begins = np.cumsum(lengths) - lengths
        items, starts = best_fit(lengths.reshape(-1, self.together).sum(1), seq_len)
        members = items[:, None] * self.together + np.arange(self.together)
        self._documents, self._starts = members.ravel(), starts * self.together
        self.sequences = len(self._starts) - 1
        self.counted = True
        # `best_fit` sorts bins by length; shuffled, any part of them resembles the whole.
        self._order = SamplerPermutation(max(1, self.sequences))(np.arange(self.sequences))
        self.items = len(items)
        """Documents, or pairs, in all sequences."""
        self.left_out = len(lengths) // self.together - self.items
        """Documents, or pairs, that are left out: longer than a sequence, or below two tokens."""
        self.tokens = int(lengths[self._documents].sum())
        # Approximate: documents differ in their share of trained tokens.
        self.labels = int(dataset.trained * self.tokens / max(1, dataset.tokens))

    def documents_in(self, sample: int) -> NDArray[np.int64]:
        number = int(self._order[sample])
        return self._documents[self._starts[number] : self._starts[number + 1]]

    def begin(self, samples: Iterable[int]) -> list[object]:
        """Start to fetch the documents of sequences for later calls of `read`."""
        windows = (window for sample in samples for window in self._windows(sample))
        return [*self._dataset.begin(windows)]

    def _windows(self, sample: int) -> list[tuple[int, int]]:
        """Return the (first token, length) of each document."""
        inside = self.documents_in(sample)
        begins, lengths = self._begins[inside], self._lengths[inside]
        return list(zip(begins.tolist(), lengths.tolist(), strict=True))

    def documents_of(self, sample: int) -> NDArray[np.int64]:
        """Index in the data set of each label's document, (T,); -1 where there is no label."""
        indices, inside = np.full(self._length, -1, np.int64), self.documents_in(sample)
        ends = np.cumsum(self._lengths[inside])
        indices[: ends[-1]] = np.repeat(inside, self._lengths[inside])
        indices[ends - 1] = -1
        return indices

    def read(self, sample: int, *, documents: bool) -> PackedSequence:
        """See `TokenWindows.read`; documents are always numbered."""
        dataset, length = self._dataset, self._length
        ids = np.full(length, dataset.eos_id, np.int64)
        labels = np.full(length, IGNORED_LABEL, np.int64)
        numbers = np.zeros(length, np.int64)
        place = 0
        for count, (begin, size) in enumerate(self._windows(sample), 1):
            tokens = ids[place : place + size] = _known(dataset, begin, size)
            counts = dataset.read_trained(begin + 1, size - 1)
            # A document's last token has no label: the next token belongs to another document.
            labels[place : place + size - 1][counts] = tokens[1:][counts]
            place += size
            # of what follows: the next document, or padding
            numbers[place:] = count
        return PackedSequence(ids, labels, numbers, crc32(labels.data, crc32(ids.data)))


def _known(dataset: TokenDataset, start: int, length: int) -> NDArray[np.int64]:
    """Read tokens, and check that they are in the vocabulary. Raises DataError if a token is
    outside of the vocabulary."""
    tokens = np.asarray(dataset.read(start, length), dtype=np.int64)
    if int(tokens.max()) >= dataset.vocab_size:
        file = dataset.file_of(start + int(tokens.argmax()))
        raise DataError(
            f"{file}: token {int(tokens.max())} is outside the vocabulary of {dataset.vocab_size}, "
            "so the file is damaged; see `perdure data inspect "
            f"{shlex.quote(str(file.parent))} --verify`"
        )
    return tokens


def best_fit(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack whole documents of `lengths` (N,) into bins of `room` tokens. The longest remaining
    document opens a bin; the longest that still fits is added until none fits. Documents of equal
    length keep their order. Those longer than `room`, or below two tokens, are left out.
    Returns (documents of all bins; index in that array of each bin's first document, followed by
    the array's length)."""
    fits = np.flatnonzero((lengths <= room) & (lengths > 1))
    by_length = fits[np.argsort(lengths[fits], kind="stable")]
    alive, firsts, counts = (
        found.tolist()
        for found in np.unique(lengths[by_length], return_index=True, return_counts=True)
    )
    next_of, left = dict(zip(alive, firsts, strict=True)), dict(zip(alive, counts, strict=True))
    made: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    while alive:
        # Documents of equal length are interchangeable: a bin's pattern repeats while they last.
        pattern: dict[int, int] = {}
        space, place = room, len(alive)
        # Each length is taken as often as it fits, so that only shorter ones are left to take.
        while (place := bisect.bisect_right(alive, space, 0, place) - 1) >= 0:
            length = alive[place]
            pattern[length] = min(space // length, left[length])
            space -= pattern[length] * length
        times = min(left[length] // count for length, count in pattern.items())
        columns = []
        for length, count in pattern.items():
            first, taken = next_of[length], times * count
            columns.append(by_length[first : first + taken].reshape(times, count))
            next_of[length], left[length] = first + taken, left[length] - taken
            if not left[length]:
                alive.remove(length)
        made.append(np.concatenate(columns, axis=1).ravel())
        sizes.append(np.full(times, sum(pattern.values()), np.int64))
    documents = np.concatenate([np.empty(0, np.int64), *made])
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
    return documents, starts


def packing_of(dataset: TokenDataset, seq_len: int, pack: Pack) -> TokenWindows | DocumentBins:
    """Return the sequences of `seq_len` tokens that `data.pack` makes of a data set."""
    whole = dataset.kind != "documents" if pack == "auto" else pack == "whole"
    return DocumentBins(dataset, seq_len) if whole else TokenWindows(dataset, seq_len)


SHORT = 128
"""Smallest mean document length, in tokens, for which `room_for_documents` suffices. A smaller
value would reserve more entries, and kernels do extra work for unused ones."""


def room_for_documents(rows: int, length: int) -> int:
    """Number of documents for which `cu_seqlens_of` reserves entries in a batch of `rows` sequences
    of `length` tokens."""
    return rows * -(-length // SHORT)


def cu_seqlens_of(document_ids: Tensor) -> Tensor:
    """Boundaries of documents, as `cu_seqlens` of FlashAttention's `varlen` functions. The rows
    count as one sequence. A document is a run of equal ids in one row. Empty documents at the end
    fill the reserved entries, so the shape rarely depends on the contents. If a batch has more
    documents than `room_for_documents`, the number of entries doubles until it suffices. Call this
    function on the CPU: on a GPU it would synchronise.

    Args:
        document_ids: (B, T) integers.

    Returns:
        (N + 1,) int32, ascending from 0 to B x T. Document n consists of the tokens from
            `result[n]` up to, but not including, `result[n + 1]` of the B x T.
    """
    rows, length = document_ids.shape
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = first.flatten().nonzero().flatten()
    room = room_for_documents(rows, length)
    # Doubling keeps the shapes few: compiled code recompiles for each.
    while room < len(starts):
        room *= 2
    padded = torch.full((room + 1,), rows * length, dtype=torch.int32, device=starts.device)
    padded[: len(starts)] = starts
    return padded
