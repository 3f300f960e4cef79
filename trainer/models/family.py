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
    """See `Draw`: norms are ones, everything else is normal(0, initializer_range)."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(stable_seed(seed, name))
    return torch.empty(shape).normal_(0, architecture.initializer_range, generator=generator)


def no_idle_parameters(architecture: Architecture) -> int:
    """A dense model uses each parameter for each token."""
    return 0


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

    defaults: Mapping[str, Any]
    """What transformers takes for a key that is absent."""

    heads_divide_hidden: bool
    """Whether transformers insists on hidden_size being a multiple of num_attention_heads."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that only this family has, with their defaults: in a recipe
    `model.architecture.options`."""

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
            kinds = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
                raise RecipeError(
                    f"model.architecture.options.{key}: {value!r} is no {type(default).__name__}, "
                    f"as {default!r} is; mend it"
                )
        return replace(architecture, options={**self.options, **given} or None)

    def flops_per_token(
        self, architecture: Architecture, parameters: int, seq_len: int, frozen: int = 0
    ) -> float:
        """Floating-point operations of forward and backward per token: 6 per parameter of a matrix
        product that a token meets, and 12 x layers x heads x head_dim x seq_len for attention
        (Chowdhery et al. 2022, appendix B; causality is not discounted). `frozen`: how many of the
        parameters of products have no gradient, which leaves 4."""
        with refusing("model.family", f"idle_parameters of {self.model_type}"):
            idle = self.idle_parameters(architecture)
        products = parameters - idle
        if not architecture.tie_word_embeddings:
            products -= architecture.vocab_size * architecture.hidden_size  # a look-up, no product
        heads = architecture.num_attention_heads * architecture.head_dim
        without = 2.0 * max(0, frozen - idle)
        return 6.0 * products - without + 12 * architecture.num_hidden_layers * heads * seq_len


def family_of(model_type: Any) -> Family:
    """A family that comes with Perdure.

    Raises:
        ValueError: there is none of this name.
    """
    known = bundled_families()
    if model_type not in known:
        names = " or ".join(map(repr, known))
        raise ValueError(
            f"model_type={model_type!r} is not supported, only {names}; write a family of your own "
            "or train such a model through model.factory (docs/extending.md has both)"
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
