"""Generates the file with which `perdure launch` starts a run elsewhere: a batch script, manifests,
a cloud task.

Templates are Jinja. Values from a command line or a recipe are quoted for their context: `| shell`
in scripts, `| yaml` in YAML. Values without a filter are numbers, or words that `word` or
`run_name` has validated.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2

from trainer.recipe import Recipe, RecipeError

TEMPLATES = {
    "slurm": "slurm.sbatch",
    "k8s": "kubernetes.yaml",
    "skypilot": "skypilot.yaml",
    "local": "local.sh",
}
"""Kind of launch → file in `launch_templates/`."""
WORKSPACE = PurePosixPath("/workspace")
"""Mount point of the shared volume on cloud nodes."""
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION; not AWS: AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS: the path of a key file",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "HF_TOKEN",
}
"""Protocol of an object store → environment variables that give access to it."""
PROTOCOLS = {"s3a": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs"}
"""Other names of protocols in KEYS."""
SECRET = "PERDURE_SECRET"
"""Environment variable by which SkyPilot gives the job's secret to its machines."""
LONGEST_NAME = 40
"""Longest name of a run, in characters; pod names, which begin with it, have at most 63."""


@dataclass(frozen=True)
class LaunchedRun:
    """A run to be launched."""

    name: str
    """Name of the run on the cluster: lower-case letters, digits and hyphens."""
    path: str
    """Path of the recipe file."""
    text: str
    """Contents of the recipe file."""
    overrides: Sequence[str]
    least: int
    most: int
    """Minimum and maximum number of nodes."""
    gpus: int
    gpu_name: str
    """Number of GPUs of a node, and their name; "" if unknown."""
    ranks: int | None
    """Ranks of a node; None: one per GPU, or two without GPUs."""
    written_by: str
    """Command that writes the file, for its header."""
    file: str
    """Path of the written file."""
    stores: Sequence[str] = ()
    """Object stores that the nodes use: keys of KEYS."""
    secret: bool = False
    """Whether nodes need a file with the job's secret, as they share no run directory."""

    @property
    def recipe(self) -> str:
        """Name of the recipe file, for comments."""
        return Path(self.path).name

    @property
    def words(self) -> list[str]:
        """Recipe and overrides, as arguments of `perdure train`."""
        return [self.path, *self.overrides]


def render(kind: str, job: LaunchedRun, **options: Any) -> str:
    """Return the text of the file that launches a run. `kind`: a key of TEMPLATES. `options`:
    further values for the template. Raises RecipeError if the command line or the recipe's path
    has characters that cannot be printed."""
    if not (job.written_by + job.path).isprintable():
        raise RecipeError(
            "launch: the command line or the recipe's path has a line end or another character "
            "that cannot be printed; rename the recipe, or put such values into it"
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "launch_templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shell"] = lambda value: shlex.quote(str(value))
    # JSON strings are YAML strings.
    environment.filters["yaml"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    environment.filters["yaml_block"] = _yaml_block
    return environment.get_template(TEMPLATES[kind]).render(
        job=job, keys={store: KEYS[store] for store in job.stores}, **options
    )


def _yaml_block(text: str, indent: int) -> str:
    """Format a text as a YAML value that is read as exactly this text. Each line is indented by
    `indent` spaces, two more than the key."""
    text = text.replace("\r\n", "\n")
    # A YAML block cannot hold these characters, so write a JSON string.
    if not text.replace("\n", "").replace("\t", "").isprintable() or "\ufeff" in text:
        return json.dumps(text)
    body = text.removesuffix("\n")
    kept = {"": "-", "\n": ""}.get(text[len(text.rstrip("\n")) :], "+")
    lines = (" " * indent + line if line else "" for line in body.split("\n"))
    return "\n".join([f"|2{kept}", *lines])


def submission(kind: str, file: Path, *, secret: bool) -> list[str]:
    """Return the command that submits a written file. `secret`: see LaunchedRun."""
    return {
        "slurm": ["sbatch", str(file)],
        "k8s": ["kubectl", "apply", "--filename", str(file)],
        "skypilot": [
            "sky", "jobs", "launch", "--yes", *(["--secret", SECRET] if secret else []), str(file),
        ],
        "local": ["bash", str(file)],
    }[kind]  # fmt: skip


def run_name(recipe: Recipe) -> str:
    """Derive the run's name on a cluster from `tracking.name` or `run.dir`."""
    name = recipe.tracking.name or Path(recipe.run.dir).name
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:LONGEST_NAME].strip("-")
    return f"perdure-{slug or 'run'}"  # begins with a letter, and is no YAML keyword


def check_world(recipe: Recipe, least: int, most: int, ranks: int) -> None:
    """Check that the recipe can train on `least` to `most` nodes of `ranks` ranks, before a
    scheduler waits for them. Raises RecipeError if the strategy cannot divide the ranks, or there
    are too few sequences."""
    from trainer.parallel.mesh import least_nodes, mesh_shape
    from trainer.recipe.strategies import exact, together

    nodes = min(least_nodes(recipe, least, ranks), most)
    mesh_shape(recipe, nodes * ranks, ranks)
    exact.batch_plan(recipe, nodes * ranks // together(recipe.strategy))


def check_inside(recipe: Recipe, shared: str) -> None:
    """Check that cloud nodes can reach all paths of the recipe: each must be a URL, or lie in
    WORKSPACE, where relative paths begin. Raises RecipeError, with a line for each other path.

    Args:
        shared: options that would share WORKSPACE between nodes; "" if one of them is given.
    """
    lines = []
    for key, path in recipe.paths.items():
        place = PurePosixPath(path)
        outside = place.is_absolute() and not place.is_relative_to(WORKSPACE)
        if "://" in path:
            continue
        if shared:
            lines.append(
                f"{key}: {path} is on no disk of the nodes; write a URL such as "
                f"s3://mine/{place.name}, or give {shared}"
            )
        elif outside or ".." in place.parts:
            lines.append(
                f"{key}: {path} is not in the nodes' shared folder, which is mounted at "
                f"{WORKSPACE}; write a path inside it, such as runs/mine"
            )
    if lines:
        raise RecipeError("\n".join(lines))


def in_bucket(recipe: Recipe, bucket: str) -> list[str]:
    """Return overrides that replace the recipe's local paths by URLs below `bucket`, for nodes that
    share nothing else. `check_inside` has found these paths below WORKSPACE."""
    return [
        f"{key}={bucket}/{(WORKSPACE / path).relative_to(WORKSPACE)}"
        for key, path in recipe.paths.items()
        if "://" not in path
    ]


def stores_of(recipe: Recipe) -> list[str]:
    """Return the object stores that a run uses, as keys of KEYS."""
    paths = [path.partition("://") for path in recipe.paths.values()]
    named = {PROTOCOLS.get(protocol, protocol) for protocol, mark, _ in paths if mark}
    return sorted(named & KEYS.keys())
