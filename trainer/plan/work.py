"""Operations and bytes of what operators do."""

from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Work: TypeAlias = tuple[tuple[float, float], ...]
"""(floating-point operations, bytes read and written) of each operator."""

_NO_TRAFFIC = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}
_NAMESPACES = ("aten", "torch_attn", "perdure")


def work_of(
    operator: Any, args: Any, kwargs: Any, result: Any, seq_len: int
) -> tuple[float, float]:
    """Operations and bytes of an operator; none for one that only makes another view."""
    if operator.namespace not in _NAMESPACES or operator.overloadpacket.__name__ in _NO_TRAFFIC:
        return 0.0, 0.0
    given = {_place(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    made = {_place(t): t for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
    if operator.is_view or not made:
        return 0.0, 0.0
    traffic = sum(t.numel() * t.element_size() for t in (*given.values(), *made.values()))
    return _operations(operator, args, kwargs, result, seq_len), float(traffic)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _operations(operator: Any, args: Any, kwargs: Any, result: Any, seq_len: int) -> float:
    name = operator.overloadpacket.__name__
    named = {a.name: v for a, v in zip(operator._schema.arguments, args, strict=False)} | kwargs
    products = 5 if "backward" in name else 2  # Dao et al. 2022: five products in backward
    if "varlen" in name:  # as if each sequence were one document: how long they are is not known
        tokens, heads, size = named["query"].shape
        return float(products * tokens * heads * seq_len * size)
    if name.startswith("_flash_attention"):  # of a ring: each range of queries sees one of keys
        queries, heads, size = named["query"].shape
        whole = 2.0 * products * queries * named["max_k"] * heads * size
        return whole / 2 if named["is_causal"] else whole
    if name.startswith("_scaled_dot_product"):
        batch, heads, queries, size = named["query"].shape
        whole = 2.0 * products * batch * heads * queries * named["key"].shape[2] * size
        return whole / 2 if named.get("is_causal") else whole
    if name == "_grouped_mm":  # each row of the left one is multiplied with one matrix
        left, right = args[:2]
        return 2.0 * left.numel() * right.shape[-1]
    formula = flop_registry.get(operator.overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
