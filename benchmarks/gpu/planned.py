"""Slice 7: whether `perdure plan`, `compare` and `profile` tell the truth on a GPU; start-up."""

import json
import sys
from typing import Any

from benchmarks.gpu.setting import (
    Setting,
    recipe,
    run_command,
    train,
    train_until,
    write_recipe,
)
from trainer.plan import predict
from trainer.recipe import load_recipe
from trainer.run.profile import read_records
from trainer.run.trace_summary import DIRECTORY, read_trace

CLI = (sys.executable, "-m", "trainer.cli")


def memory(
    setting: Setting, model: str, micro_batch: int, compile: bool, recompute: str = "none"
) -> dict[str, Any]:
    """Peak of torch's allocations in profiled steps, against the prediction."""
    sections = recipe(
        setting,
        model,
        data={"seq_len": 2048},
        batch={"global_batch": 2 * micro_batch, "micro_batch": micro_batch},
        strategy={"name": "ddp", "compile": compile, "activation_checkpointing": recompute},
        precision={"dtype": "bf16"},
        tracking={"profile_steps": 2, "profile_after": 3},
    )
    path = write_recipe(setting, "run", sections)
    predicted = predict(load_recipe(str(path), []), 1, 1).peak
    train_until(setting, "run", sections, 7)
    (record,) = read_records(setting.scratch / "run")
    return {
        "predicted_gb": predicted / 1e9,
        "measured_gb": record.peak / 1e9,
        "measured_over_predicted": record.peak / predicted,
        "off_by": abs(predicted / record.peak - 1),
    }


def compare(setting: Setting) -> dict[str, Any]:
    """`perdure compare` of five strategies; it fails if losses differ."""
    sections = recipe(setting, "small", precision={"dtype": "bf16"})
    path, out = write_recipe(setting, "run", sections), setting.scratch / "compared"
    strategies = "ddp,zero2,zero3,zero3+offload,zero3+full_ac"
    command = [*CLI, "compare", str(path), "--nproc", "1", "--steps", "5", "--out", str(out)]
    run_command(setting, [*command, "--strategies", strategies])
    content = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    return {"strategies": len(strategies.split(",")), "content": sorted(content)}


def profile(setting: Setting) -> dict[str, Any]:
    """`perdure profile`: the phases of its page, which are to make up whole steps."""
    sections = recipe(
        setting,
        "0.6B",
        data={"seq_len": 2048},
        batch={"global_batch": 8, "micro_batch": 8},
        precision={"dtype": "bf16"},
        tracking={"profile_steps": 4, "profile_after": 4},
    )
    train_until(setting, "run", sections, 10)
    (trace,) = (setting.scratch / "run" / DIRECTORY).glob("*.trace.json.gz")
    found = read_trace(trace)
    whole = sum(found.steps)
    shares = {f"{phase}_share": seconds / whole for phase, seconds in found.phases.items()}
    return {"phases_off_by": abs(sum(shares.values()) - 1), **shares}


def startup(setting: Setting) -> dict[str, Any]:
    """Seconds from launch to the end of the first step: compiled for the first time, then with
    what that left in the compiler's cache; and without compilation."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(setting.scratch / "inductor")}
    cache |= {"TRITON_CACHE_DIR": str(setting.scratch / "triton")}
    found = {}
    for name, compiled in (("cold", True), ("warm", True), ("eager", False)):
        sections = recipe(
            setting, "0.6B", data={"seq_len": 2048}, batch={"global_batch": 8, "micro_batch": 8},
            precision={"dtype": "bf16"}, strategy={"compile": compiled},
        )  # fmt: skip
        sections["run"]["steps"] = 1
        run = train(setting, name, sections, more=cache)
        found[f"{name}_seconds"] = run.first_step_seconds()
    return found
