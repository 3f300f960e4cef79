"""The order in which strategies are applied, and what the loop needs of the result."""

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
from trainer.optim.kept import own_state, own_targets
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
"""Most that whole tensors take which are drawn at once, beyond a single one."""

Fill = Callable[[str, tuple[int, ...]], torch.Tensor]
"""(FQN, global shape) → the whole initial tensor on the CPU. May be called in several threads."""


def check_parallel(recipe: Recipe, model: nn.Module, shards: int) -> None:
    """Refuse a model that the ranks of `tp`, `pp`, `cp` and `ep` cannot compute together.

    Args:
        recipe: of the run.
        model: whole; may be on the meta device.
        shards: see `mesh_shape`.

    Raises:
        RecipeError: a line for each key that does not work.
    """
    strategy, refusals = recipe.strategy, Refusals()  # others get by without these modules
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
        from trainer.parallel.pipeline import runs_of

        with refusals:
            runs_of(model, recipe)
    if cp.ranks(strategy) > 1:
        from trainer.parallel.context import problem_of

        with refusals:
            if problem := problem_of(model, recipe.data.seq_len):
                raise RecipeError(f"strategy.cp: {problem}; set strategy.cp=1")
    if ep.ranks(strategy) > 1:
        from trainer.parallel.expert import check_experts

        with refusals:
            check_experts(model, ep.ranks(strategy), shards * together)
    refusals.tell()


@dataclass(frozen=True)
class ParallelModel:
    """A model in its strategy. Parameters are keyed by FQN, the same under every strategy."""

    module: nn.Module
    """What to call: the model itself, or its DDP wrapper. Of a pipeline the stages of this rank,
    which only `run` can call."""
    parameters: dict[str, nn.Parameter]
    """What the model computes with: whole tensors, or DTensors. Tied weights appear once."""
    buffers: Callable[[], dict[str, torch.Tensor]]
    """Persistent buffers as they are now: a forward pass may put others in their place."""
    optimized: dict[str, nn.Parameter]
    """What the optimizer updates: `parameters`, except under ZeRO-1."""
    sharded_view: ShardedView | None
    file: OffloadFile | None
    """Where `parameters` and their gradients live, if not in memory."""
    recipe: Recipe
    autocast: Callable[[], Any]
    draw_weights: Callable[[], None]
    """Gives parameters and buffers their initial values, unless the model came with its own. For
    whoever has nothing to load: it takes long for large models. Of a model with an adapter A and B
    alone."""
    share_buffers: Callable[[], None]
    """Gives all replicas the persistent buffers of the first: its forward passes count. On all
    ranks."""
    pipeline: "Pipeline | None" = None
    """Whose stages this rank has, instead of all blocks."""
    context: "Context | None" = None
    """What computes with this rank's part of each sequence, instead of all of it."""
    stacks: Sequence[str] = ()
    """Modules whose parameters checkpoints hold row by row, see `Family.stacks`."""
    draws: bool = False
    """Whether a pass in training may draw random numbers."""

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`means` of one micro-batch. On all ranks."""
        with self.autocast():
            if self.context:
                return means(self.context(self.module, inputs))
            result = self.module(**inputs)
        # What has no backward may be other than a loss: an evaluation is a recall@20, say.
        if torch.is_grad_enabled() and (problem := loss_problem(result)):
            raise RecipeError(f"model.factory: forward returns {problem}")
        return means(result)

    def run(
        self, inputs: Sequence[Mapping[str, torch.Tensor]], compute: Compute, *, train: bool
    ) -> None:
        """Forward of all micro-batches of a step and, if `train`, backward, in the order of the
        strategy. On all ranks.

        Args:
            inputs: the micro-batches of this rank.
            compute: called with the number of one, its inputs, and what to call with them; returns
                the tensor that backward begins from.
            train: whether there is a backward.
        """
        if self.pipeline:
            self.pipeline.run(inputs, compute, train)
        elif train:
            for number, batch in enumerate(inputs):
                with self._accumulate(last=number == len(inputs) - 1):
                    torch.autograd.backward(compute(number, batch, self))
        else:
            for number, batch in enumerate(inputs):
                compute(number, batch, self)
        if train:
            self.share_buffers()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While entered, the modules are in eval mode; the user may keep some so afterwards."""
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            yield
        finally:  # also where a peer is lost: this rank may keep the model
            for module, training in modes.items():
                module.training = training

    @property
    def beside_loss(self) -> Sequence[str]:
        """What another stage of a pipeline returns beside the loss, in that order."""
        return self.pipeline.beside_loss if self.pipeline else ()

    @contextmanager
    def _accumulate(self, last: bool) -> Iterator[None]:
        """Forward and backward of one pass; gradients are reduced in the last pass of a step."""
        with ExitStack() as stack:
            if isinstance(self.module, DistributedDataParallel):
                if not last:
                    stack.enter_context(self.module.no_sync())
            else:
                prepare_backward(self.module, last, self.recipe)
            yield

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of the model: parameters and persistent buffers; of a model with
        an adapter what is trained, by PEFT's names."""
        return self._in_files(self.buffers())

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """`tensors`, with copies of the buffers: they may change in the next forward pass, where
        parameters wait for the copy before the update."""
        return self._in_files({name: buffer.clone() for name, buffer in self.buffers().items()})

    def _in_files(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.recipe.model.adapter:
            return apart({**self.parameters, **buffers}, self.stacks)
        return {name_in_file(name): p for name, p in self.parameters.items() if p.requires_grad}

    def under_adapter(self, *, whole: bool) -> dict[str, torch.Tensor]:
        """What `model.init_from` gives to a model with an adapter: frozen parameters and buffers;
        with `whole` also the first values of parameters that are trained whole."""
        held = {
            name: one
            for name, one in self.parameters.items()
            if not (one.requires_grad and (is_part(name) or not whole))
        }
        return apart({**held, **self.buffers()}, self.stacks)

    @property
    def in_nf4(self) -> frozenset[str]:
        """FQNs of the weights on this rank that are kept in nf4: each has an A beside it."""
        ends = "lora_A", "weight"
        layers = {name.removesuffix(ends[0]) for name in self.parameters if name.endswith(ends[0])}
        weights = {layer + ends[1] for layer in layers}
        return frozenset(w for w in weights if self.parameters[w].dtype == torch.uint8)

    @property
    def trained(self) -> frozenset[str]:
        """Names in `tensors` of what an optimizer updates. The rest, buffers and frozen parameters,
        may hold infinity, as masks do."""
        if self.recipe.model.adapter:
            return frozenset(self.tensors)
        trained = {name: one for name, one in self.parameters.items() if one.requires_grad}
        return frozenset(apart(trained, self.stacks))

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Tensors that the optimizer of `optimized` keeps now."""
        return apart(own_state(optimizer, self.optimized).tensors, self.stacks)

    def kept_by(
        self, optimizer: torch.optim.Optimizer, merged: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What a checkpoint holds of it: tensors, and JSON by FQN, which `merged` gathers."""
        kept = own_state(optimizer, self.optimized)
        return apart(kept.tensors, self.stacks), merged(kept.trees)

    def targets_of(self, optimizer: torch.optim.Optimizer) -> "Targets":
        """What a checkpoint of it is loaded into."""
        return Targets(self, optimizer)

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros that live where the parameter does: for optimizer state that is like it."""
        return self.file.zeros_like(parameter) if self.file else torch.zeros_like(parameter)

    def portions(self, optimizer: torch.optim.Optimizer) -> Iterator[list[dict[str, Any]]]:
        """The optimizer's parameter groups in portions that memory holds, one after the other."""
        return self.file.portions(optimizer) if self.file else iter([optimizer.param_groups])

    @property
    def counted(self) -> Sequence[nn.Parameter]:
        """What of `optimized` the norm counts on this rank: a weight of two stages counts once."""
        elsewhere = self.pipeline.counted_elsewhere if self.pipeline else None
        return [parameter for parameter in self.optimized.values() if parameter is not elsewhere]

    def collect_gradients(self) -> None:
        """Bring the reduced gradients to `optimized`."""
        if self.pipeline:
            self.pipeline.add_tied_gradients()
        if self.sharded_view:
            self.sharded_view.scatter_gradients()

    def publish_weights(self) -> None:
        """Bring updated `optimized` tensors back into the model. On all ranks."""
        if self.sharded_view:
            self.sharded_view.gather()

    def zero_gradients(self) -> None:
        """Free all gradients."""
        for parameter in (*self.parameters.values(), *self.optimized.values()):
            parameter.grad = None


KEPT = "optimizer"
"""Key of a trainer state: JSON by FQN of what an optimizer keeps, see kept.py."""


class Targets:
    """Called with what was saved, gives the tensors to load of an optimizer's state; then `put`
    gives the optimizer its state."""

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
    """Apply the recipe's strategy; weights are to be loaded, or drawn. Called on all ranks.

    Args:
        model: on the meta device when `fill` is given, else on the CPU with equal weights on all
            ranks.
        blocks: its repeated parts; units of sharding, recomputation and compilation.
        fill: gives initial weights, equal for every world size and strategy.
        cores: that this rank may draw them with.

    A pipeline cuts the model first, and everything else is applied to each stage.
    """
    strategy, dtype = recipe.strategy, DTYPES[recipe.precision.dtype]
    sharded_by_fsdp = SHARD in (mesh.device_mesh.mesh_dim_names or ())
    stacks = getattr(model, "stacks", ())
    draws = recipe.draws or getattr(model, "draws", False)
    if exact.used(recipe):
        use_exact_kernels(device)
    by_rows = recipe.optimizer.state_dtype != "fp32"
    if sharded_by_fsdp or sharding.zero1(recipe) or by_rows:
        for parameter in model.parameters():  # parts are rows, one after the other in memory
            parameter.data = parameter.data.contiguous()
    keep_weights(model, recipe)
    stages: dict[int, Decoder] = {}
    blocks_of: dict[nn.Module, Sequence[nn.Module]] = {model: blocks}
    costs: list[float] = []
    if pp.ranks(strategy) > 1:
        from trainer.parallel.pipeline import Pipeline, costs_of, stages_of  # others get by without

        stages, costs = stages_of(model, mesh, recipe), costs_of(model, recipe)
        blocks_of = {stage: list(stage.blocks) for stage in stages.values()}
        model = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
    for part, whole in blocks_of.items():
        blocks_of[part] = _apply(part, list(whole), mesh, recipe, dtype)
    file: OffloadFile | None = None
    ties = ties_of(model)
    if offload.to_disk(strategy) and strategy.offload_directory:
        kept = moments(recipe.optimizer)
        assert kept is not None  # the recipe would have been refused
        nbytes = bytes_needed(model.parameters(), kept)
        file = OffloadFile(strategy.offload_directory, nbytes, kept)
        file.take_weights(model, device)
        file.take_gradients(model.parameters())
        for part, units in blocks_of.items():
            file.read_ahead(part, units)
    elif fill:
        # Buffers are computed with where the model computes, whatever becomes of parameters; those
        # that have values keep them.
        host = torch.device("cpu") if offload.to_host(strategy) else device

        def materialise(tensor: torch.Tensor) -> torch.Tensor:
            where = host if isinstance(tensor, nn.Parameter) else device
            return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor.to(where)

        model._apply(materialise)
    elif not sharded_by_fsdp:
        model.to(device)
    tie_again(model, ties)
    parameters = {_fqn(name): p for part in blocks_of for name, p in part.named_parameters()}
    persistent = {name for part in blocks_of for name in part.state_dict()}

    def buffers() -> dict[str, torch.Tensor]:
        named = ((_fqn(name), b) for part in blocks_of for name, b in part.named_buffers())
        return {name: buffer for name, buffer in named if name in persistent}

    module, optimized, view = model, parameters, None
    if not sharded_by_fsdp:
        if mesh.data_mesh.size() > 1:
            # Weights of the bundled models are loaded or drawn yet.
            module = apply_ddp(model, mesh.data_mesh, sync=fill is None)
        if sharding.zero1(recipe):
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            view = ShardedView(trained, mesh.data_mesh)
            optimized = {**parameters, **view.parameters}

    # FSDP casts parameters, but not what a model of the user's gets beside them: images are
    # float32, and so are the targets of a regression, which are to stay so.
    by_fsdp = sharded_by_fsdp and not (recipe.data.factory and recipe.model.factory)

    def autocast() -> Any:
        if by_fsdp or dtype == torch.float32:
            return nullcontext()
        # A cache would hold every weight in `dtype` until the loss is there; each is used once.
        return torch.autocast(device.type, dtype=dtype, cache_enabled=False)

    def draw_weights() -> None:
        if fill:
            drawn = {**parameters, **buffers()}
            if recipe.model.adapter:
                drawn = {name: tensor for name, tensor in drawn.items() if is_part(name)}
            _fill(drawn, fill, cores)

    replicas = mesh.data_mesh
    # Those of the bundled models change between steps alone, and alike on all ranks.
    drifting = (recipe.model.factory or recipe.model.family) and replicas.size() > 1

    def share_buffers() -> None:
        if drifting and (shared := buffers().values()):
            for name in replicas.mesh_dim_names or ():
                broadcast(shared, 0, replicas.get_group(name), device)

    in_8_bits = recipe.precision.matmul == "fp8_tensorwise" and not offload.used(strategy)
    if in_8_bits and sharded_by_fsdp:
        from trainer.parallel.float8 import gather_in_8_bits  # others get by without

        for part in blocks_of:
            gather_in_8_bits(part)
    context = None
    if mesh.ring:
        from trainer.parallel.context import Context  # others get by without

        context = Context(mesh.ring, strategy.compile)
    pipeline = Pipeline(stages, mesh, recipe, dtype, context, costs) if stages else None
    return ParallelModel(
        module, parameters, buffers, optimized, view, file, recipe, autocast,
        draw_weights, share_buffers, pipeline, context, stacks, draws,
    )  # fmt: skip


def _check_blocks(model: nn.Module, kinds: Mapping[str, str], ranks: int) -> None:
    """Refuse rows that tensor parallelism would cut within blocks of 8-bit state.

    Raises:
        RecipeError: the first of them.
    """
    for name, kind in kinds.items():
        columns = getattr(model.get_submodule(name), "in_features", 0)
        if kind == "row" and columns % BLOCK == 0 and columns // ranks % BLOCK:
            raise RecipeError(
                f"optimizer.state_dtype: int8 has blocks of {BLOCK} elements, but tp={ranks} cuts "
                f"the {columns} columns of {name} into parts of {columns // ranks}; use bf16, or "
                "another strategy.tp"
            )


def keep_weights(model: nn.Module, recipe: Recipe) -> None:
    """Have the parameters of a model in the format of `precision.master`, instead of float32."""
    if recipe.precision.master == "bf16_stochastic":
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()


def cut_layers(
    model: nn.Module, strategy: Strategy, ranks_of: Callable[[str], Any]
) -> list[nn.Module]:
    """Have the layers of a model compute together with those of other ranks, in place.

    Args:
        model: may be on the meta device.
        strategy: tensor and expert parallelism count.
        ranks_of: called with the name of a dimension, gives its 1-D mesh.

    Returns the experts that ranks divide. They are units of FSDP by themselves.
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
    """Apply what changes a model in place; returns its blocks as they are then.

    Products in 8 bits come first, as they take the place of layers. Tensor and expert parallelism
    change what layers compute, and what they hold.
    Activation checkpointing comes before compilation, so that recomputation is part of the
    compiled graph if a block has one, and both before FSDP, whose hooks stay outside it.
    """
    strategy = recipe.strategy
    if recipe.precision.matmul:
        from trainer.parallel.float8 import apply_float8  # others get by without

        apply_float8(blocks, recipe.precision.matmul)
    experts = cut_layers(model, strategy, mesh.dimension)
    # Messages and experts stay outside of what is compiled. Of a block that is recomputed torch
    # compiles all or nothing; so what such a block has is compiled, and what recomputes it is not.
    how: Literal["no", "whole", "pieces"] = "no"
    if strategy.compile:
        talk = max(tp.ranks(strategy), cp.ranks(strategy)) > 1
        how = "pieces" if talk or bool(getattr(model, "stacks", ())) else "whole"
    compiled = blocks
    if strategy.activation_checkpointing != "none":
        blocks = apply_activation_checkpointing(
            model, blocks, strategy.activation_checkpointing, how,
            again=pp.splits_backward(strategy),
            draws=recipe.draws or getattr(model, "draws", False),
        )  # fmt: skip
        compiled = compiled if how == "pieces" else blocks
    if strategy.compile:
        # DDP's own would cut each block at its buckets, and fails on models below 2 MiB.
        torch._dynamo.config.optimize_ddp = False
        for module in model.modules():
            # Of tensor and expert parallelism. Ranks talk in it: a compiler would only cut it.
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
    """Give parameters and persistent buffers their initial values, by FQN; each rank keeps its part
    of the whole tensor. Several are drawn at once, as none depends on another.

    torch.nn.init on a sharded CPU parameter would draw the same numbers for every shard.
    """
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

    with ThreadPoolExecutor(cores, thread_name_prefix="draw") as pool:
        for name, tensor in tensors.items():
            while drawn and sum(t.nbytes for t in (tensor, *(t for t, _ in drawn))) > DRAWN_BYTES:
                place()
            drawn.append((tensor, pool.submit(fill, name, tuple(tensor.shape))))
        while drawn:
            place()


def _fqn(name: str) -> str:
    """A parameter's name without the parts that activation checkpointing puts in."""
    return name.replace("_checkpoint_wrapped_module.", "")
