"""Reads checkpoints that other programs wrote: maps tensor names of published checkpoints to names
of a model, and reads the checkpoints of torch.distributed.checkpoint (DCP).

A DCP checkpoint is a directory with pickled metadata and, for each tensor, saved chunks. Names show
how the state was nested: `model.layers.0.weight`, `app.optim.state.<fqn>.exp_avg`.
"""

import io
import pickle  # noqa: TID251  # for an Unpickler that makes nothing but DCP's own metadata
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
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

from checkpointing.errors import (
    CheckpointError,
    DamagedCheckpoint,
    StorageError,
    WrongModel,
    explain,
    reading,
)
from checkpointing.format.layout import DCP_METADATA, LayoutTensor, TensorMeta
from checkpointing.format.plan import TensorBox, TensorSpec, local_boxes
from checkpointing.format.tensors import STORED_DTYPES, TORCH_DTYPES, box_view
from checkpointing.format.untrusted import count, is_plain, printable
from checkpointing.load.segments import LoadTarget
from checkpointing.storage.steps import ADAPTER_CURE, storage_of

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts that torch.compile, FSDP and activation checkpointing add to names of parameters."""
_COMPUTED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|position_ids)$"
)
"""Buffers that older versions of transformers saved, and that all versions recompute."""
_MASKS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$")
"""Names of attention masks of GPT-2's time. Such a tensor is recomputed, and omitted, if it has
four dimensions or none."""
_CURES = (
    (r"lora_|^base_model\.", ADAPTER_CURE),
    (
        r"weight_scale|scales$|qweight|qzeros|absmax|quant_state|g_idx|_packed$",
        "its weights are quantised: take the checkpoint that is not quantised",
    ),
    (
        r"\.bias$",
        "it has biases, which this model does not compute: train such a model through "
        "model.factory",
    ),
)
"""(pattern of names that the model lacks, advice). The first pattern that matches is used."""


def by_model_names(
    stored: Mapping[str, LayoutTensor], known: Collection[str]
) -> dict[str, LayoutTensor]:
    """Returns tensors by the names of a model: without wrappers' parts, and with or without the
    first part that most of the model's names have, such as `model.`. Files saved from the backbone
    lack this part, and files saved from a wrapper have it twice; transformers opens both kinds of
    files. Buffers that every reader computes are omitted. A tensor that the model lacks keeps its
    name. `known` has the names that the model has or ignores. Raises WrongModel if two tensors
    would have the same name."""
    names: dict[str, str] = {}
    firsts = Counter(name.partition(".")[0] + "." for name in known)
    base = max(firsts, key=lambda first: (firsts[first], first), default="")
    for there in stored:
        bare = _without_wrappers(there)
        candidates = (there, bare, bare.removeprefix(base), base + bare)
        # The unchanged name is tried first, so that it wins over changed ones.
        name = next((one for one in candidates if one in known), there)
        mask = _MASKS.search(there) and len(stored[there].meta.shape) in (0, 4)
        if name not in known and (mask or _COMPUTED.search(there)):
            continue
        if name in names:
            raise WrongModel(
                f"the files hold {name} twice, as {printable(names[name])} and as "
                f"{printable(there)}: remove one of the two from the files"
            )
        names[name] = there
    return {name: stored[there] for name, there in names.items()}


def _without_wrappers(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(dropwhile(lambda part: part == "module", parts))  # DDP adds `module.` in front


def without_copies(
    stored: Mapping[str, LayoutTensor],
    wanted: Collection[str],
    tied: Mapping[str, str],
    read: Callable[[LayoutTensor], Iterable[Tensor]],
) -> dict[str, LayoutTensor]:
    """Returns the tensors without copies of tied weights. If a file holds only the copy, it takes
    the weight's place. Raises WrongModel if a weight and its copy differ, as if trained apart.

    Args:
        stored: tensors by the names of the model.
        tied: name of a copy → the model's name for both.
        read: yields the elements of a tensor in order, piece by piece.
    """
    found = dict(stored)
    for copy, name in tied.items():
        if copy in wanted or name not in wanted or copy not in found:
            continue
        second = found.pop(copy)
        first = found.setdefault(name, second)
        if first is not second and not _equal(first, second, read):
            raise WrongModel(
                f"the files hold {copy} and {name} with different numbers, but the model ties the "
                "two: load into a model that does not tie them "
                f'("tie_word_embeddings": false in config.json), or remove {copy} from the files'
            )
    return found


def _equal(
    first: LayoutTensor, second: LayoutTensor, read: Callable[[LayoutTensor], Iterable[Tensor]]
) -> bool:
    if first.meta.shape != second.meta.shape:
        return False
    if first.meta.dtype == second.meta.dtype:  # compared as bits, so that NaNs are equal
        pairs = zip(read(first), read(second), strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    # Tensors of different dtypes are equal if their numbers are.
    whole = (torch.cat([piece.double() for piece in read(one)]) for one in (first, second))
    return torch.equal(*whole)


def cure(unknown: Iterable[str], missing: Iterable[str]) -> str:
    """Returns advice about tensors that the model lacks and tensors that the files lack."""
    unknown, missing = list(unknown), list(missing)
    for pattern, words in _CURES:
        if any(re.search(pattern, name) for name in unknown):
            return words
    if missing == ["lm_head.weight"]:
        return (
            "it was saved without its head: save it again as AutoModelForCausalLM, or write "
            '"tie_word_embeddings": true into config.json if the head is the embedding'
        )
    return "take the config.json that was saved with these weights"


_OPTIMIZER = re.compile(
    r"(?:.*\.)?optim(?:izer)?s?\.(?:.*\.)?(?:state\.(?P<fqn>.+)\.(?P<leaf>\w+)|param_groups\..*)"
)
_MODEL_PREFIXES = ("app.model.", "state_dict.model.", "state.model.", "model.", "")


@dataclass(frozen=True)
class _DcpCheckpoint:
    path: Path
    metadata: Metadata

    @property
    def optimizer(self) -> dict[str, LayoutTensor]:
        """Optimizer state by this package's names (`<fqn>.exp_avg`). `LayoutTensor.file` holds the
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
    def model(self) -> dict[str, LayoutTensor]:
        """All tensors but the optimizer's, without their common prefix (such as `model.`);
        `LayoutTensor.file` holds the name of the tensor in the checkpoint."""
        names = self._model_names()
        return self._under(self._nesting(names), names)

    def model_for(self, wanted: Collection[str]) -> dict[str, LayoutTensor]:
        """Returns tensors by the names of a model: the tensors under the prefix that matches most
        of `wanted`. `LayoutTensor.file` holds the name of the tensor in the checkpoint."""
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

    def _under(self, prefix: str, names: Iterable[str]) -> dict[str, LayoutTensor]:
        return {
            name.removeprefix(prefix): self._stored(name)
            for name in names
            if name.startswith(prefix)
        }

    def _stored(self, name: str) -> LayoutTensor:
        entry = self._tensors[name]
        dtype = STORED_DTYPES.get(entry.properties.dtype)
        if dtype is None:
            raise StorageError(
                f"{self.path}: {name} is {entry.properties.dtype}, which safetensors does not "
                "store; convert it before it is saved with DCP"
            )
        return LayoutTensor(name, 0, TensorMeta(dtype, tuple(entry.size)))

    def read(self, stored: LayoutTensor) -> Tensor:
        """Returns a whole tensor, on the CPU. Raises the errors of `fill`."""
        whole = torch.empty(stored.meta.shape, dtype=TORCH_DTYPES[stored.meta.dtype])
        self.fill({"": stored}, {"": LoadTarget(whole, [TensorBox.whole(stored.meta.shape)])})
        return whole

    @torch.no_grad()
    def fill(self, stored: Mapping[str, LayoutTensor], targets: Mapping[str, LoadTarget]) -> None:
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
    stored: Mapping[str, LayoutTensor],
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
