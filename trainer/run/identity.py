"""The identity of a run: a table of all that determines the result of a step (recipe, code, data,
weights), with short values. All nodes of a run must have the same table."""

import hashlib
import json
import platform
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.format.layout import COMMIT_RECORD, DCP_METADATA
from checkpointing.format.untrusted import MAX_JSON_BYTES
from checkpointing.ranks import exchange
from checkpointing.storage.place import StoragePlace, local, location
from checkpointing.storage.steps import hugging_face_tensors, storage_of
from elastic.node.program import differences, digest
from trainer.models.transformers_model import check_installed
from trainer.recipe import Recipe, RecipeError, resolved
from trainer.recipe.factory import look_here_too
from trainer.recipe.strategies import exact
from trainer.tasks.text_model import reason_for_theirs

MACHINE_BOUND = (
    *("run.dir", "run.device", "data.reader", "data.workers", "data.factory_options.path"),
    *("data.ahead", "data.cache", "data.cache.directory", "data.cache.size"),
    *("model.init_from", "strategy.offload_directory", "elastic.timeout_seconds"),
    *("checkpoint.directory", "checkpoint.slot_directory", "checkpoint.max_bandwidth"),
    *("checkpoint.keep", "checkpoint.keep_every", "checkpoint.keep_best", "checkpoint.best_by"),
    *("tracking.tensorboard", "tracking.wandb", "tracking.project", "tracking.name"),
    *("tracking.prometheus", "tracking.sinks", "tracking.hooks", "tracking.alerts"),
    *("tracking.peak_tflops", "checkpoint.trace", "run.samples"),
)
"""Keys of a recipe that may differ between nodes: paths, whose contents are compared instead;
values that only rank 0 uses; and values that change neither results nor the order of collectives.
All other keys must be equal."""
PACKAGES = ("trainer", "elastic", "checkpointing")
LONG = 24
"""Characters above which values are compared by their digest."""
SAMPLE, MOST_PARTS = 1 << 16, 2048
"""For the digest of weights, SAMPLE bytes are read in each of at most MOST_PARTS places: 128 MiB of
a large model, all of a small one."""
READERS = 16
"""Threads that read the samples of weights: each read from an object store takes long."""


def identify(recipe: Recipe, data: str | None) -> dict[str, str]:
    """Return the identity of a run: key → value, or the digest of a long value. `data`: fingerprint
    of the training data and tokenizer; None: not known yet, `with_data` adds it."""
    device = recipe.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    identity = {
        "code": _digest(_sources()),
        "torch": str(torch.__version__),  # torch's version is a subclass of str
        "run.device": device,
        **of_recipe(recipe),
    }
    if recipe.in_bucket:  # unlike a directory, a bucket has one URL on all nodes
        identity["run.dir"] = _short(recipe.run.dir)
    if exact.used(recipe):  # other kernels round differently
        identity |= machine(device)
    if recipe.model.init_from:
        given = location(recipe.model.init_from)
        identity["model.init_from"] = weights_digest(given)
        has_config = storage_of(given).exists(given / "config.json")
        if has_config and (reason := reason_for_theirs(recipe)):
            identity["transformers"] = check_installed(reason)
    for key, name in recipe.own_code.items():
        identity[f"{key} source"] = _digest(_module_source(name.split(":")[0]))
    return identity if data is None else with_data(identity, data)


def of_recipe(recipe: Recipe) -> dict[str, str]:
    """Return the part of an identity that the recipe alone determines."""
    return {key: _short(value) for key, value in flat(resolved(recipe)) if decides(key)}


def with_data(identity: Mapping[str, str], data: str) -> dict[str, str]:
    return {**identity, "data.fingerprint": _short(data)}


def machine(device: str | torch.device) -> dict[str, str]:
    """Return the properties of this machine by which libraries select kernels: instruction set and
    maker of its CPU, and the GPU `device`. The string "cuda" stands for all GPUs of the machine,
    and does not initialize CUDA."""
    properties = {"cpu": _cpu()}
    if isinstance(device, torch.device) and device.type == "cuda":
        properties["gpu"] = torch.cuda.get_device_name(device)
    elif device == "cuda":
        properties["gpu"] = " + ".join(_driver_gpus()) or "unknown"
    return properties


def computed_by(identity: Mapping[str, str], device: torch.device) -> dict[str, str]:
    """Return what the last bits of results on this rank depend on, besides recipe and data."""
    return {"code": identity["code"], "torch": identity["torch"], **machine(device)}


@dataclass(frozen=True)
class RunAgreement:
    """What all ranks agreed on at the start of an attempt, after comparing their identities."""

    attempt: str
    """Name of this attempt in the ledger; the same on all ranks."""
    init_from: str
    """Digest of the weights in `model.init_from`; "" if the recipe names none."""
    computed_by: Mapping[str, str]
    """The result of `computed_by`; values that differ between ranks are joined by " + "."""
    note: str = ""
    """How the machines of the ranks differ, in words; "" if they are alike."""
    changes: bool = False
    """Whether the run has accepted changes of the data, see data_changes.py."""


def check_agreement(
    recipe: Recipe, identity: Mapping[str, str], device: torch.device, *, changes: bool = False
) -> RunAgreement:
    """Compare the identities and machines of all ranks, and agree on a name for the attempt. On all
    ranks; costs one small all-reduce if they are equal. Raises RecipeError if the identities
    differ, or in exact mode the machines. `changes`: whether this rank has read accepted changes of
    the data; only rank 0 does."""
    kind = computed_by(identity, device)
    ours = {**identity, **machine(device)} if exact.used(recipe) else dict(identity)
    # 60 bits, so that the negatives fit an int64, too.
    numbers = [int(digest(values)[:15], 16) for values in (ours, kind)]
    # MAX of a number and of its negative show in one all-reduce whether all ranks are equal. The
    # largest random number names the attempt.
    negatives = [-number for number in numbers]
    word = torch.tensor([*numbers, *negatives, changes, secrets.randbits(62)])
    dist.all_reduce(word, dist.ReduceOp.MAX)
    attempt = f"{int(word[-1]) & 0xFFFFFFFF:08x}"
    init_from = identity.get("model.init_from", "") if recipe.model.init_from else ""
    if word[0] == -word[2] and word[1] == -word[3]:
        return RunAgreement(attempt, init_from, kind, changes=bool(word[4]))
    group = dist.group.WORLD
    assert group
    reports: list[dict[str, dict[str, str]]] = exchange(
        {"identity": ours, "kind": kind}, group.size(), group
    )
    every = [report["identity"] for report in reports]
    _refuse_strangers(every)
    kinds = [report["kind"] for report in reports]
    return RunAgreement(attempt, init_from, *_side_by_side(kinds), changes=bool(word[4]))


def _side_by_side(kinds: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], str]:
    merged, parts = {}, []
    for key in sorted({key for kind in kinds for key in kind}):
        values = [kind.get(key, "none") for kind in kinds]
        each = sorted(set(values))
        merged[key] = " + ".join(each)
        if len(each) > 1:
            where = (f"{v} on {values.count(v)} (rank {values.index(v)})" for v in each)
            parts.append(f"{key} is {', '.join(where)}")
    return merged, (
        f"ranks compute on unlike machines: {'; '.join(parts)}; which of them computes what "
        "changes the last bits of results (run.determinism=exact refuses this)"
    )


def _refuse_strangers(every: Sequence[Mapping[str, str]]) -> None:
    digests = [digest(identity) for identity in every]
    if len(set(digests)) == 1:
        return
    common = max(digests, key=digests.count)  # the most frequent; of several, the lowest rank's
    ranks = [rank for rank, identity in enumerate(digests) if identity != common]
    odd, usual = ranks[0], digests.index(common)
    names = f"on rank {odd}", f"on rank {usual}"
    raise RecipeError(
        f"rank {', '.join(map(str, ranks))} would train something else than rank {usual}: "
        f"{differences(every[odd], every[usual], *names)}; start all nodes with the same recipe, "
        "code and data, an exact run also on machines of one kind"
    )


def decides(key: str) -> bool:
    """Return whether a key of a resolved recipe must be equal on all nodes, and may change what a
    run computes if it differs between attempts. Paths of data sources, `data.sources.0.path`, and
    the keys in MACHINE_BOUND need not be."""
    key = re.sub(r"\.\d+$", "", key)  # without the index of an item in a list
    return key not in MACHINE_BOUND and not (
        key.startswith("data.sources.") and key.endswith(".path")
    )


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key path, value) of every leaf of nested mappings and lists."""
    if isinstance(tree, Mapping) or (isinstance(tree, list) and tree):
        pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in pairs:
            yield from flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _cpu() -> str:
    """Return the instruction set that torch uses, and the CPU's maker: MKL goes by these."""
    # Only the first entry is read, because the kernel interrupts each core whose entry is read.
    found = _values(Path("/proc/cpuinfo"), "vendor_id", "CPU implementer")
    return f"{torch.backends.cpu.get_cpu_capability()} ({next(found, platform.machine())})"


def _driver_gpus() -> list[str]:
    """Return the distinct GPU models of this machine, as NVIDIA's driver lists them."""
    paths = Path("/proc/driver/nvidia/gpus").glob("*/information")
    return sorted({name for path in paths for name in _values(path, "Model")})


def _values(path: Path, *keys: str) -> Iterator[str]:
    """Yield the values of these keys in a file of lines `key: value`."""
    with suppress(OSError), path.open() as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() in keys:
                yield value.strip()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONG else _digest([text.encode()])


def _digest(parts: Iterable[bytes]) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8) + part)
    return f"#{hashed.hexdigest()[:12]}"


def _sources() -> Iterator[bytes]:
    """Yield name and contents of every module of PACKAGES, without editors' hidden files."""
    for package in PACKAGES:
        for folder in _folders(package):
            for path in sorted(folder.rglob("*.py")):
                name = path.relative_to(folder)
                if not any(part.startswith(".") for part in name.parts):
                    yield str(name).encode()
                    yield path.read_bytes()


def _module_source(name: str) -> Iterator[bytes]:
    """Yield the contents of the files that may be a user's module. They are not imported, because
    an import may initialize CUDA."""
    look_here_too()
    package, *rest = name.split(".")
    spec = find_spec(package)
    places = [Path(folder).joinpath(*rest) for folder in _folders(package)]
    files = [path.with_suffix(".py") for path in places] + [path / "__init__.py" for path in places]
    if spec and spec.origin and not rest:
        files.append(Path(spec.origin))
    return (path.read_bytes() for path in files if path.is_file())


def _folders(package: str) -> Sequence[Path]:
    spec = find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]


def weights_digest(directory: StoragePlace) -> str:
    """Return a digest that tells the weights in a directory or bucket from others: of config.json
    and the commit record, or, without that record, of samples of the weights. Raises
    DamagedCheckpoint or StorageError if these cannot be read."""
    return _digest(_weights(directory))


def _weights(directory: StoragePlace) -> Iterator[bytes]:
    """Yield what distinguishes a checkpoint from others: small files, and samples of weights."""
    storage = storage_of(directory)
    config, metadata = directory / "config.json", directory / DCP_METADATA
    record = metadata if storage.exists(metadata) else directory / COMMIT_RECORD
    for small in (config, record):
        if storage.exists(small):
            yield small.name.encode()
            yield storage.read(small, MAX_JSON_BYTES)
    parts: list[tuple[str, int, int]] = []
    if record == metadata:
        files = sorted(local(directory).glob("*.distcp"))  # DCP reads only from a filesystem
        sizes = {path.name: path.stat().st_size for path in files}
        length = max(SAMPLE, -(-sum(sizes.values()) // MOST_PARTS))
        parts = [
            (name, begin, min(length, size - begin))
            for name, size in sizes.items()
            for begin in range(0, size, length)
        ]
        yield json.dumps(sizes).encode()
    elif not storage.exists(record):  # a commit record has checksums of all tensors
        tensors = hugging_face_tensors(directory)
        parts = sorted((one.file, one.begin, one.meta.nbytes) for one in tensors.values())
        parts = parts[:: -(-len(parts) // MOST_PARTS) or 1]
        yield json.dumps([[name, str(tensors[name].meta)] for name in sorted(tensors)]).encode()
    with ExitStack() as stack, ThreadPoolExecutor(READERS) as pool:
        opened = {
            name: stack.enter_context(storage.open(directory / name))
            for name in dict.fromkeys(name for name, *_ in parts)
        }

        def middle(part: tuple[str, int, int]) -> bytes:
            name, begin, size = part
            data = memoryview(bytearray(min(size, SAMPLE)))
            place = begin + max(0, size - SAMPLE) // 2
            return bytes(data[: opened[name].read_into([data], place)])

        yield from pool.map(middle, parts)
