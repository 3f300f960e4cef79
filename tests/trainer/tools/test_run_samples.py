"""`run.samples`: which checkpoints are sampled, and what cannot be."""

import pytest

from tests.distributed.jobs import RECIPE
from trainer.recipe import RecipeError, load_recipe
from trainer.tools.run_samples import due


@pytest.mark.parametrize(
    ("committed", "sampled", "every", "last", "steps"),
    [
        ([50, 100, 150], [], 1, 150, [150, 100, 50]),  # no validation: all
        ([50, 100, 150, 200], [], 100, 1000, [200, 100]),
        ([70, 140, 210], [], 100, 1000, [210, 140]),  # each the first after a pass
        ([110, 120], [100], 100, 1000, []),  # step 100 is deleted by now
        ([110, 120], [], 100, 1000, [110]),
        ([950, 1000, 1005], [900, 1000], 100, 1005, [1005, 1000]),  # and the last
        ([], [10], 1, 10, []),
    ],
)
def test_which_checkpoints_are_sampled(committed, sampled, every, last, steps):
    assert due(committed, sampled, every, last) == steps


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.samples=[a, b, a]"], "has a prompt twice; remove one"),
        (["run.samples=[a, 1]"], "input should be a valid string, but it is 1"),
        (
            ["run.samples=[a]", "model={factory: 'own:model'}"],
            "only for model.architecture and model.init_from, as `perdure generate` cannot run",
        ),
        (
            [
                "run.samples=[a]",
                "model={init_from: 's3://b/m', adapter: {base: fp32}}",
            ],
            "needs the model under the adapter on a disk, not at s3://b/m",
        ),
    ],
)
def test_what_cannot_be_sampled_is_refused(tmp_path, overrides, message):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "recipe.yaml", overrides)
    (line,) = str(error.value).splitlines()
    assert "run.samples" in line
    assert message in line
