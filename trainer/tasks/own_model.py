"""A user's own model that cannot do a pass: told in a line, with the place in the user's code."""

import inspect
import logging
import traceback
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from elastic import Pulse
from elastic.world import is_lost_peer
from trainer.parallel.parallelize import DTYPES, ParallelModel, loss_problem
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.factory import CIRCUMSTANCES, failure, place_in

_PLAIN = (TypeError, RuntimeError, KeyError, IndexError, NameError, AttributeError)
"""Errors of code that is wrong."""


def check_signature(recipe: Recipe, model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a model whose `forward` does not take what it is called with.

    Args:
        recipe: names the model.
        model: of the user's, or one that is to take the user's data.
        names: of what is in a micro-batch.

    Raises:
        RecipeError: with both.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # it has none that Python knows
        return
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        factory = recipe.model.factory
        given = f"model.factory: {factory} returned" if factory else "data.factory: the model is a"
        raise RecipeError(
            f"{given} {type(model).__name__}, whose forward{signature} is called with "
            f"{', '.join(f'{name}=' for name in names)}: {error}"
        ) from error


def check_forward(recipe: Recipe, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose forward pass fails, or gives no loss. The model is spent: to be called
    where it is thrown away.

    Tried on tensors without contents, at once however large the model is. What fails there may do
    so for reasons of its own; it is refused if a pass of one sequence on the CPU fails in the same
    place, and not for want of a GPU or of other ranks.

    Args:
        recipe: names the model.
        model: from its factory, on the CPU.
        inputs: a micro-batch.

    Raises:
        RecipeError: with the place in the user's code.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = DTYPES[recipe.precision.dtype]

    def call(tensors: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> object:
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype)
        with mixed:
            return torch.func.functional_call(model, dict(tensors), (), dict(batch))

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    logging.disable()  # torch logs what it raises
    try:
        with mode:
            fakes = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
            batch = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
            result = call(fakes, batch)
    except Exception as error:
        failed: Exception | None = error
    else:
        failed = None
    finally:
        logging.disable(logging.NOTSET)
    if failed and not (_is_misfit(failed) and place_in(failed)):
        return
    if failed:
        try:
            with torch.no_grad():
                result = call({}, inputs)
        except Exception as error:
            if _is_misfit(error) and place_in(error) == place_in(failed):
                raise _refusal(recipe, error) from error
            return
    if problem := loss_problem(result):
        name = type(model).__name__
        raise RecipeError(f"model.factory: forward of {name} returns {problem}")


@contextmanager
def refusing_misfits(recipe: Recipe, pulse: Pulse, first: bool) -> Generator[None, None, None]:
    """The first step of a run: a model of the user's that cannot do it is wrong input.

    Args:
        recipe: of the run.
        pulse: of this rank.
        first: nothing has been trained yet, and nothing has failed.

    Raises:
        RecipeError: with the place in the user's code.
    """
    try:
        yield
    except _PLAIN as error:
        frames = traceback.extract_tb(error.__traceback__)
        forward = ParallelModel.__call__.__code__
        inside = any((f.filename, f.name) == (forward.co_filename, forward.co_name) for f in frames)
        if first and inside and recipe.model.factory and _is_misfit(error):
            pulse.report(0, "load")  # for the agent, too: it was never a step
            raise _refusal(recipe, error) from error
        raise


def _is_misfit(error: Exception) -> bool:
    """Whether it will be so again, everywhere. Errors of their own kind have reasons of their own:
    no memory, no peer, no contents in a tensor."""
    plain = type(error) in _PLAIN and not CIRCUMSTANCES.search(str(error))
    return plain and not (isinstance(error, RuntimeError) and is_lost_peer(error))


def _refusal(recipe: Recipe, error: Exception) -> RecipeError:
    return RecipeError(
        f"model.factory: the forward pass of {recipe.model.factory} {failure(error)}"
    )
