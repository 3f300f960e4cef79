"""`Run`: all that the loop passes to the functions it calls, and `Progress`, which steps change."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from checkpointing import Spare, TensorCheckpointer
from elastic import Pulse, StartLine, World
from elastic.group.batch_plan import BatchPlan, MicroBatch
from elastic.node.recall import RecallSocket
from trainer.optim.optimizer import LossScale
from trainer.optim.schedule import Rate
from trainer.parallel.mesh import Mesh
from trainer.parallel.parallel_model import ParallelModel
from trainer.recipe import Recipe
from trainer.recipe.sections import RunSection
from trainer.run.means import Names
from trainer.run.metrics import Log, Startup
from trainer.tasks.task import Task

if TYPE_CHECKING:
    from trainer.run.balance import SpeedShares
    from trainer.run.witness import Witness


@dataclass
class Progress:
    """All state of a run besides tensors that lasts from step to step and from attempt to attempt;
    saved in each checkpoint."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    sequences: int = 0
    """Sequences of the global order consumed so far."""
    tokens: int = 0
    """Target tokens consumed; in chats only those that are trained."""
    skipped: int = 0
    """Steps that left the weights unchanged: NaN, infinity, or an fp16 overflow."""
    skipped_in_row: int = 0
    rollbacks: int = 0
    """Times that weights and optimizer state went back to those of a checkpoint."""
    loss_scale: LossScale = field(default_factory=lambda: LossScale(1.0))
    validation_loss: float | None = None
    """Loss of the newest validation pass."""
    validated: int = 0
    """Step of the newest validation pass."""
    best_loss: float | None = None
    """Lowest validation loss so far."""
    best_step: int = 0
    """Step of the first pass with `best_loss`."""
    passes_since_best: int = 0
    """Validation passes after `best_step`."""
    attempt: str = ""
    """Attempt that computed this state, as the ledger names it; "" if unknown."""
    init_from: str | None = ""
    """Digest of the initial weights, see identity.py; "" if they were drawn, None in checkpoints
    older than this field."""

    def lacks_pass(self, options: RunSection) -> bool:
        """Whether a validation pass that `run.stop_after` counts is missing for the step just done:
        a leaving node kept the ranks from running it before the save."""
        due = self.step and options.stop_after and self.step % options.evaluate_every == 0
        return bool(due) and self.step < options.steps and self.validated != self.step

    def judge(self, loss: float | None) -> None:
        """Record the validation loss of the step just done, None or NaN if it was not finite, and
        update the best loss."""
        self.validation_loss, self.validated = loss, self.step
        # Before the comparison, which resets it; a loss that is not finite counts as no
        # improvement.
        self.passes_since_best += 1
        lowest = math.inf if self.best_loss is None else self.best_loss
        # False for NaN and infinity.
        if loss is not None and -math.inf < loss < lowest:
            self.best_loss, self.best_step, self.passes_since_best = loss, self.step, 0


@dataclass
class TrainingProcess:
    """A training process, over all attempts that it takes part in."""

    arguments: tuple[str, ...]
    """Path of a recipe, and overrides `key.sub=value`."""
    pulse: Pulse
    recall: RecallSocket
    spare: Spare
    """A checkpoint writer process that has started already."""
    startup: Startup
    """Times of the present attempt's start."""
    run: "Run | None" = None
    """The run of the last attempt; None in a new process, and while a run is being built."""


@dataclass(frozen=True)
class Run:
    """A run from one rank's view, from a start or restart to its end."""

    written: Recipe
    """The recipe before values were resolved for this world."""
    recipe: Recipe
    """`written` with every value resolved: `batch.micro_batch` is a number, and `run.steps` is
    computed from `run.epochs`."""
    task: Task
    world: World
    mesh: Mesh
    plan: BatchPlan
    """With equal shares; see `plan_at`."""
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    rate: Rate
    """The learning-rate schedule."""
    progress: Progress
    checkpointer: TensorCheckpointer
    start: StartLine
    """The ledger's line about the start of this attempt."""
    log: Log
    pulse: Pulse
    recall: RecallSocket
    unchecked: frozenset[str] = frozenset()
    """Names in `model.tensors` that held NaN or infinity at the start of this attempt, and may."""
    trained: Names = field(default_factory=Names)
    """Names of the scalars that the model returns in training."""
    validated: Names = field(default_factory=Names)
    """Names of the scalars that it returns in validation."""
    balance: "SpeedShares | None" = None
    """The plans of `batch.balance: speed`; None: `plan` holds throughout."""
    witness: "Witness | None" = None
    """Compares gradients of ranks; None: nobody does."""

    def plan_at(self, sequences: int) -> BatchPlan:
        """The plan of the global batch that begins at a sequence of the global order."""
        return self.balance.plan_at(sequences) if self.balance else self.plan

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """This rank's passes of the step under way."""
        sequences = self.progress.sequences
        return list(self.plan_at(sequences).micro_batches(self.mesh.dp_rank, sequences))

    @property
    def passes(self) -> Iterator[int]:
        """Number of this rank's passes in each step, endlessly from the one under way on."""
        sequences = self.progress.sequences
        while True:
            yield self.plan_at(sequences).passes_of(self.mesh.dp_rank)
            sequences += self.plan.global_batch

    @property
    def first_step(self) -> bool:
        """Whether the step under way, or just begun, is the first of this attempt."""
        return self.progress.step == self.start.step

    @property
    def done(self) -> bool:
        """Whether the step just done is the last."""
        return self.progress.step >= self.recipe.run.steps or bool(self.stopped_early)

    @property
    def stopped_early(self) -> str:
        """Why `run.stop_after` ends the run before `run.steps`; "" if it does not."""
        progress, most = self.progress, self.recipe.run.stop_after
        if not 0 < most <= progress.passes_since_best or progress.step >= self.recipe.run.steps:
            return ""
        best = "none was finite"
        if progress.best_loss is not None:
            best = f"the best was {progress.best_loss:.4f}, after step {progress.best_step}"
        return (
            f"stopped early after step {progress.step}: {progress.passes_since_best} validation "
            f"pass(es) in a row found no lower loss; {best}"
        )

    def may_end_with(self, step: int) -> bool:
        """Whether `step`, not validated yet, may be the last."""
        options, passes = self.recipe.run, self.progress.passes_since_best + 1
        decides = options.stop_after and step % options.evaluate_every == 0
        return step >= options.steps or bool(decides and passes >= options.stop_after)

    def due(self, every: int) -> bool:
        """Whether an action that happens every `every` steps (0: never), and after the last, is
        due."""
        return self.done or (every > 0 and self.progress.step % every == 0)
