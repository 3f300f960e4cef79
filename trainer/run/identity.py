"""Everything that decides a step, as keys and short values: what must be the same on all nodes."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.format.layout import COMMIT_RECORD, DCP_METADATA
from checkpointing.storage.steps import hugging_face_tensors
from elastic.node.facts import differences, digest
from trainer.recipe import Recipe, RecipeError, resolved
from trainer.recipe.factory import look_here_too

MACHINE_BOUND = (
    *("run.dir", "run.device", "data.reader", "data.workers", "data.graph.path"),
    *("model.init_from", "strategy.offload_directory", "elastic.timeout_seconds"),
    *("checkpoint.directory", "checkpoint.slot_directory", "checkpoint.max_bandwidth"),
    *("checkpoint.keep", "checkpoint.keep_every", "checkpoint.keep_best", "checkpoint.best_by"),
    *("tracking.tensorboard", "tracking.wandb", "tracking.project", "tracking.name"),
    *("tracking.prometheus", "tracking.sinks", "tracking.hooks"),
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
        "torch": torch.__version__,
        "run.device": _device(recipe.run.device),
        **{key: _short(value) for key, value in _flat(resolved(recipe)) if _decides(key)},
    }
    if recipe.model.init_from:
        found["model.init_from"] = _digest(_weights(Path(recipe.model.init_from)))
    for key, name in recipe.own_code.items():
        found[f"{key} source"] = _digest(_module_source(name.split(":")[0]))
    return found if data is None else with_data(found, data)


def with_data(identity: Mapping[str, str], data: str) -> dict[str, str]:
    """The identity, with the fingerprint of the training data."""
    return {**identity, "data.fingerprint": _short(data)}


def check_agreement(ours: Mapping[str, str]) -> None:
    """Compare the identity of this rank with that of all others. On all ranks; one small collective
    if all is well.

    Raises:
        RecipeError: names the ranks that would train something else, and what differs.
    """
    number = int(digest(ours)[:15], 16)
    extremes = torch.tensor([number, -number])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes[0] == -extremes[1]:
        return
    every: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, dict(ours))
    digests = [digest(one) for one in every]
    common = max(digests, key=digests.count)  # the first of several
    ranks = [rank for rank, one in enumerate(digests) if one != common]
    odd, usual = ranks[0], digests.index(common)
    names = f"on rank {odd}", f"on rank {usual}"
    raise RecipeError(
        f"rank {', '.join(map(str, ranks))} would train something else than rank {usual}: "
        f"{differences(every[odd], every[usual], *names)}; start all nodes with the same recipe, "
        "code and data"
    )


def _decides(key: str) -> bool:
    key = re.sub(r"\.\d+$", "", key)  # of a list
    return key not in MACHINE_BOUND and not (
        key.startswith("data.sources.") and key.endswith(".path")
    )


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(key path, value) of every leaf."""
    if isinstance(tree, Mapping) or (isinstance(tree, list) and tree):
        pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in pairs:
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


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
            yield small.read_bytes()
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
