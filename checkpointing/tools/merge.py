"""Merges a LoRA adapter into its base model in float32, a piece of a tensor at a time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, WrongModel, reading
from checkpointing.format.layout import StoredTensor
from checkpointing.format.nf4 import BLOCK, NF4, rounded
from checkpointing.format.peft import BASE, CONFIG, adapter_tensors, read_config
from checkpointing.format.tensors import TORCH_DTYPES, as_bytes
from checkpointing.format.untrusted import printable, read_object
from checkpointing.load.published import by_model_names
from checkpointing.storage.place import Place
from checkpointing.storage.source import CheckpointSource, StoredTensorReader
from checkpointing.storage.steps import storage_of

PIECE_ELEMENTS = 1 << 20
"""Elements of a weight merged at a time, in whole rows; at least one row is merged."""


class StoredAdapter:
    """An adapter in its files, which changes the weights of a model.

    Raises:
        DamagedCheckpoint, StorageError: the adapter is damaged, or not of LoRA.
    """

    def __init__(self, source: CheckpointSource, reader: StoredTensorReader) -> None:
        where = source.path / CONFIG
        with reading(where):
            data = storage_of(where).read(where)
        self.config = read_config(data, str(where))
        self.tensors = adapter_tensors(source.model, str(source.path))
        self.stored, self.reader = source.model, reader
        self.base = trained_over(source.path, source.state)
        self.over_nf4 = self.base.get("format") == NF4
        """Whether training kept the weights of the base model in nf4."""
        for name in self.tensors.pairs if self.over_nf4 else ():
            if any(columns % BLOCK for columns in self.shape_of(name)[1:]):
                raise DamagedCheckpoint(
                    f"{source.path}: says that it was trained over nf4, but the columns of "
                    f"{printable(name)} are no multiple of {BLOCK}"
                )

    def read(self, name: str) -> Tensor:
        """Returns a tensor of the adapter's file, in float32."""
        stored = self.stored[name]
        data = torch.empty(stored.meta.nbytes, dtype=torch.uint8)
        self.reader.read(stored, 0, data.numpy().data)
        return data.view(TORCH_DTYPES[stored.meta.dtype]).view(stored.meta.shape).float()

    def matrices(self, weight: str) -> tuple[Tensor, Tensor]:
        """Returns A (rank, in) and scale · B (out, rank) for a weight, in float32."""
        a, b = (self.read(name) for name in self.tensors.pairs[weight])
        # the scale is applied to B, as the product has many more elements
        return a, b * self.config.scale

    def under(self, weight: Tensor) -> Tensor:
        """Returns rows of a base weight in float32, rounded to nf4 if training used nf4."""
        return rounded(weight) if self.over_nf4 else weight.float()

    def shape_of(self, weight: str) -> tuple[int, ...]:
        """Returns the shape that the base parameter must have; () if A and B do not match."""
        if weight in self.tensors.whole:
            return self.stored[self.tensors.whole[weight]].meta.shape
        a, b = (self.stored[name].meta.shape for name in self.tensors.pairs[weight])
        return (b[0], a[1]) if len(a) == len(b) == 2 and a[0] == b[1] else ()


def trained_over(path: Place, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns `path`, `fingerprint` and `format` of the model that an adapter was trained over, as
    far as they are recorded: in its trainer state, or in the file that its export wrote; {} if
    neither records any. `state` is None for a plain directory.

    Raises:
        DamagedCheckpoint: the file is no JSON object.
    """
    if state is not None:
        base = state.get("base")
        return base if isinstance(base, dict) else {}
    file = path / BASE
    if not storage_of(file).exists(file):
        return {}
    try:
        with reading(file):
            return read_object(storage_of(file).read(file))
    except ValueError as error:
        raise DamagedCheckpoint(f"{file}: is not a JSON object: {error}; mend the file") from error


@contextmanager
def open_adapter(source: CheckpointSource) -> Iterator[StoredAdapter]:
    """Open an adapter, whose tensors can be read in the block."""
    with StoredTensorReader(source.path, source.records) as reader:
        yield StoredAdapter(source, reader)


class MergedModel:
    """The tensors of a model with an adapter added.

    Args:
        published: add to the weights as stored, even if training quantised them.

    Raises:
        WrongModel: the adapter is of another model.
    """

    def __init__(
        self, base: CheckpointSource, adapter: StoredAdapter, *, published: bool = False
    ) -> None:
        self._stored, self._adapter = base.model, adapter
        self._under: Callable[[Tensor], Tensor] = Tensor.float if published else adapter.under
        changed = [*adapter.tensors.pairs, *adapter.tensors.whole]
        named = by_model_names(base.model, changed)
        # by position, as the files and the adapter may use different names for a tensor
        places = {(stored.file, stored.begin): name for name, stored in base.model.items()}
        self._changed: dict[str, str] = {}
        """Name of a tensor in the model's files → the adapter's name for it."""
        for name in changed:
            stored = named.get(name)
            meta = stored and stored.meta
            if stored is None or not fits(stored, adapter.shape_of(name)):
                raise WrongModel(
                    f"{base.path}: its {printable(name)} is {meta}, but the adapter needs shape "
                    f"{list(adapter.shape_of(name))}: give the model that it was trained over"
                )
            self._changed[places[stored.file, stored.begin]] = name

    def pieces(self, name: str, reader: StoredTensorReader) -> tuple[str, Iterator[memoryview]]:
        """Returns (safetensors' dtype, bytes in order) of a tensor by its name in the model's
        files; `reader` reads them."""
        known, whole = self._changed.get(name), self._adapter.tensors.whole
        if known is None:
            return self._stored[name].meta.dtype, reader.pieces(self._stored[name])
        if known in whole:
            stored = self._adapter.stored[whole[known]]
            return stored.meta.dtype, self._adapter.reader.pieces(stored)
        return "F32", self._sums(self._stored[name], known, reader)

    def _sums(
        self, stored: StoredTensor, name: str, reader: StoredTensorReader
    ) -> Iterator[memoryview]:
        a, b = self._adapter.matrices(name)
        rows, columns = stored.meta.shape
        row_bytes = stored.meta.nbytes // rows
        step = max(1, PIECE_ELEMENTS // columns)
        for first in range(0, rows, step):
            some = b[first : first + step]
            data = torch.empty(len(some) * row_bytes, dtype=torch.uint8)
            reader.read(stored, first * row_bytes, data.numpy().data)
            weight = data.view(TORCH_DTYPES[stored.meta.dtype]).view(len(some), columns)
            # in float32 whatever the dtype, as a sum in bfloat16 would lose most of the adapter
            yield as_bytes(torch.addmm(self._under(weight), some, a)).numpy().data


def fits(stored: StoredTensor, shape: tuple[int, ...]) -> bool:
    """Whether a stored weight has this shape, floating point numbers, and elements."""
    is_float = TORCH_DTYPES[stored.meta.dtype].is_floating_point
    return is_float and stored.meta.shape == shape and stored.meta.nbytes > 0
