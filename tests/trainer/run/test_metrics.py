"""What metrics know of a device."""

from types import SimpleNamespace

import pytest
import torch

from trainer.run.speed import peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"), [("NVIDIA H100 PCIe", 756), ("Tesla T4", 65), ("NVIDIA B300", None)]
)
def test_a_peak_is_that_of_this_very_gpu(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    recipe = SimpleNamespace(
        tracking=SimpleNamespace(peak_tflops=None), precision=SimpleNamespace(dtype="fp16")
    )
    peak = peak_flops(recipe, torch.device("cuda", 0))
    assert peak == (tflops and tflops * 1e12)
