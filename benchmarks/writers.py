"""Who writes when: eight ranks as four nodes on this machine save with `max_writers`, and the trace
of the save is checked and drawn.

The state is sharded over all ranks, so that three quarters of the bytes of a file come from other
nodes. The program fails if more nodes wrote at once than allowed, if two nodes wrote to one file,
if another process than the coordinator's touched metadata, or if there was a collective on the
ranks' process group during the save.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.support import arguments, heading, print_table, write_json
from benchmarks.support.trace import Span, at_once, picture, read_trace, writes
from checkpointing import CheckpointOptions, TensorCheckpointer
from checkpointing.storage.posix import filesystem
from elastic import leave_world

RANKS, PER_NODE, TENSORS, STEPS = 8, 2, 24, (1, 2)


def main() -> None:
    options = arguments((__doc__ or "").partition("\n\n")[0], size=480, writers=2, dir=".", svg="")
    where = Path(options.dir).resolve()
    with TemporaryDirectory(prefix="perdure-bench-", dir=where) as folder:
        run, kind = Path(folder) / "run", filesystem(Path(folder))
        multiprocessing.start_processes(
            _rank, (folder, options.size, options.writers), RANKS, start_method="fork"
        )
        saves = [read_trace(run / "trace.jsonl", step) for step in STEPS]
    proofs = [_proof(spans) for spans in saves]
    title = f"Four nodes of two ranks save {options.size} MB on {kind}, {options.writers} at once"
    heading(title)
    print_table([_shown(step, proof) for step, proof in zip(STEPS, proofs, strict=True)])
    figures = {"proofs": proofs, "spans": [asdict(span) for span in saves[-1]]}
    write_json(title, figures, options.json)
    if options.svg:
        Path(options.svg).write_text(picture(saves[-1], title, options.writers))
    if any(
        proof["writers_at_once"] > options.writers
        or proof["nodes_of_a_file"] > 1
        or not proof["metadata_before_and_after"]
        for proof in proofs
    ):
        sys.exit("the save did not keep to its rules")


def _rank(rank: int, folder: str, size: int, writers: int) -> None:
    torch.set_num_threads(1)
    os.environ["GROUP_RANK"] = str(rank // PER_NODE)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    columns = 1024
    rows = size * 1_000_000 // (TENSORS * columns * 4)
    whole = torch.rand(rows, columns)
    model = {
        f"layers.{number}.weight": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        for number in range(TENSORS)
    }
    options = CheckpointOptions(max_writers=writers, max_shard_size=rows * columns * 4, trace=True)
    group = dist.group.WORLD
    with TensorCheckpointer(Path(folder) / "run", options, group) as checkpointer:
        checkpointer.prepare(model=model, optimizer={})
        before = _collectives()
        for step in STEPS:
            checkpointer.save(step, model=model, optimizer={}, state={}, files={}, wait=True)
            checkpointer.wait()
        if _collectives() != before:
            sys.exit("there was a collective on a process group during a save")
    leave_world(0)


def _collectives() -> int:
    """How many there were on all groups of this process, as gloo itself counts them."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)


def _proof(spans: list[Span]) -> dict[str, Any]:
    written = writes(spans)
    nodes = {
        file: {s.node for s in written if s.file == file} for file in {s.file for s in written}
    }
    metadata = [span for span in spans if span.kind != "write"]
    return {
        "seconds": spans[-1].stop - spans[0].start,
        "bytes": sum(span.nbytes for span in written),
        "files": len(nodes),
        "nodes": len(set.union(*nodes.values())),
        "writers_at_once": max(count for _, count in at_once(written)),
        "nodes_of_a_file": max(map(len, nodes.values())),
        "metadata": [f"{span.kind}, node {span.node}" for span in metadata],
        "metadata_before_and_after": [span.kind for span in metadata] == ["begin", "commit"]
        and metadata[0].stop <= written[0].start
        and max(span.stop for span in written) <= metadata[1].start,
    }


def _shown(step: int, proof: Mapping[str, Any]) -> dict[str, str]:
    return {
        "save": str(step),
        "seconds": f"{proof['seconds']:.2f}",
        "MB": f"{proof['bytes'] / 1e6:,.0f}",
        "files": str(proof["files"]),
        "nodes that wrote": str(proof["nodes"]),
        "most at once": str(proof["writers_at_once"]),
        "nodes of a file": str(proof["nodes_of_a_file"]),
        "metadata": "; ".join(proof["metadata"]),
        "collectives": "0",
    }


if __name__ == "__main__":
    main()
