"""Every strategy on one machine: predictions, and which one to take."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

from trainer.parallel.schedules import bubble_formula
from trainer.plan.blueprint import Blueprint, read_blueprint
from trainer.plan.costs import PEAK_SHARE, Machine
from trainer.plan.prediction import Prediction, predict
from trainer.plan.trace import Recompute
from trainer.plan.traffic import Collective
from trainer.recipe import Recipe, RecipeError, Strategy, strategies
from trainer.recipe.rules import contradictions

ROOM = 0.1
"""Share of a GPU's memory that a recommended strategy leaves free: for what torch, CUDA and NCCL
need for themselves, and for fragmentation. Of a host's memory and disk as well: for processes and
data."""
OFFLOAD_GAIN = 0.05
"""Share of the time that offload must save to be recommended where something else fits: a roofline
does not tell less, and a slower host than is assumed would turn it round."""
NVME_DIRECTORY = "/local/nvme"
"""In recommended lines, unless the recipe names its own."""
MANY = 64
"""GPUs from which on model parallelism is looked at even where data alone can be shared."""
LONG = 16_384
"""Tokens of a sequence from which on it may be cut."""
STAGES_PER_RANK = (2, 4)
MICRO_BATCHES = (1, 2, 4)
"""Those that are tried with model parallelism: a pipeline needs many passes."""
PASSES_PER_RANK = 4
"""Passes for each rank of a pipeline that `batch.micro_batch: auto` leaves where there are so many:
its bubble is then below a fifth."""
SHOWN = 5
"""Layouts of model parallelism in the table: the fastest that fit."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """One way to run a recipe."""

    label: str
    recipe: Recipe
    prediction: Prediction

    def free(self, machine: Machine) -> float:
        """Bytes of a GPU's memory that are left at the peak; negative when it does not fit."""
        return machine.gpu.memory - self.prediction.peak

    def fits(self, machine: Machine) -> bool:
        """With ROOM: on the GPU, in host memory, on the disk."""
        return not self.lacking(machine)

    def lacking(self, machine: Machine) -> str:
        """What there is too little of: "over" or "tight" on the GPU, "host over", "disk tight" and
        so on; empty if it fits with ROOM. What is not known of a machine is never short."""
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
    """What `perdure plan` tells."""

    recipe: Recipe
    machine: Machine
    blueprint: Blueprint
    own: Candidate
    """The recipe as it is; the first of `candidates`, if it cannot run there."""
    refused: str
    """Why it cannot; empty if it can."""
    candidates: tuple[Candidate, ...]
    """One per strategy and kind of recomputation, each with its best micro-batch and way to
    reduce."""
    tried: tuple[Candidate, ...]
    """All of them, with every micro-batch up to the first that does not fit, and with a single
    pass."""
    best: Candidate | None
    """The fastest that fits, with offload only if that saves OFFLOAD_GAIN; None when none does."""
    enough_nodes: int | None
    """If none does, or only with offload: nodes of this kind on which ZeRO-3 with full
    recomputation would without, with some micro-batch, if any number does."""


def make_plan(recipe: Recipe, machine: Machine, device: Literal["cpu", "cuda"]) -> Plan:
    """Predict every strategy of `recipe` on `machine`, and model parallelism where there is a point
    in it: where the recipe has some, where nothing else fits without offload, and from MANY GPUs
    on. What cannot be faster than what fits already is left out.

    Raises:
        RecipeError: the recipe cannot run on so many ranks, or its model cannot be traced.
    """
    blueprint = read_blueprint(recipe)
    world_size, local = machine.world_size, machine.gpus_per_node
    refusals: list[RecipeError] = []

    def candidates(label: str, *recipes: Recipe) -> list[Candidate]:
        found = []
        for changed in recipes:
            try:
                prediction = predict(
                    changed, world_size, local, machine=machine, device=device, blueprint=blueprint
                )
                found.append(Candidate(label, changed, prediction))
            except RecipeError as error:  # with other ranks for the data it may do
                refusals.append(error)
        return found

    own = candidates("as it is", *_as_it_is(recipe, machine, device, blueprint, refusals))
    refused = "" if own else str(refusals[0])
    found, everything = [], []
    for label, strategy in _strategies(recipe, machine, blueprint):
        for recompute in RECOMPUTES:
            changed = dataclasses.replace(strategy, activation_checkpointing=recompute)
            if _refused(_changed(recipe, changed, 1)):
                continue
            tried: list[Candidate] = []
            micro_batches = _micro_batches(recipe, world_size)
            while micro_batches:
                micro_batch = micro_batches.pop(0)
                reductions = _reductions(recipe, changed, micro_batch, world_size)
                recipes = [_changed(recipe, way, micro_batch) for way in reductions]
                ways = candidates(label, *recipes)
                tried += ways
                if not any(way.fits(machine) for way in ways):
                    # Larger ones need more, but for the last one: a single pass leaves no gradients
                    # to the next.
                    del micro_batches[:-1]
            if tried:
                found.append(_best(tried, machine) or min(tried, key=lambda c: c.prediction.peak))
                everything += tried
    together = recipe.strategy.together > 1 or machine.world_size >= MANY
    if together or not _best_on_gpus(found, machine):
        best, cut = _best_on_gpus([*own, *found], machine), []
        least = partial(_least_seconds, recipe, machine, blueprint)
        known = {one.label for one in found}
        layouts = [one for one in _layouts(recipe, machine, blueprint) if one[0] not in known]
        for label, strategy in sorted(layouts, key=lambda layout: least(layout[1])):
            limit = best.prediction.seconds_per_step if best else None
            recomputes = [
                recompute
                for recompute in RECOMPUTES
                for changed in [dataclasses.replace(strategy, activation_checkpointing=recompute)]
                if not (limit and least(changed) >= limit)
                and not _refused(_changed(recipe, changed, 1))
            ]
            tried = _of_layout(recipe, strategy, recomputes, machine, partial(candidates, label))
            everything += tried
            if fastest := _best(tried, machine):
                cut.append(fastest)
                best = _best([*filter(None, [best]), fastest], machine)
        found += sorted(cut, key=_order)[:SHOWN]
    if not found:
        raise refusals[0]
    own = own or found[:1]
    best, simple = _best([*own, *found], machine), _best_on_gpus([*own, *found], machine)
    if best and simple and (1 - OFFLOAD_GAIN) * _order(simple)[0] <= _order(best)[0]:
        best = simple
    nodes = None if simple else _enough_nodes(recipe, machine, device, blueprint)
    return Plan(
        recipe, machine, blueprint, own[0], refused, tuple(found), tuple(everything), best, nodes
    )


def _as_it_is(
    recipe: Recipe,
    machine: Machine,
    device: Literal["cpu", "cuda"],
    blueprint: Blueprint,
    refusals: list[RecipeError],
) -> list[Recipe]:
    if recipe.batch.micro_batch != "auto":
        return [recipe]
    try:
        number = largest_micro_batch(
            recipe, machine.world_size, machine.gpus_per_node, machine.gpu.memory, device,
            blueprint=blueprint,
        )  # fmt: skip
    except RecipeError as error:
        refusals.append(error)
        return []
    return [_changed(recipe, recipe.strategy, number)]


def _layouts(
    recipe: Recipe, machine: Machine, blueprint: Blueprint
) -> Iterator[tuple[str, Strategy]]:
    """Model parallelism that the recipe can have there, and whose state may fit. Ranks that compute
    a layer together stay in a node, stages are apart; a step computes whole sequences until they
    are LONG. Experts are divided among the ranks of a node, or without tp whole."""
    apart = _experts_apart(machine, blueprint)
    powers = [1 << n for n in range(machine.world_size.bit_length())]
    state = sum(
        shape.moment_bytes(1) + (shape.itemsize + 4 * shape.trained) * shape.rows * shape.row
        for unit in blueprint.units
        for shape in unit
    )
    rings = powers if recipe.data.seq_len >= LONG else [1]
    least = 2 if recipe.strategy.together == 1 else 1  # without any, they are tried already
    for tp, cp, pp in product(powers, rings, powers):
        replica = tp * cp * pp
        if replica < least or machine.world_size % replica or machine.gpus_per_node % (tp * cp):
            continue
        if recipe.batch.global_batch * tp * cp < machine.world_size:  # fewer passes than stages
            continue
        in_node, ranks = machine.gpus_per_node // tp, machine.world_size // (tp * pp)
        ways = [
            ("DDP", Strategy(name="ddp"), tp * pp),
            ("ZeRO-2", Strategy(sharding="SHARD_GRAD_OP"), machine.world_size),
            ("ZeRO-3", Strategy(sharding="FULL_SHARD"), machine.world_size),
        ]
        if 1 < in_node < ranks and ranks % in_node == 0:
            ways.append(("hybrid", Strategy(sharding="HYBRID_SHARD"), tp * pp * in_node))
        per_rank = (1, *STAGES_PER_RANK) if pp > 1 else (1,)
        for stages, ep in product(per_rank, {apart} if tp > 1 else sorted({1, apart})):
            if pp * stages > blueprint.block_count:
                break
            for label, way, sharded in ways:
                strategy = dataclasses.replace(
                    way, tp=tp, sequence_parallel=tp > 1, cp=cp, pp=pp, pp_stages_per_rank=stages,
                    pp_schedule="interleaved_1f1b" if stages > 1 else "1f1b", ep=ep,
                    compile=recipe.strategy.compile,
                )  # fmt: skip
                too_large = state / sharded > (1 - ROOM) * machine.gpu.memory
                changed = _changed(recipe, strategy, 1)
                if not (too_large or _refused(changed)):
                    yield f"{_name(strategy)} {label}".strip(), strategy


def _experts_apart(machine: Machine, blueprint: Blueprint) -> int:
    """Ranks of a node that can divide the experts of a model; 1 if it has none."""
    stacks = [shape.rows for unit in blueprint.units for shape in unit if shape.stacked]
    return math.gcd(machine.gpus_per_node, *stacks) if stacks else 1


def _name(strategy: Strategy) -> str:
    """TP8 PP16x2: eight ranks for each layer, sixteen with two stages each."""
    ranks = strategies.sizes(strategy)
    parts = [f"{key.upper()}{n}" for key, n in ranks.items() if n > 1 and key != "pp"]
    if ranks["pp"] > 1:
        *_, of_each = strategies.pp.shape(strategy)
        parts.append(f"PP{ranks['pp']}" + (f"x{of_each}" if of_each > 1 else ""))
    return " ".join(parts)


def _least_seconds(
    recipe: Recipe, machine: Machine, blueprint: Blueprint, strategy: Strategy
) -> float:
    """Seconds of a step, with the smallest passes: arithmetic and the bubble of a pipeline, or what
    FSDP gathers in that time."""
    tokens = recipe.batch.global_batch * recipe.data.seq_len
    speed = machine.peak_flops * PEAK_SHARE * machine.world_size
    again = 4 / 3 if strategy.activation_checkpointing == "full" else 1.0  # forward is a third
    cut, stride = strategies.cut_ranks(strategy), strategies.tp.ranks(strategy)
    shards = machine.world_size // cut
    passes = -(-recipe.batch.global_batch * strategies.cp.ranks(strategy) // shards)
    bubble = bubble_formula(*strategies.pp.shape(strategy), passes)
    computing = again * blueprint.flops_per_token * tokens / speed / (1 - bubble)
    if strategy.name == "ddp":
        return computing
    changed = dataclasses.replace(recipe, strategy=strategy)
    gathers = passes / max(MICRO_BATCHES) * (2 if changed.gathers_twice else 1)
    shards = strategies.sharding.group(changed, shards, machine.gpus_per_node // stride)
    apart = strategies.ep.ranks(strategy)
    gathered = sum(
        shape.rows * shape.row * shape.size_as(2) / (apart if shape.stacked else 1)
        for unit in blueprint.units
        for shape in unit
    )
    payload = gathers * gathered / cut
    return max(computing, Collective(int(payload), 1, shards, stride).seconds(machine))


def _of_layout(
    recipe: Recipe,
    strategy: Strategy,
    recomputes: Sequence[Recompute],
    machine: Machine,
    candidates: Callable[..., list[Candidate]],
) -> list[Candidate]:
    """With the least recomputation that fits, and twice the micro-batch as long as that is
    faster."""
    tried: list[Candidate] = []
    alone = _micro_batches(_changed(recipe, strategy, 1), machine.world_size)
    micro_batches = MICRO_BATCHES if strategy.together > 1 else alone
    for recompute in recomputes:
        changed = dataclasses.replace(strategy, activation_checkpointing=recompute)
        fastest = None
        for micro_batch in micro_batches:
            ways: list[Candidate] = []
            for way in _reductions(
                _changed(recipe, changed, micro_batch), changed, micro_batch, machine.world_size
            ):
                ways += candidates(_changed(recipe, way, micro_batch))
                if _best(ways, machine):
                    break  # to reduce after every pass saves memory, and nothing else
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
    blueprint: Blueprint | None = None,
) -> int:
    """Sequences of the largest pass that leaves ROOM, and a pipeline enough passes to fill it; 1 if
    none does.

    Args:
        recipe: whose `batch.micro_batch` does not count.
        world_size: ranks.
        local_world_size: ranks on each node.
        memory: bytes of a GPU, or on CPUs of a node.
        device: what the ranks run on.
        blueprint: of the recipe's model, if it is there.

    Raises:
        RecipeError: its model cannot be traced.
    """
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
    return sizes[max(0, bisect_left(sizes, True, key=too_large) - 1)]


def _strategies(
    recipe: Recipe, machine: Machine, blueprint: Blueprint
) -> Iterator[tuple[str, Strategy]]:
    """What `trainer.parallel` offers, and DeepSpeed's name for it; with the recipe's model
    parallelism. Experts whole, and divided among the ranks of a node."""
    for name, strategy in _shardings(recipe, machine, blueprint):
        yield " ".join(filter(None, (_name(strategy), name))), strategy


def _shardings(
    recipe: Recipe, machine: Machine, blueprint: Blueprint
) -> Iterator[tuple[str, Strategy]]:
    plain = _plain(recipe)
    yield "DDP", dataclasses.replace(plain, name="ddp")
    if not strategies.exact.used(recipe):
        yield "ZeRO-1", dataclasses.replace(plain, sharding="OPTIMIZER_STATE")
    two = dataclasses.replace(plain, sharding="SHARD_GRAD_OP")
    three = dataclasses.replace(plain, sharding="FULL_SHARD")
    yield "ZeRO-2", two
    yield "ZeRO-3", three
    ep = _experts_apart(machine, blueprint)
    if ep > 1:
        yield "ZeRO-2", dataclasses.replace(two, ep=ep)
        yield "ZeRO-3", dataclasses.replace(three, ep=ep)
    shard_size = recipe.strategy.shard_size
    hybrid = dataclasses.replace(plain, sharding="HYBRID_SHARD", shard_size=shard_size)
    size = shard_size or machine.gpus_per_node // strategies.tp.ranks(plain)
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


def _refused(recipe: Recipe) -> bool:
    """Whether its strategy does not go with the model parallelism or the formats that it has. What
    else a recipe contradicts itself in was told when it was read."""
    strategy = recipe.strategy
    if strategies.ep.ranks(strategy) > 1:  # it goes with few other keys, too
        return any(contradictions(recipe))
    narrow = recipe.precision.master != "fp32" or recipe.optimizer.state_dtype != "fp32"
    return (strategy.together > 1 or narrow) and any(
        key.startswith("strategy.") for key, _ in contradictions(recipe)
    )


def _plain(recipe: Recipe) -> Strategy:
    """Nothing but what every candidate has in common."""
    parallel = strategies.only(recipe.strategy, strategies.tp, strategies.pp, strategies.cp)
    return dataclasses.replace(parallel, compile=recipe.strategy.compile)


def _dp_size(recipe: Recipe, world_size: int) -> int:
    """Parts into which a world shares the data."""
    return max(1, world_size // recipe.strategy.together)


def _micro_batches(recipe: Recipe, world_size: int) -> list[int]:
    """Powers of two, and all that a rank has to do."""
    per_rank = max(1, -(-recipe.batch.global_batch // _dp_size(recipe, world_size)))
    if strategies.exact.used(recipe):  # what counts as a micro-batch is part of such a run
        return [recipe.micro_batch]
    return sorted({per_rank, *(1 << n for n in range(per_rank.bit_length()))})


def _reductions(
    recipe: Recipe, strategy: Strategy, micro_batch: int, world_size: int
) -> list[Strategy]:
    """Gradients may be reduced after every pass, if there are several."""
    several = micro_batch * _dp_size(recipe, world_size) < recipe.batch.global_batch
    by_fsdp = strategies.sharding.by_fsdp(dataclasses.replace(recipe, strategy=strategy))
    in_float32 = not strategies.exact.used(recipe) and recipe.precision.master == "fp32"
    if several and by_fsdp and in_float32 and not strategies.pp.splits_backward(strategy):
        return [strategy, dataclasses.replace(strategy, reduce_every_pass=True)]
    return [strategy]


def _changed(recipe: Recipe, strategy: Strategy, micro_batch: int) -> Recipe:
    batch = dataclasses.replace(recipe.batch, micro_batch=micro_batch)
    checkpoint = recipe.checkpoint
    if checkpoint.slot_directory == recipe.strategy.offload_directory:  # which it follows
        checkpoint = dataclasses.replace(checkpoint, slot_directory=strategy.offload_directory)
    return dataclasses.replace(recipe, strategy=strategy, batch=batch, checkpoint=checkpoint)


def _order(candidate: Candidate) -> tuple[float, int]:
    """Fast before slow; of equally fast ones, small before large."""
    return candidate.prediction.seconds_per_step or 0.0, candidate.prediction.peak


def _best_on_gpus(candidates: list[Candidate], machine: Machine) -> Candidate | None:
    on_gpus = [c for c in candidates if not strategies.offload.used(c.recipe.strategy)]
    return _best(on_gpus, machine)


def _best(candidates: list[Candidate], machine: Machine) -> Candidate | None:
    return min((c for c in candidates if c.fits(machine)), key=_order, default=None)


def _enough_nodes(
    recipe: Recipe, machine: Machine, device: Literal["cpu", "cuda"], blueprint: Blueprint
) -> int | None:
    """The smallest doubling of the nodes on which the thriftiest strategy without offload fits:
    with the smallest micro-batch, or with a single pass, which keeps no gradients for another."""
    strategy = dataclasses.replace(
        _plain(recipe), sharding="FULL_SHARD", activation_checkpointing="full", compile=False
    )
    nodes = 2 * machine.nodes
    while nodes <= 1 << 16:
        larger = dataclasses.replace(machine, nodes=nodes)
        micro_batches = _micro_batches(recipe, larger.world_size)
        for micro_batch in {micro_batches[0], micro_batches[-1]}:
            for way in _reductions(recipe, strategy, micro_batch, larger.world_size):
                thrifty = _changed(recipe, way, micro_batch)
                try:
                    prediction = predict(
                        thrifty, larger.world_size, larger.gpus_per_node, machine=larger,
                        device=device, blueprint=blueprint,
                    )  # fmt: skip
                except RecipeError:  # more ranks than sequences
                    return None
                if Candidate("", thrifty, prediction).fits(larger):
                    return nodes
        nodes *= 2
    return None
