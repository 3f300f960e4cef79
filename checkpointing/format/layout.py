"""Layout of a checkpoint directory (format 1): file names, headers, indexes, commit record.

    step-00001000/
      config.json, tokenizer.json, …                as Hugging Face writes them
      model-00001-of-00004.safetensors, …           whole tensors
      model.safetensors.index.json
      optimizer/optimizer-00001-of-00008.safetensors, …
      optimizer/optimizer.safetensors.index.json
      trainer_state.json
      index.json                                    the commit record, written last

The checkpoint of an adapter has PEFT's adapter_config.json and adapter_model.safetensors in place
of config.json and the files of the model.

Pure: converts objects to bytes and back, without I/O or torch. Nothing depends on a rank or a world
size."""

import hashlib
import json
import math
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from isal.isal_zlib import crc32

from checkpointing.errors import DamagedCheckpoint, StorageError
from checkpointing.format.untrusted import (
    a_list,
    a_text,
    an_object,
    count,
    is_plain,
    printable,
    read_object,
)
from checkpointing.wire import register

FORMAT = 1
BLOCK_BYTES = 16 << 20
"""Size of the blocks of a file for checksums and writes: block i begins at byte i · BLOCK_BYTES."""

COMMIT_RECORD = "index.json"
TRAINER_STATE = "trainer_state.json"
LATEST = "latest"
DCP_METADATA = ".metadata"
"""File that marks a checkpoint of torch.distributed.checkpoint."""
MAX_HEADER_BYTES = 100_000_000
"""Largest header, in bytes, that safetensors reads."""
MAX_DIMS = 64
"""Largest number of dimensions of a torch tensor."""

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""safetensors' name of a dtype → bytes of an element. The order is that of safetensors'
enumeration. Its writer puts later dtypes first, so that every tensor is aligned."""

_DTYPE_ORDER = {dtype: order for order, dtype in enumerate(DTYPE_BYTES)}
_STATE_COUNTS = {"step", "sequences", "tokens", "skipped", "skipped_in_row", "rollbacks"}
_STATE_OBJECTS = {"recipe", "world"}
_STEP = re.compile(r"step-(\d{8,})")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class TensorMeta:
    """dtype (safetensors' name) and global shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class LayoutTensor:
    """Position of a whole tensor: row-major bytes from offset `begin` of `file`."""

    file: str
    begin: int
    meta: TensorMeta


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file that will be written."""

    name: str
    """Path relative to the checkpoint directory."""
    header: bytes
    """All bytes before the first tensor: a length word and JSON."""
    tensors: dict[str, LayoutTensor]
    size: int
    """Bytes of the whole file."""


@dataclass(frozen=True)
class FileLayoutPart:
    """A collection of tensors in a checkpoint, model or optimizer, and the names of its files."""

    folder: str
    stem: str
    single: bool = False
    """Whether all tensors are in one file, whatever its size."""

    @property
    def index(self) -> str:
        return f"{self.folder}{self.stem}.safetensors.index.json"

    def file(self, number: int, count: int) -> str:
        """Returns the name of file `number` (from 1) of `count`."""
        if self.single:
            return f"{self.folder}{self.stem}.safetensors"
        return f"{self.folder}{self.stem}-{number:05}-of-{count:05}.safetensors"


MODEL = FileLayoutPart("", "model")
ADAPTER = FileLayoutPart("", "adapter_model", single=True)
"""Section in place of MODEL for an adapter, whose base model is stored elsewhere."""
# In a folder of its own, because Hugging Face readers glob the top level.
OPTIMIZER = FileLayoutPart("optimizer/", "optimizer")


def sections_of(files: Collection[str]) -> tuple[FileLayoutPart, FileLayoutPart]:
    """Returns (section of the model or adapter, section of the optimizer) of a checkpoint."""
    return ADAPTER if ADAPTER.index in files else MODEL, OPTIMIZER


def step_name(step: int) -> str:
    return f"step-{step:08}"


def parse_step(name: str) -> int | None:
    """Returns the step of a name that `step_name` returns, so that a step has one name; else
    None."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def split_step(path: str) -> tuple[str, int | None]:
    """Returns (directory, step) of DIRECTORY/step-00000100; (path, None) of any other path."""
    directory, _, name = path.rstrip("/").rpartition("/")
    step = parse_step(name)
    return (path, None) if step is None else (directory or ".", step)


def lay_out(
    section: FileLayoutPart, tensors: Mapping[str, TensorMeta], max_bytes: int
) -> list[TensorFile]:
    """Distribute whole tensors over the files of a section greedily, in the given order. Each file
    has the bytes that `safetensors.torch.save_file` would write, and at most `max_bytes` of
    tensors, unless it has one larger tensor or the section has a single file."""
    groups: list[dict[str, TensorMeta]] = []
    room = -1
    for name, meta in tensors.items():
        if not groups or (meta.nbytes > room and not section.single):
            groups.append({})
            room = max_bytes
        groups[-1][name] = meta
        room -= meta.nbytes
    return [
        _tensor_file(section.file(number, len(groups)), group)
        for number, group in enumerate(groups, start=1)
    ]


def _tensor_file(name: str, tensors: Mapping[str, TensorMeta]) -> TensorFile:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=lambda key: (-_DTYPE_ORDER[tensors[key].dtype], key)):
        if key == "__metadata__":
            raise ValueError(
                "a tensor cannot be called __metadata__: safetensors reserves the name; rename it"
            )
        if not key.isprintable():
            raise ValueError(f"a tensor is called {key!a}: names must be printable; rename it")
        meta = tensors[key]
        offsets[key], end = end, end + meta.nbytes
        header[key] = {
            "dtype": meta.dtype,
            "shape": list(meta.shape),
            "data_offsets": [offsets[key], end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # padded like safetensors: tensors begin at a multiple of 8
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{name}: {len(tensors)} tensors make a header of {len(text)} bytes, more than "
            "safetensors reads; set a smaller checkpoint.max_shard_size"
        )
    start = 8 + len(text)
    stored = {
        key: LayoutTensor(name, start + offset, tensors[key]) for key, offset in offsets.items()
    }
    return TensorFile(name, struct.pack("<Q", len(text)) + text, stored, start + end)


def header_bytes(prefix: bytes, where: str, size: int) -> int:
    """Returns the number of bytes before the first tensor, from the first 8 bytes of a safetensors
    file of `size` bytes. Raises DamagedCheckpoint if it is not such a file."""
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise DamagedCheckpoint(f"{where}: not a safetensors file, or damaged at its start")
    return 8 + length


def parse_header(header: bytes, file: str, size: int, where: str) -> dict[str, LayoutTensor]:
    """Returns the tensors of a safetensors file by name, from its header including the length word.
    Raises DamagedCheckpoint if the header is malformed, or its tensors do not fill the file.

    Args:
        header: as many bytes as `header_bytes` returns.
        file: name of the file, for the result.
        size: bytes of the whole file.
        where: path of the file, for messages.
    """
    tensors: dict[str, LayoutTensor] = {}
    spans: list[tuple[int, int]] = []
    with _parsing(f"{where}: its header is unreadable or damaged"):
        entries = read_object(header[8:])
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, end, meta = _parse_entry(name, entry)
            tensors[name] = LayoutTensor(file, len(header) + begin, meta)
            spans.append((begin, end))
    position = 0
    # In a file without gaps and overlaps, no bytes are hidden from readers.
    for begin, end in sorted(spans):
        if begin != position:
            raise DamagedCheckpoint(
                f"{where}: its tensors overlap or leave a gap at byte {position}"
            )
        position = end
    if len(header) + position != size:
        raise DamagedCheckpoint(
            f"{where}: has {size} bytes, but its header describes {len(header) + position}; "
            "it was cut short or overwritten"
        )
    return tensors


def _parse_entry(name: str, entry: Any) -> tuple[int, int, TensorMeta]:
    if not name.isprintable():
        raise ValueError(f"a tensor is called {name!a}, which is not printable text")
    fields = an_object(entry)
    if fields["dtype"] not in list(DTYPE_BYTES):
        raise ValueError(f"tensor {name}: dtype {fields['dtype']!a} is not known")
    meta = TensorMeta(fields["dtype"], tuple(map(count, a_list(fields["shape"], MAX_DIMS))))
    # a dimension of 0 must not hide other dimensions that are too large to allocate
    count(math.prod(size or 1 for size in meta.shape))
    begin, end = map(count, a_list(fields["data_offsets"]))
    if end - begin != meta.nbytes:
        raise ValueError(f"tensor {name}: {meta} does not take {end - begin} bytes")
    return begin, end, meta


def index_json(files: Iterable[TensorFile]) -> bytes:
    """Returns the index of some files in Hugging Face's format: file of each tensor, and totals."""
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    metadata = {
        "total_parameters": sum(math.prod(tensor.meta.shape) for tensor in stored.values()),
        "total_size": sum(tensor.meta.nbytes for tensor in stored.values()),
    }
    weight_map = {name: tensor.file for name, tensor in stored.items()}
    return json_bytes({"metadata": metadata, "weight_map": weight_map})


def parse_index(data: bytes, file: str) -> dict[str, str]:
    """Returns the weight map (tensor name → file) of an index. Raises DamagedCheckpoint if `data`
    is not an index."""
    with _parsing(f"{file}: not an index of safetensors files"):
        weight_map = an_object(read_object(data)["weight_map"])
        for name, target in weight_map.items():
            if not is_plain(target):
                raise ValueError(f"{target!a} for {printable(name)} names no file below its folder")
        return weight_map


def parse_state(data: bytes, file: str, step: int) -> dict[str, Any]:
    """Parse trainer_state.json. Raises DamagedCheckpoint if `data` is not a JSON object, is not of
    `step`, or has counts that are not whole numbers."""
    with _parsing(f"{file}: damaged"):
        state = read_object(data)
    with _parsing(file):
        for name in _STATE_COUNTS & state.keys():
            try:
                count(state[name])
            except ValueError as error:
                raise ValueError(f"{name} is {error}") from error
        for name in _STATE_OBJECTS & state.keys():
            an_object(state[name])
        if state.get("step", step) != step:
            raise ValueError(f"is of step {state['step']}, but the commit record of step {step}")
    return state


def json_bytes(value: Any) -> bytes:
    """Returns readable JSON: indented, with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def block_checksums(data: bytes) -> tuple[int, ...]:
    starts = range(0, len(data), BLOCK_BYTES)
    return tuple(crc32(data[start : start + BLOCK_BYTES]) for start in starts)


@dataclass(frozen=True)
class FileRecord:
    size: int
    checksums: tuple[int, ...]
    """CRC-32 of each block."""


@dataclass(frozen=True)
class CommitRecord:
    """Contents of index.json, the commit record: it lists every other file, and makes a directory a
    checkpoint."""

    step: int
    files: dict[str, FileRecord]
    odd: Sequence[str] = ()
    """Tensors that hold NaN or infinity and are allowed to, such as masks: model/<name>,
    optimizer/<name>."""

    def encode(self) -> bytes:
        files = {
            name: {"bytes": file.size, "crc32": [f"{crc:08x}" for crc in file.checksums]}
            for name, file in sorted(self.files.items())
        }
        body = {"format": FORMAT, "step": self.step, "block_bytes": BLOCK_BYTES, "files": files}
        if self.odd:
            body["not_finite"] = sorted(self.odd)
        # not indented, as it may hold a hundred thousand checksums
        return (json.dumps({**body, "sha256": _digest(body)}) + "\n").encode()

    @staticmethod
    def decode(data: bytes, where: str) -> "CommitRecord":
        """Parse index.json, the file `where`. Raises DamagedCheckpoint if it is malformed or its
        own checksum is wrong, and StorageError if the format is newer than this code."""
        with _parsing(f"{where}: damaged commit record"):
            body = read_object(data)
            checksum = body.pop("sha256")
            if checksum != _digest(body):
                raise ValueError("it was changed after it was written")
            # checked after the checksum, as a damaged number could look like a later version
            if count(body["format"]) > FORMAT:
                raise StorageError(
                    f"{where}: written in format {body['format']} by a later version of perdure; "
                    f"this one reads up to format {FORMAT}: update perdure"
                )
            entries = an_object(body["files"]).items()
            files = {name: _file_record(name, file) for name, file in entries}
            if body["block_bytes"] != BLOCK_BYTES or any(
                len(file.checksums) != -(-file.size // BLOCK_BYTES) for file in files.values()
            ):
                raise ValueError(f"its checksums are not of blocks of {BLOCK_BYTES} bytes")
            odd = tuple(map(a_text, a_list(body.get("not_finite", []))))
            return CommitRecord(count(body["step"]), files, odd)


def _file_record(name: str, entry: Any) -> FileRecord:
    if not is_plain(name):
        raise ValueError(f"it names {name!a}, which is no file in its directory")
    fields = an_object(entry)
    sums = a_list(fields["crc32"])
    if not all(isinstance(crc, str) and _CHECKSUM.fullmatch(crc) for crc in sums):
        raise ValueError(f"{name}: its checksums are not 8 hexadecimal digits each")
    return FileRecord(count(fields["bytes"]), tuple(int(crc, 16) for crc in sums))


@contextmanager
def _parsing(what: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise DamagedCheckpoint(f"{what}: it lacks {error}") from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{what}: {error}") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


register(CommitRecord, FileRecord, LayoutTensor)
