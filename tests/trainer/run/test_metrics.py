"""What metrics know of a device."""

from types import SimpleNamespace

import pytest
import torch

from trainer.plan.gpus import GPUS, named_gpu, peak_tflops
from trainer.run.speed import peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300", None),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", None),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI300X", 1307.4),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla V100S-PCIE-32GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
    ],
)
def test_a_peak_is_that_of_this_very_gpu(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    recipe = SimpleNamespace(
        tracking=SimpleNamespace(peak_tflops=None), precision=SimpleNamespace(dtype="fp16")
    )
    peak = peak_flops(recipe, torch.device("cuda", 0))
    assert peak == (tflops and tflops * 1e12)


@pytest.mark.parametrize(("name", "tflops"), [("NVIDIA L4", 121), ("Tesla T4", 8.1)])
def test_tensor_cores_before_ampere_know_no_bf16(name, tflops):
    assert peak_tflops(named_gpu(name), "bf16") == tflops


def test_a_device_has_about_the_memory_that_it_is_sold_with():
    """Some vendors count in binary gigabytes; error correction may take a sixteenth."""
    for name, gpu in GPUS.items():
        assert 15 / 16 <= gpu.memory / (gpu.sold_as * 1e9) <= 1.08, name
        assert gpu.source
