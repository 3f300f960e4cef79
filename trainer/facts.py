"""Describes the run that a node is about to join. `arguments`: path of the recipe, and overrides.
The node's agent calls these functions, see [Note: facts] in elastic/node/program.py."""

from typing import Any

from trainer.parallel.mesh import least_nodes, mesh_shape, replica_ranks
from trainer.recipe import load_recipe
from trainer.recipe.errors import known_errors, lines
from trainer.recipe.strategies import exact, together
from trainer.run.join import prepare
from trainer.run.preflight import folders_of


def folders(arguments: tuple[str, ...]) -> dict[str, str]:
    """Return the local paths that the ranks need, by recipe key."""
    return folders_of(load_recipe(arguments[0], arguments[1:]))


def facts(arguments: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """Return the fields of `elastic.node.program.NodeJobFacts` for a node with `ranks` ranks; only
    `error` if the recipe cannot be trained on the node."""
    try:
        recipe, _, _, identity = prepare(arguments)
        mesh_shape(recipe, least_nodes(recipe, 1, ranks) * ranks, ranks)
    except known_errors() as error:
        return {"error": "; ".join(lines(error))}
    return {
        "identity": identity,
        "most_ranks": exact.most_shares(recipe) * together(recipe.strategy),
        "unit": replica_ranks(recipe),
        # A bucket has no local directory; rank 0 excludes other launches in the bucket, see
        # run/terms.py.
        "directory": None if recipe.in_bucket else str(recipe.directory.absolute()),
        "save_seconds": recipe.checkpoint.deadline,
    }
