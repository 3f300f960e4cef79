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
"""Characters of a run's name; pod names, which begin with it, have at most 63."""


@dataclass(frozen=True)
class LaunchedRun:
    """A run to be launched."""

    name: str
    """Its name on the cluster: lower-case letters, digits and hyphens."""
    path: str
    """Recipe file."""
    text: str
    """Contents of that file."""
    overrides: Sequence[str]
    least: int
    """Minimum number of nodes."""
    most: int
    """Maximum number of nodes."""
    gpus: int
    """GPUs of a node; 0: none."""
    gpu_name: str
    """Name of such a GPU; empty if unknown."""
    ranks: int | None
    """Ranks of a node; None: one per GPU, or two without GPUs."""
    written_by: str
    """The command that writes the file, for its header."""
    file: str
    """Path of the written file."""

    @property
    def recipe(self) -> str:
        """The recipe file's name, for comments."""
        return Path(self.path).name

    @property
    def words(self) -> list[str]:
        """Recipe and overrides, as arguments of `perdure train`."""
        return [self.path, *self.overrides]


def render(kind: str, job: LaunchedRun, **options: Any) -> str:
    """Return the text of the file that launches a job.

    Args:
        kind: a key of TEMPLATES.
        options: further values for the template.

    Raises:
        RecipeError: an argument has characters that a comment cannot hold.
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
    """Return the command that submits a written file."""
    return {
        "slurm": ["sbatch", str(file)],
        "k8s": ["kubectl", "apply", "--filename", str(file)],
        "skypilot": ["sky", "jobs", "launch", "--yes", str(file)],
        "local": ["bash", str(file)],
    }[kind]


def run_name(recipe: Recipe) -> str:
    """Derive a name for the cluster from `tracking.name` or the last part of `run.dir`."""
    said = recipe.tracking.name or Path(recipe.run.dir).name
    slug = re.sub(r"[^a-z0-9]+", "-", said.lower())[:LONGEST_NAME].strip("-")
    return f"perdure-{slug or 'run'}"  # begins with a letter, and is no word that YAML knows


def check_world(recipe: Recipe, least: int, most: int, ranks: int) -> None:
    """Check that the recipe can train on these nodes, before they are waited for.

    Args:
        least: minimum number of nodes.
        most: maximum number of nodes.
        ranks: ranks of each node.

    Raises:
        RecipeError: the strategy cannot divide the ranks, or there are too few sequences.
    """
    from trainer.parallel.mesh import least_nodes, mesh_shape
    from trainer.recipe.strategies import exact

    nodes = min(least_nodes(recipe, least, ranks), most)
    mesh_shape(recipe, nodes * ranks, ranks)
    exact.batch_plan(recipe, nodes * ranks // recipe.strategy.together)


def check_inside(recipe: Recipe) -> None:
    """Check that all paths of the recipe are shared by cloud nodes: in WORKSPACE, where relative
    paths begin.

    Raises:
        RecipeError: one line for each path outside it.
    """
    lines = []
    for key, path in _paths(recipe):
        place = PurePosixPath(path)
        outside = place.is_absolute() and not place.is_relative_to(WORKSPACE)
        if "://" not in path and (outside or ".." in place.parts):
            lines.append(
                f"{key}: {path} is not in what the nodes share, which is mounted at {WORKSPACE}; "
                "write the path as it is in there, such as runs/mine"
            )
    if lines:
        raise RecipeError("\n".join(lines))


def in_bucket(recipe: Recipe, bucket: str, nodes: int) -> list[str]:
    """Return overrides for a machine that only shares a bucket, mounted at WORKSPACE: checkpoints
    are written to it directly, so that they are there as soon as their save has ended.

    Raises:
        RecipeError: there are several nodes.
    """
    if nodes > 1:
        raise RecipeError(
            "--nodes: several nodes have to see the same run.dir at once, which a bucket does not "
            "give them; name a --volume of SkyPilot instead, or launch one node"
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
