"""For all tests of the plan."""

import pytest

from tests.trainer.plan.recipes import RECIPE


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path
