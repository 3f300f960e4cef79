"""For all tests of the plan."""

import pytest
import torch

from tests.trainer.plan.recipes import RECIPE

# The first backward of a process starts a thread for each GPU, and its forks then cannot run any.
# So without a GPU it runs here, before a plan imitates one, and other tests of this process fork.
if not torch.cuda.device_count():
    torch.ones(1, requires_grad=True).backward()


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path
