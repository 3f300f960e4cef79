"""What one rank does: recipe → model, data, parallel strategy → the loop → metrics.

Public names are those that a file of the user's needs. They load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data import Samples
    from trainer.models.attention import Documents
    from trainer.models.decoder import MLP, TENSOR_PLAN, Attention, Block, RMSNorm
    from trainer.models.family import Family, init_parameter
    from trainer.models.loss import HeadLoss
    from trainer.plan import Prediction, predict
    from trainer.recipe import ParameterGroup, Recipe, RecipeError, load_recipe
    from trainer.recipe.architecture import Architecture
    from trainer.run.events import End, Restart, Save, Start, Step, Validation
    from trainer.run.sinks import Sink

_HOME = {
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "load_recipe": "recipe",
    "Prediction": "plan",
    "predict": "plan",
    "Samples": "data",
    "Family": "models.family",
    "Architecture": "recipe.architecture",
    "ParameterGroup": "recipe",
    "Block": "models.decoder",
    "Attention": "models.decoder",
    "MLP": "models.decoder",
    "RMSNorm": "models.decoder",
    "Documents": "models.attention",
    "init_parameter": "models.family",
    "TENSOR_PLAN": "models.decoder",
    "HeadLoss": "models.loss",
    "Sink": "run.sinks",
    "Start": "run.events",
    "Restart": "run.events",
    "Step": "run.events",
    "Validation": "run.events",
    "Save": "run.events",
    "End": "run.events",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(f"trainer.{_HOME[name]}"), name)
