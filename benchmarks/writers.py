"""Eight ranks as four nodes save to one filesystem, two writers at a time: proof, and a picture.

From `trace.jsonl`, in which every writer records what it did and when: at no moment more than
`--max-writers` write, each file is written by one node, metadata is touched by one node, one thing
at a time. That no collective runs during a save is shown more simply: the ranks destroy their
process group after `prepare`, and save.

    python -m benchmarks.writers --dir /mnt/gluster --svg docs/images/writers.svg
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support import ROOT, arguments, heading, print_table, write_json

RANKS, NODES, SAVES = 8, 4, 2
Span = dict[str, Any]


def main() -> None:
    options = arguments(__doc__ or "", dir="", svg="", max_writers=2, megabytes=600)
    with TemporaryDirectory(prefix="perdure-writers-", dir=options.dir or None) as scratch:
        run = Path(scratch) / "run"
        ranks = [
            Popen(
                [sys.executable, "-m", "benchmarks.writers"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PERDURE_RANK": json.dumps(
                        [rank, scratch, options.max_writers, options.megabytes]
                    ),
                    "GROUP_RANK": str(rank * NODES // RANKS),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(RANKS)
        ]
        try:
            if any(process.wait(300) for process in ranks):
                sys.exit("a rank failed")
        finally:
            for process in ranks:
                process.kill()
        from checkpointing.target import filesystem

        kind = filesystem(run)
        spans = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]
    writes = [span for span in spans if span["kind"] == "write"]
    metadata = [span for span in spans if span["kind"] != "write"]
    homes = defaultdict(set)
    for span in writes:
        homes[span["step"], span["file"]].add(span["node"])
    rows = [
        {
            "filesystem": kind,
            "ranks": f"{RANKS} on {NODES} nodes",
            "max_writers": options.max_writers,
            "most at once": most_at_once(writes),
            "files": len(homes),
            "nodes per file": max(map(len, homes.values())),
            "nodes on metadata": len({span["node"] for span in metadata}),
            "metadata at once": most_at_once(metadata),
            "bytes": f"{sum(span['bytes'] for span in writes):,}",
        }
    ]
    heading("Writers of one checkpoint directory")
    print_table(rows)
    write_json("Writers of one checkpoint directory", rows, options.json)
    if options.svg:
        last = max(span["step"] for span in spans)
        title = (
            f"{RANKS} ranks on {NODES} nodes save to {kind} with max_writers={options.max_writers}"
        )
        Path(options.svg).parent.mkdir(parents=True, exist_ok=True)
        Path(options.svg).write_text(picture([s for s in spans if s["step"] == last], title))
    row = rows[0]
    if row["most at once"] > options.max_writers or row["nodes per file"] > 1:
        sys.exit("more writers than allowed")
    if row["nodes on metadata"] > 1 or row["metadata at once"] > 1:
        sys.exit("more than one on metadata")


def most_at_once(spans: Sequence[Span]) -> int:
    """The largest number of spans that share a moment."""
    events = [(span["start"], 1) for span in spans] + [(span["stop"], -1) for span in spans]
    count = most = 0
    for _, change in sorted(events):  # one that ends at a moment makes room for one that begins
        count += change
        most = max(most, count)
    return most


def save_as_rank(rank: int, scratch: str, max_writers: int, megabytes: int) -> None:
    """What one of the ranks does."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from checkpointing import Checkpointer, CheckpointOptions

    torch.set_num_threads(1)
    store = f"file://{scratch}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    columns, rows, count = 1024, 4096, max(1, megabytes * 10**6 // (1024 * 4096 * 4 * 3))

    def tensor() -> DTensor:
        return DTensor.from_local(torch.rand(rows // RANKS, columns), mesh, [Shard(0)])

    model = {f"layers.{number}.weight": tensor() for number in range(count)}
    optimizer = {f"{name}.{key}": tensor() for name in model for key in ("exp_avg", "exp_avg_sq")}
    options = CheckpointOptions(
        max_writers=max_writers, max_shard_size="64 MB", trace=True, slots=1, keep=1
    )
    checkpointer = Checkpointer(f"{scratch}/run", options, dist.group.WORLD)
    checkpointer.prepare(model=model, optimizer=optimizer)
    dist.barrier()
    dist.destroy_process_group()  # from here on there is nothing to run a collective on
    for step in range(1, SAVES + 1):
        checkpointer.save(step, model=model, optimizer=optimizer, state={}, files={}, wait=True)
        checkpointer.wait()
    checkpointer.close()


# --- picture -------------------------------------------------------------------------------------

WIDTH, LEFT, TOP, ROW = 900, 130, 40, 22
COLORS = ("#4477aa", "#228833", "#ccbb44", "#ee6677", "#66ccee", "#aa3377")


def picture(spans: Sequence[Span], title: str) -> str:
    """A timeline of one save as SVG: a row for metadata, one for each thread of each node, and how
    many write at once."""
    begin = min(span["start"] for span in spans)
    seconds = max(span["stop"] for span in spans) - begin
    scale = (WIDTH - LEFT - 20) / seconds

    def place(span: Span) -> tuple[float, float]:
        return LEFT + (span["start"] - begin) * scale, (span["stop"] - span["start"]) * scale

    writers = sorted({(span["node"], span["thread"]) for span in spans if span["kind"] == "write"})
    rows = ["metadata"] + [f"node {node}, {thread}" for node, thread in writers]
    height = TOP + (len(rows) + 4) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>',
    ]
    for number, name in enumerate(rows):
        y = TOP + number * ROW
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="18" fill="#f4f4f4"/>'
        )
    for span in spans:
        x, width = place(span)
        if span["kind"] == "write":
            number = 1 + writers.index((span["node"], span["thread"]))
            color = COLORS[span["node"] % len(COLORS)]
            tip = f"{span['file']}, {span['bytes'] / 1e6:.1f} MB"
        else:
            number, color, tip = 0, "#555555", span["kind"]
        tip = escape(f"{tip}, {span['stop'] - span['start']:.3f} s")
        parts.append(
            f'<rect x="{x:.1f}" y="{TOP + number * ROW}" width="{max(width, 1):.1f}" height="18" '
            f'fill="{color}"><title>{tip}</title></rect>'
        )
    parts += _steps(spans, begin, scale, TOP + (len(rows) + 1) * ROW)
    y = height - 10
    parts.append(f'<text x="{LEFT}" y="{y}">0 s</text>')
    parts.append(f'<text x="{WIDTH - 20}" y="{y}" text-anchor="end">{seconds:.2f} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _steps(spans: Sequence[Span], begin: float, scale: float, top: int) -> list[str]:
    """The number of writers over time as a stepped line, two rows high."""
    writes = [span for span in spans if span["kind"] == "write"]
    most = most_at_once(writes)
    events = sorted([(s["start"], 1) for s in writes] + [(s["stop"], -1) for s in writes])
    bottom, unit = top + 1.5 * ROW, 1.5 * ROW / most
    points, count = [f"{LEFT},{bottom}"], 0
    for moment, change in events:
        x = LEFT + (moment - begin) * scale
        points.append(f"{x:.1f},{bottom - count * unit:.1f}")
        count += change
        points.append(f"{x:.1f},{bottom - count * unit:.1f}")
    return [
        f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end">at once: {most}</text>',
        f'<polyline points="{" ".join(points)}" fill="none" stroke="#333333"/>',
    ]


if __name__ == "__main__":
    if "PERDURE_RANK" in os.environ:
        save_as_rank(*json.loads(os.environ["PERDURE_RANK"]))
    else:
        main()
