"""Which kernel computes attention on a GPU, by what is known of the GPU. None of them runs here."""

import sys

import pytest
import torch
from torch.nn import attention

from trainer.models.kernels import (
    FLASH,
    AttentionKernel,
    AttentionPlatform,
    choose_kernel,
    kernel_in_use,
)

HOPPER, BLACKWELL = (9, 0), (10, 0)
CUDNN = "scaled_dot_product_attention: cuDNN, or FlashAttention-2 where cuDNN cannot"
CHOSEN = "scaled_dot_product_attention, as torch chooses"
FLEX = "FlexAttention"
MASKED = "scaled_dot_product_attention with one additive mask"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEW, OLD = "4.0.0b36", "4.0.0b17"
"""flash-attn-4 that torch 2.13 can no longer call, and that it can."""
EITHER = "varlen_attn: cuDNN, or FlashAttention-2 where cuDNN cannot"
FA4 = f"FlashAttention-4 ({OLD})"


@pytest.mark.parametrize(
    ("gpu", "given", "name", "package", "note"),
    [
        # With documents, by GPU and package.
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True, fa4=OLD), {}, "FlashAttention-3", "FA3", ""),
        (AttentionPlatform(HOPPER, "2.13.0", fa4=OLD), {}, FA4, "FA4", ""),
        (
            AttentionPlatform(HOPPER, "2.13.0"),
            {},
            FLASH,
            None,
            "FlashAttention-3 or -4 would be faster",
        ),
        (AttentionPlatform(BLACKWELL, "2.13.0", fa3=True, fa4=OLD), {}, FA4, "FA4", ""),
        (AttentionPlatform((10, 3), "2.13.0", fa4=OLD), {}, FA4, "FA4", ""),
        (
            AttentionPlatform(BLACKWELL, "2.13.0", fa3=True),
            {},
            FLASH,
            None,
            "FlashAttention-4 would be faster",
        ),
        (AttentionPlatform((8, 0), "2.13.0", fa3=True, fa4=OLD), {}, FLASH, None, ""),
        (AttentionPlatform((12, 0), "2.13.0", fa3=True, fa4=OLD), {}, FLASH, None, ""),
        # By version.
        (
            AttentionPlatform(HOPPER, "2.13.0", fa4=NEW),
            {},
            FLASH,
            None,
            f"up to 4.0.0b18, not {NEW}",
        ),
        (
            AttentionPlatform(HOPPER, "2.13.0+cu130", fa4="4.0.0"),
            {},
            FLASH,
            None,
            "up to 4.0.0b18, not 4.0.0:",
        ),
        (
            AttentionPlatform(HOPPER, "2.11.0+cu130", fa4=OLD),
            {},
            FLASH,
            None,
            "install torch 2.13 or newer",
        ),
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True, fa4=NEW), {}, "FlashAttention-3", "FA3", ""),
        (AttentionPlatform(HOPPER, "2.15.0", fa4=NEW), {}, f"FlashAttention-4 ({NEW})", "FA4", ""),
        (
            AttentionPlatform(HOPPER, "2.14.1+cu130", fa4=NEW),
            {},
            f"FlashAttention-4 ({NEW})",
            "FA4",
            "",
        ),
        (
            AttentionPlatform(HOPPER, "2.14.1"),
            {},
            FLASH,
            None,
            "FlashAttention-3 or -4 would be faster",
        ),
        (AttentionPlatform(HOPPER, "2.15.0"), {}, EITHER, None, ""),
        (AttentionPlatform(HOPPER, "2.15.0"), {"exact": True}, FLASH, None, ""),
        (AttentionPlatform((8, 0), "2.15.0"), {}, FLASH, None, ""),
        # By head size.
        (
            AttentionPlatform(HOPPER, "2.13.0", fa3=True, fa4=OLD),
            {"head_dim": 256},
            "FlashAttention-3",
            "FA3",
            "",
        ),
        (AttentionPlatform(HOPPER, "2.13.0", fa4=OLD), {"head_dim": 256}, FLASH, None, ""),
        (AttentionPlatform(HOPPER, "2.15.0", fa4=OLD), {"head_dim": 256}, FLASH, None, ""),
        # What keeps to torch's own kernels.
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"exact": True}, FLASH, None, ""),
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"ring": True}, FLASH, None, ""),
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"requested": "varlen"}, FLASH, None, ""),
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"window": True}, FLASH, None, ""),
        (
            AttentionPlatform(HOPPER, "2.15.0"),
            {"window": True, "documents": False},
            FLASH,
            None,
            "",
        ),
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"requested": "sdpa"}, MASKED, None, ""),
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"dtype": FP32}, FLEX, None, ""),
        (
            AttentionPlatform(HOPPER, "2.13.0", fa3=True),
            {"dtype": FP16},
            "FlashAttention-3",
            "FA3",
            "",
        ),
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"head_dim": 20}, FLEX, None, ""),
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"sinks": True}, FLEX, None, ""),
        (AttentionPlatform((6, 0), "2.13.0"), {}, MASKED, None, ""),
        # Without documents no package is requested.
        (AttentionPlatform(HOPPER, "2.13.0", fa3=True), {"documents": False}, CUDNN, None, ""),
        (AttentionPlatform(BLACKWELL, "2.13.0"), {"documents": False}, CUDNN, None, ""),
        (AttentionPlatform((8, 0), "2.13.0"), {"documents": False}, CHOSEN, None, ""),
        (AttentionPlatform((12, 0), "2.13.0"), {"documents": False}, CHOSEN, None, ""),
        (
            AttentionPlatform(HOPPER, "2.13.0"),
            {"documents": False, "dtype": FP32},
            CHOSEN,
            None,
            "",
        ),
        (
            AttentionPlatform(HOPPER, "2.13.0"),
            {"documents": False, "head_dim": 256},
            CHOSEN,
            None,
            "",
        ),
        (
            AttentionPlatform(HOPPER, "2.13.0"),
            {"documents": False, "exact": True},
            CHOSEN,
            None,
            "",
        ),
        (AttentionPlatform(HOPPER, "2.13.0"), {"documents": False, "ring": True}, FLASH, None, ""),
        (AttentionPlatform(HOPPER, "2.13.0"), {"sinks": True, "documents": False}, FLEX, None, ""),
    ],
)
def test_choice(gpu, given, name, package, note):
    usual = {"requested": "auto", "dtype": BF16, "head_dim": 128, "documents": True}
    kernel = choose_kernel(gpu, **{**usual, **given})
    assert (kernel.name, kernel.package) == (name, package)
    assert note in kernel.note
    assert bool(note) == bool(kernel.note)
    of_flash = package or (name == FLASH and {"exact", "window"} & given.keys())
    assert kernel.without_cudnn == bool(of_flash and gpu.torch >= "2.15")


def test_torch_is_told_and_told_back():
    removed = []

    class Handle:
        def remove(self):
            removed.append(self)

    attention.register_flash_attention_impl("FA3", register_fn=Handle)
    try:
        kernel = choose_kernel(
            AttentionPlatform(HOPPER, "2.15.0", fa3=True), "auto", BF16, 128, documents=True
        )
        with kernel_in_use(kernel) as used:
            assert used is kernel
            assert attention.current_flash_attention_impl() == "FA3"
            assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        attention.register_flash_attention_impl(
            "FA3", register_fn=attention._fa3.register_flash_attention_fa3
        )
    assert attention.current_flash_attention_impl() is None
    assert len(removed) == 1
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("package", "module"), [("FA3", "flash_attn_interface"), ("FA4", "flash_attn")]
)
def test_a_package_that_fails_to_load_is_told(monkeypatch, package, module):
    monkeypatch.setitem(sys.modules, module, None)
    with kernel_in_use(AttentionKernel("FlashAttention", package)) as used:
        assert (used.name, used.package) == ("what torch's varlen_attn chooses", None)
        assert "FlashAttention is installed, but fails to load" in used.note
    assert attention.current_flash_attention_impl() is None
