"""Predicts all strategies for a recipe on one machine, and recommends one."""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

from trainer.parallel.schedules import bubble_formula
from trainer.plan.blueprint import PlannedModel, read_blueprint
from trainer.plan.costs import PEAK_SHARE, PlannedMachine
from trainer.plan.prediction import Prediction, predict
from trainer.plan.times import PlannedCollective
from trainer.plan.trace import Recompute
from trainer.recipe import Recipe, RecipeError, StrategySection, strategies
from trainer.recipe.rules import contradictions
from trainer.recipe.strategies.dimension import RecipeStrategySizes

ROOM = 0.1
"""Fraction of memory that a recommended strategy leaves free: on a GPU for torch, CUDA, NCCL and
fragmentation; in host memory and on disk for processes and data."""
OFFLOAD_GAIN = 0.05
"""Fraction of the step time that offload must save to be recommended if a strategy without it fits:
smaller differences are within the error of the prediction."""
NVME_DIRECTORY = "/local/nvme"
"""Directory in recommended command lines, unless the recipe names one."""
MANY = 64
"""Number of GPUs from which on model parallelism is tried even if data parallelism fits."""
MICRO_BATCHES = (1, 2, 4)
"""Micro-batches (sequences) that are tried with model parallelism. They are small, because a
pipeline needs many passes."""
PASSES_PER_RANK = 4
"""Least number of passes per pipeline rank that `batch.micro_batch: auto` aims at, which keeps the
bubble below a fifth."""
SHOWN = 5
"""Number of layouts with model parallelism that the table shows: the fastest that fit."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class PlanCandidate:
    """A recipe with one strategy and micro-batch, and its prediction."""

    label: str
    recipe: Recipe
    prediction: Prediction

    def free(self, machine: PlannedMachine) -> float:
        """Return the bytes of GPU memory that are free at the peak; negative if the peak does not
        fit."""
        return machine.gpu.memory - self.prediction.peak

    def fits(self, machine: PlannedMachine) -> bool:
        return not self.lacking(machine)

    def lacking(self, machine: PlannedMachine) -> str:
        """Return what is too small: "over" or "tight" for GPU memory, "host over", "disk tight" and
        so on; "" if all fits with ROOM. Unknown sizes count as large enough."""
        for where, needed, given in (
            ("", self.prediction.peak, machine.gpu.memory),
            ("host ", self.prediction.node_memory, machine.node_memory),
            ("disk ", self.prediction.node_disk, machine.node_disk),
        ):
            if given is not None and needed > (1 - ROOM) * given:
                return where + ("over" if needed > given else "tight")
        return ""


@dataclass(frozen=True)
class Plan:
    """Result of `perdure plan`."""

    recipe: Recipe
    machine: PlannedMachine
    blueprint: PlannedModel
    own: PlanCandidate
    """The recipe's own strategy; if it cannot run on the machine, the first of `candidates`."""
    refused: str
    """Why the recipe's own strategy cannot run on the machine; "" if it can."""
    candidates: tuple[PlanCandidate, ...]
    """One candidate per strategy and kind of recomputation, with its best micro-batch and way to
    reduce gradients."""
    tried: tuple[PlanCandidate, ...]
    """All candidates that were predicted, with every micro-batch."""
    best: PlanCandidate | None
    """The fastest candidate that fits, with offload only if it saves OFFLOAD_GAIN; None if no
    candidate fits."""
    enough_nodes: int | None
    """Number of nodes on which ZeRO-3 with full recomputation fits without offload. None if no
    number suffices, or if it was not searched, because a candidate without offload fits."""


def make_plan(recipe: Recipe, machine: PlannedMachine, device: Literal["cpu", "cuda"]) -> Plan:
    """Predict all strategies for `recipe` on `machine`. Model parallelism is included if the recipe
    uses it, if nothing else fits without offload, or if there are at least MANY GPUs. Candidates
    with model parallelism that cannot be faster than one that fits are skipped. Raises RecipeError
    if the recipe cannot run on so many ranks, or its model cannot be traced."""
    blueprint = read_blueprint(recipe)
    world_size, local = machine.world_size, machine.gpus_per_node
    refusals: list[RecipeError] = []

    def candidates(label: str, *recipes: Recipe) -> list[PlanCandidate]:
        predicted = []
        for given in recipes:
            changed = given
            try:
                if given.batch.micro_batch == "auto":
                    number = largest_micro_batch(
                        given, world_size, local, machine.gpu.memory, device, blueprint=blueprint
                    )
                    changed = _changed(given, given.strategy, number)
                prediction = predict(
                    changed, world_size, local, machine=machine, device=device, blueprint=blueprint
                )
                predicted.append(PlanCandidate(label, changed, prediction))
            except RecipeError as error:  # kept, because another strategy may work
                refusals.append(error)
        return predicted

    own = candidates("as it is", recipe)
    refused = "" if own else str(refusals[0])
    chosen, everything = [], []
    for sharding, strategy in _shardings(recipe, machine, blueprint):
        label = f"{_name(strategy)} {sharding}".strip()
        for changed in _recomputing(strategy):
            if _refused(recipe, changed):
                continue
            tried: list[PlanCandidate] = []
            micro_batches = _micro_batches(recipe, world_size)
            while micro_batches:
                recipes = _reductions(recipe, changed, micro_batches.pop(0), world_size)
                ways = candidates(label, *recipes)
                tried += ways
                if not any(way.fits(machine) for way in ways):
                    # Larger micro-batches need more memory. Only the largest may need less: a step
                    # then has a single pass, and keeps no gradients of earlier passes.
                    del micro_batches[:-1]
            if tried:
                chosen.append(_best(tried, machine) or min(tried, key=lambda c: c.prediction.peak))
                everything += tried
    together = strategies.together(recipe.strategy) > 1 or machine.world_size >= MANY
    if together or not _best_on_gpus(chosen, machine):
        best, cut = _best_on_gpus([*own, *chosen], machine), []
        least = partial(_least_seconds, recipe, machine, blueprint)
        known = {one.label for one in chosen}
        layouts = [one for one in _layouts(recipe, machine, blueprint) if one[0] not in known]
        # Fast layouts come first, so that their times rule out later layouts without a trace.
        for label, strategy in sorted(layouts, key=lambda layout: least(layout[1])):
            limit = best.prediction.seconds_per_step if best else None
            variants = [
                changed
                for changed in _recomputing(strategy)
                if not (limit and least(changed) >= limit) and not _refused(recipe, changed)
            ]
            tried = _of_layout(recipe, variants, machine, partial(candidates, label))
            everything += tried
            if fastest := _best(tried, machine):
                cut.append(fastest)
                best = _best([*filter(None, [best]), fastest], machine)
        chosen += sorted(cut, key=_order)[:SHOWN]
    if not chosen:
        raise refusals[0]
    own = own or chosen[:1]
    best, simple = _best([*own, *chosen], machine), _best_on_gpus([*own, *chosen], machine)
    if best and simple and (1 - OFFLOAD_GAIN) * _order(simple)[0] <= _order(best)[0]:
        best = simple
    nodes = None if simple else _enough_nodes(recipe, machine, device, blueprint)
    return Plan(
        recipe, machine, blueprint, own[0], refused, tuple(chosen), tuple(everything), best, nodes
    )


def _layouts(
    recipe: Recipe, machine: PlannedMachine, blueprint: PlannedModel
) -> Iterator[tuple[str, StrategySection]]:
    """Yield (label, strategy) for layouts of model parallelism that the recipe allows, and whose
    state may fit. Each strategy's module says which numbers of ranks to try. With tensor
    parallelism, which divides no experts, experts are always divided by `ep`."""
    state = sum(
        shape.moment_bytes(1) + (shape.itemsize + 4 * shape.trained) * shape.rows * shape.row
        for unit in blueprint.units
        for shape in unit
    )
    sizes = _tried_sizes(recipe, machine, blueprint)
    world_size, apart = machine.world_size, sizes.experts_apart
    # Layouts without model parallelism were tried already.
    least = 2 if strategies.together(recipe.strategy) == 1 else 1
    modules = strategies.dividing("layers", "sequences", "stages", "experts")
    for values in product(*(module.tried(sizes) for module in modules)):
        layout = StrategySection(
            **{key: value for one in values for key, value in one.items()},
            compile=recipe.strategy.compile,
        )
        layer, cut = strategies.ranks(layout, "layers"), strategies.cut_ranks(layout)
        inside = strategies.ranks(layout, "layers", "sequences")
        replica = strategies.together(layout)
        if replica < least or world_size % replica or machine.gpus_per_node % inside:
            continue
        # Skip layouts with fewer sequences than data-parallel times pipeline ranks, each of which
        # needs a micro-batch to be busy.
        if recipe.batch.global_batch * inside < world_size:
            continue
        if layer > 1 and strategies.ranks(layout, "experts") < apart:
            continue
        in_node, ranks = machine.gpus_per_node // layer, world_size // cut
        ways: list[tuple[str, dict[str, Any], int]] = [
            ("DDP", {"name": "ddp"}, cut),
            ("ZeRO-2", {"sharding": "SHARD_GRAD_OP"}, world_size),
            ("ZeRO-3", {"sharding": "FULL_SHARD"}, world_size),
        ]
        if 1 < in_node < ranks and ranks % in_node == 0:
            ways.append(("hybrid", {"sharding": "HYBRID_SHARD"}, cut * in_node))
        for label, way, sharded in ways:
            strategy = dataclasses.replace(layout, **way)
            # The size of the state is a lower bound of memory that needs no trace.
            too_large = state / sharded > (1 - ROOM) * machine.gpu.memory
            if not (too_large or _refused(recipe, strategy)):
                yield f"{_name(strategy)} {label}".strip(), strategy


def _tried_sizes(
    recipe: Recipe, machine: PlannedMachine, blueprint: PlannedModel
) -> RecipeStrategySizes:
    experts = [shape.rows for unit in blueprint.units for shape in unit if shape.stacked]
    return RecipeStrategySizes(
        machine.world_size, machine.gpus_per_node, recipe.data.seq_len, blueprint.block_count,
        experts,
    )  # fmt: skip


def _name(strategy: StrategySection) -> str:
    """Return the label of a layout, such as TP8 PP16x2 for tp=8 and pp=16 with two stages per
    rank."""
    ranks = strategies.sizes(strategy)
    parts = [f"{key.upper()}{n}" for key, n in ranks.items() if n > 1 and key != "pp"]
    if ranks["pp"] > 1:
        *_, of_each = strategies.pp.shape(strategy)
        parts.append(f"PP{ranks['pp']}" + (f"x{of_each}" if of_each > 1 else ""))
    return " ".join(parts)


def _least_seconds(
    recipe: Recipe, machine: PlannedMachine, blueprint: PlannedModel, strategy: StrategySection
) -> float:
    """Return a lower bound of a step's seconds: the time of arithmetic and pipeline bubble, or of
    FSDP's gathers if they take longer."""
    tokens = recipe.batch.global_batch * recipe.data.seq_len
    speed = machine.peak_flops * PEAK_SHARE * machine.world_size
    # Full recomputation repeats forward, which is a third of the work.
    again = 4 / 3 if strategy.activation_checkpointing == "full" else 1.0
    cut, stride = strategies.cut_ranks(strategy), strategies.ranks(strategy, "layers")
    shards = machine.world_size // cut
    passes = -(-recipe.batch.global_batch * strategies.ranks(strategy, "sequences") // shards)
    bubble = bubble_formula(*strategies.pp.shape(strategy), passes)
    computing = again * blueprint.flops_per_token * tokens / speed / (1 - bubble)
    if strategy.name == "ddp":
        return computing
    changed = dataclasses.replace(recipe, strategy=strategy)
    # The fewest gathers: those with the largest micro-batch that is tried.
    gathers = passes / max(MICRO_BATCHES) * (2 if changed.gathers_twice else 1)
    shards = strategies.sharding.group(changed, shards, machine.gpus_per_node // stride)
    apart = strategies.ep.ranks(strategy)
    gathered = sum(
        shape.rows * shape.row * shape.size_as(2) / (apart if shape.stacked else 1)
        for unit in blueprint.units
        for shape in unit
    )
    payload = gathers * gathered / cut
    return max(computing, PlannedCollective(int(payload), 1, shards, stride).seconds(machine))


def _of_layout(
    recipe: Recipe,
    variants: Sequence[StrategySection],
    machine: PlannedMachine,
    candidates: Callable[..., list[PlanCandidate]],
) -> list[PlanCandidate]:
    """Predict the candidates of a layout: take the first variant that fits, the one with the least
    recomputation, and double the micro-batch while steps get faster."""
    tried: list[PlanCandidate] = []
    for strategy in variants:
        fastest = None
        alone = _micro_batches(_changed(recipe, strategy, 1), machine.world_size)
        for micro_batch in MICRO_BATCHES if strategies.together(strategy) > 1 else alone:
            ways: list[PlanCandidate] = []
            for way in _reductions(recipe, strategy, micro_batch, machine.world_size):
                ways += candidates(way)
                if _best(ways, machine):
                    break  # reducing after every pass is slower, and only saves memory
            tried += ways
            better = _best(ways, machine)
            if not better or (fastest and _order(better) > _order(fastest)):
                break
            fastest = better
        if fastest:
            break
    return tried


def largest_micro_batch(
    recipe: Recipe,
    world_size: int,
    local_world_size: int,
    memory: float,
    device: Literal["cpu", "cuda"],
    *,
    blueprint: PlannedModel | None = None,
) -> int:
    """Return the largest micro-batch that fits with ROOM, and leaves a pipeline enough passes; 1 if
    no micro-batch does. `batch.micro_batch` is ignored. `memory`: bytes of a GPU; on CPUs bytes of
    a node. Raises RecipeError if the model cannot be traced."""
    blueprint = blueprint or read_blueprint(recipe)

    def too_large(micro_batch: int) -> bool:
        prediction = predict(
            _changed(recipe, recipe.strategy, micro_batch), world_size, local_world_size,
            device=device, gpu_memory=memory, blueprint=blueprint,
        )  # fmt: skip
        needed = prediction.node_memory if device == "cpu" else prediction.peak
        return needed > (1 - ROOM) * memory

    sizes, ranks = _micro_batches(recipe, world_size), strategies.pp.ranks(recipe.strategy)
    if ranks > 1:
        sizes = [n for n in sizes if n == 1 or sizes[-1] / n >= PASSES_PER_RANK * ranks]
    # Memory grows with the micro-batch, so bisection finds the largest that fits.
    return sizes[max(0, bisect_left(sizes, True, key=too_large) - 1)]


def _shardings(
    recipe: Recipe, machine: PlannedMachine, blueprint: PlannedModel
) -> Iterator[tuple[str, StrategySection]]:
    """Yield (DeepSpeed's name, strategy) for all shardings, with the recipe's own model
    parallelism. Experts are whole, or divided among the ranks of a node."""
    plain = _shared_part(recipe)
    yield "DDP", dataclasses.replace(plain, name="ddp")
    if not strategies.exact.used(recipe):
        yield "ZeRO-1", dataclasses.replace(plain, sharding="OPTIMIZER_STATE")
    two = dataclasses.replace(plain, sharding="SHARD_GRAD_OP")
    three = dataclasses.replace(plain, sharding="FULL_SHARD")
    yield "ZeRO-2", two
    yield "ZeRO-3", three
    ep = _tried_sizes(recipe, machine, blueprint).experts_apart
    if ep > 1:
        yield "ZeRO-2", dataclasses.replace(two, ep=ep)
        yield "ZeRO-3", dataclasses.replace(three, ep=ep)
    shard_size = recipe.strategy.shard_size
    hybrid = dataclasses.replace(plain, sharding="HYBRID_SHARD", shard_size=shard_size)
    size = shard_size or machine.gpus_per_node // strategies.ranks(plain, "layers")
    ranks = machine.world_size // strategies.cut_ranks(plain)
    has_hybrid = 0 < size < ranks and ranks % size == 0
    if has_hybrid:
        yield "hybrid", hybrid
    yield "ZeRO-2, CPU offload", dataclasses.replace(two, offload="cpu")
    yield "ZeRO-3, CPU offload", dataclasses.replace(three, offload="cpu")
    if has_hybrid:
        yield "hybrid, CPU offload", dataclasses.replace(hybrid, offload="cpu")
    directory = recipe.strategy.offload_directory or NVME_DIRECTORY
    yield (
        "ZeRO-3, NVMe offload",
        dataclasses.replace(three, offload="nvme", offload_directory=directory),
    )


def _refused(recipe: Recipe, strategy: StrategySection) -> bool:
    """Return whether keys of a changed strategy contradict each other. Contradictions of the user's
    own strategy were reported when the recipe was read."""
    recipe = _changed(recipe, strategy, 1)
    if strategies.ep.ranks(strategy) > 1:  # ep also contradicts keys of other sections
        return any(contradictions(recipe))
    narrow = recipe.precision.master != "fp32" or recipe.optimizer.state_dtype != "fp32"
    return (strategies.together(strategy) > 1 or narrow) and any(
        key.startswith("strategy.") for key, _ in contradictions(recipe)
    )


def _recomputing(strategy: StrategySection) -> list[StrategySection]:
    """Return the strategy with each kind of recomputation, the least first."""
    return [dataclasses.replace(strategy, activation_checkpointing=one) for one in RECOMPUTES]


def _shared_part(recipe: Recipe) -> StrategySection:
    """Return what all candidates share of the recipe's strategy: `compile`, and model parallelism
    other than of experts."""
    shared = strategies.dividing("layers", "sequences", "stages")
    parallel = strategies.only(recipe.strategy, *shared)
    return dataclasses.replace(parallel, compile=recipe.strategy.compile)


def _dp_size(recipe: Recipe, world_size: int) -> int:
    return max(1, world_size // strategies.together(recipe.strategy))


def _micro_batches(recipe: Recipe, world_size: int) -> list[int]:
    """Return the micro-batches to try: powers of two, and all sequences of a rank at once."""
    per_rank = max(1, -(-recipe.batch.global_batch // _dp_size(recipe, world_size)))
    if strategies.exact.used(recipe):  # the micro-batch changes the result of an exact run
        return [recipe.micro_batch]
    return sorted({per_rank, *(1 << n for n in range(per_rank.bit_length()))})


def _reductions(
    recipe: Recipe, strategy: StrategySection, micro_batch: int, world_size: int
) -> list[Recipe]:
    """Return the changed recipe and, if steps have several passes, its variant that reduces
    gradients after every pass."""
    changed = _changed(recipe, strategy, micro_batch)
    several = micro_batch * _dp_size(changed, world_size) < recipe.batch.global_batch
    by_fsdp = strategies.sharding.by_fsdp(changed)
    in_float32 = not strategies.exact.used(recipe) and recipe.precision.master == "fp32"
    if several and by_fsdp and in_float32 and not strategies.pp.splits_backward(strategy):
        every_pass = dataclasses.replace(strategy, reduce_every_pass=True)
        return [changed, _changed(recipe, every_pass, micro_batch)]
    return [changed]


def _changed(recipe: Recipe, strategy: StrategySection, micro_batch: int) -> Recipe:
    batch = dataclasses.replace(recipe.batch, micro_batch=micro_batch)
    checkpoint = recipe.checkpoint
    # Slots that the recipe has in its offload directory stay in the offload directory.
    if checkpoint.slot_directory == recipe.strategy.offload_directory:
        checkpoint = dataclasses.replace(checkpoint, slot_directory=strategy.offload_directory)
    return dataclasses.replace(recipe, strategy=strategy, batch=batch, checkpoint=checkpoint)


def _order(candidate: PlanCandidate) -> tuple[float, int]:
    return candidate.prediction.seconds_per_step or 0.0, candidate.prediction.peak


def _best_on_gpus(candidates: list[PlanCandidate], machine: PlannedMachine) -> PlanCandidate | None:
    on_gpus = [c for c in candidates if not strategies.offload.used(c.recipe.strategy)]
    return _best(on_gpus, machine)


def _best(candidates: list[PlanCandidate], machine: PlannedMachine) -> PlanCandidate | None:
    return min((c for c in candidates if c.fits(machine)), key=_order, default=None)


def _enough_nodes(
    recipe: Recipe, machine: PlannedMachine, device: Literal["cpu", "cuda"], blueprint: PlannedModel
) -> int | None:
    """Double the nodes until ZeRO-3 with full recomputation fits without offload, and return their
    number; None if none suffices. The smallest micro-batch and a single pass are tried."""
    strategy = dataclasses.replace(
        _shared_part(recipe), sharding="FULL_SHARD", activation_checkpointing="full", compile=False
    )
    nodes = 2 * machine.nodes
    while nodes <= 1 << 16:
        larger = dataclasses.replace(machine, nodes=nodes)
        micro_batches = _micro_batches(recipe, larger.world_size)
        for micro_batch in {micro_batches[0], micro_batches[-1]}:
            for thrifty in _reductions(recipe, strategy, micro_batch, larger.world_size):
                try:
                    prediction = predict(
                        thrifty, larger.world_size, larger.gpus_per_node, machine=larger,
                        device=device, blueprint=blueprint,
                    )  # fmt: skip
                except RecipeError:  # there are more ranks than sequences in a batch
                    return None
                if PlanCandidate("", thrifty, prediction).fits(larger):
                    return nodes
        nodes *= 2
    return None
