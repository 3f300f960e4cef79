"""Builds the language model of a recipe: one of Perdure's decoders, or a model of transformers."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from checkpointing.format.peft import is_part
from checkpointing.storage.place import location
from checkpointing.storage.steps import storage_of
from trainer.data.loader import DocumentForm
from trainer.models import Decoder, Family, read_config
from trainer.models.adapter import add_adapters
from trainer.models.adapter import draw as draw_part
from trainer.models.family import family_of, find_family
from trainer.models.hf import UnsupportedConfigError
from trainer.models.transformers_model import (
    TextModel,
    TransformersModel,
    build_theirs,
    check_installed,
)
from trainer.recipe import Recipe, RecipeError, strategies
from trainer.recipe.architecture import Architecture
from trainer.recipe.factory import refusing
from trainer.tasks.model_blocks import repeated_blocks
from trainer.tasks.own_model import keep_in_float32

if TYPE_CHECKING:
    from trainer.parallel.parallel_model import ParallelModel
    from trainer.parallel.parallelize import Fill

AfterStep = Callable[["ParallelModel", int], None]
"""(trained model, number of samples consumed so far) → None."""


def build_text_model(recipe: Recipe) -> "tuple[TextModel, Fill, list[str]]":
    """Build the language model of a recipe on the meta device. Returns the model, a function that
    returns initial weights, and notes for the user. Raises RecipeError or ModelConfigError if the
    model cannot be built."""
    reason = reason_for_theirs(recipe)
    built = _decoder(recipe) if reason is None else _of_transformers(recipe, reason)
    model, fill, notes = built
    model.preference = recipe.objective if recipe.objective.compares else None
    if recipe.model.adapter:
        add_adapters(model, recipe.model.adapter, recipe.precision.dtype)
    return model, fill, notes


def reason_for_theirs(recipe: Recipe) -> str | None:
    """Return why the model of a recipe is one of transformers; None if it is Perdure's decoder."""
    model = recipe.model
    if not model.init_from or model.factory or model.family or model.implementation == "perdure":
        return None
    if model.implementation == "transformers":
        return "model.implementation=transformers"
    try:
        _read_init_config(recipe, None)
    except UnsupportedConfigError as error:
        return error.reason
    return None


def _of_transformers(recipe: Recipe, reason: str) -> "tuple[TransformersModel, Fill, list[str]]":
    model = build_theirs(location(recipe.model.init_from or ""), reason, repeated_blocks)
    theirs, strategy = f"{model.name} of transformers", recipe.strategy
    problems = [
        f"strategy.{key}: ranks do not compute {model.name} together, because it is a model of "
        f"transformers; set strategy.{key}=1"
        for key, ranks in strategies.sizes(strategy).items()
        if ranks > 1
    ]
    if recipe.model.attention != "auto":
        problems.append(f"model.attention: {theirs} has attention of its own; set auto")
    if strategy.activation_checkpointing == "selective":
        problems.append(
            f"strategy.activation_checkpointing: selective keeps results that {theirs} may change "
            "in place; set full"
        )
    mixes = model.mixes_documents() if documents_for(recipe) else None
    if mixes and not recipe.data.factory:
        problems.append(
            f"data.document_mask: {theirs} {mixes}, so documents would attend to each other; set "
            "data.document_mask=false to train it in this way"
        )
    if problems:
        raise RecipeError("\n".join(problems))
    notes = [f"{model.name} of transformers {check_installed(reason)} computes it: {reason}"]
    if model.experts:
        notes.append(
            f"{model.name} has experts, but is trained without the auxiliary loss that balances "
            "them: the cross-entropy alone trains its routers"
        )
    notes += keep_in_float32(recipe, model, model.name)

    def fill(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return draw_part(name, shape, recipe.run.seed)  # of adapters: other weights are loaded

    return model, fill, notes


def _decoder(recipe: Recipe) -> "tuple[Decoder, Fill, list[str]]":
    family = find_family(recipe.model.family) if recipe.model.family else None
    if given := recipe.model.architecture:
        family = family or family_of(given.model_type)
        if given.model_type != family.model_type:
            raise RecipeError(
                f"model.architecture.model_type: {given.model_type}, but model.family="
                f"{recipe.model.family} has {family.model_type}; set this model_type"
            )
        architecture = family.complete(given)
    else:
        architecture = _read_init_config(recipe, family)
        family = family or family_of(architecture.model_type)
    named = recipe.model.family or architecture.model_type
    # On the meta device, so that no rank ever has the whole model in memory.
    with torch.device("meta"), refusing("model.family", named):
        decoder = Decoder(architecture, recipe.model.attention, family)
    if any(not isinstance(block, nn.Module) for block in decoder.blocks):
        raise RecipeError(
            f"model.family: a block of {named} is not an nn.Module; return one from the family's "
            "block"
        )
    draw, seed = family.draw, recipe.run.seed
    of_formats = keep_in_float32(recipe, decoder, named)

    def fill(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if recipe.model.adapter and is_part(name):
            return draw_part(name, shape, seed)
        with refusing("model.family", f"draw of {named}"):
            drawn = draw(name, shape, architecture, seed)
        if getattr(drawn, "shape", None) != shape:
            actual = getattr(drawn, "shape", type(drawn).__name__)
            raise RecipeError(
                f"model.family: draw of {named} gives {actual} for {name}, not a tensor of shape "
                f"{shape}"
            )
        return drawn

    return decoder, fill, of_formats


def _read_init_config(recipe: Recipe, family: Family | None) -> Architecture:
    directory = location(recipe.model.init_from or "")
    if not storage_of(directory).exists(directory / "config.json"):
        raise RecipeError(
            f"model.init_from: {directory} has no config.json; give the directory of a Hugging "
            "Face checkpoint"
        )
    return read_config(directory, family)


def after_step_of(recipe: Recipe, family: Family) -> AfterStep | None:
    """Return the function by which the family changes the model after a step; None if it has none.
    None also with an adapter, under which the weights are frozen."""
    change = family.after_step
    if change is None or recipe.model.adapter:
        return None

    def after(model: "ParallelModel", _consumed: int) -> None:
        with refusing("model.family", f"after_step of {family.model_type}"):
            change(model.module)

    return after


def documents_for(recipe: Recipe) -> DocumentForm | None:
    """Return the form in which a recipe's model gets document boundaries; None if it gets none."""
    if not recipe.data.document_mask:
        return None
    theirs = recipe.model.factory or reason_for_theirs(recipe)
    # cu_seqlens need no synchronisation with the GPU, but only Perdure's decoders accept them.
    return "document_ids" if theirs else "cu_seqlens"
