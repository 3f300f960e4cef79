"""Plan and tensors → a committed directory. The synchronous writer: each rank writes its pieces at
their final places, straight into the finished files.

The functions are phases of one save; what has to be true on all ranks before each is in their
docstrings. `Checkpointer.save` runs them in order.
"""

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from checkpointing.layout import (
    BLOCK_BYTES,
    COMMIT_RECORD,
    LATEST,
    OPTIMIZER,
    CommitRecord,
    FileRecord,
    TensorFile,
    block_checksums,
)
from checkpointing.plan import Piece, box_runs
from checkpointing.storage import (
    block_buffer,
    block_checksum,
    opened,
    replace_file,
    sync,
    sync_directory,
    write_at,
    write_file,
)
from checkpointing.tensors import as_bytes, box_view, local_tensor

logger = logging.getLogger(__name__)


def create_files(directory: Path, files: Sequence[TensorFile]) -> None:
    """Make the directory and every tensor file, with header and final size. On rank 0."""
    directory.mkdir(parents=True)
    (directory / OPTIMIZER.folder).mkdir()
    for file in files:
        path = directory / file.name
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            os.ftruncate(descriptor, file.size)
            write_at(descriptor, memoryview(file.header), 0)
            sync(descriptor)


@torch.no_grad()
def write_pieces(directory: Path, pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's pieces and see them to the disk. On each rank, after `create_files`.

    At most one piece of a tensor on a GPU is copied to the host at a time.
    """
    for file, of_file in itertools.groupby(pieces, key=lambda piece: piece.stored.file):
        with opened(directory / file, os.O_WRONLY) as descriptor:
            boxes = itertools.groupby(
                of_file, key=lambda piece: (piece.name, piece.stored, piece.box)
            )
            for (name, stored, box), of_box in boxes:
                data = as_bytes(box_view(local_tensor(tensors[name]), box).contiguous())
                for piece in of_box:
                    host = data[piece.start : piece.stop].cpu().numpy().data
                    for run in box_runs(stored.meta, box, piece.start, piece.stop):
                        start = run.box_offset - piece.start
                        part = host[start : start + run.length]
                        write_at(descriptor, part, stored.begin + run.offset)
            sync(descriptor)


def checksum_files(
    directory: Path, files: Sequence[TensorFile], share: int, shares: int
) -> dict[str, dict[int, int]]:
    """CRC-32 of this rank's share of all blocks, by file and block number. On each rank, after all
    ranks have written their pieces.

    Every `shares`-th block, from number `share` on. Bytes written here a moment ago come from the
    page cache.
    """
    blocks = ((file, block) for file in files for block in range(-(-file.size // BLOCK_BYTES)))
    mine = itertools.islice(blocks, share, None, shares)
    buffer = block_buffer(max((file.size for file in files), default=0))
    checksums: dict[str, dict[int, int]] = {}
    for name, of_file in itertools.groupby(mine, key=lambda item: item[0].name):
        with opened(directory / name, os.O_RDONLY) as descriptor:
            checksums[name] = {
                block: block_checksum(descriptor, block, buffer) for _, block in of_file
            }
    return checksums


def commit(
    directory: Path,
    final: Path,
    step: int,
    files: Sequence[TensorFile],
    checksums: Sequence[Mapping[str, Mapping[int, int]]],
    small: Mapping[str, bytes],
) -> None:
    """Turn a directory whose tensor files are complete into a checkpoint. On rank 0.

    Args:
        directory: where the files are.
        final: its name from then on; must not exist.
        step: the step that it holds.
        files: the tensor files.
        checksums: what `checksum_files` gave on each rank.
        small: contents of all other files, by name.

    Order matters: all bytes, then the commit record, then the directory's names reach the disk
    before its own name does.
    """
    records = {}
    for file in files:
        path = directory / file.name
        if path.stat().st_size != file.size:
            raise OSError(f"{path}: has {path.stat().st_size} bytes instead of {file.size}")
        blocks = {
            block: checksum
            for share in checksums
            for block, checksum in share.get(file.name, {}).items()
        }
        records[file.name] = FileRecord(file.size, tuple(blocks[block] for block in sorted(blocks)))
    for name, data in small.items():
        write_file(directory / name, data)
        records[name] = FileRecord(len(data), block_checksums(data))
    write_file(directory / COMMIT_RECORD, CommitRecord(step, records).encode())
    sync_directory(directory / OPTIMIZER.folder)
    sync_directory(directory)
    os.rename(directory, final)
    sync_directory(final.parent)
    try:
        replace_file(final.parent / LATEST, f"{final.name}\n".encode())
    except OSError as error:  # a pointer for people: the checkpoint itself is committed
        logger.warning("%s is committed, but %s could not be moved: %s", final, LATEST, error)
