"""Boundaries of documents in micro-batches of packed sequences."""

import torch
from torch import Tensor

SHORT = 128
"""Mean document length, in tokens, for which boundaries have room; kernels pay for unused room."""


def room_for_documents(rows: int, length: int) -> int:
    """Documents that `cu_seqlens_of` has room for, unless there are more."""
    return rows * -(-length // SHORT)


def cu_seqlens_of(document_ids: Tensor) -> Tensor:
    """Boundaries of documents, in the form of FlashAttention's `varlen` functions.

    The rows are laid end to end. A document is a run of equal ids in one row. Empty documents at
    the end fill the room, so the shape depends on the contents only beyond `room_for_documents`,
    where the room doubles until it suffices. Call it on the CPU: on a GPU it would synchronise.

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
    # Doubled, so that few shapes occur: compiled code recompiles for each.
    while room < len(starts):
        room *= 2
    padded = torch.full((room + 1,), rows * length, dtype=torch.int32, device=starts.device)
    padded[: len(starts)] = starts
    return padded
