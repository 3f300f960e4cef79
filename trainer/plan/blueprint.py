"""What a plan starts from: the model of a recipe without weights and data, with the shapes of its
parameters and pipeline stages; and the division of the work among ranks."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import torch
from torch import nn

from checkpointing.format.nf4 import weights_in
from trainer.models import Decoder
from trainer.models.adapter import LoraLinear, add_adapters
from trainer.optim.optimizer import OptimizerStateTensor, state_of
from trainer.parallel.expert import stacked_modules
from trainer.parallel.fsdp import gathers_ahead_on_cpu
from trainer.parallel.mesh import REPLICATE, SHARD, MeshGroupShape, groups_of, is_sharded_by_fsdp
from trainer.parallel.parallelize import cut_layers, keep_weights
from trainer.recipe import Recipe, StrategySection
from trainer.recipe.factory import refusing
from trainer.recipe.sections import OptimizerSection
from trainer.recipe.strategies import dividing, only, ranks, sizes, together
from trainer.recipe.strategies.exact import batch_plan
from trainer.tasks.model_blocks import repeated_blocks
from trainer.tasks.task import bare_model
from trainer.tasks.text_model import documents_for

DEPTH = 2
"""Number of blocks that are traced if all blocks are equal: the last block, and one before it."""


@dataclass(frozen=True)
class PlannedParameter:
    """What the plan needs of a parameter: size, shards on dim 0, optimizer state, gradient."""

    rows: int
    """Length of dim 0; 1 for a scalar."""
    row: int
    """Elements per row."""
    itemsize: int
    state: tuple[OptimizerStateTensor, ...] = ()
    stacked: bool = False
    """Whether dim 0 is over experts."""
    divided: int = 1
    """Number of tensor- or expert-parallel ranks that divide the rows, before FSDP shards them."""
    beside: int = 1
    """For experts with `divided` > 1: the number of tp ranks, over which FSDP shards them too."""
    trained: bool = True
    """Whether the parameter has a gradient; otherwise it is frozen."""
    number: bool = True
    """Whether elements are floating-point numbers, which FSDP casts; otherwise they are bytes."""
    weights: int = 0
    """Number of weights: elements, or weights encoded in the bytes."""

    @property
    def whole(self) -> int:
        """Number of elements that a rank holds after FSDP's all-gather."""
        return -(-self.rows // self.divided) * self.row

    def over(self, ranks: int) -> int:
        """Return the number of ranks over which FSDP shards this parameter, if it shards ordinary
        parameters over `ranks`."""
        return max(1, ranks * self.beside // self.divided)

    def sharded(self, ranks: int) -> int:
        """Return the number of elements in the first rank's shard, which is the largest."""
        return -(-self.rows // (self.divided * self.over(ranks))) * self.row

    def gathered(self, ranks: int) -> int:
        """Return the number of elements, including padding, in FSDP's all-gather."""
        return self.over(ranks) * self.sharded(ranks)

    def size_as(self, itemsize: int | None) -> int:
        """Return the bytes per element after a cast to `itemsize` bytes. There is no cast to None,
        nor of elements that are no numbers."""
        return itemsize if itemsize and self.number else self.itemsize

    def state_bytes(self, ranks: int) -> int:
        """Return the bytes of the optimizer's state on the first rank."""
        return sum(tensor.nbytes(self.sharded(ranks)) for tensor in self.state)

    def moment_bytes(self, ranks: int) -> int:
        """Return the bytes of the optimizer's state on the first rank, without step counts and
        other tensors that are not sharded as the parameter is."""
        return sum(t.nbytes(self.sharded(ranks)) for t in self.state if t.block)

    @property
    def saved_bytes(self) -> int:
        """Bytes of parameter and optimizer state in a checkpoint, without step counts."""
        state = sum(tensor.nbytes(self.rows * self.row) for tensor in self.state if tensor.shape)
        return self.rows * self.row * self.itemsize + state


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """The model of a recipe on the meta device, with the shapes of its parameters."""

    recipe: Recipe
    model: nn.Module
    traced: nn.Module
    """The model that is traced: `model`, or an equal model with fewer blocks."""
    block_count: int
    seq_len: int
    documents: Literal["document_ids", "cu_seqlens"] | None
    """The argument by which the model gets document boundaries; None: it gets none."""
    flops_per_token: float
    units: tuple[tuple[PlannedParameter, ...], ...]
    """Parameters by FSDP unit: the first unit has all parameters outside of blocks, and each block
    is a unit. Tied parameters appear once."""
    buffers: int
    """Bytes of the model's buffers."""
    optimizer: OptimizerSection

    @property
    def parameter_count(self) -> int:
        return sum(shape.weights for unit in self.units for shape in unit)

    @property
    def trained_count(self) -> int:
        return sum(shape.rows * shape.row for unit in self.units for shape in trained_of(unit))


def read_blueprint(recipe: Recipe) -> PlannedModel:
    """Build the model of a recipe on the meta device. Raises RecipeError if that is not possible,
    or ModelConfigError if the config.json of `model.init_from` cannot be used."""
    model, blocks, flops = bare_model(recipe)
    # A user's factory may return a model with weights, which planning does not need.
    model = model.to("meta")
    traced = model
    if recipe.model.factory:  # a trace changes a copy of the model, so copying must work
        what = f"a copy of {type(model).__name__}, which planning needs,"
        with refusing("model.factory", what):
            copy.deepcopy(model)
    if isinstance(model, Decoder) and len(blocks) > DEPTH:
        with torch.device("meta"):
            shallow = dataclasses.replace(model.model.architecture, num_hidden_layers=DEPTH)
            traced = Decoder(shallow, recipe.model.attention, model.family)
        traced.preference = model.preference
        if recipe.model.adapter:  # selects layers by suffix, because indices of blocks differ
            layers = [name for name, one in model.named_modules() if isinstance(one, LoraLinear)]
            suffixes = tuple({name.rpartition(".")[2] for name in layers})
            adapter = dataclasses.replace(recipe.model.adapter, targets=suffixes)
            add_adapters(traced, adapter, recipe.precision.dtype)
    for one in (model, traced):
        keep_weights(one, recipe)
    return PlannedModel(
        recipe=recipe,
        model=model,
        traced=traced,
        block_count=len(blocks),
        seq_len=recipe.data.seq_len,
        documents=documents_for(recipe),
        flops_per_token=flops,
        units=_units(model, blocks, recipe.optimizer),
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        optimizer=recipe.optimizer,
    )


Units: TypeAlias = tuple[tuple[PlannedParameter, ...], ...]


def _units(model: nn.Module, blocks: Sequence[nn.Module], optimizer: OptimizerSection) -> Units:
    in_blocks = {p for block in blocks for p in block.parameters()}
    rest = [p for p in model.parameters() if p not in in_blocks]
    units = [rest, *(list(block.parameters()) for block in blocks)]
    named = dict(model.named_parameters())
    state = state_of(named, optimizer)
    kept = {parameter: state[name] for name, parameter in named.items()}
    stacked = {p for module in stacked_modules(model) for p in module.parameters()}
    return tuple(tuple(_shape(p, kept[p], p in stacked) for p in unit) for unit in units)


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """The shapes of a pipeline stage: some blocks, with the embedding if it is the first stage and
    the head if it is the last. Without a pipeline there is one stage, the whole model."""

    first: bool
    last: bool
    blocks: int
    units: Units
    """Parameters by FSDP unit as in `PlannedModel`, cut by tensor parallelism."""
    tied: tuple[PlannedParameter, ...] = ()
    """The embedding weight, if another stage holds it too."""


def stage_of(blueprint: PlannedModel, blocks: range, cut: StrategySection) -> PlannedStage:
    """Return the shapes of the pipeline stage with these blocks, on one of the ranks that compute
    each layer together. `cut`: strategy that says how layers and experts are divided. Raises
    RecipeError if the model cannot be divided that way."""
    first, last = blocks.start == 0, blocks.stop == blueprint.block_count
    return _stage_of(
        blueprint, first, last, len(blocks), only(cut, *dividing("layers")), ranks(cut, "experts")
    )


@cache
def _stage_of(
    blueprint: PlannedModel, first: bool, last: bool, blocks: int, cut: StrategySection, apart: int
) -> PlannedStage:
    together = ranks(cut, "layers")
    if first and last and together == 1:
        return PlannedStage(True, True, blocks, _divided(blueprint.units, apart, together))
    whole = _divided(_units_of_part(blueprint, True, True, cut), apart, together)
    if not isinstance(blueprint.traced, Decoder):
        return PlannedStage(first, last, blocks, whole)
    # All blocks are equal, so the shapes of one traced block serve for all.
    rest = _units_of_part(blueprint, first, last, cut)[0]
    tied: tuple[PlannedParameter, ...] = ()
    if first != last and blueprint.traced.model.architecture.tie_word_embeddings:
        tied = _units_of_part(blueprint, True, False, cut)[0]
    return PlannedStage(first, last, blocks, (rest, *[whole[1]] * blocks), tied)


def _divided(units: Units, apart: int, together: int) -> Units:
    """Return the units with experts divided among `apart` ep ranks. `together`: number of tp
    ranks."""
    if apart == 1:
        return units
    return tuple(
        tuple(
            dataclasses.replace(s, divided=apart, beside=together) if s.stacked else s for s in unit
        )
        for unit in units
    )


@cache
def _units_of_part(blueprint: PlannedModel, first: bool, last: bool, cut: StrategySection) -> Units:
    """Return the units of traced blocks, with the embedding if `first`, and with the head if
    `last`."""
    part = blueprint.traced
    if first and last:
        part = copy.deepcopy(part)
    elif isinstance(part, Decoder):
        depth = len(list(part.blocks))
        if not (first or last):
            return ((),)
        part = part.part(range(0 if first else 1, depth if last else 1))
    if ranks(cut, "layers") > 1:
        # Imported here, because it imports all strategies.
        from trainer.plan.imagined_ranks import PlannedRanks, imagined_ranks

        with imagined_ranks(lambda *_: None, None):
            cut_layers(part, cut, lambda name: PlannedRanks(sizes(cut)[name]))
    return _units(part, repeated_blocks(part), blueprint.optimizer)


def _shape(
    parameter: nn.Parameter, state: tuple[OptimizerStateTensor, ...], stacked: bool
) -> PlannedParameter:
    rows = parameter.shape[0] if parameter.dim() else 1
    row, itemsize = parameter.numel() // max(1, rows), parameter.element_size()
    return PlannedParameter(
        rows, row, itemsize, state, stacked, trained=parameter.requires_grad,
        number=parameter.is_floating_point(), weights=weights_in(parameter),
    )  # fmt: skip


def trained_of(unit: Sequence[PlannedParameter]) -> list[PlannedParameter]:
    return [shape for shape in unit if shape.trained]


def bytes_of(
    shapes: Sequence[PlannedParameter], ranks: int | None = None, itemsize: int | None = None
) -> int:
    """Return the bytes of parameters, or of the first of `ranks` FSDP shards of each. `itemsize`:
    bytes per element after a cast; None: there is no cast."""
    return sum(
        (shape.sharded(ranks) if ranks else shape.whole) * shape.size_as(itemsize)
        for shape in shapes
    )


def gathered_bytes(shapes: Sequence[PlannedParameter], ranks: int, itemsize: int) -> int:
    """Return the bytes in FSDP's all-gather of parameters over `ranks` ranks, including padding."""
    return sum(shape.gathered(ranks) * shape.size_as(itemsize) for shape in shapes)


def counted(stages: Sequence[PlannedStage]) -> list[tuple[tuple[PlannedParameter, ...], int]]:
    """Return the distinct units of some stages, each with the number of times that it occurs."""
    counts: dict[int, tuple[tuple[PlannedParameter, ...], int]] = {}
    for unit in (unit for stage in stages for unit in stage.units):
        # Compared by identity: equal blocks share one tuple, and hashing its shapes would be slow.
        counts[id(unit)] = unit, counts.get(id(unit), (unit, 0))[1] + 1
    return [*counts.values()]


def parts_of(unit: Sequence[PlannedParameter]) -> list[list[PlannedParameter]]:
    """Divide a block into parameter groups that FSDP gathers and reduces separately:
    expert-parallel experts, and the other parameters."""
    experts = [shape for shape in unit if shape.divided > 1]
    rest = [shape for shape in unit if shape.divided == 1]
    return [part for part in (rest, experts) if part]


@dataclass(frozen=True)
class PlannedLayout:
    """The process groups, passes and micro-batch of a recipe for a given number of ranks."""

    groups: Mapping[str, MeshGroupShape]
    """Result of `trainer.parallel.mesh.groups_of`."""
    by_fsdp: bool
    """Whether FSDP distributes parameters; otherwise DDP replicates them, with or without
    ZeRO-1."""
    gathers_ahead: bool
    """Whether forward gathers a block while the previous block computes, see fsdp.py."""
    passes: int
    reductions: int
    micro_batch: int

    @property
    def replicas(self) -> int:
        return self.groups[REPLICATE].size

    @property
    def shards(self) -> int:
        return self.groups[SHARD].size


def layout_of(
    recipe: Recipe, world_size: int, local_world_size: int, device: Literal["cpu", "cuda"]
) -> PlannedLayout:
    """Return the layout of `recipe`; RecipeError if the recipe cannot run on so many ranks."""
    strategy = recipe.strategy
    groups = groups_of(recipe, world_size, local_world_size)
    plan = batch_plan(recipe, world_size // together(strategy))
    return PlannedLayout(
        groups=groups,
        by_fsdp=is_sharded_by_fsdp(recipe, world_size),
        gathers_ahead=gathers_ahead_on_cpu(recipe, device),
        passes=plan.passes,
        reductions=plan.passes if strategy.reduce_every_pass else 1,
        micro_batch=plan.micro_batch,
    )
