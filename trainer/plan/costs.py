"""Seconds of a step on a machine that is described, not there: a roofline, and rings.

Every assumption is a constant of this file, and printed with the figures.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.metrics import named_tflops
from trainer.parallel.mesh import is_sharded_by_fsdp
from trainer.parallel.parallelize import DTYPES
from trainer.plan.memory import Layout, reductions_of
from trainer.plan.trace import Blueprint, Shape, Trace, Work
from trainer.recipe import Recipe, RecipeError

PEAK_SHARE = 0.7
"""Of the peak FLOP/s that large matrix products reach. Assumed: vendors' GEMM libraries reach 0.6
to 0.8 of the data sheet on A100 and H100."""
BANDWIDTH_SHARE = 0.8
"""Of the peak memory bandwidth that element-wise kernels reach. Assumed, as by most rooflines."""
NETWORK_SHARE = 0.8
"""Of a link's bandwidth that a ring collective reaches. Assumed; nccl-tests on the machine at hand
tell more."""
HOST_BANDWIDTH = 200e9
"""Bytes/s at which all optimizers of a node update state in host memory. Assumed: eight channels
of DDR5-4800 give 307 GB/s."""
DISK_BANDWIDTH = 5e9
"""Bytes/s of a node's local disk, with strategy.offload: nvme. Assumed: one drive on PCIe 4."""
UPDATE_ON_DISK = 32
"""Bytes per parameter between memory and disk in an update: weight and two moments are read and
written, the gradient is read for the norm and once more."""
PAGEABLE_SHARE = 0.5
"""Of PCIe's bandwidth that copies to and from memory that is not pinned reach: files', and what
receives a gradient that is added to those of passes before. Assumed: the driver copies everything
once more, in NVIDIA's examples at half the speed."""
DEFAULT_NET = 50e9
"""Bytes/s between a node and the others where nothing is said: 400 Gb/s."""
UPDATE_TRAFFIC = 40
"""Bytes per parameter: AdamW reads weight, gradient and two moments and writes three of them; the
norm reads the gradient, clipping reads and writes it. All float32."""

ADDITION_TRAFFIC = 12
"""Bytes per parameter in host memory, where an offloaded gradient is added to that of the passes
before: two are read, one is written."""


@dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet. Dense TFLOP/s are in `metrics.PEAK_TFLOPS`."""

    memory: float
    """Bytes, decimal."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s to the other GPUs of a node, one way: NVLink, else PCIe."""
    pcie: float
    """Bytes/s to the host, one way."""
    flash_attention: bool = True
    """As from compute capability 8.0 on."""


GPUS = {
    "H200": Gpu(141e9, 4.8e12, 450e9, 64e9),
    "H100": Gpu(80e9, 3.35e12, 450e9, 64e9),
    "H100 NVL": Gpu(94e9, 3.9e12, 64e9, 64e9),
    "H100 PCIe": Gpu(80e9, 2.0e12, 64e9, 64e9),
    "A100": Gpu(80e9, 2.04e12, 300e9, 32e9),
    "L40S": Gpu(48e9, 0.864e12, 32e9, 32e9),
    "L4": Gpu(24e9, 0.3e12, 32e9, 32e9),
    "V100": Gpu(16e9, 0.9e12, 150e9, 16e9, flash_attention=False),
    "V100 32GB": Gpu(32e9, 0.9e12, 150e9, 16e9, flash_attention=False),
    "T4": Gpu(16e9, 0.32e12, 16e9, 16e9, flash_attention=False),
}


@dataclass(frozen=True)
class Machine:
    """What is to be rented."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    peak_flops: float
    """Of one GPU, dense, at the precision of the computation; 1/s."""
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
        gpus: per node: 8xH100, 8x80GB, or without the number for one.
        nodes: how many there are.
        dtype: of the computation, as in `precision.dtype`.
        net: between nodes: 400Gb/s, 50GB/s, 8x400Gb/s for that many network cards.
        storage: 2GB/s.
        memory: of a node's host: 2TB.
        disk: local one of a node: 8TB.
        tflops: of one GPU, where its name does not tell.

    Raises:
        RecipeError: it cannot be understood, or the speed of the GPU is not known.
    """
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", gpus.strip())
    count, name = int(found[1] or 1) if found else 0, found[2] if found else ""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB", name, re.IGNORECASE)
    if count < 1 or not (size or name in GPUS):
        raise RecipeError(
            f"--gpus: {gpus!r} is not a number of GPUs; write 8x80GB, or 8xNAME with one of "
            f"{', '.join(GPUS)}"
        )
    if nodes < 1:
        raise RecipeError(f"--nodes: must be at least 1, but it is {nodes}")
    notes = []
    if size:
        wanted = float(size[1]) * 1e9
        # Of those that have so much, the slowest: better surprised than disappointed.
        able = [n for n in GPUS if GPUS[n].flash_attention or dtype != "bf16"]
        name = min(
            able, key=lambda n: (abs(GPUS[n].memory - wanted), named_tflops(n, dtype) or 0.0)
        )
        gpu = replace(GPUS[name], memory=wanted)
        named = shlex.quote(f"{count}x{name}")
        notes.append(f"No GPU is named: seconds are those of {name} (--gpus {named}).")
    else:
        gpu = GPUS[name]
    if tflops is not None and not tflops > 0:
        raise RecipeError(f"--tflops: must be above 0, but it is {tflops}")
    if tflops is None and dtype == "fp32":
        raise RecipeError(
            "--tflops: precision.dtype is fp32, of which no peak is known; give that of one GPU"
        )
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
        peak_flops=(tflops or named_tflops(name, dtype) or 0.0) * 1e12,
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
    """Communication that happens in one phase of a step, all units together."""

    phase: str
    """forward, backward (of every pass), last backward, or update. In all but the last the GPU
    computes beside."""
    payload: int
    """Bytes of the whole tensors that are gathered or reduced, per step."""
    times: int
    """How often those travel round the ring: 1 to gather or to reduce-scatter, 2 to all-reduce."""
    ranks: int
    stride: int
    """Distance between neighbours in the group, in ranks."""
    exposed: int = 0
    """Bytes of the payload that no computation can hide, as what needs them waits, or what makes
    them is the last."""

    @property
    def sent(self) -> float:
        """Bytes that every rank sends, and receives, per step."""
        return self.times * self.payload * (self.ranks - 1) / self.ranks

    def seconds(self, machine: Machine, payload: int | None = None) -> float:
        """Of the whole payload, or of so many bytes of it, on rings."""
        if self.ranks == 1 or not self.payload:
            return 0.0
        in_node = max(1, min(self.ranks, machine.gpus_per_node // self.stride))
        bandwidth = machine.gpu.link
        if self.ranks > in_node:  # groups of one node share its network
            bandwidth = min(bandwidth, machine.net * in_node / machine.gpus_per_node)
        share = 1.0 if payload is None else payload / self.payload
        return share * self.sent / (bandwidth * NETWORK_SHARE)


def collectives_of(blueprint: Blueprint, recipe: Recipe, layout: Layout) -> list[Collective]:
    """What a step communicates; a few bytes that carry loss and norm are left out."""
    shapes = [shape for unit in blueprint.units for shape in unit]
    root, whole = blueprint.units[0], _elements(shapes, 1)
    last = max((_elements([shape], 1) for shape in root), default=0)
    shards, replicas = layout.shards, layout.replicas
    if not is_sharded_by_fsdp(recipe):
        found = [Collective("last backward", 4 * whole, 2, replicas, 1, exposed=4 * last)]
        if recipe.sharding == "OPTIMIZER_STATE":
            found.append(Collective("update", 4 * whole, 1, replicas, 1, exposed=4 * whole))
        return found
    compute = DTYPES[recipe.precision.dtype].itemsize
    reduced = 8 if recipe.exact else 4
    passes = layout.passes
    reductions, waiting = reductions_of(recipe, layout), _waiting_reductions(recipe, layout)
    when = "backward" if recipe.strategy.reduce_every_pass else "last backward"
    padded, padded_root = shards * _elements(shapes, shards), shards * _elements(root, shards)
    gather, reduction = passes * compute * padded, reductions * reduced * padded
    first = passes * compute * padded_root
    exposed = reduced * (waiting * padded + (reductions - waiting) * padded_root)
    found = [
        Collective("forward", gather, 1, shards, 1, exposed=first),
        Collective(when, reduction, 1, shards, 1, exposed=exposed),
    ]
    if recipe.sharding in ("FULL_SHARD", "HYBRID_SHARD"):
        # What is in no block stays gathered; beside its backward pass the last block comes again.
        found.append(Collective("backward", gather - first, 1, shards, 1))
    if replicas > 1:
        found.append(
            Collective(
                when, reduction // shards, 2, replicas, shards,
                exposed=exposed // shards,
            )
        )  # fmt: skip
    return found


def _waiting_reductions(recipe: Recipe, layout: Layout) -> int:
    """In how many reductions of a step the host waits for the gradients of every unit, so that
    nothing is computed beside them: it adds them to those of the passes before, or puts them into a
    file (torch's `foreach_reduce`)."""
    reductions = reductions_of(recipe, layout)
    return {"none": 0, "cpu": reductions - 1, "nvme": reductions}[recipe.strategy.offload]


def _elements(shapes: Sequence[Shape], ranks: int) -> int:
    return sum(shape.sharded(ranks) for shape in shapes)


@dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    forward: float
    backward: float
    """Recomputation included."""
    update: float
    """Norm, clipping and optimizer."""
    transfers: float
    """Between host and device, with strategy.offload, and sums of gradients on the host, as if
    nothing overlapped."""
    communication: float
    """As if nothing overlapped."""
    exposed: float
    """What of communication and transfers no computation hides."""

    @property
    def step(self) -> float:
        """All together."""
        return self.forward + self.backward + self.update + self.exposed


def times_of(
    blueprint: Blueprint, recipe: Recipe, layout: Layout, trace: Trace, machine: Machine
) -> Times:
    """Estimate a step. Kernels run one after another, each as fast as arithmetic or memory allows;
    communication runs beside them; launching is free."""
    forward = layout.passes * work_seconds(trace.forward, machine)
    backward = layout.passes * work_seconds(trace.backward, machine)
    shapes = [shape for unit in blueprint.units for shape in unit]
    owned = _elements(shapes, layout.shards)
    if recipe.sharding == "OPTIMIZER_STATE":
        owned = _elements(shapes, layout.replicas)
    update = UPDATE_TRAFFIC * owned / (machine.gpu.bandwidth * BANDWIDTH_SHARE)
    beside = dict.fromkeys(("forward", "backward", "last backward", "update"), 0.0)
    at_least = dict(beside)
    for collective in collectives_of(blueprint, recipe, layout):
        beside[collective.phase] += collective.seconds(machine)
        at_least[collective.phase] += collective.seconds(machine, collective.exposed)
    communication, transfers = sum(beside.values()), 0.0
    if recipe.strategy.offload != "none":
        of_node = owned * machine.gpus_per_node
        update = UPDATE_TRAFFIC * of_node / HOST_BANDWIDTH
        gathers, again = layout.passes, 0.0
        if recipe.sharding in ("FULL_SHARD", "HYBRID_SHARD"):
            again = 1 - _elements(blueprint.units[0], layout.shards) / owned
        additions = reductions_of(recipe, layout) - 1
        up = down = 4 * owned / machine.gpu.pcie  # fp32, as the shards are
        pageable = down_again = up / PAGEABLE_SHARE
        addition = ADDITION_TRAFFIC * of_node / HOST_BANDWIDTH
        if recipe.strategy.offload == "nvme":  # as if memory kept no page of the files
            on_disk = 4 * of_node / DISK_BANDWIDTH
            up = down = down_again = max(pageable, on_disk)
            addition += on_disk  # what is added to is read again
            update = max(update, UPDATE_ON_DISK * of_node / DISK_BANDWIDTH)
        gradients = down + additions * (down_again + addition)
        beside["forward"] += gathers * up
        beside["backward"] += gathers * again * up + gradients
        waiting = _waiting_reductions(recipe, layout)
        at_least["backward"] += waiting * pageable + additions * addition
        transfers = gathers * (1 + again) * up + gradients
    hidden = beside["backward"] - at_least["backward"]
    left = max(0.0, backward - hidden) / layout.passes
    hidden_by = {"forward": forward, "backward": backward, "last backward": left, "update": 0.0}
    exposed = sum(max(at_least[phase], beside[phase] - hidden_by[phase]) for phase in beside)
    return Times(forward, backward, update, transfers, communication, exposed)


def work_seconds(work: Work, machine: Machine) -> float:
    """Of operators, one after another (Williams et al. 2009, "Roofline")."""
    arithmetic = machine.peak_flops * PEAK_SHARE
    traffic = machine.gpu.bandwidth * BANDWIDTH_SHARE
    return sum(max(flops / arithmetic, nbytes / traffic) for flops, nbytes in work)
