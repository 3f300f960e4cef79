"""Checks a user's model at the start, and reports its failures with their place in the code."""

import inspect
import logging
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from checkpointing.format.tensors import STORED_DTYPES
from elastic import Pulse
from elastic.world import is_lost_peer
from trainer.data.shards import DataError
from trainer.optim.method import update
from trainer.parallel.parallel_model import ParallelModel
from trainer.parallel.parallelize import DTYPES
from trainer.parallel.passes import loss_problem, means
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.factory import CIRCUMSTANCES, RecipeFactoryError, failure, is_wrong, place_in

_ELSEWHERE = re.compile(r"fake|meta tensor|NoneType", re.IGNORECASE)
"""Matches errors that fake tensors or missing ranks may cause, rather than the model."""


def check_signature(recipe: Recipe, model: nn.Module, names: Iterable[str]) -> None:
    """Raise RecipeError if the model's `forward` does not take inputs of these names."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # Python cannot determine the signature
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


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Return the fields of a `Task` that attributes of a user's model give (docs/extending.md)."""
    change = getattr(model, "after_step", None)

    @torch.no_grad()
    def after(trained: ParallelModel, samples: int) -> None:
        change(samples, lambda **inputs: trained(inputs))  # type: ignore[misc]

    return {
        "files": getattr(model, "checkpoint_files", {}),
        "pretrained": getattr(model, "init_from_tensors", None),
        "after_step": after if callable(change) else None,
    }


def arguments_of(model: nn.Module) -> list[str]:
    """Return the leading arguments of `forward` that can be passed both by position and by name."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # Python cannot determine the signature
        return []
    given = takewhile(lambda one: one.kind is one.POSITIONAL_OR_KEYWORD, parameters)
    return [one.name for one in given]


_NO_SPARSE = "which no strategy can reduce; leave sparse=False"


def check_tensors(model: nn.Module, what: str) -> None:
    """Raise RecipeError for the first parameter or buffer that cannot be trained, sharded or saved.
    `what`: name of the user's factory, for the message."""
    persistent = model.state_dict(keep_vars=True).keys()
    named: list[tuple[str, torch.Tensor]] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if problem := _problem(tensor, kind == "parameter" or name in persistent):
            raise RecipeError(f"model.factory: {kind} {name} of {what} {problem}")
        named.append((f"{kind} {name}", tensor))
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and module.weight.requires_grad:
            raise RecipeError(
                f"model.factory: {name or type(module).__name__} of {what} is an embedding with "
                f"sparse gradients, {_NO_SPARSE}"
            )
    if pair := _in_one_memory(named):
        raise RecipeError(
            f"model.factory: {' and '.join(pair)} of {what} lie in the same memory, but are no "
            "tied weights; assign one nn.Parameter to both names, or clone() one of the two"
        )


def _problem(tensor: torch.Tensor, saved: bool) -> str | None:
    """Return why a parameter or buffer cannot be used, and what to do; None if it can. `saved`:
    whether checkpoints contain it."""
    trained = tensor.requires_grad
    if is_lazy(tensor):
        return (
            "is lazy and has no shape yet; name the size of its input, as nn.Linear does, or call "
            "the model once in the factory"
        )
    if tensor.device.type == "meta":
        return (
            "is on the meta device and has no values; build the model on the CPU, or give it "
            "values there in the factory"
        )
    # Tensor subclasses, such as torchao's, handle layouts and dtypes themselves.
    if type(tensor.data) is not torch.Tensor:
        return None
    if saved and tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; {_remedy(tensor, 'make it dense')}"
    if saved and (tensor.is_quantized or tensor.dtype not in STORED_DTYPES):
        return (
            f"is in {_short(tensor.dtype)}, which checkpoints do not hold; "
            f"{_remedy(tensor, 'convert it')}"
        )
    if trained and not tensor.numel():
        return f"has no element (its shape is {tuple(tensor.shape)}); leave it out, or freeze it"
    if trained and tensor.is_complex():
        return (
            f"is in {_short(tensor.dtype)}, which the optimizers do not train; make it a real one "
            "of shape (..., 2), and call torch.view_as_complex in forward"
        )
    if tensor.layout == torch.strided and _span(tensor) < tensor.numel():
        if trained:
            return (
                "is expanded: several of its elements share memory; clone() it, or make it "
                "smaller and expand it in forward"
            )
        tensor.data = tensor.data.contiguous()  # loading must write each element separately
    return None


def _remedy(tensor: torch.Tensor, cure: str) -> str:
    if isinstance(tensor, nn.Parameter):
        return cure
    return f"{cure}, or register it with persistent=False"


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements in memory from the first of a tensor to its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0


def _in_one_memory(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, str] | None:
    """Return the names of two tensors that share memory, one of which is trained; None if there are
    none. DDP would train them as one tensor, FSDP as two."""
    places = sorted(
        (
            (tensor.data_ptr(), name, tensor)
            for name, tensor in named
            if tensor.layout == torch.strided and type(tensor.data) is torch.Tensor
            if tensor.numel()
        ),
        key=lambda place: place[0],
    )
    # (start, name, tensor) of the contiguous tensor that ends last, among those seen so far.
    whole: tuple[int, str, torch.Tensor] | None = None
    for before, (start, name, tensor) in zip([None, *places], places, strict=False):
        # Strided tensors, such as columns of one matrix, interleave without sharing elements.
        begins = before if before and before[0] == start else None
        inside = whole if whole and tensor.is_contiguous() and start < _end(whole) else None
        if (other := begins or inside) and (tensor.requires_grad or other[2].requires_grad):
            return other[1], name
        if tensor.is_contiguous() and not (whole and _end(whole) > start + tensor.nbytes):
            whole = start, name, tensor
    return None


def _end(place: tuple[int, str, torch.Tensor]) -> int:
    return place[0] + place[2].nbytes


_HALVES = (torch.bfloat16, torch.float16)


def keep_in_float32(recipe: Recipe, model: nn.Module, what: str) -> list[str]:
    """Convert parameters and buffers in bf16 or fp16 to float32. Tied parameters stay tied. Frozen
    parameters keep their dtype if `precision.dtype` casts all weights anyway. Returns notes about
    dtypes. `what`: name of the factory or model, for these notes."""
    if torch.get_default_dtype() in _HALVES:  # a factory may have changed the default
        torch.set_default_dtype(torch.float32)
    cast = recipe.precision.dtype != "fp32"
    converted, kept = Counter[str](), Counter[str]()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            # Tensor subclasses, such as torchao's, determine their dtypes themselves.
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
    """Stop a model from shifting labels, because labels of prepared data are the next tokens
    already. Returns notes for the user. Raises RecipeError if the model does not accept
    `shift_labels`, as in older versions of transformers."""
    if not shifts_labels(model):
        return []
    what = f"{type(model).__name__}, which {recipe.model.factory} returned,"
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD or one.name == "shift_labels" for one in parameters):
        raise RecipeError(
            f"model.factory: {what} shifts labels by one, but labels of prepared data are the next "
            "tokens already, and its forward takes no shift_labels; upgrade transformers if the "
            "model is from there, or compute the loss in a module around it"
        )

    def add(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        labels = named.get("labels")
        return given, named if labels is None else {**named, "shift_labels": labels.contiguous()}

    # transformers shifts `labels`, but uses `shift_labels` unchanged.
    model.register_forward_pre_hook(add, with_kwargs=True)
    if not recipe.data.document_mask:
        return []
    return [
        f"{what} does not use document_ids, so attention crosses documents, as with "
        "data.document_mask=false"
    ]


def shifts_labels(model: nn.Module) -> bool:
    """Return whether a model of transformers shifts labels by one, so that the inputs serve as
    labels: its forward calls the model's `loss_function`, which is ForCausalLMLoss."""
    # Unwrapped, because transformers decorates forward.
    passes = (inspect.unwrap(one.forward) for one in type(model).mro() if hasattr(one, "forward"))
    codes = (getattr(one, "__code__", None) for one in passes)
    if not any("loss_function" in code.co_names for code in codes if code):
        return False
    return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def check_forward(
    recipe: Recipe, model: nn.Module, inputs: Mapping[str, torch.Tensor], given: str = ""
) -> list[str]:
    """Refuse a model whose forward fails or returns no loss. Returns the names of parameters
    without a gradient. The model cannot be used afterwards.

    The pass runs on fake tensors, which is fast for models of any size. If it fails, fake tensors
    may be the cause. So the model is refused only if a pass on real tensors on the CPU fails at the
    same place, and not for lack of a GPU or of other ranks. `given`: origin of the inputs, for the
    message of the RecipeError.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = DTYPES[recipe.precision.dtype]

    def call(tensors: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> object:
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype)
        with mixed:
            return torch.func.functional_call(model, dict(tensors), (), dict(batch))

    def problem_of(result: object) -> str | None:
        # A validation pass may return scalars without a loss, unless run.stop_after needs the loss.
        figures = isinstance(result, dict) and "loss" not in result and means(result)
        needed = model.training or recipe.run.stop_after or not figures
        return loss_problem(result) if needed else None

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    failed: Exception | None = None
    logging.disable()  # torch would log errors that are handled here
    try:
        with mode:
            fakes = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
            batch = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
            result = call(fakes, batch)
        problem = problem_of(result)
    except Exception as error:
        failed = error
    finally:
        logging.disable(logging.NOTSET)
    if failed and not (_fails_anywhere(failed) and place_in(failed)):
        return []
    if failed:
        try:
            with torch.no_grad():
                # Without gradients, because activations would take memory.
                problem = problem_of(call({}, inputs))
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
    gradients: dict[str, torch.Tensor | None] = {}
    # If backward fails, the model is not refused, because fake tensors may be the cause.
    with suppress(Exception), mode:
        loss = means(result)["loss"]
        computed = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        gradients = dict(zip(trained, computed, strict=True))
    for name, gradient in gradients.items():
        if gradient is not None and gradient.is_sparse:
            raise RecipeError(f"model.factory: {name} gets a sparse gradient, {_NO_SPARSE}")
    return [name for name, one in gradients.items() if one is None]


def _fails_anywhere(error: Exception) -> bool:
    """Return whether an error in a pass on one CPU shows that every pass will fail."""
    said = f"{type(error).__name__}: {error}"
    return is_wrong(error) and not (CIRCUMSTANCES.search(said) or _ELSEWHERE.search(said))


@contextmanager
def refusing_misfits(
    recipe: Recipe, pulse: Pulse, first: Callable[[], bool]
) -> Generator[None, None, None]:
    """Context around steps that converts failures of the user's code. In the first step of a run a
    failure counts as wrong input, a RecipeError. Later it becomes a RecipeFactoryError, which ends
    the run for good, because the step would fail again. `first`: returns whether no step was
    trained yet, and no attempt has failed."""
    try:
        yield
    except (Exception, SystemExit) as error:
        message = _misfit(recipe, error, first())
        if not message:
            raise
        cause = error.__cause__ if message == str(error) else error
        if first():
            pulse.report(0, "load")  # so that the agent knows that no step has begun
            raise RecipeError(message) from cause
        raise RecipeFactoryError(message) from cause


def _misfit(recipe: Recipe, error: BaseException, first: bool) -> str | None:
    """Return the message for a failure of the user's code; None for errors of other causes."""
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
    # Some failures of the user's code have no frame of it, such as that of an in-place change.
    plain = first and not CIRCUMSTANCES.search(str(error))
    if name and (forward or passes(ParallelModel.run)) and (place or plain):
        which = "forward" if forward else "backward"
        return f"{key}: the {which} pass of {name} {failure(error)}"
    for key, name in doors.items():
        module = sys.modules.get(name.partition(":")[0])
        if any(frame.filename == getattr(module, "__file__", "") for frame in trace):
            return f"{key}: {name} {failure(error)}"
    return None
