"""Differences between the releases of torch that pyproject.toml admits, each in a function or
constant whose callers need not know the release."""

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 added `*_single` and warns of the older name; older releases have only that.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

# Keeps DDP from synchronising buffers in forward. torch 2.15 warns of the older name.
_forward = "forward_sync_buffers"
_known = inspect.signature(DistributedDataParallel.__init__).parameters
ddp_options: dict[str, Any] = {_forward if _forward in _known else "broadcast_buffers": False}


def groups_of_fsdp(unit: Any) -> list[Any]:
    """Return FSDP's groups of parameters of one of its units. A unit of torch 2.11 has at most
    one."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def sum_uses_in_reduced_dtype(unit: nn.Module, _inputs: object = None) -> None:
    """Make FSDP of torch 2.15 add the gradients of all uses of a parameter in the dtype of the
    reduction. Without this hook passes that reduce add in the dtype of the computation, so that
    rounding depends on the number of passes. Older releases always add in the dtype of the
    computation. A hook before forward, which must run after FSDP's own, because that sets the
    dtypes."""
    for group in groups_of_fsdp(unit):
        if hasattr(group, "_fsdp_params_with_wider_grad_dtype"):
            group._fsdp_params_with_wider_grad_dtype = []


def drop_unreduced_gradient(parameter: Any) -> None:
    """Drop the gradient that FSDP keeps from passes that reduced nothing. Up to torch 2.14
    `parameter`, FSDP's wrapper, keeps it; later only the unsharded parameter does."""
    if not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
        parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


def varlen_asks_for_groups() -> bool:
    """Return whether `varlen_attn` needs `enable_gqa` for query heads that share key heads. torch
    2.11 lacks the argument, and always shares."""
    from torch.nn.attention import varlen  # imported here, because it imports the compiler

    function: Any = varlen.varlen_attn
    return "enable_gqa" in function.__kwdefaults__
