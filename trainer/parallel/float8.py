"""Matrix products in 8 bits in the linear layers of a model's blocks, by torchao.

[Note: scales] A tensor is multiplied by a scale, which maps its largest absolute value to the
largest of the 8-bit format, and rounded. `precision.matmul` names the elements that share a scale:
fp8_tensorwise the whole tensor (e4m3 for activations and weights, e5m2 for gradients);
fp8_rowwise a row or column along which the product sums (e4m3, scales are powers of two); mxfp8 32
neighbours in such a row or column (e4m3, scales e8m0; Rouhani et al. 2023, "Microscaling Data
Formats for Deep Learning"). Scales are computed for each product anew, so there is no state.
Products are summed in float32 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").
"""

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.parallel.mesh import SHARD
from trainer.recipe import Recipe, RecipeError

Matmul = Literal["fp8_rowwise", "fp8_tensorwise", "mxfp8"]

CAPABILITY: dict[Matmul, tuple[int, int]] = {
    "fp8_rowwise": (8, 9),
    "fp8_tensorwise": (8, 9),
    "mxfp8": (10, 0),
}
"""Format → lowest CUDA compute capability whose tensor cores support it."""


def multiple_of(matmul: Matmul) -> int:
    """Return the number that must divide a layer's sizes: 32 for MX blocks, else 16 for kernels."""
    return 32 if matmul == "mxfp8" else 16


def converted(
    blocks: Iterable[nn.Module], matmul: Matmul
) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent module, name, layer) of the linear layers in `blocks` that can compute in 8
    bits: their sizes fit, and the parent does not list them in `precise`, as it does a router."""
    multiple = multiple_of(matmul)
    for block in blocks:
        for parent in block.modules():
            precise = getattr(parent, "precise", ())
            for name, layer in parent.named_children():
                if type(layer) is not nn.Linear or name in precise:
                    continue
                if layer.in_features % multiple == layer.out_features % multiple == 0:
                    yield parent, name, layer


def check_matmul(
    recipe: Recipe, blocks: Sequence[nn.Module], capability: tuple[int, int] | None
) -> None:
    """Raise RecipeError for a `precision.matmul` whose GPU, torchao, or suitable layers are
    missing. `capability`: lowest compute capability of the local GPUs; None: unknown."""
    matmul = recipe.precision.matmul
    if matmul is None:
        return
    needed = CAPABILITY[matmul]
    where = f"a GPU of compute capability {'.'.join(map(str, needed))} or above"
    instead = "take another machine, or remove precision.matmul"
    if recipe.run.device == "cpu":
        raise RecipeError(
            f"precision.matmul: {matmul} needs {where}, but run.device is cpu; set "
            "run.device=auto, or remove precision.matmul"
        )
    if not torch.cuda.is_available() or (capability and capability < needed):
        shown = ".".join(map(str, capability)) if capability else "no GPU"
        raise RecipeError(
            f"precision.matmul: {matmul} needs {where}, but this machine has {shown}; {instead}"
        )
    if find_spec("torchao") is None:
        raise RecipeError(
            "precision.matmul: torchao is not installed; pip install 'torchao>=0.18,<0.19', or "
            "remove it"
        )
    if next(converted(blocks, matmul), None) is None:
        raise RecipeError(
            f"precision.matmul: the blocks of this model have no linear layer whose sizes are "
            f"multiples of {multiple_of(matmul)}; remove the key"
        )


def capability_here() -> tuple[int, int] | None:
    """Return the lowest compute capability of this node's GPUs by nvidia-smi; None if unknown."""
    # torch would create a CUDA context, which takes GPU memory and does not survive a fork.
    tool = shutil.which("nvidia-smi")
    if not tool:
        return None
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    versions = [line.strip().partition(".") for line in output.splitlines()]
    return min(
        ((int(a), int(b)) for a, _, b in versions if a.isdigit() and b.isdigit()), default=None
    )


def apply_float8(blocks: Iterable[nn.Module], matmul: Matmul, *, emulate: bool = False) -> None:
    """Make the linear layers of a model's `blocks` compute in 8 bits, in place, before any strategy
    is applied. Works on the meta device. Parameters keep their values and names. `emulate`: round
    to 8 bits, but multiply in the original format, which works on any device."""
    for parent, name, layer in list(converted(blocks, matmul)):
        setattr(parent, name, _in_8_bits(layer, matmul, emulate))


def _in_8_bits(layer: nn.Linear, matmul: Matmul, emulate: bool) -> nn.Module:
    if matmul == "mxfp8":
        return _MXLinear(layer, emulate)
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(matmul.removeprefix("fp8_"))
    # Padding happens only where the number of tokens is not a multiple of 16.
    config = replace(config, pad_inner_dim=True, emulate=emulate)
    converted_layer: nn.Module = convert_to_float8_training(layer, config=config)
    return converted_layer


class _MXLinear(nn.Linear):
    """A linear layer that multiplies in MX blocks, with scales rounded up (RCEIL) so that no value
    overflows. torchao's own layer supports neither autocast nor emulation on CPUs."""

    def __init__(self, layer: nn.Linear, emulate: bool) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias, self.emulate = layer.weight, layer.bias, emulate

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        weight, kind = self.weight, x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        e4m3 = torch.float8_e4m3fn
        y: Tensor = mx_mm.apply(
            x, weight, e4m3, e4m3, e4m3, 32,
            KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO,
            MXFP8Dim0CastKernelChoice["TORCH" if self.emulate else "TRITON"],
            MXFP8Dim1CastKernelChoice["TORCH" if self.emulate else "CUDA"],
            ScaleCalculationMode.RCEIL, False,
        )  # fmt: skip
        return y if self.bias is None else y + self.bias.to(y.dtype)


def gather_in_8_bits(model: nn.Module) -> None:
    """Make FSDP gather weights in 8 bits, half the bytes of bf16, where a layer has one scale per
    tensor. `model` is sharded, and not on the meta device. One all-reduce before each forward pass
    agrees on the scales of all weights."""
    layers: list[Any] = [
        layer
        for layer in model.modules()
        if hasattr(layer, "linear_mm_config") and isinstance(layer.weight, DTensor)
    ]
    if not layers:
        return
    from torchao.float8.config import e4m3_dtype as e4m3  # AMD's GPUs have another e4m3
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

    # Read now, because FSDP replaces the layers' weights in forward.
    weights: list[Any] = [layer.weight for layer in layers]
    mesh = weights[0].device_mesh
    scales: list[Tensor] = []

    def send(number: int, mesh: Any) -> tuple[tuple[Tensor], tuple[Tensor]]:
        weight, local = weights[number], weights[number]._local_tensor
        # Padded, because FSDP gathers shards of equal size.
        missing = -(-weight.shape[0] // mesh.size()) - local.shape[0]
        scaled = F.pad(local, (0, 0, 0, missing)) * scales[number]
        return (to_fp8_saturated(scaled, e4m3),), (scales[number],)

    @torch.no_grad()
    def agree(*_: Any) -> None:
        shards = [weight._local_tensor for weight in weights]
        # The maximum of an empty shard is undefined; its sum is 0.
        most = torch.stack(
            [torch.linalg.vector_norm(s, torch.inf) if s.numel() else s.sum() for s in shards]
        )
        dist.all_reduce(most, dist.ReduceOp.MAX, mesh.get_group(SHARD))
        scales[:] = amax_to_scale(most, e4m3).unbind()

    for number, layer in enumerate(layers):
        # FSDP reads these hooks from the tensor at its first forward. With torchao's tensor class,
        # which has them too, optimizers and checkpoints would get that class.
        local = weights[number]._local_tensor
        local.fsdp_pre_all_gather = partial(send, number)
        local.fsdp_post_all_gather = partial(_received, layer)
    model.register_forward_pre_hook(agree, prepend=True)  # before FSDP's hook, which gathers


def _received(
    layer: Any, outputs: tuple[Tensor], scale: tuple[Tensor], dtype: torch.dtype, *, out: Any = None
) -> tuple[Tensor, tuple[Tensor]] | None:
    """FSDP's post-all-gather hook: return the weight for the layer's product from 8-bit shards."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    if out is not None:  # FSDP has gathered into the memory of an earlier result
        out._scale = scale[0]
        return None
    role = GemmInputRole.WEIGHT
    return Float8TrainingTensor(
        outputs[0], scale[0], dtype, layer.linear_mm_config, gemm_input_role=role
    ), outputs
