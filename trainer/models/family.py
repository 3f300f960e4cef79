"""`Family`: the description of one model family of Hugging Face transformers."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.recipe import ParameterGroup, RecipeError
from trainer.recipe.architecture import Architecture, bundled_families
from trainer.recipe.factory import import_factory, refusing
from trainer.recipe.seeds import stable_seed

DrawParameter = Callable[[str, tuple[int, ...], Architecture, int], Tensor]
"""Maps (FQN, global shape, architecture, seed of the run) to the whole initial tensor of a
parameter: float32, on the CPU. A pure function, so that initial weights are equal for all world
sizes and strategies."""

TensorPlan = Mapping[str, str]
"""Pattern of module FQNs → how these modules are divided among tensor-parallel ranks, see [Note:
tensor parallelism] in trainer/parallel/tensor.py. The first matching pattern counts."""

BesideLoss = Callable[[Sequence[Tensor], Architecture], Mapping[str, tuple[Tensor, float]]]
"""Maps (statistics returned by the blocks, architecture) to scalars by name, each with its weight
in the loss."""


def init_parameter(
    name: str, shape: tuple[int, ...], architecture: Architecture, seed: int
) -> Tensor:
    """Draw the initial values of a parameter: ones for the weight of a norm, zeros for a bias,
    otherwise normal(0, initializer_range). A `DrawParameter` function."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(stable_seed(seed, name))
    return torch.empty(shape).normal_(0, architecture.initializer_range, generator=generator)


def no_idle_parameters(architecture: Architecture) -> int:
    """Return 0: a dense model uses each parameter for each token."""
    return 0


@dataclass(frozen=True)
class LayerKind:
    """Attention window and rotary positions of a layer, for models whose layers differ."""

    window: int | None = None
    """Number of tokens that each token sees, itself included; None: all before it."""

    rotary: bool = True
    """Whether queries and keys rotate; if not, the block receives None as its rotary table."""

    theta: float | None = None
    """Base of the layer's rotary wavelengths, without scaling; None: the model's."""

    def reach(self, length: int) -> int:
        """Return the most tokens that one token sees in a sequence of `length` tokens."""
        return length if self.window is None else min(self.window, length)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How models of one `model_type` are read, built, initialised and written, and what they
    compute. Parameters are named as in transformers, so checkpoints need no conversion."""

    model_type: str
    model_class: str
    """Name of the transformers class, for `architectures` in config.json."""

    block: Callable[[Architecture], nn.Module]
    """Builds one of the repeated parts. A block maps x (B, T, D), the rotary table and the
    documents (see `trainer.models.decoder.Block`) to x, or to (x, a tensor of statistics) for
    `beside_loss`."""

    fixed: Mapping[str, Any]
    """Keys of config.json, each with the only value that this family supports. The value is
    written, and other values are refused when a file is read."""

    unread: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that are written but not read. They are written because transformers'
    defaults may not fit the model."""

    defaults: Mapping[str, Any]
    """transformers' defaults for keys that a config.json lacks."""

    heads_divide_hidden: bool
    """Whether transformers requires hidden_size to be a multiple of num_attention_heads."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that only this family has, with their defaults:
    `model.architecture.options` in a recipe. The family itself checks the type of a key whose
    default is None."""

    layers: Callable[[Architecture], Sequence[LayerKind]] | None = None
    """Maps an architecture to the kind of each layer. Raises ValueError, with a message `KEY: …`,
    for an invalid option. None: all layers are equal."""

    rope_types: Mapping[str, str] = field(default_factory=dict)
    """Other names of rotary scaling types in files of this family → their usual names."""

    other_names: Mapping[str, str] = field(default_factory=dict)
    """Alternative key in config.json → its usual name, for files that have only the former."""

    draw: DrawParameter = init_parameter

    groups: Sequence[ParameterGroup] = ()
    """Parameters with their own decay or learning rate; `optimizer.groups` has priority."""

    idle_parameters: Callable[[Architecture], int] = no_idle_parameters
    """Returns the number of matrix parameters of experts that a token does not use."""

    beside_loss: BesideLoss | None = None
    """Computes scalars from the blocks' statistics. They are recorded. In training they are added
    to the cross-entropy, each times its weight."""

    statistics: Callable[[Architecture, int], tuple[int, ...]] | None = None
    """Maps (architecture, number of sequences) to the shape of the float32 statistics that each
    block returns. Set only if these are means over the tokens of each sequence, for all blocks:
    then ranks can divide the sequences (cp) or the blocks (pp)."""

    after_step: Callable[[nn.Module], None] | None = None
    """Called on all ranks after each optimizer step, with the trained model or its wrapper."""

    stacks: Sequence[str] = ()
    """Patterns of FQNs of modules each of whose parameters (E, …) stacks those of E experts.
    `strategy.ep` divides the experts."""

    stacked_in_files: bool = False
    """Whether checkpoints store the parameters of `stacks` stacked. Otherwise they store the rows
    of `a.experts.w` separately, as `a.experts.0.w.weight` and so on."""

    sinks: bool = False
    """Whether attention has sinks, see [Note: sinks] in trainer/models/attention.py."""

    norm: Callable[[int, float], nn.Module] | None = None
    """Maps (size, eps) to the norm below the output head; None: an RMSNorm."""

    embedding_scale: Callable[[Architecture], float] | None = None
    """Returns the factor by which embeddings are multiplied; None: 1."""

    tensor_plan: TensorPlan | None = None
    """Tensor plan for `strategy.tp`; `trainer.TENSOR_PLAN` fits usual blocks. None: tp is
    rejected."""

    def __post_init__(self) -> None:
        for rule in self.groups:
            if not isinstance(rule, ParameterGroup):
                raise TypeError(f"Family.groups: {rule!r} is no trainer.ParameterGroup(match=…, …)")

    def complete(self, architecture: Architecture) -> Architecture:
        """Return the architecture with defaults for missing `options`. Raises RecipeError if an
        option is unknown, or of the wrong type."""
        options = architecture.options or {}
        for key, value in options.items():
            if key not in self.options:
                known = ", ".join(self.options) or "none"
                raise RecipeError(
                    f"model.architecture.options: {self.model_type} has no {key}; known: {known}"
                )
            default = self.options[key]
            if default is None:
                continue
            kinds = (int, float) if isinstance(default, float) else type(default)
            # bool is a subclass of int.
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
                raise RecipeError(
                    f"model.architecture.options.{key}: {value!r} is no {type(default).__name__}; "
                    f"set one, such as the default {default!r}"
                )
        complete = replace(architecture, options={**self.options, **options} or None)
        try:
            self.kinds_of_layers(complete)
        except ValueError as error:
            raise RecipeError(f"model.architecture.options.{error}") from error
        return complete

    def kinds_of_layers(self, architecture: Architecture) -> Sequence[LayerKind]:
        """Kind of each layer. Raises ValueError if an option of the family is invalid."""
        if self.layers is None:
            return [LayerKind()] * architecture.num_hidden_layers
        return self.layers(architecture)

    def flops_per_token(
        self, architecture: Architecture, parameters: int, seq_len: int, frozen: int = 0
    ) -> float:
        """Return the floating-point operations of forward and backward per token: 6 per matrix
        parameter that a token uses, and 12 x layers x heads x head_dim x seq_len for attention
        (Chowdhery et al. 2022, appendix B). Causality is not discounted, but a window is. `frozen`:
        number of matrix parameters without a gradient, which need 4 each."""
        with refusing("model.family", f"idle_parameters of {self.model_type}"):
            idle = self.idle_parameters(architecture)
        products = parameters - idle
        if not architecture.tie_word_embeddings:
            # looking up an embedding needs no matrix product
            products -= architecture.vocab_size * architecture.hidden_size
        heads = architecture.num_attention_heads * architecture.head_dim
        without = 2.0 * max(0, frozen - idle)
        seen = sum(kind.reach(seq_len) for kind in self.kinds_of_layers(architecture))
        return 6.0 * products - without + 12 * heads * seen


class UnsupportedModelError(ValueError):
    """No bundled family supports the model of a well-formed config.json, or it is of another family
    than the caller requires. `reason` says why, without the file's name and the remedy."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def window_of(architecture: Architecture) -> int | None:
    """Return the option `sliding_window`. Raises ValueError if it is invalid."""
    window = (architecture.options or {}).get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window: {window!r} is no whole number above 0; set one, or null")
    return window


def kinds_by_window(
    architecture: Architecture,
    window: int | None,
    slides: Sequence[bool],
    rotary: Sequence[bool] | None = None,
) -> list[LayerKind]:
    """Return the kind of each layer, for models in which some layers have the window. Raises
    ValueError if the option `layer_types`, which overrides `slides`, is invalid.

    Args:
        window: number of tokens that a token sees, itself included; None: no layer has a window.
        slides: for each layer, whether it has a window.
        rotary: for each layer, whether it rotates queries and keys; None: all do.
    """
    count, types = architecture.num_hidden_layers, (architecture.options or {}).get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if (
            not isinstance(types, list | tuple)
            or len(types) < count
            or any(kind not in known for kind in types)
        ):
            raise ValueError(
                f"layer_types: {types!r} does not name {' or '.join(known)} for each of {count} "
                "layers; correct it"
            )
        slides = [kind == "sliding_attention" for kind in types]
        if window is None and any(slides[:count]):
            raise ValueError(
                "layer_types: has sliding_attention, but no sliding_window is used; write "
                "full_attention, or set sliding_window"
            )
    return [
        LayerKind(window if slides[number] else None, rotary is None or bool(rotary[number]))
        for number in range(count)
    ]


def family_of(model_type: Any) -> Family:
    """Return the bundled family of a `model_type`. Raises UnsupportedModelError."""
    known = bundled_families()
    if model_type not in known:
        names = " or ".join(map(repr, known))
        raise UnsupportedModelError(
            f"model_type={model_type!r} is not supported, only {names}; transformers trains others "
            "from model.init_from (model.implementation: auto), or write a family of your own "
            "(docs/extending.md)",
            f"Perdure has no family {model_type!r}",
        )
    family: Family = importlib.import_module(f"trainer.models.families.{model_type}").FAMILY
    return family


def find_family(name: str) -> Family:
    """Import the family that `model.family` names. Raises RecipeError."""
    family = import_factory("model.family", name)
    if not isinstance(family, Family):
        raise RecipeError(
            f"model.family: {name} is a {type(family).__name__}, not a trainer.Family"
        )
    return family
