"""`perdure chaos`: runs a recipe under a plan of faults, and again undisturbed in one process; the
verdict says whether losses and final weights agree."""

import json
import math
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpointing.errors import CheckpointError
from checkpointing.format.layout import LayoutTensor
from checkpointing.format.tensors import TORCH_DTYPES
from checkpointing.storage.folders import run_id
from checkpointing.storage.place import location
from checkpointing.storage.source import StorageTensorReader, open_source
from checkpointing.tools.inspect import find_checkpoint, table
from elastic.process import remaining
from elastic.record.history import LedgerError, read_history
from elastic.record.ledger import LEDGER
from elastic.record.lines import read_record
from elastic.record.reliability import goodput
from lab import container
from lab.chaos.causes import CauseCheck, check_names
from lab.chaos.faults import (
    MARK,
    POISON,
    FaultInjector,
    FaultOutcome,
    left_memory,
    processes_with,
)
from lab.chaos.plan import Fault, FaultPlan
from lab.local_nodes import Launch, LocalNodes, start_python
from trainer.parallel.mesh import replica_ranks
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.sections import StrategySection
from trainer.recipe.strategies import MODEL_PARALLEL
from trainer.run.preflight import check_launch
from trainer.tools.report.report import check, read_metrics

NODE = ("trainer.cli", "train")
GONE_SECONDS = 5.0
ALONE = tuple(
    f"strategy.{key}={json.dumps(getattr(StrategySection(), key))}"
    for module in MODEL_PARALLEL
    for key in module.KEYS
)
"""Overrides that remove model parallelism, for the undisturbed run in one process."""


@dataclass
class ChaosVerdict:
    """Results of a run with faults, and the promises that it broke."""

    outcomes: list[FaultOutcome]
    problems: list[str]
    """Broken promises; empty: the run passed."""
    facts: list[str] = field(default_factory=list)
    named: CauseCheck = field(default_factory=lambda: CauseCheck(0, []))
    """Comparison of the causes in the ledger with the injected faults."""

    def __str__(self) -> str:
        rows = [["fault", "target", "at step", "recovery", "steps lost"]]
        rows += [
            [
                f"{outcome.fault}{' (not met)' if outcome.missed else ''}",
                outcome.target,
                str(outcome.step),
                "-" if outcome.recovery is None else f"{outcome.recovery:.2f} s",
                str(outcome.lost),
            ]
            for outcome in self.outcomes
        ]
        lines = [
            table(rows),
            *self.facts,
            str(self.named),
            *(f"problem: {problem}" for problem in self.problems),
        ]
        broken = f"FAILED: {len(self.problems)} problem(s)"
        return "\n".join([*lines, broken if self.problems else "PASSED"])


def run_chaos(
    recipe_path: str,
    overrides: Sequence[str],
    plan: FaultPlan,
    *,
    ranks: int = 1,
    tolerance: float,
    patience: float = 60.0,
    within: float | None = None,
    environment: dict[str, str] | None = None,
    start: Launch = start_python,
) -> ChaosVerdict:
    """Run a recipe under a plan of faults, and compare it with an undisturbed run. All files are in
    `<run.dir>-chaos`: the run directories `undisturbed` and `run`, and `logs`.

    Args:
        recipe_path: YAML file.
        overrides: overrides of the recipe, for both runs.
        plan: the plan, whose random faults are drawn.
        ranks: training processes per node.
        tolerance: largest relative difference of a loss, and of a tensor of the final weights.
        patience: seconds without a new step after which the run counts as stuck.
        within: most seconds without a new step with which the run still passes; None: no limit.
        environment: added to this process's environment for all started processes.
        start: starts the undisturbed run, the store and the agents.

    Raises:
        RecipeError: the recipe is wrong, `<run.dir>-chaos` exists, the run is too short for the
            plan, or a node does not hold whole replicas.
    """
    recipe = load_recipe(recipe_path, overrides)
    if recipe.in_bucket:
        raise RecipeError("run.dir: is in a bucket; set a directory that all nodes share")
    folder = Path(f"{recipe.run.dir}-chaos").absolute()
    if folder.exists():
        raise RecipeError(f"{folder}: already exists; delete it, or set another run.dir")
    if recipe.run.epochs:
        raise RecipeError("run.epochs: faults are planned by step; set run.steps=N run.epochs=0")
    if plan.last_step >= recipe.run.steps:
        raise RecipeError(
            f"run.steps: the last fault comes at step {plan.last_step}, but the run has only "
            f"{recipe.run.steps}; raise it, or plan fewer faults"
        )
    if ranks % (replica := replica_ranks(recipe)):
        raise RecipeError(
            f"--nproc-per-node: a replica of the model takes {replica} ranks, and a node has "
            f"{ranks}; give it a multiple of {replica}"
        )
    logs, mark = folder / "logs", secrets.token_hex(8)
    # All nodes share this machine, and NCCL refuses two ranks on one GPU.
    shared = [*overrides, "run.device=cpu", "run.log_every=1", "checkpoint.directory=null"]

    def of(name: str) -> list[str]:
        return [recipe_path, *shared, f"run.dir={folder / name}"]

    check_launch(load_recipe(recipe_path, [*of("undisturbed")[1:], *ALONE]), 1, 1)
    logs.mkdir(parents=True)
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **(environment or {}), MARK: mark}
    preload = "trainer.run.worker,lab.chaos.poison"
    environment |= {POISON: str(logs), "PERDURE_PRELOAD": preload}
    print(f"undisturbed run of {recipe.run.steps} steps in one process")
    # only its final checkpoint is compared
    quiet = ["checkpoint.every=0", "elastic.snapshot_every=0"]
    log = logs / "undisturbed.log"
    _undisturbed(start, [*of("undisturbed"), *quiet, *ALONE], log, environment)

    run, began = folder / "run", time.time()
    checkpoints = run / "checkpoints"
    with LocalNodes(
        of("run"),
        folder=Path.cwd(),
        nnodes=f"{min(plan.counts)}:{max(plan.counts)}",
        logs=logs,
        ranks=ranks,
        environment=environment,
        launcher=NODE,
        own_memory=container.possible(),
        own_network=container.network_possible(),
        start=start,
    ) as nodes:
        if not nodes.own_memory:
            print("not root: all nodes share the memory of this machine")
        chaos = FaultInjector(
            nodes,
            plan,
            run / LEDGER,
            saving=lambda: any(checkpoints.glob("step-*.tmp-*")),
            patience=patience,
        )
        chaos.run()
        nodes.kill_store()
        verdict = ChaosVerdict(chaos.outcomes, chaos.problems)
        seconds, step = chaos.longest
        text = f"no new step for {seconds:.1f} s at most, after step {step}"
        if within is not None and seconds > within:
            verdict.problems.append(f"{text}; {within:g} s are allowed")
        else:
            verdict.facts.append(text)
        if not chaos.problems:
            left = remaining(lambda: processes_with(MARK, mark), GONE_SECONDS)
            verdict.problems += [f"a process remains: {process}" for process in left]
            pattern = f"perdure-{run_id(str(location(checkpoints).absolute()))}-*"
            left = left_memory(chaos.finished, pattern)
            verdict.problems += [f"shared memory remains: {item}" for item in left]
    with suppress(LedgerError):  # `judge` reports a damaged ledger
        wall = time.time() - time.monotonic()
        faults = [(outcome.fault, outcome.at + wall) for outcome in chaos.outcomes]
        # the initial nodes join one after another, which may end an attempt
        faults.append((Fault(what="join"), began))
        verdict.named = check_names(read_history(run), faults)
    facts, problems = judge(run, folder / "undisturbed", recipe.run.steps, tolerance)
    verdict.facts += [_cost(chaos.outcomes), *facts]
    verdict.problems += problems
    return verdict


def judge(
    run: Path, undisturbed: Path, steps: int, tolerance: float
) -> tuple[list[str], list[str]]:
    """Compare a run with an undisturbed run of the same recipe.

    Args:
        run, undisturbed: run directories.
        steps: number of steps of both runs.
        tolerance: see `run_chaos`.

    Returns:
        Lines about promises that were kept, and lines about problems.
    """
    try:
        history = read_history(run)
    except LedgerError as error:
        return [], [str(error)]
    account = goodput(history)
    facts = [f"goodput {account.share_of_uptime:.1%} of {account.wall:.1f} s"]
    problems: list[str] = []
    fine, text = check(history)
    (facts if fine else problems).append(text)
    if history.step != steps:
        problems.append(f"the run ended at step {history.step} of {steps}")
    loss, step = _worst_loss(run, undisturbed)
    text = f"largest relative difference of a loss: {loss:.1e}, of step {step}"
    (facts if loss <= tolerance else problems).append(text)
    try:
        difference, name = _worst_weight(run, undisturbed)
        text = f"largest relative difference of a weight tensor: {difference:.1e}, of {name}"
        (facts if difference <= tolerance else problems).append(text)
    except CheckpointError as error:
        problems.append(str(error))
    return facts, problems


def _cost(outcomes: Sequence[FaultOutcome]) -> str:
    times = sorted(item.recovery for item in outcomes if item.recovery is not None)
    text = f"{len(outcomes)} fault(s), {sum(item.lost for item in outcomes)} step(s) done again"
    if times:
        text += f", recovery {times[len(times) // 2]:.2f} s (median), at most {times[-1]:.2f} s"
    return text


def _undisturbed(
    start: Launch, arguments: Sequence[str], log: Path, environment: dict[str, str]
) -> None:
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    code = start(["trainer", *arguments], Path.cwd(), everything, log).wait()
    if code:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RecipeError(f"the undisturbed run failed ({log}): {' '.join(last)}")


def _worst_loss(run: Path, undisturbed: Path) -> tuple[float, int]:
    """Return the largest relative difference of a loss, and its step. All records of a repeated
    step are compared: the first computation must be right, too."""
    expected = {item["step"]: item["loss"] for item in read_metrics(undisturbed) if "loss" in item}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(read_record, lines) if record]
    found = [(item["step"], item["loss"]) for item in records if "loss" in item]
    missing = expected.keys() - {item["step"] for item in read_metrics(run) if "loss" in item}
    if missing:
        return math.inf, min(missing)
    errors = [(abs(loss / expected.get(step, math.nan) - 1), step) for step, loss in found]
    return max((math.inf if math.isnan(error) else error, step) for error, step in errors)


def _worst_weight(run: Path, undisturbed: Path) -> tuple[float, str]:
    """Largest ‖a - b‖ / ‖b‖ over the tensors of the final weights, and the tensor's name."""
    worst = (0.0, "none")
    with (
        open_source(find_checkpoint(run)) as ours,
        open_source(find_checkpoint(undisturbed)) as theirs,
        StorageTensorReader(ours.path, ours.records) as reader,
        StorageTensorReader(theirs.path, theirs.records) as other,
    ):
        different = ours.model.keys() ^ theirs.model.keys()
        if different:
            return math.inf, min(different)
        for name, stored in theirs.model.items():
            expected = _read(other, stored)
            error = (_read(reader, ours.model[name]) - expected).norm() / expected.norm()
            worst = max(worst, (error.nan_to_num(torch.inf).item(), name))
    return worst


def _read(reader: StorageTensorReader, stored: LayoutTensor) -> torch.Tensor:
    data = torch.empty(stored.meta.nbytes, dtype=torch.uint8)
    reader.read(stored, 0, data.numpy().data)
    return data.view(TORCH_DTYPES[stored.meta.dtype]).double()
