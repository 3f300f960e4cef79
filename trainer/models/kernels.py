"""Chooses the attention kernel on a GPU, and suggests a faster one.

[Note: kernels] torch includes FlashAttention-2 and cuDNN's kernel. On an H100 cuDNN's kernel and
FlashAttention-3 take about half the time of FlashAttention-2 (631, 632 and 329 TFLOP/s in pytorch
issue 142132).

- Without documents torch's `scaled_dot_product_attention` prefers cuDNN by itself: on Hopper and
  Blackwell, unless kernels must be deterministic.
- With documents `varlen_attn` has cuDNN's kernel only from torch 2.15 on. FlashAttention-3 (Hopper)
  and FlashAttention-4 (Hopper, Blackwell) are separate packages, which torch calls once they are
  activated. On Hopper the two packages are equally fast (torchtitan pull request 4413).
- Exact mode uses FlashAttention-2, which has a deterministic backward pass. So do sliding windows,
  which `varlen_attn` does not support with cuDNN's kernel.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch.torch_version import TorchVersion

from trainer.models.attention import Capability, Requested, Way, choose_attention

Package: TypeAlias = Literal["FA3", "FA4"]

HOPPER, BLACKWELL = 9, 10
"""Major numbers of the compute capability of H100 and H200, and of B200 and B300."""

FIRST_TORCH = "2.13"
"""Oldest torch whose interface to FlashAttention-4 was checked."""
TWO_RESULTS, MORE_RESULTS = "4.0.0b18", "2.14"
"""Newest flash-attn-4 whose forward returns two values; oldest torch that can call a flash-attn-4
whose forward returns more (pytorch issue 190212)."""

HEAD_DIMS = {"FA3": 256, "FA4": 128, "cuDNN": 128}
"""Kernel → largest head_dim with a backward pass on all its GPUs."""

VARLEN_ASKS_CUDNN = "2.15"
"""Oldest torch whose `varlen_attn` prefers cuDNN's kernel."""

FLASH = "FlashAttention-2"
CUDNN = f"cuDNN, or {FLASH} where cuDNN cannot"


@dataclass(frozen=True)
class AttentionPlatform:
    """A GPU, and the software that can compute attention on it."""

    capability: Capability
    torch: str
    fa3: bool = False
    """Whether FlashAttention-3 is installed."""
    fa4: str | None = None


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel that computes attention, and how to make torch call it."""

    name: str
    package: Package | None = None
    """Package to activate; None: torch's own FlashAttention."""
    without_cudnn: bool = False
    """Whether to disable cuDNN, which `varlen_attn` would prefer from torch 2.15 on."""
    note: str = ""
    """Remedy that gives a faster kernel; "" if none is known."""


def choose_kernel(
    gpu: AttentionPlatform,
    requested: Requested,
    dtype: torch.dtype,
    head_dim: int,
    *,
    documents: bool,
    exact: bool = False,
    ring: bool = False,
    window: bool = False,
    sinks: bool = False,
) -> AttentionKernel:
    """Choose the fastest installed kernel for attention on a GPU. Raises ValueError if the
    requested way does not work. Without documents, window and sinks any way counts as "auto".

    Args:
        requested: `model.attention` of the recipe; all but "auto" use torch's own kernels.
        documents: whether attention stays inside documents.
        exact: whether the recipe has `run.determinism: exact`.
        ring: whether `strategy.cp` divides sequences. Ring attention calls torch's kernel directly.
        window: whether layers have a sliding window shorter than sequences.
        dtype, head_dim, sinks: see `choose_attention`.
    """
    major = gpu.capability[0]
    new = major in (HOPPER, BLACKWELL)
    cudnn = new and not exact and head_dim % 8 == 0 and head_dim <= HEAD_DIMS["cuDNN"]
    # For plain causal attention torch's own dispatch chooses the kernel.
    if not (documents or ring or window or sinks):
        if cudnn and dtype in (torch.bfloat16, torch.float16):
            return AttentionKernel(f"scaled_dot_product_attention: {CUDNN}")
        return AttentionKernel("scaled_dot_product_attention, as torch chooses")
    way: Way = "varlen"
    if not ring:
        way = choose_attention(requested, dtype, head_dim, gpu.capability, 0, sinks=sinks)
    if way == "flex":
        return AttentionKernel("FlexAttention")
    if way == "sdpa":
        return AttentionKernel("scaled_dot_product_attention with one additive mask")
    asks_cudnn = TorchVersion(gpu.torch) >= VARLEN_ASKS_CUDNN
    if ring or window or not (asks_cudnn and cudnn):
        own = AttentionKernel(FLASH, without_cudnn=(exact or window) and asks_cudnn)
    else:
        own = AttentionKernel(f"varlen_attn: {CUDNN}")
    if exact or ring or window or requested != "auto" or not new:
        return own
    if major == HOPPER and gpu.fa3 and head_dim <= HEAD_DIMS["FA3"]:
        return AttentionKernel("FlashAttention-3", "FA3", without_cudnn=asks_cudnn)
    if head_dim > HEAD_DIMS["FA4"]:
        return own
    problem = _problem_of_fa4(gpu)
    if not problem:
        return AttentionKernel(f"FlashAttention-4 ({gpu.fa4})", "FA4", without_cudnn=asks_cudnn)
    if asks_cudnn:
        return own
    which = "FlashAttention-3 or -4" if major == HOPPER else "FlashAttention-4"
    return replace(own, note=f"{which} would be faster; {problem}")


def _problem_of_fa4(gpu: AttentionPlatform) -> str:
    """Return what to install so that torch can call flash-attn-4; "" if torch already can."""
    this, install = TorchVersion(gpu.torch), "pip install 'flash-attn-4>=4.0.0b17,<4.0.0b19'"
    if this < FIRST_TORCH:
        return f"install torch {FIRST_TORCH} or newer, and {install}"
    if gpu.fa4 is None:
        return install
    if this < MORE_RESULTS and TorchVersion(gpu.fa4) > TWO_RESULTS:
        return f"torch {this} calls flash-attn-4 up to {TWO_RESULTS}, not {gpu.fa4}: {install}"
    return ""


def this_gpu(device: torch.device) -> AttentionPlatform:
    """Describe `device`, a GPU, and the kernels that are installed, without importing them."""
    try:
        fa4 = version("flash-attn-4")
    except PackageNotFoundError:
        fa4 = None
    return AttentionPlatform(
        torch.cuda.get_device_capability(device),
        torch.__version__,
        find_spec("flash_attn_interface") is not None,
        fa4,
    )


@contextmanager
def kernel_in_use(kernel: AttentionKernel) -> Iterator[AttentionKernel]:
    """Make torch call a kernel inside the `with` block. Yields the kernel that torch really calls,
    because an installed package may fail to load."""
    from torch.nn import attention  # imported here, because it imports the compiler

    with ExitStack() as stack:
        if kernel.package:
            try:
                attention.activate_flash_attention_impl(kernel.package)
            except (ImportError, RuntimeError, OSError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                yield AttentionKernel(
                    "what torch's varlen_attn chooses",
                    note=f"{kernel.name} is installed, but fails to load: {reason}",
                )
                return
            # The activation is process-wide, and a later use may need torch's own kernel.
            stack.callback(attention.restore_flash_attention_impl)
        if kernel.without_cudnn:
            backend = attention.SDPBackend
            without_cudnn = [backend.FLASH_ATTENTION, backend.EFFICIENT_ATTENTION, backend.MATH]
            stack.enter_context(attention.sdpa_kernel(without_cudnn))
        yield kernel
