"""Merges a LoRA adapter into its base model in float32, a piece of a tensor at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, WrongModel, reading
from checkpointing.format.layout import StoredTensor
from checkpointing.format.nf4 import BLOCK, NF4, dequantise, quantise
from checkpointing.format.peft import BASE, CONFIG, adapter_tensors, read_config
from checkpointing.format.tensors import TORCH_DTYPES, as_bytes
from checkpointing.format.untrusted import printable, read_object
from checkpointing.load.foreign import by_model_names
from checkpointing.storage.source import StoredCheckpoint, StoredTensorReader
from checkpointing.storage.steps import storage_of

PIECE_ELEMENTS = 1 << 20  # of a weight, merged at a time


class MergedAdapter:
    """An adapter in its files. Raises DamagedCheckpoint, or StorageError if it is not of LoRA."""

    def __init__(self, source: StoredCheckpoint, reader: StoredTensorReader) -> None:
        where = source.path / CONFIG
        with reading(where):
            data = storage_of(where).read(where)
        self.base_model, self._scale = read_config(data, str(where))
        self.pairs, self.whole = adapter_tensors(source.model, str(source.path))
        self.stored, self.reader = source.model, reader
        self.trained_over = _trained_over(source)
        """`path`, `fingerprint` and `format` of the base model, as far as they are recorded."""
        self.over_nf4 = self.trained_over.get("format") == NF4
        for name in self.pairs if self.over_nf4 else ():
            if any(columns % BLOCK for columns in self.shape_of(name)[1:]):
                raise DamagedCheckpoint(
                    f"{source.path}: says that it was trained over nf4, but the columns of "
                    f"{printable(name)} are no multiple of {BLOCK}"
                )

    def read(self, name: str) -> Tensor:
        stored = self.stored[name]
        data = torch.empty(stored.meta.nbytes, dtype=torch.uint8)
        self.reader.read(stored, 0, data.numpy().data)
        return data.view(TORCH_DTYPES[stored.meta.dtype]).view(stored.meta.shape).float()

    def matrices(self, weight: str) -> tuple[Tensor, Tensor]:
        """Returns A (rank, in) and scale · B (out, rank) for a weight, in float32."""
        a, b = (self.read(name) for name in self.pairs[weight])
        # the scale is applied to B, as the product has many more elements
        return a, b * self._scale

    def under(self, weight: Tensor) -> Tensor:
        """Returns a base weight in float32 as the adapter saw it in training: rounded to nf4 if it
        was trained over nf4."""
        return dequantise(quantise(weight), torch.float32) if self.over_nf4 else weight.float()

    def shape_of(self, weight: str) -> tuple[int, ...]:
        """Returns the shape that the base parameter must have; () if A and B do not match."""
        if weight in self.whole:
            return self.stored[self.whole[weight]].meta.shape
        a, b = (self.stored[name].meta.shape for name in self.pairs[weight])
        return (b[0], a[1]) if len(a) == len(b) == 2 and a[0] == b[1] else ()


def _trained_over(source: StoredCheckpoint) -> dict[str, Any]:
    if source.state is not None:
        base = source.state.get("base")
        return base if isinstance(base, dict) else {}
    file = source.path / BASE
    if not storage_of(file).exists(file):
        return {}
    try:
        with reading(file):
            return read_object(storage_of(file).read(file))
    except ValueError as error:
        raise DamagedCheckpoint(f"{file}: is not a JSON object: {error}; mend the file") from error


@contextmanager
def open_adapter(source: StoredCheckpoint) -> Iterator[MergedAdapter]:
    with StoredTensorReader(source.path, source.records) as reader:
        yield MergedAdapter(source, reader)


class MergedModel:
    """The tensors of a model with an adapter added. `published`: not to weights rounded to nf4."""

    def __init__(
        self, base: StoredCheckpoint, adapter: MergedAdapter, *, published: bool = False
    ) -> None:
        self._stored, self._adapter = base.model, adapter
        self._under: Callable[[Tensor], Tensor] = Tensor.float if published else adapter.under
        changed = [*adapter.pairs, *adapter.whole]
        named = by_model_names(base.model, changed)
        # by position, as the files and the adapter may use different names for a tensor
        places = {(stored.file, stored.begin): name for name, stored in base.model.items()}
        self._changed: dict[str, str] = {}
        """Name of a tensor in the model's files → the adapter's name for it."""
        for name in changed:
            stored, shape = named.get(name), adapter.shape_of(name)
            meta = stored and stored.meta
            floats = meta and meta.nbytes and TORCH_DTYPES[meta.dtype].is_floating_point
            if not stored or not floats or stored.meta.shape != shape:
                raise WrongModel(
                    f"{base.path}: its {printable(name)} is {meta}, but the adapter needs shape "
                    f"{list(shape)}: give the model that it was trained over"
                )
            self._changed[places[stored.file, stored.begin]] = name

    def pieces(self, name: str, reader: StoredTensorReader) -> tuple[str, Iterator[memoryview]]:
        """Returns (safetensors' dtype, bytes in order) of a tensor in the model's files."""
        stored, read = self._stored[name], reader
        known = self._changed.get(name)
        if known in self._adapter.pairs:
            return "F32", self._sums(stored, known, reader)
        if known is not None:
            stored = self._adapter.stored[self._adapter.whole[known]]
            read = self._adapter.reader
        return stored.meta.dtype, read.pieces(stored)

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
            # float32, as a sum in bfloat16 would lose most of the adapter
            yield as_bytes(torch.addmm(self._under(weight), some, a)).numpy().data
