"""Which bytes are not a number, by safetensors' names of dtypes. Reads without torch."""

import numpy as np

_ABOVE = {
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "C64": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F8_E5M2": ("u1", 0x7F, 0x7C),
    "F8_E4M3": ("u1", 0x7F, 0x7E),
    "F8_E8M0": ("u1", 0xFF, 0xFE),
}
"""dtype → (the unsigned type of its bits, all bits but the sign, infinity or the largest number):
NaN are the bits above that."""
_ONLY = {"F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80}
"""dtype → the one byte that is NaN."""


def may_hold_nan(dtype: str) -> bool:
    """Whether NaN can be written in a dtype."""
    return dtype in _ABOVE or dtype in _ONLY


def holds_nan(data: memoryview, dtype: str) -> bool:
    """Whether any of some elements is NaN.

    Args:
        data: bytes of whole elements; a part of one at the end is left out.
        dtype: safetensors' name of a type that `may_hold_nan`.
    """
    if dtype in _ONLY:
        return bool((np.frombuffer(data, "u1") == _ONLY[dtype]).any())
    kind, magnitude, largest = _ABOVE[dtype]
    bits = np.frombuffer(data, kind, len(data) // np.dtype(kind).itemsize)
    return bool(((bits & bits.dtype.type(magnitude)) > largest).any())
