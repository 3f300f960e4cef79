"""Seconds of a step on a machine that is described, not there: one roofline.

Every assumption is a constant of this file, and printed with the figures.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.parallel.parallelize import DTYPES
from trainer.parallel.schedules import Kind, Order, Simulation, simulate
from trainer.plan.blueprint import Shape, Stage, parts_of
from trainer.plan.gpus import GPUS, Gpu, listed_name, peak_tflops, similar_name
from trainer.plan.layout import Layout
from trainer.plan.tape import Trace
from trainer.plan.work import Work
from trainer.recipe import Recipe, RecipeError

PEAK_SHARE = 0.7
"""Share of the peak FLOP/s that large matrix products reach. Assumed: vendors' GEMM libraries reach
0.6 to 0.8 of the data sheet on A100 and H100."""
BANDWIDTH_SHARE = 0.8
"""Share of the peak memory bandwidth that element-wise kernels reach. Assumed, as by most
rooflines."""
NETWORK_SHARE = 0.8
"""Share of a link's bandwidth that a ring collective reaches. Assumed; nccl-tests on the machine at
hand tell more."""
HOST_BANDWIDTH = 200e9
"""Bytes/s at which all optimizers of a node update state in host memory. Assumed: eight channels
of DDR5-4800 give 307 GB/s."""
DISK_BANDWIDTH = 5e9
"""Bytes/s of a node's local disk, with strategy.offload: nvme. Assumed: one drive on PCIe 4."""
UPDATE_ON_DISK = 16
"""Bytes per parameter between memory and disk in an update, besides the optimizer's state, which is
read and written: so is the weight, and the gradient is read for the norm and once more."""
PAGEABLE_SHARE = 0.5
"""Share of PCIe's bandwidth that copies to and from memory that is not pinned, as that of files,
reach. Assumed: the driver copies everything once more, in NVIDIA's examples at half the speed."""
DEFAULT_NET = 50e9
"""Bytes/s between a node and the others where nothing is said: 400 Gb/s."""
USUAL_NODE, LARGEST_NODE = 8, 72
"""GPUs of one node: as most are built, and the most there are."""
UPDATE_TRAFFIC = 24
"""Bytes per parameter in an update, besides the optimizer's state, which is read and written: so is
the weight, the update and the norm read the gradient, clipping reads and writes it. All float32."""

ADDITION_TRAFFIC = 12
"""Bytes per parameter in host memory, where an offloaded gradient is added to that of the passes
before: two are read, one is written."""


@dataclass(frozen=True)
class Machine:
    """What is to be rented."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    peak_flops: float
    """Peak of one GPU, dense, at the precision of the computation; 1/s."""
    net: float = DEFAULT_NET
    """Bytes/s between one node and the others, one way, all its network cards together."""
    storage: float | None = None
    """Bytes/s at which a checkpoint is written, all ranks together."""
    node_memory: float | None = None
    """Bytes of host memory of a node; None: not known, and never short."""
    node_disk: float | None = None
    """Bytes of the local disk of a node, likewise."""
    note: str = ""
    """What was assumed of it because nobody said."""

    @property
    def world_size(self) -> int:
        """One rank per GPU."""
        return self.nodes * self.gpus_per_node


def describe_machine(
    gpus: str,
    nodes: int,
    dtype: str,
    *,
    net: str | None = None,
    storage: str | None = None,
    memory: str | None = None,
    disk: str | None = None,
    tflops: float | None = None,
) -> Machine:
    """What a person says of a machine.

    Args:
        gpus: per node: 8xH100, 8x80GB, or without the number for one. Names as people write them:
            see `listed_name`. More than any node has are nodes of USUAL_NODE.
        nodes: how many there are.
        dtype: of the computation, as in `precision.dtype`.
        net: between nodes: 400Gb/s, 50GB/s, 8x400Gb/s for that many network cards.
        storage: 2GB/s.
        memory: of a node's host: 2TB.
        disk: local one of a node: 8TB.
        tflops: of one GPU, where its name does not tell.

    Raises:
        RecipeError: it cannot be understood, or the GPU is not known.
    """
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", gpus.strip(), re.IGNORECASE)
    count, said = int(found[1] or 1) if found else 0, found[2] if found else ""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", said, re.IGNORECASE)
    name = listed_name(said) or ""
    if count < 1 or not (size or name):
        similar = similar_name(said)
        meant = shlex.quote(f"{count or 1}x{similar}")
        hint = f"did you mean {meant}? Or write" if similar else "write"
        raise RecipeError(
            f"--gpus: {gpus!r} is not a number of GPUs; {hint} 8x80GB, or 8xNAME with one of "
            f"{', '.join(GPUS)}"
        )
    if nodes < 1:
        raise RecipeError(f"--nodes: must be at least 1, but it is {nodes}")
    notes = []
    if count > LARGEST_NODE and nodes == 1 and count % USUAL_NODE == 0:
        nodes, count = count // USUAL_NODE, USUAL_NODE
        each = shlex.quote(f"{count}x{said}")
        notes.append(f"So many GPUs are {nodes} nodes of {count} (--gpus {each} --nodes {nodes}).")
    if size:
        wanted = float(size[1])
        # Of those that have so much, the slowest: better surprised than disappointed.
        able = [n for n in GPUS if GPUS[n].flash_attention or dtype != "bf16"]
        name = min(
            able,
            key=lambda n: (abs(GPUS[n].sold_as - wanted), peak_tflops(GPUS[n], dtype)),
        )
        gpu = replace(GPUS[name], memory=wanted * 1e9)
        named = shlex.quote(f"{count}x{name}")
        notes.append(f"No GPU is named: seconds are those of {name} (--gpus {named}).")
    else:
        gpu = GPUS[name]
    if tflops is not None and not tflops > 0:
        raise RecipeError(f"--tflops: must be above 0, but it is {tflops}")
    if not gpu.flash_attention and dtype == "bf16":
        notes.append(
            f"{name} has tensor cores and an attention kernel for fp16, not for bf16: set "
            "precision.dtype=fp16."
        )
    if nodes > 1 and net is None:
        notes.append(f"--net is not given: {DEFAULT_NET * 8 / 1e9:g} Gb/s per node.")
    return Machine(
        nodes=nodes,
        gpus_per_node=count,
        gpu=gpu,
        peak_flops=(tflops or peak_tflops(gpu, dtype)) * 1e12,
        net=_rate("--net", net) if net else DEFAULT_NET,
        storage=_rate("--storage", storage) if storage else None,
        node_memory=_size("--host-memory", memory) if memory else None,
        node_disk=_size("--disk", disk) if disk else None,
        note=" ".join(notes),
    )


def _rate(option: str, text: str) -> float:
    """Bytes/s; bits with a small b, as network cards are sold."""
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([kMGT])(b|B)(?:/s|ps)", text.strip())
    if not found or not float(found[2]) or found[1] == "0":
        raise RecipeError(
            f"{option}: {text!r} is not a rate; write 400Gb/s (bits) or 50GB/s (bytes), or "
            "8x400Gb/s for several"
        )
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[3]]
    return int(found[1] or 1) * float(found[2]) * scale / (8 if found[4] == "b" else 1)


def _size(option: str, text: str) -> float:
    """Bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GT])B", text.strip())
    if not found or not float(found[1]):
        raise RecipeError(f"{option}: {text!r} is not a size; write 512GB or 2TB")
    return float(found[1]) * {"G": 1e9, "T": 1e12}[found[2]]


@dataclass(frozen=True)
class Collective:
    """What one group of ranks sends in a step."""

    payload: int
    """Bytes of the whole tensors that are gathered or reduced."""
    times: int
    """How often they travel round the ring: 1 to gather or to reduce-scatter, 2 to all-reduce."""
    ranks: int
    stride: int
    """Distance between neighbours in the group, in ranks."""

    @property
    def sent(self) -> float:
        """Bytes that every rank sends, and receives."""
        return self.times * self.payload * (self.ranks - 1) / self.ranks

    def in_node(self, machine: Machine) -> int:
        """Neighbours of the group that a node has."""
        return max(1, min(self.ranks, machine.gpus_per_node // self.stride))

    def crosses(self, machine: Machine) -> bool:
        """Whether it goes over the network."""
        return self.ranks > self.in_node(machine)

    def seconds(self, machine: Machine) -> float:
        """On a ring."""
        bandwidth = machine.gpu.link
        if self.crosses(machine):  # groups of one node share its network
            share = self.in_node(machine) / machine.gpus_per_node
            bandwidth = min(bandwidth, machine.net * share)
        return self.sent / (bandwidth * NETWORK_SHARE)


def collectives_of(stages: Sequence[Stage], recipe: Recipe, layout: Layout) -> list[Collective]:
    """What the ranks of a stage, or of the stages of a rank, communicate in a step, to share the
    data; a few bytes that carry loss and norm are left out."""
    shapes = [shape for stage in stages for unit in stage.units for shape in unit]
    if not layout.by_fsdp:  # ZeRO-1 gathers the updated parameters once more
        times = 3 if recipe.sharding == "OPTIMIZER_STATE" else 2
        return [Collective(4 * _elements(shapes, 1), times, layout.replicas, 1)]
    strategy, shards = recipe.strategy, layout.shards
    compute, reduced = DTYPES[recipe.precision.dtype].itemsize, 8 if recipe.exact else 4
    roots = [shape for stage in stages for shape in stage.units[0]]
    found = []
    for part in parts_of(shapes):  # experts that are divided lie over fewer ranks
        ep, ranks = part[0].ep, part[0].over(shards)
        whole = sum(shape.gathered(shards) for shape in part)
        root = sum(shape.gathered(shards) for shape in roots if shape.ep == ep)
        # What stays gathered for the backward pass does for the next pass, too. What is in no block
        # stays so anyhow.
        passes = layout.passes
        often = passes if strategy.reduce_every_pass else 1
        gathered = 2 * passes * (whole - root) + often * root
        if not recipe.gathers_twice:
            gathered = often * whole
        reduction = layout.reductions * reduced * whole
        payload, replica = compute * gathered + reduction, strategy.tp * strategy.pp * shards
        found.append(Collective(payload, 1, ranks, ep if ep > 1 else strategy.tp))
        found.append(Collective(reduction // ranks, 2, layout.replicas, replica))
    return found


def messages_of(
    stages: Sequence[Stage], traces: Sequence[Trace], recipe: Recipe, layout: Layout
) -> Collective:
    """What a rank of a pipeline sends to others of it in a step: hidden states, their gradients."""
    sides = sum((not stage.first) + (not stage.last) for stage in stages)
    apart = recipe.strategy.tp * layout.shards
    return Collective(layout.passes * sides * traces[0].hidden, 2, 2, apart)


def tied_gradients_of(stages: Sequence[Stage], recipe: Recipe, layout: Layout) -> Collective:
    """What the first and the last stage of a pipeline send each other in a step: their gradients of
    a tied embedding, each its shard."""
    shapes = [shape for stage in stages for shape in stage.tied]
    apart = recipe.strategy.tp * layout.shards * max(1, recipe.strategy.pp - 1)
    payload = sum(shape.sharded(layout.shards) * shape.itemsize for shape in shapes)
    return Collective(payload, 2, 2, apart)


def _elements(shapes: Sequence[Shape], ranks: int) -> int:
    return sum(shape.sharded(ranks) for shape in shapes)


@dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    compute: float
    """Forward and backward passes of the rank with most, recomputation included."""
    update: float
    """Norm, clipping and optimizer; with offload also the sums of gradients on the host."""
    transfers: float
    """Between host and device, with strategy.offload, as if nothing overlapped."""
    communication: float
    """As if nothing overlapped."""
    network: float
    """What of it is between nodes."""
    exposed: float
    """What of communication and transfers no computation hides."""
    waiting: float = 0.0
    """For other stages of a pipeline."""

    @property
    def step(self) -> float:
        """All together."""
        return self.compute + self.update + self.exposed + self.waiting


@dataclass(frozen=True)
class Pieces:
    """What the ranks of a pipeline compute; without one, what every rank does."""

    stages: Sequence[Stage]
    """All of them, in order."""
    traces: Sequence[Trace]
    """A pass of each stage."""
    orders: Sequence[Order]
    """What each rank does when; empty without a pipeline."""

    def of_rank(self, rank: int) -> tuple[Sequence[Stage], Sequence[Trace]]:
        """Its stages."""
        ranks = len(self.orders) or 1
        return self.stages[rank::ranks], self.traces[rank::ranks]


def times_of(
    pieces: Pieces,
    recipe: Recipe,
    layout: Layout,
    machine: Machine,
    simulation: Simulation | None,
) -> Times:
    """Estimate a step; `simulation` is that of the pipeline, if there is one.

    Kernels run one after another, each as fast as arithmetic or memory allows; launching is free.
    What is moved lies beside computation as far as that reaches, but for the share of one unit:
    what the first one needs is waited for, and nothing follows the last. Tensor and expert
    parallelism wait for all that they send, and a ring for what attention does not hide. A pipeline
    waits for its first message to go through all ranks, and for the last to come back.
    """
    ranks = range(len(pieces.orders) or 1)
    each = [_times_of_rank(*pieces.of_rank(rank), recipe, layout, machine) for rank in ranks]
    if simulation is None:
        return each[0]
    slowest = max(each, key=lambda times: times.step)
    within = layout.passes * max(
        sum(sum(_together_seconds(trace, recipe, machine)) for trace in pieces.of_rank(rank)[1])
        for rank in ranks
    )
    hop = messages_of(
        [replace(pieces.stages[0], last=False)], pieces.traces, recipe, replace(layout, passes=1)
    )
    once = 2 * (len(pieces.stages) - 1) * hop.seconds(machine)
    busy = slowest.compute + within
    return replace(
        slowest, exposed=slowest.exposed + once, waiting=max(0.0, simulation.seconds - busy)
    )


def _times_of_rank(
    stages: Sequence[Stage],
    traces: Sequence[Trace],
    recipe: Recipe,
    layout: Layout,
    machine: Machine,
) -> Times:
    compute = layout.passes * sum(
        work_seconds((*trace.forward, *trace.backward), machine) for trace in traces
    )
    shapes = [shape for stage in stages for unit in stage.units for shape in unit]
    zero1 = recipe.sharding == "OPTIMIZER_STATE"
    cut = layout.replicas if zero1 else layout.shards
    owned, state = _elements(shapes, cut), sum(shape.moment_bytes(cut) for shape in shapes)
    traffic, on_disk = UPDATE_TRAFFIC * owned + 2 * state, UPDATE_ON_DISK * owned + 2 * state
    update = traffic / (machine.gpu.bandwidth * BANDWIDTH_SHARE)
    collectives = collectives_of(stages, recipe, layout)
    shared = sum(c.seconds(machine) for c in collectives)
    late = shared / 3 if zero1 else 0.0  # the gather, which follows the update
    transfers, beside = 0.0, compute
    if recipe.strategy.offload != "none":
        sums = ADDITION_TRAFFIC * (layout.reductions - 1) * owned
        update = (traffic + sums) * machine.gpus_per_node / HOST_BANDWIDTH
        often = layout.passes if recipe.strategy.reduce_every_pass else 1
        gathers = 2 * layout.passes if recipe.gathers_twice else often
        moved = 4 * owned * (gathers + layout.reductions)  # float32, as the shards are
        transfers = moved / machine.gpu.pcie
        if recipe.strategy.offload == "nvme":  # as if memory kept no page of the files
            from_disk = moved * machine.gpus_per_node / DISK_BANDWIDTH
            transfers = max(transfers / PAGEABLE_SHARE, from_disk)
            update = max(update, on_disk * machine.gpus_per_node / DISK_BANDWIDTH)
        if layout.shards == 1:  # FSDP's all-gather is a copy then, before what computes with it
            beside = 0.0
    moving = shared + transfers - late
    units = sum(len(stage.units) for stage in stages)
    exposed = late + max(moving / units, moving - beside)
    messages = messages_of(stages, traces, recipe, layout)
    tied = tied_gradients_of(stages, recipe, layout)
    sent = (*collectives, messages, tied)
    crossing = sum(c.seconds(machine) for c in sent if c.crosses(machine))
    halves, ep = [half for trace in traces for half in trace.sent], recipe.strategy.ep
    to_experts = [exchange_seconds(half.ep, ep, machine) for half in halves]
    together = sum(half.tp + half.cp for half in halves) / _link(machine)
    together = layout.passes * (together + sum(map(max, to_experts)))
    crossing += layout.passes * sum(across for _, across in to_experts)
    exposed += layout.passes * sum(sum(_together_seconds(t, recipe, machine)) for t in traces)
    exposed += tied.seconds(machine)  # after the last backward pass, before the norm
    communication = shared + together + messages.seconds(machine) + tied.seconds(machine)
    return Times(compute, update, transfers, communication, crossing, exposed)


def _link(machine: Machine) -> float:
    """Bytes/s of a ring inside a node."""
    return machine.gpu.link * NETWORK_SHARE


def exchange_seconds(nbytes: float, ranks: int, machine: Machine) -> tuple[float, float]:
    """How long each of `ranks` neighbours sends so many bytes, as many to any other: those within
    nodes, and those between them. All GPUs of a node do so, and share its network."""
    inside = math.gcd(ranks, machine.gpus_per_node)
    across = nbytes * (ranks - inside) / max(1, ranks - 1)
    network = machine.net * NETWORK_SHARE / machine.gpus_per_node
    return (nbytes - across) / _link(machine), across / network


def _together_seconds(trace: Trace, recipe: Recipe, machine: Machine) -> tuple[float, float]:
    """What tensor, context and expert parallelism wait for in a pass: forward, backward."""
    arithmetic = machine.peak_flops * PEAK_SHARE
    forward, backward = (
        half.tp / _link(machine)
        + max(exchange_seconds(half.ep, recipe.strategy.ep, machine))
        + max(0.0, half.cp / _link(machine) - half.attention / arithmetic)
        for half in trace.sent
    )
    return forward, backward


def simulated(pieces: Pieces, recipe: Recipe, machine: Machine | None) -> Simulation:
    """A step of a pipeline whose stages cost what was traced: seconds, or on a machine of which
    nothing is known operations."""
    costs: dict[int, dict[Kind, float]] = {}
    for trace in pieces.traces:
        if id(trace) in costs:
            continue
        works = trace.forward, trace.backward, trace.weights
        if machine:
            forward, backward, weights = (work_seconds(w, machine) for w in works)
            waits = _together_seconds(trace, recipe, machine)
        else:
            forward, backward, weights = (sum(w[0] for w in work) for work in works)
            waits = 0.0, 0.0
        costs[id(trace)] = {
            "F": forward + waits[0],
            "B": backward + waits[1],
            "I": backward - weights + waits[1],
            "W": weights,
        }
    return simulate(pieces.orders, stages=[costs[id(trace)] for trace in pieces.traces])


def work_seconds(work: Work, machine: Machine) -> float:
    """Operators take so long, one after another (Williams et al. 2009, "Roofline")."""
    arithmetic = machine.peak_flops * PEAK_SHARE
    traffic = machine.gpu.bandwidth * BANDWIDTH_SHARE
    return sum(max(flops / arithmetic, nbytes / traffic) for flops, nbytes in work)
