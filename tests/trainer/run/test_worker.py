"""What a training process does before it joins the others."""

import os
from types import SimpleNamespace

import pytest
import torch

from trainer.run.preflight import slow_arithmetic
from trainer.run.worker import grow_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("theirs", [{}, *({name: "backend:native"} for name in NAMES)])
def test_the_allocator_grows_its_segments_unless_someone_has_set_it(monkeypatch, theirs):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    grow_segments()
    ours = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert ours == (theirs or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_a_format_that_the_cpu_has_no_arithmetic_for_is_named(monkeypatch):
    def notes(dtype: str, *, supported: bool) -> list[str]:
        for name in ("bf16", "fp16"):
            op = f"_is_mkldnn_{name}_supported"
            monkeypatch.setattr(torch.ops.mkldnn, op, lambda: supported, raising=False)
        run, precision = SimpleNamespace(device="cpu"), SimpleNamespace(dtype=dtype)
        return slow_arithmetic(SimpleNamespace(run=run, precision=precision))

    assert notes("fp32", supported=False) == notes("bf16", supported=True) == []
    for dtype in ("bf16", "fp16"):
        (note,) = notes(dtype, supported=False)
        assert note.startswith(f"this CPU has no arithmetic for {dtype}")
