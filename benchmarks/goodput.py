"""Goodput of 1,024 to 16,384 GPUs under published failures, by simulation.

What each line of a recipe is worth: the recipe with another value there, under the same failures of
five large jobs and clusters. Beside it torchrun with DCP, which restarts all from storage. Costs
were measured: recoveries on 2 CPU cores with a tiny model, saves on one GPU. What grows with the
job is added: as the code has it (leases, the watchdog's patience, `SaveClock`), or as an
assumption, which is printed.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import mean, stdev
from textwrap import fill

from benchmarks.support import arguments, heading, print_table, write_json
from benchmarks.support.failure_traces import DAY, HOUR, KINDS, LLAMA_3, PER_NODE, TRACES, Trace
from benchmarks.support.modelled_costs import (
    BYTES_PER_PARAMETER,
    FULL,
    MEASURED_AS,
    NODE_LINK,
    REPLICA_NODES,
    REPLICA_SEQUENCES,
    STEP_SECONDS,
    STORAGE_PER_GPU,
    WARM_UP,
    Lines,
    communicators,
    dcp_times,
    job,
    load_rate,
    lost_per_byte,
    peers,
    perdure,
    recovered,
    refork_costs,
    save_stall,
    whole_restart,
)
from benchmarks.support.simulated_run import Account, System, simulate
from elastic.group.membership import MISSED_BEATS, beat_seconds
from elastic.node.watchdog import TIMEOUT_FACTOR

TITLE = "Goodput under published failures, simulated"
GPUS = (1024, 2048, 4096, 8192, 16384)

DEFAULT_EVERY = 500
"""The default of `checkpoint.every`."""
BARE = Lines(
    checkpoint_every=DEFAULT_EVERY, slots=False, peer_copy=False, recovery="refork", notices=False,
    spares=False,
)  # fmt: skip
CHANGES = {
    "without spare nodes": replace(FULL, spares=False),
    "`checkpoint.every: 500`": replace(FULL, checkpoint_every=DEFAULT_EVERY),
    "the same, `elastic.snapshot_every: 4`": replace(
        FULL, checkpoint_every=DEFAULT_EVERY, snapshot_every=4
    ),
    "`elastic.snapshot_every: 4`": replace(FULL, snapshot_every=4),
    "`checkpoint.peer_copy: false`": replace(FULL, peer_copy=False),
    "`checkpoint.slots: 0`": replace(FULL, slots=False, peer_copy=False),
    "`elastic.recovery: refork`": replace(FULL, recovery="refork"),
    "nodes go without a notice": replace(FULL, notices=False),
    "defaults: `every: 500`, no peer copy": replace(
        FULL, checkpoint_every=DEFAULT_EVERY, peer_copy=False
    ),
    "none of these lines": BARE,
}


def main() -> None:
    options = arguments(__doc__.partition("\n")[0], days=54, runs=5, seed=0)
    seeds = [f"{options.seed} {run}" for run in range(options.runs)]
    heading(TITLE)
    _print_sources()
    _print_assumptions(options.days, options.runs)
    print("Beside torchrun and DCP, under Llama 3's failures\n")
    rows, figures = [], []
    for gpus in GPUS:
        for system in (perdure(gpus), *peers(gpus)):
            accounts = runs(system, LLAMA_3, gpus, options.days, seeds)
            rows.append(_row(system, gpus, accounts))
            figures.append(
                {"gpus": gpus, "system": system.name, "goodput": [a.goodput for a in accounts]}
            )
    print_table(rows)
    for gpus in (GPUS[0], GPUS[-1]):
        print(f"\nWhat lines are worth on {gpus:,} GPUs: goodput, and points more or less\n")
        print_table(worths(gpus, options.days, seeds))
        print(f"\nWhere the time of {gpus:,} GPUs goes with all lines\n")
        print_table([_shares(trace, gpus, options.days, seeds) for trace in TRACES])
    print(f"\nWhat bounds {GPUS[-1]:,} GPUs under Llama 3's failures\n")
    print_table(bounds(GPUS[-1], options.days, seeds))
    print("\nSpare nodes\n")
    print_table([_spares(trace, gpus) for gpus in (GPUS[0], GPUS[-1]) for trace in TRACES])
    write_json(TITLE, figures, options.json)


# --- what comes of it ------------------------------------------------------------------------


def runs(system: System, trace: Trace, gpus: int, days: int, seeds: Sequence[str]) -> list[Account]:
    """A run per seed. The same seed has the same failures, whatever the system."""
    return [
        simulate(
            system,
            job(gpus, trace),
            trace.failures(gpus, Random(f"{trace.name} {seed}")),
            days * DAY,
            Random(seed),
        )
        for seed in seeds
    ]


def worths(gpus: int, days: int, seeds: Sequence[str]) -> list[dict[str, str]]:
    """Goodput with all lines, and the difference to it of every change, by trace."""
    full = {
        trace.name: [a.goodput for a in runs(perdure(gpus), trace, gpus, days, seeds)]
        for trace in TRACES
    }
    rows = [{"recipe": "all lines", **{name: _percent(all_) for name, all_ in full.items()}}]
    for title, lines in CHANGES.items():
        row = {"recipe": title}
        for trace in TRACES:
            accounts = runs(perdure(gpus, lines), trace, gpus, days, seeds)
            pairs = zip(accounts, full[trace.name], strict=True)
            row[trace.name] = _points([account.goodput - before for account, before in pairs])
        rows.append(row)
    return rows


def bounds(gpus: int, days: int, seeds: Sequence[str]) -> list[dict[str, str]]:
    """Goodput with all lines if something took less time, or nothing."""
    full = perdure(gpus)

    def sooner(seconds: float) -> System:
        return replace(full, restart={kind: was - seconds for kind, was in full.restart.items()})

    groups, warm = communicators(gpus), WARM_UP - whole_restart()
    systems = {
        "all lines, as above": full,
        f"a new process warms up in {whole_restart():.1f} s, as on one GPU": sooner(warm),
        f"NCCL's groups take {groups / 10:.0f} s instead of {groups:.0f}": sooner(0.9 * groups),
        "both": sooner(0.9 * groups + warm),
        "saves cost nothing": replace(full, save=0.0),
        "a process restarts in no time, a node in as much less": sooner(min(full.restart.values())),
    }
    return [
        {
            "if": title,
            "goodput": _percent([a.goodput for a in runs(system, LLAMA_3, gpus, days, seeds)]),
            "restart of a node, s": f"{system.restart['node'] + system.memory_load:.0f}",
        }
        for title, system in systems.items()
    ]


# --- printing --------------------------------------------------------------------------------


def _percent(goodputs: Sequence[float]) -> str:
    return f"{mean(goodputs):.2%} ({min(goodputs):.2%}-{max(goodputs):.2%})"


def _points(differences: Sequence[float]) -> str:
    """Mean difference in percentage points, and its standard deviation over runs."""
    spread = f" ±{100 * stdev(differences):.2f}" if len(differences) > 1 else ""
    return f"{100 * mean(differences):+.2f}{spread}"


def _share(accounts: Sequence[Account], kind: str) -> str:
    seconds = sum(getattr(account, kind) for account in accounts)
    return f"{seconds / sum(account.wall for account in accounts):.2%}"


def _row(system: System, gpus: int, accounts: Sequence[Account]) -> dict[str, str]:
    saves = sum(account.saves for account in accounts)
    return {
        "GPUs": f"{gpus:,}",
        "system": system.name,
        "goodput": _percent([account.goodput for account in accounts]),
        "restarting": _share(accounts, "restarting"),
        "redone": _share(accounts, "redone"),
        "saving": _share(accounts, "saving"),
        "a save every, s": f"{sum(account.wall for account in accounts) / saves:,.0f}",
        "restart of a process, s": f"{system.restart['process'] + _load(system, True):.1f}",
        "of a node, s": f"{system.restart['node'] + _load(system, False):.1f}",
    }


def _load(system: System, own: bool) -> float:
    copied = system.own_copy if own else system.peer_copy
    return system.storage_load if copied == math.inf else system.memory_load


def _shares(trace: Trace, gpus: int, days: int, seeds: Sequence[str]) -> dict[str, str]:
    accounts = runs(perdure(gpus), trace, gpus, days, seeds)
    return {
        "trace": trace.name,
        "hours between failures": f"{trace.mtbf(gpus) / HOUR:.1f}",
        "restarting": _share(accounts, "restarting"),
        "redone": _share(accounts, "redone"),
        "saving": _share(accounts, "saving"),
        "a save every, s": f"{days * DAY * len(seeds) / sum(a.saves for a in accounts):,.0f}",
    }


def _spares(trace: Trace, gpus: int) -> dict[str, str]:
    """Nodes in repair, as a Poisson number."""
    expected = trace.nodes_away(gpus)
    spares, term = 0, math.exp(-expected)
    total = term
    while total < 0.999:
        spares += 1
        term *= expected / spares
        total += term
    return {
        "GPUs": f"{gpus:,}",
        "trace": trace.name,
        "days of a repair": f"{trace.repair_days:.1f}",
        "in repair, on average": f"{expected:.1f}",
        "spares that suffice 99.9 % of the time": f"{spares} ({spares / (gpus // PER_NODE):.1%})",
    }


def _say(text: str) -> None:
    print(fill(text, 100) + "\n")


def _print_sources() -> None:
    _say(
        "Failures, as published. Their number is in proportion to the GPUs, where the source does "
        "not say how it grows. Kinds, sorted by us:"
    )
    for kind, text in KINDS.items():
        print(f"  {kind:8} {text}")
    print()
    for trace in TRACES:
        _say(f"{trace.name}: {trace.source}. {trace.sorting}")
    print_table(
        [
            {
                "trace": trace.name,
                **{
                    kind: f"{trace.counts[kind] / sum(trace.counts.values()):.1%}" for kind in KINDS
                },
            }
            for trace in TRACES
        ]
    )
    print()


def _print_assumptions(days: int, number: int) -> None:
    taken = ", ".join(
        f"{kind} {recovered('perdure', fault):.2f} s" for kind, fault in MEASURED_AS.items()
    )
    more = ", ".join(f"{fault} {refork_costs(fault):.2f} s" for fault in ("worker", "node", "join"))
    _say(
        "Measured on 2 CPU cores with a tiny model (benchmarks/results/recovery-2cpu.json): from a "
        f"failure to the first step, without the steps done again: {taken}. With "
        "elastic.recovery=refork (recovery-of-four-2cpu.txt) it takes longer: "
        f"{more}. Ranks that keep their state were measured; rebuild was not."
    )
    _say(
        f"Measured on an H200 (gpu-h200.json): a save stops training for {save_stall():.3f} s, and "
        f"costs {1e9 * lost_per_byte():.4f} s per GB of a rank on top; a load from memory runs at "
        f"{load_rate() / 1e9:.1f} GB/s. DCP was not measured there: its saves are given the cost "
        f"of this trainer's, which favours it, or {dcp_times():.1f} times as much, as on 2 CPU "
        "cores (checkpoint-2cpu.json); and this trainer's rule for when to save. What a copy to "
        "the next node costs training was not measured on GPUs. It counts nothing here."
    )
    _say(
        "Scaled up: the time until a node is taken for lost by this trainer's rule "
        f"({MISSED_BEATS} beats, of {beat_seconds(2048):.1f} s at 2,048 nodes); until a rank is "
        f"taken for hung by the watchdog's ({TIMEOUT_FACTOR} steps)."
    )
    _say(
        f"Assumed: Llama-3.1-405B, {BYTES_PER_PARAMETER} bytes a parameter; steps of "
        f"{STEP_SECONDS:.0f} s; a replica on {REPLICA_NODES} nodes, with {REPLICA_SEQUENCES} "
        f"sequences a step; storage of {STORAGE_PER_GPU / 1e6:.0f} MB/s a GPU (the paper's 2 TB/s "
        f"for 16,384); {NODE_LINK / 1e9:.0f} GB/s from node to node; in every new process "
        f"{WARM_UP:.0f} s for CUDA and the first step's kernels; NCCL's groups "
        f"{communicators(2048):.0f} s at 2,048 GPUs, {communicators(16384):.0f} s at 16,384 "
        "(MegaScale, NSDI 2024, in proportion). What was measured with up to three nodes takes no "
        "longer with 2,048, except as above. Both systems have spares that take a lost node's "
        "place at once. Without spares whole replicas are away until enough nodes are mended, and "
        "the others do their sequences."
    )
    _say(
        "All save as elastic/record/reliability.py has it (SaveClock, from the failures seen so "
        f"far), except where `checkpoint.every` says otherwise. {days} days, {number} runs each: "
        "mean (least-most); points are the mean difference under the same failures, and its "
        "standard deviation. All lines: checkpoint.every: auto, checkpoint.slots: 2, "
        "checkpoint.peer_copy: true, elastic.snapshot_every: 0, elastic.recovery: in_place, more "
        "nodes than the MAX of --nnodes, and notices."
    )


if __name__ == "__main__":
    main()
