"""Runs a command or posts to a webhook when a condition of `tracking.alerts` begins to hold."""

import json
import math
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from elastic.node.files import read_text
from trainer.recipe.value_types import (
    AlertCondition,
    RecipeFailureAlert,
    RecipeSilenceAlert,
    RecipeThresholdAlert,
    parse_condition,
)
from trainer.run.events import RunEventSummary

COMMAND_SECONDS, POST_SECONDS = 30.0, 10.0
"""Seconds after which a command is killed, and a webhook abandoned."""


class AlertSink:
    """A sink that reports each condition of `tracking.alerts` when it begins to hold. If this
    process is killed, its successor reports the conditions that still hold once more."""

    def __init__(self, run_dir: Path) -> None:
        tracking = yaml.safe_load(read_text(run_dir / "recipe.yaml"))["tracking"]
        self._run = str(tracking["name"] or run_dir.name)
        self._alerts: list[dict[str, Any]] = tracking["alerts"]
        self._conditions = [parse_condition(alert["when"]) for alert in self._alerts]
        self._holds = [False] * len(self._alerts)
        self._warned = False
        self._standing: RunEventSummary | None = RunEventSummary(run_dir)
        """The ledger, from which the first call of `kept` reads `_failures`; None after that."""
        self._step, self._failures = 0, 0.0
        self._newest, self._heard = 0.0, time.monotonic()

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._step, self._newest, self._heard = step, values["time"], time.monotonic()
        for number, condition in enumerate(self._conditions):
            if isinstance(condition, RecipeSilenceAlert):
                self._holds[number] = False
            elif (now := self._reason_now(condition, values)) is not None:
                self._set_state(number, now)
        self._failures = values.get("failures", self._failures)

    def kept(self, after: float) -> float:
        """Return the time of the newest record, as `Sink` describes. Also reports silence, because
        this method is called regularly, even without new records."""
        if self._standing:
            self._failures = self._standing.at(after).get("failures", 0)
            self._standing = None
        silence = time.monotonic() - self._heard
        for number, condition in enumerate(self._conditions):
            if isinstance(condition, RecipeSilenceAlert) and silence > condition.seconds:
                self._set_state(number, f"no step for {silence:.0f} s")
        return max(after, self._newest)

    def close(self) -> None:
        """Does nothing, as no record is buffered."""

    def _reason_now(
        self, condition: AlertCondition | None, values: Mapping[str, float]
    ) -> str | None:
        """Return why a condition holds for a record; "" if it does not; None if the record lacks
        the value that the condition compares."""
        if isinstance(condition, RecipeFailureAlert) and "failures" in values:
            more = values["failures"] - self._failures
            return f"{values['failures']:.0f} failure(s) by now" if more > 0 else ""
        if isinstance(condition, RecipeThresholdAlert) and condition.key in values:
            value = values[condition.key]
            # NaN counts as beyond any limit.
            beyond = value > condition.number if condition.above else value < condition.number
            return f"{condition.key} {value:g}" if beyond or math.isnan(value) else ""
        return None

    def _set_state(self, number: int, what: str) -> None:
        """Record whether a condition holds, and report it if it did not hold before."""
        before, self._holds[number] = self._holds[number], bool(what)
        if what and not before:
            alert = self._alerts[number]
            text = f"{self._run}, step {self._step}: {what} ({alert['when']})"
            for send, where in ((_run, alert["run"]), (_post, alert["post"])):
                if where:
                    self._send(send, where, text, f"tracking.alerts.{number}")

    def _send(self, send: Any, where: str, text: str, key: str) -> None:
        try:
            send(where, text)
        except (OSError, subprocess.SubprocessError, LookupError, ValueError) as error:
            if not self._warned:  # once, so that it does not fill the console
                # Without command or URL: logs are shown to others, and a webhook's URL is a secret.
                print(f"warning: {key}: {_failure(error)}; training continues", flush=True)
            self._warned = True


def _failure(error: Exception) -> str:
    match error:
        case subprocess.CalledProcessError():
            return f"its command ended with exit code {error.returncode}"
        case subprocess.TimeoutExpired():
            return f"its command took longer than {error.timeout:g} s, and was killed"
        case OSError():
            return f"its command or webhook cannot be reached: {error}"
        case LookupError():
            return str(error)
    return "its webhook is not a URL"


def _run(command: str, text: str) -> None:
    """Run a shell command with the text in the environment variable PERDURE_ALERT."""
    process = subprocess.Popen(
        ["sh", "-c", command],
        env={**os.environ, "PERDURE_ALERT": text},
        stdin=subprocess.DEVNULL,
        # Output is dropped, because much of it would fill the disk that holds the log.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        code = process.wait(COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the command and all that it started
        process.wait()
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def _post(url: str, text: str) -> None:
    """Post the text to a webhook; `env:NAME` takes the URL from an environment variable."""
    if url.startswith("env:"):
        name = url.removeprefix("env:")
        if not (url := os.environ.get(name, "")):
            raise LookupError(f"the environment variable {name} is not set")
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=POST_SECONDS).close()
