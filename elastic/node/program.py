"""A training program's description of its job, for the agent of a node that is about to join.

[Note: facts] Running a program would tell what it trains, but by then its node is in the job. So
the agent asks first. A package that torchrun starts with `-m PACKAGE ARGUMENT …` may have a module
`facts` with two functions, which the node's zygote calls once it is warm. `facts(arguments, ranks)`
returns the fields of `Facts` for a node with so many ranks. `folders(arguments)` returns the paths
that the ranks need, by the recipe key that names each, and touches none of them: the agent checks
whether they answer, while `facts` may block on them. For a program without such a module, nothing
is known and nothing is compared.
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

MAX_DIFFERENCES = 8
MAX_FOLDERS = 64


@dataclass(frozen=True, kw_only=True)
class Program:
    """What torchrun starts in each rank."""

    package: str = ""
    """Package as after `-m`; empty for a script."""
    arguments: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A job's description by its program, on one node."""

    identity: Mapping[str, str] = field(default_factory=dict)
    """What decides the bits of a step: key → value, or a digest of it. Equal on all nodes of a
    job."""
    most_ranks: int | None = None
    """Ranks for which there is work; None: any number."""
    unit: int | None = None
    """Ranks of a replica of the model, of which each round has a multiple; None: unknown."""
    directory: str | None = None
    """Absolute path of the run directory, which all nodes share; None if they share none."""
    save_seconds: float | None = None
    """Seconds after which a save is given up; None: watchdog.SAVE_SECONDS."""
    error: str | None = None
    """Why this node cannot train, in one line."""


def torchrun_program() -> Program:
    """The program that torchrun starts, from this process's command line; empty if it is no
    torchrun."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if Path(sys.argv[0]).name != "torchrun" and not (
        module and module.name == "torch.distributed.run"
    ):
        return Program()
    # Here, as it imports torch.
    from torch.distributed.run import determine_local_world_size, parse_args

    options = parse_args(sys.argv[1:])
    ranks = determine_local_world_size(options.nproc_per_node)
    if not options.module:
        return Program(ranks=ranks)
    return Program(
        package=options.training_script, arguments=tuple(options.training_script_args), ranks=ranks
    )


def digest(identity: Mapping[str, str]) -> str:
    """First 16 hexadecimal digits of the SHA-256 of `Facts.identity`."""
    return hashlib.sha256(json.dumps(sorted(identity.items())).encode()).hexdigest()[:16]


def differences(
    ours: Mapping[str, str], theirs: Mapping[str, str], here: str = "here", there: str = "there"
) -> str:
    """Describe where two identities differ: key, and both values."""
    keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    parts = [
        f"{key} is {ours.get(key, 'not given')} {here}, {theirs.get(key, 'not given')} {there}"
        for key in keys
    ]
    if len(parts) > MAX_DIFFERENCES:
        parts[MAX_DIFFERENCES:] = [f"and {len(parts) - MAX_DIFFERENCES} more"]
    return ", ".join(parts)


def read_facts(package: str, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """The fields of `Facts` that `package` returns for a node with `ranks` ranks; empty without a
    module `facts`. Called in the zygote, which imports no package that has none."""
    if package.isidentifier() and (error := shadowing_error(package)):
        return {"error": error}
    module = _module(package)
    answer: dict[str, Any] = module.facts(tuple(arguments), ranks) if module else {}
    return answer


def read_folders(package: str, arguments: Sequence[str]) -> dict[str, str]:
    """The paths that the ranks of `package` need, by key. Called in the zygote."""
    module = None if package.isidentifier() and shadowing_error(package) else _module(package)
    answer: dict[str, str] = getattr(module, "folders", lambda _: {})(tuple(arguments))
    return dict([*answer.items()][:MAX_FOLDERS])


def _module(package: str) -> Any:
    """The module `facts` of a package; None if it has none."""
    if not package.isidentifier():
        return None
    spec = find_spec(package)
    if not spec:
        # Last: no folder there may hide an installed package.
        sys.path.append(os.getcwd())
        spec = PathFinder.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    if not any((Path(folder) / "facts.py").is_file() for folder in folders):
        return None
    return importlib.import_module(f"{package}.facts")


def shadowing_error(package: str) -> str:
    """An error if ranks started with `-m PACKAGE` would run a folder of the working directory
    instead of the installed package; else empty."""
    spec, here = find_spec(package), os.getcwd()
    first = PathFinder.find_spec(package, [here, *sys.path])  # the search path of the ranks
    if not spec or not first or "PYTHONSAFEPATH" in os.environ or _places(spec) == _places(first):
        return ""
    return (
        f"`-m {package}` would run {here}/{package}, and not the package of this name that is "
        "installed: rename it, start from another directory, or set PYTHONSAFEPATH=1"
    )


def _places(spec: ModuleSpec) -> list[str]:
    """File of a module; folders of a package without a file."""
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    return [os.path.realpath(place) for place in places]
