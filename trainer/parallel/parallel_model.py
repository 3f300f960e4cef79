"""`ParallelModel`: a model with its strategy applied, for the training loop, saves and loads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpointing.format.layout import TensorMeta
from checkpointing.format.peft import is_part, name_in_file
from checkpointing.format.tensors import local_tensor
from trainer.models.parameter_names import apart
from trainer.optim.formats import Format, placed
from trainer.optim.saved_state import own_state, own_targets
from trainer.parallel.ddp import DdpShardedView
from trainer.parallel.fsdp import prepare_backward
from trainer.parallel.offload import OffloadFile
from trainer.parallel.passes import ParallelForwardPass, loss_problem, means
from trainer.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from trainer.parallel.context import ContextParallel
    from trainer.parallel.pipeline import PipelineParallel

KEPT = "optimizer"
"""Key in a saved trainer state, of the optimizer's JSON by FQN, see saved_state.py."""


@dataclass(frozen=True)
class ParallelModel:
    """A model with its strategy applied. FQNs of parameters are equal under all strategies."""

    module: nn.Module
    """The model, or its DDP wrapper. In a pipeline a container of this rank's stages, which only
    `run` can call."""
    parameters: dict[str, nn.Parameter]
    """The parameters of the forward pass: whole tensors, or DTensors. Tied weights appear once."""
    buffers: Callable[[], dict[str, torch.Tensor]]
    """Returns the persistent buffers; a forward pass may replace them."""
    optimized: dict[str, nn.Parameter]
    """The parameters that the optimizer updates: `parameters`, except under ZeRO-1."""
    sharded_view: DdpShardedView | None
    file: OffloadFile | None
    """The file that holds `parameters` and their gradients; None: both are in memory."""
    recipe: Recipe
    autocast: Callable[[], Any]
    draw_weights: Callable[[], None]
    """Sets random initial values of parameters and buffers, unless the user's model came with
    values; with an adapter only of A and B. Slow for large models, so it is called only if no
    weights are loaded."""
    share_buffers: Callable[[], None]
    """Copies the persistent buffers of the first replica to the other replicas, whose forward
    passes have changed their own. Called on all ranks."""
    pipeline: "PipelineParallel | None" = None
    """Computes this rank's pipeline stages; None: this rank has all layers."""
    context: "ContextParallel | None" = None
    """Computes this rank's part of each sequence; None: this rank computes whole sequences."""
    stacks: Sequence[str] = ()
    """See `Decoder.stacks_apart`."""
    draws: bool = False
    """Whether a training pass may draw random numbers."""

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the `means` of the model's result for a micro-batch. Called on all ranks."""
        with self.autocast():
            if self.context:
                return means(self.context(self.module, inputs))
            result = self.module(**inputs)
        # In evaluation a model may return scalars without a loss, such as recall@20.
        if torch.is_grad_enabled() and (problem := loss_problem(result)):
            raise RecipeError(f"model.factory: forward returns {problem}")
        return means(result)

    def run(
        self, inputs: Sequence[Mapping[str, torch.Tensor]], *, train: bool, reduce: bool = True
    ) -> Iterator[ParallelForwardPass]:
        """Yield the forward passes of a step in the strategy's order. The caller calls each before
        it requests the next. If `train`, backward passes run in between. Called on all ranks.

            for forward in model.run(inputs, train=True):
                forward.root = forward(inputs[forward.number])["loss"]

        Args:
            inputs: the micro-batches of this rank.
            train: whether to run backward.
            reduce: whether gradients are summed over the ranks in the last pass. Must be True in a
                pipeline.
        """
        if self.pipeline:
            yield from self.pipeline.run(inputs, train)
        else:
            for number in range(len(inputs)):
                last = reduce and number == len(inputs) - 1
                with self._accumulate(last) if train else nullcontext():
                    forward = ParallelForwardPass(number, self)
                    yield forward
                    if train:
                        torch.autograd.backward(forward.take_root())
        if train and reduce:
            self.share_buffers()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context with all modules in eval mode. Restores each module's own mode afterwards."""
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            yield
        finally:  # even after an error, because the next attempt may reuse the model
            for module, training in modes.items():
                module.training = training

    @property
    def beside_loss(self) -> Sequence[str]:
        """Names of the scalars beside the loss that the last pipeline stage returns; () without a
        pipeline."""
        return self.pipeline.beside_loss if self.pipeline else ()

    @contextmanager
    def _accumulate(self, last: bool) -> Iterator[None]:
        """Context around forward and backward of a pass; the `last` of a step reduces gradients."""
        if not isinstance(self.module, DistributedDataParallel):
            prepare_backward(self.module, last, self.recipe)
        elif not last:
            with self.module.no_sync():
                yield
            return
        yield

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint by name: parameters and persistent buffers; with an adapter
        only trained parameters, with PEFT's names."""
        return self._in_files(self.buffers())

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """`tensors` for a save, with copies of the buffers, because the next forward pass may
        change buffers before the save has copied them. Parameters change only later."""
        return self._in_files({name: buffer.clone() for name, buffer in self.buffers().items()})

    def _in_files(self, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.recipe.model.adapter:
            return apart({**self.parameters, **buffers}, self.stacks)
        return {name_in_file(name): p for name, p in self.parameters.items() if p.requires_grad}

    def under_adapter(self, *, whole: bool) -> dict[str, torch.Tensor]:
        """Return what is loaded from `model.init_from`; `whole`: also what is trained whole."""
        held = {
            name: one
            for name, one in self.parameters.items()
            if not (one.requires_grad and (is_part(name) or not whole))
        }
        return apart({**held, **self.buffers()}, self.stacks)

    @property
    def in_nf4(self) -> frozenset[str]:
        """FQNs of this rank's weights in nf4."""
        return frozenset(k for k, one in self.parameters.items() if one.dtype == torch.uint8)

    @property
    def trained(self) -> frozenset[str]:
        """Names in `tensors` of trained parameters, which must be finite; masks need not be."""
        if self.recipe.model.adapter:
            return frozenset(self.tensors)
        trained = {name: one for name, one in self.parameters.items() if one.requires_grad}
        return frozenset(apart(trained, self.stacks))

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        return self.kept_by(optimizer)[0]

    def kept_by(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the optimizer's state on this rank: tensors by name, and JSON values by FQN."""
        kept = own_state(optimizer, self.optimized)
        return apart(kept.tensors, self.stacks), kept.trees

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return zeros like `parameter` for optimizer state, in memory or in the offload file."""
        if self.file:
            return self.file.zeros_like(parameter)
        # zeros_like of a DTensor would first derive, for each shape, how its result is sharded.
        return placed(torch.zeros_like(local_tensor(parameter)), parameter)

    def portions(self, optimizer: torch.optim.Optimizer) -> Iterator[list[dict[str, Any]]]:
        """Yield the parameter groups in the portions of an offload file, or all at once."""
        return self.file.portions(optimizer) if self.file else iter([optimizer.param_groups])

    @property
    def counted(self) -> Sequence[nn.Parameter]:
        """The parameters of `optimized` that this rank adds to the gradient norm. A weight on two
        pipeline stages is added by one of them."""
        elsewhere = self.pipeline.counted_elsewhere if self.pipeline else None
        return [parameter for parameter in self.optimized.values() if parameter is not elsewhere]

    def collect_gradients(self) -> None:
        """Set the gradients of `optimized` to the reduced gradients. Called on all ranks."""
        if self.pipeline:
            self.pipeline.add_tied_gradients()
        if self.sharded_view:
            self.sharded_view.scatter_gradients()

    def publish_weights(self) -> None:
        """Copy the updated `optimized` tensors to `parameters`. Called on all ranks."""
        if self.sharded_view:
            self.sharded_view.gather()

    def zero_gradients(self) -> None:
        for parameter in (*self.parameters.values(), *self.optimized.values()):
            parameter.grad = None


class ParallelStateTargets:
    """Called with a saved trainer state, returns the tensors into which the optimizer's state is
    loaded. Once they are loaded, `put` assigns them to the optimizer."""

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
