"""Summarises Chrome traces of torch's profiler on one page: how a step's time is spent.

Each moment of a step counts for one phase: the first of this list that runs at that moment. On a
CPU: waiting for data, the optimizer, an operator (compute), a collective (exposed communication),
none (idle: Python, untraced waits). On a GPU: a kernel of the optimizer, another kernel or a copy,
a collective; the host's work counts only while the device is idle. Delays by checkpoints are
counted separately, because their share depends on how often a run saves.
"""

import gzip
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.text import markdown

DIRECTORY = "profile"
"""Folder in the run directory with rank-00003.trace.json.gz and rank-00003.json for rank 3."""

Spans = list[tuple[float, float]]
"""Disjoint sorted intervals, in microseconds."""

PHASES = ("compute", "communication", "optimizer", "data", "idle")
_COLLECTIVES = ("gloo:", "nccl:", "c10d::", "ncclDevKernel", "ncclKernel")
_COMPUTE = ("aten::", "mkldn", "fsdp::", "## Call CompiledFxGraph")
_GATHERS = (
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::reduce_scatter_tensor_coalesced_",
)
"""Collectives with two tensor arguments: the whole tensor, and this rank's part."""
_ALL_REDUCE = "c10d::allreduce_"
_ITEMSIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4}
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class _OperatorTime:
    """Time of an operator or GPU kernel, excluding operators that it calls."""

    name: str
    calls: float
    """Calls per step."""
    seconds: float
    """Seconds per step."""


@dataclass(frozen=True)
class RunRankProfile:
    """Summary of one rank's trace."""

    rank: int
    steps: list[float]
    """Seconds of each profiled step, without delays by checkpoints."""
    phases: dict[str, float]
    """Phase of PHASES → seconds over all steps."""
    communication: float
    """Seconds over all steps in which a collective ran, exposed or not."""
    saves: int
    """Number of checkpoints that began in the profiled steps."""
    checkpoint: float
    """Seconds by which checkpoints delayed the steps."""
    operators: list[_OperatorTime]
    """Operators (on a GPU: kernels), sorted by time, longest first."""
    collectives: dict[str, int]
    """Name of a collective → calls in all steps."""
    exchanged: int
    """Bytes that this rank sent in all steps by all-gather and reduce-scatter, assuming ring
    algorithms, and in point-to-point messages."""
    reduced_vectors: int
    """Bytes of one-dimensional tensors that were all-reduced in all steps."""
    reduced: int
    """Bytes of all other tensors that were all-reduced in all steps."""
    divided: int
    """Bytes of tensors sent by all-to-all in all steps, including this rank's own rows."""
    allocated: int
    """Peak bytes of host memory allocated within a step; 0 in a trace without allocations."""


def read_trace(path: Path) -> RunRankProfile:
    """Summarise one rank's trace. Raises ValueError if the file is not a trace, or has no step."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith("ProfilerStep#") and event.get("cat") == "user_annotation"
    )
    if not steps:
        raise ValueError(f"{path}: no step was traced")
    traced = merge(steps)
    # Events of the warm-up, and events after the last step, are left out.
    within = [event for event in events if steps[0][0] <= event["ts"] < steps[-1][1]]
    named: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in within:
        named[_phase(event)].append((event["ts"], event["ts"] + event["dur"]))
    spans = {phase: intersect(traced, merge(intervals)) for phase, intervals in named.items()}
    on_gpu = "kernel" in spans
    busy = merge([*spans.get("kernel", []), *spans.get("gpu communication", [])])
    held = subtract(spans.get("checkpoint", []), busy)
    if on_gpu:
        order = {
            # With offload the optimizer runs on the host while the device is idle.
            "optimizer": merge(
                intersect(spans.get("gpu optimizer", []), busy)
                + subtract(spans.get("optimizer", []), busy)
            ),
            "compute": spans["kernel"],
            "communication": spans.get("gpu communication", []),
            "data": spans.get("data", []),
        }
    else:
        names = ("data", "optimizer", "compute", "communication")
        order = {name: spans.get(name, []) for name in names}
    messages = _messages(within)
    phases, left = dict.fromkeys(PHASES, 0.0), subtract(traced, held)
    for phase, intervals in order.items():
        mine = intersect(left, intervals)
        phases[phase] = length(mine) / 1e6
        left = subtract(left, mine)
    phases["idle"] = length(left) / 1e6
    return RunRankProfile(
        rank=trace.get("distributedInfo", {}).get("rank", 0),
        steps=[length(subtract([step], held)) / 1e6 for step in steps],
        phases=phases,
        communication=length(subtract(order["communication"], held)) / 1e6,
        saves=sum(event["name"] == "save checkpoint" for event in within),
        checkpoint=length(held) / 1e6,
        operators=_operators(within, len(steps), on_gpu),
        collectives=dict(Counter(e["name"] for e in within if e["name"].startswith("c10d::"))),
        exchanged=sum(
            abs(sizes[0] - sizes[1])
            for name, _, sizes in messages
            if name in _GATHERS and len(sizes) > 1
        )
        + sum(sizes[0] for name, _, sizes in messages if name == "c10d::send"),
        reduced_vectors=sum(
            sizes[0] for name, dims, sizes in messages if name == _ALL_REDUCE and dims < 2
        ),
        reduced=sum(sizes[0] for name, dims, sizes in messages if name == _ALL_REDUCE and dims > 1),
        divided=sum(sizes[1] for name, _, sizes in messages if name == "c10d::alltoall_base_"),
        allocated=_allocated(trace["traceEvents"], steps),
    )


def _phase(event: dict[str, Any]) -> str:
    name, category = event["name"], event.get("cat")
    if category in _KERNELS:
        return "gpu communication" if "nccl" in name else "kernel"
    if category == "gpu_user_annotation":
        return "gpu optimizer" if name.startswith("Optimizer.step") else ""
    if category not in ("cpu_op", "user_annotation"):
        return ""
    if name.startswith("enumerate("):
        return "data"
    if name.startswith("Optimizer.step"):
        return "optimizer"
    if name in ("save checkpoint", "wait for checkpoint"):
        return "checkpoint"
    if name.startswith(_COLLECTIVES):
        return "communication"
    return "compute" if name.startswith(_COMPUTE) else ""


def _operators(events: Sequence[dict[str, Any]], steps: int, on_gpu: bool) -> list[_OperatorTime]:
    kinds = _KERNELS if on_gpu else ("cpu_op",)
    own: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    stacks: dict[Any, list[tuple[float, str]]] = defaultdict(list)
    chosen = [event for event in events if event.get("cat") in kinds]
    for event in sorted(chosen, key=lambda event: (event["ts"], -event["dur"])):
        stack = stacks[event.get("tid")]
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if stack and not on_gpu:
            # The caller's own time excludes this operator.
            own[stack[-1][1]] -= event["dur"]
        own[event["name"]] += event["dur"]
        calls[event["name"]] += 1
        stack.append((event["ts"] + event["dur"], event["name"]))
    shown = [name for name in own if on_gpu or name.startswith(_COMPUTE)]
    operators = [
        _OperatorTime(name, calls[name] / steps, own[name] / steps / 1e6) for name in shown
    ]
    return sorted(operators, key=lambda operator: -operator.seconds)


def _messages(events: Sequence[dict[str, Any]]) -> list[tuple[str, int, list[int]]]:
    """Return (name, number of dimensions of the first tensor, bytes of each tensor argument or list
    of tensors) of every collective. Without shapes in the trace the list of bytes is empty."""
    # Events of c10d lack the dtypes of tensors in lists; events of the backend have them.
    formats: dict[str, str] = {}
    for event in events:
        if event["name"].startswith(("gloo:", "nccl:")):
            dims, kinds = _tensors(event)
            formats |= {str(d): kind for d, kind in zip(dims, kinds, strict=True)}

    def nbytes(dims: list[Any], kind: str) -> int:
        if kind == "TensorList":
            return sum(nbytes(one, formats.get(str(one), "float")) for one in dims)
        elements: int = math.prod(dims)
        return elements * _ITEMSIZES.get(kind, 0)

    messages = []
    for event in events:
        if event["name"].startswith("c10d::"):
            dims, kinds = _tensors(event)
            first = dims[0][0] if dims and kinds[0] == "TensorList" and dims[0] else []
            sizes = [nbytes(each, kind) for each, kind in zip(dims, kinds, strict=True)]
            messages.append((event["name"], len(first), sizes))
    return messages


def _tensors(event: dict[str, Any]) -> tuple[list[list[Any]], list[str]]:
    arguments = event.get("args", {})
    return arguments.get("Input Dims", []), arguments.get("Input type", [])


def _allocated(events: Iterable[dict[str, Any]], steps: Spans) -> int:
    changes = sorted(
        (event["ts"], event["args"]["Bytes"], event["args"]["Addr"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
    )
    # The profiler misses frees by gloo's threads. `_highest` infers them only where an address is
    # reused. So each result may be too high, and the minimum over the steps is the most accurate.
    return min(_highest(change for change in changes if a <= change[0] <= b) for a, b in steps)


def _highest(changes: Iterable[tuple[float, int, int]]) -> int:
    """Return the peak of allocated bytes. `changes`: (time, bytes, address), sorted; frees have
    negative bytes."""
    live: dict[int, int] = {}
    level = highest = 0
    for _, change, address in changes:
        level -= live.pop(address, 0)
        if change > 0:
            live[address] = change
            level += change
        highest = max(highest, level)
    return highest


def merge(intervals: Sequence[tuple[float, float]]) -> Spans:
    """Return the union of intervals, which may overlap and need not be sorted."""
    merged: Spans = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersect(one: Spans, other: Spans) -> Spans:
    shared: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            shared.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def subtract(one: Spans, other: Spans) -> Spans:
    """Return the parts of `one` that are outside of `other`."""
    if not one:
        return []
    edges = [one[0][0], *(edge for span in other for edge in span), one[-1][1]]
    gaps = [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
    return intersect(one, gaps)


def length(spans: Spans) -> float:
    """Return the total length of spans, in microseconds."""
    return sum(end - begin for begin, end in spans)


def summary(
    profiles: Sequence[RunRankProfile], title: str, every: int | None = None, top: int = 12
) -> str:
    """Summarise the profiled steps of a run as a page of Markdown, with the `top` slowest
    operators. `every`: steps between checkpoints in the recipe; None: not known."""
    profiles = sorted(profiles, key=lambda profile: profile.rank)
    steps = [seconds for profile in profiles for seconds in profile.steps]
    count, mean_step = len(profiles[0].steps), statistics.mean(profiles[0].steps)
    lines = [
        f"# {title}",
        "",
        f"{count} steps on {len(profiles)} rank(s): median {statistics.median(steps) * 1e3:,.1f} "
        f"ms ({min(steps) * 1e3:,.1f} to {max(steps) * 1e3:,.1f}). The profiler itself slows "
        "small operators down: read shares, not speeds.",
        "",
    ]
    rows = []
    for phase in PHASES:
        shares = [profile.phases[phase] / sum(profile.steps) for profile in profiles]
        mean = statistics.mean(p.phases[phase] / len(p.steps) for p in profiles)
        by_rank = f"{min(shares):.1%} to {max(shares):.1%}" if len(shares) > 1 else ""
        rows.append([phase, f"{statistics.mean(shares):.1%}", f"{mean * 1e3:,.2f}", by_rank])
    lines += markdown(["", "share of the step", "ms per step", "by rank"], rows, (1, 2))
    total = sum(profile.communication for profile in profiles)
    exposed = sum(profile.phases["communication"] for profile in profiles)
    calls = ", ".join(
        f"{name.removeprefix('c10d::')} {number / count:g}"
        for name, number in sorted(profiles[0].collectives.items())
    )
    if total:
        lines += [
            "",
            f"Collectives run for {total / len(steps) * 1e3:,.2f} ms of each step; "
            f"{max(0.0, 1 - exposed / total):.0%} of that is hidden behind other work. "
            f"Collectives of rank 0 per step: {calls or 'none'}.",
        ]
    if profiles[0].saves:
        each = max(profile.checkpoint / profile.saves for profile in profiles if profile.saves)
        share = f", {each / (each + every * mean_step):.2%} of the time" if every else ""
        often = f"; with one in {every} steps, as the recipe has it{share}" if every else ""
        lines += ["", f"A checkpoint holds the steps up for {each * 1e3:,.1f} ms{often}."]
    rows = [
        [
            f"`{one.name if len(one.name) <= 70 else one.name[:67] + '...'}`",
            f"{one.calls:g}",
            f"{one.seconds * 1e3:,.2f}",
            f"{one.seconds / mean_step:.1%}",
        ]
        for one in profiles[0].operators[:top]
    ]
    columns = ["operator (rank 0, own time)", "calls per step", "ms per step", "share"]
    return "\n".join([*lines, "", *markdown(columns, rows, (1, 2, 3)), ""])
