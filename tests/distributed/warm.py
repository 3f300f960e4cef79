"""What each forked job would do anew: the process that they are forked from imports this."""

import trainer.models.families.qwen3  # noqa: F401  # of RECIPE
from trainer.recipe import Recipe
from trainer.recipe.checking import adapter

adapter(Recipe)
