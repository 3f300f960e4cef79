"""Output of a run: per log interval a record on the console and in metrics.jsonl, which trackers.py
reads, and per step a line in the ledger."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from checkpointing import SaveOutcome
from checkpointing.format.untrusted import printable
from checkpointing.storage.ownership import TrustedStorageOwners
from elastic import EXIT_PAUSED, LEDGER, Ledger, StartLine
from elastic.node.companion import accompany
from elastic.node.files import open_to_append
from elastic.process import lost_output
from elastic.record.ledger import clock
from elastic.record.lines import METRICS, RecordFile, last_lines, read_record
from elastic.world import supervised
from trainer.recipe import Recipe
from trainer.recipe.sections import TrackingSection
from trainer.run.shipping import RunShipper
from trainer.run.sinks import wandb_mode

LEAST_FIRST = (
    *("memory", "data_wait", "step_seconds", "bubble", "lr"),
    *("mfu", "grad_norm", "eta", "speed"),
)
"""Parts of the console's step line, in the order in which a narrow terminal drops them."""
UNWRITTEN = "unwritten_ledger"
"""Key in the state of a checkpoint for ledger lines that are not on disk, see `Ledger.unwritten`;
absent if there are none."""


class RunStartup:
    """Measures the time from launch to the first optimizer step, divided into named parts. With
    `again` the process existed before, and the time starts now."""

    def __init__(self, *, again: bool = False) -> None:
        self._last = time.time() if again else _process_start()
        self.parts: dict[str, float] = {}
        if launched := float(os.environ.get("PERDURE_LAUNCHED_AT", "0")):
            self.parts["launcher"] = self._last - launched

    def mark(self, part: str) -> None:
        """Add the time since the last mark to `part`."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {s:.1f}" for name, s in self.parts.items() if round(s, 1))
        return f"first step after {sum(self.parts.values()):.1f} s: {parts}"


def _process_start() -> float:
    try:
        # Field 22 of the line, counted from the command's name, which may hold spaces and brackets.
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.time() - (clock() - ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:
        return time.time()


class RunLog:
    """Writes to the console, to metrics.jsonl, which trackers follow, and to the ledger. A context
    manager.

    Args:
        start: line of the ledger about this attempt.
        unwritten: ledger lines in the loaded checkpoint that were not on disk when it was saved.
        shipper: stores the lines of a run in a bucket; None: `run.dir` is a directory.
        silent: whether all methods do nothing, as on ranks other than 0.
    """

    def __init__(
        self,
        recipe: Recipe,
        start: StartLine,
        unwritten: Sequence[str] = (),
        shipper: RunShipper | None = None,
        *,
        silent: bool,
    ) -> None:
        self.silent, self._shipper = silent, shipper
        if silent:
            return
        run_dir = recipe.directory
        trusted = TrustedStorageOwners(tuple(recipe.checkpoint.trust), run_dir)
        also = shipper.add if shipper else None
        self._ledger = Ledger(run_dir / LEDGER, start, unwritten, trusted, also)
        records = run_dir / METRICS
        self._latest: float | None = None
        """Unix time of the last record; None before the first of this attempt. Trackers recognise
        new records by a later time, so it rises even if a restart runs on a machine whose clock is
        behind."""
        with suppress(OSError):  # a full disk must not prevent a restart
            os.close(open_to_append(records, trusted))
        self._attempt = start.attempt
        self._records, self._path = RecordFile(records, trusted=trusted), records
        self._mute_reported = False
        """Whether the ledger has a line that says that console output was dropped."""
        # Without a terminal the bar would fill log files with its refreshes.
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
            # Trackers run in other processes, so that a slow one delays no step.
            accompany([module, str(run_dir.absolute()), *words])
            for module, *words in _companions(recipe)
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

    def to_state(self) -> dict[str, Any]:
        """Return lines that are not on disk or in the bucket, for the state of a checkpoint."""
        lines = [] if self.silent else self._ledger.unwritten
        shipped = self._shipper.to_state() if self._shipper else {}
        return {**({UNWRITTEN: lines} if lines else {}), **shipped}

    def before_commit(self) -> dict[str, bytes]:
        """Return what must be in the run's bucket before a commit: URL → the lines up to now."""
        return self._shipper.before_commit() if self._shipper else {}

    @property
    def reached(self) -> int:
        """The newest step that any attempt has done; 0 on ranks other than 0."""
        return 0 if self.silent else self._ledger.reached

    def say(self, text: str) -> None:
        """Print a line on the console, above the progress bar."""
        if self.silent:
            return
        self._bar.clear()
        print(text, flush=True)
        self._bar.refresh()

    def event(self, step: int, event: str, what: str, **details: Any) -> None:
        """Report a problem `what` (unless "") on the console and, with `details`, in the ledger."""
        if what and not self.silent:
            self.say(f"warning: {what}")
            self._ledger.event(event, step=step, what=what, **details)

    def shares(self, step: int, begin: int, shares: Sequence[int], what: str) -> None:
        """Report that data-parallel ranks have other shares from sequence `begin` on."""
        if not self.silent:
            self.say(what)
            self._ledger.event("shares", step=step, sequence=begin, shares=[*shares], what=what)

    def started(self, startup: RunStartup) -> None:
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
        """Report a step on the sequences `first` <= i < `after_last` to the progress bar and the
        ledger. `mute`: number of ranks whose console output was dropped."""
        if self.silent:
            return
        self._bar.update(step - self._bar.n)
        self._ledger.step(
            step, first, after_last, seconds,
            loss=loss, norm=norm, skipped=skipped, consumed=consumed,
        )  # fmt: skip
        self._report_mute(mute)

    def _report_mute(self, ranks: int) -> None:
        """Write to the ledger, once, that console output of ranks was dropped."""
        if ranks and not self._mute_reported:
            self._mute_reported = True
            what = f"output of {ranks} rank(s) or their agents was dropped; training continues"
            here = {"here": why} if (why := lost_output()) else {}
            self._ledger.event("output lost", what=what, **here)

    def rollback(self, step: int, to: int, source: str, number: int) -> None:
        """Report roll-back `number`: after `step` the weights of step `to` were loaded."""
        if not self.silent:
            self.say(
                f"warning: rolled back to the weights of step {to} in {source}; the data from "
                f"there to step {step} is not tried again (roll-back {number})"
            )
            self._ledger.rollback(step, to, source)

    def data_change(self, step: int, name: str, what: str, refused: str) -> None:
        """Report the answer to the request `name` to change the data. `what`: the change in words.
        `refused`: why the request is refused; "" if it is accepted."""
        if not self.silent:
            answer = f"refused: {refused}" if refused else "accepted"
            self.say(printable(f"data change {answer} ({what})"))
            details = {"refused": refused} if refused else {}
            self._ledger.event("data change", step=step, request=name, what=what, **details)

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        if self.silent:
            return
        line = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        if perplexity := values.get("validation_perplexity"):
            loss = values["validation_loss"]
            line = f"validation loss {loss:.4f}, perplexity {perplexity:.2f}"
        self.record(step, values, line)
        self._ledger.validation(step, _finite(values))

    def save(
        self, step: int, outcome: SaveOutcome, *, known: bool = False, stall: float | None = None
    ) -> None:
        """Report how a save ended. `step`: the present step, which is later than the saved one.

        Args:
            known: whether the console already shows the failure of this save.
            stall: seconds for which training was blocked by the save; None: not measured.
        """
        if self.silent:
            return
        values = {"checkpoint_step": outcome.step, "checkpoint_seconds": outcome.seconds}
        if outcome.error:
            values["checkpoint_failed"] = 1
            line = f"warning: {outcome.error}"
        else:
            values |= {"checkpoint_bytes": outcome.nbytes, "checkpoint_writers": outcome.writers}
            line = (
                f"saved step {outcome.step}: {outcome.nbytes / 1e6:,.1f} MB in "
                f"{outcome.seconds:.2f} s, in {str(outcome.path).rpartition('/')[0]}"
            )
        self.record(step, values, None if known else line, outcome.error)
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
        """Write `values`, and a problem `event` if any, to metrics.jsonl; print `line`."""
        if self.silent:
            return
        if self._latest is None:
            self._latest = _newest_time(self._path)
        # Trackers skip records that are not later than the last; a clock may be set back.
        self._latest = max(time.time(), math.nextafter(self._latest, math.inf))
        record: dict[str, Any] = {"step": step, "time": self._latest, "attempt": self._attempt}
        record |= _finite(values)
        record |= {"event": event} if event else {}
        text = json.dumps(record)
        if self._shipper:
            self._shipper.add(text)
        self._records.add(text)
        if line:
            self.say(line)

    def end(self, code: int, reason: str) -> int:
        """Write to the ledger how this attempt ended; returns `code`, the exit code."""
        if not self.silent:
            self._report_mute(bool(lost_output()))
            self._ledger.end(code, reason)
        if self._shipper:
            self._shipper.goes_on = code == EXIT_PAUSED and supervised()
        return code


def step_line(
    step: int,
    steps: int,
    values: Mapping[str, float],
    unit: str = "tokens",
    columns: int | None = None,
) -> str:
    """Return the console line for a training record. `columns`: width of the terminal, for which
    parts of a longer line are dropped; None: there is no terminal, and the line ends with the time
    of day."""
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


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _companions(recipe: Recipe) -> list[list[str]]:
    """Return (module, *arguments after the run directory) of each process that handles the run's
    records beside rank 0: trackers, sinks, hooks, samples."""
    tracking = recipe.tracking
    bundled = {
        "tensorboard": tracking.tensorboard,
        "wandb": tracking.wandb != "off" and wandb_mode(tracking.wandb) != "disabled",
        "prometheus": tracking.prometheus,
        "alerts": tracking.alerts,
    }
    trackers = [
        *([kind] for kind, requested in bundled.items() if requested),
        *(["sinks", name] for name in tracking.sinks),
        *(["hooks", name] for name in tracking.hooks),
    ]
    samples = [["trainer.tools.run_samples", str(recipe.run.steps)]] if recipe.run.samples else []
    return [*(["trainer.run.trackers", *words] for words in trackers), *samples]


def wandb_note(tracking: TrackingSection) -> str:
    """Return a note for the user if WANDB_MODE overrides `tracking.wandb`; "" if it does not."""
    if tracking.wandb == "off" or (mode := wandb_mode(tracking.wandb)) == tracking.wandb:
        return ""
    variable = os.environ["WANDB_MODE"]
    return f"note: W&B is {mode}: WANDB_MODE={variable} overrides tracking.wandb={tracking.wandb}"


def _newest_time(path: Path) -> float:
    for line in reversed(last_lines(path)):
        if record := read_record(line):
            return float(record["time"])
    return 0.0
