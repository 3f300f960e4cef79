"""Data sheets of GPUs by name, for MFU and plans. For a GPU that is not listed there is neither."""

import difflib
import re
from dataclasses import dataclass
from functools import partial

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
