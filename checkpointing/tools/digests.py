"""Digests of tensors in memory or in a checkpoint, equal to those in `SaveOutcome`; see
format/bits.py."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from checkpointing.format.bits import digest_and_finite
from checkpointing.format.layout import DTYPE_BYTES, MODEL, OPTIMIZER
from checkpointing.format.plan import TensorPiece
from checkpointing.format.sections import NumberSummary, by_section
from checkpointing.format.tensors import as_bytes, box_view, local_tensor
from checkpointing.ranks import RankGroup, failing_alike
from checkpointing.save.planning import SavePlanner, signatures
from checkpointing.storage.place import Place
from checkpointing.storage.source import StoredTensorReader, open_source

_ANY_SIZE = 1 << 62
"""Exceeds all sizes of tensors, so that the plan has one file per section."""


class SaveDigests(NamedTuple):
    """The two digests of `SaveOutcome`, 16 hexadecimal digits each."""

    weights: str
    """Digest of the model's tensors."""
    moments: str
    """Digest of the optimizer's tensors."""


def digests_in_memory(
    group: dist.ProcessGroup | None, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> SaveDigests:
    """Returns the digests that a save of these tensors would report. Called on all ranks of the
    group.

    Raises:
        ValueError: the tensors cannot be saved.
    """
    ranks, tensors = RankGroup(group), by_section(model, optimizer)
    with failing_alike():
        plan = SavePlanner(ranks, _ANY_SIZE).plan(signatures(model, optimizer), model, optimizer)
        parts = ranks.together(lambda: [*_told(_of_pieces(plan.pieces, tensors))])
    return _told(
        sum(
            (NumberSummary(int(weights, 16), int(moments, 16)) for weights, moments in parts),
            NumberSummary(),
        )
    )


def stored_digests(path: Place) -> SaveDigests:
    """Returns the digests of the tensors in a checkpoint of this package. Reads all tensors, one at
    a time.

    Raises:
        DamagedCheckpoint, StorageError: the checkpoint contradicts its commit record, or cannot be
        read.
    """
    found = NumberSummary()
    with open_source(path) as source, StoredTensorReader(path, source.records) as reader:
        for name, stored in by_section(source.model, source.optimizer).items():
            meta = stored.meta
            data = np.empty(meta.nbytes, np.uint8)
            if meta.nbytes:
                reader.read(stored, 0, data.data)
            bits = data.view(f"u{DTYPE_BYTES[meta.dtype]}").reshape(meta.shape)
            offset = (0,) * len(meta.shape)
            digest, _ = digest_and_finite(name, meta.dtype, meta.shape, offset, bits)
            found += _of_section(name, digest)
    return _told(found)


def _of_pieces(pieces: Iterable[TensorPiece], tensors: Mapping[str, Tensor]) -> NumberSummary:
    """Returns the contribution of this rank's pieces to the digests."""
    found = NumberSummary()
    for piece in pieces:
        meta, box = piece.stored.meta, piece.box
        part = box_view(local_tensor(tensors[piece.name]), box).contiguous().cpu()
        bits = as_bytes(part).numpy().view(f"u{DTYPE_BYTES[meta.dtype]}").reshape(box.shape)
        digest, _ = digest_and_finite(piece.name, meta.dtype, meta.shape, box.offset, bits)
        found += _of_section(piece.name, digest)
    return found


def _of_section(name: str, digest: int) -> NumberSummary:
    """Returns a tensor's digest as a contribution to `weights` or to `moments`."""
    if name.startswith(f"{OPTIMIZER.stem}/"):
        return NumberSummary(moments=digest)
    assert name.startswith(f"{MODEL.stem}/")
    return NumberSummary(weights=digest)


def _told(numbers: NumberSummary) -> SaveDigests:
    return SaveDigests(f"{numbers.weights:016x}", f"{numbers.moments:016x}")
