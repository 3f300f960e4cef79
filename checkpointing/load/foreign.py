"""Reads checkpoints of torch.distributed.checkpoint (DCP).

A DCP checkpoint is a directory with pickled metadata and, for each tensor, saved chunks. Names show
how the state was nested: `model.layers.0.weight`, `app.optim.state.<fqn>.exp_avg`."""

import io
import pickle  # noqa: TID251  # for an Unpickler that makes nothing but DCP's own metadata
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from checkpointing.errors import CheckpointError, DamagedCheckpoint, StorageError, explain, reading
from checkpointing.format.layout import DCP_METADATA, StoredTensor, TensorMeta
from checkpointing.format.plan import TensorBox, TensorSpec, local_boxes
from checkpointing.format.tensors import STORED_DTYPES, TORCH_DTYPES, box_view
from checkpointing.format.untrusted import count, is_plain, printable
from checkpointing.load.segments import LoadTarget
from checkpointing.storage.steps import storage_of

_OPTIMIZER = re.compile(
    r"(?:.*\.)?optim(?:izer)?s?\.(?:.*\.)?(?:state\.(?P<fqn>.+)\.(?P<leaf>\w+)|param_groups\..*)"
)
_MODEL_PREFIXES = ("app.model.", "state_dict.model.", "state.model.", "model.", "")


@dataclass(frozen=True)
class _DcpCheckpoint:
    path: Path
    metadata: Metadata

    @property
    def optimizer(self) -> dict[str, StoredTensor]:
        """Optimizer state by this package's names (`<fqn>.exp_avg`). `StoredTensor.file` holds the
        name of the tensor in the checkpoint. Raises StorageError if state is saved by the number of
        a parameter, not by its name."""
        found = {}
        for name in self._tensors:
            match = _OPTIMIZER.fullmatch(name)
            if match and match["fqn"]:
                if match["fqn"].isdigit():
                    raise StorageError(
                        f"{self.path}: {name} does not name its parameter; save the optimizer with "
                        "torch.distributed.checkpoint.state_dict.get_state_dict"
                    )
                found[f"{match['fqn']}.{match['leaf']}"] = self._stored(name)
        return found

    @property
    def model(self) -> dict[str, StoredTensor]:
        """All tensors but the optimizer's, without their common prefix (such as `model.`);
        `StoredTensor.file` holds the name of the tensor in the checkpoint."""
        names = self._model_names()
        return self._under(self._nesting(names), names)

    def model_for(self, wanted: Collection[str]) -> dict[str, StoredTensor]:
        """Returns tensors by the names of a model: the tensors under the prefix that matches most
        of `wanted`. `StoredTensor.file` holds the name of the tensor in the checkpoint."""
        names = self._model_names()
        prefixes = Counter(
            name.removesuffix(target)
            for target in wanted
            for name in names
            if name == target or name.endswith(f".{target}")
        )
        if not prefixes:
            return self.model
        best = max(prefixes, key=lambda prefix: (prefixes[prefix], -len(prefix)))
        return self._under(best, names)

    @cached_property
    def _tensors(self) -> dict[str, TensorStorageMetadata]:
        return {
            name: entry
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def _model_names(self) -> list[str]:
        return [name for name in self._tensors if not _OPTIMIZER.fullmatch(name)]

    def _nesting(self, names: Sequence[str]) -> str:
        """Returns the prefix under which most tensors were nested when they were saved."""
        paths = self.metadata.planner_data
        if isinstance(paths, Mapping) and all(name in paths for name in names):
            folders = Counter(tuple(map(str, paths[name][:-1])) for name in names)
            return "".join(f"{part}." for part in max(folders, key=lambda key: folders[key]))
        return next(
            prefix for prefix in _MODEL_PREFIXES if all(name.startswith(prefix) for name in names)
        )

    def _under(self, prefix: str, names: Iterable[str]) -> dict[str, StoredTensor]:
        return {
            name.removeprefix(prefix): self._stored(name)
            for name in names
            if name.startswith(prefix)
        }

    def _stored(self, name: str) -> StoredTensor:
        entry = self._tensors[name]
        dtype = STORED_DTYPES.get(entry.properties.dtype)
        if dtype is None:
            raise StorageError(
                f"{self.path}: {name} is {entry.properties.dtype}, which safetensors does not "
                "store; convert it before it is saved with DCP"
            )
        return StoredTensor(name, 0, TensorMeta(dtype, tuple(entry.size)))

    def read(self, stored: StoredTensor) -> Tensor:
        """Returns a whole tensor, on the CPU. Raises the errors of `fill`."""
        whole = torch.empty(stored.meta.shape, dtype=TORCH_DTYPES[stored.meta.dtype])
        self.fill({"": stored}, {"": LoadTarget(whole, [TensorBox.whole(stored.meta.shape)])})
        return whole

    @torch.no_grad()
    def fill(self, stored: Mapping[str, StoredTensor], targets: Mapping[str, LoadTarget]) -> None:
        """Read the boxes of targets with torch's own reader. Each rank calls it by itself. Raises
        DamagedCheckpoint, which names the missing or damaged part, and StorageError if a file
        cannot be read."""
        planner = _Planner({stored[name].file: target for name, target in targets.items()})
        items = []
        for name, target in targets.items():
            there = stored[name].file
            self._require_whole(there)
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
                for box in target.boxes
            ]
            entry = self._tensors[there]
            items += create_read_items_for_chunk_list(there, entry, chunks)
        # Only torch's own reader can read the chunks of every version of DCP.
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        try:
            with reading(self.path):
                reader.read_data(LoadPlan(items), planner).wait()
        except CheckpointError:
            raise
        except Exception as error:  # torch's reader, and pickles in a chunk, may raise anything
            text = printable(str(error).partition("\n")[0])
            raise DamagedCheckpoint(f"{self.path}: a saved chunk is damaged: {text}") from error

    def _require_whole(self, name: str) -> None:
        """Require every byte of a tensor, as torch's reader leaves missing parts unchanged."""
        entry = self._tensors[name]
        saved, whole = sum(chunk.sizes.numel() for chunk in entry.chunks), entry.size.numel()
        if saved != whole:
            raise DamagedCheckpoint(
                f"{self.path}: only {saved} of {whole} elements of {name} were saved"
            )
        for chunk in entry.chunks:
            if MetadataIndex(name, chunk.offsets) not in self.metadata.storage_data:
                raise DamagedCheckpoint(
                    f"{self.path}: {DCP_METADATA} does not say where {name} at "
                    f"{list(chunk.offsets)} lies"
                )


def open_dcp(path: Path) -> _DcpCheckpoint:
    """Read the metadata of a DCP checkpoint, which is a pickle. Only DCP's own classes are loaded.
    Raises DamagedCheckpoint if the metadata is malformed, and StorageError if it names other
    classes, or cannot be read."""
    where = path / DCP_METADATA
    with reading(where):
        data = storage_of(where).read(where)
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"holds a {type(metadata).__name__}, no DCP metadata")
        _check(metadata)
    except StorageError:
        raise
    except Exception as error:  # a forged pickle may raise anything
        text = printable(explain(error).removeprefix("ValueError: "))
        raise DamagedCheckpoint(f"{where}: malformed: {text}") from error
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return _DcpCheckpoint(path, metadata)


def _check(metadata: Metadata) -> None:
    """Raises an exception of any class if torch would not write such metadata, or if a file would
    be outside of the directory."""
    for name, entry in metadata.state_dict_metadata.items():
        if not name.isprintable():
            raise ValueError(f"{name!a} is no name of a tensor")
        if isinstance(entry, TensorStorageMetadata):
            STORED_DTYPES.get(entry.properties.dtype)
            boxes = [(entry.size, entry.size), *((c.offsets, c.sizes) for c in entry.chunks)]
            if any(len(box) != len(entry.size) for pair in boxes for box in pair):
                raise ValueError(f"{name}: its chunks have another number of dimensions")
            for size in (size for pair in boxes for box in pair for size in box):
                count(size)
    for info in metadata.storage_data.values():
        if not is_plain(info.relative_path):
            raise ValueError(f"{info.relative_path!a} is no file in its directory")
        count(info.offset)
        count(info.length)


def targets_of(
    stored: Mapping[str, StoredTensor],
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    rank: int,
) -> dict[str, LoadTarget]:
    """Returns the local part of each tensor on `rank`, for `_DcpCheckpoint.fill`."""
    return {
        name: LoadTarget.of(
            name, tensor, local_boxes(stored[name].meta.shape, specs[name].layouts, rank)
        )
        for name, tensor in tensors.items()
    }


class _Planner(DefaultLoadPlanner):
    """Makes torch's reader copy into the boxes of targets."""

    def __init__(self, targets: Mapping[str, LoadTarget]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns the memory that the reader copies a part of a chunk to."""
        index = read_item.dest_index
        target = self._targets[index.fqn]
        offset = tuple(index.offset or ())
        box = next(box for box in target.boxes if box.offset == offset)
        view = box_view(target.local, box)
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing, as `resolve_tensor` returns the target's own memory."""


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(dtype).removeprefix("torch.") for dtype in TORCH_DTYPES.values())},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Loads DCP's metadata classes and nothing else: a pickle may name any function."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise StorageError(
                f"{DCP_METADATA} names {module}.{name}, which DCP itself never writes there; the "
                "file is not loaded, as it may run code"
            )
        return super().find_class(module, name)
