"""Loads a model from a checkpoint of any kind into the tensors of any world size and strategy."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, StorageError, WrongModel
from checkpointing.format.layout import (
    BLOCK_BYTES,
    COMMIT_RECORD,
    DCP_METADATA,
    MODEL,
    FileRecord,
    LayoutTensor,
)
from checkpointing.format.plan import TensorSpec, not_finite
from checkpointing.format.tensors import TORCH_DTYPES, place_of, tensors_not_finite
from checkpointing.format.untrusted import listed
from checkpointing.load.fill import read_tensors
from checkpointing.load.foreign import by_model_names, cure, without_copies
from checkpointing.load.segments import LoadFiles
from checkpointing.ranks import RankGroup, failing_alike
from checkpointing.storage.place import StoragePlace, local, location
from checkpointing.storage.source import StorageTensorReader
from checkpointing.storage.steps import (
    ADAPTER_CURE,
    hugging_face_tensors,
    open_step,
    storage_of,
    stored_tensors,
)


def load_model(
    path: str | StoragePlace,
    tensors: Mapping[str, Tensor],
    *,
    verify: bool = True,
    optional: Collection[str] = (),
    finite: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load weights into tensors, in place.

    Names in a checkpoint may begin with `module.` or lack `model.`, and contain `_orig_mod.` and
    the like anywhere. Rotary frequencies in older files are ignored.

    Args:
        path: a checkpoint of this package or any Hugging Face directory with safetensors, also in
            an object store; or a checkpoint of torch.distributed.checkpoint, whose names may have
            any prefix.
        tensors: targets by name: plain or DTensor, on any device. Floating point numbers are
            converted where a file has another dtype.
        verify: check the checksums of the blocks that are read, if the checkpoint has checksums.
        optional: names that a checkpoint may hold in addition to the targets.
        tied: name of the copy of a tied weight → name of the target. A checkpoint may hold either,
            or both with equal numbers. Targets that are the same tensor are treated likewise.
        finite: names of tensors that must not hold NaN or infinity.
        group: process group that carries CPU tensors. All its ranks call this function, and read
            every byte once per node. None: this process reads alone.

    Raises:
        WrongModel: tensors are missing, unexpected or of another shape, or a copy of a tied weight
            differs from it. The message names them.
        DamagedCheckpoint: a file is damaged, or a tensor of `finite` holds NaN or infinity. The
            message names the file.
        StorageError: there is no model at `path`, or the model cannot be read.
    """
    path, ranks = location(path), RankGroup(group)
    copies = _copies(tensors)
    tied = {**copies, **(tied or {})}
    # each byte of a target is written once, even if it has several names
    tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
    with failing_alike():
        (specs,) = ranks.specs(lambda: [tensors])

        def fit(stored: Mapping[str, LayoutTensor], read: ReadPieces) -> dict[str, LayoutTensor]:
            return _fit(path, stored, specs, optional, tied, read)

        look = ranks.on_main(lambda: _look(path, fit, verify=verify))
        if look is None:
            _load_dcp(path, specs, tensors, fit, finite, ranks)
        else:
            files = LoadFiles(path, lambda name: storage_of(path).open(path / name), *look)
            read_tensors(files, specs, tensors, group, finite=finite)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns name of a target → first name of the same tensor, for targets with several names."""
    first: dict[Hashable, str] = {}
    found = {name: first.setdefault(place_of(tensor), name) for name, tensor in tensors.items()}
    return {name: known for name, known in found.items() if known != name}


ReadPieces = Callable[[LayoutTensor], Iterable[Tensor]]
"""Yields the elements of a tensor in order, piece by piece."""
Fit = Callable[[Mapping[str, LayoutTensor], ReadPieces], dict[str, LayoutTensor]]
"""(tensors of a checkpoint, `ReadPieces`) → tensors by target; raises WrongModel."""


def _look(
    path: StoragePlace, fit: Fit, *, verify: bool
) -> tuple[dict[str, LayoutTensor], dict[str, FileRecord]] | None:
    """Returns (positions of the tensors, checksums by file); None for a DCP checkpoint."""
    storage = storage_of(path)
    if storage.exists(path / DCP_METADATA):
        return None
    if not storage.exists(path / COMMIT_RECORD):
        return fit(hugging_face_tensors(path), lambda tensor: _pieces(path, tensor, {})), {}
    step = open_step(path)
    if MODEL not in step.sections:
        raise StorageError(f"{path}: {ADAPTER_CURE}")
    records = step.record.files if verify else {}
    stored = stored_tensors(step, MODEL, verify=False)
    try:
        return fit(stored, lambda tensor: _pieces(path, tensor, records)), records
    except WrongModel:
        if verify:  # headers are not checked yet, and a damaged one could cause the error
            stored_tensors(step, MODEL, verify=True)
        raise


def _pieces(
    path: StoragePlace, tensor: LayoutTensor, records: Mapping[str, FileRecord]
) -> Iterator[Tensor]:
    with StorageTensorReader(path, records) as reader:
        for start in range(0, tensor.meta.nbytes, BLOCK_BYTES):
            piece = torch.empty(min(BLOCK_BYTES, tensor.meta.nbytes - start), dtype=torch.uint8)
            reader.read(tensor, start, piece.numpy().data)
            yield piece.view(TORCH_DTYPES[tensor.meta.dtype])


def _load_dcp(
    path: StoragePlace,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    fit: Fit,
    finite: Collection[str],
    ranks: RankGroup,
) -> None:
    from checkpointing.load.foreign import open_dcp, targets_of  # slow to import, and rarely used

    checkpoint = ranks.each(lambda: open_dcp(local(path)))

    def read() -> None:
        named = checkpoint.model_for(specs)
        stored = fit(named, lambda tensor: [checkpoint.read(tensor).flatten()])
        checkpoint.fill(stored, targets_of(stored, specs, tensors, ranks.rank))
        held = {name: tensor for name, tensor in tensors.items() if name in finite}
        if bad := tensors_not_finite(held):
            raise DamagedCheckpoint(f"{path}: {not_finite(bad)}")

    ranks.together(read)


def _fit(
    path: StoragePlace,
    stored: Mapping[str, LayoutTensor],
    specs: Mapping[str, TensorSpec],
    optional: Collection[str],
    tied: Mapping[str, str],
    read: ReadPieces,
) -> dict[str, LayoutTensor]:
    """Implements `Fit`; the other parameters are those of `load_model`."""
    try:
        named = by_model_names(stored, {*specs, *optional, *tied})
        found = without_copies(named, specs, tied, read)
    except WrongModel as error:
        raise WrongModel(f"{path}: {error}") from error
    found = {name: at for name, at in found.items() if name in specs or name not in optional}
    try:
        refuse_differences(path, found, specs)
    except WrongModel as error:
        # without config.json this is no Hugging Face model, and the advice does not apply
        if not storage_of(path).exists(path / "config.json"):
            raise
        advice = cure(found.keys() - specs.keys(), specs.keys() - found.keys())
        raise WrongModel(f"{error}; {advice}") from error
    return found


def refuse_differences(
    path: StoragePlace,
    stored: Mapping[str, LayoutTensor],
    wanted: Mapping[str, TensorSpec],
    what: str = "model",
) -> None:
    """Raises WrongModel, which names the first differences of each kind, unless a checkpoint has
    the names and shapes of `wanted`, and dtypes that convert to its dtypes. `what`: the owner of
    the tensors in messages, "model" or "optimizer"."""
    problems = [
        *_list(f"the {what} has no", [name for name in stored if name not in wanted]),
        *_list("the checkpoint has no", [name for name in wanted if name not in stored]),
    ]
    both = [(name, stored[name].meta, wanted[name].meta) for name in wanted if name in stored]
    shapes = [
        f"{name} {list(ours.shape)} (checkpoint {list(theirs.shape)}, {stored[name].file})"
        for name, theirs, ours in both
        if theirs.shape != ours.shape
    ]
    dtypes = [
        f"{name} {ours.dtype} (checkpoint {theirs.dtype})"
        for name, theirs, ours in both
        if theirs.dtype != ours.dtype and not (_is_float(theirs.dtype) and _is_float(ours.dtype))
    ]
    problems += _list("other shapes:", shapes)
    problems += _list("dtypes that do not convert:", dtypes)
    if problems:
        raise WrongModel(f"{path} is of another {what}: {'; '.join(problems)}")


def _list(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what} {listed(names)}"] if names else []


def _is_float(dtype: str) -> bool:
    return TORCH_DTYPES[dtype].is_floating_point
