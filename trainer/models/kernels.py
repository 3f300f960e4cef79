"""Which kernel computes attention on a GPU, and which would be faster.

[Note: kernels] torch brings FlashAttention-2, which was written for A100, and cuDNN's kernel. On an
H100 the latter takes about half the time, and so does FlashAttention-3 (329, 631 and 632 TFLOP/s in
pytorch issue 142132).

- Without documents torch's `scaled_dot_product_attention` asks cuDNN first by itself: on Hopper and
  Blackwell, and not where kernels are to be deterministic.
- With documents `varlen_attn` has cuDNN's kernel from torch 2.15 on only. FlashAttention-3 (Hopper)
  and FlashAttention-4 (Hopper, Blackwell) are packages of their own, which torch calls in place of
  its own kernel once it is told to. On Hopper they are alike (torchtitan pull request 4413).

Exact mode keeps to FlashAttention-2, whose backward pass is deterministic if it is asked to be. So
do sliding windows, which cuDNN's kernel does not take in `varlen_attn`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch.torch_version import TorchVersion

from trainer.models.attention import Asked, Capability, choose_attention

Package: TypeAlias = Literal["FA3", "FA4"]
"""What torch calls FlashAttention-3 and -4."""

HOPPER, BLACKWELL = 9, 10
"""Major numbers of compute capability: of H100 and H200, and of B200 and B300."""

FIRST_TORCH = "2.13"
"""Oldest torch whose way to call FlashAttention-4 has been read, and fits."""
TWO_RESULTS, MORE_RESULTS = "4.0.0b18", "2.14"
"""Newest flash-attn-4 whose forward pass returns two things, and oldest torch that knows of more
(pytorch issue 190212)."""

HEAD_DIMS = {"FA3": 256, "FA4": 128, "cuDNN": 128}
"""Largest head size of which a kernel has a backward pass on every GPU that takes it."""

VARLEN_ASKS_CUDNN = "2.15"
"""From this version of torch on `varlen_attn` takes cuDNN's kernel where it can."""

FLASH = "FlashAttention-2"
CUDNN = f"cuDNN, or {FLASH} where that cannot"


@dataclass(frozen=True)
class GpuStack:
    """A GPU, and the software that may compute attention on it."""

    capability: Capability
    torch: str
    """Version."""
    fa3: bool = False
    """FlashAttention-3 is installed."""
    fa4: str | None = None
    """Version of flash-attn-4, if it is installed."""


@dataclass(frozen=True)
class AttentionKernel:
    """What computes attention."""

    name: str
    package: Package | None = None
    """To be called in place of torch's own FlashAttention."""
    without_cudnn: bool = False
    """cuDNN is to be out of the way: from torch 2.15 on `varlen_attn` would take it first."""
    note: str = ""
    """What would be faster, and how to get it; empty: nothing that is known."""


def choose_kernel(
    gpu: GpuStack,
    asked: Asked,
    dtype: torch.dtype,
    head_dim: int,
    *,
    documents: bool,
    exact: bool = False,
    ring: bool = False,
    window: bool = False,
) -> AttentionKernel:
    """The fastest kernel of those that are installed.

    Args:
        gpu: that computes.
        asked: `model.attention` of the recipe; all but "auto" keeps to what torch brings.
        dtype: of the computation.
        head_dim: H.
        documents: attention stays inside documents.
        exact: `run.determinism: exact`.
        ring: `strategy.cp` divides sequences, and calls torch's kernel by itself.
        window: layers have a sliding window shorter than sequences.

    Raises:
        ValueError: what is asked for cannot work, see `choose_attention`.
    """
    major = gpu.capability[0]
    new = major in (HOPPER, BLACKWELL)
    cudnn = new and not exact and head_dim % 8 == 0 and head_dim <= HEAD_DIMS["cuDNN"]
    if not (documents or ring or window):
        if cudnn and dtype in (torch.bfloat16, torch.float16):
            return AttentionKernel(f"scaled_dot_product_attention: {CUDNN}")
        return AttentionKernel("scaled_dot_product_attention, as torch chooses")
    way = "varlen" if ring else choose_attention(asked, dtype, head_dim, gpu.capability, 0)
    if way == "flex":
        return AttentionKernel("FlexAttention")
    if way == "sdpa":
        return AttentionKernel("scaled_dot_product_attention with one additive mask")
    asks_cudnn = TorchVersion(gpu.torch) >= VARLEN_ASKS_CUDNN
    if ring or window or not (asks_cudnn and cudnn):
        own = AttentionKernel(FLASH, without_cudnn=(exact or window) and asks_cudnn)
    else:
        own = AttentionKernel(f"varlen_attn: {CUDNN}")
    if exact or ring or window or asked != "auto" or not new:
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


def _problem_of_fa4(gpu: GpuStack) -> str:
    """What to do to have torch call flash-attn-4; empty: it can."""
    this, install = TorchVersion(gpu.torch), "pip install 'flash-attn-4>=4.0.0b17,<4.0.0b19'"
    if this < FIRST_TORCH:
        return f"install torch {FIRST_TORCH} or newer, and {install}"
    if gpu.fa4 is None:
        return install
    if this < MORE_RESULTS and TorchVersion(gpu.fa4) > TWO_RESULTS:
        return f"torch {this} calls flash-attn-4 up to {TWO_RESULTS}, not {gpu.fa4}: {install}"
    return ""


def this_gpu(device: torch.device) -> GpuStack:
    """What is known of a GPU of this process. Imports no kernel."""
    try:
        fa4 = version("flash-attn-4")
    except PackageNotFoundError:
        fa4 = None
    return GpuStack(
        torch.cuda.get_device_capability(device),
        torch.__version__,
        find_spec("flash_attn_interface") is not None,
        fa4,
    )


@contextmanager
def kernel_in_use(kernel: AttentionKernel) -> Iterator[AttentionKernel]:
    """While entered, torch calls a kernel; gives the one that it does call, as a package that is
    installed may fail to load."""
    from torch.nn import attention  # imports the compiler

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
            stack.callback(attention.restore_flash_attention_impl)
        if kernel.without_cudnn:
            of_torch = attention.SDPBackend
            others = [of_torch.FLASH_ATTENTION, of_torch.EFFICIENT_ATTENTION, of_torch.MATH]
            stack.enter_context(attention.sdpa_kernel(others))
        yield kernel
