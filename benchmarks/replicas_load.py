"""What memory that the ranks of a node share saves and costs a load, where all hold the same.

Ranks on this machine load a checkpoint of tensors that each of them holds whole, as under DDP:
together, so that each byte is read once, and each by itself. Where a filesystem has a page cache,
that costs no more of the disk. An object store, or a node whose memory is read, sends every byte as
often as it is asked for it.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.support import arguments, heading, print_table, spread, write_json
from benchmarks.support.checkpoint_rank import (
    drop_from_cache,
    gather,
    read_bytes,
    start_together,
    timed,
)
from checkpointing import CheckpointOptions, TensorCheckpointer
from checkpointing.format.layout import MODEL, step_name
from checkpointing.load.fill import read_tensors
from checkpointing.load.segments import LoadFiles
from checkpointing.ranks import RankGroup
from checkpointing.storage.posix import filesystem
from checkpointing.storage.steps import open_step, storage_of, stored_tensors
from elastic import leave_world

COLUMNS, TENSOR_MB = 1024, 50


def main() -> None:
    options = arguments((__doc__ or "").partition("\n\n")[0], size=1000, ranks=4, rounds=6, dir=".")
    where = Path(options.dir).resolve()
    with TemporaryDirectory(prefix="perdure-bench-", dir=where) as folder:
        kind = filesystem(Path(folder))
        start = (folder, options.ranks, options.size, options.rounds)
        multiprocessing.start_processes(_rank, start, options.ranks, start_method="fork")
        figures = torch.load(Path(folder) / "figures")
    title = f"{options.ranks} ranks that hold the same {options.size} MB load it from {kind}"
    heading(title)
    print_table(
        [
            {
                "read": way,
                "cold s": spread(of_way["cold"]),
                "warm s": spread(of_way["warm"]),
                "GB asked for": f"{of_way['bytes'][-1] / 1e9:.2f}",
            }
            for way, of_way in figures.items()
        ]
    )
    write_json(title, figures, options.json)


def _rank(rank: int, folder: str, ranks: int, size: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    group, run = dist.group.WORLD, Path(folder) / "run"
    rows = TENSOR_MB * 1_000_000 // (COLUMNS * 4)
    model = {f"{number}": torch.rand(rows, COLUMNS) for number in range(size // TENSOR_MB)}
    for tensor in model.values():
        dist.broadcast(tensor, 0)
    with TensorCheckpointer(run, CheckpointOptions(slots=1), group) as checkpointer:
        checkpointer.save(1, model=model, optimizer={}, state={}, files={}, wait=True)
        checkpointer.wait()
    path = run / step_name(1)
    step = open_step(path)
    files = LoadFiles(
        path,
        lambda name: storage_of(path).open(path / name),
        stored_tensors(step, MODEL, verify=False),
        step.record.files,
    )
    targets = {name: torch.empty_like(tensor) for name, tensor in model.items()}
    (specs,) = RankGroup(group).specs(lambda: [targets])
    everyone = tuple(range(ranks))
    ways = {"together": (everyone,), "each by itself": tuple((one,) for one in everyone)}
    figures: dict[str, Any] = {way: {"cold": [], "warm": [], "bytes": []} for way in ways}
    for number in range(rounds):
        for way in sorted(ways, reverse=number % 2 == 0):
            for kind in ("cold", "warm"):
                for target in targets.values():
                    target.zero_()
                if kind == "cold" and rank == 0:
                    drop_from_cache(path)
                start_together()
                before = read_bytes()
                seconds = timed(
                    partial(read_tensors, files, specs, targets, group, ways[way], threads=1)
                )
                figures[way][kind].append(max(gather(seconds)))
                figures[way]["bytes"].append(sum(gather(read_bytes() - before)))
                if not all(torch.equal(targets[name], model[name]) for name in model):
                    raise SystemExit("other bits were loaded")
    if rank == 0:
        torch.save(figures, Path(folder) / "figures")
    leave_world(0)


if __name__ == "__main__":
    main()
