"""Floating-point operations and memory traffic of operators."""

import weakref
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.plan.storages import storage_of


class KernelWork(NamedTuple):
    """Work of an operator, or of a compiled kernel, over its launches in a pass."""

    operations: float
    """Floating-point operations of all launches."""
    traffic: float
    """Bytes read and written by all launches."""
    attention: bool = False
    """Whether the kernel is attention, which reaches a smaller fraction of the peak."""
    launches: int = 1

    def repeated(self, times: int) -> "KernelWork":
        operations, traffic = times * self.operations, times * self.traffic
        return KernelWork(operations, traffic, self.attention, times * self.launches)


Work: TypeAlias = tuple[KernelWork, ...]

_NO_TRAFFIC = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}
_NAMESPACES = ("aten", "torch_attn", "perdure")


class FusedOperators:
    """Elementwise operators that torch.compile fuses into one kernel. The kernel reads the
    operators' inputs, and writes results that are used later. Other results never reach memory."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        self._written: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def add(self, args: Any, kwargs: Any, result: Any) -> None:
        for place, tensor in _tensors((args, kwargs)).items():
            own = self._written.get(place)
            if own is None or own[0]() is None:
                self._read[place] = max(self._read.get(place, 0), tensor.nbytes)
        for place, tensor in _tensors(result).items():
            self._written[place] = (weakref.ref(storage_of(tensor)), tensor.nbytes)

    def kernel(self) -> KernelWork:
        written = sum(nbytes for storage, nbytes in self._written.values() if storage() is not None)
        return KernelWork(0.0, float(sum(self._read.values()) + written))


def is_kernel(operator: Any, result: Any) -> bool:
    """Return whether an operator computes or copies, rather than create a view or empty memory."""
    if operator.namespace not in _NAMESPACES or operator.overloadpacket.__name__ in _NO_TRAFFIC:
        return False
    return bool(_tensors(result)) and not operator.is_view


def kernel_of(operator: Any, args: Any, kwargs: Any, result: Any, seq_len: int) -> KernelWork:
    """Return the work of an operator for which `is_kernel` is true."""
    touched = (*_tensors((args, kwargs)).values(), *_tensors(result).values())
    traffic = sum(tensor.numel() * tensor.element_size() for tensor in touched)
    operations = _operations(operator, args, kwargs, result, seq_len)
    name = operator.overloadpacket.__name__
    return KernelWork(operations, float(traffic), "attention" in name or "varlen" in name)


def _tensors(tree: Any) -> dict[int, torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage_of(tensor)._cdata: tensor for tensor in leaves}


def _operations(operator: Any, args: Any, kwargs: Any, result: Any, seq_len: int) -> float:
    name = operator.overloadpacket.__name__
    named = {a.name: v for a, v in zip(operator._schema.arguments, args, strict=False)} | kwargs
    products = 5 if "backward" in name else 2  # Dao et al. 2022: five products in backward
    if "varlen" in name:  # one document per sequence is assumed, because lengths are unknown
        tokens, heads, size = named["query"].shape
        left = (named.get("window_size") or (-1,))[0]
        if 0 <= left < seq_len - 1:
            # A token attends to itself and the `left` tokens before it, the first tokens to fewer.
            seen = (left + 1) * (2 - (left + 1) / seq_len)
            return products * tokens * heads * seen * size
        return float(products * tokens * heads * seq_len * size)
    # Ring attention: a call computes one range of queries with one range of keys.
    if name.startswith("_flash_attention"):
        queries, heads, size = named["query"].shape
        whole = 2.0 * products * queries * named["max_k"] * heads * size
        return whole / 2 if named["is_causal"] else whole
    if name.startswith("_scaled_dot_product"):
        batch, heads, queries, size = named["query"].shape
        whole = 2.0 * products * batch * heads * queries * named["key"].shape[2] * size
        return whole / 2 if named.get("is_causal") else whole
    if name == "_grouped_mm":  # each row on the left is multiplied with one of the matrices
        left, right = args[:2]
        return 2.0 * left.numel() * right.shape[-1]
    formula = flop_registry.get(operator.overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
