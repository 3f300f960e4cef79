"""What `perdure launch k8s` writes obeys the schemas of Kubernetes, JobSet and Kubeflow Trainer.
Asks no cluster."""

import copy
from functools import cache

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.late import Late
from tests.misspelt import misspelt

kubernetes_validate, models = Late("kubernetes_validate"), Late("kubeflow_trainer_api.models")
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
}
K8S = ["--image", "registry/perdure:1", "--nodes", "2:8", "--queue", "team", "--interface", "net1"]
WRITTEN = [
    [*K8S, "--volume", "shared", "--nproc-per-node", "2", "optimizer.lr=1e-3"],
    [*K8S, "run.dir=s3://mine/run", "data.sources.0.path=gs://mine/data", "--form", "trainjob"],
]


def test_manifests_obey_their_schemas_and_no_misspelt_one_does(launch):
    """Every key is misspelt in turn. The second run has neither volume nor anything else that its
    nodes share but buckets."""
    for arguments in WRITTEN:
        documents = list(yaml.safe_load_all(launch("k8s", *arguments, "--gpus", "1")))
        assert [problem(one) for one in documents] == [""] * len(documents)
        planted = [bad for one in documents for bad in misspelt(one)]
        assert len(planted) > 100
        assert [where for where, bad in planted if not problem(bad)] == []


def problem(document):
    """What is wrong with a manifest; empty if nothing is."""
    if document["kind"] not in MODELS:
        return by_schema(document)
    model = getattr(models, MODELS[document["kind"]])
    try:
        back = model.from_dict(copy.deepcopy(document)).to_dict()
    except Exception as error:  # whatever a model raises, it does not take the document
        return str(error)
    if unknown := list(lost(document, back)):
        return f"unknown: {', '.join(unknown)}"
    # Their jobs are jobs of Kubernetes itself, whose schema is stricter than these models.
    inner = document["spec"]
    if document["kind"] == "ClusterTrainingRuntime":
        inner = inner["template"]["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "perdure"}}
    templates = [one["template"] for one in inner.get("replicatedJobs", ())]
    return next(filter(None, (by_schema(job | template) for template in templates)), "")


def by_schema(document):
    group, _, version = document["apiVersion"].rpartition("/")
    name = "-".join(filter(None, [document["kind"].lower(), group.partition(".")[0], version]))
    return next((error.message for error in schema(name).iter_errors(document)), "")


@cache
def schema(name):
    """Kubernetes' own, which takes no key that it does not know. kubernetes_validate.validate reads
    it anew for each document, in a tenth of a second."""
    return Draft202012Validator(contents(name), registry=definitions())


@cache
def definitions():
    return (Resource.from_contents(contents("_definitions")) @ Registry()).crawl()


def contents(name):
    version = kubernetes_validate.latest_version()
    path = f"kubernetes-json-schema/v{version}-local-strict/{name}.json"
    return kubernetes_validate.utils.schema_contents(path, version)


def lost(given, back, path=""):
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
