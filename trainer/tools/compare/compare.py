"""`perdure compare`: trains a recipe for a few steps under each strategy, one after another, and
measures what each costs. Each name of a strategy becomes a recipe that trains with it.

[Note: steps of a comparison] A run has four kinds of steps, in this order: warm-up, timed, after
the save, traced. Speed is measured over the timed steps. A checkpoint begins after the last timed
step, and the steps after the save show its cost. The traced steps come last, because torch's
profiler (trainer/run/profile.py) slows them down.
"""

import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from checkpointing.storage.folders import collect_memory
from checkpointing.storage.place import location
from elastic.record.attempt import LedgerStepLine
from elastic.record.history import LedgerError, read_history
from trainer.plan import predict
from trainer.recipe import Recipe, RecipeError, StrategySection, load_recipe
from trainer.recipe.strategies import dividing, sizes
from trainer.run.preflight import check_inputs, check_optimizer
from trainer.run.profile import RunProfileRecord, read_records
from trainer.tasks.task import Task, build_task
from trainer.tools.report.report import read_metrics
from trainer.tools.torchrun import run_ranks

WARM_UP, AFTER_SAVE, MEASURED = 5, 4, 3
"""Numbers of warm-up, after-save and traced steps; see [Note: steps of a comparison]."""
LOG_EVERY = 5

_FSDP = "strategy.name=fsdp"
BASES: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy.name=ddp", "strategy.sharding=null"),
    "zero1": (_FSDP, "strategy.sharding=OPTIMIZER_STATE"),
    "zero2": (_FSDP, "strategy.sharding=SHARD_GRAD_OP"),
    "zero3": (_FSDP, "strategy.sharding=FULL_SHARD"),
    "hybrid": (_FSDP, "strategy.sharding=HYBRID_SHARD"),
    "no_shard": (_FSDP, "strategy.sharding=NO_SHARD"),
}
MODIFIERS: dict[str, tuple[str, ...]] = {
    "offload": ("strategy.offload=cpu",),
    "full_ac": ("strategy.activation_checkpointing=full",),
    "selective_ac": ("strategy.activation_checkpointing=selective",),
    "compile": ("strategy.compile=true",),
    "sp": ("strategy.sequence_parallel=true",),
    "gpipe": ("strategy.pp_schedule=gpipe",),
    "interleaved": ("strategy.pp_schedule=interleaved_1f1b", "strategy.pp_stages_per_rank=2"),
    "zero_bubble": ("strategy.pp_schedule=zero_bubble",),
}
SIZES = tuple(sizes(StrategySection()))
LAYOUT = re.compile(rf"({'|'.join(SIZES)})([1-9]\d*)")
"""Pattern of a modifier that sets how many ranks share a computation: tp2, pp4."""
LAYOUT_BASE = "zero2"
"""Base of a name that begins with a layout; ZeRO-2 gathers weights only once per step."""
_PLAIN = (
    "strategy.zero=null",
    "strategy.shard_size=null",
    "strategy.offload=none",
    "strategy.offload_directory=null",
    "strategy.activation_checkpointing=none",
    "strategy.sequence_parallel=false",
    "strategy.pp_schedule=1f1b",
    "strategy.pp_stages_per_rank=1",
    *(f"strategy.{key}=1" for key in SIZES),
)
DEFAULT = (
    *("ddp", "zero1", "zero2", "zero3", "hybrid", "zero2+offload", "zero3+offload"),
    *("ddp+full_ac", "zero3+selective_ac", "zero3+full_ac"),
)


@dataclass(frozen=True)
class ComparedStrategy:
    """A strategy, and the recipe that runs it."""

    name: str
    arguments: tuple[str, ...]
    """Recipe file and overrides."""
    recipe: Recipe | None
    problem: str = ""
    """Why the strategy cannot run; "" if it can."""


def candidate(
    name: str, recipe_path: str, overrides: Sequence[str], ranks: int, steps: int, run: Path
) -> ComparedStrategy:
    """Build the recipe of a named strategy for a number of ranks. A name is a key of BASES, with
    modifiers after "+": keys of MODIFIERS, or words that LAYOUT matches. Such a word may also come
    first. Raises RecipeError if the name is unknown, or the recipe is wrong."""
    words = name.split("+")
    base, modifiers = (words[0], words[1:]) if words[0] in BASES else (LAYOUT_BASE, words)
    layout = {m[1]: int(m[2]) for m in map(LAYOUT.fullmatch, modifiers) if m}
    known = all(word in MODIFIERS or LAYOUT.fullmatch(word) for word in modifiers)
    if not known or (words[0] != base and not LAYOUT.fullmatch(words[0])):
        raise RecipeError(
            f"--strategies: {name!r} is unknown; use one of {', '.join(BASES)}, or "
            f"{', '.join(f'{key}2' for key in SIZES)} (any number), and any of "
            f"{', '.join(f'+{key}2' for key in SIZES)}, +{', +'.join(MODIFIERS)} after it"
        )
    plain = load_recipe(recipe_path, overrides)
    strategy = [*BASES[base], *_PLAIN, *(f"strategy.{key}={size}" for key, size in layout.items())]
    strategy += [override for word in modifiers for override in MODIFIERS.get(word, ())]
    if base == "hybrid":
        cut = (module.KEYS[0] for module in dividing("layers", "stages"))
        together = math.prod(layout.get(key, 1) for key in cut)
        sharing = ranks // together
        size = next((size for size in range(sharing // 2, 1, -1) if sharing % size == 0), None)
        if size is None:
            why = (
                f"needs to divide the {sharing} rank(s) that can share parameters into several "
                f"groups of several ranks; use --nproc {4 * together}"
            )
            return ComparedStrategy(name, (), None, why)
        strategy.append(f"strategy.shard_size={size}")
    arguments = (recipe_path, *overrides, *_settings(plain, steps, run), *strategy)
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
    except RecipeError as error:
        why = re.sub(r"^override '[^']*': ", "", str(error), flags=re.MULTILINE)
        return ComparedStrategy(name, arguments, None, "; ".join(why.splitlines()))
    return ComparedStrategy(name, arguments, recipe)


def _settings(recipe: Recipe, steps: int, run: Path) -> list[str]:
    """Overrides that turn any recipe into a short run of its own."""
    save_at = WARM_UP + steps
    last = save_at + AFTER_SAVE + MEASURED
    settings = [f"run.dir={run}", f"run.steps={last}", "run.epochs=0", "run.samples=[]"]
    settings += [f"run.log_every={LOG_EVERY}", "run.evaluate_every=0", "run.stop_after=0"]
    profile = f"profile_steps: {MEASURED}, profile_after: {last - MEASURED}"
    settings += [f"tracking={{wandb: off, {profile}}}", "elastic.snapshot_every=0"]
    settings += ["checkpoint.directory=null", f"checkpoint.every={save_at}", "checkpoint.keep=1"]
    settings += [f"schedule.warmup_steps={min(recipe.schedule.warmup_steps, last - 1)}"]
    if recipe.schedule.name == "wsd":
        settings += ["schedule.name=constant", "schedule.decay_steps=0"]
    return settings


INTERRUPTED = "not measured: interrupted"
MEMORY = ("peak", "parameters", "gathered", "gradients", "optimizer_state", "host")
"""Bytes that both `ComparedOutcome` and `RunProfileRecord` have."""

# Largest relative difference of a loss, by dtype. In fp32 strategies only sum in different orders;
# the largest difference seen over 50 steps was 6e-7. In bf16 and fp16 FSDP casts all parameters,
# while autocast under DDP and ZeRO-1 leaves norms in float32; the largest difference seen over 32
# steps of the quickstart in bf16 was 9e-4.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}


@dataclass
class ComparedOutcome:
    """Measurements of one strategy, in bytes and seconds; memory is that of the rank with most."""

    name: str
    problem: str = ""
    """Why there are no figures; "" if there are."""
    failed: bool = False
    """Whether the run was started and failed."""
    step_seconds: list[float] = field(default_factory=list)
    """Duration of each timed step."""
    rate: float | None = None
    """Units consumed per second by all ranks, at the median step."""
    unit: str = "tokens"
    losses: dict[int, float] = field(default_factory=dict)
    """Step → loss, of the logged steps."""
    difference: float | None = None
    """Largest relative difference of a loss from the first strategy's."""
    ranks: list[RunProfileRecord] = field(default_factory=list)
    peak: int | None = None
    parameters: int | None = None
    gathered: int | None = None
    gradients: int | None = None
    optimizer_state: int | None = None
    host: int | None = None
    communication: float | None = None
    """Share of the time spent in communication, averaged over ranks."""
    bubble: float | None = None
    """Share of the timed steps in which a pipeline idled, from metrics.jsonl."""
    communication_bytes: float | None = None
    """Bytes that a rank sends per step, as `RunProfileRecord.sent`."""
    checkpoint_stall: float | None = None
    """Seconds of training that one checkpoint cost."""
    checkpoint_seconds: float | None = None
    checkpoint_bytes: int | None = None
    predicted: dict[str, Any] = field(default_factory=dict)
    """Fields of the plan's `Prediction`."""
    unplanned: str = ""
    """Why `predicted` is empty; "" if it is not."""

    def quantile(self, share: float) -> float | None:
        """Step duration nearest to a quantile."""
        if not self.step_seconds:
            return None
        ordered = sorted(self.step_seconds)
        return ordered[round(share * (len(ordered) - 1))]

    @property
    def final_loss(self) -> float | None:
        return self.losses[max(self.losses)] if self.losses else None


def run_comparison(
    recipe_path: str,
    overrides: Sequence[str],
    names: Sequence[str],
    *,
    ranks: int,
    steps: int,
    out: Path,
) -> list[ComparedOutcome]:
    """Run every strategy, and print a line for each. A strategy that cannot run has the reason as
    its problem. After Ctrl-C the problem of the remaining strategies is INTERRUPTED.

    Args:
        names: strategies, in the notation of `candidate`.
        ranks: number of ranks on this machine.
        steps: number of timed steps.
        out: folder to create, with `runs` and `logs`.

    Raises:
        RecipeError: the recipe is wrong, a name is unknown, no strategy can run, or `out` exists.
    """
    if out.exists():
        raise RecipeError(f"{out}: already exists; delete it, or choose another --out")
    strategies = [
        candidate(name, recipe_path, overrides, ranks, steps, out / "runs" / name) for name in names
    ]
    recipe = next((one.recipe for one in strategies if one.recipe), None)
    if recipe:
        task = build_task(recipe)
        unit = task.unit
        print(f"{task.name}: {task.sizes}", flush=True)
        strategies = [_checked(one, task, ranks) for one in strategies]
        del task  # a user's own model takes memory
    if not any(one.recipe for one in strategies):
        whose: dict[str, list[str]] = {}
        for one in strategies:
            whose.setdefault(one.problem, []).append(one.name)
        raise RecipeError("; ".join(f"{', '.join(of)}: {why}" for why, of in whose.items()))
    (out / "logs").mkdir(parents=True)
    outcomes: list[ComparedOutcome] = []
    for number, one in enumerate(strategies, 1):
        began = time.monotonic()
        try:
            outcome = _run(one, ranks, steps, out)
        except KeyboardInterrupt:
            left = strategies[number - 1 :]
            outcomes += [ComparedOutcome(one.name, INTERRUPTED) for one in left]
            break
        outcome.unit = unit
        outcomes.append(outcome)
        seconds = time.monotonic() - began
        text = outcome.problem or f"{outcome.rate:,.0f} {unit}/s"
        print(f"[{number}/{len(strategies)}] {one.name}: {text} ({seconds:.0f} s)", flush=True)
    compare_losses(outcomes)
    return outcomes


# --- running ---------------------------------------------------------------------------------


def _checked(one: ComparedStrategy, task: Task, ranks: int) -> ComparedStrategy:
    """Return the strategy, with the problem that prevents its run on `ranks` ranks, if any."""
    try:
        if one.recipe:
            check_inputs(one.recipe, task, 0, ranks, ranks)
            check_optimizer(one.recipe, task, ranks)
    except RecipeError as error:
        return replace(one, recipe=None, problem=str(error))
    return one


def _run(one: ComparedStrategy, ranks: int, steps: int, out: Path) -> ComparedOutcome:
    if one.recipe is None:
        return ComparedOutcome(one.name, f"cannot run: {one.problem}")
    run, log = out / "runs" / one.name, out / "logs" / f"{one.name}.log"
    try:
        if code := _launch(["-m", "trainer", *one.arguments], ranks, log, run):
            problem = f"failed: {_last_error(log, code)}; see {log}"
            return ComparedOutcome(one.name, problem, failed=True)
        outcome = _read_run(one.name, run, steps)
    except (LedgerError, OSError, KeyError) as error:
        problem = f"failed: left no figures: {error}; see {log}"
        return ComparedOutcome(one.name, problem, failed=True)
    try:
        outcome.predicted = asdict(predict(one.recipe, ranks, ranks))
    except RecipeError as error:  # a model that cannot be traced
        outcome.unplanned = str(error)
    return outcome


def _last_error(log: Path, code: int) -> str:
    """Last error that a rank printed; the launcher's own message has no cause."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?(error|[\w.]*Error): ", line)]
    errors = [line for line in errors if "ChildFailedError" not in line]
    return errors[-1] if errors else f"exit code {code}"


def _launch(worker: Sequence[str], ranks: int, log: Path, run: Path) -> int:
    """Run `worker` on `ranks` ranks under torchrun, then delete the run's checkpoints on disk and
    in memory. Returns torchrun's exit code."""
    try:
        with log.open("wb") as output:
            return run_ranks(worker, ranks, output=output)
    finally:
        # frees disk and the checkpoints in memory for the next strategies
        checkpoints = run / "checkpoints"
        collect_memory(str(location(str(checkpoints)).absolute()))
        shutil.rmtree(checkpoints, ignore_errors=True)


# --- reading ---------------------------------------------------------------------------------


def _read_run(name: str, run: Path, steps: int) -> ComparedOutcome:
    """Read the figures of a strategy's run. Raises LedgerError or KeyError if the run's records are
    incomplete."""
    by_number = {step.step: step for step in read_history(run).attempts[-1].steps}
    save_at = WARM_UP + steps
    timed = [by_number[number].seconds for number in range(WARM_UP + 1, save_at + 1)]
    records = read_metrics(run)
    logged = [record for record in records if "loss" in record]
    # metrics.jsonl has null for a loss that is not finite
    losses = {r["step"]: math.inf if r["loss"] is None else r["loss"] for r in logged}
    tokens_per_step = logged[-1]["tokens"] / logged[-1]["step"]
    saves = [record for record in records if record.get("checkpoint_step") == save_at]
    ranks = read_records(run)
    # without the first record, whose interval includes warm-up
    bubbles = [record["bubble"] for record in logged if "bubble" in record][1:]
    most: dict[str, Any] = {
        kind: max((getattr(record, kind) for record in ranks), default=None)
        for kind in (*MEMORY, "sent")
    }
    return ComparedOutcome(
        name,
        step_seconds=timed,
        rate=tokens_per_step / median(timed),
        losses=losses,
        ranks=ranks,
        communication=mean(record.communication for record in ranks) if ranks else None,
        bubble=median(bubbles) if bubbles else None,
        communication_bytes=most.pop("sent"),
        **most,
        checkpoint_stall=stall(by_number, save_at, median(timed)),
        checkpoint_seconds=saves[0]["checkpoint_seconds"] if saves else None,
        checkpoint_bytes=saves[0].get("checkpoint_bytes") if saves else None,
    )


def stall(steps: Mapping[int, LedgerStepLine], save_at: int, usual: float) -> float:
    """Seconds of training that a checkpoint after step `save_at` cost: the longer pause before the
    next step, and the slowdown of later steps from their `usual` seconds."""

    def pause_after(number: int) -> float:
        return steps[number + 1].after - steps[number + 1].seconds - steps[number].after

    # data and logging take time between steps even without a save
    usual_pause = median(pause_after(number) for number in range(WARM_UP + 1, save_at))
    # the save runs beside these steps and slows them down
    following = range(save_at + 1, save_at + AFTER_SAVE + 1)
    slower = sum(steps[number].seconds - usual for number in following)
    return max(0.0, pause_after(save_at) - usual_pause) + max(0.0, slower)


# --- judging ---------------------------------------------------------------------------------


def compare_losses(outcomes: Sequence[ComparedOutcome]) -> None:
    """Set `difference` of each outcome: the largest relative difference of its losses from those of
    the first outcome with losses, over the steps of both; unchanged if they have none in common."""
    reference = next((one.losses for one in outcomes if one.losses), {})
    for one in outcomes:
        common = one.losses.keys() & reference.keys()
        if common:
            one.difference = max(
                abs(one.losses[step] - reference[step]) / abs(reference[step]) for step in common
            )


def problems(outcomes: Sequence[ComparedOutcome], tolerance: float) -> list[str]:
    """Sentences about failed strategies, and about losses that differ by more than `tolerance`."""
    sentences = [f"{one.name}: {one.problem}" for one in outcomes if one.failed]
    first = next((one.name for one in outcomes if one.losses), "")
    sentences += [
        f"{one.name}: a loss differs from that of {first} by {one.difference:.1e}, "
        f"more than {tolerance:.0e}"
        for one in outcomes
        if one.difference is not None and not one.difference <= tolerance  # also for NaN
    ]
    return sentences
