"""Reports what this machine offers for training, and which features cannot be used, and why."""

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

from checkpointing.errors import CheckpointError, explain
from checkpointing.save.slots import available_bytes
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from checkpointing.storage.posix import filesystem, is_shared
from elastic.group.health import check_node
from elastic.process import usable_cores
from trainer.recipe import Recipe
from trainer.text import table

STORE_PORT = 29400
ENOUGH_FILES = 4096
"""Open files per process that suffice for a store of some hundred nodes and for a loader."""
LITTLE_SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm below which the size is a container's default rather than a choice."""
DRIVER_SECONDS = 30.0
BUCKETS = ("s3", "gs", "az")
"""Schemes of URLs, each the name of the extra with its client."""
PURPOSES = {
    "parquet": "data in parquet and arrow",
    "zstd": "data in .zst",
    "tensorboard": "tracking.tensorboard",
    **{
        scheme: f"{scheme}://… in run.dir, checkpoint.directory, data.sources and model.init_from"
        for scheme in BUCKETS
    },
    "fp8": "precision.matmul",
    "flash": "FlashAttention-4, on Hopper and Blackwell",
}
"""Extra of the package → features that need it."""

State = Literal["ok", "note", "WRONG"]


@dataclass(frozen=True)
class _MachineFinding:
    """The result of one check of the machine."""

    name: str
    state: State
    """ "note": training can start, but a feature is missing. "WRONG": training cannot start."""
    what: str
    cure: str = ""


def examine(recipe: Recipe | None = None) -> Iterator[_MachineFinding]:
    """Check this machine. With a recipe, also check its run directory, buckets and extras; without
    one, check the working directory, and require no extra."""
    yield _ok("python", f"{platform.python_version()}, {sys.executable}")
    yield from _torch(recipe)
    yield from _room()
    yield from _folder(recipe.directory if recipe else Path.cwd())
    yield from _limits()
    yield from _network()
    yield from _compiler(recipe)
    needed = _needed_extras(recipe) if recipe else set()
    requirements = _requirements()
    if not (_driver() or "flash" in needed):  # FlashAttention-4 needs a GPU
        requirements.pop("flash", None)
    for extra, requirement in requirements.items():
        yield _extra(extra, requirement, needed=extra in needed)
    if recipe:
        yield from buckets(recipe)
    problems = check_node(lambda: 0.0, network=True).problems
    if not problems:
        yield _ok("health", "cores and GPUs compute right; links and ports are in order")
    for problem in problems:
        yield _MachineFinding("health", "WRONG" if problem.refuses else "note", str(problem))


def report(findings: list[_MachineFinding]) -> str:
    """Format findings as a table with remedies; the last line says whether training can start."""
    shown = []
    lines = table([[finding.state, finding.name, finding.what] for finding in findings])
    for line, finding in zip(lines, findings, strict=True):
        shown += [line, f"       → {finding.cure}"] if finding.cure else [line]
    wrong = sum(finding.state == "WRONG" for finding in findings)
    end = f"training cannot start here: {wrong} thing(s) to repair" if wrong else ""
    return "\n".join([*shown, "", end or "training can start here"])


def _ok(name: str, what: str) -> _MachineFinding:
    return _MachineFinding(name, "ok", what)


def _torch(recipe: Recipe | None) -> Iterator[_MachineFinding]:
    # With NVML, torch counts GPUs without initializing CUDA in this process.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        import torch
        import torch.distributed as dist
    # OSError: a shared library is missing or damaged
    except (ImportError, OSError) as error:
        yield _MachineFinding("torch", "WRONG", f"cannot be imported: {error}", "pip install torch")
        return
    built = torch.version.cuda or torch.version.hip
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    nccl = ""
    if built and dist.is_nccl_available():
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    build = f"built for CUDA {built}" if built else "built for the CPU"
    yield _ok("torch", f"{torch.__version__}, {build}, {gloo}{nccl}")
    yield _gpus(recipe, built, torch.cuda.is_available() and torch.cuda.device_count())


def _gpus(recipe: Recipe | None, built: str | None, count: int) -> _MachineFinding:
    driver, wanted = _driver(), "cpu" if recipe is None else recipe.run.device
    if count and wanted != "cpu":
        return _ok("GPUs", f"{count}: {driver or 'nvidia-smi does not answer'}")
    if driver and not built:
        cure = "pip install --force-reinstall torch, from the index of its CUDA builds"
        return _MachineFinding("GPUs", "WRONG", f"{driver}; torch is built for the CPU alone", cure)
    if driver and not count:
        cure = f"install a driver for CUDA {built}, or torch for the CUDA that nvidia-smi shows"
        return _MachineFinding("GPUs", "WRONG", f"{driver}; torch {built} cannot use them", cure)
    if wanted == "cuda":
        cure = "install NVIDIA's driver; in a container, docker run --gpus all"
        return _MachineFinding("GPUs", "WRONG", "none, but run.device is cuda", cure)
    return _ok("GPUs", f"{count or 'none'}: training uses {usable_cores()} CPU core(s)")


def _driver() -> str:
    """GPUs and driver version that nvidia-smi lists; "" without a driver."""
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


def _room() -> Iterator[_MachineFinding]:
    yield _ok("memory", f"{available_bytes() / 1e9:.1f} GB free, {usable_cores()} core(s)")
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        yield _MachineFinding("/dev/shm", "note", str(error), "mount a tmpfs there")
        return
    size, free = (count * status.f_frsize for count in (status.f_blocks, status.f_bavail))
    what = f"{free / 1e9:.2f} GB free of {size / 1e9:.2f}"
    if free >= LITTLE_SHARED_MEMORY:
        yield _ok("/dev/shm", f"{what}; checkpoints are copied there first")
        return
    what += "; a restart from memory needs room for a copy of the state, NCCL for buffers"
    cure = "remove files there; in a container, docker run --ipc=host, or an emptyDir of medium "
    yield _MachineFinding("/dev/shm", "note", what, f"{cure}Memory")


def _folder(directory: Path) -> Iterator[_MachineFinding]:
    """Check the file operations that a run directory needs, in it or its nearest existing
    parent."""
    place = directory.absolute()
    while not os.path.lexists(place):
        place = place.parent
    kind = filesystem(place)
    shared = "nodes can share it" if is_shared(kind) else "of this machine alone"
    try:
        # by trying: mount options do not tell what a filesystem supports
        with tempfile.TemporaryDirectory(prefix=".perdure-doctor-", dir=place) as scratch:
            lacking = list(_lacking(Path(scratch)))
        free = shutil.disk_usage(place).free / 1e9
    except OSError as error:
        what = f"{place} cannot be written: {error.strerror}"
        cure = "choose another run.dir, or correct its permissions"
        yield _MachineFinding("run.dir", "WRONG", what, cure)
        return
    what = f"{place}: {kind or 'unknown filesystem'}, {shared}, {free:.1f} GB free"
    yield _ok("run.dir", what)
    for problem, cure in lacking:
        yield _MachineFinding("run.dir", "note", f"{place}: {problem}", cure)


def _lacking(scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield (operation that the filesystem does not support, remedy)."""
    file = scratch / "a"
    with file.open("wb") as opened:
        opened.write(b"x")
        os.fsync(opened.fileno())
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            what = "it takes 7 s to detect whether another launch runs"
            yield f"no locks ({error.strerror}): {what}", "mount it with locks; NFS without nolock"
    try:
        os.link(file, scratch / "b")
    except OSError as error:
        what = f"no hard links ({error.strerror}): the job's secret cannot be created in it"
        yield what, "use a file elsewhere: perdure train --secret FILE"
    # checkpoints and records are committed by renames
    os.replace(file, scratch / "c")


def _limits() -> Iterator[_MachineFinding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or files >= ENOUGH_FILES:
        yield _ok("open files", "unlimited" if files < 0 else f"{files:,} a process")
    else:
        cure = "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
        what = f"{files:,}: too few for jobs of many nodes"
        yield _MachineFinding("open files", "note", what, cure)
    names = ", ".join(_entries("/sys/class/infiniband"))
    if not names:
        return
    try:
        ctypes.CDLL("libibverbs.so.1")  # as NCCL loads it
    except OSError:
        cure = "apt-get install libibverbs1 ibverbs-providers"
        what = f"{names}; NCCL uses TCP without libibverbs"
        yield _MachineFinding("InfiniBand", "note", what, cure)
        return
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield _ok("InfiniBand", names)
    else:
        cure = "ulimit -l unlimited; docker run --ulimit memlock=-1"
        yield _MachineFinding("InfiniBand", "note", f"{names}; memlock is {locked:,} bytes", cure)


def _entries(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _network() -> Iterator[_MachineFinding]:
    up = []
    for name in _entries("/sys/class/net"):
        with suppress(OSError):
            state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
            up += [name] if state in ("up", "unknown") else []
    yield _ok("interfaces", ", ".join(up) or "none is up")
    host = socket.gethostname()
    try:
        addresses = {found[4][0] for found in socket.getaddrinfo(host, None)}
        # other nodes cannot reach a name that resolves to loopback
        loopback = all(str(address).startswith("127.") or address == "::1" for address in addresses)
        what = f"{host} is {', '.join(sorted(map(str, addresses)))}"
    except OSError as error:
        loopback, what = True, f"{host} has no address: {error.strerror}"
    if loopback:
        cure = "for jobs of several nodes correct /etc/hosts, or use --local-addr"
        yield _MachineFinding("host name", "note", what, cure)
    else:
        yield _ok("host name", what)
    try:
        with socket.create_server(("", STORE_PORT)):
            yield _ok("port", f"{STORE_PORT} is free for a store")
    except OSError as error:
        what = f"{STORE_PORT}: {error.strerror}; a store or another program uses it"
        cure = "perdure store --port N, and the same in the endpoint"
        yield _MachineFinding("port", "note", what, cure)


def _compiler(recipe: Recipe | None) -> Iterator[_MachineFinding]:
    installed = {
        "g++": shutil.which("g++") or shutil.which("clang++"),
        "python3-dev": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    }
    missing = [package for package, there in installed.items() if not there]
    if not missing:
        yield _ok("compiler", "for torch.compile (strategy.compile, and kernels of updates)")
        return
    needed = recipe is not None and recipe.strategy.compile
    what = f"no {' and no '.join(missing)}, which torch.compile needs"
    cure = f"apt-get install {' '.join(missing)}"
    yield _MachineFinding("compiler", "WRONG" if needed else "note", what, cure)


def _needed_extras(recipe: Recipe) -> set[str]:
    others = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
    schemes = {others.get(place.protocol, place.protocol) for place in _remote(recipe).values()}
    used = {"tensorboard": recipe.tracking.tensorboard, "fp8": recipe.precision.matmul is not None}
    return {*schemes.intersection(BUCKETS), *(extra for extra, is_used in used.items() if is_used)}


def _remote(recipe: Recipe) -> dict[str, ObjectPath]:
    """Recipe key → place in an object store that it names."""
    return {key: ObjectPath.of(path) for key, path in recipe.paths.items() if "://" in path}


def buckets(recipe: Recipe) -> Iterator[_MachineFinding]:
    """Check that this machine may list the places in object stores that a recipe names. They may
    be empty; whether they can be written is not checked."""
    for key, place in _remote(recipe).items():
        try:
            store_of(place).children(place)
        except (CheckpointError, OSError) as error:  # the message has the remedy
            yield _MachineFinding(key, "WRONG", explain(error))
        else:
            yield _ok(key, f"{place} can be read")


def _requirements() -> dict[str, str]:
    """Extra in PURPOSES → its pip requirement; {} if Perdure runs from a checkout without being
    installed."""
    try:
        lines = requires("perdure") or ()
    except PackageNotFoundError:
        return {}
    stated = [re.split(r" *; *extra == ", line) for line in lines]
    by_extra = {rest[0].strip("'\""): requirement for requirement, *rest in stated if rest}
    return {extra: by_extra[extra] for extra in PURPOSES if extra in by_extra}


def _extra(extra: str, requirement: str, *, needed: bool) -> _MachineFinding:
    name = re.split(r"[^\w.-]", requirement)[0]
    try:
        return _ok(extra, f"{name} {version(name)}, for {PURPOSES[extra]}")
    except PackageNotFoundError:
        state: State = "WRONG" if needed else "note"
        what = f"{name} is not installed: {PURPOSES[extra]}"
        return _MachineFinding(extra, state, what, f"pip install {shlex.quote(requirement)}")
