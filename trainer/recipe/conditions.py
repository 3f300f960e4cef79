"""Conditions of `tracking.alerts`. Imports no torch."""

import re
from dataclasses import dataclass

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class ThresholdCondition:
    """Holds while the metric `key` is above (else below) a number."""

    key: str
    above: bool
    number: float


@dataclass(frozen=True)
class SilenceCondition:
    """Holds when there was no record for `seconds` seconds."""

    seconds: float


@dataclass(frozen=True)
class FailureCondition:
    """Holds after ranks were restarted because of a failure."""


Condition = ThresholdCondition | SilenceCondition | FailureCondition


def parse_condition(text: str) -> Condition | None:
    """Parse the `when` of an alert; None if it is not a condition."""
    text = text.strip()
    if text == "failure":
        return FailureCondition()
    if matched := re.fullmatch(r"no step for (\d+(?:\.\d+)?) ?(s|min|h)", text):
        return SilenceCondition(float(matched[1]) * _SECONDS[matched[2]])
    if matched := re.fullmatch(rf"([\w@]+) *([<>]) *({_NUMBER})", text, re.ASCII):
        return ThresholdCondition(matched[1], matched[2] == ">", float(matched[3]))
    return None
