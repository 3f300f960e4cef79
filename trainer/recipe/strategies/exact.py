"""`run.determinism: exact`: results that are bitwise equal at every world size; applied by
trainer/optim/exact.py. Micro-batches are cut equally at every world size, and gradients are sums
that do not round."""

from collections.abc import Iterator

from elastic.group.batch_plan import GroupBatchPlan, most_ranks, plan_batch
from trainer.recipe.sections import Recipe
from trainer.recipe.strategies import cp, sharding
from trainer.recipe.yaml_tree import RecipeError


def used(recipe: Recipe) -> bool:
    return recipe.exact


def batch_plan(recipe: Recipe, shares: int) -> GroupBatchPlan:
    """Assign the sequences of each step to `shares` data-parallel ranks. Raises RecipeError if the
    global batch does not divide among the ranks."""
    limit = recipe.micro_batch
    try:
        return plan_batch(recipe.batch.global_batch, shares, limit, fixed=recipe.exact)
    except ValueError as error:
        raise RecipeError(f"batch.global_batch: {error}") from error


def most_shares(recipe: Recipe) -> int:
    """Return the largest possible number of data-parallel ranks."""
    return most_ranks(recipe.batch.global_batch, recipe.micro_batch, fixed=recipe.exact)


def addends(recipe: Recipe) -> int:
    """Return the number of terms in the sum of a gradient: one for each micro-batch, or with
    context parallelism for each part of it."""
    return cp.ranks(recipe.strategy) * -(-recipe.batch.global_batch // recipe.micro_batch)


def reduced_bytes(recipe: Recipe) -> int:
    """Return the bytes per element in gradient reductions: float64 in exact mode, else float32."""
    return 8 if recipe.exact else 4


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not recipe.exact:
        return
    if sharding.zero1(recipe):
        yield (
            "strategy.sharding",
            "OPTIMIZER_STATE (ZeRO-1) has no exact mode; use SHARD_GRAD_OP, which shards the "
            "optimizer state too, or set run.determinism=fast",
        )
    if recipe.strategy.reduce_every_pass:
        yield (
            "strategy.reduce_every_pass",
            "adds up gradients in float32, in an order that depends on the world size; remove "
            "it, or set run.determinism=fast",
        )
    if recipe.batch.micro_batch == "auto":
        yield (
            "batch.micro_batch",
            "the results of an exact run, and its largest number of ranks, depend on this; name a "
            "number instead of auto, or set run.determinism=fast",
        )
    if recipe.precision.dtype == "fp16":
        yield (
            "precision.dtype",
            "fp16 has no exact mode (its range cannot hold the common grid of gradients); use "
            "bf16 or fp32, or set run.determinism=fast",
        )
    if recipe.precision.matmul:
        yield (
            "run.determinism",
            f"precision.matmul={recipe.precision.matmul} has no exact mode; set fast",
        )
    if recipe.optimizer.factory:
        yield (
            "optimizer.factory",
            "only adamw and muon have an exact mode: other updates may round the end of a shard "
            "otherwise; remove it, or set run.determinism=fast",
        )
