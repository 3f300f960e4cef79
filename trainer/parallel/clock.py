"""Moments of what a device computes, and the time between them."""

import time
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """This moment of what `device` computes: nothing is waited for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def reached(moment: Any) -> bool:
    """Whether the device has come to a mark."""
    return isinstance(moment, float) or bool(moment.query())


def seconds_between(began: Any, ended: Any) -> float:
    """Seconds between two marks, once the device has been waited for."""
    if isinstance(began, float):
        return float(ended - began)
    return float(began.elapsed_time(ended)) / 1000
