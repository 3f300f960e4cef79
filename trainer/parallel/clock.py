"""Marks on a device's timeline, and the time between two of them."""

import time
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """Mark the present point in the device's work without waiting for it: a CUDA event or, on a
    CPU, the host's clock in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def reached(moment: Any) -> bool:
    return isinstance(moment, float) or bool(moment.query())


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two marks, which the device must have reached."""
    if isinstance(began, float):
        return float(ended - began)
    return float(began.elapsed_time(ended)) / 1000
