"""`ParallelModel`: a model with its strategy applied, as the loop, saves and loads see it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpointing.format.layout import TensorMeta
from checkpointing.format.peft import is_part, name_in_file
from trainer.models.stacks import apart
from trainer.optim.formats import Format
from trainer.optim.saved_state import own_state, own_targets
from trainer.parallel.ddp import ShardedView
from trainer.parallel.fsdp import prepare_backward
from trainer.parallel.offload import OffloadFile
from trainer.parallel.passes import Compute, loss_problem, means
from trainer.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from trainer.parallel.context import Context
    from trainer.parallel.pipeline import Pipeline

KEPT = "optimizer"
"""Key of a trainer state: FQN → JSON state of an optimizer, see saved_state.py."""


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
    """Modules whose parameters checkpoints hold row by row, see `Decoder.stacks_apart`."""
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
