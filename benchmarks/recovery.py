"""What faults cost a run: this trainer against torchrun with torch.distributed.checkpoint.

The same small FSDP job, with the same decoder and batch, runs on nodes that are agents on this
machine, one rank each: under stock torchrun with default flags, under stock torchrun tuned by hand,
and under Perdure. Each fault is done to a job that trains; what it costs is read from what rank 0
prints. `--macs 1` also counts MACs and checks, and what they cost.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import trainer
from benchmarks.peers.stock_elastic import Task
from benchmarks.support import (
    ROOT,
    arguments,
    heading,
    macs,
    print_table,
    python_path,
    spread,
    write_json,
)
from benchmarks.support.elastic_job import Job, Recovery
from benchmarks.support.faults import SCENARIOS, Scenario, join
from checkpointing.storage.folders import run_id
from elastic.group.job_secret import SECRET_FILE, make_secret, read_secret
from elastic.group.sealed import key_prefix
from lab.local_nodes import LocalNodes
from trainer.data.prepare.prepare import prepare

TITLE = "Recovery from faults: this trainer, torchrun with DCP"
LEGEND = """\
Fault to next step: seconds until a step is done by those who go on, that had been done before or
not. Median (min-max).
Fault to first new step: the same, until a step is done that had not been done before. For a join:
since the new agent has registered, and since its launch.
Steps redone: steps done a second time, because the state they led to was lost. Faults come 1, 3, 5,
7 and 9 steps after a checkpoint, of which there is one every 10 steps.
Recovered: of the faults that were done. After one that cost more than --patience seconds, or once
they cost that much together (peers only), no more of the kind are done.

Stock    torchrun --rdzv-backend c10d with default flags, except that restarts are unlimited; the
         first node hosts the store
Tuned    the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, last_call_timeout=1,
         keep_alive_interval=1, keep_alive_max_attempt=3, process group timeout 10 s, and the store
         outside of the nodes (at 2 attempts, an agent that sat through a last call takes itself for
         dead and stops its heartbeats; the next node to join then begins a second world)
Perdure  torchrun --rdzv-backend perdure, the store outside of the nodes; a snapshot in memory every
         step, and a copy of it on the next node. The memory of a node that is killed is deleted.
         The ranks that are left go on in place, with the state that they have
Rebuild  the same with elastic.recovery=rebuild: they build model and optimizer anew, and load them
Refork   the same with elastic.recovery=refork: all ranks are forked anew

worker   kill -9 of one rank; 2 nodes          node   kill -9 of all of a node without rank 0; of 2
four     kill -9 of one rank of four; 1 node; at moments spread evenly over a step
join     a node joins; from 1 to 2             first  the same, with rank 0 (Stock: and the store);
join 3   the same; from 2 to 3                        of 3
notice   SIGTERM to an agent; of 2 nodes       hang   SIGSTOP of a rank; 2 nodes
store    kill -9 of the store's host, which comes back after 1 s; 1 s later kill -9 of one rank,
         from which is counted. Stock: kill -9 of the node that hosts it
tp, pp   as node, with TP2 on each of 2 nodes, and PP2 over 4 nodes: DP2, DP1, and DP2 again"""

SAVE_EVERY = 10
STEADY_SECONDS = 1.0
"""Before each fault: so long the steps are free of what the fault before has caused."""
STEPS = 1_000_000
ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
SEQ_LEN, GLOBAL_BATCH = 128, 12
RECIPE = {
    "run": {"dir": "run", "steps": STEPS, "log_every": 1, "device": "cpu"},
    "model": {"architecture": ARCHITECTURE},
    "data": {"sources": [{"path": "data"}], "seq_len": SEQ_LEN, "validation_sequences": 1},
    "batch": {"global_batch": GLOBAL_BATCH, "micro_batch": GLOBAL_BATCH},
    "optimizer": {"lr": 3e-4},
    "schedule": {"name": "constant"},
    "precision": {"dtype": "fp32"},
    "checkpoint": {"every": SAVE_EVERY, "slots": 2, "peer_copy": True},
}


@dataclass(frozen=True)
class System:
    """One of those that are compared."""

    title: str
    backend: str
    register: str
    """Key of the store under which nodes register; ours depends on the job's secret."""
    store_outside: bool = True
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 0.0
    """Seconds that a collective may take; 0: torch's default."""
    hang_limit: float = 60.0
    """Seconds to wait for the end of a hang."""
    recovery: str = "in_place"
    """elastic.recovery, where it is Perdure."""

    @property
    def ours(self) -> bool:
        """Whether this is Perdure."""
        return self.backend == "perdure"

    def job(self, folder: Path, scenario: Scenario) -> Job:
        """A job of nodes that a fault is done to, which leaves its files in `folder`."""
        folder.mkdir()
        task = Task(
            architecture=ARCHITECTURE,
            seq_len=SEQ_LEN,
            global_batch=GLOBAL_BATCH,
            steps=STEPS,
            save_every=SAVE_EVERY,
            directory=str(folder / "checkpoints"),
            timeout=self.timeout,
        )
        secret = folder / ".secret"
        make_secret(secret)
        register = self.register or f"{key_prefix('local', read_secret(secret))}/state"
        peer = str(ROOT / "benchmarks/peers/stock_elastic.py")
        (folder / "data").symlink_to(folder.parent / "data")
        recipe = {**RECIPE, "elastic": {"snapshot_every": 1, "recovery": self.recovery}}
        if scenario.strategy:
            batch = {"global_batch": GLOBAL_BATCH, "micro_batch": GLOBAL_BATCH // 4}
            recipe |= {"strategy": dict(scenario.strategy), "batch": batch}
        (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
        nodes = LocalNodes(
            ["-m", "trainer", "recipe.yaml"] if self.ours else [peer, json.dumps(asdict(task))],
            folder=folder,
            nnodes=f"1:{scenario.nodes}",
            logs=folder,
            ranks=scenario.node_ranks,
            environment={
                "PYTHONPATH": python_path(ROOT),
                "TMPDIR": str(folder.parent),
                SECRET_FILE: str(secret),
                **self.environment,
            },
            options=self.options,
            backend=self.backend,
            store_outside=self.store_outside,
        )
        memory = f"perdure-{run_id(str(folder / 'run/checkpoints'))}-{{pid}}-*"
        run = folder / "run"
        return Job(
            nodes,
            register=register,
            memory=memory if self.ours else "",
            ledger=run / "ledger.jsonl" if self.ours else None,
        )


SYSTEMS = {
    "stock": System(
        "Stock", "c10d", "torch.rendezvous.local", store_outside=False, hang_limit=20.0
    ),
    "tuned": System(
        "Tuned",
        "c10d",
        "torch.rendezvous.local",
        options=(
            "--rdzv-conf",
            "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
        ),
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        timeout=10.0,
    ),
    "perdure": System("Perdure", "perdure", "", hang_limit=30.0),
    "rebuild": System("Rebuild", "perdure", "", hang_limit=30.0, recovery="rebuild"),
    "refork": System("Refork", "perdure", "", hang_limit=30.0, recovery="refork"),
}


# --- the course of it ------------------------------------------------------------------------


def main() -> None:
    description = (__doc__ or "").partition("\n\n")[0]
    options = arguments(
        description,
        faults=5,
        limit=60,
        patience=30,
        systems=",".join(SYSTEMS),
        scenarios=",".join(SCENARIOS),
        logs="",
        macs=0,
    )
    heading(TITLE)
    print(LEGEND)
    print(f"\nLoad of this machine before: {os.getloadavg()[0]:.1f}")
    figures: dict[str, dict[str, list[Recovery]]] = {}
    begun = time.monotonic()
    spans: list[macs.Span] = []
    with TemporaryDirectory(prefix="perdure-bench-") as scratch, ExitStack() as at_end:
        notes = at_end.enter_context(macs.noted()) if options.macs else None
        if options.logs:  # what the nodes printed
            ignore = shutil.ignore_patterns("checkpoints", "data", "corpus", "torchelastic*")
            at_end.callback(
                shutil.copytree, scratch, options.logs, ignore=ignore, dirs_exist_ok=True
            )
        _prepare_data(Path(scratch))
        for system in options.systems.split(","):
            figures[system] = {}
            for scenario in options.scenarios.split(","):
                if SCENARIOS[scenario].strategy and not SYSTEMS[system].ours:
                    continue
                found = _run(SYSTEMS[system], scenario, options, Path(scratch), spans)
                for kind, recoveries in found.items():
                    figures[system].setdefault(kind, []).extend(recoveries)
        if notes:
            macs.show(notes, spans)
    print(f"\n{time.monotonic() - begun:.0f} s in all\n")
    _print(figures)
    write_json(
        TITLE,
        {s: {k: [asdict(r) for r in rs] for k, rs in of.items()} for s, of in figures.items()},
        options.json,
    )


def _prepare_data(scratch: Path) -> None:
    """This repository's own texts, as bytes."""
    corpus = scratch / "corpus"
    corpus.mkdir()
    for number, path in enumerate(sorted(Path(trainer.__file__).parent.rglob("*.py"))):
        (corpus / f"{number:03}.txt").write_text(path.read_text(encoding="utf-8"))
    prepare([str(corpus)], scratch / "data", tokenizer="bytes", validation_fraction=0.1)


def _run(
    system: System,
    name: str,
    options: argparse.Namespace,
    scratch: Path,
    spans: list[macs.Span],
) -> dict[str, list[Recovery]]:
    """Faults of one kind → what each cost, by kind (joins are a kind of their own); notes when
    there was a recovery, and when there was none."""
    scenario = SCENARIOS[name]
    found: dict[str, list[Recovery]] = {}
    limit = system.hang_limit if name == "hang" else float(options.limit)
    spent = 0.0
    with ExitStack() as stack:
        job: Job | None = None
        for number in range(options.faults):
            if job is None:
                folder = scratch / f"{system.title}-{name}-{number}"
                job = stack.enter_context(system.job(folder, scenario))
                failure = job.start(scenario.nodes, scenario.node_ranks)
                if failure:
                    _note(found, name, Recovery(None, failure=f"at the start: {failure}"), system)
                    break
            recoveries = _one(job, name, number, limit)
            for kind, recovery in recoveries.items():
                if options.macs and recovery.seconds is not None:
                    spans += _spans(job, kind, recovery)
                _note(found, kind, recovery, system)
            cost = sum(recovery.waited for recovery in recoveries.values())
            spent += cost
            if cost > options.patience or (not system.ours and spent > options.patience):
                break
            if any(recovery.failure for recovery in recoveries.values()):
                stack.close()  # the next fault needs a job of its own
                job = None
    return found


def _spans(job: Job, kind: str, recovery: Recovery) -> list[macs.Span]:
    """A recovery, and the steps of the seconds before."""
    end = recovery.at + (recovery.seconds or 0.0)
    steps = [at for at in job.step_times if recovery.at - STEADY_SECONDS < at < recovery.at]
    return [
        macs.Span(f"recovery from {kind}", recovery.at, end),
        macs.Span("steps", steps[0], steps[-1], len(steps) - 1),
    ]


def _one(job: Job, name: str, number: int, limit: float) -> dict[str, Recovery]:
    """One fault, and the return of the node that it took."""
    scenario, after_save = SCENARIOS[name], (1 + 2 * number) % SAVE_EVERY
    ranks = scenario.nodes * scenario.node_ranks
    job.steady(ranks, limit, after_save, SAVE_EVERY)
    recoveries = {name: scenario.fault(job, number, limit)}
    left = ranks - (scenario.taken or scenario.node_ranks if scenario.rejoin else 0)
    if recoveries[name].failure:
        return recoveries
    failure = job.steady(left, limit, after_save, SAVE_EVERY)
    if failure:
        recoveries[name] = replace(recoveries[name], seconds=None, failure=f"then: {failure}")
    elif scenario.rejoin:
        recovery = join(job, number, limit)
        if not recovery.failure:
            failure = job.steady(ranks, limit, after_save, SAVE_EVERY)
            if failure:
                recovery = replace(recovery, seconds=None, failure=f"then: {failure}")
        recoveries[scenario.rejoin] = recovery
    return recoveries


def _note(found: dict[str, list[Recovery]], kind: str, recovery: Recovery, system: System) -> None:
    found.setdefault(kind, []).append(recovery)
    seconds = "" if recovery.seconds is None else f"{recovery.seconds:.2f} s, "
    result = recovery.failure or f"{recovery.redone} steps redone; {_split([recovery])}"
    print(f"{system.title}, {kind}: {seconds}{result}", file=sys.stderr, flush=True)


# --- tables ----------------------------------------------------------------------------------


def _print(figures: Mapping[str, Mapping[str, Sequence[Recovery]]]) -> None:
    kinds = list(dict.fromkeys(kind for of in figures.values() for kind in of))
    rows, splits = [], []
    for kind in kinds:
        medians = {}
        for system, of_system in figures.items():
            recoveries = of_system.get(kind)
            if not recoveries:
                continue
            good = [recovery for recovery in recoveries if not recovery.failure]
            seconds = [recovery.seconds for recovery in good if recovery.seconds is not None]
            to_next = [r.seconds - r.phases["redone steps"] for r in good if r.seconds is not None]
            if seconds:
                medians[system] = median(seconds)
            failures = dict.fromkeys(recovery.failure for recovery in recoveries)
            rows.append(
                {
                    "fault": kind,
                    "system": SYSTEMS[system].title,
                    "recovered": f"{len(good)} of {len(recoveries)}",
                    "fault to next step, s": spread(to_next) if to_next else "never",
                    "fault to first new step, s": spread(seconds) if seconds else "never",
                    "steps redone": spread([r.redone for r in good], 0) if good else "",
                    "of stock's time": _ratio(medians, system, "stock"),
                    "of tuned's time": _ratio(medians, system, "tuned"),
                    "otherwise": "; ".join(failure for failure in failures if failure),
                }
            )
            if good:
                splits.append(f"{kind:7} {SYSTEMS[system].title:8} {_split(good)}")
    print_table(rows)
    print("\nWhere the time went, medians in seconds\n")
    print("\n".join(splits))


def _ratio(medians: Mapping[str, float], system: str, peer: str) -> str:
    if system == peer or not {system, peer} <= medians.keys():
        return ""
    return f"{medians[system] / medians[peer]:.3f}"


def _split(recoveries: Sequence[Recovery]) -> str:
    """Medians of the phases that take long enough to be seen, and of other figures."""
    parts = []
    for name in dict.fromkeys(name for r in recoveries for name in (*r.phases, *r.more)):
        values = [{**r.phases, **r.more}.get(name, 0.0) for r in recoveries]
        if median(values) >= 0.005:
            parts.append(f"{name} {median(values):.2f}")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
