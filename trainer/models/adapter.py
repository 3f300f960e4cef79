"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"): small matrices are
trained beside weights that stay as they are.

[Note: adapters] A and B are parameters of the linear layer itself, beside its weight. So names of
the model under the adapter stay what they are, no wrapper comes between, and whatever cuts, shards
or saves parameters treats them as any others. In files they have PEFT's names.
"""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.format.nf4 import BLOCK, NF4, packed_shape
from checkpointing.format.peft import scale_of, write_config
from trainer.models import nf4
from trainer.models.transformers_model import TextModel
from trainer.recipe import RecipeError
from trainer.recipe.sections import Adapter
from trainer.recipe.seeds import stable_seed

_NAMED = 8
"""How many names a message lists."""


class LoraLinear(nn.Linear):
    """y = W x + b + scale · B A x, where W and b are frozen."""

    def __init__(self, given: nn.Linear, options: Adapter) -> None:
        """`given` gives its weight and bias; A and B are float32, and have no values yet. Nor has
        the weight in nf4, which is bytes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = given.in_features, given.out_features
        self.sections = getattr(given, "sections", ())
        self.weight, self.bias = given.weight, given.bias
        self.dropout = options.dropout
        self.scale = scale_of(options.rank, options.alpha, options.rslora)
        device, rank = given.weight.device, options.rank
        if options.base == NF4:
            shape = packed_shape(self.out_features, self.in_features)
            packed = torch.empty(shape, dtype=torch.uint8, device=device)
            self.weight = nn.Parameter(packed, requires_grad=False)
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return self.frozen(x, self.bias) + self.low_rank(x)

    @property
    def in_nf4(self) -> bool:
        """Whether the weight is kept in nf4."""
        return self.weight.dtype == torch.uint8

    def frozen(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """W x, plus a bias; (…, in) → (…, out)."""
        return (nf4.linear if self.in_nf4 else F.linear)(x, self.weight, bias)

    def low_rank(self, x: Tensor) -> Tensor:
        """scale · B A x, (…, in) → (…, out)."""
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        # The smaller of the two results is scaled.
        return F.linear(self.scale * F.linear(x, self.lora_A), self.lora_B)


def add_adapters(model: TextModel, options: Adapter, dtype: str = "bf16") -> None:
    """Freeze a model, in place, and give linear layers of its blocks adapters; what
    `options.also` names stays trained. To be called before anything is cut.

    Args:
        model: on the meta device, if its base is nf4: codes have no values yet.
        options: which layers, and how.
        dtype: `precision.dtype`. What nf4 does not keep is kept in bf16 if that is computed with.

    Raises:
        RecipeError: the options name what is not there, or cannot be trained so.
    """
    layers = _targets(model, options)
    whole = _trained_whole(model, options, layers)
    narrow = (dtype if options.base == NF4 else options.base) == "bf16"
    for name, parameter in model.named_parameters():
        if name in whole:
            continue
        parameter.requires_grad_(False)
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16 if narrow else torch.float32)
    for name in layers:
        parent, _, key = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if options.base == NF4 and layer.in_features % BLOCK:
            raise RecipeError(
                f"model.adapter.base: nf4 has blocks of {BLOCK} columns, but {name} has "
                f"{layer.in_features}; set bf16, or name other layers in model.adapter.targets"
            )
        setattr(model.get_submodule(parent), key, LoraLinear(layer, options))


def _targets(model: TextModel, options: Adapter) -> list[str]:
    """FQNs of the layers that get adapters."""
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
            f"model.adapter: the layers of {model.name} have no nn.Linear, which adapters are for; "
            "remove it"
        )
    if options.targets == "all-linear":
        if model.experts:
            raise RecipeError(
                "model.adapter.targets: all-linear would leave out the experts, which have no "
                f"adapters yet; name layers: {_listed(known)}"
            )
        return known
    for target in options.targets:
        if not any(_ends(name, target) for name in known):
            raise RecipeError(
                f"model.adapter.targets: no linear layer of a block is called {target}; they are "
                f"called {_listed(known)}; other modules are trained whole (model.adapter.also)"
            )
    return [name for name in known if any(_ends(name, target) for target in options.targets)]


def _trained_whole(model: TextModel, options: Adapter, layers: Sequence[str]) -> set[str]:
    """FQNs of the parameters that `options.also` names, beside those of `layers` with adapters."""
    found = set[str]()
    tied = model.tied_copies
    heads = {name.split(".")[-2] for name in tied}
    for wanted in options.also:
        names = [name for name, _ in model.named_modules() if name and _ends(name, wanted)]
        inside = {
            name
            for name, _ in model.named_parameters()
            if any(name.startswith(f"{module}.") for module in names)
        }
        if wanted.rpartition(".")[2] in heads or {*tied.values()} & inside:
            raise RecipeError(
                f"model.adapter.also: {wanted} is tied to the other end of the model, so to train "
                "it would change both, which no adapter says; remove it"
            )
        if not inside:
            known = [name for name, module in model.named_modules() if module._parameters]
            raise RecipeError(
                f"model.adapter.also: no module with parameters is called {wanted}; they are "
                f"called {_listed(known)}"
            )
        modules = {name.rpartition(".")[0] for name in inside}
        if any(fnmatchcase(name, pattern) for name in modules for pattern in model.stacks):
            raise RecipeError(
                f"model.adapter.also: {wanted} has experts, which cannot be trained so yet; "
                "remove it"
            )
        if both := [layer for layer in layers if f"{layer}.weight" in inside]:
            raise RecipeError(
                f"model.adapter.also: {wanted} has {both[0]}, which gets an adapter; name it in "
                "one of the two"
            )
        found |= inside
    return found


def _ends(name: str, wanted: str) -> bool:
    """Whether a name is, or ends with, what somebody calls it; as PEFT does it."""
    return name == wanted or name.endswith(f".{wanted}")


def _listed(names: Sequence[str]) -> str:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join(ends[:_NAMED]) + (" and others" if len(ends) > _NAMED else "")


def draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Initial values of A or B by FQN and shape, as PEFT's: A uniform within 1 / √in, B zeros."""
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(stable_seed(seed, name))
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / shape[1] ** 0.5


def adapter_config(model: TextModel, options: Adapter, base: str) -> bytes:
    """adapter_config.json of a model that has adapters, over the one in directory `base`."""
    layers = {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    ends = {name.rpartition(".")[2] for name in layers}
    alike = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    # As short as the names of other layers allow.
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
