"""What NVIDIA's management library (NVML) says of the links between GPUs.

It is asked in a process of its own (health.py): it may hang where a driver is broken. A machine
without the library has no links to ask for.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
PAUSE_SECONDS = 0.2
"""Between two looks at counters of errors: a link that fails has more at the second."""
MOST_LINKS = 64
"""NVLinks of a GPU that are asked for; a GPU says which is its last."""
NO_FABRIC, FABRIC_COMPLETED = 0, 3
"""How far a GPU has come to join the NVLink fabric of its switches: there is none, or it has."""
ERROR_COUNTERS = {"replays": 0, "recoveries": 1, "CRC errors": 2}
"""NVML's numbers of counters of a link."""


class NvmlError(RuntimeError):
    """A call of the library failed; says which and why."""


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t of nvml.h."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


@dataclass(frozen=True)
class GpuLinks:
    """The NVLinks of one GPU."""

    name: str
    """As the driver calls its kind."""
    up: frozenset[int] = frozenset()
    """Numbers of the links that are up."""
    down: frozenset[int] = frozenset()
    errors: int = 0
    """Errors of its links so far."""
    joined: bool = True
    """Whether it has joined the fabric of its NVLink switches, if there are any."""
    domain: str = ""
    """The NVLink domain over several nodes that it has joined; empty: it is in none."""


class Nvml:
    """The library, until `close`.

    Args:
        library: its file, as dlopen(3) finds it.

    Raises:
        OSError: it is not there.
        NvmlError: it finds no driver.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")

    def close(self) -> None:
        """Let go of the driver."""
        self._call("nvmlShutdown")

    def gpus(self) -> list[GpuLinks]:
        """The links of every GPU that this process may see, in the driver's order.

        Raises:
            NvmlError: a GPU does not answer.
        """
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def _gpu(self, index: int) -> GpuLinks:
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        self._call("nvmlDeviceGetName", device, name, ctypes.c_uint(len(name)))
        links: dict[bool, set[int]] = {True: set(), False: set()}
        errors, active, counted = 0, ctypes.c_uint(), ctypes.c_ulonglong()
        for link in range(MOST_LINKS):
            number = ctypes.c_uint(link)
            if self._fails("nvmlDeviceGetNvLinkState", device, number, ctypes.byref(active)):
                break  # there are no more
            links[bool(active.value)].add(link)
            for counter in ERROR_COUNTERS.values():
                given = device, number, ctypes.c_int(counter), ctypes.byref(counted)
                if not self._fails("nvmlDeviceGetNvLinkErrorCounter", *given):
                    errors += counted.value
        info, domain = FabricInfo(), ""
        if self._fails("nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(info)):
            info.state = NO_FABRIC  # or the driver does not know of any
        member = info.state == FABRIC_COMPLETED and not info.status
        if member and any(info.cluster):  # zeros: it reaches no other node
            domain = f"nvl-{bytes(info.cluster).hex()[:8]}.{info.clique}"
        up, down = frozenset(links[True]), frozenset(links[False])
        joined = member or info.state == NO_FABRIC
        return GpuLinks(name.value.decode(), up, down, errors, joined, domain)

    def _fails(self, function: str, *arguments: Any) -> int:
        """Call a function that not every GPU or driver has; 0 if it has succeeded."""
        code: int = getattr(self._library, function, lambda *_: -1)(*arguments)
        return code

    def _call(self, function: str, *arguments: Any) -> None:
        if code := self._fails(function, *arguments):
            raise NvmlError(f"{function}: {self._library.nvmlErrorString(code).decode()}")


def domain_of(gpus: Sequence[GpuLinks]) -> str:
    """The NVLink domain of a node; empty if its GPUs are in none, or not all in one."""
    domains = {gpu.domain for gpu in gpus}
    return domains.pop() if len(domains) == 1 else ""


def link_problems(before: Sequence[GpuLinks], after: Sequence[GpuLinks]) -> list[str]:
    """What is wrong with the links of the GPUs of a node, as two looks at them show; each with what
    to do. A GPU without links is in order, if none of its kind here has any."""
    problems = []
    for index, (then, now) in enumerate(zip(before, after, strict=True)):
        most = max(len(gpu.up) for gpu in after if gpu.name == now.name)
        if len(now.up) < most:
            which = f" (down: {', '.join(map(str, sorted(now.down)))})" if now.down else ""
            problems.append(
                f"GPU {index}: {len(now.up)} of its NVLinks are up{which}, and {most} of another "
                f"{now.name} here; reset it with `nvidia-smi -r -i {index}`, or take this machine "
                "out"
            )
        if now.errors > then.errors:
            problems.append(
                f"GPU {index}: {now.errors - then.errors} NVLink errors within {PAUSE_SECONDS:g} "
                f"s; see `nvidia-smi nvlink -e -i {index}`, and take this machine out if they go on"
            )
        if not now.joined:
            problems.append(
                f"GPU {index}: it has not joined its NVLink fabric; see that nvidia-fabricmanager "
                "runs on this machine"
            )
    return problems


def ask_links(library: str = LIBRARY) -> tuple[list[str], str]:
    """(problems of the NVLinks of this node, its NVLink domain); nothing where there is no NVML.

    Raises:
        NvmlError: a GPU does not answer.
    """
    try:
        nvml = Nvml(library)
    except OSError:
        return [], ""
    try:
        before = nvml.gpus()
        time.sleep(PAUSE_SECONDS)
        after = nvml.gpus()
    finally:
        nvml.close()
    return link_problems(before, after), domain_of(after)
