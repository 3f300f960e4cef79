"""`Run`: what the training loop passes to its functions. `RunProgress`: the part that steps change.
`RunScalarNames`: names of the scalars that a model returns. Ranks sum these scalars by position, so
all micro-batches must return the same names."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from checkpointing import SpareWriter, TensorCheckpointer
from checkpointing.ranks import exchange
from elastic import Pulse, StartLine, World
from elastic.group.batch_plan import GroupBatchPlan, GroupBatchPlanPass
from elastic.node.recall import NodeRecallSocket
from trainer.optim.optimizer import LossScale, Rate
from trainer.parallel.mesh import Mesh
from trainer.parallel.parallel_model import ParallelModel
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.sections import RunSection
from trainer.run.metrics import RunLog, RunStartup
from trainer.tasks.task import Task

if TYPE_CHECKING:
    from trainer.run.balance import RunSpeedBalance
    from trainer.run.witness import GradientWitness


class RunScalarNames:
    """Checks that a model returns the same scalars in all micro-batches and on all ranks."""

    def __init__(self) -> None:
        self._known: list[str] | None = None
        self._agreed = False

    def in_order(self, means: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the scalars of a micro-batch, sorted by name. Raises RecipeError if the names
        differ from those of an earlier micro-batch."""
        if self._known is None:
            self._known = sorted(means)
        _require_same([self._known, means])
        return [means[name] for name in self._known]

    def agree(self, last_stage: Iterable[str], group: dist.ProcessGroup) -> list[str]:
        """Return the sorted names of the model's scalars. The first call compares them between all
        ranks in `group`, and raises RecipeError if they differ. On all ranks. `last_stage`: names
        of the last pipeline stage's scalars, used on a rank that has had no scalars."""
        if self._known is None:
            self._known = sorted(last_stage)
        # Only once, because an exchange at every step would cost a round trip each.
        if not self._agreed:
            _require_same(exchange(self._known, group.size(), group))
            self._agreed = True
        return self._known


def _require_same(names: Iterable[Iterable[str]]) -> None:
    first, *others = map(set, names)
    if odd := sorted(first.union(*others) - first.intersection(*others)):
        raise RecipeError(
            f"model.factory: forward returns {odd[0]!r} in some micro-batches, and in others not; "
            "return it in all, say as 0 where there is nothing to count"
        )


@dataclass
class RunProgress:
    """All state of a run besides tensors; part of each checkpoint."""

    step: int = 0
    """Optimizer steps done, including skipped steps."""
    sequences: int = 0
    """Sequences of the global order consumed so far."""
    tokens: int = 0
    """Target tokens consumed; of chats only the tokens that are trained."""
    skipped: int = 0
    """Steps whose update was skipped or undone because of NaN, infinity, or an fp16 overflow."""
    skipped_in_row: int = 0
    rollbacks: int = 0
    """Number of roll-backs of weights and optimizer state to a checkpoint."""
    loss_scale: LossScale = field(default_factory=lambda: LossScale(1.0))
    validation_loss: float | None = None
    """Loss of the last validation pass."""
    validated: int = 0
    """Step of the last validation pass."""
    best_loss: float | None = None
    """Lowest validation loss so far."""
    best_step: int = 0
    """Step of the first validation pass that had `best_loss`."""
    passes_since_best: int = 0
    """Validation passes after `best_step`."""
    attempt: str = ""
    """Name in the ledger of the attempt that computed this state; "" if unknown."""
    init_from: str | None = ""
    """Digest of the initial weights; "": they were random; None: unknown, in an old checkpoint."""

    def lacks_pass(self, options: RunSection) -> bool:
        """Return whether this step lacks the validation pass that `run.stop_after` needs, as when
        the ranks skipped it because a node left."""
        due = self.step and options.stop_after and self.step % options.evaluate_every == 0
        return bool(due) and self.step < options.steps and self.validated != self.step

    def judge(self, loss: float | None) -> None:
        """Record the validation loss of this step, and update the best loss. A loss that is None or
        not finite is no improvement."""
        self.validation_loss, self.validated = loss, self.step
        self.passes_since_best += 1
        lowest = math.inf if self.best_loss is None else self.best_loss
        # The comparison is false for NaN and infinity.
        if loss is not None and -math.inf < loss < lowest:
            self.best_loss, self.best_step, self.passes_since_best = loss, self.step, 0


@dataclass
class RunProcess:
    """What a training process holds during all of its attempts; `startup` is renewed for each."""

    arguments: tuple[str, ...]
    """Path of a recipe, and overrides `key.sub=value`."""
    pulse: Pulse
    recall: NodeRecallSocket
    spare: SpareWriter
    """A checkpoint writer process that has started already."""
    startup: RunStartup
    """Times of the present attempt's start."""
    kept: "list[KeptModel]" = field(default_factory=list)
    """Models that the next attempt may use; [] in a new process, and while a run is built. A
    reserve process has built one for each rank of its node."""


@dataclass(frozen=True)
class KeptModel:
    """A model and its optimizer, for the next attempt of this process."""

    recipe: Recipe
    """The recipe with every value resolved for `world`."""
    task: Task
    world: World
    mesh: Mesh
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    progress: RunProgress | None
    """Progress of the last attempt, which trained the model; None: it has no numbers yet."""


@dataclass(frozen=True)
class Run:
    """One attempt of a run on one rank, from a start or restart to its end."""

    written: Recipe
    """The user's recipe, before values were computed for this world."""
    recipe: Recipe
    """`written` with computed numbers for `batch.micro_batch: auto` and `run.steps`."""
    task: Task
    world: World
    mesh: Mesh
    plan: GroupBatchPlan
    """The division of global batches into equal shares; `plan_at` returns the plan in force."""
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    rate: Rate
    progress: RunProgress
    checkpointer: TensorCheckpointer
    start: StartLine
    log: RunLog
    pulse: Pulse
    recall: NodeRecallSocket
    unchecked: frozenset[str] = frozenset()
    """Names in `model.tensors` of tensors that are not trained, held NaN or infinity at the start,
    and are not checked."""
    trained: RunScalarNames = field(default_factory=RunScalarNames)
    validated: RunScalarNames = field(default_factory=RunScalarNames)
    """Names of the scalars that the model returns in training, and in validation."""
    balance: "RunSpeedBalance | None" = None
    """Changes shares for `batch.balance: speed`; None: `plan` is always in force."""
    witness: "GradientWitness | None" = None
    """Compares gradients between ranks; None: the recipe does not ask for it."""

    def plan_at(self, sequences: int) -> GroupBatchPlan:
        """Return the plan of the global batch that begins at a sequence of the global order."""
        return self.balance.plan_at(sequences) if self.balance else self.plan

    @property
    def micro_batches(self) -> list[GroupBatchPlanPass]:
        """This rank's micro-batches in the present step."""
        sequences = self.progress.sequences
        return list(self.plan_at(sequences).micro_batches(self.mesh.dp_rank, sequences))

    @property
    def passes(self) -> Iterator[int]:
        """Yield without end: this rank's number of micro-batches in the present and later steps."""
        sequences = self.progress.sequences
        while True:
            yield self.plan_at(sequences).passes_of(self.mesh.dp_rank)
            sequences += self.plan.global_batch

    @property
    def first_step(self) -> bool:
        """Whether the present step is the first of this attempt."""
        return self.progress.step == self.start.step

    @property
    def done(self) -> bool:
        """Whether no step follows: `run.steps` is reached, or `run.stop_after` ends the run."""
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
        """Return whether `step` may be the last one, depending on its validation."""
        options, passes = self.recipe.run, self.progress.passes_since_best + 1
        decides = options.stop_after and step % options.evaluate_every == 0
        return step >= options.steps or bool(decides and passes >= options.stop_after)

    def due(self, every: int) -> bool:
        """Return whether an action is due after this step, if it is taken every `every` steps (0:
        never) and after the last step."""
        return self.done or (every > 0 and self.progress.step % every == 0)
