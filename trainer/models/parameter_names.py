"""Parameters with several names: tied weights, one parameter with several FQNs; and stacked
weights, one tensor in the model and one tensor per row in published files."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from checkpointing.format.plan import local_boxes
from checkpointing.format.tensors import local_tensor, specs_of


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return for each further name of a tied parameter its first name."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    first_names = {name: first.setdefault(parameter, name) for name, parameter in named}
    return {name: known for name, known in first_names.items() if known != name}


def tie_again(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Tie parameters again that `nn.Module._apply` has separated, as it does when it moves weights
    off the meta device. `ties`: see `ties_of`."""
    for name, first in ties.items():
        parent, _, key = name.rpartition(".")
        module, weight = model.get_submodule(parent), model.get_parameter(first)
        if module._parameters[key] is not weight:
            module.register_parameter(key, weight)


def apart(tensors: Mapping[str, Tensor], stacks: Sequence[str]) -> dict[str, Tensor]:
    """Return parameters by FQN, or their optimizer state (`<fqn>.exp_avg`, …), under the names that
    they have in published files. A stack has one row per expert. It is replaced by a view of each
    row that this rank has. `stacks`: `Decoder.stacks_apart`. Raises ValueError if this rank has
    only a part of a row."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name_of = _name_of_rows(name, stacks) if tensor.dim() else None
        if name_of is None:
            result[name] = tensor
        else:
            result |= {name_of(number): row for number, row in _rows(name, tensor).items()}
    return result


def _name_of_rows(name: str, stacks: Sequence[str]) -> Callable[[int], str] | None:
    """Return the function from a stack's row to its name in files; None if `name` is no stack."""
    head, _, last = name.rpartition(".")
    module, _, parameter = head.rpartition(".")
    for of, key, state in ((head, last, ""), (module, parameter, f".{last}")):
        if any(fnmatchcase(of, pattern) for pattern in stacks):
            return lambda number: f"{of}.{number}.{key}.weight{state}"
    return None


def _rows(name: str, tensor: Tensor) -> dict[int, Tensor]:
    local = local_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return dict(enumerate(local))
    spec = specs_of({name: tensor}, tensor.device_mesh.mesh.flatten().tolist())[name]
    rows: dict[int, Tensor] = {}
    for box in local_boxes(spec.meta.shape, spec.layouts, dist.get_rank()):
        if box.shape[1:] != spec.meta.shape[1:]:
            raise ValueError(f"{name}: this rank has parts of rows, but files store whole rows")
        first, local_first = box.offset[0], box.local_offset[0]
        rows |= {first + i: local[local_first + i] for i in range(box.shape[0])}
    return rows
