"""The description of a machine for a prediction, and assumptions about its speed. Each assumption
is a constant in this file, and is printed with the predicted figures."""

import re
import shlex
from dataclasses import dataclass, replace

from trainer.plan.gpus import GPUS, PlannedGpu, listed_name, peak_tflops, similar_name
from trainer.recipe import RecipeError

PEAK_SHARE = 0.7
"""Fraction of the peak FLOP/s that large matrix products reach. Assumed: the best shapes reach 0.80
on an H100, and 0.87 on an A100 (stas00/ml-engineering, compute/accelerator: MAMF)."""
BANDWIDTH_SHARE = 0.8
"""Fraction of the peak memory bandwidth that elementwise kernels reach. Assumed, as in most
roofline models."""
NETWORK_SHARE = 0.8
"""Fraction of a link's bandwidth that a collective reaches: 370 of the 450 GB/s of an H100's
NVLink, by NCCL's authors (NVIDIA/nccl-tests issue 212)."""
CALL = 8.4e-6
"""Fixed seconds of a collective. CALL, HOP, HOP_OVER_PCIE and HOP_BETWEEN_NODES are from NCCL's
model for choosing algorithms (NVIDIA/nccl, src/graph/tuning.cc, for algorithm Ring and protocol
Simple)."""
HOP, HOP_OVER_PCIE, HOP_BETWEEN_NODES = 3.4e-6, 5.7e-6, 14e-6
"""Fixed seconds per ring step of a collective over NVLink, PCIe, and the network."""
PLATEAU = 1.9
"""NCCL's factor on the time of large messages in a ring over several nodes. With it the model
predicts 239 GB/s where 256 H100s gather 2 GB at 200 GB/s (NVIDIA/nccl issue 1218)."""
LAUNCH = 10e-6
"""Seconds in which a host launches a kernel. A pass takes at least the time of all its launches.
Assumed: 5 to 25 microseconds are reported for eager torch."""
TAKEN_SHARE = 20 / 132
"""Fraction of a GPU that collectives use while it also computes: DeepSeek-V3 reserves 20 of 132
multiprocessors for them (arXiv 2412.19437, section 3.2.2)."""
HOST_BANDWIDTH = 200e9
"""Bytes/s at which the optimizers of all ranks of a node together update state in host memory.
Assumed: eight channels of DDR5-4800 have a peak of 307 GB/s."""
DISK_BANDWIDTH = 5e9
"""Bytes/s of a node's local disk, with strategy.offload: nvme. Assumed: one drive on PCIe 4."""
UPDATE_ON_DISK = 16
"""Bytes per parameter between memory and disk in an update, without the optimizer's state: 4 bytes
each to read and write the weight, and to read the gradient for the norm and for the update."""
PAGEABLE_SHARE = 0.5
"""Fraction of PCIe's bandwidth that copies reach from and to unpinned memory, such as mapped files.
Assumed: the driver copies everything twice, which halves the speed in NVIDIA's examples."""
DEFAULT_NET = 50e9
"""Bytes/s between nodes without --net, for GPUs without a usual network: one card of 400 Gb/s."""
USUAL_NODE, LARGEST_NODE = 8, 72
"""GPUs of one node: the usual number, and the largest."""
UPDATE_TRAFFIC = 24
"""Bytes of memory traffic per parameter in an update in float32, without the optimizer's state. The
weight is read and written; the gradient is read by update and norm, and read and written by
clipping: 4 bytes each."""

ROUNDING_TRAFFIC = {"fp32": 0, "bf16": 250, "int8": 450}
"""`optimizer.state_dtype` → additional bytes of memory traffic per parameter in an update whose
results are rounded (trainer/optim/formats.py). Rounding weights to bf16 costs as much."""

ADDITION_TRAFFIC = 12
"""Bytes of host memory traffic per parameter for adding an offloaded gradient to the sum of earlier
passes: both are read and the sum is written, 4 bytes each."""


@dataclass(frozen=True)
class PlannedMachine:
    """The nodes and GPUs for which a prediction is made, with their speeds."""

    nodes: int
    gpus_per_node: int
    gpu: PlannedGpu
    peak_flops: float
    """Dense peak FLOP/s of one GPU at the precision of the computation."""
    net: float = DEFAULT_NET
    """Bytes/s between one node and all other nodes, one way, over all its network cards."""
    launch: float = LAUNCH
    call: float = CALL
    hop: float = HOP
    hop_between: float = HOP_BETWEEN_NODES
    storage: float | None = None
    """Bytes/s at which all ranks together write a checkpoint."""
    # Unknown memory and disk (None) are treated as unlimited.
    node_memory: float | None = None
    """Bytes of a node's host memory."""
    node_disk: float | None = None
    """Bytes of a node's local disk."""
    note: str = ""
    """Text for the user about what is assumed."""

    @property
    def world_size(self) -> int:
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
) -> PlannedMachine:
    """Parse a machine from command-line options. Raises RecipeError if that is not possible.

    Args:
        gpus: GPUs of a node: 8xH100, 8x80GB, or H100 for a single one. For names see `listed_name`.
            More than LARGEST_NODE are split into nodes of USUAL_NODE.
        dtype: dtype of the computation, as in `precision.dtype`.
        net: bandwidth of a node's network: 400Gb/s, 50GB/s, 8x400Gb/s for eight network cards.
        storage: bandwidth of all ranks together to storage, such as 2GB/s.
        memory: host memory of a node, such as 2TB.
        disk: size of a node's local disk, such as 8TB.
        tflops: peak of one GPU, in place of the listed peak.
    """
    matched = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", gpus.strip(), re.IGNORECASE)
    count, said = int(matched[1] or 1) if matched else 0, matched[2] if matched else ""
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
        # Several GPUs have memory of this size. The slowest is assumed, so no time is too short.
        able = [n for n in GPUS if GPUS[n].flash_attention or dtype != "bf16"]
        name = min(able, key=lambda n: (abs(GPUS[n].sold_as - wanted), peak_tflops(GPUS[n], dtype)))
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
    cards = gpu.card * count if gpu.card else DEFAULT_NET
    if nodes > 1 and net is None:
        of_node = f"{count} x {gpu.card * 8 / 1e9:g}" if gpu.card else f"{DEFAULT_NET * 8 / 1e9:g}"
        notes.append(f"--net is not given: {of_node} Gb/s per node.")
    return PlannedMachine(
        nodes=nodes,
        gpus_per_node=count,
        gpu=gpu,
        peak_flops=(tflops or peak_tflops(gpu, dtype)) * 1e12,
        net=_rate("--net", net) if net else cards,
        # A GPU whose link is not faster than PCIe has no other link.
        hop=HOP if gpu.link > gpu.pcie else HOP_OVER_PCIE,
        storage=_rate("--storage", storage) if storage else None,
        node_memory=_size("--host-memory", memory) if memory else None,
        node_disk=_size("--disk", disk) if disk else None,
        note=" ".join(notes),
    )


def _rate(option: str, text: str) -> float:
    """Parse a bandwidth; returns bytes/s. A small b means bits, as for network cards."""
    matched = re.fullmatch(
        r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([kMGT])(b|B)(?:/s|ps)", text.strip()
    )
    if not matched or not float(matched[2]) or matched[1] == "0":
        raise RecipeError(
            f"{option}: {text!r} is not a rate; write 400Gb/s (bits) or 50GB/s (bytes), or "
            "8x400Gb/s for several"
        )
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[matched[3]]
    return int(matched[1] or 1) * float(matched[2]) * scale / (8 if matched[4] == "b" else 1)


def _size(option: str, text: str) -> float:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GT])B", text.strip())
    if not matched or not float(matched[1]):
        raise RecipeError(f"{option}: {text!r} is not a size; write 512GB or 2TB")
    return float(matched[1]) * {"G": 1e9, "T": 1e12}[matched[2]]
