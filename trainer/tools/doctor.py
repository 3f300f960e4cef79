"""Reports what this machine offers for training, and what is missing for which feature."""

import ctypes
import fcntl
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from checkpointing.save.slots import available_bytes
from checkpointing.storage.posix import filesystem, is_shared
from elastic.group.health import check_node
from elastic.process import usable_cores
from trainer.recipe import Recipe
from trainer.text import table

STORE_PORT = 29400
ENOUGH_FILES = 4096
"""Open files per process that a store of some hundred nodes, and a loader of many shards, need."""
LITTLE_SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm below which the size is a container's default rather than a choice."""
DRIVER_SECONDS = 30.0
PURPOSES = {
    "parquet": "data in parquet and arrow",
    "zstd": "data in .zst",
    "tensorboard": "tracking.tensorboard",
    "s3": "s3://… in checkpoint.directory, data.sources and model.init_from",
    "fp8": "precision.matmul",
    "flash": "FlashAttention-4, on Hopper and Blackwell",
}
"""Extra of the package → the feature that needs it."""

State = Literal["ok", "note", "WRONG"]


@dataclass(frozen=True)
class Finding:
    """The result of one check of the machine."""

    name: str
    state: State
    """note: training can start, but a feature is missing. WRONG: training cannot start."""
    what: str
    cure: str = ""
    """The remedy; empty where none is needed."""


def examine(recipe: Recipe | None = None) -> Iterator[Finding]:
    """Check this machine, in general or for one recipe.

    Args:
        recipe: its run directory and the extras it needs are checked; None: the working directory
            is checked, and no extra is required.
    """
    yield _ok("python", f"{platform.python_version()}, {sys.executable}")
    yield from _torch(recipe)
    yield from _room()
    yield from _folder(recipe.directory if recipe else Path.cwd())
    yield from _limits()
    yield from _network()
    yield from _compiler(recipe)
    needed = _needed_extras(recipe) if recipe else set()
    for extra, requirement in _requirements().items():
        yield _extra(extra, requirement, needed=extra in needed)
    problems = check_node(lambda: 0.0, network=True).problems
    if not problems:
        yield _ok("health", "cores and GPUs compute right; links and ports are in order")
    for problem in problems:
        yield Finding("health", "WRONG" if problem.refuses else "note", str(problem))


def report(findings: list[Finding]) -> str:
    """Format findings as a table, each with its remedy, and a last line that says whether training
    can start."""
    lines = table([[one.state, one.name, one.what] for one in findings])
    indent = " " * (len("WRONG") + 2)
    shown = [
        text
        for line, one in zip(lines, findings, strict=True)
        for text in (line, f"{indent}→ {one.cure}" if one.cure else "")
        if text
    ]
    wrong = sum(one.state == "WRONG" for one in findings)
    end = f"training cannot start here: {wrong} thing(s) to mend" if wrong else ""
    return "\n".join([*shown, "", end or "training can start here"])


def can_start(findings: list[Finding]) -> bool:
    """Whether no finding prevents training from starting."""
    return all(one.state != "WRONG" for one in findings)


def _ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def _torch(recipe: Recipe | None) -> Iterator[Finding]:
    # NVML counts GPUs without a CUDA context, which would take memory on each
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        import torch
        import torch.distributed as dist
    # OSError: a shared library is missing or damaged.
    except (ImportError, OSError) as error:
        yield Finding("torch", "WRONG", f"cannot be imported: {error}", "pip install torch")
        return
    built = torch.version.cuda or torch.version.hip
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    nccl = ""
    if built and dist.is_nccl_available():
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    build = f"built for CUDA {built}" if built else "built for the CPU"
    yield _ok("torch", f"{torch.__version__}, {build}, {gloo}{nccl}")
    yield _gpus(recipe, built, torch.cuda.is_available() and torch.cuda.device_count())


def _gpus(recipe: Recipe | None, built: str | None, count: int) -> Finding:
    """Compare the GPUs that the driver reports with those that this build of torch can use."""
    driver, wanted = _driver(), "cpu" if recipe is None else recipe.run.device
    if count and wanted != "cpu":
        return _ok("GPUs", f"{count}: {driver or 'nvidia-smi does not answer'}")
    if driver and not built:
        cure = "pip install --force-reinstall torch, from the index of its CUDA builds"
        return Finding("GPUs", "WRONG", f"{driver}; torch is built for the CPU alone", cure)
    if driver and not count:
        cure = f"a driver for CUDA {built}, or a torch for that of the driver; see nvidia-smi"
        return Finding("GPUs", "WRONG", f"{driver}; torch {built} cannot use them", cure)
    if wanted == "cuda":
        cure = "install NVIDIA's driver; in a container, docker run --gpus all"
        return Finding("GPUs", "WRONG", "none, but run.device is cuda", cure)
    return _ok("GPUs", f"{count or 'none'}: it trains on {usable_cores()} CPU core(s)")


def _driver() -> str:
    """Return the GPUs that nvidia-smi lists; empty without a driver."""
    if not Path("/dev/nvidiactl").exists() or not (tool := shutil.which("nvidia-smi")):
        return ""
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=DRIVER_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(dict.fromkeys(listed.splitlines()))


def _room() -> Iterator[Finding]:
    yield _ok("memory", f"{available_bytes() / 1e9:.1f} GB free, {usable_cores()} core(s)")
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", "note", str(error), "mount a tmpfs there")
        return
    size, free = (count * status.f_frsize / 1e9 for count in (status.f_blocks, status.f_bavail))
    what = f"{free:.2f} GB free of {size:.2f}"
    if status.f_bavail * status.f_frsize >= LITTLE_SHARED_MEMORY:
        yield _ok("/dev/shm", f"{what}; checkpoints are copied there first")
        return
    yield Finding(
        "/dev/shm",
        "note",
        f"{what}; a restart from memory needs room for a copy of the state, NCCL for buffers",
        "remove what is in it; in a container, docker run --ipc=host, or an emptyDir of medium "
        "Memory",
    )


def _folder(directory: Path) -> Iterator[Finding]:
    """Check the file operations that a run directory needs, in it or its nearest existing
    parent."""
    place = directory.absolute()
    while not os.path.lexists(place):
        place = place.parent
    kind = filesystem(place)
    shared = "nodes can share it" if is_shared(kind) else "of this machine alone"
    try:
        # Tried: mount options do not tell what a filesystem supports.
        with tempfile.TemporaryDirectory(prefix=".perdure-doctor-", dir=place) as scratch:
            lacking = list(_lacking(Path(scratch)))
        free = shutil.disk_usage(place).free / 1e9
    except OSError as error:
        cure = "choose another run.dir, or mend its permissions"
        yield Finding("run.dir", "WRONG", f"{place} cannot be written: {error.strerror}", cure)
        return
    what = f"{place}: {kind or 'unknown filesystem'}, {shared}, {free:.1f} GB free"
    yield _ok("run.dir", what)
    for problem, cure in lacking:
        yield Finding("run.dir", "note", f"{place}: {problem}", cure)


def _lacking(scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield pairs: an operation that the filesystem does not support, and the remedy."""
    file, other = scratch / "a", scratch / "b"
    with file.open("wb") as opened:
        opened.write(b"x")
        os.fsync(opened.fileno())
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            yield (
                f"no locks ({error.strerror}): whether another launch lives takes 7 s to tell",
                "mount it with locks; NFS without nolock",
            )
    try:
        os.link(file, other)
    except OSError as error:
        yield (
            f"no hard links ({error.strerror}): no secret can be made in it",
            "name a file of yours: perdure train --secret FILE",
        )
    # Checkpoints and records are committed by renames.
    os.replace(file, scratch / "c")


def _limits() -> Iterator[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or files >= ENOUGH_FILES:
        yield _ok("open files", "as many as it likes" if files < 0 else f"{files:,} a process")
    else:
        cure = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
        yield Finding("open files", "note", f"{files:,}: too few for jobs of many nodes", cure)
    adapters = Path("/sys/class/infiniband")
    if not (adapters.is_dir() and any(adapters.iterdir())):
        return
    names = ", ".join(sorted(path.name for path in adapters.iterdir()))
    try:
        # NCCL loads it in the same way.
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        cure = "apt-get install libibverbs1 ibverbs-providers"
        yield Finding("InfiniBand", "note", f"{names}; NCCL takes TCP without libibverbs", cure)
        return
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield _ok("InfiniBand", names)
    else:
        cure = "ulimit -l unlimited; docker run --ulimit memlock=-1"
        yield Finding("InfiniBand", "note", f"{names}; memlock is {locked:,} bytes", cure)


def _network() -> Iterator[Finding]:
    folder = Path("/sys/class/net")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    up = [name for name in names if _operstate(folder / name) in ("up", "unknown")]
    yield _ok("interfaces", ", ".join(up) or "none is up")
    host = socket.gethostname()
    try:
        addresses = {found[4][0] for found in socket.getaddrinfo(host, None)}
        # Other nodes cannot reach a name that resolves to loopback.
        loopback = all(str(one).startswith("127.") or one == "::1" for one in addresses)
        what = f"{host} is {', '.join(sorted(map(str, addresses)))}"
    except OSError as error:
        loopback, what = True, f"{host} has no address: {error.strerror}"
    if loopback:
        cure = "for jobs of several nodes mend /etc/hosts, or give --local-addr"
        yield Finding("host name", "note", what, cure)
    else:
        yield _ok("host name", what)
    try:
        with socket.create_server(("", STORE_PORT)):
            yield _ok("port", f"{STORE_PORT} is free for a store")
    except OSError as error:
        what = f"{STORE_PORT}: {error.strerror}; a store is there already, or something else"
        yield Finding("port", "note", what, "perdure store --port N, and the same in the endpoint")


def _operstate(interface: Path) -> str:
    with suppress(OSError):
        return (interface / "operstate").read_text().strip()
    return ""


def _compiler(recipe: Recipe | None) -> Iterator[Finding]:
    missing = [
        package
        for package, there in {
            "g++": shutil.which("g++") or shutil.which("clang++"),
            "python3-dev": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        }.items()
        if not there
    ]
    if not missing:
        yield _ok("compiler", "for torch.compile (strategy.compile, and kernels of updates)")
        return
    needed = recipe is not None and recipe.strategy.compile
    what = f"no {' and no '.join(missing)}, which torch.compile needs"
    cure = f"apt-get install {' '.join(missing)}"
    yield Finding("compiler", "WRONG" if needed else "note", what, cure)


def _needed_extras(recipe: Recipe) -> set[str]:
    """Return the extras without which this recipe cannot train."""
    places = [recipe.checkpoint.directory, recipe.model.init_from]
    places += [source.path for source in recipe.data.sources]
    used = {
        "tensorboard": recipe.tracking.tensorboard,
        "s3": any(urlsplit(place or "").scheme == "s3" for place in places),
        "fp8": recipe.precision.matmul is not None,
    }
    return {extra for extra, is_used in used.items() if is_used}


def _requirements() -> dict[str, str]:
    """Map each extra in PURPOSES to its pip requirements; empty where Perdure runs from a checkout
    without being installed."""
    try:
        lines = requires("perdure") or ()
    except PackageNotFoundError:
        return {}
    stated = [re.split(r" *; *extra == ", line) for line in lines]
    by_extra = {rest[0].strip("'\""): requirement for requirement, *rest in stated if rest}
    return {extra: by_extra[extra] for extra in PURPOSES if extra in by_extra}


def _extra(extra: str, requirement: str, *, needed: bool) -> Finding:
    name = re.split(r"[^\w.-]", requirement)[0]
    try:
        return _ok(extra, f"{name} {version(name)}, for {PURPOSES[extra]}")
    except PackageNotFoundError:
        state: State = "WRONG" if needed else "note"
        what = f"{name} is not installed: {PURPOSES[extra]}"
        return Finding(extra, state, what, f"pip install {shlex.quote(requirement)}")
