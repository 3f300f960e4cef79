"""What decides a step tells apart nodes that train something else, and no others."""

import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from checkpointing.format.layout import CommitRecord, FileRecord
from tests.distributed.jobs import RECIPE
from trainer.recipe import load_recipe
from trainer.run import identity
from trainer.run.identity import identify

OWN = {
    "model.factory": ["model.architecture=null", "model.factory=users:build"],
    "model.family": ["model.family=users:FAMILY"],
    "data.factory": ["data={factory: users:build}"],
    "optimizer.factory": ["optimizer.factory=users:build"],
    "schedule.factory": ["schedule={factory: users:build}"],
}


@pytest.fixture
def said(tmp_path, monkeypatch):
    """said(*overrides) → the identity of a run, in a working directory that is not where modules
    are looked for; our code is that of a package elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "installed/ours").mkdir(parents=True)
    (tmp_path / "installed/ours/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setattr(identity, "PACKAGES", ("ours",))
    return lambda *overrides: identify(load_recipe("recipe.yaml", overrides), "data")


@pytest.mark.parametrize("key", OWN)
def test_the_users_code_counts(said, tmp_path, key):
    (tmp_path / "users.py").write_text("width = 1\n")
    before = said(*OWN[key])
    (tmp_path / "users.py").write_text("width = 2\n")
    after = said(*OWN[key])
    assert [key for key in after if after[key] != before[key]] == [f"{key} source"]


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


def test_weights_that_differ_in_the_middle_count(said, tmp_path):
    weights = {name: torch.zeros(3, 1 << 16) for name in "abc"}
    weights["b"][1] = 1
    before = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    files = {"model.safetensors": FileRecord(24, (7,)), "other.json": FileRecord(1, (1,))}
    other = {**files, "model.safetensors": FileRecord(24, (8,))}

    def identity_of(kind, folder):
        found = said("model.architecture=null", f"model.init_from={tmp_path / kind / folder}")
        return found["model.init_from"]

    for folder, tensors, record in ("one", before, files), ("two", weights, other):
        for kind in ("published", "dcp", "ours"):
            (tmp_path / kind / folder).mkdir(parents=True)
        save_file(tensors, tmp_path / "published" / folder / "model.safetensors")
        dcp.save(dict(tensors), checkpoint_id=tmp_path / "dcp" / folder, no_dist=True)
        commit = CommitRecord(1, record).encode()
        (tmp_path / "ours" / folder / "index.json").write_bytes(commit)
    shutil.copytree(tmp_path / "dcp/one", tmp_path / "dcp/copy")
    for kind in ("published", "dcp", "ours"):
        assert identity_of(kind, "one") != identity_of(kind, "two"), kind
    assert identity_of("dcp", "one") == identity_of("dcp", "copy")
