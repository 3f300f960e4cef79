"""Command line of `perdure launch`."""

import argparse
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from elastic.exits import EXIT_DONE
from trainer.cli.parser import (
    Commands,
    add_command,
    add_recipe,
    at_least,
    local_path,
    require_file,
    write_new,
)
from trainer.recipe import RecipeError, load_recipe

if TYPE_CHECKING:
    from trainer.tools.launch_files import LaunchedRun

EXAMPLES = """\
examples:
  perdure launch slurm recipes/llama3_8b.yaml --nodes 1:8 --out llama.sbatch
  perdure launch k8s recipes/llama3_8b.yaml --nodes 2:8 --image registry/perdure --volume shared
  perdure launch skypilot recipes/llama3_8b.yaml --nodes 2 --gpus 8xH100 \\
    --bucket s3://mine --package perdure-0.1.0-py3-none-any.whl
  perdure launch local recipes/llama3_8b.yaml --nodes 1:4

Writes a job file to read, change and keep; without --out it is printed. --submit also passes it to
sbatch, kubectl or sky. See docs/launch.md.
"""
ENDINGS = {"slurm": ".sbatch", "k8s": ".yaml", "skypilot": ".yaml", "local": ".sh"}
DEFAULT_GPUS = 8
OPTIONS = (
    *("time", "container", "allocations", "image", "form", "volume", "package"),
    *("grace", "queue", "interface"),
)
"""Names of the options that are passed to the template of the job file."""


def add_launch_command(commands: Commands) -> None:
    what = "write the job file of a run for a cluster, and submit it"
    launch = add_command(commands, "launch", what, EXAMPLES)
    kinds = launch.add_subparsers(required=True, metavar="WHERE")
    slurm = _add_kind(kinds, "slurm", "a batch script for Slurm")
    add = slurm.add_argument
    add("--time", type=_time, default="24:00:00", help="time limit (default 24:00:00)")
    add("--container", type=word, metavar="IMAGE", help="container image, started by pyxis")
    what = "for clusters without requeue: N jobs, one after another"
    add("--allocations", type=at_least(1), metavar="N", help=what)
    k8s = _add_kind(kinds, "k8s", "manifests for Kubernetes")
    add = k8s.add_argument
    add("--image", type=word, required=True, help="container image built from the Dockerfile")
    what = "volume claim that all nodes mount; not if all paths are URLs"
    add("--volume", type=word, help=what)
    what = "jobset (default), or trainjob for Kubeflow Trainer 2"
    add("--form", choices=("jobset", "trainjob"), default="jobset", help=what)
    sky = _add_kind(kinds, "skypilot", "a managed job on spot machines for SkyPilot")
    shared = sky.add_mutually_exclusive_group()
    shared.add_argument("--volume", type=word, help="SkyPilot volume that all nodes mount")
    what = "s3://…, gs://… or az://…, in which relative paths lie"
    shared.add_argument("--bucket", type=_bucket, help=what)
    what = "Perdure as pip installs it: a wheel file here, a URL, or a name"
    sky.add_argument("--package", required=True, help=what)
    _add_kind(kinds, "local", "a script for machines without a scheduler")
    what = "time to finish a step and save before the node goes (default 120)"
    for add in (slurm.add_argument, k8s.add_argument):
        add("--grace", type=at_least(1), default=120, metavar="SECONDS", help=what)
        add("--queue", type=word, help="Slurm partition, or Kueue local queue")


def _add_kind(kinds: Commands, name: str, what: str) -> argparse.ArgumentParser:
    kind = add_command(kinds, name, what, EXAMPLES)
    add_recipe(kind)
    add = kind.add_argument
    add("--nodes", type=_nodes, default=(1, 1), metavar="N or MIN:MAX", help="default 1")
    what = f"GPUs of one node: 8, 8xH100, or 0 (default {DEFAULT_GPUS}; with run.device=cpu 0)"
    add("--gpus", type=_gpus, metavar="8xH100", help=what)
    what = "ranks of a node (default: one per GPU; without GPUs 2)"
    add("--nproc-per-node", type=at_least(1), metavar="N", help=what)
    add("--interface", type=word, metavar="NAME", help="fast network interface: ib0, eth1")
    add("--out", type=local_path, metavar="FILE", help="file to write (default: print)")
    add("--submit", action="store_true", help="also submit the file")
    kind.set_defaults(run=_launch, kind=name)
    return kind


def _matched(text: str, pattern: str, problem: str) -> re.Match[str]:
    """Match a whole argument. Raises ArgumentTypeError if `pattern` does not match."""
    if not (matched := re.fullmatch(pattern, text, re.ASCII)):
        raise argparse.ArgumentTypeError(f"{text!r} {problem}")
    return matched


def word(text: str) -> str:
    """Parse an argument that may stand unquoted in scripts, such as an image or a queue."""
    problem = "has characters other than letters, digits and _./:@#,+-"
    return _matched(text, r"[\w./:@#,+][\w./:@#,+-]*", problem)[0]


def _time(text: str) -> str:
    problem = "is no time; write 24:00:00 or 2-00:00:00"
    return _matched(text, r"(\d+-)?\d+(:\d\d){0,2}", problem)[0]


def _bucket(text: str) -> str:
    problem = "is no bucket; write s3://NAME, gs://NAME or az://NAME"
    return _matched(text, r"(s3|gs|az)://[\w.-]+(/[\w.-]+)*/?", problem)[0].rstrip("/")


def _nodes(text: str) -> tuple[int, int]:
    problem = "is no number of nodes; write 4, or 1:8"
    matched = _matched(text, r"(\d+)(?::(\d+))?", problem)
    least, most = int(matched[1]), int(matched[2] or matched[1])
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r} {problem}")
    return least, most


def _gpus(text: str) -> tuple[int, str]:
    problem = "is no number of GPUs; write 8, 8xH100, or 0"
    matched = _matched(text, r"(\d+)(?:x([\w -]+))?", problem)
    return int(matched[1]), (matched[2] or "").strip()


def _launch(arguments: argparse.Namespace) -> int:
    require_file(arguments.recipe)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from trainer.tools import launch_files

    kind, (least, most), own = arguments.kind, arguments.nodes, list(arguments.overrides)
    volume, bucket = (getattr(arguments, name, None) for name in ("volume", "bucket"))
    gpus, gpu_name = arguments.gpus or (0 if recipe.run.device == "cpu" else DEFAULT_GPUS, "")
    if kind in ("k8s", "skypilot"):
        shares = "--volume" if kind == "k8s" else "--bucket or --volume"
        launch_files.check_inside(recipe, "" if volume or bucket else shares)
        for key, name in recipe.own_code.items():
            print(f"note: {key}: {name} must be importable on the nodes", file=sys.stderr)
    if kind == "skypilot" and gpus and not gpu_name:
        raise RecipeError(f"--gpus: SkyPilot rents GPUs by name; write {gpus}xH100")
    if bucket:
        own += launch_files.in_bucket(recipe, bucket)
        recipe = load_recipe(arguments.recipe, own)
    if kind == "local" and most > 1 and arguments.submit:
        raise RecipeError(
            "--submit: does not start several nodes; run the script on each node by hand"
        )
    launch_files.check_world(recipe, least, most, arguments.nproc_per_node or gpus or 2)
    name = launch_files.run_name(recipe)
    out = arguments.out or (Path(name + ENDINGS[kind]) if arguments.submit else None)
    job = launch_files.LaunchedRun(
        name=name,
        path=arguments.recipe,
        text=Path(arguments.recipe).read_text(encoding="utf-8"),
        overrides=own,
        least=least,
        most=most,
        gpus=gpus,
        gpu_name=gpu_name,
        ranks=arguments.nproc_per_node,
        written_by=shlex.join(["perdure", *sys.argv[1:]]),
        file=shlex.quote(str(out or f"FILE{ENDINGS[kind]}")),
        stores=launch_files.stores_of(recipe),
        # A single node needs no secret. Nodes with a common run directory create one there.
        secret=recipe.in_bucket and most > 1,
    )
    options = {key: value for key, value in vars(arguments).items() if key in OPTIONS}
    if kind == "skypilot":  # a wheel on this machine is sent to the nodes
        wheel = Path(arguments.package)
        options["wheel"] = wheel.name if wheel.is_file() else ""
    text = launch_files.render(kind, job, programs=str(Path(sys.executable).parent), **options)
    if out is None:
        print(text, end="")
        return EXIT_DONE
    command = launch_files.submission(kind, out, secret=job.secret)
    if arguments.submit:
        _check_submit(kind, command, job)
    write_new(out, text, "choose another --out")
    if kind == "local":
        out.chmod(0o755)
    if arguments.submit:
        _submit(kind, command, name)
    more_to_do = kind == "k8s" or job.secret or (kind == "local" and most > 1)
    what = "its head says how to start the run" if more_to_do else f"then: {shlex.join(command)}"
    print(f"{out}: written; {what}")
    return EXIT_DONE


def _check_submit(kind: str, command: list[str], job: "LaunchedRun") -> None:
    """Raise RecipeError if the job file could not be submitted from this machine. Called before the
    file is written."""
    if not shutil.which(command[0]):
        raise RecipeError(
            f"--submit: {command[0]} is not installed here; use --out, and submit where it is"
        )
    keys = f"{job.name}-bucket"
    if kind == "k8s" and {*job.stores} - {"gs"} and not _has_secret(keys):
        raise RecipeError(
            f"--submit: the cluster has no secret {keys} with the keys of the bucket; the head of "
            "the file, which --out writes, says how to create it"
        )


def _submit(kind: str, command: list[str], name: str) -> NoReturn:
    """Replace this process by the command that submits the file, so that exit code and signals are
    that command's."""
    if kind == "k8s":
        _make_secret(name)
    # SkyPilot passes this secret on to the nodes, if the job needs one. It is in the environment,
    # as other users of this machine can read the arguments of processes.
    os.environ.setdefault("PERDURE_SECRET", secrets.token_hex(32))
    # exec would discard Python's buffers.
    sys.stdout.flush()
    os.execvp(command[0], command)


_kubectl = partial(subprocess.run, capture_output=True, text=True, check=False)


def _make_secret(name: str) -> None:
    """Create a Kubernetes secret for the job's nodes, unless one of this name exists. Raises
    RecipeError if kubectl failed, with its message."""
    if _has_secret(name):
        return
    create = ["kubectl", "create", "secret", "generic", name, "--from-file=secret=/dev/stdin"]
    # Through stdin: other users of this machine can read the arguments of processes.
    created = _kubectl(create, input=secrets.token_hex(32))
    if created.returncode:
        errors = created.stderr.strip().splitlines()
        raise RecipeError(
            f"--submit: the secret {name} cannot be created: {errors[-1] if errors else ''}"
        )


def _has_secret(name: str) -> bool:
    return _kubectl(["kubectl", "get", "secret", name]).returncode == 0
