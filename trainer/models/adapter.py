"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"): trains small
matrices beside frozen weights.

[Note: adapters] The small matrices A and B are parameters of the adapted linear layer itself,
beside its weight. So no wrapper changes the FQNs of other parameters. Strategies and checkpoints
treat A and B like all parameters; files name them as PEFT does.
"""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.format.nf4 import BLOCK, NF4, packed_shape
from checkpointing.format.peft import scale_of, write_config
from trainer.models import nf4_linear
from trainer.models.transformers_model import TextModel
from trainer.recipe import RecipeError
from trainer.recipe.sections import Adapter
from trainer.recipe.seeds import stable_seed

_NAMED = 8
"""Largest number of names listed in a message."""


class LoraLinear(nn.Linear):
    """y = W x + b + scale · B A x, with frozen W and b."""

    def __init__(self, layer: nn.Linear, options: Adapter) -> None:
        """Take over the weight and bias of `layer`. A and B are uninitialised float32 tensors. With
        `options.base: nf4` an uninitialised uint8 tensor for the packed codes replaces the
        weight."""
        # nn.Linear's constructor would allocate a second weight
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.sections = getattr(layer, "sections", ())
        self.weight, self.bias = layer.weight, layer.bias
        self.dropout = options.dropout
        self.scale = scale_of(options.rank, options.alpha, options.rslora)
        device, rank = layer.weight.device, options.rank
        if options.base == NF4:
            shape = packed_shape(self.out_features, self.in_features)
            packed = torch.empty(shape, dtype=torch.uint8, device=device)
            self.weight = nn.Parameter(packed, requires_grad=False)
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…, in) to (…, out)."""
        return self.frozen(x, self.bias) + self.low_rank(x)

    @property
    def in_nf4(self) -> bool:
        """Whether the weight is stored in nf4."""
        return self.weight.dtype == torch.uint8

    def frozen(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x (…, in) to W x + bias, (…, out)."""
        return (nf4_linear.linear if self.in_nf4 else F.linear)(x, self.weight, bias)

    def low_rank(self, x: Tensor) -> Tensor:
        """Map x (…, in) to scale · B A x, (…, out)."""
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        # A x is scaled, because it has fewer elements than x or B A x.
        return F.linear(self.scale * F.linear(x, self.lora_A), self.lora_B)


def add_adapters(model: TextModel, options: Adapter, dtype: str = "bf16") -> None:
    """Freeze a model in place, and add adapters to linear layers of its blocks; modules in
    `options.also` stay trained. Call it before any strategy is applied.

    Args:
        model: the model to change. With `options.base: nf4` it is on the meta device, and the
            codes are loaded later.
        options: the recipe's `model.adapter`. Its base is the format of frozen weights.
        dtype: `precision.dtype`. With base nf4, frozen weights that are not in nf4 are bf16 if this
            is bf16, otherwise float32.

    Raises:
        RecipeError: the model lacks a module that the options name, or the module cannot get an
            adapter or be trained.
    """
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
    for name in layers:
        parent, _, key = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if options.base == NF4 and layer.in_features % BLOCK:
            raise RecipeError(
                f"model.adapter.base: nf4 needs a multiple of {BLOCK} columns, but {name} has "
                f"{layer.in_features}; set bf16, or name other layers in model.adapter.targets"
            )
        setattr(model.get_submodule(parent), key, LoraLinear(layer, options))


def _targets(model: TextModel, options: Adapter) -> list[str]:
    """FQNs of the layers that get adapters. Raises RecipeError if a target names no layer."""
    inside = {module for block in model.blocks for module in block.modules()}
    routers = {
        getattr(module, key) for module in model.modules() for key in getattr(module, "precise", ())
    }
    known = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in inside - routers
    ]
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
    for target in options.targets:
        if not any(_is_suffix(name, target) for name in known):
            raise RecipeError(
                f"model.adapter.targets: no linear layer of a block is called {target}; name one "
                f"of {_listed(known)}. Other modules can be trained whole (model.adapter.also)"
            )
    return [name for name in known if any(_is_suffix(name, target) for target in options.targets)]


def _trained_whole(model: TextModel, options: Adapter, layers: Sequence[str]) -> set[str]:
    """FQNs of all parameters in the modules that `options.also` names. `layers`: FQNs of the layers
    that get adapters."""
    parameters = set[str]()
    tied = model.tied_copies
    heads = {name.split(".")[-2] for name in tied}
    for wanted in options.also:
        names = [name for name, _ in model.named_modules() if name and _is_suffix(name, wanted)]
        inside = {
            name
            for name, _ in model.named_parameters()
            if any(name.startswith(f"{module}.") for module in names)
        }
        if wanted.rpartition(".")[2] in heads or {*tied.values()} & inside:
            raise RecipeError(
                f"model.adapter.also: {wanted} shares its weight with the other end of the model "
                "(embedding or output head), and an adapter's file cannot change both; remove it"
            )
        if not inside:
            known = [name for name, module in model.named_modules() if module._parameters]
            raise RecipeError(
                f"model.adapter.also: no module with parameters is called {wanted}; name one of "
                f"{_listed(known)}"
            )
        modules = {name.rpartition(".")[0] for name in inside}
        if any(fnmatchcase(name, pattern) for name in modules for pattern in model.stacks):
            raise RecipeError(
                f"model.adapter.also: {wanted} has experts, which cannot be trained whole yet; "
                "remove it"
            )
        if both := [layer for layer in layers if f"{layer}.weight" in inside]:
            raise RecipeError(
                f"model.adapter.also: {wanted} contains {both[0]}, which gets an adapter; leave it "
                "out here, or in model.adapter.targets"
            )
        parameters |= inside
    return parameters


def _is_suffix(name: str, wanted: str) -> bool:
    """Whether `name` is `wanted`, or ends in a dot and `wanted`, as PEFT compares names."""
    return name == wanted or name.endswith(f".{wanted}")


def _listed(names: Sequence[str]) -> str:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join(ends[:_NAMED]) + (" and others" if len(ends) > _NAMED else "")


def draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Initial values of the matrix A or B called `name`, as in PEFT: A is uniform between -1 / √in
    and 1 / √in, B is zero."""
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    # Seeded by name, so that values are equal for all world sizes and strategies.
    generator = torch.Generator().manual_seed(stable_seed(seed, name))
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / shape[1] ** 0.5


def adapter_config(model: TextModel, options: Adapter, base: str) -> bytes:
    """Contents of PEFT's adapter_config.json for a model with adapters. `base`: directory of the
    frozen weights."""
    layers = {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    ends = {name.rpartition(".")[2] for name in layers}
    alike = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    # Suffixes identify the adapted layers if no other linear layer ends in one of them.
    every = {name for name in alike if name.rpartition(".")[2] in ends} == layers
    return write_config(
        base=os.path.abspath(base),
        rank=options.rank,
        alpha=options.alpha,
        rslora=options.rslora,
        dropout=options.dropout,
        targets=sorted(ends if every else layers),
        whole=options.also,
    )
