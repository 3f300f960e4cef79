"""Holds what `perdure launch` writes for Kubernetes and SkyPilot against the schemas of their
makers, and has them refuse a misspelt key in every place of it. Asks no cluster.

    tests/opt_in/manifests.py PERDURE      in an environment with kubernetes-validate,
                                           kubeflow-trainer-api and skypilot (make manifests)
"""

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubeflow_trainer_api import models

RECIPES = Path(__file__).parents[2] / "recipes"
K8S = ["k8s", "llama3_8b.yaml", "--image", "registry/perdure:1", "--volume", "shared"]
SKY = ["skypilot", "llama3_8b.yaml", "--package", "perdure.whl"]
WRITTEN = {
    "jobset": [*K8S, "--nodes", "2:8"],
    "jobset-all": [*K8S, "optimizer.lr=1e-3", "--nodes", "4", "--gpus", "4", "--queue", "team",
                   "--interface", "net1", "--nproc-per-node", "4", "--grace", "300"],
    "jobset-cpu": [*K8S, "run.device=cpu", "--nodes", "1:2"],
    "trainjob": [*K8S, "--nodes", "2:8", "--form", "trainjob"],
    "trainjob-all": [*K8S, "optimizer.lr=1e-3", "--form", "trainjob", "--queue", "team",
                     "--interface", "net1"],
    "bucket": [*SKY, "--gpus", "8xH100", "--bucket", "s3://mine"],
    "volume": [*SKY, "--gpus", "4xA100", "--nodes", "1:4", "--volume", "shared", "--interface",
               "eth1"],
}  # fmt: skip
"""File → what `perdure launch` is told."""
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
}
FREE = {"labels", "matchLabels", "data", "limits", "requests", "file_mounts", "volumes"}
"""Mappings whose keys are the user's own."""


def main(perdure: str) -> None:
    """Write, check, and spoil all files."""
    program = Path(perdure).absolute()
    os.environ["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("llama3_8b.yaml", "schema.json"):
            Path(folder, name).write_bytes((RECIPES / name).read_bytes())
        Path(folder, "perdure.whl").touch()
        os.chdir(folder)
        for name, arguments in WRITTEN.items():
            command = [program, "launch", *arguments, "--out", f"{name}.yaml"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            check = check_sky if arguments[0] == "skypilot" else check_k8s
            documents = list(yaml.safe_load_all(Path(f"{name}.yaml").read_text()))
            for document in documents:
                if problem := check(document):
                    sys.exit(f"{name}: {document.get('kind', 'task')}: {problem}")
            planted = [bad for one in documents for bad in misspelt(one)]
            passed = [where for where, bad in planted if not check(bad)]
            if passed:
                sys.exit(f"{name}: misspelt keys are not refused: {', '.join(passed)}")
            print(
                f"{name}: {len(documents)} document(s) valid; {len(planted)} misspelt keys refused"
            )


def check_k8s(document: dict[str, Any]) -> str:
    """What is wrong with a manifest; empty if nothing is."""
    if document["kind"] not in MODELS:
        return by_schema(document)
    model = MODELS[document["kind"]]
    try:
        back = model.from_dict(copy.deepcopy(document)).to_dict()
    except Exception as error:  # whatever a model raises, it does not take the document
        return str(error)
    if missing := list(lost(document, back)):
        return f"unknown: {', '.join(missing)}"
    # Their jobs are ones of Kubernetes itself, whose schema is stricter than these models.
    inner = document["spec"]
    if document["kind"] == "ClusterTrainingRuntime":
        inner = inner["template"]["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "perdure"}}
    templates = [one["template"] for one in inner.get("replicatedJobs", ())]
    problems = (by_schema(job | template) for template in templates)
    return next(filter(None, problems), "")


def by_schema(document: dict[str, Any]) -> str:
    """What the schemas of Kubernetes say."""
    try:
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


def lost(given: Any, back: Any, path: str = "") -> Iterator[str]:
    """Keys that a model has not kept, as it knows none of that name."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(back, dict) or key not in back:
                yield f"{path}.{key}"
            else:
                yield from lost(value, back[key], f"{path}.{key}")
    elif isinstance(given, list):
        for number, value in enumerate(given):
            yield from lost(value, back[number], f"{path}[{number}]")


def check_sky(document: dict[str, Any]) -> str:
    """What is wrong with a task of SkyPilot; empty if nothing is."""
    import sky
    from sky.utils import schemas

    # Of this mapping SkyPilot takes any key; its schema names those that it reads.
    _, recovery = schemas.get_resources_schema()["properties"]["job_recovery"]["anyOf"]
    given = document.get("resources", {}).get("job_recovery", {})
    if unknown := given.keys() - recovery["properties"]:
        return f"job_recovery has no {', '.join(unknown)}"
    Path("task.yaml").write_text(yaml.safe_dump(document))
    try:
        sky.Task.from_yaml("task.yaml")
    except Exception as error:  # whatever it raises, it does not take the task
        return str(error)
    return ""


def misspelt(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, copy of the document with one key misspelt), for every key that is not free."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, list):
            for number, one in enumerate(value):
                yield from places(one, (*path, number))
        elif isinstance(value, dict):
            for key, one in value.items():
                if not (path and path[-1] in FREE):
                    yield (*path, key)
                yield from places(one, (*path, key))

    for *path, key in places(document, ()):
        if key in ("apiVersion", "kind") and not path:
            continue  # without these it is not known what it is
        spoilt = copy.deepcopy(document)
        inside: Any = spoilt
        for part in path:
            inside = inside[part]
        inside[f"{key}x"] = inside.pop(key)
        yield ".".join(map(str, (*path, key))), spoilt


if __name__ == "__main__":
    main(sys.argv[1])
