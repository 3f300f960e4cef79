"""One record per log interval → console and metrics.jsonl, where trackers.py finds it; one line per
step → the ledger.

Units: seconds, bytes, tokens; `tokens_per_second` counts target tokens over all ranks.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from checkpointing import SaveOutcome
from checkpointing.storage.ownership import Trusted
from elastic import LEDGER, Ledger, StartLine
from elastic.node.companion import accompany
from elastic.node.files import open_to_append, open_to_read, write_whole
from elastic.process import lost_output
from elastic.record.ledger import clock
from elastic.record.lines import Lines, read_record
from trainer.recipe import Recipe
from trainer.recipe.sections import Tracking
from trainer.run.shipping import Shipper
from trainer.run.sinks import wandb_mode
from trainer.run.trackers import METRICS

logger = logging.getLogger(__name__)


LEAST_FIRST = [
    "memory",
    "data_wait",
    "step_seconds",
    "bubble",
    "lr",
    "mfu",
    "grad_norm",
    "eta",
    "speed",
]
"""Parts of a step's line in the order in which a narrow terminal loses them."""


class Startup:
    """Where the time from launch to the first optimizer step goes, in named parts."""

    def __init__(self, *, again: bool = False) -> None:
        """`again`: this process was recalled for it just now."""
        launched = float(os.environ.get("PERDURE_LAUNCHED_AT", "0"))
        self.again = again
        born = time.time() if again else _process_start()
        self.parts: dict[str, float] = {}
        if launched:
            self.parts["launcher"] = born - launched
        self._last = born

    def mark(self, part: str) -> None:
        """The time since the last mark went to `part`."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        shown = {name: f"{seconds:.1f}" for name, seconds in self.parts.items()}
        parts = ", ".join(
            f"{name} {seconds}" for name, seconds in shown.items() if seconds != "0.0"
        )
        return f"first step after {sum(self.parts.values()):.1f} s: {parts}"


def _process_start() -> float:
    """When this process was started, in seconds since the epoch (Linux; elsewhere: now)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.time() - (clock() - ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:
        return time.time()


class Log:
    """What a run tells: on the console, in metrics.jsonl, which trackers follow, and in the ledger.
    It is there on every rank, and silent on all but the first. A context manager.

    Args:
        recipe: of the run.
        start: what this attempt begins with. Records of later steps are dropped, because the steps
            they describe are computed again; the ledger keeps them.
        unwritten: lines of the ledger that came with the state that was loaded.
        shipper: stores the lines of a run in a bucket; None: `run.dir` is a directory.
        silent: this is not the first rank.
    """

    def __init__(
        self,
        recipe: Recipe,
        start: StartLine,
        unwritten: Sequence[str] = (),
        shipper: Shipper | None = None,
        *,
        silent: bool,
    ) -> None:
        self.silent, self._shipper = silent, shipper
        if silent:
            return
        run_dir = recipe.directory
        trusted = Trusted(tuple(recipe.checkpoint.trust), run_dir)
        also = shipper.add if shipper else None
        self._ledger = Ledger(run_dir / LEDGER, start, unwritten, trusted, also)
        records = run_dir / METRICS
        self._latest = 0.0
        """Time of the last record. Trackers tell what is new by it, also after a restart on a
        machine whose clock is behind."""
        try:
            os.close(open_to_append(records, trusted))
            self._latest = keep_records(records, start.step)
        except OSError as error:  # a full disk must not keep a run from going on
            print(f"warning: {records} keeps records of steps that are done again: {error}")
        self._records = Lines(records, trusted=trusted)
        self._told_mute = False
        """The ledger knows that output is dropped."""
        self._bar = tqdm(
            total=recipe.run.steps,
            initial=start.step,
            unit="step",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            leave=False,
        )
        if note := wandb_note(recipe.tracking):
            self.say(note)
        self._end_trackers = [
            accompany(["trainer.run.trackers", str(run_dir.absolute()), *words])
            for words in _trackers(recipe.tracking)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.silent:
            return
        self._ledger.__exit__(*error)
        self._bar.close()
        self._records.close()
        for end in self._end_trackers:
            end()

    @property
    def unwritten(self) -> list[str]:
        """Lines of the ledger that are not written yet; empty where this is silent."""
        return [] if self.silent else self._ledger.unwritten

    def to_state(self) -> dict[str, Any]:
        """What a copy of the state holds of lines that are not in the run's bucket yet."""
        return self._shipper.to_state() if self._shipper else {}

    def before_commit(self) -> dict[str, bytes]:
        """See `TensorCheckpointer.save`: the lines up to now, if the run lies in a bucket."""
        return self._shipper.before_commit() if self._shipper else {}

    @property
    def reached(self) -> int:
        """The newest step that any attempt has done; 0 where this is silent."""
        return 0 if self.silent else self._ledger.reached

    def say(self, text: str) -> None:
        """One line on the console, above the progress bar."""
        if self.silent:
            return
        self._bar.clear()
        print(text, flush=True)
        self._bar.refresh()

    def event(self, step: int, event: str, what: str) -> None:
        """Tell of something that went wrong in a step, unless `what` is empty, on the console and
        in the ledger."""
        if what and not self.silent:
            self.say(f"warning: {what}")
            self._ledger.event(event, step=step, what=what)

    def started(self, startup: Startup) -> None:
        """The first step of this attempt is done."""
        self.say(str(startup))
        if not self.silent:
            self._ledger.phases(startup.parts)

    def step(
        self,
        step: int,
        first: int,
        after_last: int,
        seconds: float,
        loss: float,
        norm: float,
        skipped: str,
        consumed: str | None,
        mute: int,
    ) -> None:
        """A step over the sequences from `first` to before `after_last` is done: move the progress
        bar, and tell the ledger. `mute`: ranks of which output was dropped."""
        if self.silent:
            return
        self._bar.update(step - self._bar.n)
        self._ledger.step(
            step, first, after_last, seconds,
            loss=loss, norm=norm, skipped=skipped, consumed=consumed,
        )  # fmt: skip
        self._tell_mute(mute)

    def _tell_mute(self, ranks: int) -> None:
        """Tell the ledger once that output is dropped: the console cannot say it."""
        if ranks and not self._told_mute:
            self._told_mute = True
            what = f"output of {ranks} rank(s) or their agents was dropped; training goes on"
            here = {"here": why} if (why := lost_output()) else {}
            self._ledger.event("output lost", what=what, **here)

    def rollback(self, step: int, to: int, source: str, number: int) -> None:
        """After `step` the weights were taken back to those of step `to`, for the `number`-th time
        in this run."""
        if not self.silent:
            self.say(
                f"warning: rolled back to the weights of step {to} in {source}; the data from "
                f"there to step {step} is not tried again (roll-back {number})"
            )
            self._ledger.rollback(step, to, source)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """The weights after `step` were validated."""
        if not self.silent:
            self.record(step, values, validation_line(values))
            self._ledger.validation(step, _finite(values))

    def save(
        self,
        step: int,
        outcome: SaveOutcome,
        *,
        known: bool = False,
        stall: float | None = None,
    ) -> None:
        """Tell, at `step`, how a checkpoint ended; not on the console, if it is `known` there.
        `stall`: seconds for which training stood still, where they were measured."""
        if not self.silent:
            values, line, event = save_record(outcome)
            self.record(step, values, None if known else line, event)
            self._ledger.save(
                outcome.step, outcome.seconds, error=outcome.error,
                stall=None if stall is None else round(stall, 4),
                weights=outcome.weights or None, moments=outcome.moments or None,
            )  # fmt: skip

    def record(
        self,
        step: int,
        values: Mapping[str, float],
        line: str | None = None,
        event: str | None = None,
    ) -> None:
        """Send `values` of `step` everywhere, and `line` to the console; metrics.jsonl also gets
        `event`, something that went wrong."""
        if self.silent:
            return
        self._latest = max(time.time(), math.nextafter(self._latest, math.inf))
        record: dict[str, Any] = {"step": step, "time": self._latest, **_finite(values)}
        record |= {"event": event} if event else {}
        text = json.dumps(record)
        if self._shipper:
            self._shipper.add(text)
        self._records.add(text)
        if line:
            self.say(line)

    def end(self, code: int, reason: str) -> int:
        """Note in the ledger how this attempt ended; returns the exit code."""
        if not self.silent:
            self._tell_mute(bool(lost_output()))
            self._ledger.end(code, reason)
        return code


def step_line(
    step: int,
    steps: int,
    values: Mapping[str, float],
    unit: str = "tokens",
    columns: int | None = None,
) -> str:
    """The console line of a training record.

    Args:
        step: that is done.
        steps: of the run.
        values: of the record.
        unit: of the speed.
        columns: of the terminal; the line leaves out what has no room there. None: it is no
            terminal, and the line ends with the time of day: it begins with "step " everywhere.
    """
    parts = {
        "step": f"step {step:>{len(str(steps))}}/{steps}",
        "loss": f"loss {values['loss']:.4f}",
        "grad_norm": f"grad norm {values['grad_norm']:.3f}",
        "lr": f"lr {values['lr']:.2e}",
    }
    if "tokens_per_second" in values:
        parts |= {
            "speed": f"{values['tokens_per_second']:,.0f} {unit}/s",
            "step_seconds": f"{values['step_seconds_p50'] * 1e3:.0f} ms/step",
            "data_wait": f"data wait {values['data_wait']:.1%}",
        }
    if "bubble" in values:
        parts["bubble"] = f"bubble {values['bubble']:.1%}"
    if "mfu" in values:
        parts["mfu"] = f"MFU {values['mfu']:.1%}"
    parts["memory"] = f"memory {values['peak_memory'] / 1e9:.2f} GB"
    if "eta_seconds" in values:
        parts["eta"] = f"ETA {tqdm.format_interval(values['eta_seconds'])}"
    if columns is None:
        return " | ".join([*parts.values(), time.strftime("%H:%M:%S")])
    for name in LEAST_FIRST:
        if len(" | ".join(parts.values())) <= columns:
            break
        parts.pop(name, None)
    return " | ".join(parts.values())


def save_record(outcome: SaveOutcome) -> tuple[dict[str, float], str, str | None]:
    """What a checkpoint that ended leaves: values, a console line, an event if it failed."""
    values = {"checkpoint_step": outcome.step, "checkpoint_seconds": outcome.seconds}
    if outcome.error:
        values["checkpoint_failed"] = 1
        return values, f"warning: {outcome.error}", outcome.error
    values |= {"checkpoint_bytes": outcome.nbytes, "checkpoint_writers": outcome.writers}
    where = str(outcome.path).rpartition("/")[0]
    line = (
        f"saved step {outcome.step}: {outcome.nbytes / 1e6:,.1f} MB in {outcome.seconds:.2f} s, in "
        f"{where}"
    )
    return values, line, None


def validation_line(values: Mapping[str, float]) -> str:
    """The console line of a validation record."""
    if "validation_perplexity" not in values:
        return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
    return (
        f"validation loss {values['validation_loss']:.4f}, "
        f"perplexity {values['validation_perplexity']:.2f}"
    )


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """As JSON has no NaN, what is not finite is null there."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _trackers(tracking: Tracking) -> list[list[str]]:
    """What trackers.py is to be started with, besides the run directory."""
    bundled = {
        "tensorboard": tracking.tensorboard,
        "wandb": tracking.wandb != "off" and wandb_mode(tracking.wandb) != "disabled",
        "prometheus": tracking.prometheus,
        "alerts": tracking.alerts,
    }
    return [
        *([kind] for kind, asked in bundled.items() if asked),
        *(["sinks", name] for name in tracking.sinks),
        *(["hooks", name] for name in tracking.hooks),
    ]


def wandb_note(tracking: Tracking) -> str:
    """Says what WANDB_MODE makes of `tracking.wandb`; empty if that is nothing."""
    if tracking.wandb == "off" or (mode := wandb_mode(tracking.wandb)) == tracking.wandb:
        return ""
    given = os.environ["WANDB_MODE"]
    return f"note: W&B is {mode}: WANDB_MODE={given} comes before tracking.wandb={tracking.wandb}"


def keep_records(path: Path, last_step: int) -> float:
    """Drop the records after `last_step`, and a last line that a killed process left unfinished;
    returns the time of the last record, dropped or not."""
    kept, latest = [], 0.0
    try:
        descriptor = open_to_read(path)
    except FileNotFoundError:
        return 0.0
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        for line in file:
            record = read_record(line)
            if record is None:
                continue
            latest = max(latest, record["time"])
            if record["step"] <= last_step:
                kept.append(line.rstrip("\n") + "\n")
    write_whole(path, "".join(kept))
    return latest
