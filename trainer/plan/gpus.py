"""What is known of GPUs by their names: MFU and plans rest on this table.

A name that is not in it has no peak, and no plan without `--tflops`: a wrong figure would be worse
than none.
"""

import re
from dataclasses import dataclass

MIB = 1 << 20
PART = re.compile(r"\b(MIG|Laptop|D)\b")
"""In the name of what has less than the GPU that its name begins with: a slice of it, or another
chip. By how much the name does not tell."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, by its data sheet."""

    tflops: float
    """Peak of bf16 and fp16 products with float32 sums, dense: without sparsity."""
    sold_as: float
    """Memory on the data sheet: decimal gigabytes, or binary ones, as the vendor likes."""
    memory: float
    """Bytes that the device reports (nvidia-smi, rocm-smi)."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s to the other GPUs of a node, one way: NVLink or Infinity Fabric, else PCIe."""
    pcie: float
    """Bytes/s to the host, one way; NVLink-C2C where it has that."""
    source: str
    """The vendor's document, and the page by which tflops, bandwidth and links were checked."""
    bf16_tflops: float | None = None
    """Before compute capability 8.0 tensor cores know no bf16: as fast as fp32 without them. They
    have no flash attention either."""

    @property
    def flash_attention(self) -> bool:
        """As from compute capability 8.0 on."""
        return self.bf16_tflops is None


BLACKWELL = (
    "NVIDIA Blackwell Architecture Technical Brief; glennklockwood.com/garden/processors/B200, "
    "acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100"
)
HOPPER = (
    "NVIDIA H100 Tensor Core GPU data sheet; acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100, "
    "hmc-tech.com/gpu/nvidia-h100-vs-nvidia-h200-sxm-vs-nvidia-gb200"
)
H200 = (
    "NVIDIA H200 Tensor Core GPU data sheet; anandtech.com/show/21136, and NVIDIA's entries in "
    "github.com/mlcommons/inference_results_v4.1"
)
AMPERE = "NVIDIA A100 Tensor Core GPU data sheet; glennklockwood.com/garden/processors/A100"
ADA = (
    "NVIDIA Ada GPU architecture whitepaper; "
    "hmc-tech.com/gpus/nvidia-geforce-rtx-4090-vs-nvidia-rtx-pro-5000-blackwell"
)
GRACE_HOPPER = "NVIDIA GH200 data sheet; not confirmed"
T4 = "NVIDIA T4 data sheet; hmc-tech.com/gpu/nvidia-t4-vs-nvidia-v100-sxm"
VOLTA = "NVIDIA V100 data sheet; hmc-tech.com/gpu/nvidia-t4-vs-nvidia-v100-sxm"

# Of the names that are words of a device's name, the first counts. Data sheets that state peaks
# with sparsity are halved. A100 is the SXM one; the PCIe one of 80 GB has 1.94 TB/s.
#
# Checked on 23 November 2026 against the pages named, which quote the vendors' documents; these
# themselves could not be read. No page confirmed the following, which stand from memory: GH200,
# all; tflops and NVLink bridge of H200 NVL; tflops of H100 NVL; pcie of B200 and GB200; link of
# V100; and what devices report as memory, but for B200, of which a provider tells 179 GiB
# (docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview).
GPUS = {
    # Two GPUs share 900 GB/s to one Grace, both ways together.
    "GB200": Gpu(2500, 186, 189471 * MIB, 8e12, 900e9, 225e9, BLACKWELL),
    "B200": Gpu(2250, 180, 183359 * MIB, 8e12, 900e9, 64e9, BLACKWELL),
    "GH200": Gpu(989, 96, 97871 * MIB, 4e12, 450e9, 450e9, GRACE_HOPPER),
    "H200 NVL": Gpu(835, 141, 143771 * MIB, 4.8e12, 450e9, 64e9, H200),
    "H200": Gpu(989, 141, 143771 * MIB, 4.8e12, 450e9, 64e9, H200),
    "H100 PCIe": Gpu(756, 80, 81559 * MIB, 2.0e12, 64e9, 64e9, HOPPER),
    "H100 NVL": Gpu(835, 94, 95830 * MIB, 3.9e12, 64e9, 64e9, HOPPER),
    "H100": Gpu(989, 80, 81559 * MIB, 3.35e12, 450e9, 64e9, HOPPER),
    "A100 40GB": Gpu(312, 40, 40960 * MIB, 1.555e12, 300e9, 32e9, AMPERE),
    "A100": Gpu(312, 80, 81920 * MIB, 2.04e12, 300e9, 32e9, AMPERE),
    "L40S": Gpu(
        362, 48, 46068 * MIB, 0.864e12, 32e9, 32e9,
        "NVIDIA L40S data sheet; mullet.se/product.html?product_id=355414",
    ),
    "L4": Gpu(
        121, 24, 23034 * MIB, 0.3e12, 32e9, 32e9,
        "NVIDIA L4 data sheet; grokipedia.com/page/NVIDIA_L4_vs_L40S",
    ),
    "RTX 5090": Gpu(
        209.5, 32, 32607 * MIB, 1.792e12, 64e9, 64e9,  # 838 with sparsity and fp16 sums
        "NVIDIA RTX Blackwell GPU whitepaper; spheron.network/blog/nvidia-rtx-5090-specs",
    ),
    "RTX 4090": Gpu(165.2, 24, 24564 * MIB, 1.008e12, 32e9, 32e9, ADA),
    # Seven links of 64 GB/s, one way.
    "MI300X": Gpu(
        1307.4, 192, 196592 * MIB, 5.3e12, 448e9, 64e9,
        "AMD Instinct MI300X data sheet; emergentmind.com/topics/amd-mi300x-gpu, "
        "docs.vultr.com/inference-cookbook/rocm/getting-started/hardware-requirements",
    ),
    "V100-PCIE": Gpu(112, 16, 16160 * MIB, 0.9e12, 16e9, 16e9, VOLTA, bf16_tflops=14),
    "V100 32GB": Gpu(125, 32, 32510 * MIB, 0.9e12, 150e9, 16e9, VOLTA, bf16_tflops=15.7),
    "V100": Gpu(125, 16, 16160 * MIB, 0.9e12, 150e9, 16e9, VOLTA, bf16_tflops=15.7),
    "T4": Gpu(65, 16, 15360 * MIB, 0.32e12, 16e9, 16e9, T4, bf16_tflops=8.1),
}  # fmt: skip


def named_gpu(name: str) -> Gpu | None:
    """The GPU that a device's name tells of; None where it is not known, or has less than the name
    says."""
    if PART.search(name):
        return None
    return next((GPUS[known] for known in GPUS if re.search(rf"\b{known}\b", name)), None)


def peak_tflops(gpu: Gpu, dtype: str) -> float | None:
    """Peak for a `precision.dtype`, TFLOP/s; None for fp32, of which the table has none."""
    if dtype == "fp32":
        return None
    return gpu.bf16_tflops if dtype == "bf16" and gpu.bf16_tflops else gpu.tflops
