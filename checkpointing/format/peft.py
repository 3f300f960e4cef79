"""PEFT's format of adapters: names of files and tensors, and adapter_config.json. Pure."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpointing.errors import DamagedCheckpoint, StorageError
from checkpointing.format.untrusted import a_text, count, number, printable, read_object

CONFIG = "adapter_config.json"
BASE = "adapter_base.json"
"""Additional file beside an exported adapter: path, fingerprint and format of the base model, as in
the trainer state of a checkpoint. PEFT ignores it."""
PARTS = "lora_A", "lora_B"
"""Last parts of the FQNs of the two matrices of an adapted layer."""
_PREFIX = "base_model.model."
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False,
    "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None,
}  # fmt: skip
"""Keys of adapter_config.json that change the computation → the only supported value."""


def is_part(name: str) -> bool:
    """Whether the parameter with this FQN is a matrix of an adapter."""
    return name.rpartition(".")[2] in PARTS


def name_in_file(name: str) -> str:
    """Returns the name of a parameter in adapter_model.safetensors."""
    return f"{_PREFIX}{name}.weight" if is_part(name) else f"{_PREFIX}{name}"


@dataclass(frozen=True)
class AdapterTensors:
    """Names of the tensors in an adapter's file, by FQN of the model's parameters."""

    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """FQN of a weight → names of A and B in the file."""
    whole: dict[str, str] = field(default_factory=dict)
    """FQN of a fully trained parameter → its name in the file."""


def adapter_tensors(names: Iterable[str], where: str) -> AdapterTensors:
    """Returns the names of the tensors in an adapter's file, grouped by FQN; `where` is the file's
    path, for messages.

    Raises:
        DamagedCheckpoint: A or B of a pair is missing.
        StorageError: a tensor does not belong to LoRA.
    """
    found, parts = AdapterTensors(), dict[str, dict[str, str]]()
    for name in names:
        fqn = name.removeprefix(_PREFIX)
        if fqn == name:
            raise StorageError(
                f"{where}: {printable(name)} is not named as PEFT names tensors of an adapter; "
                "give an adapter that PEFT has written"
            )
        module, _, part = fqn.removesuffix(".weight").rpartition(".")
        if part in PARTS:
            parts.setdefault(f"{module}.weight", {})[part] = name
        elif "lora_" in fqn:
            raise StorageError(
                f"{where}: {printable(name)} is of a kind that is not supported; merge the adapter "
                "with PEFT (merge_and_unload)"
            )
        else:
            found.whole[fqn] = name
    for weight, pair in parts.items():
        if len(pair) < len(PARTS):
            raise DamagedCheckpoint(f"{where}: has only one of A and B for {printable(weight)}")
        found.pairs[weight] = pair["lora_A"], pair["lora_B"]
    return found


@dataclass(frozen=True)
class PeftConfig:
    """Values of PEFT's adapter_config.json that loading an adapter needs."""

    base: str
    """Directory of the base model; "" if the file names none."""
    scale: float
    """Factor of the product B A."""


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def write_config(
    *,
    base: str,
    rank: int,
    alpha: float,
    rslora: bool,
    dropout: float,
    targets: Sequence[str],
    whole: Sequence[str],
) -> bytes:
    """Returns the contents of adapter_config.json for LoRA over the model in directory `base`.

    Args:
        targets: names of the adapted linear layers, or ends of their names.
        whole: names of the fully trained modules, or ends of their names.
    """
    config = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,  # PEFT writes integers
        "use_rslora": rslora,
        "lora_dropout": dropout,
        "target_modules": sorted(targets),
        "modules_to_save": sorted(whole) or None,
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def read_config(data: bytes, where: str) -> PeftConfig:
    """Parse adapter_config.json; `where` is the file's path, for messages.

    Raises:
        DamagedCheckpoint: the file is malformed.
        StorageError: the adapter computes something other than LoRA.
    """
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
        return PeftConfig(a_text(base) if base else "", scale_of(rank, alpha, rslora))
    except (ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{where}: no adapter_config.json of LoRA: {error!a}") from error
