"""`perdure ckpt export | import`: conversion of checkpoints to and from foreign formats.

Both write a new directory under another name, make it durable and rename it. Both hold one piece of
a tensor in memory at a time; from torch.distributed.checkpoint, one tensor. They run in one
process, and convert weights, so they need torch.

A LoRA adapter is merged into its base model in float32, a piece of a tensor at a time.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from isal.isal_zlib import crc32
from torch import Tensor

from checkpointing.errors import CheckpointError, DamagedCheckpoint, WrongModel, explain, reading
from checkpointing.format import layout
from checkpointing.format.digests import is_finite
from checkpointing.format.layout import LayoutTensor
from checkpointing.format.nf4 import BLOCK, NF4, dequantise, quantise
from checkpointing.format.peft import BASE, adapter_tensors, read_config
from checkpointing.format.peft import BASE as ADAPTER_BASE
from checkpointing.format.peft import CONFIG as ADAPTER_CONFIG
from checkpointing.format.tensors import TORCH_DTYPES, as_bytes
from checkpointing.format.untrusted import printable, read_object
from checkpointing.load.foreign import by_model_names, open_dcp
from checkpointing.storage import posix
from checkpointing.storage.ownership import is_alive, owner
from checkpointing.storage.place import StoragePlace, local, location
from checkpointing.storage.source import (
    OWN_FILES,
    StorageCheckpoint,
    StorageTensorReader,
    beside_weights,
    is_weights,
    open_source,
)
from checkpointing.storage.steps import ADAPTER_CURE, storage_of
from checkpointing.tools.inspect import find_source, human_bytes

PIECE_ELEMENTS = 1 << 20  # of a weight, merged at a time


class ExportedAdapter:
    """An adapter in its files. Raises DamagedCheckpoint, or StorageError if it is not of LoRA."""

    def __init__(self, source: StorageCheckpoint, reader: StorageTensorReader) -> None:
        where = source.path / ADAPTER_CONFIG
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


def _trained_over(source: StorageCheckpoint) -> dict[str, Any]:
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
def open_adapter(source: StorageCheckpoint) -> Iterator[ExportedAdapter]:
    with StorageTensorReader(source.path, source.records) as reader:
        yield ExportedAdapter(source, reader)


class MergedModel:
    """The tensors of a model with an adapter added. `published`: not to weights rounded to nf4."""

    def __init__(
        self, base: StorageCheckpoint, adapter: ExportedAdapter, *, published: bool = False
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
                what = f"is {meta}" if stored else "is missing"
                raise WrongModel(
                    f"{base.path}: {printable(name)} {what}, but the adapter needs floats of shape "
                    f"{list(shape)}; give the model on which the adapter was trained"
                )
            self._changed[places[stored.file, stored.begin]] = name

    def pieces(self, name: str, reader: StorageTensorReader) -> tuple[str, Iterator[memoryview]]:
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
        self, stored: LayoutTensor, name: str, reader: StorageTensorReader
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


CONFIG = "config.json"
MAX_SHARD_BYTES = 4 * 10**9
DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Value of --dtype → safetensors' name."""
_CONVERTED = {"F64", "F32", "BF16", "F16"}
"""dtypes that `export` converts. Others are integers, or quantised with separate scales."""

_OVER_NF4 = (
    "note: the adapter was trained over a model in nf4, and is inexact over any other: load that "
    "model in 4 bits, too (transformers' BitsAndBytesConfig, load_in_4bit=True, "
    'bnb_4bit_quant_type="nf4"), or merge the adapter (--merge)'
)
_MERGED = {
    False: "note: merged into the weights that the adapter was trained over, which are rounded to "
    "nf4; --into-published merges into the weights as they were published",
    True: "note: merged into the weights as they were published, but the adapter was trained over "
    "these weights rounded to nf4: evaluate the result, or merge without --into-published",
}
"""Value of `into_published` → note for the user."""

Pieces = Iterator[memoryview]
"""The bytes of a tensor, in order."""


@dataclass(frozen=True)
class _ConvertedDirectory:
    """A directory that a conversion has written."""

    path: Path
    tensors: int
    size: int
    """Total size of the tensor files in bytes."""
    files: int
    notes: tuple[str, ...] = ()
    """Lines for the user."""

    def __str__(self) -> str:
        made = f"{self.path}: {self.tensors} tensors, {human_bytes(self.size)} in {self.files} file"
        return "\n".join([made + "s" * (self.files != 1), *self.notes])


def export(
    path: str | StoragePlace,
    out: str | StoragePlace,
    *,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    not_finite: bool = False,
    merge_into: str | StoragePlace | None = None,
    into_published: bool = False,
) -> _ConvertedDirectory:
    """Write the model of a checkpoint as a plain Hugging Face directory: weights, config.json,
    tokenizer; no optimizer. Checksums of everything read are checked, but a plain directory has
    none. An adapter becomes a PEFT directory, or, with `merge_into`, a whole model.

    Args:
        path: a checkpoint, a run (its newest good checkpoint), or a plain directory.
        dtype: round floating point weights to it, to nearest even; None: keep them. Integers and
            8-bit floats stay as they are.
        max_shard_bytes: largest number of tensor bytes per file.
        not_finite: export NaN and infinity, too. Tensors that were saved as allowed to hold them,
            such as masks, are always exported.
        merge_into: the model that `path`, an adapter, was trained over. The adapter is added to its
            weights in float32, and the sums are rounded to `dtype`, else to the model's dtype.
            Weights that training kept in nf4 are rounded to nf4 first.
        into_published: do not round the weights of `merge_into` to nf4.

    Raises:
        CheckpointError: `out` exists, or a weight is too large for `dtype`, NaN or infinite.
        DamagedCheckpoint, StorageError: the checkpoint is damaged or cannot be read.
    """
    out = local(out)
    with ExitStack() as stack:
        given = source = stack.enter_context(open_source(find_source(path)))
        merged = None
        notes: list[str] = []
        under: dict[str, Any] = {}
        if merge_into is not None:
            if not given.is_adapter:
                raise CheckpointError(f"{given.path}: is no adapter; export it without --merge")
            source = stack.enter_context(open_source(find_source(merge_into)))
            adapter = stack.enter_context(open_adapter(given))
            merged = MergedModel(source, adapter, published=into_published)
            notes = [_MERGED[into_published]] if adapter.over_nf4 else []
        elif given.is_adapter:
            with open_adapter(given) as adapter:
                notes = [_OVER_NF4] if adapter.over_nf4 else []
                under = adapter.trained_over
        tmp = stack.enter_context(_new_directory(out))
        target = DTYPES[dtype] if dtype else None
        names = _in_order(source.model)
        metas = {name: _as_dtype(source.model[name].meta, target) for name in names}
        section = layout.ADAPTER if source.is_adapter else layout.MODEL
        files = layout.lay_out(section, metas, max_shard_bytes)
        if section is layout.MODEL and len(files) == 1:
            # Hugging Face's name for the only file of a model
            files = [replace(files[0], name="model.safetensors")]
        elif section is layout.MODEL:
            posix.write_file(tmp / layout.MODEL.index, layout.index_json(files))
        small, left = _small_files(source)
        if merged:  # the adapter may have a tokenizer of its own
            beside, _ = _small_files(given)
            of_adapter = ADAPTER_CONFIG, ADAPTER_BASE
            small |= {name: data for name, data in beside.items() if name not in of_adapter}
        if under:
            small[ADAPTER_BASE] = layout.json_bytes(under)
        if target and CONFIG in small:
            small[CONFIG] = _with_dtype(small[CONFIG], target, source.path / CONFIG)
        with StorageTensorReader(source.path, source.records) as reader:

            def pieces(name: str) -> Pieces:
                dtype, read = source.model[name].meta.dtype, reader.pieces(source.model[name])
                if merged:
                    dtype, read = merged.pieces(name, reader)
                free = not_finite or f"{layout.MODEL.stem}/{name}" in source.odd
                for piece in read:
                    if not free and not is_finite(dtype, np.frombuffer(piece, np.uint8)):
                        raise CheckpointError(
                            f"{source.path}: {name} holds NaN or infinity; export another step, or "
                            "this one as it is with --not-finite"
                        )
                    yield _convert(piece, name, dtype, metas[name].dtype)

            for file in files:
                _write_tensors(tmp, file, pieces)
        posix.write_files(tmp, small)
    return _report(out, files, small, left, notes)


def _as_dtype(meta: layout.TensorMeta, dtype: str | None) -> layout.TensorMeta:
    return replace(meta, dtype=dtype) if dtype and meta.dtype in _CONVERTED else meta


def _convert(piece: memoryview, name: str, dtype: str, target: str) -> memoryview:
    """Round a piece of a tensor; raises CheckpointError if a number becomes infinite."""
    if dtype == target:
        return piece
    numbers = torch.frombuffer(piece, dtype=TORCH_DTYPES[dtype])
    rounded = numbers.to(TORCH_DTYPES[target])
    # Rarely needed: finding the reason takes longer than rounding.
    if not rounded.abs().max().isfinite():
        finite = numbers[numbers.isfinite()]
        if bool(finite.to(rounded.dtype).isinf().any()):
            raise CheckpointError(
                f"{name}: holds {finite.abs().max():.4g}, too large for {target}; export with "
                "--dtype bf16, or without --dtype"
            )
    return as_bytes(rounded).numpy().data


def _with_dtype(config: bytes, target: str, where: StoragePlace) -> bytes:
    try:
        values = read_object(config)
    except ValueError as error:
        raise CheckpointError(f"{where}: is not a JSON object: {error}; mend the file") from error
    # transformers reads `dtype` since version 4.56, `torch_dtype` before
    values["dtype"] = values["torch_dtype"] = str(TORCH_DTYPES[target]).removeprefix("torch.")
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def import_checkpoint(
    path: str | StoragePlace,
    out: str | StoragePlace,
    *,
    step: int | None = None,
    config: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> _ConvertedDirectory:
    """Write a checkpoint of this package, with commit record and checksums, from a plain Hugging
    Face directory or a checkpoint of torch.distributed.checkpoint (DCP).

    `model.init_from`, `perdure generate` and every `perdure ckpt` command read it. The trainer
    cannot resume from it, since it has no position in the data. A DCP checkpoint's optimizer state
    is included, by this package's names, for `TensorCheckpointer.load` in a loop of your own. For
    this, name `out` as a step, and give TensorCheckpointer the directory that contains `out`.

    Args:
        path: directory with model.safetensors, with several files and their index, or with DCP's
            .metadata. Small files beside them (config.json, tokenizer, licence, …) are included.
        step: step of the checkpoint; default: from the name of `out`, else 0.
        config: a config.json in place of the one in `path`.
        max_shard_bytes: largest number of tensor bytes per file.

    Raises:
        CheckpointError: `out` exists, `path` already is a checkpoint of this package, or `step`
            contradicts the name of `out`.
        DamagedCheckpoint, StorageError: `path` is damaged or cannot be read.
    """
    path, out = location(path), local(out)
    named = layout.parse_step(out.name)
    if step is None:
        step = named or 0
    if named not in (None, step):
        raise CheckpointError(f"{out}: is the name of step {named}, not of step {step}; change one")
    if storage_of(path).exists(path / layout.COMMIT_RECORD):
        raise CheckpointError(f"{path}: is a checkpoint of perdure already; use it as it is")
    with _open_any(path) as (source, read), _new_directory(out) as tmp:
        small, left = _small_files(source)
        if config is not None:
            with reading(Path(config)):
                small[CONFIG] = Path(config).read_bytes()
        written: list[layout.TensorFile] = []
        records: dict[str, layout.FileRecord] = {}
        (tmp / layout.OPTIMIZER.folder).mkdir()
        for section, tensors in (
            (layout.MODEL, source.model),
            (layout.OPTIMIZER, source.optimizer),
        ):
            metas = {name: tensors[name].meta for name in _in_order(tensors)}
            files = layout.lay_out(section, metas, max_shard_bytes)
            for file in files:
                pieces = {name: read(tensors[name]) for name in file.tensors}
                records[file.name] = _write_tensors(tmp, file, pieces.__getitem__)
            small[section.index] = layout.index_json(files)
            written += files
        small[layout.TRAINER_STATE] = layout.json_bytes(
            {"step": step, "imported_from": str(path.absolute())}
        )
        for name, data in small.items():
            records[name] = layout.FileRecord(len(data), layout.block_checksums(data))
        posix.write_files(
            tmp, {**small, layout.COMMIT_RECORD: layout.CommitRecord(step, records).encode()}
        )
    return _report(out, written, small, left)


@contextmanager
def _open_any(
    path: StoragePlace,
) -> Iterator[tuple[StorageCheckpoint, Callable[[layout.LayoutTensor], Pieces]]]:
    """Yields (tensors and files of a foreign directory, function that reads its tensors)."""
    if storage_of(path).exists(path / layout.DCP_METADATA):
        dcp = open_dcp(local(path))

        def whole(tensor: layout.LayoutTensor) -> Pieces:
            yield as_bytes(dcp.read(tensor)).numpy().data

        yield StorageCheckpoint(path, dcp.model, dcp.optimizer), whole
        return
    with open_source(path) as source, StorageTensorReader(path, source.records) as reader:
        if source.is_adapter:
            raise CheckpointError(f"{path}: {ADAPTER_CURE}")
        yield source, reader.pieces


def _in_order(tensors: Mapping[str, layout.LayoutTensor]) -> list[str]:
    """Returns names in the order of files and offsets, so that files are read from start to end."""
    return sorted(tensors, key=lambda name: (tensors[name].file, tensors[name].begin))


def _small_files(source: StorageCheckpoint) -> tuple[dict[str, bytes], str]:
    """Returns the files beside the weights, and what is left out; for a checkpoint of this package,
    the files saved with it."""
    if not source.records:
        return beside_weights(source.path)
    small = {}
    for name in sorted(source.records):
        if (
            name not in OWN_FILES
            and not name.startswith(layout.OPTIMIZER.folder)
            and not is_weights(name)
        ):
            with reading(source.path / name):
                small[name] = storage_of(source.path).read(source.path / name)
    return small, ""


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """Yields a directory to fill, which becomes `out` at the end, or is removed after an error."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: exists already; choose another name, or remove it first")
    tmp = out.with_name(f"{out.name}.tmp-{owner()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for old in out.parent.iterdir():  # left by a killed conversion
            if old.name.startswith(f"{out.name}.tmp-") and is_alive(old.name) is False:
                shutil.rmtree(old, ignore_errors=True)
        tmp.mkdir(mode=0o755)  # no other user can write to the directory
        yield tmp
        posix.sync_directory(tmp)
        os.rename(tmp, out)  # `out` appears at once, with contents that are durable already
        posix.sync_directory(out.parent)
    except OSError as error:
        # If only the last sync failed, `out` exists and is complete.
        raise CheckpointError(
            f"cannot write {out}: {explain(error)}; no unfinished directory is left"
        ) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _write_tensors(
    directory: Path, file: layout.TensorFile, pieces: Callable[[str], Pieces]
) -> layout.FileRecord:
    checksums: list[int] = []
    size = 0

    def write(data: memoryview) -> None:
        nonlocal size
        while data:
            part = data[: layout.BLOCK_BYTES - size % layout.BLOCK_BYTES]
            if size % layout.BLOCK_BYTES == 0:
                checksums.append(0)
            checksums[-1] = crc32(part, checksums[-1])
            posix.write_at(descriptor, part, size)
            size += len(part)
            data = data[len(part) :]

    with posix.opened(directory / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        write(memoryview(file.header))
        for name in file.tensors:
            if size != file.tensors[name].begin:
                raise ValueError(f"{file.name}: {name} would begin at {size}")
            for piece in pieces(name):
                write(piece)
        posix.sync(descriptor)
    return layout.FileRecord(size, tuple(checksums))


def _report(
    out: Path,
    files: Sequence[layout.TensorFile],
    small: Mapping[str, bytes],
    left: str,
    notes: Sequence[str] = (),
) -> _ConvertedDirectory:
    notes = [*notes] + ([f"note: left out: {left}"] if left else [])
    if CONFIG not in small and ADAPTER_CONFIG not in small:
        notes.append(
            f"note: there is no {CONFIG}, so it opens with safetensors, but not with "
            "from_pretrained, model.init_from or perdure generate"
        )
    tensors, size = sum(len(file.tensors) for file in files), sum(file.size for file in files)
    return _ConvertedDirectory(out, tensors, size, len(files), tuple(notes))
