"""Applies the strategies of a recipe to a model, in their order; after a failure of other ranks,
reuses the model of a rank with new process groups.

[Note: kept] A rank that survives keeps parameters, wrappers and compiled code. It creates its
process groups again in their original order, so they get their old names, by which meshes and
compiled code find them. `rejoin` replaces references to group objects, and drops the state of the
failed step. New processes build the same model by `parallelize`, with the same collectives.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from checkpointing.format.peft import is_part
from checkpointing.format.tensors import broadcast
from trainer.models.parameter_names import tie_again, ties_of
from trainer.models.versions import drop_unreduced_gradient
from trainer.optim.exact import use_exact_kernels
from trainer.optim.optimizer import moments
from trainer.parallel.activations import apply_activation_checkpointing
from trainer.parallel.ddp import DdpShardedView, apply_ddp, apply_ddp_again
from trainer.parallel.fsdp import apply_fsdp, fsdp_groups, fsdp_units
from trainer.parallel.mesh import SHARD, Mesh
from trainer.parallel.offload import OffloadFile, bytes_needed
from trainer.parallel.parallel_model import ParallelModel
from trainer.recipe import Recipe, StrategySection
from trainer.recipe.errors import RecipeRefusals
from trainer.recipe.strategies import (
    MODEL_PARALLEL,
    dividing,
    exact,
    offload,
    pp,
    ranks,
    sharding,
)

if TYPE_CHECKING:
    from trainer.models.decoder import Decoder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

DRAWN_BYTES = 4 << 30
"""Most bytes of whole initial tensors that exist at once. A larger tensor is drawn alone."""

Fill = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Maps (FQN, global shape) to the whole initial tensor, on the CPU. Called from several threads."""


def check_parallel(recipe: Recipe, model: nn.Module, shards: int) -> None:
    """Raise RecipeError for a model that cannot be divided as the recipe says, with one line for
    each key that does not work. `model`: whole, may be on the meta device; `shards`: number of FSDP
    shards of each stage, see `mesh_shape`."""
    refusals = RecipeRefusals()
    for module in MODEL_PARALLEL:
        if module.ranks(recipe.strategy) > 1:
            with refusals:
                import_module(module.APPLIED_BY).check_model(model, recipe, shards)
    refusals.raise_all()


def parallelize(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    recipe: Recipe,
    device: torch.device,
    fill: Fill | None,
    cores: int = 1,
) -> ParallelModel:
    """Apply the recipe's strategy. Weights are loaded or drawn later. Called on all ranks.

    Args:
        model: on the meta device when `fill` is given, else on the CPU with equal weights on all
            ranks.
        blocks: its repeated parts, which are sharded, recomputed and compiled separately.
        fill: returns initial weights; None: the model has its weights.
        cores: number of threads that draw weights.
    """
    strategy, dtype = recipe.strategy, DTYPES[recipe.precision.dtype]
    sharded_by_fsdp = SHARD in (mesh.device_mesh.mesh_dim_names or ())
    stacks = getattr(model, "stacks_apart", ())
    draws = recipe.draws or getattr(model, "draws", False)
    if exact.used(recipe):
        use_exact_kernels(device)  # before the first kernel runs
    by_rows = recipe.optimizer.state_dtype != "fp32"
    # Slices of rows must be contiguous in memory.
    if sharded_by_fsdp or sharding.zero1(recipe) or by_rows:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
    keep_weights(model, recipe)
    stages: dict[int, Decoder] = {}
    # A pipeline cuts the model first; `_apply` then treats each stage as a model.
    blocks_of: dict[nn.Module, Sequence[nn.Module]] = {model: blocks}
    costs: list[float] = []
    if pp.ranks(strategy) > 1:
        from trainer.parallel.pipeline import (  # only if the recipe uses it
            PipelineParallel,
            stages_of,
        )

        stages, costs = stages_of(model, mesh, recipe)
        blocks_of = {stage: list(stage.blocks) for stage in stages.values()}
        model = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
    for part, whole in blocks_of.items():
        blocks_of[part] = _apply(part, list(whole), mesh, recipe, dtype)
    file: OffloadFile | None = None
    ties = ties_of(model)
    if offload.to_disk(strategy) and strategy.offload_directory:
        kept = moments(recipe.optimizer)
        assert kept is not None  # the check of the recipe has refused optimizers with other state
        nbytes = bytes_needed(model.parameters(), kept)
        file = OffloadFile(strategy.offload_directory, nbytes, kept)
        file.take_weights(model, device)
        file.take_gradients(model.parameters())
        for part, units in blocks_of.items():
            file.read_ahead(part, units)
    elif fill:
        # Buffers stay on the computing device even if parameters are offloaded.
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
            # `sync` only for a user's model with weights: other models get theirs later.
            module = apply_ddp(model, mesh.data_mesh, sync=fill is None)
        if sharding.zero1(recipe):
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            view = DdpShardedView(trained, mesh.data_mesh)
            optimized = {**parameters, **view.parameters}

    # FSDP casts parameters; autocast would also cast activations that blocks keep in float32. A
    # user's model with a user's data still gets autocast, because FSDP does not cast its float32
    # inputs, such as images or regression targets.
    by_fsdp = sharded_by_fsdp and not (recipe.data.factory and recipe.model.factory)

    def autocast() -> Any:
        if by_fsdp or dtype == torch.float32:
            return nullcontext()
        # The cache would keep every weight in `dtype` until backward, though each is used once.
        return torch.autocast(device.type, dtype=dtype, cache_enabled=False)

    def draw_weights() -> None:
        if fill:
            drawn = {**parameters, **buffers()}
            if recipe.model.adapter:
                drawn = {name: tensor for name, tensor in drawn.items() if is_part(name)}
            _fill(drawn, fill, cores)

    replicas = mesh.data_mesh
    # Buffers of a user's model or family may change within a step, and differ between ranks, so
    # they are broadcast. Those of bundled models change only between steps, equally on all ranks.
    drifting = (recipe.model.factory or recipe.model.family) and replicas.size() > 1

    def share_buffers() -> None:
        if drifting and (shared := buffers().values()):
            for name in replicas.mesh_dim_names or ():
                broadcast(shared, 0, replicas.get_group(name), device)

    in_8_bits = recipe.precision.matmul == "fp8_tensorwise" and not offload.used(strategy)
    if in_8_bits and sharded_by_fsdp:
        from trainer.parallel.float8 import gather_in_8_bits  # only if the recipe uses it

        for part in blocks_of:
            gather_in_8_bits(part)
    context = None
    if mesh.ring:
        from trainer.parallel.context import ContextParallel  # only if the recipe uses it

        context = ContextParallel(mesh.ring, strategy.compile)
    pipeline = PipelineParallel(stages, mesh, recipe, dtype, context, costs) if stages else None
    return ParallelModel(
        module, parameters, buffers, optimized, view, file, recipe, autocast,
        draw_weights, share_buffers, pipeline, context, stacks, draws,
    )  # fmt: skip


def keep_weights(model: nn.Module, recipe: Recipe) -> None:
    """Convert a model's float32 parameters to the format of `precision.master`."""
    if recipe.precision.master == "bf16_stochastic":
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()


def cut_layers(
    model: nn.Module, strategy: StrategySection, ranks_of: Callable[[str], Any]
) -> list[nn.Module]:
    """Apply model parallelism that divides layers or experts to a model in place, also on the meta
    device. `ranks_of`: name of a mesh dimension → its 1-D mesh. Returns the experts that are
    divided among ranks, which become FSDP units of their own."""
    units: list[nn.Module] = []
    for module in dividing("layers", "experts"):
        if module.ranks(strategy) > 1:
            apply = import_module(module.APPLIED_BY).apply
            units += apply(model, ranks_of(module.KEYS[0]), strategy)
    return units


def _apply(
    model: nn.Module, blocks: list[nn.Module], mesh: Mesh, recipe: Recipe, dtype: torch.dtype
) -> list[nn.Module]:
    """Apply the strategies that change a model in place, in their order. Returns the blocks, which
    may have been replaced."""
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
    # wholly or not at all. So with collectives or experts the parts of a block are compiled, and
    # its recomputation is not.
    how: Literal["no", "whole", "pieces"] = "no"
    if strategy.compile:
        sent = ranks(strategy, "layers", "sequences") > 1
        how = "pieces" if sent or bool(getattr(model, "stacks", ())) else "whole"
    compiled = blocks
    if strategy.activation_checkpointing != "none":
        blocks = apply_activation_checkpointing(
            model, blocks, strategy.activation_checkpointing, how,
            again=pp.splits_backward(strategy),
            draws=recipe.draws or getattr(model, "draws", False),
        )  # fmt: skip
        compiled = compiled if how == "pieces" else blocks
    if strategy.compile:
        # dynamo's DDPOptimizer would break the graph inside a block, at borders of DDP's buckets.
        # DDPOptimizer also refuses buckets below 1 MiB, which small models have.
        torch._dynamo.config.optimize_ddp = False
        for module in model.modules():
            # Tensor or expert parallelism has added collectives here, which would break the graph.
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
    """Initialise parameters and persistent buffers by FQN: draw whole tensors, several at once, and
    keep this rank's shards."""
    drawn: deque[tuple[torch.Tensor, Future[torch.Tensor]]] = deque()

    def place() -> None:
        tensor, future = drawn.popleft()
        whole = future.result()
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(
                whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
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
    return name.replace("_checkpoint_wrapped_module.", "")


CAN_RESET = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP can drop the state of a failed step, as from torch 2.13 on."""


def rejoin(model: ParallelModel, mesh: Mesh, new: Mesh) -> tuple[ParallelModel, Mesh]:
    """Return the kept model and mesh with the process groups of `new`, a mesh for the same rank and
    world size. Called on all ranks that keep a model, while new processes call `parallelize`.
    Raises RuntimeError if a group has another name than before."""
    for ours, theirs in ((mesh.device_mesh, new.device_mesh), (mesh.experts, new.experts)):
        if ours and theirs:
            _take_groups(ours, theirs)
    mesh = replace(mesh, group=new.group, ring=new.ring)
    module = model.module
    for group in fsdp_groups(module):
        _take_groups_of_fsdp(group)
    _drop_step_of_fsdp(module)
    for part in module.modules():
        if forget := getattr(part, "forget_step", None):  # routers counted the failed step's tokens
            forget()
    if model.context and mesh.ring:
        model.context.group = mesh.ring
    if model.pipeline:
        model.pipeline.join(mesh)
    model.zero_gradients()
    if isinstance(module, DistributedDataParallel):
        model = replace(model, module=apply_ddp_again(module, mesh.data_mesh))
    return model, mesh


def _take_groups(mesh: DeviceMesh, new: DeviceMesh) -> None:
    """Put the groups of `new` into the registry of `mesh`, which later compilations use."""
    if mesh._dim_group_names != new._dim_group_names:
        raise RuntimeError(
            f"the process groups of a mesh were called {mesh._dim_group_names}, and are now called "
            f"{new._dim_group_names}; this rank cannot keep its model, and has to be restarted"
        )
    for name, old in mesh._pg_registry.items():
        mesh._pg_registry[name] = _resolve_process_group(old.group_name)


def _take_groups_of_fsdp(group: Any) -> None:
    for info in (group.mesh_info, group.post_forward_mesh_info):
        if info and info.shard_mesh_dim is not None:
            info.shard_process_group = info.mesh.get_group(info.shard_mesh_dim)
        if info and info.replicate_mesh_dim is not None:
            info.replicate_process_group = info.mesh.get_group(info.replicate_mesh_dim)


def _drop_step_of_fsdp(model: nn.Module) -> None:
    for group in fsdp_groups(model):
        # `reset_iter_state` would wait for an unfinished gather, and raise its error again.
        group._all_gather_result = None
        group.comm_ctx.all_gather_state = None
    for unit in fsdp_units(model):
        if unit._get_fsdp_state()._is_root:
            unit.reset_iter_state()
    for parameter in (p for group in fsdp_groups(model) for p in group.fsdp_params):
        # `reset_iter_state` keeps unreduced gradients, to which the next backward would add.
        drop_unreduced_gradient(parameter)
