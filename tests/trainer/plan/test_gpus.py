"""The table of GPUs: names that devices have, and figures that agree with each other."""

import pytest

from trainer.plan.costs import GPUS, listed_name, named_gpu, peak_tflops, similar_name

NAMES = {
    "NVIDIA GB200": "GB200",
    "NVIDIA B200": "B200",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40",
    "NVIDIA L4": "L4",
    "NVIDIA A10G": "A10G",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "AMD Instinct MI300X": "MI300X",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla V100-PCIE-16GB": "V100-PCIE",
    "Tesla V100-PCIE-32GB": "V100-PCIE 32GB",
    "Tesla T4": "T4",
}
OTHERS = (
    "NVIDIA B300", "NVIDIA GH200 144G HBM3e", "NVIDIA H20", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A100-SXM-64GB", "NVIDIA A10", "NVIDIA A40",
    "NVIDIA GeForce RTX 3090 Ti", "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla V100S-PCIE-32GB",
    "AMD Instinct MI308X",
)  # fmt: skip
CLOCKED = {
    "B200": (148, 1.86, 8192),
    "GH200": (132, 1.83, 4096),
    "H200": (132, 1.83, 4096),
    "H100": (132, 1.83, 4096),
    "H100 PCIe": (114, 1.62, 4096),
    "A100": (108, 1.41, 2048),
    "A100 40GB": (108, 1.41, 2048),
    "A100 PCIe": (108, 1.41, 2048),
    "A100 PCIe 40GB": (108, 1.41, 2048),
    "L40S": (142, 2.52, 1024),
    "L40": (142, 2.49, 512),
    "L4": (58, 2.04, 1024),
    "A10G": (80, 1.71, 512),
    "RTX A6000": (84, 1.8, 1024),
    "RTX 5090": (170, 2.407, 512),
    "RTX 4090": (128, 2.52, 512),
    "RTX 3090": (82, 1.695, 512),
    "MI300X": (304, 2.1, 2048),
    "V100": (80, 1.53, 1024),
    "V100 32GB": (80, 1.53, 1024),
    "V100-PCIE": (80, 1.38, 1024),
    "V100-PCIE 32GB": (80, 1.38, 1024),
    "T4": (40, 1.59, 1024),
}
"""Multiprocessors (of AMD compute units), GHz at which tensor cores are rated, and operations a
clock of all tensor cores of one."""
FP32_GIGAHERTZ = {"B200": 1.965, "GH200": 1.98, "H200": 1.98, "H100": 1.98, "H100 PCIe": 1.755}
"""Boost clock of the others' units, where tensor cores are rated at a lower one."""
FP32_PER_CLOCK = {"A100": 128, "V100": 128, "T4": 128}
"""Operations a clock of one multiprocessor, by the first word of a name; of the others 256."""
BUSES = {
    "GB200": (8192, 7.8),
    "B200": (8192, 7.5),
    "H100": (5120, 5.24),
    "A100": (5120, 3.19),
    "A100 40GB": (5120, 2.43),
    "A100 PCIe": (5120, 3.02),
    "A100 PCIe 40GB": (5120, 2.43),
    "L40S": (384, 18),
    "L40": (384, 18),
    "L4": (192, 12.5),
    "A10G": (384, 12.5),
    "RTX A6000": (384, 16),
    "RTX 5090": (512, 28),
    "RTX 4090": (384, 21),
    "RTX 3090": (384, 19.5),
    "MI300X": (8192, 5.2),
    "V100": (4096, 1.75),
    "V100 32GB": (4096, 1.75),
    "V100-PCIE": (4096, 1.75),
    "V100-PCIE 32GB": (4096, 1.75),
    "T4": (256, 10),
}
"""Bits of the memory bus, and Gb/s of a pin. The data sheets of the others round more."""


def test_a_device_is_known_by_its_very_name():
    for name, known in NAMES.items():
        assert named_gpu(name) is GPUS[known], name
    assert {*NAMES.values()} == GPUS.keys()
    for name in OTHERS:
        assert named_gpu(name) is None, name


def test_peaks_are_what_the_clock_gives():
    """Dense: with sparsity they would be twice that."""
    for name, (cores, gigahertz, per_clock) in CLOCKED.items():
        assert GPUS[name].tflops == pytest.approx(cores * gigahertz * per_clock / 1e3, rel=0.02)
    assert GPUS.keys() - CLOCKED == {"GB200", "H100 NVL", "H200 NVL"}
    for name, gpu in GPUS.items():
        if gpu.fp8_tflops:
            assert gpu.fp8_tflops == pytest.approx(2 * gpu.tflops, rel=0.02), name


def test_float32_is_what_the_clock_gives():
    for name, (cores, gigahertz, _) in CLOCKED.items():
        per_clock = FP32_PER_CLOCK.get(name.split()[0].split("-")[0], 256)
        terahertz = FP32_GIGAHERTZ.get(name, gigahertz) / 1e3
        expected = pytest.approx(cores * terahertz * per_clock, rel=0.02)
        assert peak_tflops(GPUS[name], "fp32") == expected, name


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        *(("RTX4090", "RTX 4090"), ("rtx-4090", "RTX 4090"), ("4090", "RTX 4090")),
        *(("3090", "RTX 3090"), ("a6000", "RTX A6000"), ("h100", "H100"), ("H100 SXM5", "H100")),
        *(("H100PCIe", "H100 PCIe"), ("A100-80GB", "A100"), ("A100-40GB", "A100 40GB")),
        *(("V100", "V100"), ("V100-SXM2-32GB", "V100 32GB"), ("GeForce RTX 5090", "RTX 5090")),
        *(("NVIDIA A100 80GB PCIe", "A100 PCIe"), ("V100 PCIe 32GB", "V100-PCIE 32GB")),
        *(("4090D", None), ("H100 MIG", None), ("RTX 6000 Ada", None), ("A10", None), ("", None)),
    ],
)
def test_names_as_people_write_them(said, meant):
    assert listed_name(said) == meant


def test_a_mistyped_name_is_known_again():
    assert [similar_name(said) for said in ("RTX 4900", "MI300", "potato")] == [
        "RTX 4090", "MI300X", None,
    ]  # fmt: skip


def test_bandwidths_are_what_the_bus_gives():
    for name, (bits, gigabits) in BUSES.items():
        assert GPUS[name].bandwidth == pytest.approx(bits / 8 * gigabits * 1e9, rel=0.02), name


def test_tensor_cores_before_ampere_know_no_bf16():
    assert peak_tflops(GPUS["L4"], "bf16") == 121
    for name, gpu in GPUS.items():
        assert gpu.flash_attention != name.startswith(("V100", "T4"))
        if not gpu.flash_attention:  # float32 is an eighth of what tensor cores do
            assert peak_tflops(gpu, "bf16") == pytest.approx(gpu.tflops / 8, rel=0.01), name


def test_a_device_has_about_the_memory_that_it_is_sold_with():
    """Some vendors count in binary gigabytes; error correction may take a sixteenth."""
    for name, gpu in GPUS.items():
        assert 15 / 16 <= gpu.memory / (gpu.sold_as * 1e9) <= 1.08, name
        assert gpu.source
