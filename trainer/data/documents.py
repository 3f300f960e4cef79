"""Where the documents of a micro-batch of packed sequences begin."""

import torch
from torch import Tensor

SHORT = 128
"""Tokens. There is room for documents that are so long on average; kernels pay for unused room."""


def room_for_documents(rows: int, length: int) -> int:
    """Documents that `cu_seqlens_of` has room for, unless there are more."""
    return rows * -(-length // SHORT)


def cu_seqlens_of(document_ids: Tensor) -> Tensor:
    """Boundaries of documents, in the form and the words of FlashAttention's `varlen` functions.

    The rows are laid end to end. A document is a run of equal ids in one row; what goes on in the
    next row is another one, as rows are sequences of their own. Empty documents at the end fill the
    room: the shape depends on the contents only where there are more documents than
    `room_for_documents`, and then the room is twice, four times … that. To be called on the CPU;
    on a GPU it would wait for it.

    Args:
        document_ids: (B, T) integers.

    Returns:
        (N + 1,) int32, ascending: document n has tokens [n] to [n + 1] of B x T. The first is 0,
        the last B x T.
    """
    rows, length = document_ids.shape
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = first.flatten().nonzero().flatten()
    room = room_for_documents(rows, length)
    while room < len(starts):
        room *= 2
    padded = torch.full((room + 1,), rows * length, dtype=torch.int32, device=starts.device)
    padded[: len(starts)] = starts
    return padded
