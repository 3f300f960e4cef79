"""What is handed on: source distribution, wheel, lock, and what says which versions they take."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import yaml
from packaging.requirements import Requirement

from benchmarks.support import python_path
from tests import prose
from tests.distributed.jobs import ROOT, soak

OF_THE_MACHINE = {
    *(".git", ".gpu", ".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache"),
    *(".ruff_cache", ".venv", "build", "data", "dist", "models", "out", "perdure.egg-info"),
    *("runs", "site", "wandb"),
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def files_of(folder):
    """Paths of the files below a folder, but for what Python has compiled."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build(folder):
    """(source tree, unpacked source distribution, unpacked wheel that was made of it)."""
    source = folder / "source"
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_dir() and path.name not in OF_THE_MACHINE | {"__pycache__"}:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, source / path.name, symlinks=True, ignore=ignored)
        elif path.is_file() and path.name != ".git":  # a file in a worktree
            shutil.copy(path, source)
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", make, folder]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "sdist", filter="data")
    (sdist,) = (folder / "sdist").iterdir()
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    wheel += ["--disable-pip-version-check", "--wheel-dir", folder, sdist]
    subprocess.run(wheel, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "installed")
    shutil.rmtree(source / "perdure.egg-info")
    return source, sdist, folder / "installed"


def starts_from_a_recipe(tmp_path):
    """Who has installed the package, and no checkout."""
    assert (tmp_path / "installed" / "trainer" / "recipes" / "schema.json").is_file()
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path / "installed")}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    command = [sys.executable, "-P", "-m", "trainer.cli"]
    missing = subprocess.run([*command, "train", "recipes/quickstart.yaml"], check=False, **run)
    assert missing.returncode == 2
    assert missing.stderr.endswith("perdure recipe copy quickstart recipes/quickstart.yaml\n")
    for _ in range(2):
        copied = subprocess.run([*command, "recipe", "copy", "quickstart"], check=False, **run)
    assert copied.stderr == "error: quickstart.yaml: already exists; name another file\n"
    for name in ("quickstart.yaml", "schema.json"):  # which editors look for beside it
        assert (tmp_path / name).read_text() == (ROOT / "recipes" / name).read_text()
    listed = subprocess.run([*command, "recipe", "ls"], check=True, **run)
    assert len(listed.stdout.splitlines()) == len(list((ROOT / "recipes").glob("*.yaml")))


def names_what_is_in_its_place(tmp_path):
    """Where another package has taken the place of one of Perdure's own."""

    def refused(parts, folders=(), command=("recipe", "ls")):
        paths = python_path(*folders, tmp_path / "installed")
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "perdure", *command],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        (line,) = ended.stderr.splitlines()
        assert ended.returncode == 2
        assert line.startswith("error: "), line
        assert all(part in line for part in parts), line

    before = tmp_path / "before"
    (before / "trainer").mkdir(parents=True)
    (before / "trainer" / "__init__.py").touch()
    refused([f"imports trainer from {before}", "PYTHONPATH"], [before])
    # The lab is imported by one command alone.
    (before / "trainer").rename(before / "lab")
    (before / "lab" / "__init__.py").write_text("raise SystemExit('of another')")
    refused(["give one of --plan"], command=("chaos", "no.yaml"))
    refused([f"imports lab from {before}"], [before], ("chaos", "no.yaml"))
    refused(["no.yaml: "], [before], ("train", "no.yaml"))
    # As pip leaves it that has installed, and then uninstalled, another package of this name.
    of_another = tmp_path / "installed" / "elastic" / "__init__.py"
    of_another.write_text("raise SystemExit('of another')")
    info = tmp_path / "installed" / "elastic_other-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: elastic-other\nVersion: 1\n")
    info.joinpath("RECORD").write_text("elastic/__init__.py,sha256=x,1\n")
    refused([f"{of_another} is not Perdure's", "pip uninstall elastic-other"])
    of_another.unlink()
    refused([f"{of_another} is not Perdure's", "--force-reinstall"])


@soak
def test_the_source_distribution_and_the_wheel_of_it(tmp_path):
    """The one has docs and tests, the other what runs."""
    source, sdist, installed = build(tmp_path)
    unknown = {".dockerignore", ".gitignore"}  # of git and docker alone
    assert files_of(source) - files_of(sdist) == unknown
    packages = {path for path in files_of(installed) if ".dist-info/" not in path}
    assert {path.split("/")[0] for path in packages} == {
        "perdure.py", "trainer", "elastic", "checkpointing", "lab",
    }  # fmt: skip
    assert packages <= files_of(source) | {f"trainer/{path}" for path in files_of(source)}
    (metadata,) = installed.glob("*.dist-info/METADATA")
    described = metadata.read_text(encoding="utf-8").partition("\n\n")[2]
    assert [link for link in prose.links(described) if "://" not in link] == []
    assert "every key of a recipe" in described
    starts_from_a_recipe(tmp_path)
    names_what_is_in_its_place(tmp_path)


def test_links_of_the_description_are_absolute():
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    home = "https://example.org/perdure"
    links = prose.links(setup.description(readme, home))
    assert len(links) == len(prose.links(readme)) > 30
    assert all(link.startswith("https://") for link in links)
    assert f"{home}/blob/main/docs/benchmarks.md#strategies" in links
    assert f"{home}/raw/main/docs/images/compare.svg" in links


def test_what_lint_runs_is_pinned_once():
    pinned = {
        required.name: str(required.specifier)
        for required in map(Requirement, PROJECT["optional-dependencies"]["dev"])
        if str(required.specifier).startswith("==")
    }
    assert {"ruff", "mypy", "import-linter"} <= pinned.keys()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    ruff, local = hooks["repos"]
    assert f"=={ruff['rev'].removeprefix('v')}" == pinned["ruff"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, flags=re.M)[1]
    run = set(re.findall(r"\$\(BIN\)/([\w-]+)", lint))
    assert run == {"ruff", *(hook["entry"].rpartition("/")[2] for hook in local["hooks"])}


def test_the_lock_is_of_this_project_and_of_pypi():
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    lock = tomllib.loads(text)
    assert {one["source"].get("registry", "") for one in lock["package"]} == {
        "", "https://pypi.org/simple",
    }  # fmt: skip
    assert {*re.findall(r'url = "(https?://[^/]*)/', text)} == {"https://files.pythonhosted.org"}
    assert "file:" not in text
    (own,) = (one for one in lock["package"] if one["name"] == PROJECT["name"])
    locked = {
        (one["name"], one.get("specifier", "").replace(" ", ""), one.get("marker", ""))
        for one in own["metadata"]["requires-dist"]
    }
    extras = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    stated = {
        (
            required.name.lower(),
            str(required.specifier),
            f"extra == '{extra}'" if extra else "",
        )
        for extra, requirements in extras.items()
        for required in map(Requirement, requirements)
    }
    sort = {(name, frozenset(specifier.split(",")), marker) for name, specifier, marker in locked}
    assert sort == {
        (name, frozenset(specifier.split(",")), marker) for name, specifier, marker in stated
    }, "uv lock"


def test_what_is_declared_was_run():
    """Releases that have what is relied on; docs/versions.md names each test that failed."""
    lines = json.loads((ROOT / "benchmarks/results/versions.json").read_text(encoding="utf-8"))
    good = [line for line in lines if line["tests"]["passed"] and not line["contract"]["failed"]]
    pythons = {line["python"].rpartition(".")[0] for line in good}
    stated = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.M)
    assert set(stated) == pythons
    releases = {line["torch"].partition("+")[0] for line in good}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^TORCH \?= torch==(.*)$", makefile, flags=re.M)[1] in releases
    torch = next(one for one in map(Requirement, PROJECT["dependencies"]) if one.name == "torch")
    assert all(line["torch"] in torch.specifier for line in lines)


def test_the_changelog_is_dated():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert headings
    for heading in headings:
        assert re.fullmatch(r"\d+\.\d+\.\d+, .*\d{1,2} \w+ 20\d\d", heading), heading
