"""Slice 1: a GPU computes what a CPU does, on every way through the code. Losses of 20 steps."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.setting import (
    Setting,
    Trained,
    UnsupportedError,
    difference,
    recipe,
    train,
)
from benchmarks.gpu.sharded import units
from trainer.parallel.float8 import CAPABILITY

BF16 = {"precision": {"dtype": "bf16"}}
FULL_SHARD = {"name": "fsdp", "sharding": "FULL_SHARD"}
BY_FSDP = ("SHARD_GRAD_OP", "FULL_SHARD")
"""On one rank NO_SHARD does what SHARD_GRAD_OP does, and HYBRID_SHARD what FULL_SHARD does."""
OVERFLOWING = 2.0**40
"""A loss scale at which fp16 overflows at first."""


def losses(setting: Setting, name: str, **sections: Any) -> list[float]:
    """The small model's losses."""
    return train(setting, name, recipe(setting, "small", **sections)).losses()


def fsdp(
    setting: Setting, name: str, program: Sequence[str] = ("trainer",), /, **sections: Any
) -> Trained:
    """The small model under FSDP2, although this rank is alone."""
    sharded = ("benchmarks.gpu.sharded", *program)
    return train(setting, name, recipe(setting, "small", **sections), sharded)


def fp32(setting: Setting) -> dict[str, Any]:
    """The device against the CPU."""
    ours = losses(setting, "device")
    reference = losses(setting, "reference", run={"device": "cpu"})
    return {"difference": difference(ours, reference), "last_loss": ours[-1]}


def bf16(setting: Setting) -> dict[str, Any]:
    """Against float32, both on the device."""
    ours = losses(setting, "bf16", **BF16)
    return {"difference": difference(ours, losses(setting, "fp32"))}


def float8(setting: Setting) -> dict[str, Any]:
    """Products in 8 bits against bf16, eager and compiled."""
    setting.need_gpu("products in 8 bits")
    if find_spec("torchao") is None:
        raise UnsupportedError("no torchao")
    if torch.cuda.get_device_capability() < CAPABILITY["fp8_rowwise"]:
        raise UnsupportedError("this GPU multiplies no 8-bit numbers")
    reference, found = losses(setting, "bf16", **BF16), {}
    for matmul in ("fp8_rowwise", "fp8_tensorwise"):
        for on in (False, True):
            sections = {
                "precision": {"dtype": "bf16", "matmul": matmul},
                "strategy": {"compile": on},
            }
            name = matmul + "_compiled" * on
            found[name] = difference(losses(setting, name, **sections), reference)
    return {"difference": max(found.values()), **found}


def strategies(setting: Setting) -> dict[str, Any]:
    """ZeRO-1, and FSDP2 on one rank with and without resharding, against DDP, in float32."""
    reference, found = losses(setting, "ddp"), {}
    zero1 = losses(setting, "zero1", strategy={"name": "fsdp", "sharding": "OPTIMIZER_STATE"})
    found["optimizer_state"] = difference(zero1, reference)
    runs = {
        sharding.lower(): fsdp(setting, sharding, strategy={"name": "fsdp", "sharding": sharding})
        for sharding in BY_FSDP
    }
    found |= {name: difference(run.losses(), reference) for name, run in runs.items()}
    least = min(units(run.output) for run in runs.values())
    return {"difference": max(found.values()), "fsdp_units": least, **found}


def compiled(setting: Setting) -> dict[str, Any]:
    """Compiled blocks against eager ones, in bf16, under DDP and under FSDP2 on one rank."""
    ddp, eager_ddp = (
        losses(setting, f"ddp-{on}", strategy={"name": "ddp", "compile": on}, **BF16)
        for on in (True, False)
    )
    sharded, eager_sharded = (
        fsdp(setting, f"fsdp-{on}", strategy={**FULL_SHARD, "compile": on}, **BF16)
        for on in (True, False)
    )
    found = {
        "ddp": difference(ddp, eager_ddp),
        "fsdp": difference(sharded.losses(), eager_sharded.losses()),
    }
    return {"difference": max(found.values()), "fsdp_units": units(sharded.output), **found}


def rounded(setting: Setting) -> dict[str, Any]:
    """Moments in bf16 and in 8 bits, updated by compiled kernels, against portions; float32
    besides."""
    found = {}
    for how in ("bf16", "int8"):
        one, other = (
            losses(setting, f"{how}-{on}", optimizer={"state_dtype": how}, strategy={"compile": on})
            for on in (True, False)
        )
        found[how] = difference(one, other)
    return {"difference": max(found.values()), **found}


def attention(setting: Setting) -> dict[str, Any]:
    """Every way to stay inside documents against one dense mask, in bf16; `auto` has the fastest
    kernel that is installed."""
    setting.need_gpu("a choice of kernels for attention")
    mask = losses(setting, "sdpa", model={"attention": "sdpa"}, **BF16)
    found = {
        way: difference(losses(setting, way, model={"attention": way}, **BF16), mask)
        for way in ("auto", "varlen", "flex")
    }
    return {"difference": max(found.values()), **found}


def overflow(setting: Setting) -> dict[str, Any]:
    """fp16 at a loss scale that is too large: every overflow skips a step and halves it once."""
    precision = {"dtype": "fp16", "loss_scale": OVERFLOWING}
    sections = recipe(setting, "small", precision=precision)
    sections["run"]["steps"] = 40
    run = train(setting, "fp16", sections)
    overflows = run.output.count("fp16 overflow")
    scale = [r["loss_scale"] for r in run.records() if "loss_scale" in r][-1]
    return {
        "overflows": overflows,
        "loss_scale": scale,
        "scale_times_halvings": scale * 2**overflows / OVERFLOWING,
    }


def exact(setting: Setting) -> dict[str, Any]:
    """Exact mode gives the same bits twice, and sharded as unsharded."""
    once, again = (
        losses(setting, name, run={"determinism": "exact"}) for name in ("once", "again")
    )
    fsdp = losses(setting, "fsdp", run={"determinism": "exact"}, strategy={"name": "fsdp"})
    differing = sum(len({*step}) > 1 for step in zip(once, again, fsdp, strict=True))
    return {"differing_steps": differing}


def offload(setting: Setting) -> dict[str, Any]:
    """To host memory and to files, against the device alone."""
    reference = losses(setting, "none")
    nvme = {"offload": "nvme", "offload_directory": str(setting.scratch / "offload")}
    found = {
        way: difference(losses(setting, way, strategy={**FULL_SHARD, **more}), reference)
        for way, more in (("cpu", {"offload": "cpu"}), ("nvme", nvme))
    }
    return {"difference": max(found.values()), **found}


def synchronisations(setting: Setting) -> dict[str, Any]:
    """Times a step of FSDP2 makes the host wait for the device, as torch reports them."""
    setting.need_gpu("torch's report of synchronisations")
    found, made = {}, []
    for name, offload in (("plain", "none"), ("offloaded", "cpu")):
        counts = setting.scratch / f"{name}.json"
        program = ("tests.distributed.counted", str(counts))
        run = fsdp(setting, name, program, strategy={**FULL_SHARD, "offload": offload}, **BF16)
        # The first two may do more, and the last one looks at all that it has made.
        steps = json.loads(counts.read_text(encoding="utf-8"))[2:-1]
        found[name] = max(step["synchronised"] for step in steps)
        made.append(units(run.output))
    return {**found, "fsdp_units": min(made)}
