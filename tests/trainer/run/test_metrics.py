"""What metrics know of a device."""

from types import SimpleNamespace

import pytest
import torch

from trainer.run.metrics import LEAST_FIRST, step_line
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


def test_a_step_has_one_line_of_any_terminal():
    values = {
        "loss": 2.5, "grad_norm": 1.25, "lr": 1e-3, "tokens_per_second": 123_456.0,
        "step_seconds_p50": 0.25, "data_wait": 0.01, "bubble": 0.1, "mfu": 0.4,
        "peak_memory": 8e10, "eta_seconds": 3600,
    }  # fmt: skip
    whole = step_line(10, 2000, values, columns=1000)
    assert whole.count(" | ") == len(LEAST_FIRST) + 1, "each part is known by a name"
    lines = {columns: step_line(10, 2000, values, columns=columns) for columns in range(40, 200)}
    assert all(len(line) <= columns for columns, line in lines.items())
    assert lines[199] == whole
    assert lines[80] == (
        "step   10/2000 | loss 2.5000 | grad norm 1.250 | 123,456 tokens/s | ETA 1:00:00"
    )
    assert lines[40] == "step   10/2000 | loss 2.5000"
    line, _, time = step_line(10, 2000, values).rpartition(" | ")
    assert (time.count(":"), line) == (2, whole)
