"""A machine that is described, not there, and what is assumed of its speed.

Every assumption is a constant of this file, and printed with the figures.
"""

import re
import shlex
from dataclasses import dataclass, replace

from trainer.plan.gpus import GPUS, Gpu, listed_name, peak_tflops, similar_name
from trainer.recipe import RecipeError

PEAK_SHARE = 0.7
"""Share of the peak FLOP/s that large matrix products reach. Assumed: the best shape of all reaches
0.80 on an H100, and 0.87 on an A100 (stas00/ml-engineering, compute/accelerator: MAMF)."""
BANDWIDTH_SHARE = 0.8
"""Share of the peak memory bandwidth that element-wise kernels reach. Assumed, as by most
rooflines."""
NETWORK_SHARE = 0.8
"""Share of a link's bandwidth that a collective reaches: 370 of the 450 GB/s of an H100's NVLink,
say NCCL's authors (NVIDIA/nccl-tests issue 212). nccl-tests on the machine at hand tell more."""
CALL = 8.4e-6
"""Seconds of a collective besides its steps. This and the next three: what NCCL reckons with itself
when it chooses between algorithms (NVIDIA/nccl, src/graph/tuning.cc: Ring, Simple)."""
HOP = 3.4e-6
"""Seconds of a step of a collective over NVLink, besides its bytes."""
HOP_OVER_PCIE = 5.7e-6
"""Seconds of a step where GPUs of a node have nothing but PCIe."""
HOP_BETWEEN_NODES = 14e-6
"""Seconds of a step over the network."""
PLATEAU = 1.9
"""By what those of a ring over several nodes are to be multiplied for large messages, likewise. 256
H100s gather 2 GB at 200 GB/s (NVIDIA/nccl issue 1218); this gives 239."""
LAUNCH = 10e-6
"""Seconds that a host takes to launch a kernel. It launches ahead, so a pass takes no less than all
its launches. Assumed: eager torch is said to take 5 to 25 microseconds."""
TAKEN_SHARE = 20 / 132
"""Share of a GPU that collectives take from what is computed beside them: DeepSeek-V3 gives them 20
of 132 multiprocessors (arXiv 2412.19437, section 3.2.2)."""
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
"""Bytes/s between a node and the others where nothing is said, and nodes with such GPUs have no
usual network: one card of 400 Gb/s."""
USUAL_NODE, LARGEST_NODE = 8, 72
"""GPUs of one node: as most are built, and the most there are."""
UPDATE_TRAFFIC = 24
"""Bytes per parameter in an update, besides the optimizer's state, which is read and written: so is
the weight, the update and the norm read the gradient, clipping reads and writes it. All float32."""

ROUNDING_TRAFFIC = {"fp32": 0, "bf16": 250, "int8": 450}
"""More bytes per parameter in an update that rounds its results, by optimizer.state_dtype: what
formats.py reads and writes in float32 and of hashes. Weights in bf16 take as much as bf16 state."""

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
    launch: float = LAUNCH
    """Seconds that launching a kernel takes."""
    call: float = CALL
    """Seconds of a collective, besides its steps and bytes."""
    hop: float = HOP
    """Seconds of a step of a collective inside a node, besides its bytes."""
    hop_between: float = HOP_BETWEEN_NODES
    """Seconds of a step between nodes, likewise."""
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
    cards = gpu.card * count if gpu.card else DEFAULT_NET
    if nodes > 1 and net is None:
        of_node = f"{count} x {gpu.card * 8 / 1e9:g}" if gpu.card else f"{DEFAULT_NET * 8 / 1e9:g}"
        notes.append(f"--net is not given: {of_node} Gb/s per node.")
    return Machine(
        nodes=nodes,
        gpus_per_node=count,
        gpu=gpu,
        peak_flops=(tflops or peak_tflops(gpu, dtype)) * 1e12,
        net=_rate("--net", net) if net else cards,
        hop=HOP if gpu.link > gpu.pcie else HOP_OVER_PCIE,
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
