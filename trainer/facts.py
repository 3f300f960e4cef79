"""Facts about the run that a node would train, for the node's agent before it joins; see
elastic/node/program.py."""

from typing import Any

from trainer.parallel.mesh import least_nodes, mesh_shape, replica_ranks
from trainer.recipe import load_recipe
from trainer.recipe.errors import known_errors, lines
from trainer.recipe.strategies import exact, together
from trainer.run.join import prepare
from trainer.run.preflight import folders_of


def folders(arguments: tuple[str, ...]) -> dict[str, str]:
    """Recipe key → path, for all paths of a recipe with overrides."""
    return folders_of(load_recipe(arguments[0], arguments[1:]))


def facts(arguments: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """Values for the fields of `elastic.node.program.JobFacts`, from a recipe with overrides, on a
    node with `ranks` ranks."""
    try:
        recipe, _, _, identity = prepare(arguments)
        mesh_shape(recipe, least_nodes(recipe, 1, ranks) * ranks, ranks)
    except known_errors() as error:
        return {"error": "; ".join(lines(error))}
    return {
        "identity": identity,
        "most_ranks": exact.most_shares(recipe) * together(recipe.strategy),
        "unit": replica_ranks(recipe),
        # in a bucket, rank 0 excludes other launches, see run/terms.py
        "directory": None if recipe.in_bucket else str(recipe.directory.absolute()),
        "save_seconds": recipe.checkpoint.deadline,
    }
