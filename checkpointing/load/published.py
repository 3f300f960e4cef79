"""Maps tensor names of published checkpoints to names of a model. Pure, except that
`without_copies` calls a function to read tensors."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import dropwhile

import torch
from torch import Tensor

from checkpointing.errors import WrongModel
from checkpointing.format.layout import StoredTensor
from checkpointing.format.untrusted import printable
from checkpointing.storage.steps import ADAPTER_CURE

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts that torch.compile, FSDP and activation checkpointing add to names of parameters."""
_COMPUTED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|position_ids)$"
)
"""Buffers that older versions of transformers saved, and that all versions recompute."""
_MASKS = re.compile(r"(^|\.)(attn|attention)\.(masked_)?bias$")
"""Names of attention masks of GPT-2's time. Such a tensor is recomputed, and omitted, if it has
four dimensions or none."""
_CURES = (
    (r"lora_|^base_model\.", ADAPTER_CURE),
    (
        r"weight_scale|scales$|qweight|qzeros|absmax|quant_state|g_idx|_packed$",
        "its weights are quantised: take the checkpoint that is not quantised",
    ),
    (
        r"\.bias$",
        "it has biases, which this model does not compute: train such a model through "
        "model.factory",
    ),
)
"""(pattern of names that the model lacks, advice). The first pattern that matches is used."""


def by_model_names(
    stored: Mapping[str, StoredTensor], known: Collection[str]
) -> dict[str, StoredTensor]:
    """Returns tensors by the names of a model: without wrappers' parts, and with or without the
    first part that most of the model's names have, such as `model.`. Files saved from the backbone
    lack this part, and files saved from a wrapper have it twice; transformers opens both kinds of
    files. Buffers that every reader computes are omitted. A tensor that the model lacks keeps its
    name. `known` has the names that the model has or ignores. Raises WrongModel if two tensors
    would have the same name."""
    names: dict[str, str] = {}
    firsts = Counter(name.partition(".")[0] + "." for name in known)
    base = max(firsts, key=lambda first: (firsts[first], first), default="")
    for there in stored:
        bare = _without_wrappers(there)
        candidates = (there, bare, bare.removeprefix(base), base + bare)
        # The unchanged name is tried first, so that it wins over changed ones.
        name = next((one for one in candidates if one in known), there)
        mask = _MASKS.search(there) and len(stored[there].meta.shape) in (0, 4)
        if name not in known and (mask or _COMPUTED.search(there)):
            continue
        if name in names:
            raise WrongModel(
                f"the files hold {name} twice, as {printable(names[name])} and as "
                f"{printable(there)}: remove one of the two from the files"
            )
        names[name] = there
    return {name: stored[there] for name, there in names.items()}


def _without_wrappers(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(dropwhile(lambda part: part == "module", parts))  # DDP adds `module.` in front


def without_copies(
    stored: Mapping[str, StoredTensor],
    wanted: Collection[str],
    tied: Mapping[str, str],
    read: Callable[[StoredTensor], Iterable[Tensor]],
) -> dict[str, StoredTensor]:
    """Returns the tensors without copies of tied weights. If a file holds only the copy, it takes
    the weight's place. Raises WrongModel if a weight and its copy differ, as if trained apart.

    Args:
        stored: tensors by the names of the model.
        tied: name of a copy → the model's name for both.
        read: yields the elements of a tensor in order, piece by piece.
    """
    found = dict(stored)
    for copy, name in tied.items():
        if copy in wanted or name not in wanted or copy not in found:
            continue
        second = found.pop(copy)
        first = found.setdefault(name, second)
        if first is not second and not _equal(first, second, read):
            raise WrongModel(
                f"the files hold {copy} and {name} with different numbers, but the model ties the "
                "two: load into a model that does not tie them "
                f'("tie_word_embeddings": false in config.json), or remove {copy} from the files'
            )
    return found


def _equal(
    first: StoredTensor, second: StoredTensor, read: Callable[[StoredTensor], Iterable[Tensor]]
) -> bool:
    if first.meta.shape != second.meta.shape:
        return False
    if first.meta.dtype == second.meta.dtype:  # compared as bits, so that NaNs are equal
        pairs = zip(read(first), read(second), strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    # Tensors of different dtypes are equal if their numbers are.
    whole = (torch.cat([piece.double() for piece in read(one)]) for one in (first, second))
    return torch.equal(*whole)


def cure(unknown: Iterable[str], missing: Iterable[str]) -> str:
    """Returns advice about tensors that the model lacks and tensors that the files lack."""
    unknown, missing = list(unknown), list(missing)
    for pattern, words in _CURES:
        if any(re.search(pattern, name) for name in unknown):
            return words
    if missing == ["lm_head.weight"]:
        return (
            "it was saved without its head: save it again as AutoModelForCausalLM, or write "
            '"tie_word_embeddings": true into config.json if the head is the embedding'
        )
    return "take the config.json that was saved with these weights"
