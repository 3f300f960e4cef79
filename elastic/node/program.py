"""What a training program says of its job before its node joins.

[Note: facts] torchrun learns what a program is about only by running it, and by then its node is in
the job. So the agent asks first: a package that torchrun starts with `-m PACKAGE ARGUMENT …` may
have a module `facts` with a function `facts(arguments, ranks)`, which returns the fields of `Facts`
for a node of so many ranks. It is called in the node's zygote, once that is warm. Of a program
without one nothing is known, and nothing is compared. The module may also have a function
`folders(arguments)`, which returns the paths that the ranks need, by the key that names each; it
touches none of them. The agent looks whether they answer, while `facts` may wait for them.
"""

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

MOST_NAMED = 8
"""Differing keys that are named."""
MOST_FOLDERS = 64
"""Paths that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What torchrun starts in each rank."""

    package: str = ""
    """As after `-m`; empty if it is none."""
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    """Ranks of this node."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """About a job, as one of its nodes sees it."""

    identity: Mapping[str, str] = field(default_factory=dict)
    """What decides a step: key → value, or a digest of it. The same on all nodes of a job."""
    most_ranks: int | None = None
    """More ranks than these would have no work; None: there is always some."""
    unit: int | None = None
    """Ranks of a replica of the model, of which each round has a multiple; None: not known."""
    directory: str | None = None
    """Absolute path of the folder of the run, which all nodes share."""
    save_seconds: float | None = None
    """After which a save is given up; None: as SAVE_SECONDS of watchdog.py says."""
    error: str | None = None
    """Why this node cannot train, in one line."""


def torchrun_program() -> Program:
    """What this process, if it is torchrun, was told to start."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if Path(sys.argv[0]).name != "torchrun" and not (
        module and module.name == "torch.distributed.run"
    ):
        return Program()
    from torch.distributed.run import determine_local_world_size, parse_args

    options = parse_args(sys.argv[1:])
    ranks = determine_local_world_size(options.nproc_per_node)
    if not options.module:
        return Program(ranks=ranks)
    return Program(
        package=options.training_script, arguments=tuple(options.training_script_args), ranks=ranks
    )


def digest(identity: Mapping[str, str]) -> str:
    """A digest of `Facts.identity`: 16 characters."""
    return hashlib.sha256(json.dumps(sorted(identity.items())).encode()).hexdigest()[:16]


def differences(
    ours: Mapping[str, str], theirs: Mapping[str, str], here: str = "here", there: str = "there"
) -> str:
    """Where two identities differ, for people: keys, and the values of both."""
    keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    parts = [
        f"{key} is {ours.get(key, 'not given')} {here}, {theirs.get(key, 'not given')} {there}"
        for key in keys
    ]
    if len(parts) > MOST_NAMED:
        parts[MOST_NAMED:] = [f"and {len(parts) - MOST_NAMED} more"]
    return ", ".join(parts)


def ask(package: str, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """What `package` says of its job on a node of so many ranks: the fields of `Facts`; empty if it
    says nothing. In the zygote, which imports nothing of a package that has no such module."""
    if package.isidentifier() and (error := in_the_way(package)):
        return {"error": error}
    module = _module(package)
    said: dict[str, Any] = module.facts(tuple(arguments), ranks) if module else {}
    return said


def ask_folders(package: str, arguments: Sequence[str]) -> dict[str, str]:
    """The paths that the ranks of `package` need, as far as it says so. In the zygote."""
    module = None if package.isidentifier() and in_the_way(package) else _module(package)
    said: dict[str, str] = getattr(module, "folders", lambda _: {})(tuple(arguments))
    return dict([*said.items()][:MOST_FOLDERS])


def _module(package: str) -> Any:
    """The module `facts` of a package; None if it has none."""
    if not package.isidentifier():
        return None
    spec = find_spec(package)
    if not spec:
        sys.path.append(os.getcwd())
        spec = PathFinder.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    if not any((Path(folder) / "facts.py").is_file() for folder in folders):
        return None
    return importlib.import_module(f"{package}.facts")


def in_the_way(package: str) -> str:
    """That a rank which is started with `-m PACKAGE` would take a folder of the working directory
    for the package that is installed, and what to do; empty if it would not."""
    spec, here = find_spec(package), os.getcwd()
    first = PathFinder.find_spec(package, [here, *sys.path])  # as the ranks will
    if not spec or not first or "PYTHONSAFEPATH" in os.environ or _places(spec) == _places(first):
        return ""
    return (
        f"`-m {package}` would run {here}/{package}, and not the package of this name that is "
        "installed: rename it, start from another directory, or set PYTHONSAFEPATH=1"
    )


def _places(spec: ModuleSpec) -> list[str]:
    """The file of a module; the folders of a package without one."""
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    return [os.path.realpath(place) for place in places]
