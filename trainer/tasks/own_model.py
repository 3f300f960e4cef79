"""A user's own code that cannot do a step: told in a line, with the place in that code."""

import inspect
import logging
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from elastic import Pulse
from elastic.world import is_lost_peer
from trainer.data.shards import DataError
from trainer.optim.method import update
from trainer.parallel.parallelize import DTYPES, ParallelModel
from trainer.parallel.passes import loss_problem, means
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.factory import CIRCUMSTANCES, OwnCodeError, failure, is_wrong, place_in

_ELSEWHERE = re.compile(r"fake|meta tensor|NoneType", re.IGNORECASE)
"""Words of errors that a pass among all ranks, on real tensors, may not have."""


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


_HALVES = (torch.bfloat16, torch.float16)


def keep_in_float32(recipe: Recipe, model: nn.Module, what: str) -> list[str]:
    """Convert a model that was made in bf16 or fp16, as if it had been made in float32: parameters
    and buffers, tied ones staying tied. Frozen parameters stay as they are where `precision.dtype`
    has everything cast to it anyway. Returns what a user should know of number formats.

    Args:
        recipe: says the format of activations.
        model: of the user's, whole, on the CPU or the meta device.
        what: made it, for the note.
    """
    if torch.get_default_dtype() in _HALVES:  # its factory left it so
        torch.set_default_dtype(torch.float32)
    cast = recipe.precision.dtype != "fp32"
    converted, kept = Counter[str](), Counter[str]()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            # What torchao and others make of a tensor has a format of its own.
            if tensor.dtype not in _HALVES or type(tensor.data) is not torch.Tensor:
                continue
            is_parameter, name = isinstance(tensor, nn.Parameter), _short(tensor.dtype)
            if is_parameter and cast and not tensor.requires_grad:
                kept[name] += 1
                continue
            converted[name] += is_parameter
            tensor.data = tensor.data.float()
    kept += Counter(
        _short(one.dtype)
        for one in model.parameters()
        if one.requires_grad and one.is_floating_point() and one.dtype != torch.float32
    )

    def made(count: int, name: str) -> str:
        return f"{what} made {count} parameter{'s' if count > 1 else ''} in {name}"

    return [
        *(
            f"{made(count, name)}; they are converted to float32, and trained and saved so"
            for name, count in (+converted).items()
        ),
        *(
            f"{made(count, name)}, which stay{'s' * (count == 1)} so"
            for name, count in kept.items()
        ),
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def give_next_tokens(recipe: Recipe, model: nn.Module) -> list[str]:
    """Have a model that moves labels by one take those of prepared data as they are: they are the
    next tokens already, and it would learn the ones after. Returns what a user should know.

    Raises:
        RecipeError: it takes no `shift_labels`, as models of older versions of transformers.
    """
    if not shifts_labels(model):
        return []
    what = f"{type(model).__name__}, which {recipe.model.factory} returned,"
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD or one.name == "shift_labels" for one in parameters):
        raise RecipeError(
            f"model.factory: {what} moves labels by one, but those of prepared data are the next "
            "tokens already, and it takes no shift_labels; compute the loss in a module around it"
        )

    def add(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        labels = named.get("labels")
        return given, named if labels is None else {**named, "shift_labels": labels.contiguous()}

    model.register_forward_pre_hook(add, with_kwargs=True)
    if not recipe.data.document_mask:
        return []
    return [
        f"{what} does not look at document_ids: attention crosses documents; "
        "data.document_mask=false says the same"
    ]


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model of transformers is given its own inputs as labels, and predicts each from
    what is before it: its forward pass calls `loss_function`, and that is the one that does so."""
    passes = (inspect.unwrap(one.forward) for one in type(model).mro() if hasattr(one, "forward"))
    codes = (getattr(one, "__code__", None) for one in passes)
    if not any("loss_function" in code.co_names for code in codes if code):
        return False
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def check_forward(
    recipe: Recipe, model: nn.Module, inputs: Mapping[str, torch.Tensor], given: str = ""
) -> list[str]:
    """Refuse a model whose forward pass fails, or gives no loss; returns the names of parameters
    that take no part in it. The model is spent: to be called where it is thrown away.

    Tried on tensors without contents, at once however large the model is. What fails there may do
    so for reasons of its own; it is refused if a pass of one sequence on the CPU fails in the same
    place, and not for want of a GPU or of other ranks.

    Args:
        recipe: names the model.
        model: from its factory, on the CPU.
        inputs: a micro-batch.
        given: what of, for the message.

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
        problem = loss_problem(result)
    except Exception as error:
        failed: Exception | None = error
    else:
        failed = None
    finally:
        logging.disable(logging.NOTSET)
    if failed and not (_fails_anywhere(failed) and place_in(failed)):
        return []
    if failed:
        try:
            with torch.no_grad():
                problem = loss_problem(call({}, inputs))
        except Exception as error:
            if _fails_anywhere(error) and place_in(error) == place_in(failed):
                what = f"the forward pass of {recipe.model.factory}{given} {failure(error)}"
                raise RecipeError(f"model.factory: {what}") from error
            return []
    if problem:
        name = type(model).__name__
        raise RecipeError(f"model.factory: forward of {name}{given} returns {problem}")
    if failed:
        return []
    trained = {name: fakes[name] for name, one in model.named_parameters() if one.requires_grad}
    with suppress(Exception), mode:  # a backward pass may have reasons of its own, too
        loss = means(result)["loss"]
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return [name for name, one in zip(trained, found, strict=True) if one is None]
    return []


def _fails_anywhere(error: Exception) -> bool:
    """Whether a pass on one CPU, alone, tells that every pass will fail so."""
    said = f"{type(error).__name__}: {error}"
    return is_wrong(error) and not (CIRCUMSTANCES.search(said) or _ELSEWHERE.search(said))


@contextmanager
def refusing_misfits(
    recipe: Recipe, pulse: Pulse, first: Callable[[], bool]
) -> Generator[None, None, None]:
    """Code of the user's that fails in the first step of a run is wrong input. Later it ends the
    run for good: the same step would come again, and so would its error.

    Args:
        recipe: of the run.
        pulse: of this rank.
        first: whether nothing has been trained yet, and nothing has failed.

    Raises:
        RecipeError: with the place in the user's code; in later steps an OwnCodeError.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        told = _misfit(recipe, error, first())
        if not told:
            raise
        cause = error.__cause__ if told == str(error) else error
        if first():
            pulse.report(0, "load")  # for the agent, too: it was never a step
            raise RecipeError(told) from cause
        raise OwnCodeError(told) from cause


def _misfit(recipe: Recipe, error: BaseException, first: bool) -> str | None:
    """What to tell, if it was code of the user's that failed, and will do so again."""
    if isinstance(error, RecipeError) or (isinstance(error, DataError) and recipe.data.factory):
        return str(error)
    if not is_wrong(error) or (isinstance(error, RuntimeError) and is_lost_peer(error)):
        return None
    trace = traceback.extract_tb(error.__traceback__)
    frames = {(frame.filename, frame.name) for frame in trace}

    def passes(function: Callable[..., object]) -> bool:
        code = function.__code__
        return (code.co_filename, code.co_name) in frames

    place, doors = place_in(error), recipe.own_code
    name = doors.get("optimizer.factory")
    if name and place and passes(update):
        return f"optimizer.factory: the step of {name} {failure(error)}"
    key = "model.factory" if recipe.model.factory else "model.family"
    name, forward = doors.get(key), passes(ParallelModel.__call__)
    plain = first and not CIRCUMSTANCES.search(str(error))  # such as a change in place
    if name and (forward or passes(ParallelModel.run)) and (place or plain):
        which = "forward" if forward else "backward"
        return f"{key}: the {which} pass of {name} {failure(error)}"
    for key, name in doors.items():
        module = sys.modules.get(name.partition(":")[0])
        if any(frame.filename == getattr(module, "__file__", "") for frame in trace):
            return f"{key}: {name} {failure(error)}"
    return None
