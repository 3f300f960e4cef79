"""Packages for a GPU machine without a registry: wheels, made where there is one and taken along.

Imports nothing that is not Python's: it runs before they are installed.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
WITH_WHAT_THEY_NEED = ("isal", "tenacity", "pydantic", "cryptography")
ALONE = ("torchdata",)
"""Without what they need, as that is torch, or there."""
OPTIONAL = ("torchao>=0.18,<0.19", "liger-kernel", "cut-cross-entropy")
"""Alone, too: for products in 8 bits, and to compare with. A case that misses one says so."""
THERE = ("torch", "numpy", "safetensors", "tokenizers", "tqdm", "pyyaml", "jinja2", "rich")
"""With torch and transformers."""
LEFT_OUT = ("wandb",)
"""It is large, and cases track nothing."""
GLIBC = range(17, 40)
"""Minor versions of glibc 2 whose wheels fit: pip takes a platform by its exact name."""
LIMIT = 56 << 20
"""Bytes that travel, beside a checkout of a few million."""


def make(folder: Path, python: str) -> None:
    """Fill a folder with wheels for Linux on x86-64.

    Args:
        folder: emptied first.
        python: version that they are for, such as 3.12.

    Raises:
        SystemExit: a package cannot be had, or nothing here says whence it comes, or all together
            are larger than LIMIT.
    """
    if unknown := set(needed()) - {*WITH_WHAT_THEY_NEED, *ALONE, *THERE}:
        sys.exit(f"{Path(__file__).name}: whence come {', '.join(sorted(unknown))}?")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    download = [*pip, "download", "--only-binary=:all:", "--dest", str(folder)]
    download += ["--implementation", "cp", "--python-version", python]
    for minor in GLIBC:
        download += ["--platform", f"manylinux_2_{minor}_x86_64"]
    download += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    run([*download, *WITH_WHAT_THEY_NEED])
    run([*download, "--no-deps", *ALONE])
    for package in OPTIONAL:
        asked = [*download, "--no-deps", package]
        if subprocess.run(asked, capture_output=True, check=False).returncode:
            print(f"{package} cannot be had")
    with TemporaryDirectory() as scratch:  # setuptools leaves files beside the sources
        copy = Path(scratch, "perdure")
        for name in ("trainer", "elastic", "checkpointing", "lab", "recipes"):
            shutil.copytree(ROOT / name, copy / name, symlinks=True)
        for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py", "perdure.py"):
            shutil.copy(ROOT / name, copy)
        run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(copy)])
    wheels = sorted(folder.glob("*.whl"))
    nbytes = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:8.1f} MB  {wheel.name}")
    print(f"{nbytes / 1e6:8.1f} MB in {folder}, for Python {python}")
    if nbytes > LIMIT:
        sys.exit(f"{folder}: {nbytes / 1e6:.0f} MB are more than {LIMIT / 1e6:.0f} MB")


def needed() -> list[str]:
    """Packages that this project does not start without, by its pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^a-z0-9-]", asked, maxsplit=1)[0] for asked in project["dependencies"]]
    return [name for name in names if name not in LEFT_OUT]


def modules() -> list[str]:
    """What Python imports of them."""
    return ["yaml" if name == "pyyaml" else name for name in needed()]


def missing() -> list[str]:
    """What this project needs, and this Python does not find."""
    found = [name for name in modules() if not find_spec(name)]
    handlers = {handler.name for handler in entry_points(group="torchrun.handlers")}
    return found if "perdure" in handlers else [*found, "perdure's rendezvous for torchrun"]


def install(wheels: Path, site: Path) -> None:
    """Put the wheels into a folder for packages, and that at the end of the path of this process
    and of all that it starts; nothing else of the machine is changed. Does nothing where nothing is
    missing.

    Raises:
        SystemExit: something is missing and there are no wheels, or still is with them.
    """
    if site.exists():
        use(site)
    if not (lacking := missing()):
        return
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        sys.exit(
            f"not installed: {', '.join(lacking)}; and there are no wheels in {wheels}: run `make "
            "gpu-wheelhouse` where there is a registry, and take that folder along"
        )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    pip += ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    run([*pip, "--target", str(site), *files])
    use(site)
    if lacking := missing():
        sys.exit(f"not installed, with the wheels in {wheels}: {', '.join(lacking)}")


def use(site: Path) -> None:
    """Have this process and all that it starts look there, after PYTHONPATH."""
    if str(site) not in sys.path:
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*([given] if given else []), str(site)])
        sys.path.append(str(site))
    importlib.invalidate_caches()


def run(command: list[str]) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
