"""What one model family of Hugging Face transformers is: a value, made in one file."""

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

Draw = Callable[[str, tuple[int, ...], Architecture, int], Tensor]
"""(FQN, global shape, architecture, seed of the run) → the whole initial tensor of a parameter:
float32, on the CPU. A pure function, so that every world size and strategy starts alike."""

TensorPlan = Mapping[str, str]
"""Pattern of the FQN of modules → how they are cut among tensor-parallel ranks, see [Note: tensor
parallelism] in trainer/parallel/tensor.py. The first pattern that matches counts."""

AfterStep = Callable[[nn.Module], None]
"""Called on all ranks after each optimizer step, with what is trained: the model, or a wrapper."""

BesideLoss = Callable[[Sequence[Tensor], Architecture], Mapping[str, tuple[Tensor, float]]]
"""(what the blocks returned beside x, architecture) → scalars by name, each with its weight."""


def init_parameter(
    name: str, shape: tuple[int, ...], architecture: Architecture, seed: int
) -> Tensor:
    """See `Draw`: norms are ones, biases zeros, all else is normal(0, initializer_range)."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(stable_seed(seed, name))
    return torch.empty(shape).normal_(0, architecture.initializer_range, generator=generator)


def no_idle_parameters(architecture: Architecture) -> int:
    """A dense model uses each parameter for each token."""
    return 0


@dataclass(frozen=True)
class LayerKind:
    """In what a layer differs from others of its model."""

    window: int | None = None
    """How many tokens each token sees, itself included; None: all that come before it."""

    rotary: bool = True
    """Whether queries and keys rotate; else a block gets None in place of the rotary table."""

    theta: float | None = None
    """Base of its rotary wavelengths, which are not stretched; None: as of the model."""

    def reach(self, length: int) -> int:
        """Most tokens that one token sees in a sequence."""
        return length if self.window is None else min(self.window, length)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How models of one `model_type` are read, built, drawn, counted and written.

    Parameters are named as transformers names them, so checkpoints need no conversion.
    """

    model_type: str
    """As in config.json."""

    model_class: str
    """Name of the transformers class, for `architectures`."""

    block: Callable[[Architecture], nn.Module]
    """Makes one of the repeated parts. It is called with x (B, T, D), the rotary table and the
    documents (see `trainer.models.decoder.Block`), and returns x, or (x, a tensor of statistics),
    which `beside_loss` gets."""

    fixed: Mapping[str, Any]
    """Keys of which this family computes one value only; written, and refused when different."""

    unread: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are written for transformers, whose default may not fit the model, and not read."""

    defaults: Mapping[str, Any]
    """What transformers takes for a key that is absent."""

    heads_divide_hidden: bool
    """Whether transformers insists on hidden_size being a multiple of num_attention_heads."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that only this family has, with their defaults: in a recipe
    `model.architecture.options`. Where the default is None, the family looks at the type."""

    layers: Callable[[Architecture], Sequence[LayerKind]] | None = None
    """(architecture) → in what each layer differs from others; raises ValueError, `KEY: …`, for an
    option that makes no sense. None: in nothing."""

    rope_types: Mapping[str, str] = field(default_factory=dict)
    """Another name for a type of rotary scaling in files of this family → its name."""

    other_names: Mapping[str, str] = field(default_factory=dict)
    """Second name of a key in config.json → its name here, for files that have the second alone."""

    draw: Draw = init_parameter
    """Initial weights."""

    groups: Sequence[ParameterGroup] = ()
    """Which parameters decay, or learn, otherwise than by their shape; those of the recipe's
    `optimizer.groups` come first."""

    idle_parameters: Callable[[Architecture], int] = no_idle_parameters
    """How many parameters of matrix products a token does not meet: experts of others."""

    beside_loss: BesideLoss | None = None
    """Scalars of the statistics of the blocks. They are recorded, and added to the cross-entropy in
    training, each times its weight; with a weight of 0 they are only recorded."""

    statistics: Callable[[Architecture, int], tuple[int, ...]] | None = None
    """(architecture, sequences) → the shape of what each block returns beside x, float32. Given if
    they are means over the tokens of each sequence, in all blocks: then ranks can have a part of
    the sequences, or of the blocks, each."""

    after_step: AfterStep | None = None
    """For what changes in the model besides by the optimizer."""

    stacks: Sequence[str] = ()
    """Patterns of the FQN of modules whose parameters stack what published files keep apart:
    `a.experts.w` (E, …) is there `a.experts.0.w.weight` and so on. Checkpoints hold them so."""

    norm: Callable[[int, float], nn.Module] | None = None
    """Makes the norm below the output head, of (size, eps); None: an RMSNorm."""

    embedding_scale: Callable[[Architecture], float] | None = None
    """What embeddings are multiplied by."""

    tensor_plan: TensorPlan | None = None
    """For `strategy.tp`; of usual blocks, `trainer.TENSOR_PLAN`. None: it has none."""

    def __post_init__(self) -> None:
        for rule in self.groups:
            if not isinstance(rule, ParameterGroup):
                raise TypeError(f"groups: {rule!r} is no trainer.ParameterGroup(match=…, …)")

    def complete(self, architecture: Architecture) -> Architecture:
        """The architecture with all `options`.

        Raises:
            RecipeError: it has others, or of another type.
        """
        given = architecture.options or {}
        for key, value in given.items():
            if key not in self.options:
                known = ", ".join(self.options) or "none"
                raise RecipeError(
                    f"model.architecture.options: {self.model_type} has no {key}; known: {known}"
                )
            default = self.options[key]
            if default is None:
                continue
            kinds = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
                raise RecipeError(
                    f"model.architecture.options.{key}: {value!r} is no {type(default).__name__}, "
                    f"as {default!r} is; mend it"
                )
        complete = replace(architecture, options={**self.options, **given} or None)
        try:
            self.kinds_of_layers(complete)
        except ValueError as error:
            raise RecipeError(f"model.architecture.options.{error}") from error
        return complete

    def kinds_of_layers(self, architecture: Architecture) -> Sequence[LayerKind]:
        """In what each layer differs from others.

        Raises:
            ValueError: an option of the family makes no sense.
        """
        if self.layers is None:
            return [LayerKind()] * architecture.num_hidden_layers
        return self.layers(architecture)

    def flops_per_token(
        self, architecture: Architecture, parameters: int, seq_len: int, frozen: int = 0
    ) -> float:
        """Floating-point operations of forward and backward per token: 6 per parameter of a matrix
        product that a token meets, and 12 x layers x heads x head_dim x seq_len for attention
        (Chowdhery et al. 2022, appendix B; causality is not discounted, but a window is). `frozen`:
        how many of the parameters of products have no gradient, which leaves 4."""
        with refusing("model.family", f"idle_parameters of {self.model_type}"):
            idle = self.idle_parameters(architecture)
        products = parameters - idle
        if not architecture.tie_word_embeddings:
            products -= architecture.vocab_size * architecture.hidden_size  # a look-up, no product
        heads = architecture.num_attention_heads * architecture.head_dim
        without = 2.0 * max(0, frozen - idle)
        seen = sum(kind.reach(seq_len) for kind in self.kinds_of_layers(architecture))
        return 6.0 * products - without + 12 * heads * seen


class UnsupportedError(ValueError):
    """A model is described well, but no family that comes with Perdure computes it; `reason` says
    why."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def window_of(architecture: Architecture) -> int | None:
    """The option `sliding_window`.

    Raises:
        ValueError: it is neither a whole number above 0, nor null.
    """
    window = (architecture.options or {}).get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window: {window!r} is no whole number above 0, and not null")
    return window


def kinds_by_window(
    architecture: Architecture,
    window: int | None,
    slides: Sequence[bool],
    rotary: Sequence[bool] | None = None,
) -> list[LayerKind]:
    """Layers that see a window, or all.

    Args:
        architecture: its option `layer_types` counts before `slides`.
        window: in tokens, of those that see one; None: no layer does.
        slides: for each layer, whether it sees a window.
        rotary: for each layer, whether it rotates; None: all do.

    Raises:
        ValueError: `layer_types` makes no sense.
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
                "layers; mend it"
            )
        slides = [kind == "sliding_attention" for kind in types]
        if window is None and any(slides[:count]):
            raise ValueError(
                "layer_types: has sliding_attention, but no sliding_window is used; write "
                "full_attention, or say how long the window is"
            )
    return [
        LayerKind(window if slides[number] else None, rotary is None or bool(rotary[number]))
        for number in range(count)
    ]


def family_of(model_type: Any) -> Family:
    """A family that comes with Perdure.

    Raises:
        UnsupportedError: there is none of this name.
    """
    known = bundled_families()
    if model_type not in known:
        names = " or ".join(map(repr, known))
        raise UnsupportedError(
            f"model_type={model_type!r} is not supported, only {names}; transformers trains others "
            "from model.init_from (model.implementation: auto), or write a family of your own "
            "(docs/extending.md)",
            f"Perdure has no family {model_type!r}",
        )
    family: Family = importlib.import_module(f"trainer.models.families.{model_type}").FAMILY
    return family


def find_family(name: str) -> Family:
    """`model.family`.

    Raises:
        RecipeError: it is not there, or no family.
    """
    family = import_factory("model.family", name)
    if not isinstance(family, Family):
        raise RecipeError(
            f"model.family: {name} is a {type(family).__name__}, not a trainer.Family"
        )
    return family
