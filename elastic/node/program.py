"""The job as the training program describes it, for the agent of a node that is about to join.

[Note: facts] A program knows what it trains only when it runs, but by then its node is in the job.
So the agent obtains a description first. A package that torchrun starts with `-m PACKAGE ARGUMENT
…` may have a module `facts` with two functions. The node's zygote (zygote.py) calls them after its
imports. `facts(arguments, ranks)` returns the fields of `NodeJobFacts` for a node with `ranks`
ranks. `folders(arguments)` returns recipe key → path that the ranks need, without accessing these
paths: the agent first checks whether they respond, as `facts` may block on them. The agent compares
the description with the job's. Without such a module it compares nothing."""

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MAX_DIFFERENCES = 8
MAX_FOLDERS = 64


@dataclass(frozen=True, kw_only=True)
class NodeProgram:
    """The program that torchrun starts in each rank."""

    package: str = ""
    """Name of the package after `-m`; empty for a script."""
    arguments: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class NodeJobFacts:
    """The description of a job by its program, see [Note: facts]."""

    identity: Mapping[str, str] = field(default_factory=dict)
    """Recipe keys that affect the bits of a step → value or digest. Equal on all nodes."""
    most_ranks: int | None = None
    """Largest number of ranks that the global batch can occupy; None: any number."""
    unit: int | None = None
    """Ranks that together hold one replica of the model; the ranks of every round are a multiple of
    this. None: unknown."""
    directory: str | None = None
    """Absolute path of the run directory, which all nodes share; None if they share none."""
    save_seconds: float | None = None
    """Time limit of a save in seconds; None: watchdog.SAVE_SECONDS."""
    error: str | None = None
    """One line that says why this node cannot train; None if it can."""


def torchrun_program() -> NodeProgram:
    """Returns the program on this process's command line: all fields for `-m PACKAGE`, only `ranks`
    for a script. An empty `NodeProgram` if this process is not torchrun."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if Path(sys.argv[0]).name != "torchrun" and not (
        module and module.name == "torch.distributed.run"
    ):
        return NodeProgram()
    # imported here, as it imports torch
    from torch.distributed.run import determine_local_world_size, parse_args

    options = parse_args(sys.argv[1:])
    ranks = determine_local_world_size(options.nproc_per_node)
    if not options.module:
        return NodeProgram(ranks=ranks)
    return NodeProgram(
        package=options.training_script, arguments=tuple(options.training_script_args), ranks=ranks
    )


def digest(identity: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(identity.items())).encode()).hexdigest()[:16]


def differences(
    ours: Mapping[str, str], theirs: Mapping[str, str], here: str = "here", there: str = "there"
) -> str:
    """Returns a text that lists the keys in which two `NodeJobFacts.identity` differ, with both
    values. `here` and `there`: words in the text for the places of `ours` and `theirs`."""
    keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    parts = [
        f"{key} is {ours.get(key, 'not given')} {here}, {theirs.get(key, 'not given')} {there}"
        for key in keys
    ]
    if len(parts) > MAX_DIFFERENCES:
        parts[MAX_DIFFERENCES:] = [f"and {len(parts) - MAX_DIFFERENCES} more"]
    return ", ".join(parts)


def read_facts(package: str, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of `NodeJobFacts` from `package` for a node with `ranks` ranks; none
    without a module `facts`, and only `error` if `-m` would run another package. Called in the
    zygote."""
    if package.isidentifier() and (error := shadowing_error(package)):
        return {"error": error}
    module = _module(package)
    answer: dict[str, Any] = module.facts(tuple(arguments), ranks) if module else {}
    return answer


def read_folders(package: str, arguments: Sequence[str]) -> dict[str, str]:
    """Returns recipe key → path that the ranks of `package` need, at most MAX_FOLDERS of them;
    empty without a module `facts`. Called in the zygote."""
    module = None if package.isidentifier() and shadowing_error(package) else _module(package)
    answer: dict[str, str] = getattr(module, "folders", lambda _: {})(tuple(arguments))
    return dict([*answer.items()][:MAX_FOLDERS])


def _module(package: str) -> Any:
    if not package.isidentifier():
        return None
    spec = find_spec(package)
    if not spec:
        # The working directory comes last, so that no folder in it hides an installed package.
        sys.path.append(os.getcwd())
        spec = PathFinder.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    if not any((Path(folder) / "facts.py").is_file() for folder in folders):
        return None
    return importlib.import_module(f"{package}.facts")


def shadowing_error(package: str) -> str:
    """Returns an error if `-m PACKAGE` would run a folder of the working directory instead of the
    installed package; else ""."""
    spec, here = find_spec(package), os.getcwd()
    first = PathFinder.find_spec(package, [here, *sys.path])  # the search path of the ranks
    if not spec or not first or "PYTHONSAFEPATH" in os.environ or _places(spec) == _places(first):
        return ""
    return (
        f"`-m {package}` would run {here}/{package}, and not the package of this name that is "
        "installed: rename it, start from another directory, or set PYTHONSAFEPATH=1"
    )


def _places(spec: ModuleSpec) -> list[str]:
    """Returns the real path of a module's file, or the real paths of the folders of a package that
    has no file."""
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    return [os.path.realpath(place) for place in places]
