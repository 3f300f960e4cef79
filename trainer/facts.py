"""What this node would train, told to its agent before it joins: see elastic/facts.py."""

from pathlib import Path
from typing import Any

from elastic.batch_plan import most_ranks
from trainer.errors import known_errors
from trainer.worker import prepare


def facts(arguments: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `elastic.facts.Facts` for a recipe and its overrides."""
    try:
        recipe, _, identity = prepare(arguments)
    except known_errors() as error:
        return {"error": "; ".join(str(error).splitlines())}
    batch = recipe.batch
    return {
        "identity": identity,
        "most_ranks": most_ranks(batch.global_batch, batch.micro_batch, fixed=recipe.exact),
        "directory": str(Path(recipe.run.dir).absolute()),
    }
