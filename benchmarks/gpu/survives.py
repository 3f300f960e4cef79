"""Slice 3: runs that are killed, stopped and told to go, and go on."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from filecmp import cmp
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import (
    PARAMETERS,
    QWEN3,
    RunFailedError,
    Sections,
    Setting,
    UnsupportedError,
    device_memory,
    free_host_memory,
    job_environment,
    recipe,
    run_command,
    train,
    write_recipe,
)
from benchmarks.support import json_lines
from checkpointing.load.memory import token
from checkpointing.save.peers import read_manifest
from checkpointing.storage.folders import memory_folders
from elastic.group.job_secret import SECRET_FILE, make_secret
from lab.local_nodes import LocalNode, LocalNodes
from trainer.plan import predict
from trainer.recipe import load_recipe

BYTES_PER_PARAMETER, SLOT_BYTES = 16, 12
"""Weight, gradient, two moments on the GPU; without the gradient in a copy of the state in host
memory."""
STATE, PEAK = 0.6, 0.75
"""Shares of a GPU's memory."""
SLOT = 0.7
"""Share of the host's memory that slots take: the rest is for processes, and for data."""
EXACT = {"determinism": "exact"}
KILLS = 2


def resume(setting: Setting) -> dict[str, Any]:
    """A run that was ended half-way and started again, against one that was not, in exact mode."""
    steps = setting.steps(20)
    for name, parts in (("whole", (steps,)), ("parts", (steps // 2, steps))):
        for part in parts:
            sections = recipe(setting, "small", run={**EXACT})
            sections["run"]["steps"] = part
            run = train(setting, name, sections)
    if "resuming after step" not in run.output:
        raise RunFailedError("the second part did not go on from the first")
    return {"differing_files": len(differing(setting, "whole", "parts", steps))}


def differing(setting: Setting, one: str, other: str, step: int) -> list[str]:
    """Tensor files of two runs' checkpoints that differ in a byte."""
    ours, theirs = (setting.scratch / n / "checkpoints" / f"step-{step:08}" for n in (one, other))
    names = [str(path.relative_to(ours)) for path in ours.rglob("*.safetensors")]
    if not names:
        raise RunFailedError(f"no checkpoint of step {step}")
    return [name for name in names if not cmp(ours / name, theirs / name, shallow=False)]


def kill(setting: Setting, model: str, workers: int) -> dict[str, Any]:
    """kill -9 of the training process, twice; seconds to the first new step.

    `model` `large` is the largest whose state leaves room, with sequences that fill the GPU.
    """
    memory, host, micro_batch = device_memory() if setting.on_gpu() else 0, free_host_memory(), 8
    if model == "large":
        memory_of, host_of = (80 << 30, 128 << 30) if setting.toy else (memory, host)
        model, micro_batch = filling(setting, memory_of, host_of)
    sections = killed(setting, model, workers, micro_batch)
    seconds, redone = [], []
    with job(setting, "killed", sections) as node:
        for _ in range(KILLS):
            before = snapshot_after(setting, "killed", node, 3)
            took, resumed = recovery(setting, "killed", node, signal.SIGKILL)
            seconds.append(took)
            redone.append(before - resumed)
        peak = max(record.get("peak_memory", 0) for record in records(setting, "killed"))
        text = node.text()
    check(setting, "killed")
    return {
        "model": model,
        "micro_batch": micro_batch,
        "seconds": max(seconds),
        "all_seconds": seconds,
        "steps_redone": max(redone),
        "share_of_memory": peak / memory if memory else None,
        "host_memory_gb": host / 1e9,
        "out_of_memory": len(re.findall("out of memory", text, re.IGNORECASE)),
    }


def killed(setting: Setting, model: str, workers: int, micro_batch: int) -> Sections:
    """What is killed."""
    small = model == "0.6B"
    return recipe(
        setting,
        model,
        run={"steps": 100_000},
        data={"seq_len": 2048, "workers": workers},
        batch={"global_batch": max(8, micro_batch), "micro_batch": micro_batch},
        precision={"dtype": "bf16"},
        # While a large state is copied some steps pass, and there is memory for one copy.
        checkpoint={"every": 0, "slots": 2 if small else 1},
        elastic={"snapshot_every": 1 if small else 5},
    )


def filling(setting: Setting, memory: int, host: int) -> tuple[str, int]:
    """The largest model whose state takes no more than STATE of a GPU of `memory` bytes, and a copy
    of it no more than SLOT of `host` bytes; and the largest micro-batch whose predicted peak takes
    no more than PEAK of the GPU. Half empty, it would bear a successor beside a killed rank that
    still has its memory."""
    names = [name for name in QWEN3 if BYTES_PER_PARAMETER * PARAMETERS[name] <= STATE * memory]
    if not names:
        raise UnsupportedError(f"no model's state takes 0.6 of {memory / 1e9:.0f} GB, or less")
    fitting = [name for name in names if SLOT_BYTES * PARAMETERS[name] <= SLOT * host]
    if not fitting:
        raise UnsupportedError(
            f"a copy of {names[0]} takes {SLOT_BYTES * PARAMETERS[names[0]] / 1e9:.0f} GB of host "
            f"memory, and {host / 1e9:.0f} GB are free, {SLOT:.0%} of which it may have"
        )
    model = fitting[-1]
    # Where host memory is what is short, activations fill the GPU.
    for micro_batch in (8, 4, 2) if fitting == names else (32, 16, 8, 4, 2):
        path = write_recipe(setting, "tried", killed(setting, model, 0, micro_batch))
        found = predict(load_recipe(str(path), []), 1, 1, device="cuda", gpu_memory=memory)
        if found.peak <= PEAK * memory:
            return model, micro_batch
    return model, 1


def in_place(setting: Setting) -> dict[str, Any]:
    """kill -9 of one of two ranks that share the GPU over gloo: the other keeps its process."""
    sections = recipe(
        setting, "small", run={"steps": 100_000}, checkpoint={"every": 0, "slots": 2},
        elastic={"snapshot_every": 1},
    )  # fmt: skip
    sections["batch"]["micro_batch"] = sections["batch"]["global_batch"] // 2
    with job(setting, "shared", sections, "benchmarks.gpu.sharing", ranks=2) as node:
        snapshot_after(setting, "shared", node, 8)
        survivor, killed = node.trainers()
        seconds, _ = recovery(setting, "shared", node, signal.SIGKILL, killed)
        stayed = survivor in node.trainers()
    check(setting, "shared")
    return {"seconds": seconds, "survivor_stayed": int(stayed)}


def hang(setting: Setting) -> dict[str, Any]:
    """The training process is stopped, and found; seconds to the first new step."""
    sections = recipe(
        setting, "small", run={"steps": 100_000}, checkpoint={"every": 0, "slots": 2},
        elastic={"snapshot_every": 1},
    )  # fmt: skip
    with job(setting, "hung", sections) as node:
        snapshot_after(setting, "hung", node, 8)
        seconds, _ = recovery(setting, "hung", node, signal.SIGSTOP)
        found = "a hang" in node.text()
    check(setting, "hung")
    return {"seconds": seconds, "found": int(found)}


def notice(setting: Setting) -> dict[str, Any]:
    """SIGTERM to the agent, as before a spot machine goes: the state is saved, and the same command
    goes on to the weights of a run that was left alone."""
    sections = recipe(setting, "small", run={**EXACT})
    steps = sections["run"]["steps"] = 60
    with job(setting, "told", sections) as node:
        reach(setting, "told", node, 5)
        told = time.monotonic()
        node.process.send_signal(signal.SIGTERM)
        code = node.process.wait()
        seconds = time.monotonic() - told
    run = train(setting, "told", sections)
    train(setting, "alone", sections)
    check(setting, "told")
    if "resuming after step" not in run.output:
        raise RunFailedError("nothing was saved: the second launch began anew")
    return {
        "exit_code": code,
        "seconds": seconds,
        "differing_files": len(differing(setting, "told", "alone", steps)),
    }


# --- jobs ------------------------------------------------------------------------------------


@contextmanager
def job(
    setting: Setting, name: str, sections: Sections, module: str = "trainer", ranks: int = 1
) -> Iterator[LocalNode]:
    """A node that trains, under torchrun with this project's rendezvous."""
    path, secret = write_recipe(setting, name, sections), setting.scratch / ".secret"
    make_secret(secret)
    with LocalNodes(
        ["-m", module, str(path)],
        folder=setting.scratch,
        nnodes="1",
        logs=setting.scratch,
        ranks=ranks,
        environment={**job_environment(setting), SECRET_FILE: str(secret)},
    ) as nodes:
        node = nodes.add()
        try:
            yield node
        finally:
            print(node.text(), flush=True)


def records(setting: Setting, name: str) -> list[dict[str, Any]]:
    """Records of a run, while it goes on."""
    return json_lines(setting.scratch / name / "metrics.jsonl")


def wait_for(found: Callable[[], Any], node: LocalNode, what: str) -> Any:
    """What `found` returns once it is true.

    Raises:
        RunFailedError: the node has ended, so that it never will be.
    """
    while not (result := found()):
        if node.process.poll() is not None:
            raise RunFailedError(f"{what} did not come: exit code {node.process.returncode}")
        time.sleep(0.01)
    return result


def newest(setting: Setting, name: str) -> int:
    """Step of a run, 0 before the first."""
    return max((record["step"] for record in records(setting, name)), default=0)


def reach(setting: Setting, name: str, node: LocalNode, steps: int) -> None:
    """Wait until a run has done so many more steps."""
    target = newest(setting, name) + steps
    wait_for(lambda: newest(setting, name) >= target, node, f"step {target}")


def snapshot_after(setting: Setting, name: str, node: LocalNode, steps: int) -> int:
    """Wait until so many more steps are done, and then for a new copy in memory; returns the newest
    step done."""
    reach(setting, name, node, steps)
    directory = setting.scratch / name / "checkpoints"
    done = newest(setting, name)

    def copied() -> bool:
        manifests = [
            read_manifest(path, token(directory) or "")
            for folder in memory_folders(str(directory.absolute()))
            for path in folder.glob("slot-*.manifest")
        ]
        return any(found and found.step >= done for found in manifests)

    wait_for(copied, node, f"a copy of step {done}")
    return newest(setting, name)


def recovery(
    setting: Setting, name: str, node: LocalNode, number: signal.Signals, victim: int = 0
) -> tuple[float, int]:
    """Send a signal to a training process, the only one unless said; returns the seconds to the
    first step that had not been done before, and the step from which the run went on."""
    resumptions = r"resuming after step (\d+) of"
    known = len(re.findall(resumptions, node.text()))
    before, at = newest(setting, name), time.time()
    os.kill(victim or node.trainers()[0], number)

    def later() -> list[float]:
        found = [r for r in records(setting, name) if "loss" in r and r["time"] > at]
        return [record["time"] for record in found if record["step"] > before]

    def new_step() -> list[float]:
        resumed = len(re.findall(resumptions, node.text())) > known
        return later() if resumed else []

    times = wait_for(new_step, node, "a step after the signal")
    return times[0] - at, int(re.findall(resumptions, node.text())[-1])


def check(setting: Setting, name: str) -> None:
    """`perdure report --check`: every sequence was consumed once.

    Raises:
        RunFailedError: it was not.
    """
    report = [sys.executable, "-m", "trainer.cli", "report", str(Path(setting.scratch, name))]
    run_command(setting, [*report, "--check"])
