"""Conditions of `tracking.alerts`. Imports no torch."""

import re
from dataclasses import dataclass

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class ThresholdAlert:
    """Condition of an alert that holds while the metric `key` is above, or below, a number."""

    key: str
    above: bool
    """Whether the condition is `key > number`; else it is `key < number`."""
    number: float


@dataclass(frozen=True)
class SilenceAlert:
    """Condition of an alert that holds when there was no record for `seconds` seconds."""

    seconds: float


@dataclass(frozen=True)
class FailureAlert:
    """Condition of an alert that holds after ranks were restarted because of a failure."""


AlertCondition = ThresholdAlert | SilenceAlert | FailureAlert


def parse_condition(text: str) -> AlertCondition | None:
    """Parse the `when` of an alert; None if the text is no condition."""
    text = text.strip()
    if text == "failure":
        return FailureAlert()
    if matched := re.fullmatch(r"no step for (\d+(?:\.\d+)?) ?(s|min|h)", text):
        return SilenceAlert(float(matched[1]) * _SECONDS[matched[2]])
    if matched := re.fullmatch(rf"([\w@]+) *([<>]) *({_NUMBER})", text, re.ASCII):
        return ThresholdAlert(matched[1], matched[2] == ">", float(matched[3]))
    return None
