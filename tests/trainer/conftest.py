"""For tests of the trainer: a small recipe."""

from pathlib import Path

import pytest

from tests.distributed.jobs import RECIPE
from trainer.recipe import load_recipe


@pytest.fixture
def recipe(tmp_path: Path):
    """recipe(*overrides) → Recipe."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return lambda *overrides: load_recipe(path, overrides)
