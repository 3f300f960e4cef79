"""Planning a checkpoint of Llama-3-405B with AdamW over 16,384 ranks, without any process; and
torch DCP's planner on the same state, as far as it goes.

Every rank makes the whole plan by itself, from names, shapes and meshes. So what one rank takes is
what all take, at the same time; a few ranks of a few nodes are looked at. Of DCP what is timed is
the part that rank 0 does for all (`create_global_plan`, on plans of the shape that its ranks make),
not the gather of the plans to rank 0 and their scatter; nor that ranks make their own.
"""

import math
import multiprocessing
import pickle  # noqa: TID251  # what torch DCP gathers
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from benchmarks.support import arguments, heading, print_table, write_json
from checkpointing.format.layout import (
    DTYPE_BYTES,
    MODEL,
    OPTIMIZER,
    TensorFile,
    TensorMeta,
    index_json,
    lay_out,
)
from checkpointing.format.plan import (
    REPLICATE,
    Nodes,
    SavePlanInput,
    TensorLayout,
    TensorPiece,
    TensorSpec,
    TensorSplit,
    assign_files,
    local_boxes,
    plan_pieces,
    replicated,
)
from checkpointing.options import CheckpointOptions
from checkpointing.ranks import specs_digest
from checkpointing.save.blocks import plan_node
from checkpointing.save.messages import WantSlots
from checkpointing.wire import pack, unpack

T = TypeVar("T")

LEGEND = """\
plan of a rank     digest, files, owners, pieces: what runs on each rank before the first save
plan of a writer   what a node's writer process adds: which bytes come from which other node
pulled             stretches of its files that a writer fetches from other nodes
beyond forced      busiest node over the least that is possible: the largest tensor (a file holds
                   whole tensors), or the mean over all nodes; `files whole` counts in besides that
                   a file has one owner, so that n+1 large files on n nodes put two on one"""

HIDDEN, FFN, LAYERS, VOCABULARY, KEY_VALUE = 16384, 53248, 126, 128256, 8 * 128


def main() -> None:
    options = arguments(
        (__doc__ or "").partition("\n\n")[0], ranks=16384, node=8, peers="2,16,64,256"
    )
    ranks, node = options.ranks, options.node
    shards = 8 * node
    layouts = {
        f"FULL_SHARD over {ranks:,}": _rows(ranks, ranks),
        f"HSDP {ranks // node:,} x {node}": _rows(ranks, node),
        f"HSDP {ranks // shards:,} x {shards}": _rows(ranks, shards),
    }
    title = f"Plan of Llama-3-405B with AdamW (fp32) over {ranks:,} ranks, {node} a node"
    heading(title)
    print(LEGEND)
    ours = {name: _alone(_plan, layout, node) for name, layout in layouts.items()}
    shown = {name: _shown(figures) for name, figures in ours.items()}
    first = next(iter(shown.values()))
    print_table([{"": key, **{name: row[key] for name, row in shown.items()}} for key in first])
    print()
    worlds = [int(world) for world in options.peers.split(",") if world]
    peers = [_compare(world, node) for world in worlds]
    if peers:
        print_table([_compared(figures) for figures in peers])
    write_json(title, {"scale": ours, "peer": peers}, options.json)


# --- the state -----------------------------------------------------------------------------------


def llama_405b() -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face's names (Llama Team, 2024, "The Llama 3 Herd of Models", table 3)."""
    layer = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (KEY_VALUE, HIDDEN),
        "self_attn.v_proj.weight": (KEY_VALUE, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        **{
            f"model.layers.{number}.{name}": shape
            for number in range(LAYERS)
            for name, shape in layer.items()
        },
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }


def _rows(ranks: int, shards: int) -> TensorLayout:
    """FSDP over groups of `shards` ranks."""
    if shards == ranks:
        return TensorLayout(tuple(range(ranks)), (ranks,), (TensorSplit(0),))
    return TensorLayout(tuple(range(ranks)), (ranks // shards, shards), (REPLICATE, TensorSplit(0)))


def _specs(layout: TensorLayout) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """(model, optimizer) as a rank sees them."""
    whole = replicated(layout.ranks)
    model = {
        name: TensorSpec(TensorMeta("F32", shape), (layout,))
        for name, shape in llama_405b().items()
    }
    optimizer = {}
    for name, spec in model.items():
        optimizer[f"{name}.step"] = TensorSpec(TensorMeta("F32", ()), (whole,))
        optimizer[f"{name}.exp_avg"] = optimizer[f"{name}.exp_avg_sq"] = spec
    return model, optimizer


# --- this engine ---------------------------------------------------------------------------------


def _plan(layout: TensorLayout, per_node: int) -> dict[str, Any]:
    """Plan on a few nodes; figures."""
    before = _peak_bytes()
    nodes = tuple(
        layout.ranks[start : start + per_node] for start in range(0, len(layout.ranks), per_node)
    )
    seconds, plan, staged = [], None, []
    owners: dict[str, int] = {}
    for node in _looked_at(nodes, layout):
        for rank in nodes[node]:
            started = time.perf_counter()
            plan, digest, owners, pieces = plan_rank(_specs(layout), nodes, rank)
            seconds.append(time.perf_counter() - started)
            staged.append(sum(_nbytes(piece) for piece in pieces))
    if plan is None:
        raise ValueError("there are no ranks")
    rank_bytes = _peak_bytes() - before
    message = pack(WantSlots(digest, plan))
    loads = [0] * len(nodes)
    for file in plan.files:
        loads[owners[file.name]] += file.size
    busiest = max(range(len(nodes)), key=lambda node: loads[node])
    writer_seconds, pulled = [], []
    for node in sorted({0, busiest, owners[plan.files[len(plan.files) // 2].name]}):
        as_received = unpack(message).plan
        started = time.perf_counter()
        part = plan_node(as_received, digest, nodes, node)
        writer_seconds.append(time.perf_counter() - started)
        pulled.append(sum(map(len, part.sources.values())))
    total = sum(loads)
    largest = max(spec.meta.nbytes for spec in plan.specs.values())
    return {
        "tensors": len(plan.specs),
        "bytes": total,
        "seconds_of_rank": seconds,
        "bytes_of_rank": rank_bytes,
        "seconds_of_writer": writer_seconds,
        "bytes_of_writer": _peak_bytes() - before,
        "pulled": pulled,
        "plan_message_bytes": len(message),
        "files": len(plan.files),
        "nodes": len(nodes),
        "writers": sum(load > 0 for load in loads),
        "staged_bytes": staged,
        "staged_mean": total / len(layout.ranks),
        "written_bytes": loads,
        "largest_tensor": largest,
        "beyond_forced": max(loads) / max(largest, total / len(nodes)) - 1,
        "beyond_whole_files": max(loads) / _least(plan.files, len(nodes)) - 1,
    }


def plan_rank(
    specs: tuple[Mapping[str, TensorSpec], Mapping[str, TensorSpec]], nodes: Nodes, rank: int
) -> tuple[SavePlanInput, str, dict[str, int], list[TensorPiece]]:
    """What a rank does before its first save, as TensorCheckpointer does it: the plan for all,
    its digest, the owners of files, and what the rank contributes."""
    of_all: dict[str, TensorSpec] = {}
    files: list[TensorFile] = []
    indexes = {}
    for section, wanted in zip((MODEL, OPTIMIZER), specs, strict=True):
        specs_digest(wanted)  # by which ranks see that they agree
        metas = {name: spec.meta for name, spec in wanted.items()}
        of_section = lay_out(section, metas, CheckpointOptions().max_shard_bytes)
        indexes[section.index] = index_json(of_section)
        for file in of_section:
            tensors = {f"{section.stem}/{name}": at for name, at in file.tensors.items()}
            files.append(replace(file, tensors=tensors))
        of_all |= {f"{section.stem}/{name}": spec for name, spec in wanted.items()}
    owners = assign_files(files, len(nodes))
    near = {file: nodes[node] for file, node in owners.items()}
    stored = {name: at for file in files for name, at in file.tensors.items()}
    pieces = plan_pieces(of_all, stored, near, rank)
    digest = specs_digest(of_all)
    return SavePlanInput(of_all, files, indexes, digest), digest, owners, pieces


def _looked_at(nodes: Nodes, layout: TensorLayout) -> list[int]:
    """First, last, and those that own the first and the largest file."""
    plan, _, owners, _ = plan_rank(_specs(layout), nodes, 0)
    largest = max(plan.files, key=lambda file: file.size)
    return sorted({0, len(nodes) - 1, owners[plan.files[0].name], owners[largest.name]})


def _least(files: Sequence[TensorFile], nodes: int) -> float:
    """No way to give whole files to nodes loads the busiest with fewer bytes: it has the mean; and
    of the k * nodes + 1 largest files some node has k + 1."""
    sizes = sorted((file.size for file in files), reverse=True)
    crowded = (
        sum(sizes[k * nodes - k : k * nodes + 1]) for k in range((len(sizes) - 1) // nodes + 1)
    )
    return max(sum(sizes) / nodes, *crowded)


def _nbytes(piece: TensorPiece) -> int:
    return math.prod(piece.box.shape) * DTYPE_BYTES[piece.stored.meta.dtype]


def _shown(figures: Mapping[str, Any]) -> dict[str, str]:
    staged, loads = figures["staged_bytes"], figures["written_bytes"]
    working = [load for load in loads if load]
    return {
        "state": f"{figures['tensors']:,} tensors, {figures['bytes'] / 1e12:.2f} TB",
        "plan of a rank, s": f"{median(figures['seconds_of_rank']):.2f}, "
        f"at most {max(figures['seconds_of_rank']):.2f}",
        "  memory, MB": f"{figures['bytes_of_rank'] / 1e6:.0f}",
        "plan of a writer, s": f"{median(figures['seconds_of_writer']):.2f}, "
        f"at most {max(figures['seconds_of_writer']):.2f}",
        "  memory, MB ": f"{figures['bytes_of_writer'] / 1e6:.0f}",
        "  given to it, MB": f"{figures['plan_message_bytes'] / 1e6:.1f}",
        "  pulled": f"{min(figures['pulled']):,}-{max(figures['pulled']):,}",
        "files": f"{figures['files']:,}",
        "nodes that write": f"{figures['writers']:,} of {figures['nodes']:,}",
        "staged by a rank, MB": f"{figures['staged_mean'] / 1e6:,.0f} on average, "
        f"{min(staged) / 1e6:,.0f}-{max(staged) / 1e6:,.0f}",
        "written by one of them, MB": f"{mean(working) / 1e6:,.0f} on average, "
        f"{min(working) / 1e6:,.0f}-{max(working) / 1e6:,.0f}",
        "largest tensor, GB": f"{figures['largest_tensor'] / 1e9:.2f}",
        "beyond forced": f"{figures['beyond_forced']:.2%}",
        "  files whole": f"{figures['beyond_whole_files']:.2%}",
    }


# --- torch DCP -----------------------------------------------------------------------------------


def _compare(world: int, per_node: int) -> dict[str, Any]:
    layout = _rows(world, world)
    figures = _alone(_plan, layout, min(per_node, world))
    return {"ranks": world, "ours": figures, "dcp": _alone(_plan_dcp, layout)}


def _plan_dcp(layout: TensorLayout) -> dict[str, Any]:
    """What rank 0 does for all ranks of a DCP save."""
    before = _peak_bytes()
    plans = [SavePlan(list(_write_items(layout, rank)), planner_data={}) for rank in layout.ranks]
    gathered = sum(len(pickle.dumps(plan)) for plan in plans)
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    started = time.perf_counter()
    planner.create_global_plan(plans)
    return {
        "seconds": time.perf_counter() - started,
        "bytes": _peak_bytes() - before,
        "items": sum(len(plan.items) for plan in plans),
        "gathered_bytes": gathered,
    }


def _write_items(layout: TensorLayout, rank: int) -> Iterator[WriteItem]:
    """The plan of one rank, as `create_default_local_save_plan` makes it."""
    properties = TensorProperties(dtype=torch.float32)
    for section, specs in zip(("model", "optimizer"), _specs(layout), strict=True):
        for name, spec in specs.items():
            size = torch.Size(spec.meta.shape)
            sharded = spec.layouts[0] is layout
            for box in local_boxes(spec.meta.shape, spec.layouts, rank):
                offsets, sizes = torch.Size(box.offset), torch.Size(box.shape)
                yield WriteItem(
                    MetadataIndex(f"{section}.{name}", offsets, None if sharded else 0),
                    WriteItemType.SHARD if sharded else WriteItemType.TENSOR,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(offsets, sizes), properties, size
                    ),
                )


def _compared(figures: Mapping[str, Any]) -> dict[str, str]:
    ours, dcp = figures["ours"], figures["dcp"]
    seconds = median(ours["seconds_of_rank"])
    return {
        "ranks": str(figures["ranks"]),
        "ours: each rank, s": f"{seconds:.2f}",
        "DCP: rank 0 for all, s": f"{dcp['seconds']:.2f}",
        "ours / DCP": f"{seconds / dcp['seconds']:.3f}",
        "DCP: gathered to rank 0, MB": f"{dcp['gathered_bytes'] / 1e6:,.0f}",
        "ours: memory, MB": f"{ours['bytes_of_rank'] / 1e6:,.0f}",
        "DCP: memory of rank 0, MB": f"{dcp['bytes'] / 1e6:,.0f}",
    }


# --- a process of its own ------------------------------------------------------------------------


def _alone(work: Callable[..., T], *arguments: Any) -> T:
    """work() in a process of its own: no cache is warm, and memory is counted from zero."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, arguments)


def _peak_bytes() -> int:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
