"""NVLink state of a node's GPUs, from NVIDIA's management library (NVML).

The library may hang if a driver is broken, so health.py calls it in a child process. On a machine
without the library no links are reported."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
PAUSE_SECONDS = 0.2
MAX_LINKS = 64
"""Highest number of NVLinks of a GPU. On a GPU with fewer, the query for the next link fails."""
NO_FABRIC, FABRIC_COMPLETED = 0, 3
"""Values of `_FabricInfo.state`: the GPU has no NVLink fabric; the GPU has joined its fabric."""
ERROR_COUNTERS = {"replays": 0, "recoveries": 1, "CRC errors": 2}
"""Name of an error counter of a link → its number in NVML."""


class _NvmlError(RuntimeError):
    """A call of the library failed; the message names the function and the reason."""


class _FabricInfo(ctypes.Structure):
    """C struct nvmlGpuFabricInfo_t of nvml.h."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


@dataclass(frozen=True)
class HealthNvmlLinks:
    """The NVLinks of one GPU at one reading."""

    name: str
    """Product name from the driver."""
    up: frozenset[int] = frozenset()
    down: frozenset[int] = frozenset()
    errors: int = 0
    """Sum of the error counters of all links."""
    joined: bool = True
    """Whether the GPU has joined the fabric of its NVLink switches, if there are any."""
    domain: str = ""
    """NVLink domain across nodes that the GPU has joined; empty: none."""


class _Nvml:
    """NVIDIA's management library, initialised until `close`. Raises OSError if the library is
    missing, and _NvmlError if there is no driver."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")

    def close(self) -> None:
        self._call("nvmlShutdown")

    def gpus(self) -> list[HealthNvmlLinks]:
        """Returns the links of every visible GPU. Raises _NvmlError if a GPU does not answer."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def _gpu(self, index: int) -> HealthNvmlLinks:
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        self._call("nvmlDeviceGetName", device, name, ctypes.c_uint(len(name)))
        links: dict[bool, set[int]] = {True: set(), False: set()}
        errors, active, counted = 0, ctypes.c_uint(), ctypes.c_ulonglong()
        for link in range(MAX_LINKS):
            number = ctypes.c_uint(link)
            if self._try("nvmlDeviceGetNvLinkState", device, number, ctypes.byref(active)):
                break  # no further links
            links[bool(active.value)].add(link)
            for counter in ERROR_COUNTERS.values():
                query = device, number, ctypes.c_int(counter), ctypes.byref(counted)
                if not self._try("nvmlDeviceGetNvLinkErrorCounter", *query):
                    errors += counted.value
        info, domain = _FabricInfo(), ""
        if self._try("nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(info)):
            info.state = NO_FABRIC  # the driver is too old to know of fabrics
        member = info.state == FABRIC_COMPLETED and not info.status
        if member and any(info.cluster):  # only zeros mean that the fabric ends within this node
            domain = f"nvl-{bytes(info.cluster).hex()[:8]}.{info.clique}"
        up, down = frozenset(links[True]), frozenset(links[False])
        joined = member or info.state == NO_FABRIC
        return HealthNvmlLinks(name.value.decode(), up, down, errors, joined, domain)

    def _try(self, function: str, *arguments: Any) -> int:
        """Call a function that some drivers lack; returns NVML's error code, 0 for success."""
        code: int = getattr(self._library, function, lambda *_: -1)(*arguments)
        return code

    def _call(self, function: str, *arguments: Any) -> None:
        if code := self._try(function, *arguments):
            raise _NvmlError(f"{function}: {self._library.nvmlErrorString(code).decode()}")


def domain_of(gpus: Sequence[HealthNvmlLinks]) -> str:
    """Returns the NVLink domain of a node; empty if its GPUs are in none or in several."""
    domains = {gpu.domain for gpu in gpus}
    return domains.pop() if len(domains) == 1 else ""


def link_problems(before: Sequence[HealthNvmlLinks], after: Sequence[HealthNvmlLinks]) -> list[str]:
    """Returns one line for each fault of a node's NVLinks, by two readings of all its GPUs: what is
    wrong, and what to do. GPUs without links have no fault if no GPU of their product has links."""
    problems = []
    for index, (then, now) in enumerate(zip(before, after, strict=True)):
        most = max(len(gpu.up) for gpu in after if gpu.name == now.name)
        if len(now.up) < most:
            which = f" (down: {', '.join(map(str, sorted(now.down)))})" if now.down else ""
            problems.append(
                f"GPU {index}: {len(now.up)} of its NVLinks are up{which}, and {most} of another "
                f"{now.name} of this machine; reset it with `nvidia-smi -r -i {index}`, or take "
                "this machine out"
            )
        if now.errors > then.errors:
            problems.append(
                f"GPU {index}: {now.errors - then.errors} NVLink errors within {PAUSE_SECONDS:g} "
                f"s; see `nvidia-smi nvlink -e -i {index}`, and take this machine out if more come"
            )
        if not now.joined:
            problems.append(
                f"GPU {index}: it has not joined its NVLink fabric; see that nvidia-fabricmanager "
                "runs on this machine"
            )
    return problems


def read_links(library: str = LIBRARY) -> tuple[list[str], str]:
    """Returns (link problems of this node, its NVLink domain); ([], "") without NVML. Raises
    _NvmlError if a GPU does not answer."""
    try:
        nvml = _Nvml(library)
    except OSError:
        return [], ""
    try:
        before = nvml.gpus()
        time.sleep(PAUSE_SECONDS)
        after = nvml.gpus()
    finally:
        nvml.close()
    return link_problems(before, after), domain_of(after)
