"""Trains a model on one rank: recipe → model, data, strategy → loop → metrics. Exports the names
that a user's own code needs; they load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data import Order, Samples, Stream
    from trainer.models.attention import AttentionDocuments
    from trainer.models.decoder import MLP, TENSOR_PLAN, Attention, Block, RMSNorm
    from trainer.models.family import Family, LayerKind, init_parameter
    from trainer.models.loss import HeadLoss
    from trainer.plan import Prediction, predict
    from trainer.recipe import ParameterGroup, Recipe, RecipeError, load_recipe
    from trainer.recipe.architecture import Architecture
    from trainer.run.events import End, Restart, RollBack, Save, Start, Step, Validation
    from trainer.run.sinks import Sink

_NAMES = {
    "recipe": "Recipe RecipeError load_recipe ParameterGroup",
    "plan": "Prediction predict",
    "data": "Order Samples Stream",
    "models.family": "Family LayerKind init_parameter",
    "recipe.architecture": "Architecture",
    "models.decoder": "Block Attention MLP RMSNorm TENSOR_PLAN",
    "models.attention": "AttentionDocuments",
    "models.loss": "HeadLoss",
    "run.sinks": "Sink",
    "run.events": "Start Restart Step RollBack Validation Save End",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(f"trainer.{_HOME[name]}"), name)
