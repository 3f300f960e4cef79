"""Applies the strategies of a recipe to a model, in their order; `ParallelModel` is the result."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from checkpointing.format.layout import TensorMeta
from checkpointing.format.peft import is_part, name_in_file
from checkpointing.format.tensors import broadcast
from trainer.models.stacks import apart
from trainer.models.ties import tie_again, ties_of
from trainer.optim.exact import use_exact_kernels
from trainer.optim.formats import BLOCK, Format
from trainer.optim.groups import moments
from trainer.optim.saved_state import own_state, own_targets
from trainer.parallel.activations import apply_activation_checkpointing
from trainer.parallel.ddp import ShardedView, apply_ddp
from trainer.parallel.fsdp import apply_fsdp, prepare_backward
from trainer.parallel.mesh import EXPERT, SHARD, TENSOR, Mesh
from trainer.parallel.offload import OffloadFile, bytes_needed
from trainer.parallel.passes import Compute, loss_problem, means
from trainer.recipe import Recipe, RecipeError, Strategy
from trainer.recipe.errors import Refusals
from trainer.recipe.strategies import cp, ep, exact, offload, pp, sharding, tp

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder
    from trainer.parallel.context import Context
    from trainer.parallel.pipeline import Pipeline

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

DRAWN_BYTES = 4 << 30
"""Most bytes of whole initial tensors that are drawn at once; a larger one is drawn alone."""

Fill = Callable[[str, tuple[int, ...]], torch.Tensor]
"""(FQN, global shape) → the whole initial tensor on the CPU. Called from several threads."""


def check_parallel(recipe: Recipe, model: nn.Module, shards: int) -> None:
    """Refuse a model that the ranks of `tp`, `pp`, `cp` and `ep` cannot compute together.

    Args:
        model: whole; may be on the meta device.
        shards: see `mesh_shape`.

    Raises:
        RecipeError: one line for each key that does not work.
    """
    strategy, refusals = recipe.strategy, Refusals()  # imported only where the recipe uses them
    together = tp.ranks(strategy)
    if together > 1:
        from trainer.parallel.tensor import kinds_of

        with refusals:
            kinds = kinds_of(model, together, shards)
            if recipe.optimizer.state_dtype == "int8":
                _check_blocks(model, kinds, together)
            if getattr(model, "stacks", ()) and ep.ranks(strategy) == 1:
                raise RecipeError(
                    "strategy.tp: it divides no experts, but strategy.ep does; set that to 2 or "
                    "more, too, or strategy.tp=1"
                )
    if pp.ranks(strategy) > 1:
        from trainer.parallel.pipeline import blocks_by_stage

        with refusals:
            blocks_by_stage(model, recipe)
    if cp.ranks(strategy) > 1:
        from trainer.parallel.context import problem_of

        with refusals:
            if problem := problem_of(model, recipe.data.seq_len):
                raise RecipeError(f"strategy.cp: {problem}; set strategy.cp=1")
    if ep.ranks(strategy) > 1:
        from trainer.parallel.expert import check_experts

        with refusals:
            check_experts(model, ep.ranks(strategy), shards * together)
    refusals.raise_all()


@dataclass(frozen=True)
class ParallelModel:
    """A model with its strategy applied. Parameters are keyed by FQN, equal under all
    strategies."""

    module: nn.Module
    """The model itself, or its DDP wrapper, to be called. In a pipeline this rank's stages, which
    only `run` can call."""
    parameters: dict[str, nn.Parameter]
    """The parameters that the model computes with: whole tensors, or DTensors. Tied weights appear
    once."""
    buffers: Callable[[], dict[str, torch.Tensor]]
    """Returns the persistent buffers; a forward pass may replace them."""
    optimized: dict[str, nn.Parameter]
    """The parameters that the optimizer updates: `parameters`, except under ZeRO-1."""
    sharded_view: ShardedView | None
    file: OffloadFile | None
    """The file that holds `parameters` and their gradients; None: they are in memory."""
    recipe: Recipe
    autocast: Callable[[], Any]
    draw_weights: Callable[[], None]
    """Draws the initial values of parameters and buffers, unless the model came with its own. Slow
    for large models, so it is called only if nothing is loaded. Under an adapter it draws only A
    and B."""
    share_buffers: Callable[[], None]
    """Copies the persistent buffers of the first replica to all others, so that only its forward
    passes count. On all ranks."""
    pipeline: "Pipeline | None" = None
    """Computes this rank's stages in place of the whole model."""
    context: "Context | None" = None
    """Computes this rank's part of each sequence in place of whole sequences."""
    stacks: Sequence[str] = ()
    """Modules whose parameters checkpoints hold row by row, see `Family.stacks`."""
    draws: bool = False
    """Whether a training pass may draw random numbers."""

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the `means` of one micro-batch. On all ranks."""
        with self.autocast():
            if self.context:
                return means(self.context(self.module, inputs))
            result = self.module(**inputs)
        # In evaluation a model may return other scalars than a loss, such as a recall@20.
        if torch.is_grad_enabled() and (problem := loss_problem(result)):
            raise RecipeError(f"model.factory: forward returns {problem}")
        return means(result)

    def run(
        self,
        inputs: Sequence[Mapping[str, torch.Tensor]],
        compute: Compute,
        *,
        train: bool,
        reduce: bool = True,
    ) -> None:
        """Compute forward of all micro-batches of a step and, if `train`, backward, in the
        strategy's order. On all ranks.

        Args:
            inputs: the micro-batches of this rank.
            compute: called with the index of a micro-batch, its inputs, and the model to call;
                returns the tensor that backward begins from.
            train: whether to run backward.
            reduce: whether the last pass ends the step: gradients are then summed over the ranks.
                Not in a pipeline.
        """
        if self.pipeline:
            self.pipeline.run(inputs, compute, train)
        elif train:
            for number, batch in enumerate(inputs):
                with self._accumulate(last=reduce and number == len(inputs) - 1):
                    torch.autograd.backward(compute(number, batch, self))
        else:
            for number, batch in enumerate(inputs):
                compute(number, batch, self)
        if train and reduce:
            self.share_buffers()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put all modules into eval mode; restore the mode of each afterwards, as a user may keep
        some in eval mode."""
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            yield
        finally:  # also after a lost peer: this rank may keep the model
            for module, training in modes.items():
                module.training = training

    @property
    def beside_loss(self) -> Sequence[str]:
        """Names of the scalars that another pipeline stage returns beside the loss, in order."""
        return self.pipeline.beside_loss if self.pipeline else ()

    @contextmanager
    def _accumulate(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one pass; gradients are reduced in the last pass of a
        step."""
        with ExitStack() as stack:
            if isinstance(self.module, DistributedDataParallel):
                if not last:
                    stack.enter_context(self.module.no_sync())
            else:
                prepare_backward(self.module, last, self.recipe)
            yield

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's tensors in a checkpoint: parameters and persistent buffers; with an adapter
        only what is trained, by PEFT's names."""
        return self._in_files(self.buffers())

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """`tensors`, with copies of the buffers: the next forward pass may change these, while
        parameters change only after staging."""
        return self._in_files({name: buffer.clone() for name, buffer in self.buffers().items()})

    def _in_files(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.recipe.model.adapter:
            return apart({**self.parameters, **buffers}, self.stacks)
        return {name_in_file(name): p for name, p in self.parameters.items() if p.requires_grad}

    def under_adapter(self, *, whole: bool) -> dict[str, torch.Tensor]:
        """The tensors that a model with an adapter loads from `model.init_from`: frozen parameters
        and buffers; with `whole` also those that are trained whole."""
        held = {
            name: one
            for name, one in self.parameters.items()
            if not (one.requires_grad and (is_part(name) or not whole))
        }
        return apart({**held, **self.buffers()}, self.stacks)

    @property
    def in_nf4(self) -> frozenset[str]:
        """FQNs of this rank's weights in nf4, each of which has a matrix lora_A beside it."""
        ends = "lora_A", "weight"
        layers = {name.removesuffix(ends[0]) for name in self.parameters if name.endswith(ends[0])}
        weights = {layer + ends[1] for layer in layers}
        return frozenset(w for w in weights if self.parameters[w].dtype == torch.uint8)

    @property
    def trained(self) -> frozenset[str]:
        """Names in `tensors` that an optimizer updates. The others, buffers and frozen parameters,
        may hold infinity, as masks do."""
        if self.recipe.model.adapter:
            return frozenset(self.tensors)
        trained = {name: one for name, one in self.parameters.items() if one.requires_grad}
        return frozenset(apart(trained, self.stacks))

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The optimizer's state tensors by name."""
        return self.kept_by(optimizer)[0]

    def kept_by(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The optimizer's state on this rank: tensors by name, and JSON by FQN."""
        kept = own_state(optimizer, self.optimized)
        return apart(kept.tensors, self.stacks), kept.trees

    def targets_of(self, optimizer: torch.optim.Optimizer) -> "Targets":
        """The targets into which the optimizer's state is loaded."""
        return Targets(self, optimizer)

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros in the storage of the parameter, memory or file, for optimizer state of its
        shape."""
        return self.file.zeros_like(parameter) if self.file else torch.zeros_like(parameter)

    def portions(self, optimizer: torch.optim.Optimizer) -> Iterator[list[dict[str, Any]]]:
        """The optimizer's parameter groups, in portions that fit in memory."""
        return self.file.portions(optimizer) if self.file else iter([optimizer.param_groups])

    @property
    def counted(self) -> Sequence[nn.Parameter]:
        """The parameters of `optimized` that this rank adds to the gradient norm: a weight on two
        pipeline stages counts once."""
        elsewhere = self.pipeline.counted_elsewhere if self.pipeline else None
        return [parameter for parameter in self.optimized.values() if parameter is not elsewhere]

    def collect_gradients(self) -> None:
        """Give `optimized` the reduced gradients."""
        if self.pipeline:
            self.pipeline.add_tied_gradients()
        if self.sharded_view:
            self.sharded_view.scatter_gradients()

    def publish_weights(self) -> None:
        """Copy the updated `optimized` tensors to the whole parameters. On all ranks."""
        if self.sharded_view:
            self.sharded_view.gather()

    def zero_gradients(self) -> None:
        """Free all gradients."""
        for parameter in (*self.parameters.values(), *self.optimized.values()):
            parameter.grad = None


KEPT = "optimizer"
"""Key of a trainer state: FQN → JSON state of an optimizer, see saved_state.py."""


class Targets:
    """Maps a saved optimizer state to the tensors to load. Once they are loaded, `put` gives them
    to the optimizer."""

    def __init__(self, model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.put: Callable[[], None] = lambda: None

    def __call__(
        self, saved: Mapping[str, Any], metas: Mapping[str, TensorMeta]
    ) -> dict[str, torch.Tensor]:
        model = self._model
        before: Format = saved.get("recipe", {}).get("optimizer", {}).get("state_dtype", "fp32")
        targets = own_targets(self._optimizer, model.optimized, saved.get(KEPT), metas, before)
        self.put = targets.put
        return apart(targets.tensors, model.stacks)


def parallelize(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    recipe: Recipe,
    device: torch.device,
    fill: Fill | None,
    cores: int = 1,
) -> ParallelModel:
    """Apply the recipe's strategy. Weights are loaded or drawn later. On all ranks.

    Args:
        model: on the meta device when `fill` is given, else on the CPU with equal weights on all
            ranks.
        blocks: its repeated parts; units of sharding, recomputation and compilation.
        fill: returns initial weights, equal for every world size and strategy.
        cores: for drawing weights on this rank.
    """
    strategy, dtype = recipe.strategy, DTYPES[recipe.precision.dtype]
    sharded_by_fsdp = SHARD in (mesh.device_mesh.mesh_dim_names or ())
    stacks = getattr(model, "stacks", ())
    draws = recipe.draws or getattr(model, "draws", False)
    if exact.used(recipe):
        # Before the first kernel runs.
        use_exact_kernels(device)
    by_rows = recipe.optimizer.state_dtype != "fp32"
    # Slices of rows must be contiguous in memory.
    if sharded_by_fsdp or sharding.zero1(recipe) or by_rows:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
    keep_weights(model, recipe)
    stages: dict[int, Decoder] = {}
    # A pipeline cuts the model first; everything else is then applied to each stage.
    blocks_of: dict[nn.Module, Sequence[nn.Module]] = {model: blocks}
    costs: list[float] = []
    if pp.ranks(strategy) > 1:
        from trainer.parallel.pipeline import (
            Pipeline,
            costs_of,
            stages_of,
        )  # imported only where the recipe uses it

        stages, costs = stages_of(model, mesh, recipe), costs_of(model, recipe)
        blocks_of = {stage: list(stage.blocks) for stage in stages.values()}
        model = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
    for part, whole in blocks_of.items():
        blocks_of[part] = _apply(part, list(whole), mesh, recipe, dtype)
    file: OffloadFile | None = None
    ties = ties_of(model)
    if offload.to_disk(strategy) and strategy.offload_directory:
        kept = moments(recipe.optimizer)
        assert kept is not None  # the recipe check has refused others
        nbytes = bytes_needed(model.parameters(), kept)
        file = OffloadFile(strategy.offload_directory, nbytes, kept)
        file.take_weights(model, device)
        file.take_gradients(model.parameters())
        for part, units in blocks_of.items():
            file.read_ahead(part, units)
    elif fill:
        # Buffers stay on the computing device even if parameters are offloaded; those with values
        # keep them.
        host = torch.device("cpu") if offload.to_host(strategy) else device

        def materialise(tensor: torch.Tensor) -> torch.Tensor:
            where = host if isinstance(tensor, nn.Parameter) else device
            return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor.to(where)

        model._apply(materialise)
    elif not sharded_by_fsdp:
        model.to(device)
    # Moving parameters has replaced tied ones by separate tensors.
    tie_again(model, ties)
    parameters = {_fqn(name): p for part in blocks_of for name, p in part.named_parameters()}
    persistent = {name for part in blocks_of for name in part.state_dict()}

    def buffers() -> dict[str, torch.Tensor]:
        named = ((_fqn(name), b) for part in blocks_of for name, b in part.named_buffers())
        return {name: buffer for name, buffer in named if name in persistent}

    module, optimized, view = model, parameters, None
    if not sharded_by_fsdp:
        if mesh.data_mesh.size() > 1:
            # `sync` only for a user's model: bundled ones get their weights later.
            module = apply_ddp(model, mesh.data_mesh, sync=fill is None)
        if sharding.zero1(recipe):
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            view = ShardedView(trained, mesh.data_mesh)
            optimized = {**parameters, **view.parameters}

    # FSDP casts parameters; autocast would also cast activations that blocks keep in float32. A
    # user's model with a user's data still gets autocast: its float32 inputs, such as images or
    # regression targets, are no hidden states, and FSDP does not cast them.
    by_fsdp = sharded_by_fsdp and not (recipe.data.factory and recipe.model.factory)

    def autocast() -> Any:
        if by_fsdp or dtype == torch.float32:
            return nullcontext()
        # autocast's cache would hold every weight in `dtype` until backward, for a single use.
        return torch.autocast(device.type, dtype=dtype, cache_enabled=False)

    def draw_weights() -> None:
        if fill:
            drawn = {**parameters, **buffers()}
            if recipe.model.adapter:
                drawn = {name: tensor for name, tensor in drawn.items() if is_part(name)}
            _fill(drawn, fill, cores)

    replicas = mesh.data_mesh
    # Buffers of the bundled models change only between steps, and equally on all ranks.
    drifting = (recipe.model.factory or recipe.model.family) and replicas.size() > 1

    def share_buffers() -> None:
        if drifting and (shared := buffers().values()):
            for name in replicas.mesh_dim_names or ():
                broadcast(shared, 0, replicas.get_group(name), device)

    in_8_bits = recipe.precision.matmul == "fp8_tensorwise" and not offload.used(strategy)
    if in_8_bits and sharded_by_fsdp:
        from trainer.parallel.float8 import (
            gather_in_8_bits,
        )  # imported only where the recipe uses it

        for part in blocks_of:
            gather_in_8_bits(part)
    context = None
    if mesh.ring:
        from trainer.parallel.context import Context  # imported only where the recipe uses it

        context = Context(mesh.ring, strategy.compile)
    pipeline = Pipeline(stages, mesh, recipe, dtype, context, costs) if stages else None
    return ParallelModel(
        module, parameters, buffers, optimized, view, file, recipe, autocast,
        draw_weights, share_buffers, pipeline, context, stacks, draws,
    )  # fmt: skip


def _check_blocks(model: nn.Module, kinds: Mapping[str, str], ranks: int) -> None:
    """Refuse tensor parallelism that would cut rows inside blocks of 8-bit optimizer state."""
    for name, kind in kinds.items():
        columns = getattr(model.get_submodule(name), "in_features", 0)
        if kind == "row" and columns % BLOCK == 0 and columns // ranks % BLOCK:
            raise RecipeError(
                f"optimizer.state_dtype: int8 has blocks of {BLOCK} elements, but tp={ranks} cuts "
                f"the {columns} columns of {name} into parts of {columns // ranks}; use bf16, or "
                "another strategy.tp"
            )


def keep_weights(model: nn.Module, recipe: Recipe) -> None:
    """Convert a model's float32 parameters to the format of `precision.master`."""
    if recipe.precision.master == "bf16_stochastic":
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()


def cut_layers(
    model: nn.Module, strategy: Strategy, ranks_of: Callable[[str], Any]
) -> list[nn.Module]:
    """Apply tensor and expert parallelism to the layers of a model in place.

    Args:
        model: may be on the meta device.
        strategy: with `tp` and `ep`.
        ranks_of: name of a mesh dimension → its 1-D mesh.

    Returns the experts that are divided among ranks, which become FSDP units of their own.
    """
    experts: list[nn.Module] = []
    if tp.ranks(strategy) > 1:  # imported only where the recipe uses it
        from trainer.parallel.tensor import apply_tensor_parallel

        apply_tensor_parallel(model, ranks_of(TENSOR), tp.stream_parts(strategy) > 1)
    if ep.ranks(strategy) > 1:
        from trainer.parallel.expert import apply_expert_parallel, stacked_modules

        experts = stacked_modules(model)
        apply_expert_parallel(model, ranks_of(EXPERT))
    return experts


def _apply(
    model: nn.Module, blocks: list[nn.Module], mesh: Mesh, recipe: Recipe, dtype: torch.dtype
) -> list[nn.Module]:
    """Apply what changes a model in place, in the order of dependence; returns its blocks
    afterwards."""
    strategy = recipe.strategy
    # 8-bit products first: they replace layers. Then tensor and expert parallelism, which change
    # what layers compute and hold. Activation checkpointing before compilation, so that
    # recomputation is part of a block's compiled graph; FSDP last, as its hooks stay outside the
    # graph.
    if recipe.precision.matmul:
        from trainer.parallel.float8 import apply_float8  # imported only where the recipe uses it

        apply_float8(blocks, recipe.precision.matmul)
    experts = cut_layers(model, strategy, mesh.dimension)
    # Collectives and experts stay outside the compiled code. torch compiles a recomputed block
    # wholly or not at all, so here the parts of a block are compiled, and its recomputation is not.
    how: Literal["no", "whole", "pieces"] = "no"
    if strategy.compile:
        most_ranks = max(tp.ranks(strategy), cp.ranks(strategy)) > 1
        how = "pieces" if most_ranks or bool(getattr(model, "stacks", ())) else "whole"
    compiled = blocks
    if strategy.activation_checkpointing != "none":
        blocks = apply_activation_checkpointing(
            model, blocks, strategy.activation_checkpointing, how,
            again=pp.splits_backward(strategy),
            draws=recipe.draws or getattr(model, "draws", False),
        )  # fmt: skip
        compiled = compiled if how == "pieces" else blocks
    if strategy.compile:
        # dynamo's DDP optimizer would cut each block at bucket borders, and fails below 2 MiB.
        torch._dynamo.config.optimize_ddp = False
        for module in model.modules():
            # Replaced by tensor or expert parallelism: its collectives would break the graph
            # anyway.
            if "forward" in vars(module):
                module.forward = torch.compiler.disable(module.forward)
        for part in (*(compiled or [model]), *getattr(model, "compiled_beside_blocks", ())):
            part.compile()
    if SHARD in (mesh.device_mesh.mesh_dim_names or ()):
        over = mesh.data_mesh, recipe, dtype, experts, mesh.expert_data_mesh
        return apply_fsdp(model, blocks, *over)
    return blocks


@torch.no_grad()
def _fill(tensors: Mapping[str, torch.Tensor], fill: Fill, cores: int) -> None:
    """Initialise parameters and persistent buffers by FQN; each rank draws whole tensors, several
    at once, and keeps its shard."""
    drawn: deque[tuple[torch.Tensor, Future[torch.Tensor]]] = deque()

    def place() -> None:
        tensor, future = drawn.popleft()
        whole = future.result()
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(
                whole.to(tensor.device),
                tensor.device_mesh,
                tensor.placements,
                src_data_rank=None,
            )
        tensor.copy_(whole)

    # torch.nn.init on a sharded CPU parameter would draw the same numbers for every shard.
    with ThreadPoolExecutor(cores, thread_name_prefix="draw") as pool:
        for name, tensor in tensors.items():
            while drawn and sum(t.nbytes for t in (tensor, *(t for t, _ in drawn))) > DRAWN_BYTES:
                place()
            drawn.append((tensor, pool.submit(fill, name, tuple(tensor.shape))))
        while drawn:
            place()


def _fqn(name: str) -> str:
    """A parameter's FQN without the segments of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")
