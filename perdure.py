"""The console command `perdure`, and its entry point for torchrun.

Other distributions, too, have packages called trainer or elastic, and pip installs one over the
other. So this module, whose name no other distribution uses, checks that the packages are
Perdure's before it imports any of them.
"""

import base64
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

PACKAGES = "trainer", "elastic", "checkpointing"
HOME = Path(__file__).resolve().parent
# elastic.exits has it too, but that package may belong to another distribution
EXIT_WRONG_INPUT = 2


def main() -> None:
    """Run the console command."""
    _leave_if(foreign((*PACKAGES, "lab") if sys.argv[1:2] == ["chaos"] else PACKAGES))
    from trainer.cli.main import main as run

    run()


def torchrun_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """Return the factory of rendezvous handlers that torch registers under the name `perdure`.
    torch calls this in every torchrun, so the packages are checked under any rendezvous backend."""
    if _is_torchrun() and ("-m", "trainer") in zip(sys.argv, sys.argv[1:], strict=False):
        _leave_if(foreign())
        from elastic.node.program import shadowing_error

        _leave_if(shadowing_error("trainer"))

    def create_handler(parameters: "RendezvousParameters") -> "RendezvousHandler":
        # torch loads every entry point of its group while it imports its own rendezvous, which
        # elastic/rendezvous.py imports too: hence only when a handler is created.
        from elastic import rendezvous

        return rendezvous.create_handler(parameters)

    return create_handler


def foreign(packages: Sequence[str] = PACKAGES) -> str:
    """Error message for the first package that is not Perdure's, with the remedy; "" if all are."""
    for name in packages:
        expected, spec = HOME / name / "__init__.py", find_spec(name)
        if spec and spec.origin and not _same_file(Path(spec.origin), expected):
            return (
                f"Python imports {name} from {spec.origin}, and not {expected} of Perdure: take "
                f"the other one off PYTHONPATH{_uninstall(name)}, or give Perdure an environment "
                "of its own"
            )
        if not spec or not spec.origin or not _as_installed(expected):
            return (
                f"{expected} is not Perdure's: another distribution has a package of this name. "
                f"Install each in an environment of its own{_uninstall(name)}, and then Perdure "
                "again (pip install --force-reinstall --no-deps)"
            )
    return ""


def _same_file(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()  # equal also where a folder is a symbolic link


def _as_installed(file: Path) -> bool:
    """Whether a file is as pip installed it, by its SHA-256 in RECORD. True in a checkout."""
    written = f"{file.relative_to(HOME).as_posix()},sha256="
    for record in HOME.glob("perdure-*.dist-info/RECORD"):
        for line in record.read_text(encoding="utf-8").splitlines():
            if line.startswith(written):
                digest = hashlib.sha256(file.read_bytes()).digest()
                return line[len(written) :].startswith(
                    base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
                )
    return True


def _uninstall(name: str) -> str:
    """Remedy for the message: uninstall the distributions that installed a package `name`."""
    others = sorted(set(_others(name)))
    return f", or pip uninstall {' '.join(others)}" if others else ""


def _others(name: str) -> Iterator[str]:
    from importlib.metadata import distributions

    for distribution in distributions():
        installed = f"\n{name}/__init__.py," in f"\n{distribution.read_text('RECORD') or ''}"
        if installed and distribution.name != "perdure":
            yield distribution.name


def _is_torchrun() -> bool:
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return os.path.basename(sys.argv[0]) == "torchrun" or (
        module is not None and module.name == "torch.distributed.run"
    )


def _leave_if(problem: str) -> None:
    if problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(EXIT_WRONG_INPUT)


if __name__ == "__main__":
    main()
