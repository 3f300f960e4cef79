"""Recipes of benchmarks/balance.py, and a schedule under which ranks sleep, or are held."""

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from trainer.data.prepare.prepare import prepare
from trainer.models.decoder import MLP

GLOBAL_BATCH = 16
STRATEGIES: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"strategy": {"name": "ddp"}, "run": {"determinism": "exact"}},
    "zero1": {"strategy": {"sharding": "OPTIMIZER_STATE"}},
    # Ranks have equally many passes, so passes must be able to differ in size.
    "zero3": {"strategy": {"sharding": "FULL_SHARD"}, "batch": {"micro_batch": 4}},
}
"""Sections of the recipe by strategy. Exact mode refuses shares by speed under ZeRO-3."""


def write_recipe(
    folder: Path,
    strategy: str,
    balance: str,
    steps: int,
    seconds: Sequence[float],
    groups: Sequence[str],
    tokens: int,
) -> None:
    """Write recipe.yaml and its data. `strategy`: of STRATEGIES; `seconds`, `groups`: see
    `schedule`; `tokens`: of a sequence."""
    draw = random.Random(0)
    (folder / "text.txt").write_text("".join(draw.choices("abcdefgh ", k=2_000_000)))
    prepare([str(folder / "text.txt")], folder / "data", tokenizer="bytes", validation_fraction=0.0)
    architecture = {
        "model_type": "qwen3", "vocab_size": 257, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "tie_word_embeddings": True,
    }  # fmt: skip
    recipe: dict[str, dict[str, Any]] = {
        "run": {"dir": "run", "steps": steps, "log_every": 1, "device": "cpu"},
        "model": {"architecture": architecture},
        "data": {"sources": [{"path": "data"}], "seq_len": tokens},
        "batch": {"global_batch": GLOBAL_BATCH, "micro_batch": 1, "balance": balance},
        "optimizer": {"lr": 1e-3},
        "schedule": {
            "factory": "benchmarks.support.slow_rank:schedule",
            "factory_options": {"seconds": [*seconds], "groups": [*groups]},
        },
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every": 0},
    }  # fmt: skip
    for section, keys in STRATEGIES[strategy].items():
        recipe[section] = {**recipe.get(section, {}), **keys}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))


def schedule(
    steps: int, lr: float, seconds: Sequence[float], groups: Sequence[str]
) -> Callable[[int], float]:
    """A constant rate.

    Args:
        seconds: by rank, how long each feed-forward layer sleeps in forward for a sequence. In
            backward it sleeps twice as long.
        groups: by rank, the directory of the control group that it joins; empty: none.
    """
    rank = int(os.environ.get("RANK", "0"))
    mine = seconds[rank]
    if groups:  # now, as a start would take minutes in it
        Path(groups[rank], "cgroup.procs").write_text(str(os.getpid()))

    def sleep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, MLP):
            forward = mine * len(inputs[0])
            time.sleep(forward)
            if output.requires_grad:
                output.register_hook(lambda _: time.sleep(2 * forward))

    if mine:
        register_module_forward_hook(sleep)
    return lambda step: lr
