"""Faults of a node's network, read from /sys: InfiniBand and RoCE ports, and the interfaces that
gloo and NCCL are configured to use.

Missing hardware is no fault, and neither is a disabled port that no setting names."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PORTS, INTERFACES = "sys/class/infiniband", "sys/class/net"
PAUSE_SECONDS = 0.2
PORT_ERRORS = (
    *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
)
INTERFACE_ERRORS = ("rx_crc_errors", "rx_frame_errors", "tx_carrier_errors")
"""Names of counters that rise only if a link is faulty: PORT_ERRORS of ports, INTERFACE_ERRORS of
network interfaces."""
HCA, NO_HCA = "NCCL_IB_HCA", "NCCL_IB_DISABLE"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that select network interfaces for gloo and NCCL."""


@dataclass(frozen=True)
class _AdapterPort:
    """A port of an InfiniBand or RoCE adapter."""

    name: str
    """Adapter and port number as in NCCL_IB_HCA, such as `mlx5_0:1`."""
    kind: str
    """Adapter type and link layer; only ports of the same kind are compared."""
    state: str
    """ACTIVE, DOWN, INIT or ARMED."""
    enabled: bool
    rate: float
    """Link speed in Gb/s."""
    errors: Mapping[str, int]


def network_problems(
    root: Path, environment: Mapping[str, str], pause: float = PAUSE_SECONDS
) -> list[str]:
    """Returns one line for each fault of the network: what is wrong, and what to do. `root`: folder
    that contains `sys`; `/` outside of tests. `environment`: variables of the ranks."""
    before = _counters(root, environment)
    # Only counters that rise now indicate a fault; old errors do not.
    if before:
        time.sleep(pause)
    problems = [*_port_problems(root, environment), *_interface_problems(root, environment)]
    for name, errors in _counters(root, environment).items():
        then = before.get(name, errors)
        more = {key: count - then.get(key, count) for key, count in errors.items()}
        if risen := [f"{key} by {count}" for key, count in more.items() if count > 0]:
            problems.append(
                f"{name}: errors rise within {pause:g} s ({', '.join(risen)}); clean or replace "
                "its cable or transceiver"
            )
    return problems


def _port_problems(root: Path, environment: Mapping[str, str]) -> Iterator[str]:
    ports = list(_ports(root, environment))
    named = environment.get(HCA, "").lstrip("=")
    named = "" if named.startswith("^") else named
    up = [port for port in ports if port.state == "ACTIVE"]
    for port in ports:
        if port.state == "INIT":
            yield f"{port.name} waits to be set up; see that a subnet manager (opensm) runs"
        elif port.state != "ACTIVE" and named:
            yield f"{port.name} is {port.state}, and {HCA} names it; see its cable and its switch"
        # A port may be unused on purpose, but hardly if other ports of its kind are in use.
        alike = [other for other in up if other.kind == port.kind]
        if port.state not in ("ACTIVE", "INIT") and not named and port.enabled and alike:
            yield (
                f"{port.name} is {port.state}, and {len(alike)} of its kind on this machine are "
                f"ACTIVE; see its cable and its switch, or name the ports to use in {HCA}"
            )
        most = max((other.rate for other in alike), default=0.0)
        if port in up and port.rate < most:
            yield (
                f"{port.name} runs at {port.rate:g} Gb/s, and another of its kind on this machine "
                f"at {most:g}; see its cable and its switch, or name the ports to use in {HCA}"
            )
    if named and not ports and (root / PORTS).is_dir():
        known = ", ".join(sorted(adapter.name for adapter in (root / PORTS).iterdir()))
        yield f"{HCA}={environment[HCA]} names no adapter of this machine; it has {known or 'none'}"


def _interface_problems(root: Path, environment: Mapping[str, str]) -> Iterator[str]:
    folder = root / INTERFACES
    if not folder.is_dir():
        return
    known = sorted(path.name for path in folder.iterdir())
    for variable in (GLOO, NCCL):
        setting = environment.get(variable, "")
        if not setting or setting.startswith("^"):
            continue
        # NCCL takes prefixes of names unless the setting begins with =; gloo takes whole names.
        exact = variable == GLOO or setting.startswith("=")
        for word in filter(None, setting.lstrip("=").split(",")):
            selected = [
                name for name in known if name == word or (not exact and name.startswith(word))
            ]
            if not selected:
                yield f"{variable}={setting}: there is no interface {word}, but {', '.join(known)}"
            for name in selected:
                if _read(folder / name / "operstate") in ("down", "lowerlayerdown"):
                    yield (
                        f"{variable}={setting}: interface {name} is down; see its cable, or start "
                        f"it with `ip link set {name} up`"
                    )
    for name in known:
        slaves = _read(folder / name / "bonding" / "slaves").split()
        for slave in slaves:
            if _read(folder / slave / "operstate") in ("down", "lowerlayerdown"):
                yield (
                    f"interface {slave} of bond {name} is down, so that {name} is slower; see its "
                    "cable and its switch"
                )


def _ports(root: Path, environment: Mapping[str, str]) -> Iterator[_AdapterPort]:
    folder = root / PORTS
    if not folder.is_dir() or environment.get(NO_HCA) == "1":
        return
    for adapter in sorted(folder.iterdir()):
        for path in sorted((adapter / "ports").glob("*")):
            name = f"{adapter.name}:{path.name}"
            if not _selected(name, environment.get(HCA, "")):
                continue
            physical = _read(path / "phys_state").partition(":")[2].strip()
            rate = re.match(r"[0-9.]+", _read(path / "rate"))
            yield _AdapterPort(
                name,
                kind=f"{_read(adapter / 'hca_type')} {_read(path / 'link_layer')}",
                state=_read(path / "state").partition(":")[2].strip(),
                enabled=physical != "Disabled",
                rate=float(rate[0]) if rate else 0.0,
                errors=_numbers(path / "counters", PORT_ERRORS),
            )


def _selected(port: str, setting: str) -> bool:
    """Whether NCCL uses a port, such as `mlx5_0:1`, if NCCL_IB_HCA is `setting`. The setting lists
    prefixes of adapter names, each perhaps with a port number. A leading `=` means whole names
    instead of prefixes, and a leading `^` all ports except those listed."""
    words = [word for word in setting.lstrip("^=").split(",") if word]
    if not words:
        return True
    adapter, _, number = port.partition(":")
    exact = setting.lstrip("^").startswith("=")

    def named(word: str) -> bool:
        name, _, only = word.partition(":")
        same = adapter == name if exact else adapter.startswith(name)
        return same and only in ("", number)

    return any(map(named, words)) != setting.startswith("^")


def _counters(root: Path, environment: Mapping[str, str]) -> dict[str, Mapping[str, int]]:
    """Returns name → error counters of each port and interface in use."""
    selected = {
        port.name: port.errors for port in _ports(root, environment) if port.state == "ACTIVE"
    }
    with suppress(OSError):
        for path in sorted((root / INTERFACES).iterdir()):
            # Bridges and tunnels have no cable: only interfaces of hardware count.
            if (path / "device").exists() and _read(path / "operstate") == "up":
                selected[path.name] = _numbers(path / "statistics", INTERFACE_ERRORS)
    return {name: errors for name, errors in selected.items() if errors}


def _numbers(folder: Path, names: tuple[str, ...]) -> dict[str, int]:
    texts = {name: _read(folder / name) for name in names}
    return {name: int(text) for name, text in texts.items() if text.isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
