"""Generates the file that launches a run on a cluster.

Templates are Jinja. Values from a command line or a recipe are quoted for their context: `| shell`
in scripts, `| yaml` in YAML. Values without a filter are numbers, or words that `word` or
`run_name` has validated.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
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
"""Kind of launch → file in `templates/`."""
WORKSPACE = PurePosixPath("/workspace")
"""Mount point of the shared volume or bucket on cloud nodes."""
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
    """Minimum number of nodes."""
    most: int
    """Maximum number of nodes."""
    gpus: int
    """GPUs of a node; 0: none."""
    gpu_name: str
    """Name of the GPUs; "" if unknown."""
    ranks: int | None
    """Ranks of a node; None: one per GPU, or two without GPUs."""
    written_by: str
    """Command that writes the file, for its header."""
    file: str
    """Path of the written file."""

    @property
    def recipe(self) -> str:
        """Name of the recipe file, for comments."""
        return Path(self.path).name

    @property
    def words(self) -> list[str]:
        """Recipe and overrides, as arguments of `perdure train`."""
        return [self.path, *self.overrides]


def render(kind: str, job: LaunchedRun, **options: Any) -> str:
    """Return the text of the file that launches a run.

    Args:
        kind: a key of TEMPLATES.
        job: the run to launch.
        options: further values for the template.

    Raises:
        RecipeError: an argument has characters that a comment cannot contain.
    """
    if not (job.written_by + job.path).isprintable():
        raise RecipeError(
            "launch: the command line has line ends or control characters, which the file cannot "
            "show; put such values into the recipe"
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shell"] = lambda value: shlex.quote(str(value))
    # JSON strings are YAML strings.
    environment.filters["yaml"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    environment.filters["yaml_block"] = _yaml_block
    return environment.get_template(TEMPLATES[kind]).render(job=job, **options)


def _yaml_block(text: str, indent: int) -> str:
    """Format a text of lines as a YAML value that is read as exactly this text.

    Args:
        indent: spaces before each line, two more than before the key.
    """
    text = text.replace("\r\n", "\n")
    # Characters that end a line in YAML, or that may not stand there as they are.
    if not text.replace("\n", "").replace("\t", "").isprintable() or "\ufeff" in text:
        return json.dumps(text)
    body = text.removesuffix("\n")
    kept = {"": "-", "\n": ""}.get(text[len(text.rstrip("\n")) :], "+")
    lines = (" " * indent + line if line else "" for line in body.split("\n"))
    return "\n".join([f"|2{kept}", *lines])


def submission(kind: str, file: Path) -> list[str]:
    """Command that submits a written file."""
    return {
        "slurm": ["sbatch", str(file)],
        "k8s": ["kubectl", "apply", "--filename", str(file)],
        "skypilot": ["sky", "jobs", "launch", "--yes", str(file)],
        "local": ["bash", str(file)],
    }[kind]


def run_name(recipe: Recipe) -> str:
    """Derive a name for the cluster from `tracking.name`, or else from the last part of
    `run.dir`."""
    name = recipe.tracking.name or Path(recipe.run.dir).name
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:LONGEST_NAME].strip("-")
    return f"perdure-{slug or 'run'}"  # begins with a letter, and is no YAML keyword


def check_world(recipe: Recipe, least: int, most: int, ranks: int) -> None:
    """Check that the recipe can train on these nodes, before a scheduler waits for them.

    Args:
        recipe: the recipe of the run.
        least: minimum number of nodes.
        most: maximum number of nodes.
        ranks: ranks of each node.

    Raises:
        RecipeError: the strategy cannot divide the ranks, or there are too few sequences.
    """
    from trainer.parallel.mesh import least_nodes, mesh_shape
    from trainer.recipe.strategies import exact, together

    nodes = min(least_nodes(recipe, least, ranks), most)
    mesh_shape(recipe, nodes * ranks, ranks)
    exact.batch_plan(recipe, nodes * ranks // together(recipe.strategy))


def check_inside(recipe: Recipe) -> None:
    """Check that cloud nodes share all paths of the recipe: those in WORKSPACE, where relative
    paths begin.

    Raises:
        RecipeError: one line for each path outside of it.
    """
    lines = []
    for key, path in _paths(recipe):
        place = PurePosixPath(path)
        outside = place.is_absolute() and not place.is_relative_to(WORKSPACE)
        if "://" not in path and (outside or ".." in place.parts):
            lines.append(
                f"{key}: {path} is not in the nodes' shared folder, which is mounted at "
                f"{WORKSPACE}; write a path inside it, such as runs/mine"
            )
    if lines:
        raise RecipeError("\n".join(lines))


def in_bucket(recipe: Recipe, bucket: str, nodes: int) -> list[str]:
    """Overrides for a single machine with a bucket mounted at WORKSPACE. Checkpoints are written
    directly to the bucket, so that they exist as soon as their save has ended. Raises RecipeError
    if there are several nodes."""
    if nodes > 1:
        raise RecipeError(
            "--nodes: several nodes need the same run.dir at once, which a mounted bucket does not "
            "provide; use a --volume of SkyPilot instead, or launch one node"
        )
    if "://" in recipe.checkpoint_directory:
        return []
    inside = PurePosixPath(recipe.checkpoint_directory)
    if inside.is_absolute():
        inside = inside.relative_to(WORKSPACE)
    return [f"checkpoint.directory={bucket}/{inside}"]


def _paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of everything that all nodes read or write."""
    yield "run.dir", recipe.run.dir
    for key, path in (
        ("checkpoint.directory", recipe.checkpoint.directory),
        ("model.init_from", recipe.model.init_from),
    ):
        if path:
            yield key, path
    for number, source in enumerate(recipe.data.sources):
        yield f"data.sources.{number}.path", source.path
