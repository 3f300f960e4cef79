"""Slice 1: a GPU computes what a CPU does, on every way through the code. Losses of 20 steps."""

import json
from typing import Any

from benchmarks.gpu.setting import Sections, Setting, difference, recipe, train

BF16 = {"precision": {"dtype": "bf16"}}
SHARDINGS = ("NO_SHARD", "OPTIMIZER_STATE", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
OVERFLOWING = 2.0**40
"""A loss scale at which fp16 overflows at first."""


def losses(setting: Setting, name: str, **sections: Any) -> list[float]:
    """The small model's losses."""
    return train(setting, name, recipe(setting, "small", **sections)).losses()


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
    """Every sharding on one rank against DDP, in float32."""
    reference = losses(setting, "ddp")
    found = {}
    for sharding in SHARDINGS:
        ours = losses(setting, sharding, strategy={"name": "fsdp", "sharding": sharding})
        found[sharding.lower()] = difference(ours, reference)
    return {"difference": max(found.values()), **found}


def compiled(setting: Setting) -> dict[str, Any]:
    """Compiled blocks against eager ones, in bf16, under DDP and FULL_SHARD."""
    found = {}
    for name in ("ddp", "fsdp"):
        ours, eager = (
            losses(setting, f"{name}-{on}", strategy={"name": name, "compile": on}, **BF16)
            for on in (True, False)
        )
        found[name] = difference(ours, eager)
    return {"difference": max(found.values()), **found}


def attention(setting: Setting) -> dict[str, Any]:
    """Every way to stay inside documents against one dense mask, in bf16."""
    setting.need_gpu("a choice of kernels for attention")
    mask = losses(setting, "sdpa", model={"attention": "sdpa"}, **BF16)
    found = {
        way: difference(losses(setting, way, model={"attention": way}, **BF16), mask)
        for way in ("varlen", "flex")
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
    fsdp = {"name": "fsdp", "sharding": "FULL_SHARD"}
    reference = losses(setting, "none", strategy=fsdp)
    nvme = {"offload": "nvme", "offload_directory": str(setting.scratch / "offload")}
    found = {
        way: difference(losses(setting, way, strategy={**fsdp, **more}), reference)
        for way, more in (("cpu", {"offload": "cpu"}), ("nvme", nvme))
    }
    return {"difference": max(found.values()), **found}


def synchronisations(setting: Setting) -> dict[str, Any]:
    """Times a step makes the host wait for the device, as torch reports them."""
    setting.need_gpu("torch's report of synchronisations")
    fsdp = {"name": "fsdp", "sharding": "FULL_SHARD"}
    found = {}
    for name, more in (("plain", {}), ("offloaded", {"offload": "cpu"})):
        sections: Sections = recipe(setting, "small", strategy={**fsdp, **more}, **BF16)
        counts = setting.scratch / f"{name}.json"
        train(setting, name, sections, ("tests.distributed.counted", str(counts)))
        steps = json.loads(counts.read_text(encoding="utf-8"))[2:]
        found[name] = max(step["synchronised"] for step in steps)
    return found
