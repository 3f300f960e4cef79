"""PEFT's format of adapters: names of files and tensors, and adapter_config.json. Pure."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from checkpointing.errors import DamagedCheckpoint, StorageError
from checkpointing.format.untrusted import a_text, count, number, printable, read_object

CONFIG = "adapter_config.json"
BASE = "adapter_base.json"
"""File beside an exported adapter that records its base model, as trainer states do."""
PARTS = "lora_A", "lora_B"
"""Last parts of the FQNs of the two matrices of an adapted layer."""
_PREFIX = "base_model.model."
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False,
    "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None,
}  # fmt: skip
"""Keys of adapter_config.json that change the computation → the only supported value."""


def is_part(name: str) -> bool:
    """Whether the FQN is that of a matrix A or B."""
    return name.rpartition(".")[2] in PARTS


def name_in_file(name: str) -> str:
    """Return PEFT's name for the tensor with this FQN."""
    return f"{_PREFIX}{name}.weight" if is_part(name) else f"{_PREFIX}{name}"


def adapter_tensors(
    names: Iterable[str], where: str
) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Returns FQN of a weight → names of A and B, and FQN of a whole parameter → its name. Raises
    StorageError for names that PEFT does not give LoRA's tensors, and DamagedCheckpoint for one of
    A and B without the other, or a tensor under two names."""
    pairs, whole, found = dict[str, tuple[str, str]](), dict[str, str](), dict[str, str]()
    for name in names:
        fqn = name.removeprefix(_PREFIX).removesuffix(".weight")
        if (same := found.setdefault(fqn, name)) != name:
            raise DamagedCheckpoint(
                f"{where}: {printable(same)} and {printable(name)} name one tensor"
            )
    for fqn, name in found.items():
        module, _, part = fqn.rpartition(".")
        if not name.startswith(_PREFIX):
            raise StorageError(
                f"{where}: {printable(name)} is not named as PEFT names tensors of an adapter; "
                "give an adapter that PEFT has written"
            )
        if part in PARTS:
            weight = f"{module}.weight"
            a, b = (found.get(f"{module}.{one}") for one in PARTS)
            if not a or not b:
                raise DamagedCheckpoint(f"{where}: has only one of A and B for {printable(weight)}")
            pairs[weight] = a, b
        elif "lora_" in fqn:
            raise StorageError(
                f"{where}: {printable(name)} is of a kind that is not supported; merge the adapter "
                "with PEFT (merge_and_unload)"
            )
        else:
            whole[name.removeprefix(_PREFIX)] = name
    return pairs, whole


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    """Return the factor of B A: alpha / r (Hu et al. 2021), or alpha / √r with rsLoRA
    (Kalajdzievski 2023)."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def write_config(base: str, **values: Any) -> bytes:
    """Returns an adapter_config.json. `values`: keys of PEFT's LoraConfig."""
    about = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    return (json.dumps({**_PLAIN, **about, **values}, indent=2) + "\n").encode()


def read_config(data: bytes, where: str) -> tuple[str, float]:
    """Returns (directory of the base model, or ""; factor of B A). Raises DamagedCheckpoint if the
    file is malformed, StorageError if the adapter is not of LoRA."""
    try:
        config = read_object(data)
        for key, plain in _PLAIN.items():
            # None, False and an empty value all mean the default, if the default is empty
            if config.get(key, plain) != plain and (config[key] or plain):
                raise StorageError(
                    f"{where}: {key}={printable(str(config[key]))} is not supported, only {plain}; "
                    "merge it with PEFT (merge_and_unload)"
                )
        rank, alpha = max(1, count(config["r"])), number(config["lora_alpha"])
        base = config.get("base_model_name_or_path")
        rslora = config.get("use_rslora", False) is True
        return a_text(base) if base else "", scale_of(rank, alpha, rslora)
    except (ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{where}: no adapter_config.json of LoRA: {error!a}") from error
