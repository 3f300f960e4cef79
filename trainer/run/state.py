"""What the loop passes to all that it calls: a `Run`, and in it the `Progress` that steps move."""

import math
from dataclasses import dataclass, field

import torch

from checkpointing import TensorCheckpointer
from elastic import Pulse, StartLine, World
from elastic.group.batch_plan import BatchPlan
from elastic.node.recall import Recall
from trainer.optim.optimizer import LossScale
from trainer.optim.schedule import Rate
from trainer.parallel.mesh import Mesh
from trainer.parallel.parallelize import ParallelModel
from trainer.recipe import Recipe
from trainer.recipe.sections import RunSection
from trainer.run.means import Names
from trainer.run.metrics import Log
from trainer.tasks.task import Task


@dataclass
class Progress:
    """Everything besides tensors that a run carries on from step to step and from attempt to
    attempt; saved in each checkpoint."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    sequences: int = 0
    """The cursor: how many sequences of the global order are consumed."""
    tokens: int = 0
    """Target tokens consumed; of chats those that are trained."""
    skipped: int = 0
    """Steps that left the weights alone: their numbers were not finite, or fp16 overflowed."""
    skipped_in_row: int = 0
    rollbacks: int = 0
    """How often weights and optimizer state were taken back to those of a checkpoint."""
    loss_scale: LossScale = field(default_factory=lambda: LossScale(1.0))
    validation_loss: float | None = None
    """Loss of the newest validation pass."""
    validated: int = 0
    """Step of that pass."""
    best_loss: float | None = None
    """Lowest loss of a validation pass so far."""
    best_step: int = 0
    """Step of the first pass with that loss."""
    passes_since_best: int = 0
    """Validation passes after that one."""
    attempt: str = ""
    """Attempt that computed this state, as the ledger names it; "" if it is not known."""
    init_from: str | None = ""
    """Digest of the weights that the run began with, see identity.py; "" if they were drawn, None
    in checkpoints older than this field."""

    def lacks_pass(self, options: RunSection) -> bool:
        """Whether `run.stop_after` counts a validation pass of the step just done that is not part
        of this state: a leaving node has kept it from being done before the state was saved."""
        due = self.step and options.stop_after and self.step % options.evaluate_every == 0
        return bool(due) and self.step < options.steps and self.validated != self.step

    def judge(self, loss: float | None) -> None:
        """Note the loss that a validation pass has found of the step just done, None or NaN if it
        was not finite, and whether it is the lowest so far."""
        self.validation_loss, self.validated = loss, self.step
        self.passes_since_best += 1
        best = math.inf if self.best_loss is None else self.best_loss
        if loss is not None and -math.inf < loss < best:
            self.best_loss, self.best_step, self.passes_since_best = loss, self.step, 0


@dataclass
class Kept:
    """What a process goes on with that outlives a failure of others."""

    run: "Run | None" = None
    """The run that it was in; None in a process that is new, and while a run is being built."""


@dataclass(frozen=True)
class Run:
    """A run as one of its ranks sees it, from its start or restart to its end."""

    given: Recipe
    recipe: Recipe
    """`given` with every value known: `batch.micro_batch` is a number, and `run.steps` follows from
    `run.epochs`."""
    task: Task
    world: World
    mesh: Mesh
    plan: BatchPlan
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    rate: Rate
    """The learning-rate schedule."""
    progress: Progress
    checkpointer: TensorCheckpointer
    start: StartLine
    """What this attempt began with."""
    log: Log
    pulse: Pulse
    recall: Recall
    unchecked: frozenset[str] = frozenset()
    """Names in `model.tensors` of what held NaN or infinity when this attempt began, and may."""
    trained: Names = field(default_factory=Names)
    """What the model returns in training."""
    validated: Names = field(default_factory=Names)
    """What it returns in validation."""

    @property
    def first_step(self) -> bool:
        """Whether the step that is under way, or was just begun, is the first of this attempt."""
        return self.progress.step == self.start.step

    @property
    def done(self) -> bool:
        """No step comes after the one just done."""
        return self.progress.step >= self.recipe.run.steps or bool(self.stopped_early)

    @property
    def stopped_early(self) -> str:
        """Why the run ends before `run.steps`, by `run.stop_after`; "" if it does not."""
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
        """Whether `step`, which is not validated yet, may be the last."""
        options, passes = self.recipe.run, self.progress.passes_since_best + 1
        decides = options.stop_after and step % options.evaluate_every == 0
        return step >= options.steps or bool(decides and passes >= options.stop_after)

    def due(self, every: int) -> bool:
        """Whether what happens every so many steps (0: never), and after the last, happens now."""
        return self.done or (every > 0 and self.progress.step % every == 0)
