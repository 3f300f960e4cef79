"""Everything that decides a step, as keys and short values: what must be the same on all nodes."""

import hashlib
import json
import platform
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.format.layout import COMMIT_RECORD, DCP_METADATA
from checkpointing.format.untrusted import MAX_JSON_BYTES
from checkpointing.ranks import exchange
from checkpointing.storage.steps import hugging_face_tensors
from elastic.node.files import read_bytes
from elastic.node.program import differences, digest
from trainer.models.transformers_model import check_installed
from trainer.recipe import Recipe, RecipeError, resolved
from trainer.recipe.factory import look_here_too
from trainer.recipe.strategies import exact
from trainer.tasks.text_model import reason_for_theirs

MACHINE_BOUND = (
    *("run.dir", "run.device", "data.reader", "data.workers", "data.graph.path"),
    *("model.init_from", "strategy.offload_directory", "elastic.timeout_seconds"),
    *("checkpoint.directory", "checkpoint.slot_directory", "checkpoint.max_bandwidth"),
    *("checkpoint.keep", "checkpoint.keep_every", "checkpoint.keep_best", "checkpoint.best_by"),
    *("tracking.tensorboard", "tracking.wandb", "tracking.project", "tracking.name"),
    *("tracking.prometheus", "tracking.sinks", "tracking.hooks", "tracking.alerts"),
    *("tracking.peak_tflops", "checkpoint.trace"),
)
"""Keys of a recipe that may differ between nodes: paths (what lies there is compared instead), and
what only rank 0 looks at. All others decide a step, or when all ranks meet."""
PACKAGES = ("trainer", "elastic", "checkpointing")
LONG = 24
"""Characters; longer values are compared by their digest."""
SAMPLE, MOST_PARTS = 1 << 16, 2048
"""Bytes that are read of a part of a model, from its middle, and of how many parts: some 128 MiB of
a large model, all of a small one."""


def identify(recipe: Recipe, data: str | None) -> dict[str, str]:
    """Everything that decides a step: key → value, or a digest where that is long.

    Args:
        recipe: of the run.
        data: fingerprint of its training data, which holds that of the tokenizer; None if it is
            not known yet, see `with_data`.
    """
    found = {
        "code": _digest(_sources()),
        "torch": str(torch.__version__),  # it is a class of its own
        "run.device": _device(recipe.run.device),
        **{key: _short(value) for key, value in flat(resolved(recipe)) if decides(key)},
    }
    if recipe.in_bucket:  # else a file in the directory tells whether it is the same
        found["run.dir"] = _short(recipe.run.dir)
    if exact.used(recipe):  # other kernels round otherwise
        found |= machine(found["run.device"])
    if recipe.model.init_from:
        given = Path(recipe.model.init_from)
        found["model.init_from"] = weights_digest(given)
        if (given / "config.json").is_file() and (reason := reason_for_theirs(recipe)):
            found["transformers"] = check_installed(reason)
    for key, name in recipe.own_code.items():
        found[f"{key} source"] = _digest(_module_source(name.split(":")[0]))
    return found if data is None else with_data(found, data)


def with_data(identity: Mapping[str, str], data: str) -> dict[str, str]:
    """The identity, with the fingerprint of the training data."""
    return {**identity, "data.fingerprint": _short(data)}


def machine(device: str | torch.device) -> dict[str, str]:
    """What decides the kernels of this machine: instructions and maker of its CPU, and its GPUs.

    Args:
        device: a GPU that this process uses; or "cuda" for those that the driver names, without
            starting CUDA; or a CPU.
    """
    found = {"cpu": _cpu()}
    if isinstance(device, torch.device) and device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    elif device == "cuda":
        found["gpu"] = " + ".join(_driver_gpus()) or "unknown"
    return found


def computed_by(identity: Mapping[str, str], device: torch.device) -> dict[str, str]:
    """What decides the bits of a step on this rank besides the recipe: code, torch, cpu, gpu."""
    return {"code": identity["code"], "torch": identity["torch"], **machine(device)}


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of an attempt once they have compared their identities."""

    attempt: str
    """Name of this attempt in the ledger; the same on all ranks."""
    init_from: str
    """Digest of the weights in `model.init_from`; "" without any."""
    computed_by: Mapping[str, str]
    """See `computed_by`; values that differ between ranks stand side by side."""
    note: str = ""
    """Where the machines of the ranks differ; "" if they do not."""


def check_agreement(recipe: Recipe, identity: Mapping[str, str], device: torch.device) -> Agreement:
    """Compare the identity and the machine of this rank with those of all others, and agree on a
    name for this attempt. On all ranks; one small collective if all is well.

    Raises:
        RecipeError: names the ranks that would train something else, and what differs; in exact
            mode also those whose machine rounds otherwise.
    """
    kind = computed_by(identity, device)
    ours = {**identity, **machine(device)} if exact.used(recipe) else dict(identity)
    numbers = [int(digest(one)[:15], 16) for one in (ours, kind)]
    # The largest draw of all ranks names the attempt.
    word = torch.tensor([*numbers, *(-number for number in numbers), secrets.randbits(62)])
    dist.all_reduce(word, dist.ReduceOp.MAX)
    attempt = f"{int(word[-1]) & 0xFFFFFFFF:08x}"
    init_from = identity.get("model.init_from", "") if recipe.model.init_from else ""
    if word[0] == -word[2] and word[1] == -word[3]:
        return Agreement(attempt, init_from, kind)
    group = dist.group.WORLD
    assert group
    told: list[dict[str, dict[str, str]]] = exchange(
        {"identity": ours, "kind": kind}, group.size(), group
    )
    every = [one["identity"] for one in told]
    _refuse_strangers(every)
    kinds = [one["kind"] for one in told]
    return Agreement(attempt, init_from, *_side_by_side(kinds))


def _side_by_side(kinds: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], str]:
    """What computes on ranks that are not all of one kind, and a note that says which is where."""
    merged, parts = {}, []
    for key in sorted({key for kind in kinds for key in kind}):
        values = [kind.get(key, "none") for kind in kinds]
        each = sorted(set(values))
        merged[key] = " + ".join(each)
        if len(each) > 1:
            where = (f"{one} on {values.count(one)} (rank {values.index(one)})" for one in each)
            parts.append(f"{key} is {', '.join(where)}")
    return merged, (
        f"ranks compute on unlike machines: {'; '.join(parts)}; who computes what changes the last "
        "bits of a result (run.determinism=exact refuses this)"
    )


def _refuse_strangers(every: Sequence[Mapping[str, str]]) -> None:
    """Raise if the identities of ranks differ.

    Raises:
        RecipeError: see `check_agreement`.
    """
    digests = [digest(one) for one in every]
    if len(set(digests)) == 1:
        return
    common = max(digests, key=digests.count)  # the first of several
    ranks = [rank for rank, one in enumerate(digests) if one != common]
    odd, usual = ranks[0], digests.index(common)
    names = f"on rank {odd}", f"on rank {usual}"
    raise RecipeError(
        f"rank {', '.join(map(str, ranks))} would train something else than rank {usual}: "
        f"{differences(every[odd], every[usual], *names)}; start all nodes with the same recipe, "
        "code and data, an exact run also on machines of one kind"
    )


def decides(key: str) -> bool:
    """Whether the value of a recipe's key, a path of dots, must be the same on all nodes."""
    key = re.sub(r"\.\d+$", "", key)  # of a list
    return key not in MACHINE_BOUND and not (
        key.startswith("data.sources.") and key.endswith(".path")
    )


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(key path, value) of every leaf."""
    if isinstance(tree, Mapping) or (isinstance(tree, list) and tree):
        pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in pairs:
            yield from flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _cpu() -> str:
    """The instructions that torch uses, and the maker, by which MKL chooses kernels, too."""
    maker = platform.machine()
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:  # no more than its beginning:
        for line in lines:  # the kernel asks every core for its part
            key, _, value = line.partition(":")
            if key.strip() in ("vendor_id", "CPU implementer"):
                maker = value.strip()
                break
    return f"{torch.backends.cpu.get_cpu_capability()} ({maker})"


def _driver_gpus() -> list[str]:
    """Names of the GPUs of this machine, each kind once, as NVIDIA's driver gives them."""
    names = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                key, _, value = line.partition(":")
                names |= {value.strip()} if key == "Model" else set()
    return sorted(names)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONG else _digest([text.encode()])


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8) + part)
    return f"#{found.hexdigest()[:12]}"


def _sources() -> Iterator[bytes]:
    """Our own code: name and text of every module; not what editors hide beside them."""
    for package in PACKAGES:
        for folder in _folders(package):
            for path in sorted(folder.rglob("*.py")):
                name = path.relative_to(folder)
                if not any(part.startswith(".") for part in name.parts):
                    yield str(name).encode()
                    yield path.read_bytes()


def _module_source(name: str) -> Iterator[bytes]:
    """Text of a user's module, which is not imported here: it may start threads or CUDA."""
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


def weights_digest(directory: Path) -> str:
    """Digest by which a run knows the weights that it began with, or that are under its adapter.

    Raises:
        DamagedCheckpoint, StorageError: there are none that can be read.
    """
    return _digest(_weights(directory))


def _weights(directory: Path) -> Iterator[bytes]:
    """What tells checkpoints that a run can begin with apart, without reading all of them.

    Raises:
        DamagedCheckpoint, StorageError: there is none that can be read.
    """
    config, metadata = directory / "config.json", directory / DCP_METADATA
    record = metadata if metadata.exists() else directory / COMMIT_RECORD
    for small in (config, record):
        if small.is_file():
            yield small.name.encode()
            yield read_bytes(small, MAX_JSON_BYTES, follow=True)
    parts: list[tuple[str, int, int]] = []
    if record == metadata:
        sizes = {path.name: path.stat().st_size for path in sorted(directory.glob("*.distcp"))}
        length = max(SAMPLE, -(-sum(sizes.values()) // MOST_PARTS))
        parts = [
            (name, begin, min(length, size - begin))
            for name, size in sizes.items()
            for begin in range(0, size, length)
        ]
        yield json.dumps(sizes).encode()
    elif not record.exists():  # else it has checksums of all there is
        tensors = hugging_face_tensors(directory)
        parts = sorted((one.file, one.begin, one.meta.nbytes) for one in tensors.values())
        parts = parts[:: -(-len(parts) // MOST_PARTS) or 1]
        yield json.dumps([[name, str(tensors[name].meta)] for name in sorted(tensors)]).encode()
    for name, begin, size in parts:
        with (directory / name).open("rb") as file:
            file.seek(begin + max(0, size - SAMPLE) // 2)
            yield file.read(min(size, SAMPLE))
