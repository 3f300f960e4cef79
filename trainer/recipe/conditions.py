"""Conditions of `tracking.alerts`. Imports no torch."""

import re
from dataclasses import dataclass

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class Beyond:
    """Holds while a value is above, or below, a number."""

    key: str
    above: bool
    number: float


@dataclass(frozen=True)
class Silent:
    """Holds when there was no record for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class AfterFailure:
    """Holds after the ranks were restarted because of a failure."""


Condition = Beyond | Silent | AfterFailure


def parse_condition(text: str) -> Condition | None:
    """Parse the `when` of an alert; None if it is no condition."""
    text = text.strip()
    if text == "failure":
        return AfterFailure()
    if matched := re.fullmatch(r"no step for (\d+(?:\.\d+)?) ?(s|min|h)", text):
        return Silent(float(matched[1]) * _SECONDS[matched[2]])
    if matched := re.fullmatch(rf"([\w@]+) *([<>]) *({_NUMBER})", text, re.ASCII):
        return Beyond(matched[1], matched[2] == ">", float(matched[3]))
    return None
