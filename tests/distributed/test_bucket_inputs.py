"""A run whose data and first weights lie in a bucket trains what it trains from a disk."""

import json
import random
from collections import Counter
from itertools import count

import pytest
import torch
from safetensors.torch import save_file

from checkpointing import load_model
from checkpointing.errors import DamagedCheckpoint, StorageError
from checkpointing.storage import object_storage
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import location
from tests.distributed.jobs import Job, losses, records, soak
from trainer.data import cache
from trainer.data.copying import copy_data_set
from trainer.models import config_json
from trainer.recipe import RecipeError, load_recipe
from trainer.run.identity import identify
from trainer.run.preflight import check_launch
from trainer.tasks.task import build_task

_names = count()


@pytest.fixture(scope="session")
def start(workspace):
    """A directory of published weights, in two files."""
    folder = workspace / "start"
    folder.mkdir()
    recipe = load_recipe(workspace / "recipe.yaml", [f"data.sources.0.path={workspace}/data"])
    task = build_task(recipe)
    (folder / "config.json").write_text(json.dumps(config_json(task.model.model.architecture)))
    (folder / "tokenizer.json").write_bytes((workspace / "data/tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    torch.manual_seed(5)
    tensors = {name: torch.randn(one.shape) / 20 for name, one in task.model.named_parameters()}
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    weight_map = {name: file for file, some in files.items() for name in some}
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


@pytest.fixture
def uploaded(workspace, start, store):
    """URLs of the data and of the weights."""
    folder = location(f"s3://bucket/inputs-{next(_names)}")
    data, weights = folder / "data", folder / "start"
    copy_data_set(workspace / "data", data)
    for file in start.iterdir():
        store_of(weights).write(weights / file.name, file.read_bytes())
    return data, weights


def overrides(data, weights):
    return [f"data.sources.0.path={data}", "model.architecture=null", f"model.init_from={weights}"]


@soak
def test_inputs_in_a_bucket_are_those_on_a_disk(workspace, start, uploaded, store, monkeypatch):
    data, weights = uploaded

    def recipe(*more, places=uploaded):
        given = [*overrides(*places), f"run.dir={workspace}/never", *more]
        return load_recipe(workspace / "recipe.yaml", given)

    here = recipe(places=(workspace / "data", start))
    there = recipe(f"data.cache={{directory: {workspace}/copies, size: 1 GB}}")
    assert check_launch(there, 2, 2) == check_launch(here, 2, 2)
    assert identify(there, "data") == identify(here, "data")
    one, other = build_task(there), build_task(here)
    assert one.files == other.files
    assert one.files["chat_template.jinja"] == b"{{ messages }}"
    loaded = [
        {name: torch.empty(p.shape) for name, p in task.model.named_parameters()}
        for task in (one, other)
    ]
    load_model(str(weights), loaded[0])
    load_model(start, loaded[1])
    assert all(torch.equal(tensor, loaded[1][name]) for name, tensor in loaded[0].items())

    for place, message in (
        ("s3://nowhere/start", "has no bucket 'nowhere'; create it, or correct"),
        ("s3://bucket/nothing", "s3://bucket/nothing has no config.json; give the directory of"),
    ):
        with pytest.raises(Exception, match=message) as refused:
            check_launch(recipe(places=(data, place)), 2, 2)
        assert "\n" not in str(refused.value)
    with pytest.raises(Exception, match="perdure data copy DIRECTORY s3://bucket/nothing"):
        check_launch(recipe(places=("s3://bucket/nothing", weights)), 2, 2)
    content = (start / "model-2.safetensors").read_bytes()
    store_of(weights).write(weights / "model-2.safetensors", content[:-4])
    with pytest.raises(DamagedCheckpoint, match=f"^{weights}/model-2.safetensors: "):
        identify(there, "data")
    store_of(weights).write(weights / ".metadata", b"")
    with pytest.raises(StorageError, match=f"{weights}.*: is in an object store; give a directory"):
        identify(there, "data")
    assert not (workspace / "copies").exists()  # nothing was written
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    object_storage._store.cache_clear()
    with pytest.raises(RecipeError) as refused:
        check_launch(there, 2, 2)
    for line in str(refused.value).splitlines():
        assert "gives no access (Unable to locate credentials); check AWS_ACCESS_KEY_ID" in line
    object_storage._store.cache_clear()


@soak
@pytest.mark.parametrize("copies", [False, True])
def test_a_run_from_a_bucket_has_the_losses_of_one_from_a_disk(
    workspace, start, uploaded, store, tmp_path, copies
):
    """Of two ranks that validate; 5 % of the requests fail."""
    both = ["run.steps=10", "run.evaluate_every=5", "run.determinism=exact"]
    Job(workspace, 2, ["run.dir=disk", *both, *overrides("data", "start")]).wait()
    draw, seen = random.Random(0), Counter()

    def fault(method, path):
        seen[method, ".tokens" in path] += 1
        return draw.choice(["503 SlowDown", "reset", "cut"]) if draw.random() < 0.05 else None

    store.fault = fault
    place = f"data.cache={{directory: {tmp_path}, size: 1 GB}}"
    more = [place] if copies else []
    run = f"bucket-{copies}"
    code, output = Job(workspace, 2, [f"run.dir={run}", *both, *overrides(*uploaded), *more]).wait()
    assert code == 0, output
    assert losses(workspace, run) == losses(workspace, "disk")
    validations = [
        [one["validation_loss"] for one in records(workspace, of) if "validation_loss" in one]
        for of in (run, "disk")
    ]
    assert validations[0] == validations[1] != []
    assert seen["GET", True] > 20
    if copies:
        (folder,) = cache.home(tmp_path).iterdir()
        assert {file.name for file in folder.iterdir()} == {
            file.name for file in (workspace / "data").glob("*.tokens")
        }
