"""LoRA (Hu et al. 2021): trains small matrices A and B beside frozen weights."""

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.format.nf4 import BLOCK, NF4, dequantise, packed_shape
from checkpointing.format.peft import scale_of, write_config
from trainer.models.transformers_model import TextModel
from trainer.recipe import RecipeError
from trainer.recipe.sections import AdapterSection
from trainer.recipe.seeds import stable_seed

_NAMED = 8  # most names listed in a message


class LoraLinear(nn.Linear):
    """y = W x + b + scale · B A x, with frozen W and b. No wrapper changes the FQNs of others."""

    def __init__(self, layer: nn.Linear, options: AdapterSection) -> None:
        # nn.Linear's constructor would allocate a second weight
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.sections = getattr(layer, "sections", ())
        self.weight, self.bias = layer.weight, layer.bias
        self.dropout = options.dropout
        self.scale = scale_of(options.rank, options.alpha, options.rslora)
        device, rank = layer.weight.device, options.rank
        self.in_nf4 = options.base == NF4
        if self.in_nf4:
            shape = packed_shape(self.out_features, self.in_features)
            packed = torch.empty(shape, dtype=torch.uint8, device=device)
            self.weight = nn.Parameter(packed, requires_grad=False)
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x, self.bias) + self.low_rank(x)

    def frozen(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x (…, in) to W x + bias, (…, out), in the dtype of autocast or of x."""
        if not self.in_nf4:
            return F.linear(x, self.weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _Nf4Product.apply(x, self.weight, bias)

    def low_rank(self, x: Tensor) -> Tensor:
        """Map x (…, in) to scale · B A x, (…, out)."""
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        # A x is scaled, because it has fewer elements than x or B A x.
        return F.linear(self.scale * F.linear(x, self.lora_A), self.lora_B)


class _Nf4Product(torch.autograd.Function):
    """W x + bias for packed W, see [Note: nf4]. Only x has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        # backward dequantises again, so that only the packed bytes stay in memory
        ctx.save_for_backward(packed)
        return F.linear(x, dequantise(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ dequantise(packed, gradients[0].dtype), None, None


def add_adapters(model: TextModel, options: AdapterSection, dtype: str = "bf16") -> None:
    """Freeze a model in place, and add adapters to linear layers of its blocks. Call it before any
    strategy is applied. `dtype`: `precision.dtype`. Raises RecipeError for unsuitable options."""
    layers = _targets(model, options)
    whole = _trained_whole(model, options, layers)
    narrow = (dtype if options.base == NF4 else options.base) == "bf16"
    for name, parameter in model.named_parameters():
        if name in whole:
            continue
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            # No update is added to a frozen weight, so rounding cannot lose one.
            parameter.data = parameter.data.to(torch.bfloat16 if narrow else torch.float32)
    for name, layer in layers.items():
        if options.base == NF4 and layer.in_features % BLOCK:
            raise RecipeError(
                f"model.adapter.base: nf4 needs a multiple of {BLOCK} columns, but {name} has "
                f"{layer.in_features}; set bf16, or name other layers in model.adapter.targets"
            )
        model.set_submodule(name, LoraLinear(layer, options))


def _targets(model: TextModel, options: AdapterSection) -> dict[str, nn.Linear]:
    inside = {module for block in model.blocks for module in block.modules()}
    routers = {
        getattr(module, key) for module in model.modules() for key in getattr(module, "precise", ())
    }
    known = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in inside - routers
    }
    if not known:
        raise RecipeError(
            f"model.adapter: the layers of {model.name} have no nn.Linear, which adapters need; "
            "remove it"
        )
    if options.targets == "all-linear":
        if model.experts:
            raise RecipeError(
                "model.adapter.targets: all-linear would leave out the experts, which cannot have "
                f"adapters yet; list the layers to adapt, out of {_listed(known)}"
            )
        return known
    chosen: dict[str, nn.Linear] = {}
    for target in options.targets:
        found = {name: layer for name, layer in known.items() if _is_suffix(name, target)}
        if not found:
            raise RecipeError(
                f"model.adapter.targets: no linear layer of a block is called {target}; name one "
                f"of {_listed(known)}. Other modules can be trained whole (model.adapter.also)"
            )
        chosen |= found
    return chosen


def _trained_whole(model: TextModel, options: AdapterSection, layers: Iterable[str]) -> set[str]:
    """FQNs of all parameters in the modules that `options.also` names. `layers` get adapters."""
    parameters, tied = set[str](), model.tied_copies
    heads = {name.split(".")[-2] for name in tied}
    for wanted in options.also:
        inside = {
            f"{module}.{name}"
            for module, one in model.named_modules()
            if module and _is_suffix(module, wanted)
            for name, _ in one.named_parameters()
        }
        modules = {name.rpartition(".")[0] for name in inside}
        problem = ""
        if wanted.rpartition(".")[2] in heads or {*tied.values()} & inside:
            problem = (
                f"{wanted} shares its weight with the other end of the model (embedding or output "
                "head), and an adapter's file cannot change both; remove it"
            )
        elif not inside:
            known = [name for name, module in model.named_modules() if module._parameters]
            problem = f"no module with parameters is called {wanted}; name one of {_listed(known)}"
        elif any(fnmatchcase(name, pattern) for name in modules for pattern in model.stacks):
            problem = f"{wanted} has experts, which cannot be trained whole yet; remove it"
        elif both := [layer for layer in layers if f"{layer}.weight" in inside]:
            problem = f"{wanted} contains {both[0]}, which gets an adapter; leave it out here, or "
            problem += "in model.adapter.targets"
        if problem:
            raise RecipeError(f"model.adapter.also: {problem}")
        parameters |= inside
    return parameters


def _is_suffix(name: str, wanted: str) -> bool:
    # as PEFT compares names
    return name == wanted or name.endswith(f".{wanted}")


def _listed(names: Iterable[str]) -> str:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join(ends[:_NAMED]) + (" and others" if len(ends) > _NAMED else "")


def draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Initial values of a matrix, as in PEFT: A is uniform between ± 1 / √in, B is zero."""
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    # Seeded by name, so that values are equal for all world sizes and strategies.
    generator = torch.Generator().manual_seed(stable_seed(seed, name))
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / shape[1] ** 0.5


def adapter_config(model: TextModel, options: AdapterSection, base: str) -> bytes:
    """PEFT's adapter_config.json. `base`: directory of the frozen weights."""
    linear = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    layers = {name for name, one in linear.items() if isinstance(one, LoraLinear)}
    ends = {name.rpartition(".")[2] for name in layers}
    # Suffixes identify the adapted layers if no other linear layer ends in one of them.
    every = {name for name in linear if name.rpartition(".")[2] in ends} == layers
    alpha = options.alpha
    return write_config(
        os.path.abspath(base),
        r=options.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # PEFT writes integers
        use_rslora=options.rslora,
        lora_dropout=options.dropout,
        target_modules=sorted(ends if every else layers),
        modules_to_save=sorted(options.also) or None,
    )
