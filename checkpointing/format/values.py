"""Exact conversion of plain values to JSON and back. Values that JSON would change (tuples, keys
that are no strings) or reject (bytes, tensors) become an object with one key that begins with
"$"."""

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype)
}


def to_json(value: Any, name: str) -> Any:
    """Returns a value in a form that JSON accepts; `from_json` restores it with equal types.
    Accepts numbers, strings, None, bytes, CPU or GPU tensors, dtypes, numpy arrays; and lists,
    tuples, sets, dictionaries and Counters of these. Else raises ValueError, whose message says
    where, beginning with `name`, and what."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return to_json(value.item(), name)
    if isinstance(value, list):
        return [to_json(one, f"{name}[{place}]") for place, one in enumerate(value)]
    if isinstance(value, torch.Size):
        return {"$size": [*value]}
    if type(value) is set:
        # sorted, as ranks compare digests of the JSON
        return {"$set": [to_json(one, name) for one in sorted(value)]}
    if type(value) is tuple:
        return {"$tuple": to_json(list(value), name)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is Tensor or isinstance(value, np.ndarray):
        array = torch.as_tensor(value).detach().cpu().contiguous()
        kind = "$tensor" if isinstance(value, Tensor) else "$array"
        data = array.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(array.dtype).removeprefix("torch.")
        return {kind: [dtype, list(array.shape), base64.b64encode(data).decode()]}
    if isinstance(value, Mapping):
        items = {key: to_json(one, f"{name}[{key!r}]") for key, one in value.items()}
        if isinstance(value, Counter):
            return {"$counter": [[to_json(key, name), one] for key, one in items.items()]}
        if all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {"$dict": [[to_json(key, name), one] for key, one in items.items()]}
    raise ValueError(
        f"{name} is a {type(value).__name__}, which cannot be saved: let state_dict() give "
        "numbers, strings, bytes, tensors, and lists, tuples and dictionaries of such"
    )


def from_json(value: Any) -> Any:
    """Returns the value that was given to `to_json`; its tensors are on the CPU."""
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("$tuple", items):
            return tuple(from_json(items))
        case ("$size", items):
            return torch.Size(items)
        case ("$set", items):
            return set(from_json(items))
        case ("$dtype", str(name)):
            return _DTYPES[name]
        case ("$bytes", data):
            return base64.b64decode(data)
        case ("$tensor" | "$array" as kind, (dtype, shape, data)):
            held = bytearray(base64.b64decode(data))
            # frombuffer rejects an empty buffer
            flat = torch.frombuffer(held or bytearray(1), dtype=torch.uint8)[: len(held)]
            tensor = flat.view(getattr(torch, dtype)).reshape(shape)
            return tensor if kind == "$tensor" else tensor.numpy()
        case ("$counter", items):
            return Counter({from_json(key): from_json(one) for key, one in items})
        case ("$dict", items):
            return {from_json(key): from_json(one) for key, one in items}
    return {key: from_json(one) for key, one in value.items()}
