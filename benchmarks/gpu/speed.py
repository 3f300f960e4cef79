"""Slices 5, 6, 8 and 9: tokens per second of this trainer, and of others with the same model and
batch.

Each trains for some steps; the first ones, which compile and warm up, are left out.
"""

import json
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.gpu.machine import seconds
from benchmarks.gpu.setting import (
    PARAMETERS,
    RunFailedError,
    Sections,
    Setting,
    UnsupportedError,
    architecture,
    device_memory,
    recipe,
    run_command,
    train_until,
    write_recipe,
)
from benchmarks.support import ROOT, torchrun
from trainer.models.loss import HeadLoss
from trainer.optim.formats import Format
from trainer.optim.optimizer import build_optimizer
from trainer.recipe.sections import OptimizerSection

LOG_EVERY = {"0.6B": 4, "1.7B": 2, "4B": 2, "8B": 2, "llama_8B": 2}
"""Steps of a log interval."""
WARM, MEASURED = 3, 5
"""Log intervals."""
SEQ_LEN = {"0.6B": 2048, "1.7B": 2048, "4B": 2048, "8B": 4096, "llama_8B": 4096}
BATCH = {"0.6B": 16, "1.7B": 16, "4B": 8, "8B": 4, "llama_8B": 8}
"""Sequences of a step of one GPU; of several each has a micro-batch."""
InBf16: TypeAlias = Literal["", "moments", "all"]
PEERS = {"hf": ("transformers", "accelerate"), "torchtitan": ("torchtitan",), "minimal": ()}
"""By the beginning of a file in benchmarks/peers: the packages that it needs."""


def sections_of(
    setting: Setting,
    model: str,
    micro_batch: int,
    mask: bool,
    recompute: str,
    gpus: int = 1,
    seq_len: int = 0,
    in_bf16: InBf16 = "",
) -> Sections:
    """The recipe that all train. `seq_len`: 0 for that of SEQ_LEN. `in_bf16`: what is besides
    the computation: moments, or all, weights and gradients too."""
    needed = {"": 16, "moments": 12, "all": 8}[in_bf16] * PARAMETERS[model] // gpus
    share = 0.7 if in_bf16 else 0.95  # with more activations
    if setting.on_gpu() and not setting.toy and needed > share * device_memory():
        raise UnsupportedError(
            f"{model}: {needed / 1e9:.0f} GB of weights, gradients and moments, and the GPU has "
            f"{device_memory() / 1e9:.0f} GB"
        )
    batch = BATCH[model] if gpus == 1 else gpus * micro_batch
    stored = {"optimizer": {"state_dtype": "bf16"}} if in_bf16 else {}
    master = {"master": "bf16_stochastic"} if in_bf16 == "all" else {}
    return recipe(
        setting,
        model,
        run={"log_every": LOG_EVERY[model]},
        data={"seq_len": seq_len or SEQ_LEN[model], "document_mask": mask},
        batch={"global_batch": batch, "micro_batch": micro_batch},
        strategy={
            "name": "ddp" if gpus == 1 else "fsdp",
            "compile": not setting.toy,
            "activation_checkpointing": recompute,
        },
        precision={"dtype": "bf16", **master},
        **stored,
    )


def perdure(
    setting: Setting,
    model: str,
    micro_batch: int,
    mask: bool = True,
    recompute: str = "none",
    gpus: int = 1,
    seq_len: int = 0,
    in_bf16: InBf16 = "",
) -> dict[str, Any]:
    """This trainer."""
    ranks = setting.need_gpus(gpus)
    sections = sections_of(setting, model, micro_batch, mask, recompute, ranks, seq_len, in_bf16)
    return rate_of_perdure(setting, sections, WARM, MEASURED, ranks)


def rate_of_perdure(
    setting: Setting, sections: Sections, warm: int, measured: int, ranks: int = 1
) -> dict[str, Any]:
    """Train a recipe with this trainer for so many log intervals; the first `warm` ones do not
    count."""
    records = train_until(setting, "perdure", sections, warm + measured, ranks)
    first, last = records[warm - 1], records[-1]
    rate = (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])
    return {
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / ranks,
        "mfu": last.get("mfu"),
        "step_ms": 1e3 * last["step_seconds_p50"],
        "slowest_step_ms": 1e3 * max(r["step_seconds_max"] for r in records[warm:]),
        "data_wait": last["data_wait"],
        "peak_memory_gb": last["peak_memory"] / 1e9,
    }


def peer(
    setting: Setting,
    peer: str,
    model: str,
    micro_batch: int,
    mask: bool = True,
    recompute: str = "none",
    gpus: int = 1,
    seq_len: int = 0,
    in_bf16: InBf16 = "",
) -> dict[str, Any]:
    """Another, started by torchrun with the same recipe."""
    if missing := [package for package in PEERS[peer] if not find_spec(package)]:
        raise UnsupportedError(f"{' and '.join(missing)} not installed")
    ranks = setting.need_gpus(gpus)
    setting.need_host(
        4 * PARAMETERS[model] * ranks, f"{model}, drawn on the CPU by {ranks} rank(s)"
    )
    sections = sections_of(setting, model, micro_batch, mask, recompute, ranks, seq_len, in_bf16)
    first, last = WARM * LOG_EVERY[model], (WARM + MEASURED) * LOG_EVERY[model]
    return rate_of_peer(setting, sections, peer, first, last, ranks)


def rate_of_peer(
    setting: Setting, sections: Sections, peer: str, first: int, last: int, ranks: int = 1
) -> dict[str, Any]:
    """Train a recipe with a peer for `last` steps; the first `first` ones do not count.

    Raises:
        RunFailedError: it did not train so far.
    """
    sections["run"]["steps"] = last
    path = write_recipe(setting, peer, sections)
    file = str(ROOT / "benchmarks" / "peers" / f"{peer}_loop.py")
    output = run_command(setting, torchrun(ranks, file, str(path)))
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    if failed := [line["failed"] for line in lines if "failed" in line]:
        raise RunFailedError(failed[0])
    told = {line["step"]: line["at"] for line in lines if "at" in line}
    batch, length = sections["batch"]["global_batch"], sections["data"]["seq_len"]
    final = next(line for line in reversed(lines) if "peak_memory" in line)
    rate = (last - first) * batch * length / (told[last] - told[first])
    return {
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / ranks,
        "peak_memory_gb": final["peak_memory"] / 1e9,
        "note": final["note"],
    }


def update(setting: Setting) -> dict[str, Any]:
    """Milliseconds of AdamW's update of 10**9 parameters, by the formats of weights and moments,
    in portions and compiled."""
    rows, columns, matrices = (8, 128, 2) if setting.toy else (4096, 8192, 24)
    formats: tuple[tuple[Format, torch.dtype, str], ...] = (
        ("fp32", torch.float32, "fp32"),
        ("bf16", torch.float32, "moments_bf16"),
        ("int8", torch.float32, "moments_int8"),
        ("bf16", torch.bfloat16, "all_bf16"),
    )
    found: dict[str, Any] = {}
    for how, master, name in formats:
        for compiles in (False,) if how == "fp32" else (False, True):
            made = [
                nn.Parameter(torch.randn(rows, columns, device=setting.place()).to(master))
                for _ in range(matrices)
            ]
            for one in made:
                one.grad = torch.randn_like(one)
            named = {f"weight_{number}": one for number, one in enumerate(made)}
            optimizer = build_optimizer(
                named, OptimizerSection(lr=1e-4, state_dtype=how), compiles=compiles
            )
            took = seconds(optimizer.step, 5)
            key = f"{name}_compiled_ms" if compiles else f"{name}_ms"
            found[key] = took * 1e12 / (rows * columns * matrices)
    return found


def loss(setting: Setting, model: str) -> dict[str, Any]:
    """Milliseconds of forward and backward of head and loss, and gigabytes on top of their inputs:
    this project's, eager and compiled, and those of Liger and cut-cross-entropy where they are
    installed."""
    shape = architecture(setting, model)
    rows, device = 256 if setting.toy else 16_384, setting.place()
    size = shape["vocab_size"], shape["hidden_size"]
    weight = torch.randn(size, device=device).mul_(0.02).bfloat16().requires_grad_()
    hidden = torch.randn(rows, size[1], device=device).bfloat16().requires_grad_()
    labels = torch.randint(size[0], (rows,), device=device)

    def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction,
        )

        return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)[0]

    def cut(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(hidden, weight, labels)

    compiled = HeadLoss()
    compiled.compile()
    ways = {"perdure": HeadLoss(), "perdure_compiled": compiled, "liger": liger, "cut": cut}
    found: dict[str, Any] = {f"{name}_ms": None for name in ways}  # on the page these come first
    for name, function in ways.items():

        def both(function: Any = function) -> Tensor:
            hidden.grad = weight.grad = None
            result = function(hidden, weight, labels)
            result.backward()
            return result

        try:
            found[f"{name}_loss"] = both().item()
        except Exception as error:  # a peer's kernels may not know this torch, or this device
            if function not in (liger, cut):
                raise
            print(f"{name}: {error}")
            continue
        if setting.on_gpu():
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        found[f"{name}_ms"] = seconds(both) * 1e3
        if setting.on_gpu():
            found[f"{name}_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return {**found, "rows": rows}
