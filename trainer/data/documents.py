"""Boundaries of documents in micro-batches of packed sequences."""

import torch
from torch import Tensor

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
