"""What saving and recovering cost a large job, as `System`s for `simulated_run`: from measured
results, from the code's own rules, and from assumptions, which are named.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from benchmarks.support import ROOT
from benchmarks.support.failure_traces import PER_NODE, Trace
from benchmarks.support.simulated_run import JOIN, Job, System
from elastic.group.membership import beat_seconds, lease_seconds
from elastic.node.watchdog import MIN_SECONDS, TIMEOUT_FACTOR

RESULTS = ROOT / "benchmarks" / "results"

MEASURED_AS = {
    "process": "worker",
    "hang": "hang",
    "node": "node",
    "rack": "node",
    "notice": "notice",
    JOIN: "join",
}
DCP = "dcp.async_save (reused stager)"
"""The way of DCP to save that costs training least."""
REFORKED_AS = {**MEASURED_AS, "hang": "worker", "notice": "node"}
"""Faults by which `elastic.recovery: refork` was measured beside in_place."""

# Llama 3 405B on 16,384 GPUs: Grattafiori et al. 2024 (arXiv 2407.21783), table 4. A smaller job
# has fewer replicas, of as many sequences.
PARAMETERS = 405e9
REPLICA_NODES = 16  # TP8 in a node, PP16 over nodes
REPLICA_SEQUENCES = 16
STEP_SECONDS = 6.0  # 16 M tokens at 400 TFLOP/s a GPU

# Assumptions.
BYTES_PER_PARAMETER = 12  # float32 weights and AdamW's two moments, as a checkpoint holds them
STORAGE_PER_GPU = 2e12 / 16384  # bytes/s; the paper: "2 TB/s sustained" for all
NODE_LINK = 25e9  # bytes/s between two nodes, half of eight 400 Gb/s cards' smallest share
WARM_UP = 15.0  # CUDA contexts, libraries, kernels of the first step, in every new process


def communicators(gpus: int) -> float:
    """Seconds to make NCCL's groups: Jiang et al. 2024, "MegaScale" (NSDI), section 3.5: below 5 s
    on 2,048 GPUs and below 30 s on more than 10,000; further on in proportion."""
    return max(5.0, 30.0 * gpus / 10240)


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines of a recipe, and of its launch, that decide what a failure costs."""

    checkpoint_every: int = 0
    """`checkpoint.every`; 0: auto."""
    slots: bool = True
    peer_copy: bool = True
    snapshot_every: int = 0
    recovery: str = "in_place"
    notices: bool = True
    spares: bool = True
    """More nodes than the MAX of `--nnodes MIN:MAX`, which wait for a lost one's place."""


FULL = Lines()


def perdure(gpus: int, lines: Lines = FULL) -> System:
    """This trainer, with a recipe of these lines."""
    own, nodes = state_bytes(gpus), gpus // PER_NODE
    measured = {kind: recovered("perdure", fault) for kind, fault in MEASURED_AS.items()}
    if lines.recovery == "refork":
        for kind, fault in REFORKED_AS.items():
            measured[kind] += refork_costs(fault)
    lease = lease_seconds(beat_seconds(nodes), True) - lease_seconds(beat_seconds(2), True)
    more = {
        "hang": max(0.0, TIMEOUT_FACTOR * STEP_SECONDS - MIN_SECONDS),
        "node": lease,
        "rack": lease,
        "notice": own / STORAGE_PER_GPU,  # all save to storage before the node goes
    }
    if not lines.notices:
        measured["notice"], more["notice"] = measured["node"], lease
    own_copy = STEP_SECONDS if lines.slots else math.inf
    neighbour = own * PER_NODE / NODE_LINK
    anew = WARM_UP + communicators(gpus)
    return System(
        name="Perdure",
        stall=save_stall(),
        save=save_stall() + own * lost_per_byte(),
        own_copy=own_copy,
        peer_copy=own_copy + neighbour if lines.peer_copy else math.inf,
        written=STEP_SECONDS + own / STORAGE_PER_GPU,
        memory_load=own / load_rate() + neighbour,
        storage_load=own / STORAGE_PER_GPU,
        restart={kind: anew + measured[kind] + more.get(kind, 0.0) for kind in MEASURED_AS},
        saves_on_notice=lines.notices,
        checkpoint_steps=lines.checkpoint_every,
        snapshot_steps=lines.snapshot_every,
        spares=lines.spares,
    )


def peers(gpus: int) -> list[System]:
    """torchrun with DCP's asynchronous saves, as it comes and with tuned time-outs. What it never
    recovered from when it was measured is taken as the longest that it did, or for a hang as the
    process group's time-out, 10 minutes unless tuned."""
    ours, times = perdure(gpus), dcp_times()
    cost = times * ours.save
    found = []
    for name, title in (("stock", "torchrun + DCP"), ("tuned", "the same, tuned")):
        worst = max(recovered(name, fault) for fault in _recoveries()[name] if _done(name, fault))
        restart = {}
        for kind, fault in MEASURED_AS.items():
            never = 600.0 if kind == "hang" else worst
            seconds = recovered(name, fault) if _done(name, fault) else never
            restart[kind] = seconds + WARM_UP + communicators(gpus)
        found.append(
            replace(
                ours,
                name=title,
                own_copy=math.inf,
                peer_copy=math.inf,
                restart=restart,
                saves_on_notice=False,
            )
        )
    dearer = f"tuned, a save costs {times:.1f} times ours"
    return [*found, replace(found[-1], name=dearer, stall=cost, save=cost)]


def job(gpus: int, trace: Trace) -> Job:
    """Llama 3 405B on so many GPUs."""
    return Job(
        nodes=gpus // PER_NODE,
        step=STEP_SECONDS,
        replica_nodes=REPLICA_NODES,
        replica_sequences=REPLICA_SEQUENCES,
        repair_days=trace.repair_days,
    )


def state_bytes(gpus: int) -> float:
    """What one rank saves."""
    return PARAMETERS * BYTES_PER_PARAMETER / gpus


# --- what was measured -----------------------------------------------------------------------


@cache
def _recoveries() -> Any:
    """System → fault → recoveries, on 2 CPU cores."""
    return json.loads((RESULTS / "recovery-2cpu.json").read_text())["figures"]


def _done(system: str, fault: str) -> list[float]:
    """Seconds of the faults that were recovered from, without steps done again."""
    return [
        one["seconds"] - one["phases"].get("redone steps", 0.0)
        for one in _recoveries()[system].get(fault, [])
        if one["seconds"] is not None
    ]


def recovered(system: str, fault: str) -> float:
    return median(_done(system, fault))


@cache
def refork_costs(fault: str) -> float:
    """Seconds that `elastic.recovery: refork` takes longer than in_place, in one run of both."""
    text = (RESULTS / "recovery-of-four-2cpu.txt").read_text()
    medians = []
    for system in ("Refork", "Perdure"):
        line = rf"^{system}, {fault}: ([\d.]+) s,(?:.* redone steps ([\d.]+))?"
        found = re.findall(line, text, flags=re.M)
        medians.append(median(float(seconds) - float(redone or 0) for seconds, redone in found))
    return medians[0] - medians[1]


def dcp_times() -> float:
    """What DCP's asynchronous save costs training, by what this trainer's does, on 2 CPU cores."""
    figures = json.loads((RESULTS / "checkpoint-2cpu.json").read_text())["figures"]
    return median(
        median(size["summary"][DCP]["later"]["lost"])
        / median(size["summary"]["Perdure"]["later"]["lost"])
        for size in figures
    )


@cache
def _gpu_saves() -> list[Mapping[str, float]]:
    """Saves of models of three sizes on one GPU."""
    cases = json.loads((RESULTS / "gpu-h200.json").read_text())["cases"]
    return [case["figures"] for name, case in cases.items() if name.startswith("saves.save.")]


def save_stall() -> float:
    """Seconds that training stands still for a save: those of the smallest state, for any."""
    return min(_gpu_saves(), key=lambda save: save["gigabytes"])["held_up_seconds"]


def lost_per_byte() -> float:
    """Seconds that a save costs in all, per byte of a rank; the worst of the sizes."""
    return max(save["lost_seconds"] / save["gigabytes"] for save in _gpu_saves()) / 1e9


def load_rate() -> float:
    """Bytes per second of a load from shared memory, the checks included; the slowest."""
    from_memory = [save for save in _gpu_saves() if save["loaded_from_memory"]]
    return min(save["gigabytes"] / save["load_seconds"] for save in from_memory) * 1e9


@cache
def whole_restart() -> float:
    """Seconds from `kill -9` to the first new step of a 0.6B model on one GPU."""
    cases = json.loads((RESULTS / "gpu-h200.json").read_text())["cases"]
    return cases["survives.kill.small"]["figures"]["seconds"]
