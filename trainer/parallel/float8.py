"""Matrix products in 8 bits: torchao's, in the linear layers of a model's blocks.

[Note: scales] A tensor is multiplied by a scale, which maps its largest value to the largest of the
8-bit format, and rounded. `precision.matmul` names what shares a scale: the whole tensor (e4m3 for
activations and weights, e5m2 for gradients); a row or column along which a product sums (e4m3;
scales are powers of two); or 32 neighbours along that (e4m3, scales e8m0; Rouhani et al. 2023,
"Microscaling Data Formats for Deep Learning"). Scales are computed anew for each product, so there
is no state: checkpoints, optimizer and gradients are those of a run without. Products are summed in
float32. Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
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
"""First compute capability whose tensor cores support the format."""


def multiple_of(matmul: Matmul) -> int:
    """Divisor of a product's sizes: 16 for the kernels, 32 for MX blocks."""
    return 32 if matmul == "mxfp8" else 16


def converted(
    blocks: Iterable[nn.Module], matmul: Matmul
) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of `blocks` that compute in 8 bits, each with its parent module and its
    name there: those whose sizes allow it, except layers that the parent lists in `precise`, such
    as a router."""
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
    """Refuse `precision.matmul` where it cannot be computed.

    Args:
        recipe: to be checked.
        capability: lowest of the local GPUs; None: unknown.

    Raises:
        RecipeError: the hardware, torchao, or a suitable layer is missing; says what to do.
    """
    matmul = recipe.precision.matmul
    if matmul is None:
        return
    needed = CAPABILITY[matmul]
    where = "a GPU of compute capability " + ".".join(map(str, needed))
    instead = "take another machine, or remove precision.matmul"
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        raise RecipeError(f"precision.matmul: {matmul} needs {where}, and there is none; {instead}")
    if capability and capability < needed:
        shown = ".".join(map(str, capability))
        raise RecipeError(
            f"precision.matmul: {matmul} needs {where} or above, and here it is {shown}; {instead}"
        )
    if find_spec("torchao") is None:
        raise RecipeError(
            "precision.matmul: torchao is not installed; pip install 'torchao>=0.18,<0.19', or "
            "remove it"
        )
    if next(converted(blocks, matmul), None) is None:
        raise RecipeError(
            f"precision.matmul: the blocks of this model have no linear layer whose sizes are "
            f"multiples of {multiple_of(matmul)}; remove it"
        )


def capability_here() -> tuple[int, int] | None:
    """Lowest compute capability of this node's GPUs from nvidia-smi, or None."""
    # torch would create a CUDA context to ask, which takes GPU memory and does not survive a fork.
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
    """Make the linear layers of `blocks` compute in 8 bits, in place, before any strategy is
    applied. Works on the meta device. Parameters keep their values and names.

    Args:
        blocks: of a model. Its other parts (embedding, last norm, head) are not changed.
        matmul: which scales, see [Note: scales].
        emulate: round to 8 bits, and multiply in the original format: on any device.
    """
    for parent, name, layer in list(converted(blocks, matmul)):
        setattr(parent, name, _in_8_bits(layer, matmul, emulate))


def _in_8_bits(layer: nn.Linear, matmul: Matmul, emulate: bool) -> nn.Module:
    if matmul == "mxfp8":
        return MXLinear(layer, emulate)
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(matmul.removeprefix("fp8_"))
    # Pads only a batch whose token count is no multiple of 16.
    config = replace(config, pad_inner_dim=True, emulate=emulate)
    converted_layer: nn.Module = convert_to_float8_training(layer, config=config)
    return converted_layer


class MXLinear(nn.Linear):
    """A linear layer whose products are in MX blocks, with scales rounded up (RCEIL) so that no
    value overflows.

    torchao's own layer supports neither autocast nor all of its arithmetic on CPUs.
    """

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
    """Make FSDP gather the weights of layers with one scale per tensor in 8 bits: half the bytes of
    bf16. `model` is sharded, and its parameters are in memory.

    Scales are of whole weights, from one all-reduce before each forward.
    """
    layers: list[Any] = [
        layer
        for layer in model.modules()
        if hasattr(layer, "linear_mm_config") and isinstance(layer.weight, DTensor)
    ]
    if not layers:
        return
    from torchao.float8.config import e4m3_dtype as e4m3  # AMD's e4m3 differs
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

    # in forward FSDP replaces the layers' weights
    weights: list[Any] = [layer.weight for layer in layers]
    mesh = weights[0].device_mesh
    scales: list[Tensor] = []

    def send(number: int, mesh: Any) -> tuple[tuple[Tensor], tuple[Tensor]]:
        weight, local = weights[number], weights[number]._local_tensor
        # FSDP gathers shards of equal size.
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
        # FSDP looks up these hooks at its first forward, on any tensor. torchao's tensor class
        # would also reach optimizers and checkpoints.
        local = weights[number]._local_tensor
        local.fsdp_pre_all_gather = partial(send, number)
        local.fsdp_post_all_gather = partial(_received, layer)
    model.register_forward_pre_hook(agree, prepend=True)  # before FSDP's own


def _received(
    layer: Any,
    outputs: tuple[Tensor],
    scale: tuple[Tensor],
    dtype: torch.dtype,
    *,
    out: Any = None,
) -> tuple[Tensor, tuple[Tensor]] | None:
    """The weight that the layer multiplies with, from the gathered 8-bit shards."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    if out is not None:  # FSDP reuses its memory
        out._scale = scale[0]
        return None
    weight = Float8TrainingTensor(
        outputs[0],
        scale[0],
        dtype,
        layer.linear_mm_config,
        gemm_input_role=GemmInputRole.WEIGHT,
    )
    return weight, outputs
