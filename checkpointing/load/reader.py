"""The model of a checkpoint → tensors of any world size and strategy."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, WrongModel
from checkpointing.format.layout import (
    COMMIT_RECORD,
    DCP_METADATA,
    MODEL,
    FileRecord,
    StoredTensor,
)
from checkpointing.format.numbers import not_finite
from checkpointing.format.plan import TensorSpec
from checkpointing.format.tensors import TORCH_DTYPES, tensors_not_finite
from checkpointing.load.fill import read_tensors
from checkpointing.load.segments import Files
from checkpointing.ranks import Ranks, failing_alike
from checkpointing.storage.kinds import storage_of
from checkpointing.storage.place import Place
from checkpointing.storage.steps import hugging_face_tensors, open_step, stored_tensors

_NAMED = 3
"""How many differing tensors a message names."""


def load_model(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    verify: bool = True,
    optional: Collection[str] = (),
    finite: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load weights into tensors, in place.

    Args:
        path: a checkpoint of ours, any Hugging Face directory with safetensors, or a checkpoint of
            torch.distributed.checkpoint, whose names may have a prefix such as `model.`.
        tensors: targets by name: plain or DTensor, on any device; floating point numbers are
            converted where a file has another dtype.
        verify: check the checksums of the blocks that are read (checkpoints of ours have them).
        optional: names that a checkpoint may hold besides the targets, such as the second copy of
            a tied weight.
        finite: names of tensors that must not hold NaN or infinity.
        group: carries CPU tensors; called on all its ranks, which then read every byte once per
            node. None: this process reads what it needs, and asks nobody.

    Raises:
        WrongModel: names the tensors that are missing, unexpected, or of another shape.
        DamagedCheckpoint: names the file; also where a tensor of `finite` is not.
        StorageError: there is no model at `path`, or it cannot be read.
    """
    path, ranks = Path(path), Ranks(group)
    with failing_alike():
        (specs,) = ranks.specs(tensors)
        look = ranks.on_main(lambda: _look(path, specs, optional, verify=verify))
        if look is None:
            _load_dcp(path, specs, tensors, optional, finite, ranks)
        else:
            files = Files(path, lambda name: storage_of(path).open(path / name), *look)
            read_tensors(files, specs, tensors, group, finite=finite)


def _look(
    path: Path, specs: Mapping[str, TensorSpec], optional: Collection[str], *, verify: bool
) -> tuple[dict[str, StoredTensor], dict[str, FileRecord]] | None:
    """Where the tensors lie, and the checksums of files; None: it is a DCP checkpoint."""
    if (path / DCP_METADATA).exists():
        return None
    if not (path / COMMIT_RECORD).exists():
        stored = _required(hugging_face_tensors(path), specs, optional)
        refuse_differences(path, stored, specs)
        return stored, {}
    step = open_step(path)
    stored = _required(stored_tensors(step, MODEL, verify=False), specs, optional)
    try:
        refuse_differences(path, stored, specs)
    except WrongModel:
        if verify:  # headers are checked with all else, which has not been read yet
            stored_tensors(step, MODEL, verify=True)
        raise
    return stored, step.record.files if verify else {}


def _load_dcp(
    path: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    optional: Collection[str],
    finite: Collection[str],
    ranks: Ranks,
) -> None:
    from checkpointing.load.foreign import open_dcp, targets_of  # slow to import, and rarely wanted

    checkpoint = ranks.each(lambda: open_dcp(path))

    def read() -> None:
        stored = _required(checkpoint.model_for(specs), specs, optional)
        refuse_differences(path, stored, specs)
        checkpoint.fill(stored, targets_of(stored, specs, tensors, ranks.rank))
        held = {name: tensor for name, tensor in tensors.items() if name in finite}
        if bad := tensors_not_finite(held):
            raise DamagedCheckpoint(f"{path}: {not_finite(bad)}")

    ranks.together(read)


def _required(
    stored: Mapping[str, StoredTensor], specs: Collection[str], optional: Collection[str]
) -> dict[str, StoredTensor]:
    return {name: at for name, at in stored.items() if name in specs or name not in optional}


def refuse_differences(
    path: Place,
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, TensorSpec],
    what: str = "model",
) -> None:
    """Require that a checkpoint and a model (or `what` else) have the same tensors.

    Raises:
        WrongModel: names the first differences of each kind.
    """
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
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{what} {', '.join(names[:_NAMED])}{more}"]


def _is_float(dtype: str) -> bool:
    return TORCH_DTYPES[dtype].is_floating_point
