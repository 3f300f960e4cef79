"""Digests of tensors in memory or in a checkpoint, equal to those in `SaveOutcome`; see
format/digests.py."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from checkpointing.format.digests import digest_and_finite
from checkpointing.format.layout import DTYPE_BYTES, MODEL, OPTIMIZER, TensorMeta
from checkpointing.format.plan import SectionNumbers, TensorPiece, by_section
from checkpointing.format.tensors import as_bytes, box_view, local_tensor
from checkpointing.ranks import RankGroup, failing_alike
from checkpointing.save.planning import SavePlanner, signatures
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.source import StorageTensorReader, open_source

_ANY_SIZE = 1 << 62
"""Exceeds all sizes of tensors, so that the plan has one file per section."""


class InspectedDigests(NamedTuple):
    """Digests of the model's tensors and of the optimizer's, as in `SaveOutcome`."""

    weights: str
    moments: str


def digests_in_memory(
    group: dist.ProcessGroup | None, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> InspectedDigests:
    """Returns the digests that a save of these tensors would report. Called on all ranks of the
    group. Raises ValueError if the tensors cannot be saved."""
    ranks, tensors = RankGroup(group), by_section(model, optimizer)
    with failing_alike():
        plan = SavePlanner(ranks, _ANY_SIZE).plan(signatures(model, optimizer), model, optimizer)
        parts = ranks.together(lambda: [*_as_text(_of_pieces(plan.pieces, tensors))])
    summaries = (SectionNumbers(int(weights, 16), int(moments, 16)) for weights, moments in parts)
    return _as_text(sum(summaries, SectionNumbers()))


def stored_digests(path: StoragePlace) -> InspectedDigests:
    """Returns the digests of the tensors in a checkpoint of this package. Reads all tensors, one at
    a time. Raises DamagedCheckpoint or StorageError if the checkpoint contradicts its commit
    record, or cannot be read."""
    found = SectionNumbers()
    with open_source(path) as source, StorageTensorReader(path, source.records) as reader:
        for name, stored in by_section(source.model, source.optimizer).items():
            meta = stored.meta
            data = np.empty(meta.nbytes, np.uint8)
            if meta.nbytes:
                reader.read(stored, 0, data.data)
            bits = data.view(f"u{DTYPE_BYTES[meta.dtype]}").reshape(meta.shape)
            found += _summary(name, meta, (0,) * len(meta.shape), bits)
    return _as_text(found)


def _of_pieces(pieces: Iterable[TensorPiece], tensors: Mapping[str, Tensor]) -> SectionNumbers:
    found = SectionNumbers()
    for piece in pieces:
        meta, box = piece.stored.meta, piece.box
        part = box_view(local_tensor(tensors[piece.name]), box).contiguous().cpu()
        bits = as_bytes(part).numpy().view(f"u{DTYPE_BYTES[meta.dtype]}").reshape(box.shape)
        found += _summary(piece.name, meta, box.offset, bits)
    return found


def _summary(
    name: str, meta: TensorMeta, offset: Sequence[int], bits: NDArray[np.generic]
) -> SectionNumbers:
    """Returns the digest of a box of a tensor as a contribution to `weights` or to `moments`."""
    digest, _ = digest_and_finite(name, meta.dtype, meta.shape, offset, bits)
    if name.startswith(f"{OPTIMIZER.stem}/"):
        return SectionNumbers(moments=digest)
    assert name.startswith(f"{MODEL.stem}/")
    return SectionNumbers(weights=digest)


def _as_text(numbers: SectionNumbers) -> InspectedDigests:
    return InspectedDigests(f"{numbers.weights:016x}", f"{numbers.moments:016x}")
