"""What is launched where, and the file that does it.

A template is the file itself, with what differs filled in by Jinja. Values from a command line or
a recipe are quoted for where they stand: `| shell` in scripts, `| yaml` in YAML. Values without a
filter are numbers, and words that `word` or `run_name` has let through.
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
"""File in `templates/`, by kind of launch."""
WORKSPACE = PurePosixPath("/workspace")
"""Where nodes in the cloud see the volume, or bucket, that they share."""
LONGEST_NAME = 40
"""Characters of a name of a run: names of pods, of at most 63, begin with it."""


@dataclass(frozen=True)
class LaunchedRun:
    """A run to be launched."""

    name: str
    """What it is called there: lower-case letters, digits and hyphens."""
    path: str
    """Recipe file."""
    text: str
    """Contents of that file."""
    overrides: Sequence[str]
    least: int
    """Nodes with which training begins."""
    most: int
    """Nodes that may take part."""
    gpus: int
    """GPUs of a node; 0: it has none."""
    gpu_name: str
    """Name of such a GPU; empty where nobody has said it."""
    ranks: int | None
    """Ranks of a node; None: one per GPU, without GPUs two."""
    written_by: str
    """The command that writes the file."""
    file: str
    """Where it is written to."""

    @property
    def recipe(self) -> str:
        """The recipe, for comments."""
        return Path(self.path).name

    @property
    def words(self) -> list[str]:
        """Recipe and overrides, as `perdure train` takes them."""
        return [self.path, *self.overrides]


def render(kind: str, job: LaunchedRun, **options: Any) -> str:
    """The file that launches a job.

    Args:
        kind: one of TEMPLATES.
        job: that it launches.
        options: what the template takes besides.

    Raises:
        RecipeError: a word of the command line has characters that no comment can have.
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
    environment.filters["yaml"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    text = environment.get_template(TEMPLATES[kind]).render(job=job, **options)
    return re.sub(r" +$", "", text, flags=re.M)


def submission(kind: str, file: Path) -> list[str]:
    """The command that hands a written file over."""
    return {
        "slurm": ["sbatch", str(file)],
        "k8s": ["kubectl", "apply", "--filename", str(file)],
        "skypilot": ["sky", "jobs", "launch", "--yes", str(file)],
        "local": ["bash", str(file)],
    }[kind]


def run_name(recipe: Recipe) -> str:
    """What a run is called outside, by `tracking.name` or the last part of `run.dir`."""
    said = recipe.tracking.name or Path(recipe.run.dir).name
    slug = re.sub(r"[^a-z0-9]+", "-", said.lower())[:LONGEST_NAME].strip("-")
    return f"perdure-{slug or 'run'}"  # begins with a letter, and is no word that YAML knows


def check_world(recipe: Recipe, least: int, most: int, ranks: int) -> None:
    """Refuse nodes on which the recipe cannot train, before they are waited for.

    Args:
        recipe: to be launched.
        least: nodes with which training begins.
        most: nodes that may take part.
        ranks: of each node.

    Raises:
        RecipeError: they do not divide as the strategy needs, or there are too few sequences.
    """
    from trainer.parallel.mesh import least_nodes, mesh_shape
    from trainer.recipe.strategies import exact

    nodes = min(least_nodes(recipe, least, ranks), most)
    mesh_shape(recipe, nodes * ranks, ranks)
    exact.batch_plan(recipe, nodes * ranks // recipe.strategy.together)


def check_inside(recipe: Recipe) -> None:
    """Refuse paths that nodes in the cloud do not share: all but those in WORKSPACE, from which
    relative ones begin.

    Raises:
        RecipeError: a line for each such path.
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
    """Overrides with which a recipe trains on a machine that shares nothing but a bucket, mounted
    at WORKSPACE: checkpoints go into it directly, and so are there when their save has ended.

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
    """Pairs of (key, path): what all nodes read or write."""
    yield "run.dir", recipe.run.dir
    for key, path in (
        ("checkpoint.directory", recipe.checkpoint.directory),
        ("model.init_from", recipe.model.init_from),
        ("data.graph.path", recipe.data.graph and recipe.data.graph.path),
    ):
        if path:
            yield key, path
    for number, source in enumerate(recipe.data.sources):
        yield f"data.sources.{number}.path", source.path
