"""What decides a step tells apart nodes that train something else, and no others."""

import sys

import pytest

from tests.distributed.jobs import RECIPE
from trainer.recipe import load_recipe
from trainer.run import identity
from trainer.run.identity import identify


@pytest.fixture
def said(tmp_path, monkeypatch):
    """said() → the identity of a run of a model of the user's in the working directory, which is
    not where modules are looked for; our code is that of a package elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    overrides = ["model.architecture=null", "model.factory=users_model:build"]
    recipe = load_recipe("recipe.yaml", overrides)
    (tmp_path / "users_model.py").write_text("width = 1\n")
    (tmp_path / "installed/ours").mkdir(parents=True)
    (tmp_path / "installed/ours/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setattr(identity, "PACKAGES", ("ours",))
    return lambda: identify(recipe, "data")


def test_the_users_model_counts(said, tmp_path):
    before = said()
    (tmp_path / "users_model.py").write_text("width = 2\n")
    after = said()
    assert [key for key in after if after[key] != before[key]] == ["model.factory source"]


def test_our_code_counts_and_what_an_editor_hides_beside_it_does_not(said, tmp_path):
    before, ours = said(), tmp_path / "installed/ours"
    (ours / ".#step.py").symlink_to("somebody@this-host.123")  # Emacs locks so
    (ours / ".ipynb_checkpoints").mkdir()
    (ours / ".ipynb_checkpoints/step-checkpoint.py").touch()
    assert said() == before
    (ours / "step.py").touch()
    assert said()["code"] != before["code"]


def test_sinks_and_hooks_may_differ_between_nodes(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    own = ["tracking.sinks=[a:b, c:d]", "tracking.hooks=[e:f]", "tracking.prometheus=a.prom"]
    plain, tracked = (load_recipe(str(tmp_path / "recipe.yaml"), more) for more in ([], own))
    assert identify(tracked, "data") == identify(plain, "data")
