"""A recipe: one YAML file → one frozen, validated `Recipe`. Imports no torch."""

from trainer.recipe.checking import definition_of
from trainer.recipe.load import (
    dump_recipe,
    load_recipe,
    recipe_schema,
    resolved,
    shipped_recipes,
    validate,
)
from trainer.recipe.rules import counted
from trainer.recipe.sections import (
    ZERO_STAGES,
    MuonSection,
    OptimizerSection,
    ParameterGroup,
    Recipe,
    ScheduleSection,
    StrategySection,
)
from trainer.recipe.yaml_tree import RecipeError

__all__ = [
    "Recipe",
    "OptimizerSection",
    "ParameterGroup",
    "MuonSection",
    "ScheduleSection",
    "StrategySection",
    "ZERO_STAGES",
    "RecipeError",
    "load_recipe",
    "shipped_recipes",
    "validate",
    "counted",
    "resolved",
    "dump_recipe",
    "recipe_schema",
    "definition_of",
]
