"""Checks of a recipe, model and data before a process group is formed or a GPU is used."""

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from checkpointing import newest_checkpoint, read_state
from checkpointing.storage.place import ObjectPath, location
from elastic import usable_cores
from elastic.group.health import check_folders
from elastic.world import drop_world
from trainer.data.cache import hindrance
from trainer.parallel.fsdp import without_ties
from trainer.parallel.mesh import is_sharded_by_fsdp, mesh_shape
from trainer.parallel.parallelize import check_parallel
from trainer.recipe import Recipe, RecipeError, counted
from trainer.recipe.errors import RecipeRefusals
from trainer.recipe.factory import check_takes
from trainer.recipe.sections import OptimizerSection
from trainer.recipe.strategies import cp, exact, ranks, together
from trainer.run.provenance import check_resume, read_changes
from trainer.run.sinks import wandb_mode
from trainer.run.terms import newest_term
from trainer.tasks.model_blocks import name_blocks
from trainer.tasks.own_data import inputs_of
from trainer.tasks.own_model import check_forward
from trainer.tasks.task import Task, bare_model, build_task, optimizer_options

TRIED_RATES = 1000
"""Number of steps for which a user's schedule is evaluated before the launch."""


def check_inputs(
    recipe: Recipe, task: Task, rank: int, world_size: int, local_world_size: int
) -> None:
    """Raise RecipeError, DataError or CheckpointError, with one line per problem, for inputs that
    cannot work on at least `world_size` ranks. Writes nothing."""
    refusals = RecipeRefusals()
    _check_world(refusals, recipe, task.model, task.blocks, world_size, local_world_size)
    _check_places(refusals, recipe, task, rank)
    with refusals:
        counted(recipe, task.stream.sequences)
    refusals.raise_all()


def folders_of(recipe: Recipe) -> dict[str, str]:
    """Return the local paths that every rank needs, by recipe key: folders, and for prepared data
    the file that is read first."""
    data = {f"data.sources.{n}.path": one.path for n, one in enumerate(recipe.data.sources)}
    named = {
        "run.dir": recipe.run.dir,
        "checkpoint.directory": recipe.checkpoint_directory,
        "model.init_from": recipe.model.init_from,
        "strategy.offload_directory": recipe.strategy.offload_directory,
        "data.cache.directory": recipe.data.cache and recipe.data.cache.directory,
        **{key: f"{path}/index.json" for key, path in data.items()},
    }
    return {key: path for key, path in named.items() if path and "://" not in path}


def check_launch(
    recipe: Recipe, world_size: int, local_world_size: int, most: int = 0
) -> Sequence[str]:
    """Raise RecipeError, DataError, ModelConfigError or CheckpointError, with one line per problem,
    for a recipe that cannot work, before it is launched. A user's model is tried in a forward pass.
    `most`: number of ranks to which the world may grow. Returns notes for the user, a line each."""
    from trainer.optim.optimizer import build_schedule

    if silent := check_folders(folders_of(recipe)):  # later checks would hang on these folders
        raise RecipeError("; ".join(map(str, silent)))
    refusals, task = RecipeRefusals(), None
    length: Recipe | None = None if recipe.run.epochs else recipe
    for key, names, given in (
        ("tracking.sinks", recipe.tracking.sinks, "the run directory"),
        ("tracking.hooks", recipe.tracking.hooks, "an event"),
    ):
        for name in names:
            with refusals:
                check_takes(key, name, given)
    model: nn.Module | None = None
    blocks: Sequence[nn.Module] = ()
    with refusals:
        task = build_task(recipe)
        model, blocks = task.model, task.blocks
        length = counted(recipe, task.stream.sequences)
    # If only the data is wrong, the model is checked all the same.
    if not (task or recipe.data.factory):
        with refusals:
            model, blocks, _ = bare_model(recipe)
    _check_world(refusals, recipe, model, blocks, world_size, local_world_size)
    if model:
        with refusals:
            # World sizes grow by whole nodes.
            larger = range(world_size + local_world_size, most + 1, local_world_size)
            check_growth(recipe, model, larger)
    _check_places(refusals, recipe, task, 0)
    if length:
        with refusals:
            build_schedule(length, TRIED_RATES)
    if task:
        with refusals:
            check_optimizer(recipe, task, world_size)
        with refusals:
            _check_pass(recipe, task, world_size)
    refusals.raise_all()
    notes = (*task.notes, *use_of_blocks(recipe, task, world_size)) if task else ()
    return [*notes, *slow_arithmetic(recipe)]


def check_growth(recipe: Recipe, model: nn.Module, worlds: range) -> None:
    """Raise RecipeError for a vocabulary that FSDP could not shard in a larger world: otherwise the
    job would fail when it grows to that size. `worlds`: possible world sizes; its step is the
    number of ranks on a node."""
    rows = [len(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    if all(count % ranks(recipe.strategy, "layers") == 0 for count in rows):
        return  # rows that divide evenly among the ranks of a layer fit any number of shards
    for world_size in worlds:
        try:
            _, shards = mesh_shape(recipe, world_size, worlds.step)
        except RecipeError:  # the job never forms a world of this size
            continue
        check_parallel(recipe, model, shards)


def check_optimizer(recipe: Recipe, task: Task, world_size: int) -> None:
    """Try the optimizer on small parameters. Raises RecipeError if it fails, or if the strategy
    cannot shard the parameters."""
    from trainer.optim.optimizer import state_of

    parameters, options = dict(task.model.named_parameters()), optimizer_options(recipe, task)
    state_of(parameters, options)
    if is_sharded_by_fsdp(recipe, world_size):
        _check_units(task)
        _check_sharded(parameters, options)


def _check_world(
    refusals: RecipeRefusals,
    recipe: Recipe,
    model: nn.Module | None,
    blocks: Sequence[nn.Module],
    world_size: int,
    local_world_size: int,
) -> None:
    """Check that ranks, devices and model (None if it could not be built) fit each other."""
    strategy, optimizer = recipe.strategy, recipe.optimizer
    with refusals:
        _check_device(recipe, local_world_size)
    with refusals:
        replicas, shards = mesh_shape(recipe, world_size, local_world_size)
        with refusals:
            exact.batch_plan(recipe, world_size // together(strategy))
        if model:
            check_parallel(recipe, model, shards)
            _check_room(recipe, model, local_world_size, world_size // replicas)
    if not model:
        return
    with refusals:
        _check_attention(recipe, model)
    if recipe.precision.matmul:
        from trainer.parallel.float8 import capability_here, check_matmul

        with refusals:
            check_matmul(recipe, blocks, capability_here())
    if optimizer.groups:
        from trainer.optim.optimizer import check_patterns

        with refusals:
            check_patterns([name for name, _ in model.named_parameters()], optimizer)


def _check_places(refusals: RecipeRefusals, recipe: Recipe, task: Task | None, rank: int) -> None:
    """Check that files of the run can be written and read, and that packages are installed."""
    tracking = recipe.tracking
    with refusals:
        _check_writable(recipe)
        if recipe.in_bucket and rank == 0:
            newest_term(ObjectPath.of(recipe.run.dir))  # raises if the bucket cannot be read
        # Rank 0 only: thousands of ranks would burden the filesystem.
        newest = newest_checkpoint(location(recipe.checkpoint_directory)) if rank == 0 else None
        # `task` lacks accepted changes of the data; if there are any, `restore` checks instead.
        if newest and task and not read_changes(recipe):
            check_resume(read_state(newest), recipe, task, newest)
    with refusals:
        if recipe.data.cache and (why := hindrance(recipe.data.cache.directory)):
            raise RecipeError(f"data.cache.directory: {why}")
    with refusals:
        if tracking.tensorboard and find_spec("tensorboard") is None:
            raise RecipeError(
                "tracking.tensorboard: tensorboard is not installed; pip install tensorboard, or "
                "set tracking.tensorboard=false"
            )
    with refusals:
        if tracking.wandb != "off" and rank == 0:
            wandb_mode(tracking.wandb)
    with refusals:
        if tracking.prometheus and rank == 0:
            _check_prometheus(Path(tracking.prometheus))


def _check_pass(recipe: Recipe, task: Task, world_size: int) -> None:
    """Try a forward pass of a user's model on a batch of training and of validation data."""
    if not recipe.model.factory:
        return
    training, *validation = task.tried or [inputs_of(task.stream.fetch([0]))]
    unused = check_forward(recipe, task.model, training)
    for batch in validation:
        task.model.eval()
        check_forward(recipe, task.model, batch, ", given a batch of the validation set,")
    ddp = world_size > 1 and not is_sharded_by_fsdp(recipe, world_size)
    if unused and ddp and not getattr(task.model, "some_unused", False):
        raise RecipeError(
            f"model.factory: {unused[0]} takes no part in the loss, which DDP does not allow; "
            "set some_unused = True on the module that the factory returns (docs/extending.md), or "
            "strategy.name=fsdp with another sharding than OPTIMIZER_STATE"
        )


def _check_sharded(parameters: Mapping[str, nn.Parameter], options: OptimizerSection) -> None:
    """Check that FSDP can shard the parameters. A user's optimizer is tried on small sharded
    parameters in a fake group of two ranks."""
    if scalar := next((name for name, one in parameters.items() if not one.dim()), None):
        raise RecipeError(
            f"strategy.sharding: parameter {scalar} has no dimension along which FSDP could cut "
            "it; give it one, of size 1, or use strategy.name=ddp"
        )
    if not options.factory:
        return
    from torch.distributed.tensor import Shard, distribute_tensor

    from trainer.optim.method import trial_parameters
    from trainer.optim.optimizer import build_optimizer

    import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend "fake"
    # The fake backend runs collectives of two ranks in this one process, without effect.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        sharded = {
            name: nn.Parameter(
                distribute_tensor(trial.detach(), mesh, [Shard(0)]),
                requires_grad=trial.requires_grad,
            )
            for name, trial in trial_parameters(parameters, torch.Generator()).items()
        }
        build_optimizer(sharded, options)
    finally:
        drop_world()


def _check_units(task: Task) -> None:
    names = {parameter: name for name, parameter in task.model.named_parameters()}
    blocks = [list(block.parameters()) for block in without_ties(task.model, task.blocks)]
    inside = {parameter for block in blocks for parameter in block}
    for unit in (*blocks, [parameter for parameter in names if parameter not in inside]):
        firsts = {one.dtype: one for one in reversed(unit) if one.requires_grad}
        if len(firsts) > 1:
            one, other = list(firsts.values())[:2]
            raise RecipeError(
                f"strategy.sharding: FSDP gathers {names[one]} ({one.dtype}) and {names[other]} "
                f"({other.dtype}) together, which takes one dtype; convert one of them in "
                "the factory, or use strategy.name=ddp"
            )


def use_of_blocks(recipe: Recipe, task: Task, world_size: int) -> list[str]:
    """Return a note on how the strategy uses the blocks of a user's model; [] if it does not."""
    how = recipe.strategy.activation_checkpointing
    sharded, recomputed = is_sharded_by_fsdp(recipe, world_size), how != "none"
    if not recipe.model.factory or not (sharded or recomputed):
        return []
    if not task.blocks:
        effects = ["FSDP gathers all weights at once"] * sharded
        effects += [f"activation_checkpointing={how} recomputes nothing"] * recomputed
        return [
            f"{task.name} has no blocks (an nn.ModuleList, nn.Sequential or nn.ModuleDict of "
            f"modules), so {' and '.join(effects)}"
        ]
    effects = ["sharded one by one"] * sharded + [f"recomputed ({how})"] * recomputed
    tied = len(task.blocks) - len(without_ties(task.model, task.blocks)) if sharded else 0
    tail = f"; FSDP gathers {tied} of them with its root, as they share weights" if tied else ""
    return [f"{name_blocks(task.blocks)}: {' and '.join(effects)}{tail}"]


def slow_arithmetic(recipe: Recipe) -> list[str]:
    """Return a note if this CPU lacks instructions for `precision.dtype`; else []."""
    dtype, on_gpu = recipe.precision.dtype, torch.cuda.is_available()
    supported = {
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if dtype == "fp32" or (on_gpu and recipe.run.device != "cpu") or supported[dtype]():
        return []
    return [
        f"this CPU has no arithmetic for {dtype}, which is many times slower here than fp32; set "
        "precision.dtype=fp32"
    ]


def default_ranks(device: str) -> int:
    """Return the default number of ranks on this node: one per GPU; without GPUs two if there are
    two cores, so that a laptop runs the same code as a cluster."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(2, usable_cores())


def _check_device(recipe: Recipe, local_world_size: int) -> None:
    if recipe.run.device == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if recipe.run.device == "cuda" and not count:
        raise RecipeError(
            "run.device: cuda is requested, but torch finds no GPU here; check nvidia-smi and that "
            "torch is a CUDA build, or set run.device=cpu"
        )
    if count and local_world_size > count:
        raise RecipeError(
            f"run.device: {local_world_size} ranks on this node, but {count} GPU(s); start at most "
            f"{count} with --nproc-per-node"
        )


def _check_attention(recipe: Recipe, model: nn.Module) -> None:
    from trainer.models import Decoder, choose_attention
    from trainer.models.attention import hindrances_of
    from trainer.parallel.parallelize import DTYPES

    ring = cp.ranks(recipe.strategy) > 1
    if not isinstance(model, Decoder):
        return
    slides, sinks = bool(model.model.windows(recipe.data.seq_len)), model.model.sinks
    if not (ring or slides or sinks or recipe.data.document_mask):
        return
    on_cpu = recipe.run.device == "cpu" or not torch.cuda.is_available()
    dtype, head_dim = DTYPES[recipe.precision.dtype], model.model.architecture.head_dim
    # The compute capability is assumed: CUDA would have to be initialized to read it.
    known = None if on_cpu else (8, 0)
    if ring and (reason := hindrances_of(dtype, head_dim, known).get("varlen")):
        raise RecipeError(f"strategy.cp: {reason}; change that, or set strategy.cp=1")
    try:
        length = recipe.data.seq_len
        choose_attention(recipe.model.attention, dtype, head_dim, known, length, slides, sinks)
    except ValueError as error:
        raise RecipeError(f"model.attention: {error}") from error


def _check_room(recipe: Recipe, model: nn.Module, local_world_size: int, holders: int) -> None:
    """Check that the disk for offload has room for this node's shards. `holders`: ranks over which
    a model and its optimizer state are sharded."""
    if recipe.strategy.offload_directory is None:
        return
    from trainer.optim.optimizer import moments
    from trainer.parallel.offload import copies

    directory = Path(recipe.strategy.offload_directory)
    trained = copies(moments(recipe.optimizer) or ())  # frozen weights have one copy
    numbers = sum(p.numel() * (trained if p.requires_grad else 1) for p in model.parameters())
    nbytes = 4 * numbers * local_world_size // holders
    status = os.statvfs(_existing(directory))
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise RecipeError(
            f"strategy.offload_directory: {directory} has {free / 1e9:.2f} GB free, but the "
            f"weights, gradients and optimizer state of this node take {nbytes / 1e9:.2f} GB there "
            f"({nbytes:,} bytes); make room, or name another directory"
        )


def _check_writable(recipe: Recipe) -> None:
    directory, another = recipe.directory, "choose another run.dir"
    existing = _existing(directory)
    if recipe.in_bucket:
        another = "set XDG_CACHE_HOME to a directory on a local disk"
    if not existing.is_dir():
        raise RecipeError(
            f"run.dir: {directory} cannot be made: {existing} is not a directory; {another}"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RecipeError(
            f"run.dir: {directory} is not writable for this user (at {existing}); {another}, "
            "or mend its permissions"
        )


def _check_prometheus(file: Path) -> None:
    if not (file.parent.is_dir() and os.access(file.parent, os.W_OK | os.X_OK)):
        raise RecipeError(
            f"tracking.prometheus: no file can be written in {file.parent.absolute()}; name a file "
            "in the directory that the node exporter reads, and make that directory writable"
        )


def _existing(directory: Path) -> Path:
    """Return the directory, or its nearest existing parent."""
    absolute = directory.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())
