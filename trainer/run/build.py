"""Build a `Run` from a recipe: mesh, model, optimizer, restored state. A restart takes the same
path as a start, and finds a checkpoint to load."""

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from checkpointing import TensorCheckpointer
from checkpointing.format.tensors import tensors_not_finite
from elastic import StartLine, World, describe_failure
from elastic.group.batch_plan import GroupBatchPlan
from elastic.node.recall import NodeRecallSocket
from elastic.process import usable_cores
from elastic.world import drop_world, limit_waits, read_environment
from trainer.data.loader import later_stages, requested_ahead
from trainer.data.stream import IGNORED_LABEL, AccountedStream
from trainer.models.decoder import Decoder
from trainer.models.transformers_model import TransformersModel
from trainer.optim.optimizer import build_optimizer, build_schedule
from trainer.parallel.mesh import Mesh, build_mesh, forget_meshes, placement
from trainer.parallel.parallel_model import ParallelModel
from trainer.parallel.parallelize import CAN_RESET, DTYPES, parallelize, rejoin
from trainer.recipe import Recipe, RecipeError, StrategySection, counted, strategies
from trainer.run.join import RunRank
from trainer.run.metrics import UNWRITTEN, RunLog, RunStartup
from trainer.run.micro_batch import settled
from trainer.run.preflight import slow_arithmetic, use_of_blocks
from trainer.run.provenance import changes_of_start, describe_changes, digest_of, show_recipe
from trainer.run.reference import RunReference
from trainer.run.saves import load_beginning, restore
from trainer.run.speed import peak_flops
from trainer.run.state import KeptModel, Run, RunProcess, RunProgress
from trainer.run.step import compute_pass
from trainer.tasks.task import Task, optimizer_options
from trainer.tasks.text_model import documents_for

if TYPE_CHECKING:
    from trainer.run.balance import RunSpeedBalance

logger = logging.getLogger(__name__)

TRIED_LENGTH = 64
"""Tokens of the sequence that tests whether a model keeps documents apart."""


@dataclass(frozen=True)
class _BuiltModel:
    """A model and its optimizer in the recipe's strategy, before their state is restored."""

    joined: RunRank
    recipe: Recipe
    """The recipe with every value resolved for this world."""
    task: Task
    mesh: Mesh
    plan: GroupBatchPlan
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    kept: RunProgress | None
    """Progress of a model and an optimizer that this process has kept; None: they are new."""
    checkpointer: TensorCheckpointer
    attention: Sequence[str]
    """Log lines about the kernel that computes attention."""


@contextmanager
def build(process: RunProcess, joined: RunRank) -> Iterator[_BuiltModel]:
    """Build model and optimizer, or use those that this process has kept. On all ranks."""
    task, world, recall = joined.inputs.task, joined.world, process.recall
    recipe = counted(settled(joined.inputs.recipe, world), task.stream.sequences)
    last = usable(process.kept, recipe)
    process.kept = []  # a half-restored model must not be reused
    mesh = build_mesh(recipe, world)
    plan = strategies.exact.batch_plan(recipe, mesh.dp_size)
    with (
        TensorCheckpointer(
            recipe.checkpoint_directory,
            recipe.checkpoint,
            dist.group.WORLD,
            process.spare,
            adapter=bool(recipe.model.adapter),
        ) as checkpointer,
        abandon_when_recalled(checkpointer, recall),
        attention_kernel(recipe, task, world.device) as attention,
    ):
        # The writer process starts while the model is built.
        checkpointer.start_early()
        kept = None
        if last:
            task, optimizer, kept = last.task, last.optimizer, last.progress
            model, mesh = rejoin(last.model, last.mesh, mesh)
            del last  # it refers to the old groups
        else:
            # The next attempt needs this model on the meta device. A user's model is whole, and
            # built anew for each attempt.
            if recall.allowed and task.fill:
                task = with_copied_model(task)
            # Called before FSDP renames the classes of blocks.
            notes = use_of_blocks(recipe, task, world.world_size)
            task = replace(task, notes=(*task.notes, *notes))
            model, optimizer = model_and_optimizer(recipe, task, world, mesh)
        limit_waits(recipe.elastic.timeout_seconds)
        process.startup.mark("model")
        process.pulse.report(0, "load")
        yield _BuiltModel(
            joined, recipe, task, mesh, plan, model, optimizer, kept, checkpointer, attention
        )


def usable(candidates: Sequence[KeptModel], recipe: Recipe) -> KeptModel | None:
    """Return the model that this rank can use; None if it must build one. `recipe`: resolved for
    the present world."""
    for candidate in candidates:
        why = reason_to_rebuild(candidate, recipe)
        if not why:
            return candidate
        if candidate.progress:
            logger.warning("model and optimizer are built anew: %s", why)
    return None


def reason_to_rebuild(last: KeptModel, recipe: Recipe) -> str:
    """Return why this process cannot keep the model and the optimizer of its last attempt; "" if it
    can. `recipe`: resolved for the present world."""
    rank, _, size, _ = now = read_environment()
    world, strategy = last.world, recipe.strategy
    if recipe.elastic.recovery == "rebuild":
        return "elastic.recovery is rebuild"
    if now != (world.rank, world.local_rank, world.world_size, world.local_world_size):
        return f"rank {world.rank} of {world.world_size} is rank {rank} of {size} now"
    if recipe.data != last.recipe.data:
        return "the data has other stages"
    if recipe != last.recipe:
        return "batch.micro_batch has another value"
    own = [key for key in recipe.own_code if key != "schedule.factory"]
    if own:
        return f"{own[0]} may keep state besides its tensors"
    if strategies.offload.used(strategy):
        return f"strategy.offload is {strategy.offload}"
    return "" if CAN_RESET else f"torch {torch.__version__} cannot drop a step that failed"


def build_ahead(recipe: Recipe, task: Task, world: World) -> KeptModel:
    """Build the model of the rank `world.rank` in a fake process group, for `build` to use once
    this process is that rank. `recipe`: as the ranks read it."""
    forget_meshes()  # they would give the parameters the mesh of another rank
    dist.init_process_group(
        "fake", store=dist.HashStore(), rank=world.rank, world_size=world.world_size
    )
    recipe = counted(settled(recipe, world), task.stream.sequences)
    mesh, task = build_mesh(recipe, world), with_copied_model(task)
    model, optimizer = model_and_optimizer(recipe, task, world, mesh)
    drop_world()
    return KeptModel(recipe, task, world, mesh, model, optimizer, progress=None)


def with_copied_model(task: Task) -> Task:
    """Return the task with a copy of its model, to be trained; the original stays as it is."""
    model, blocks = copy.deepcopy((task.model, task.blocks))
    return replace(task, model=model, blocks=blocks)


@contextmanager
def restore_state(process: RunProcess, built: _BuiltModel) -> Iterator[Run]:
    """Restore the newest checkpoint, else begin with `model.init_from` or drawn weights; then begin
    the ledger's lines of this attempt. On all ranks."""
    recipe, task, model, checkpointer = built.recipe, built.task, built.model, built.checkpointer
    joined, mesh, pulse, optimizer = built.joined, built.mesh, process.pulse, built.optimizer
    inputs, world, agreement = joined.inputs, joined.world, joined.agreement
    reference_lines: list[str] = []
    at_beginning = False
    if recipe.objective.referenced:
        reference = RunReference(recipe, task, agreement.init_from)
        if at_beginning := not reference.find(world, mesh):
            load_beginning(model, recipe, task)
            reference.compute(model, world, mesh, pulse)
        reference_lines = reference.lines
        process.startup.mark("reference")
    wrong: dict[str, int] = {}
    if recipe.elastic.witness:
        # imported only where the recipe uses it
        from trainer.run.witness import GradientWitness, wrong_attempts

        wrong = wrong_attempts(recipe.directory)
    progress, state = restore(
        checkpointer, model, optimizer, recipe, task, agreement.init_from, built.kept,
        at_beginning=at_beginning, wrong=wrong,
    )  # fmt: skip
    pulse.safe = not checkpointer.newer_than_storage
    if not state:
        check_documents(model, recipe, task, world.device)
    memory = "checkpoint slots are made after the first step, so that training resumes sooner"
    # a user's optimizer creates its state in its first step
    state_known = bool(state) or not recipe.optimizer.factory
    if state_known and (not world.cause or checkpointer.loaded_from != "memory"):
        memory = checkpointer.prepare(model=model.tensors, optimizer=model.state_of(optimizer))
    process.startup.mark("checkpoint")
    if joined.shipper:
        joined.shipper.take(state)
    changed: dict[str, tuple[Any, Any]] = {}
    if world.is_main:
        if state:
            changed = changes_of_start(
                recipe.directory, inputs.recipe, digest_of(inputs.text), agreement.computed_by,
                state, restart=bool(world.cause) or world.generation > 0 or world.round > 1,
            )  # fmt: skip
        show_recipe(recipe.directory, inputs.text)
    start = start_line(built, progress, state, changed, process.startup)
    progress.attempt = start.attempt
    unwritten = state.get(UNWRITTEN) if state else None
    lines = unwritten if isinstance(unwritten, list) else []
    trained = model.trained
    fixed = {name: one for name, one in model.tensors.items() if name not in trained}
    witness = None
    if share := recipe.elastic.witness:
        witness = GradientWitness(share, mesh.dp_size, progress.step, compute_pass)
    with (
        RunLog(recipe, start, lines, joined.shipper, silent=not world.is_main) as log,
        shares_by_speed(recipe, mesh, built.plan, model, task) as balance,
    ):
        process.startup.mark("trackers")
        run = Run(
            inputs.recipe, recipe, task, world, mesh, built.plan, model, optimizer,
            build_schedule(recipe), progress, checkpointer, start, log, pulse, process.recall,
            frozenset(tensors_not_finite(fixed)), balance=balance, witness=witness,
        )  # fmt: skip
        notes = [agreement.note, describe_changes(changed, inputs.recipe), str(witness or "")]
        if recipe.optimizer.factory:
            from trainer.optim.own import describe_own  # imported only where the recipe uses it

            notes.append(describe_own(optimizer, recipe.optimizer))
        log_lines = *built.attention, *(f"note: {note}" for note in notes if note)
        log.say("\n".join([describe(run), *log_lines, *reference_lines, memory]))
        process.kept = [KeptModel(recipe, task, world, mesh, model, optimizer, progress)]
        yield run
        pulse.report(progress.step, "end")


def start_line(
    built: _BuiltModel,
    progress: RunProgress,
    state: Mapping[str, Any] | None,
    changed: Mapping[str, tuple[Any, Any]],
    startup: RunStartup,
) -> StartLine:
    """Return the ledger's line about this start. `state`: of the loaded checkpoint, if any."""
    recipe, stream, world = built.recipe, built.task.stream, built.joined.world
    agreement = built.joined.agreement
    return StartLine(
        attempt=agreement.attempt,
        parent=(progress.attempt or None) if state else "",
        skipped=progress.skipped,
        rollbacks=progress.rollbacks,
        records=("loss", "norm", *(["consumed"] if isinstance(stream, AccountedStream) else [])),
        recipe=digest_of(built.joined.inputs.text),
        directory=os.getcwd(),
        computed_by=agreement.computed_by,
        threads=torch.get_num_threads() if world.device.type == "cpu" else 0,
        changed=changed,
        step=progress.step,
        sequences=progress.sequences,
        global_batch=built.plan.global_batch,
        world_size=world.world_size,
        steps=recipe.run.steps,
        data=stream.fingerprint,
        stages=later_stages(stream),
        model=f"{built.task.name}: {built.task.sizes}",
        nodes=world.nodes,
        round=world.round,
        generation=world.generation,
        source=built.checkpointer.loaded_from or ("init" if recipe.model.init_from else "none"),
        cause=world.cause,
        phases=dict(startup.parts),
    )


@contextmanager
def shares_by_speed(
    recipe: Recipe, mesh: Mesh, plan: GroupBatchPlan, model: ParallelModel, task: Task
) -> Iterator["RunSpeedBalance | None"]:
    """Context in which forward passes are timed for `batch.balance: speed`. Yields the object that
    chooses the shares of ranks, or None if all shares are equal, as in `plan`."""
    if recipe.batch.balance == "equal" or mesh.dp_size == 1:
        yield None
        return
    from trainer.run.balance import RunSpeedBalance  # imported only where the recipe uses it

    ahead = requested_ahead(task.stream, recipe.data.workers)
    balance = RunSpeedBalance(recipe, mesh, plan, ahead)
    with balance.timing(model.module):
        yield balance


def model_and_optimizer(
    recipe: Recipe, task: Task, world: World, mesh: Mesh
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """Build a task's model in the recipe's strategy, and its optimizer. On all ranks."""
    model = parallelize(
        task.model, task.blocks, mesh, recipe, world.device, task.fill,
        cores=max(1, usable_cores() // world.local_world_size),
    )  # fmt: skip
    optimizer = build_optimizer(
        model.optimized, optimizer_options(recipe, task), exact=strategies.exact.used(recipe),
        compiles=recipe.strategy.compile, zeros_like=model.zeros_like,
    )  # fmt: skip
    return model, optimizer


@torch.no_grad()
def check_documents(model: ParallelModel, recipe: Recipe, task: Task, device: torch.device) -> None:
    """Raise RecipeError if a transformers model does not keep documents apart: the loss of the
    second document must not change with the first. On all ranks."""
    theirs, length = task.model, min(recipe.data.seq_len, TRIED_LENGTH) // 2
    if not isinstance(theirs, TransformersModel) or not documents_for(recipe):
        return
    if not recipe.data.sources or not length or recipe.strategy.compile:
        return  # compiling the model for these short sequences would take long
    ids = torch.arange(2 * length, device=device)[None] % theirs.vocab_size
    documents = torch.arange(2 * length, device=device)[None] // length
    labels = ids.roll(-1, 1).masked_fill(documents == 0, IGNORED_LABEL)
    with model.evaluating():
        loss, changed_loss = (
            model({"input_ids": inputs, "labels": labels, "document_ids": documents})["loss"]
            for inputs in (ids, torch.where(documents == 0, ids.flip(1), ids))
        )
    # The tolerance is for experts: other tokens in the batch change how their results round.
    if not torch.allclose(loss, changed_loss, rtol=1e-2):
        raise RecipeError(
            f"data.document_mask: in {theirs.name} of transformers a document changes the loss of "
            "the next; set data.document_mask=false to train it so"
        )


@contextmanager
def abandon_when_recalled(
    checkpointer: TensorCheckpointer, recall: NodeRecallSocket
) -> Iterator[None]:
    """Context that ends the checkpointer on a recall of this process, without waiting for storage:
    the next attempt begins from the copy in memory."""
    recall.stop = checkpointer.interrupt
    try:
        yield
    except BaseException:
        if recall.called:
            checkpointer.abandon()
        raise
    finally:
        recall.stop = lambda: None


@contextmanager
def attention_kernel(recipe: Recipe, task: Task, device: torch.device) -> Iterator[list[str]]:
    """Context in which the fastest kernel computes a decoder's attention. Yields log lines."""
    if device.type != "cuda" or not isinstance(task.model, Decoder):
        yield []
        return
    # a CPU has one kernel only
    from trainer.models.kernels import choose_kernel, kernel_in_use, this_gpu

    try:
        kernel = choose_kernel(
            this_gpu(device),
            recipe.model.attention,
            DTYPES[recipe.precision.dtype],
            task.model.model.architecture.head_dim,
            documents=recipe.data.document_mask and bool(recipe.data.sources),
            exact=strategies.exact.used(recipe),
            ring=strategies.cp.ranks(recipe.strategy) > 1,
            window=bool(task.model.model.windows(recipe.data.seq_len)),
            sinks=task.model.model.sinks,
        )
    except ValueError as error:  # the checks before the launch did not know the GPU
        raise RecipeError(f"model.attention: {error}") from error
    with kernel_in_use(kernel) as used:
        yield [f"attention: {used.name}", *([f"note: {used.note}"] if used.note else [])]


def describe(run: Run) -> str:
    """Describe a run at its start for the log, with the arithmetic of the batch; after a failure
    also its cause, and the steps that it cost."""
    recipe, task, world, start = run.recipe, run.task, run.world, run.start
    idle = 0.0
    if run.model.pipeline:
        idle = idle_share(recipe.strategy, run.plan.passes, run.model.pipeline.costs)
    formats: str = recipe.precision.dtype
    if recipe.precision.matmul:
        formats += f" with products in {recipe.precision.matmul}"
    stored = [f"state in {recipe.optimizer.state_dtype}"]
    if recipe.precision.master != "fp32":
        stored.insert(0, "weights in bf16")
    if len(stored) > 1 or recipe.optimizer.state_dtype != "fp32":
        formats += f" ({', '.join(stored)})"
    stream = task.stream
    length = f"{recipe.run.epochs:g} epoch(s) are {recipe.run.steps} steps"
    if not recipe.run.epochs:
        epochs = recipe.run.steps * run.plan.global_batch / stream.sequences
        length = f"{recipe.run.steps} steps are {epochs:.2f} epochs"
    counted = f"{stream.sequences:,} sequences per epoch"
    if stages := later_stages(stream):
        counted = f"{1 + len(stages)} stages, from sequences 0, "
        counted += ", ".join(f"{begin:,}" for begin, _ in stages)
        length = f"{recipe.run.steps} steps are {recipe.run.steps * run.plan.global_batch:,}"
    notes = (*task.notes, *slow_arithmetic(recipe), *without_peak(recipe, world))
    placed = [world.places] if world.places else []
    if max(strategies.sizes(recipe.strategy).values()) > 1 or placed:
        placed.insert(0, placement(recipe, world.world_size, world.local_world_size))
    lines = [
        f"{task.name}: {task.sizes}, "
        f"{formats}, {strategies.describe(recipe, idle)} over {world.world_size} rank(s) on "
        f"{world.device.type}",
        f"{run.plan} {stream.describe(run.plan.global_batch)}",
        f"data: {counted}; {length}",
        *([f"placement: {'; '.join(filter(None, placed))}"] if placed else []),
        *(f"note: {note}" for note in notes),
    ]
    steps, lost = recipe.run.steps, max(0, run.log.reached - start.step)
    if run.stopped_early:
        lines.append(f"nothing to train: the run has {run.stopped_early}")
    elif start.step >= steps:
        lines.append(f"nothing to train: step {start.step} of {steps} is done")
    elif start.step or lost:
        origin = start.source if start.source in ("memory", "storage") else "the beginning"
        why = f"{describe_failure(start.cause)}; " if start.cause else ""
        cost = f"{lost or 'no'} step{'s' if lost > 1 else ''} lost"
        lines.append(f"resuming after step {start.step} of {steps} from {origin}; {why}{cost}")
    return "\n".join(lines)


def idle_share(strategy: StrategySection, passes: int, costs: Sequence[float]) -> float:
    """Return the share of a step in which the ranks of a pipeline wait. `passes`: micro-batches of
    a step. `costs`: relative cost of each stage."""
    # imported only where the recipe uses it
    from trainer.parallel.schedules import COST, arranged, schedule, simulate

    stages = [{kind: cost * each for kind, cost in COST.items()} for each in costs]
    orders = schedule(*strategies.pp.shape(strategy), passes)
    return simulate(arranged(orders), stages=stages).bubble


def without_peak(recipe: Recipe, world: World) -> list[str]:
    """Return a note that no MFU is reported, as this GPU's peak is unknown; [] if it is known."""
    if world.device.type != "cuda" or peak_flops(recipe, world.device):
        return []
    name = torch.cuda.get_device_name(world.device)
    return [
        f"the peak FLOP/s of {name} are not known, so MFU is not reported; set tracking.peak_tflops"
    ]
