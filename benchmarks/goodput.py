"""Goodput of 1,024 to 16,384 GPUs, by simulation: Llama 3's published failures, the costs that
benchmarks/recovery.py and benchmarks/checkpoint.py measured, and this trainer's own rule for when
to save. Beside it torchrun with DCP, which restarts all from storage, with the same spares, the
same rule and its own measured costs.

What was measured is measured on 2 CPU cores with a tiny model. What grows with the job is added: as
the code has it (leases, the watchdog's patience), or as an assumption, which is printed.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from textwrap import fill
from typing import Any

from benchmarks.support import ROOT, arguments, heading, print_table, write_json
from elastic import SaveClock, expected_mtbf
from elastic.group.membership import MISSED_BEATS, beat_seconds, lease_seconds
from elastic.node.watchdog import MIN_SECONDS, TIMEOUT_FACTOR

GPUS = (1024, 2048, 4096, 8192, 16384)
PER_NODE = 8
DAY = 86400.0

# Grattafiori et al. 2024, "The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.4 and table
# 5: interruptions in 54 days on 16,384 H100s.
OBSERVED_DAYS, OBSERVED_GPUS = 54, 16384
INTERRUPTIONS = {
    "faulty GPU": ("node", 148),
    "GPU HBM3 memory": ("node", 72),
    "software bug": ("process", 54),
    "network switch or cable": ("rack", 35),
    "host maintenance, unplanned": ("node", 32),
    "GPU SRAM memory": ("node", 19),
    "GPU system processor": ("node", 17),
    "NIC": ("node", 7),
    "NCCL watchdog time-outs": ("hang", 7),
    "silent data corruption": ("node", 6),
    "GPU thermal interface and sensor": ("node", 6),
    "SSD": ("node", 3),
    "power supply": ("node", 3),
    "server chassis": ("node", 2),
    "IO expansion board": ("node", 2),
    "dependency": ("process", 2),
    "CPU": ("node", 2),
    "system memory": ("node", 2),
    "planned": ("notice", 47),
}
KINDS = {
    "process": "a process dies, its machine is well",
    "hang": "a process hangs",
    "node": "a node is lost, with its memory",
    "rack": "a node and its neighbour are lost, and so the copy of its memory",
    "notice": "a node is told to go",
}
MEASURED_AS = {
    "process": "worker",
    "hang": "hang",
    "node": "node",
    "rack": "node",
    "notice": "notice",
}

# Assumptions.
PARAMETERS = 405e9
BYTES_PER_PARAMETER = 12  # float32 weights and AdamW's two moments, as a checkpoint holds them
STEP_SECONDS = 6.0  # 16 M tokens on 16,384 GPUs at 400 TFLOP/s each; smaller jobs, smaller batches
STORAGE_PER_GPU = 2e12 / 16384  # bytes/s; the paper: "2 TB/s sustained" for all
HOST_LINK = 10e9  # bytes/s from shared memory to a GPU: less than half of what PCIe 5 gives
NODE_LINK = 25e9  # bytes/s between two nodes, half of eight 400 Gb/s cards' smallest share
WARM_UP = 15.0  # CUDA contexts, libraries, kernels of the first step, in every new process
REPAIR_DAYS = 1.0

DCP = "dcp.async_save (reused stager)"
"""The way of DCP to save that costs training least."""


def communicators(gpus: int) -> float:
    """Seconds to make NCCL's groups: Jiang et al. 2024, "MegaScale" (NSDI), section 3.5: below 5 s
    on 2,048 GPUs and below 30 s on more than 10,000; further on in proportion."""
    return max(5.0, 30.0 * gpus / 10240)


@dataclass(frozen=True)
class System:
    """How a trainer saves and recovers, on so many GPUs. Seconds."""

    name: str
    held: float
    """Training stands still for a save: what a run measures, and decides by."""
    lost: float
    """What a save costs training in all, steps that are slower meanwhile among it."""
    copied: float
    """From a save until a process that dies does not cost it; infinite: only storage counts."""
    written: float
    """From a save until it is in storage."""
    restart: Mapping[str, float]
    """From a failure of each kind to the first step, without steps done again."""
    saves_on_notice: bool


@dataclass
class Account:
    """Where the time of a run went, in seconds."""

    wall: float = 0.0
    kept: float = 0.0
    saving: float = 0.0
    redone: float = 0.0
    restarting: float = 0.0
    saves: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        """Share of the time in steps whose result survived."""
        return self.kept / self.wall


def main() -> None:
    options = arguments(__doc__.splitlines()[0], days=54, runs=5, seed=0)
    recovery = _figures("recovery-2cpu")
    engines = _figures("checkpoint-2cpu")
    heading("Goodput under Llama 3's failures, simulated")
    _print_assumptions(recovery, engines, options.days, options.runs)
    rows, figures = [], []
    for gpus in GPUS:
        for system in (perdure(gpus, recovery, engines), *peers(gpus, recovery, engines)):
            accounts = [
                simulate(system, gpus, options.days * DAY, random.Random(f"{options.seed} {run}"))
                for run in range(options.runs)
            ]
            rows.append(_row(system, gpus, accounts))
            figures.append(
                {"gpus": gpus, "system": system.name, "goodput": [a.goodput for a in accounts]}
            )
    print_table(rows)
    print()
    print_table([_spares(gpus) for gpus in GPUS])
    write_json("Goodput under Llama 3's failures, simulated", figures, options.json)


# --- the systems -----------------------------------------------------------------------------


def perdure(gpus: int, recovery: Mapping[str, Any], engines: Sequence[Any]) -> System:
    """This trainer, with `checkpoint.every: auto` and `checkpoint.peer_copy: true`."""
    nodes, own = gpus // PER_NODE, state_bytes(gpus)
    anew = WARM_UP + communicators(gpus)
    measured = {
        kind: _without_redone(recovery["perdure"][name]) for kind, name in MEASURED_AS.items()
    }
    lease = lease_seconds(beat_seconds(nodes), True) - lease_seconds(beat_seconds(2), True)
    from_memory, from_neighbour = own / HOST_LINK, own * PER_NODE / NODE_LINK
    patience = max(0.0, TIMEOUT_FACTOR * STEP_SECONDS - MIN_SECONDS)
    restart = {
        "process": measured["process"] + from_memory,
        "hang": measured["hang"] + patience + from_memory,
        "node": measured["node"] + lease + from_memory + from_neighbour,
        "rack": measured["rack"] + lease + own / STORAGE_PER_GPU,
        "notice": measured["notice"] + own / STORAGE_PER_GPU + from_memory + from_neighbour,
    }
    return System(
        "Perdure",
        held=_per_byte(engines, "Perdure", "held") * own,
        lost=_per_byte(engines, "Perdure", "lost") * own,
        copied=STEP_SECONDS + from_neighbour,
        written=STEP_SECONDS + own / STORAGE_PER_GPU,
        restart={kind: seconds + anew for kind, seconds in restart.items()},
        saves_on_notice=True,
    )


def peers(gpus: int, recovery: Mapping[str, Any], engines: Sequence[Any]) -> list[System]:
    """torchrun with DCP's asynchronous saves, as it comes and with tuned time-outs. What it never
    recovered from when it was measured is taken as the longest that it did, or for a hang as the
    process group's time-out, 10 minutes unless tuned."""
    own, load = state_bytes(gpus), state_bytes(gpus) / STORAGE_PER_GPU
    found = []
    for name, title in (("stock", "torchrun + DCP"), ("tuned", "the same, tuned")):
        worst = max(_without_redone(faults) for faults in recovery[name].values() if _done(faults))
        restart = {}
        for kind, fault in MEASURED_AS.items():
            never = 600.0 if kind == "hang" else worst
            faults = recovery[name][fault]
            seconds = _without_redone(faults) if _done(faults) else never
            restart[kind] = seconds + load + WARM_UP + communicators(gpus)
        found.append(
            System(
                title,
                held=_per_byte(engines, DCP, "lost") * own,
                lost=_per_byte(engines, DCP, "lost") * own,
                copied=math.inf,
                written=STEP_SECONDS + own / STORAGE_PER_GPU,
                restart=restart,
                saves_on_notice=False,
            )
        )
    return found


def state_bytes(gpus: int) -> float:
    """What one rank saves."""
    return PARAMETERS * BYTES_PER_PARAMETER / gpus


def _figures(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["figures"]


def _counts() -> Counter[str]:
    """How many interruptions there were of each kind."""
    counts = Counter[str]()
    for kind, count in INTERRUPTIONS.values():
        counts[kind] += count
    return counts


def _done(faults: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of those that were recovered from, without steps done again."""
    return [
        fault["seconds"] - fault["phases"].get("redone steps", 0.0)
        for fault in faults
        if fault["seconds"] is not None
    ]


def _without_redone(faults: Sequence[Mapping[str, Any]]) -> float:
    return median(_done(faults))


def _per_byte(engines: Sequence[Any], engine: str, kind: str) -> float:
    """Seconds that a save takes from training per byte of a rank; the worse of the sizes."""
    return max(
        median(figures["summary"][engine]["later"][kind])
        / (figures["summary"][engine]["state_bytes"] / 2)
        for figures in engines
        if engine in figures["summary"]
    )


# --- the simulation --------------------------------------------------------------------------


def simulate(system: System, gpus: int, seconds: float, draw: random.Random) -> Account:
    """A run of so many seconds. Failures are a Poisson process that restarts do not stop."""
    nodes = gpus // PER_NODE
    kinds = _counts()
    rate = kinds.total() / (OBSERVED_DAYS * DAY) * gpus / OBSERVED_GPUS
    account = Account(wall=seconds)
    now, fault = 0.0, draw.expovariate(rate)
    saved: list[tuple[float, float]] = [(-math.inf, 0.0)]  # (begun, progress), newest last
    while now < seconds:
        failures = sum(account.faults.values())
        clock = SaveClock(expected_mtbf(failures, now * nodes, nodes), now)
        last, end = now, min(fault, seconds)
        while True:  # until the failure: steps, then a save
            steps = max(1, math.ceil((last + clock.interval - now) / STEP_SECONDS))
            if now + steps * STEP_SECONDS > end:
                break
            now += steps * STEP_SECONDS
            account.kept += steps * STEP_SECONDS
            saved = [*saved[-1000:], (now, account.kept)]
            last = now
            clock.begun(now, system.held)
            clock.written(system.written)
            now += system.lost
            account.saving += system.lost
            account.saves += 1
        account.saving -= max(0.0, now - end)  # the failure came during a save
        worked = max(0.0, end - now)
        whole = worked // STEP_SECONDS * STEP_SECONDS
        account.kept += whole
        if fault >= seconds:
            account.redone += worked - whole
            break
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        account.faults[kind] += 1
        back = _goes_on_from(system, kind, saved, fault, account.kept)
        account.redone += worked - whole + account.kept - back
        account.kept = back
        saved = [(begun, progress) for begun, progress in saved if progress <= back]
        now = fault
        fault += draw.expovariate(rate)
        ready = now + system.restart[kind]
        while fault < min(ready, seconds):  # another failure meanwhile: begin again
            kind = draw.choices(list(kinds), list(kinds.values()))[0]
            account.faults[kind] += 1
            ready = fault + system.restart[kind]
            fault += draw.expovariate(rate)
        account.restarting += min(ready, seconds) - now
        now = min(ready, seconds)
    return account


def _goes_on_from(
    system: System, kind: str, saved: Sequence[tuple[float, float]], at: float, kept: float
) -> float:
    """The progress that survives a failure."""
    if kind == "notice" and system.saves_on_notice:
        return kept
    delay = system.written if kind == "rack" else min(system.copied, system.written)
    return max((progress for begun, progress in saved if begun + delay <= at), default=0.0)


# --- printing --------------------------------------------------------------------------------


def _row(system: System, gpus: int, accounts: Sequence[Account]) -> dict[str, str]:
    wall = sum(account.wall for account in accounts)

    def share(kind: str) -> str:
        return f"{sum(getattr(account, kind) for account in accounts) / wall:.2%}"

    goodputs = [account.goodput for account in accounts]
    return {
        "GPUs": f"{gpus:,}",
        "system": system.name,
        "goodput": f"{mean(goodputs):.2%} ({min(goodputs):.2%}-{max(goodputs):.2%})",
        "restarting": share("restarting"),
        "redone": share("redone"),
        "saving": share("saving"),
        "failures": f"{mean(account.faults.total() for account in accounts):.0f}",
        "a save every, s": f"{wall / sum(account.saves for account in accounts):,.0f}",
        "which costs, s": f"{system.lost:.2f}",
        "restart of a process, s": f"{system.restart['process']:.1f}",
        "of a node, s": f"{system.restart['node']:.1f}",
    }


def _spares(gpus: int) -> dict[str, str]:
    """Nodes in repair, if one takes REPAIR_DAYS: a Poisson number."""
    away = sum(count for kind, count in INTERRUPTIONS.values() if kind not in ("process", "hang"))
    expected = away / OBSERVED_DAYS * gpus / OBSERVED_GPUS * REPAIR_DAYS
    spares, term = 0, math.exp(-expected)
    total = term
    while total < 0.999:
        spares += 1
        term *= expected / spares
        total += term
    return {
        "GPUs": f"{gpus:,}",
        "nodes": f"{gpus // PER_NODE:,}",
        "in repair, on average": f"{expected:.1f}",
        "spares that suffice 99.9 % of the time": f"{spares} ({spares / (gpus // PER_NODE):.1%})",
    }


def _print_assumptions(
    recovery: Mapping[str, Any], engines: Sequence[Any], days: int, runs: int
) -> None:
    counts = _counts()
    taken = ", ".join(
        f"{kind} {_without_redone(recovery['perdure'][name]):.2f} s"
        for kind, name in MEASURED_AS.items()
    )
    held, lost = (1e9 * _per_byte(engines, "Perdure", kind) for kind in ("held", "lost"))
    dcp = 1e9 * _per_byte(engines, DCP, "lost")

    def say(text: str) -> None:
        print(fill(text, 100) + "\n")

    say(
        f"Failures: {counts.total()} interruptions in {OBSERVED_DAYS} days on {OBSERVED_GPUS:,} "
        f"GPUs, {counts.total() - counts['notice']} of them unexpected (Llama 3, arXiv 2407.21783, "
        "section 3.3.4), as a Poisson process in proportion to the GPUs. Sorted by us:"
    )
    for kind, text in KINDS.items():
        print(f"  {counts[kind]:3}  {kind:8} {text}")
    print()
    say(
        "Measured on 2 CPU cores with a tiny model (benchmarks/results/recovery-2cpu.json): from a "
        f"failure to the first step, without the steps done again: {taken}. A save "
        f"(checkpoint-2cpu.json) holds training up for {held:.3f} s per GB of a rank, and costs it "
        f"{lost:.2f} s in all; DCP's best asynchronous one costs {dcp:.2f} s. Most of that is "
        "copying on the cores that train, which a GPU would not feel; it is counted here."
    )
    say(
        "Scaled up: a save by the bytes of a rank; the time until a node is taken for lost by this "
        f"trainer's rule ({MISSED_BEATS} beats, of {beat_seconds(2048):.1f} s at 2,048 nodes); "
        f"until a rank is taken for hung by the watchdog's ({TIMEOUT_FACTOR} steps)."
    )
    say(
        f"Assumed: Llama-3.1-405B, {BYTES_PER_PARAMETER} bytes a parameter; steps of "
        f"{STEP_SECONDS:.0f} s; storage of {STORAGE_PER_GPU / 1e6:.0f} MB/s a GPU (the paper's "
        f"2 TB/s for 16,384); {HOST_LINK / 1e9:.0f} GB/s from shared memory to a GPU, "
        f"{NODE_LINK / 1e9:.0f} GB/s from node to node; in every new process {WARM_UP:.0f} s for "
        f"CUDA and the first step's kernels; NCCL's groups {communicators(2048):.0f} s at 2,048 "
        f"GPUs, {communicators(16384):.0f} s at 16,384 (MegaScale, NSDI 2024, in proportion). What "
        "was measured with up to three nodes takes no longer with 2,048, except as above. Both "
        "systems have spares that take a lost node's place at once."
    )
    say(
        "Both save as elastic/record/reliability.py has it (SaveClock, from the failures seen so "
        "far): this trainer by what holds it up, as it does; DCP by all that a save costs, which "
        f"is better for it. {days} days, {runs} runs each: mean (least-most)."
    )


if __name__ == "__main__":
    main()
