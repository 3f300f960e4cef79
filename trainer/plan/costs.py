"""The GPUs and nodes for which a prediction is made, and assumptions about their speed: data sheets
of GPUs by name, for MFU and plans, and constants, which are printed with the predicted figures. For
a GPU that is not listed there is neither."""

import difflib
import re
import shlex
from dataclasses import dataclass, replace
from functools import partial

from trainer.recipe import RecipeError

MIB = 1 << 20
MAKER = r"(?:NVIDIA |AMD |Tesla |GeForce |Instinct )*"
"""Regular expression for the words in a device's name that precede its model."""


@dataclass(frozen=True)
class PlannedGpu:
    """Data of one model of GPU."""

    device: str
    """Regular expression for the whole name that torch.cuda.get_device_name and nvidia-smi give,
    without MAKER. Names of MIG slices and laptop GPUs have more words, and do not match."""
    tflops: float
    """Dense peak of bf16 and fp16 products with float32 sums, in TFLOP/s."""
    fp8_tflops: float | None
    """Dense peak of 8-bit products, in TFLOP/s; None: not supported."""
    fp32_tflops: float
    """Peak of float32 products without tensor cores, in TFLOP/s: by default PyTorch does not round
    to TF32."""
    sold_as: float
    """Memory on the data sheet, in the vendor's decimal or binary gigabytes."""
    memory: float
    """Bytes that the device reports (nvidia-smi, rocm-smi)."""
    bandwidth: float
    """Bandwidth of the memory, in bytes/s."""
    link: float
    """Bytes/s to the other GPUs of a node, one way: NVLink or Infinity Fabric, else PCIe."""
    pcie: float
    """Bytes/s to the host, one way: PCIe or NVLink-C2C."""
    source: str
    flash_attention: bool = True
    """Whether flash attention and bf16 tensor cores are supported, as from compute capability 8.0
    on."""
    card: float | None = None
    """Bytes/s to other nodes, one way, of the network card that each GPU has in the vendor's nodes,
    such as DGX H100; None: such nodes do not exist."""
    attention: float = 0.6
    """Fraction of the peak that flash attention reaches over forward and backward: FlashAttention-2
    0.5 to 0.73 on an A100 (arXiv 2307.08691) and 0.35 on an H100 (arXiv 2407.08608)."""


_hopper = partial(PlannedGpu, attention=0.35)
"""Creates a Hopper or later GPU, which FlashAttention-2 does not fully use."""
_no_flash = partial(PlannedGpu, flash_attention=False)
BLACKWELL = "NVIDIA Blackwell data sheet: GB200 NVL72 and HGX B200"
H100 = "NVIDIA H100 Tensor Core GPU data sheet"
H200 = "NVIDIA H200 Tensor Core GPU data sheet"
A100 = "NVIDIA A100 Tensor Core GPU data sheet"
V100 = "NVIDIA V100 Tensor Core GPU data sheet"

# Where the figures come from. `source` names the vendor's document, which could not be opened. On
# 25 November 2026 pages and programs that quote it were read instead, and for `memory` published
# listings of nvidia-smi and rocm-smi. Peaks with sparsity are halved. From memory, without any
# document, are: NVLink of GH200 and V100; C2C of GB200; PCIe of V100, T4 and RTX 4090; all figures
# of A10G, RTX A6000 and RTX 3090; memory of L40; float32 peaks except for GB200, H200, H100 and
# L40; network cards of A100 and MI300X. Other network cards are of systems in MLPerf's results.
# `attention` is published for A100 and H100; other GPUs have the value of the more similar one.
#
# What tests check. Peaks equal multiprocessors x boost clock x operations per clock, except for
# GB200, H100 NVL and H200 NVL, whose clock is not published; the clock of B200 is from a web page.
# 8-bit peaks are twice the 16-bit peaks. Bandwidths equal bus width x rate per pin, except for
# GH200, H200, H100 PCIe and H100 NVL. Links and PCIe are not checked.
GPUS = {
    # Two GPUs share NVLink-C2C to one Grace CPU, 900 GB/s in both directions together.
    "GB200": _hopper(
        "GB200", 2500, 5000, 80, 186, 189471 * MIB, 8e12, 900e9, 225e9, BLACKWELL, card=50e9,
    ),
    "B200": _hopper(
        "B200", 2250, 4500, 75, 180, 183359 * MIB, 7.7e12, 900e9, 64e9, BLACKWELL, card=50e9,
    ),
    "GH200": _hopper(
        r"GH200 (?:120|480)GB", 989, 1979, 67, 96, 97871 * MIB, 4e12, 450e9, 450e9,
        "NVIDIA GH200 Grace Hopper Superchip data sheet",
    ),
    "H200 NVL": _hopper("H200 NVL", 835, 1671, 60, 141, 143771 * MIB, 4.8e12, 450e9, 64e9, H200),
    "H200": _hopper("H200", 989, 1979, 67, 141, 143771 * MIB, 4.8e12, 450e9, 64e9, H200, card=50e9),
    "H100 PCIe": _hopper("H100 PCIe", 756, 1513, 51, 80, 81559 * MIB, 2.0e12, 64e9, 64e9, H100),
    "H100 NVL": _hopper("H100 NVL", 835, 1671, 60, 94, 95830 * MIB, 3.9e12, 64e9, 64e9, H100),
    "H100": _hopper(
        "H100 80GB HBM3", 989, 1979, 67, 80, 81559 * MIB, 3.35e12, 450e9, 64e9, H100, card=50e9,
    ),
    "A100": PlannedGpu(
        "A100-SXM4-80GB", 312, None, 19.5, 80, 81920 * MIB, 2.039e12, 300e9, 32e9, A100, card=25e9,
    ),
    "A100 40GB": PlannedGpu(
        "A100-SXM4-40GB", 312, None, 19.5, 40, 40960 * MIB, 1.555e12, 300e9, 32e9, A100, card=25e9,
    ),
    "A100 PCIe": PlannedGpu(
        "A100 80GB PCIe", 312, None, 19.5, 80, 81920 * MIB, 1.935e12, 32e9, 32e9, A100,
    ),
    "A100 PCIe 40GB": PlannedGpu(
        "A100-PCIE-40GB", 312, None, 19.5, 40, 40960 * MIB, 1.555e12, 32e9, 32e9, A100,
    ),
    "L40S": PlannedGpu(
        "L40S", 362, 733, 91.6, 48, 46068 * MIB, 0.864e12, 32e9, 32e9, "NVIDIA L40S data sheet",
    ),
    "L40": PlannedGpu(
        "L40", 181, 362, 90.5, 48, 46068 * MIB, 0.864e12, 32e9, 32e9, "NVIDIA L40 data sheet",
    ),
    "L4": PlannedGpu(
        "L4", 121, 242.5, 30.3, 24, 23034 * MIB, 0.3e12, 32e9, 32e9, "NVIDIA L4 data sheet"
    ),
    "A10G": PlannedGpu(
        "A10G", 70, None, 35, 24, 23028 * MIB, 0.6e12, 32e9, 32e9, "NVIDIA A10G data sheet",
    ),
    "RTX A6000": PlannedGpu(
        "RTX A6000", 154.8, None, 38.7, 48, 49140 * MIB, 0.768e12, 32e9, 32e9,
        "NVIDIA RTX A6000 data sheet",
    ),
    # Half the advertised rate of GeForce cards, which is for sums in fp16, not float32.
    "RTX 5090": PlannedGpu(
        "RTX 5090", 209.5, 419, 104.8, 32, 32607 * MIB, 1.792e12, 64e9, 64e9,
        "NVIDIA RTX Blackwell GPU Architecture whitepaper",
    ),
    "RTX 4090": PlannedGpu(
        "RTX 4090", 165.2, 330.3, 82.6, 24, 24564 * MIB, 1.008e12, 32e9, 32e9,
        "NVIDIA Ada GPU Architecture whitepaper",
    ),
    # `link` is without the NVLink bridge that can connect two cards.
    "RTX 3090": PlannedGpu(
        "RTX 3090", 71, None, 35.6, 24, 24576 * MIB, 0.936e12, 32e9, 32e9,
        "NVIDIA Ampere GA102 GPU Architecture whitepaper",
    ),
    # `link` is that of seven Infinity Fabric links of 64 GB/s, one way.
    "MI300X": _hopper(
        r"MI300X(?: OAM| VF)?", 1307.4, 2614.9, 163.4, 192, 196592 * MIB, 5.3e12, 448e9, 64e9,
        "AMD Instinct MI300X Accelerator data sheet", card=50e9,
    ),
    "V100-PCIE": _no_flash(
        "V100-PCIE-16GB", 112, None, 14, 16, 16160 * MIB, 0.9e12, 16e9, 16e9, V100,
    ),
    "V100-PCIE 32GB": _no_flash(
        "V100-PCIE-32GB", 112, None, 14, 32, 32510 * MIB, 0.9e12, 16e9, 16e9, V100,
    ),
    "V100 32GB": _no_flash(
        "V100-SXM2-32GB", 125, None, 15.7, 32, 32510 * MIB, 0.9e12, 150e9, 16e9, V100,
    ),
    "V100": _no_flash(
        "V100-SXM2-16GB", 125, None, 15.7, 16, 16160 * MIB, 0.9e12, 150e9, 16e9, V100,
    ),
    "T4": _no_flash(
        "T4", 65, None, 8.1, 16, 15360 * MIB, 0.32e12, 16e9, 16e9,
        "NVIDIA T4 Tensor Core GPU data sheet",
    ),
}  # fmt: skip


def named_gpu(name: str) -> PlannedGpu | None:
    return next((gpu for gpu in GPUS.values() if re.fullmatch(MAKER + gpu.device, name)), None)


def listed_name(text: str) -> str | None:
    """Return the key in GPUS for a name as people write it (rtx4090, 4090, H100-SXM, "A100 80GB"),
    or as nvidia-smi prints it; None if it is not listed."""
    spellings: dict[str, str] = {}
    for name, gpu in GPUS.items():
        if re.fullmatch(MAKER + gpu.device, text):
            return name
        for spelling in (name, f"{name} {gpu.sold_as:g}GB", gpu.device):
            for said in (spelling, spelling.removeprefix("RTX ")):
                spellings.setdefault(_bare_name(said), name)
    return spellings.get(_bare_name(text))


def similar_name(text: str) -> str | None:
    """Return the key in GPUS that is most similar to a mistyped name; None if none is similar."""
    known = {_bare_name(name): name for name in GPUS}
    close = difflib.get_close_matches(_bare_name(text), known, n=1)
    return known[close[0]] if close else None


def _bare_name(name: str) -> str:
    """Remove from a name what people write differently: case, spaces, maker, socket."""
    without_maker = re.sub(MAKER, "", name, count=1, flags=re.IGNORECASE)
    return re.sub(r"[\s_-]|sxm\d?", "", without_maker.casefold())


def peak_tflops(gpu: PlannedGpu, dtype: str) -> float:
    """Return the dense peak for a `precision.dtype`, in TFLOP/s."""
    if dtype == "fp32" or (dtype == "bf16" and not gpu.flash_attention):
        return gpu.fp32_tflops
    return gpu.tflops


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
        # Several models of GPU may have memory of this size: that of the lowest peak is assumed.
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
