"""Files that start a run elsewhere: what they run is what the commands take, and what they refer to
is there. test_manifests.py holds schemas against them, `make manifests` SkyPilot, `make slurm`
Slurm."""

import os
import re
import shlex
import subprocess

import pytest
import yaml

from elastic.exits import EXIT_DO_NOT_REQUEUE, EXIT_REQUEUE, EXIT_WRONG_INPUT
from tests.distributed.jobs import RECIPE
from tests.trainer.tools.conftest import ODD, OVERRIDE
from trainer.cli.main import parse

K8S = ["--image", "registry/perdure:1", "--volume", "shared"]
VOLUME = {"skypilot": ["--volume", "shared"]}
SKY = ["--package", "perdure[s3] @ file:///perdure.whl"]


def commands(script):
    """What a script tells `perdure train`, or torchrun's `-m trainer`."""
    for line in re.sub(r"\\\n", " ", script).splitlines():
        words = shlex.split(line, comments=True) if " train" in line else []
        for before in ("train", "trainer"):
            if before in words:
                yield words[words.index(before) + 1 :]


def test_scripts_run_what_was_asked_for(launch, tmp_path):
    for kind, options in {
        "slurm": ["--nodes", "2:8", "--interface", "ib0", "--queue", "gpus"],
        "slurm ": ["--nodes", "3", "--container", "nvcr.io#nvidia/perdure:1", "--allocations", "5"],
        "local": ["--nodes", "1:4"],
        "local ": [],
    }.items():
        script = launch(kind.strip(), *options)
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        (words,) = commands(script)
        assert words[:2] == [ODD, OVERRIDE]
        if "slurm" in kind:
            least = options[1].partition(":")[0]
            assert parse(["train", *words]).nnodes == f"{least}:$SLURM_JOB_NUM_NODES"
    first = launch("slurm", "--nodes", "2:8", "--time", "2-00:00:00")
    for line in ("--nodes=2-8", "--mem=0", "--signal=USR1@120", "--requeue", "--time=2-00:00:00"):
        assert f"\n#SBATCH {line}" in first
    assert f"\n{EXIT_REQUEUE}) scontrol requeue" in first
    chained = launch("slurm", "--allocations", "5")
    assert "\n#SBATCH --no-requeue\n#SBATCH --array=1-5%1" in chained
    assert f"\n0 | {EXIT_WRONG_INPUT} | {EXIT_DO_NOT_REQUEUE}) scancel" in chained
    assert "scontrol requeue" not in chained


@pytest.mark.parametrize("form", ["jobset", "trainjob"])
def test_manifests_refer_to_what_they_have(launch, tmp_path, form):
    options = ["--nodes", "2:8", "--form", form, "--queue", "on", "--interface", "net1"]
    text = (
        launch("k8s", *K8S, *options, "--out", "run.yaml") and (tmp_path / "run.yaml").read_text()
    )
    documents = {one["kind"]: one for one in yaml.safe_load_all(text)}
    assert documents["ConfigMap"]["data"] == {"recipe.yaml": RECIPE}
    runtime = documents.get("ClusterTrainingRuntime")
    jobs = runtime["spec"]["template"]["spec"] if runtime else documents["JobSet"]["spec"]
    store, node = (one["template"]["spec"] for one in jobs["replicatedJobs"])
    pod = node["template"]["spec"]
    (container,) = pod["containers"]
    trainer = documents["TrainJob"]["spec"]["trainer"] if runtime else container
    found = parse(trainer["args"])
    assert (found.recipe, found.overrides) == ("/etc/perdure/recipe.yaml", [OVERRIDE])
    assert (found.nnodes, found.rdzv_conf) == ("2:8", "is_host=0")
    name = documents["ConfigMap"]["metadata"]["name"]
    assert found.rdzv_endpoint == f"{name}-store-0-0.{jobs['network']['subdomain']}:29400"
    assert parse(store["template"]["spec"]["containers"][0]["args"]).port == 29400
    rules = node["podFailurePolicy"]["rules"]
    codes = {
        rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule
    }
    assert codes == {
        "Ignore": [EXIT_REQUEUE],
        "FailJob": [EXIT_WRONG_INPUT, EXIT_DO_NOT_REQUEUE],
    }
    volumes = {volume["name"] for volume in pod["volumes"]}
    places = {}
    for one in (container, *pod["initContainers"]):
        places |= {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
    assert volumes == set(places.values())
    secret = {one["name"]: one["value"] for one in container["env"]}["PERDURE_SECRET_FILE"]
    assert pod["initContainers"][0]["command"][-1] == secret
    assert places[secret.rpartition("/")[0]] == "secret"
    assert node["parallelism"] == node["completions"] == 8
    queued = documents["TrainJob" if runtime else "JobSet"]["metadata"]["labels"]
    assert queued == {"kueue.x-k8s.io/queue-name": "on"}  # and not true


@pytest.mark.parametrize(
    "more",
    [
        "",
        "tracking:\n  name: |+\n    kept \n\n\n",
        "# no end of line",
        "tracking:\n  name: 'a \u2028 b'\n",  # an end of line to YAML
    ],
)
def test_a_manifest_has_the_recipe_to_the_letter(launch, tmp_path, more):
    (tmp_path / ODD).write_text(RECIPE + more)
    config, *_ = yaml.safe_load_all(launch("k8s", *K8S))
    assert config["data"]["recipe.yaml"] == RECIPE + more


def test_a_task_of_skypilot_trains_in_the_bucket(launch, tmp_path):
    (tmp_path / "a b.whl").touch()
    given = ["--package", "a b.whl", "--gpus", "2xH100", "--nodes", "2", "--bucket", "s3://mine/a/"]
    task = yaml.safe_load(launch("skypilot", *given))
    (words,) = commands(task["run"])
    found = parse(["train", *words])
    lies = ["run.dir=s3://mine/a/run", "data.sources.0.path=s3://mine/a/data"]
    assert found.overrides == [OVERRIDE, *lies]
    assert (task["num_nodes"], found.nnodes) == (2, "2:2")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_REQUEUE]
    files = {"~/perdure/recipe.yaml": ODD, "~/perdure/a b.whl": "a b.whl"}
    assert task["file_mounts"] == files  # and nothing that several nodes would write to
    assert shlex.split(task["setup"].splitlines()[-1])[-2:] == ["~/perdure/a b.whl", "boto3"]
    assert task["secrets"] == {"PERDURE_SECRET": None}
    before, _, _ = task["run"].partition("~/perdure/venv/bin/perdure train")
    script = f"{before}\ncat $PERDURE_SECRET_FILE; stat -c %a $PERDURE_SECRET_FILE; env"
    (tmp_path / "perdure").mkdir()
    environment = {"HOME": str(tmp_path), "PERDURE_SECRET": "told", "PATH": os.environ["PATH"]}
    told = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith("told600\n")
    assert "PERDURE_SECRET=" not in told

    google = yaml.safe_load(launch("skypilot", *SKY, "--gpus", "2xH100", "--bucket", "gs://mine"))
    (words,) = commands(google["run"])
    lies = ["run.dir=gs://mine/run", "data.sources.0.path=gs://mine/data"]
    assert parse(["train", *words]).overrides == [OVERRIDE, *lies]
    assert shlex.split(google["setup"].splitlines()[-1])[-1] == "gcsfs"
    assert "secrets" not in google


def test_files_name_the_keys_of_a_bucket_and_hold_none(launch, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an id")
    run = ["run.dir=s3://mine/run", "data.sources.0.path=az://mine/data"]
    names = ["AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ACCOUNT_KEY"]
    for kind, options in {
        "k8s": ["--image", "registry/perdure:1"],
        "skypilot": [*SKY, "--gpus", "2xH100"],
        "slurm": ["--container", "a#b:1"],
        "local": [],
    }.items():
        text = launch(kind, *run, *options, "--nodes", "2")
        assert "an id" not in text
        for name in names:
            (line,) = (line for line in text.splitlines() if name in line)
            assert line.startswith("#")
        without = launch(kind, *options, *(K8S if kind == "k8s" else ()), *VOLUME.get(kind, ()))
        assert "AWS_" not in without
    *_, job = yaml.safe_load_all(launch("k8s", *run, "--image", "a"))
    pod = job["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": f"{job['metadata']['name']}-bucket"}}]
    assert "workspace" not in {volume["name"] for volume in pod["volumes"]}
    *_, job = yaml.safe_load_all(launch("k8s", *K8S, "data.sources.0.path=gs://mine/data"))
    pod = job["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == f"{job['metadata']['name']}-bucket"
    assert "envFrom" not in pod["containers"][0]


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        ("slurm", ["--nodes", "3:2"], "'3:2' is no number of nodes; write 4, or 1:8"),
        ("slurm", ["--time", "a day"], "'a day' is no time"),
        ("slurm", ["--queue", "a\n#SBATCH"], "has characters other than letters"),
        ("slurm", ["run.lenght=3"], "run.lenght: unknown key"),
        ("slurm", ["strategy.tp=2", "--nproc-per-node", "3"], "strategy.tp: groups of 2 ranks do"),
        ("slurm", ["--nodes", "9", "--gpus", "8"], "batch.global_batch: a global batch of 8"),
        ("k8s", [], "the following arguments are required: --image"),
        ("k8s", K8S[:2], "data.sources.0.path: data is on no disk of the nodes; write a URL such"),
        ("k8s", [*K8S, "run.dir=/home/me/run"], "run.dir: /home/me/run is not in the nodes'"),
        ("k8s", [*K8S, "data.sources.0.path=../data"], "data.sources.0.path: ../data is not in"),
        ("skypilot", [*SKY, "--bucket", "mine"], "'mine' is no bucket; write s3://NAME"),
        ("skypilot", [*SKY, "run.dir=s3://m/r"], "such as s3://mine/data, or give --bucket or --v"),
        ("skypilot", [*SKY, "--volume", "v", "--gpus", "8"], "SkyPilot rents GPUs by name"),
        ("local", ["--nodes", "2", "--submit"], "--submit: does not start several nodes"),
        ("slurm", ["--submit"], "--submit: sbatch is not installed here; use --out"),
        ("slurm", ["run.dir='a\n  b'"], "launch: the command line or the recipe's path has"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(launch, monkeypatch, tmp_path, kind, arguments, says):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = launch(kind, *arguments, code=2).splitlines()
    assert says in said[-1], said
    assert [path.name for path in tmp_path.iterdir()] == [ODD]
