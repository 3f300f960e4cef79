"""`perdure data prepare`: text → tokenised shards. See [Note: prepared data set] in shards.py.

Inputs are cut into units in a fixed order. Workers tokenise units into files of their own, each
finished by an atomic rename, so that a killed run goes on where it was. The units are then joined
in order: the bytes do not depend on the number of workers, nor on interruptions.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from trainer.data.corpora import CORPORA, fetch_corpus
from trainer.data.shards import FORMAT, SPLITS, DataError, checksums, fingerprint, read_index
from trainer.data.sources import Split, Unit, cut_units, find_files, read_unit
from trainer.data.tokenizer import (
    byte_tokenizer,
    find_eos,
    read_tokenizer,
    train_bpe,
    vocabulary_size,
)

_BATCH = 512  # documents per call of the tokenizer
_LISTED_REJECTS = 1000  # per unit; all are counted
_BPE_TEXT_BYTES = 256 << 20  # a tokenizer learns nothing more from more text


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What decides the bytes of a prepared data set, besides its inputs."""

    tokenizer: str | None = None
    """A tokenizer.json, the directory of one, or "bytes"."""
    train_bpe: int | None = None
    """Size of a byte-level BPE vocabulary to train on the inputs, instead."""
    eos: str | None = None
    """Token that ends a document; found by itself in well-known tokenizers."""
    field: str = "text"
    """Field of jsonl, column of parquet."""
    split_documents: Split = "file"
    """What one document is in txt and md files."""
    validation_fraction: float = 0.02
    """Share of the documents in the validation split, chosen by a hash of their text."""
    shard_tokens: int = 1 << 28
    """Tokens after which a shard ends with the next document."""
    on_bad: Literal["skip", "fail"] = "skip"
    """Whether a bad record is left out and listed, or ends everything."""


def prepare(
    inputs: Sequence[str],
    out: str | Path,
    *,
    workers: int = 1,
    progress: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Tokenise `inputs` into the directory `out`; returns its index.

    Args:
        inputs: files, directories, or the name of a corpus ("wikipedia", "stdlib").
        out: made if need be; a data set of the same inputs and options is left as it is.
        workers: processes that tokenise.
        progress: show a bar on a terminal.
        options: see PrepareOptions.

    Raises:
        DataError: an input that cannot be read, a bad record with on_bad="fail", an `out` that
            holds something else.
    """
    settings, out = PrepareOptions(**options), Path(out)
    _check_options(settings, workers)
    files = find_files([_resolve(name, out) for name in inputs])
    plan_hash = _plan_hash(files, settings)
    if (out / "index.json").exists():
        index = read_index(out)
        if index["plan"] != plan_hash:
            raise DataError(
                f"{out}: holds a data set of other inputs or options; choose another --out, or "
                "remove it first"
            )
        return index
    work = out / f".work-{plan_hash[:16]}"
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"--out {out}: cannot be made: {error.strerror}") from error
    for stale in out.glob(".work-*"):
        if stale != work:
            shutil.rmtree(stale)
    vocabulary = _make_tokenizer(files, settings, work)
    jobs = [
        _Job(number, unit, str(work), vocabulary, settings)
        for number, unit in enumerate(cut_units(files))
    ]
    results = _tokenise(jobs, workers, progress)
    index = _join(jobs, results, files, out, vocabulary, settings, plan_hash)
    shutil.rmtree(work)
    return index


def _check_options(settings: PrepareOptions, workers: int) -> None:
    if (settings.tokenizer is None) == (settings.train_bpe is None):
        raise DataError(
            "give one of --tokenizer FILE, --tokenizer bytes and --train-bpe VOCABULARY"
        )
    if not 0 <= settings.validation_fraction < 1:
        raise DataError(f"--validation-fraction {settings.validation_fraction}: must be in [0, 1)")
    if min(workers, settings.shard_tokens) < 1:
        raise DataError("--workers and --shard-tokens must be at least 1")


def _resolve(name: str, out: Path) -> str:
    """A corpus by name → its file; anything else stays."""
    is_corpus = name in CORPORA and not Path(name).exists()
    return str(fetch_corpus(name, out / "corpus")) if is_corpus else name


def _plan_hash(files: list[str], settings: PrepareOptions) -> str:
    """What is to be done: options, the tokenizer's bytes, and name, size and age of each input."""
    stats = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    tokenizer = b""
    if settings.tokenizer and settings.tokenizer != "bytes":
        tokenizer = read_tokenizer(settings.tokenizer).to_str().encode()
    facts = [FORMAT, asdict(settings), stats, hashlib.sha256(tokenizer).hexdigest()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer in the work directory, and what follows from it."""

    file: str
    size: int
    eos_id: int

    @property
    def dtype(self) -> str:
        return "uint16" if self.size <= 1 << 16 else "uint32"


def _make_tokenizer(files: list[str], settings: PrepareOptions, work: Path) -> _Vocabulary:
    file, home = work / "tokenizer.json", None
    if settings.tokenizer and settings.tokenizer != "bytes":
        given = Path(settings.tokenizer)
        home = given if given.is_dir() else given.parent
    if file.exists():
        tokenizer = Tokenizer.from_file(str(file))
    elif settings.train_bpe:
        tokenizer = train_bpe(_training_texts(files, settings), settings.train_bpe)
    elif settings.tokenizer == "bytes":
        tokenizer = byte_tokenizer()
    else:
        tokenizer = read_tokenizer(settings.tokenizer or "")
    eos_id = find_eos(tokenizer, settings.eos, home)
    with _atomic(file) as output:
        output.write(tokenizer.to_str(pretty=True).encode())
    return _Vocabulary(str(file), vocabulary_size(tokenizer), eos_id)


def _training_texts(files: list[str], settings: PrepareOptions) -> Iterator[str]:
    left = _BPE_TEXT_BYTES
    for unit in cut_units(files):
        for record in read_unit(unit, settings.field, settings.split_documents):
            if left <= 0:
                return
            left -= len(record.text)
            if record.text:
                yield record.text


# --- one unit, in a worker -------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    number: int
    unit: Unit
    work: str
    vocabulary: _Vocabulary
    settings: PrepareOptions

    @property
    def stem(self) -> Path:
        return Path(self.work) / f"unit-{self.number:06}"


def _tokenise_unit(job: _Job) -> dict[str, Any]:
    """Tokenise one unit into `<stem>.<split>.tokens` and `.ends`; `<stem>.json`, written last,
    says that it is done."""
    done = job.stem.with_suffix(".json")
    if done.exists():
        return json.loads(done.read_text(encoding="utf-8"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = Tokenizer.from_file(job.vocabulary.file)
    # A document that spells out a special token means the letters, not the token.
    tokenizer.encode_special_tokens = True
    dtype, settings = np.dtype(job.vocabulary.dtype), job.settings
    counts = {"documents": 0, "rejected": 0, "lines": 0}
    rejects: list[dict[str, Any]] = []
    written = dict.fromkeys(SPLITS, 0)  # tokens
    texts: list[str] = []

    def flush() -> None:
        for text, encoding in zip(
            texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            split = _split_of(text, settings.validation_fraction)
            ids = np.asarray([*encoding.ids, job.vocabulary.eos_id], dtype=dtype)
            written[split] += len(ids)
            outputs[f"{split}.tokens"].write(ids.tobytes())
            outputs[f"{split}.ends"].write(np.uint64(written[split]).tobytes())
        texts.clear()

    with ExitStack() as stack:
        outputs = {
            f"{split}.{kind}": stack.enter_context(_synced(Path(f"{job.stem}.{split}.{kind}")))
            for split in SPLITS
            for kind in ("tokens", "ends")
        }
        for record in read_unit(job.unit, settings.field, settings.split_documents):
            counts["lines"] = record.line
            if record.problem:
                counts["rejected"] += 1
                if len(rejects) < _LISTED_REJECTS:
                    rejects.append({"line": record.line, "problem": record.problem})
            elif record.text:
                counts["documents"] += 1
                texts.append(record.text)
            if len(texts) == _BATCH:
                flush()
        flush()
    result = {**counts, "rejects": rejects}
    with _atomic(done) as output:
        output.write(json.dumps(result).encode())
    return result


def _split_of(text: str, validation_fraction: float) -> str:
    """The split of a document: by a hash of its text, so that it stays where it is when the corpus
    grows, and equal documents stay together."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    share = int.from_bytes(digest, "little") / 2**64
    return "validation" if share < validation_fraction else "train"


def _tokenise(jobs: list[_Job], workers: int, progress: bool) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = [{}] * len(jobs)
    total = sum(job.unit.size for job in jobs)
    bar = tqdm(
        total=total, unit="B", unit_scale=True, disable=not (progress and sys.stderr.isatty())
    )
    with bar:
        for job, result in _run(jobs, min(workers, len(jobs))):
            if job.settings.on_bad == "fail" and result["rejects"]:
                first = result["rejects"][0]
                job.stem.with_suffix(".json").unlink()
                raise DataError(
                    f"{job.unit.file}:{first['line'] + _lines_before(job, jobs)}: "
                    f"{first['problem']}; mend it, or leave such records out with --on-bad skip"
                )
            results[job.number] = result
            bar.update(job.unit.size)
    return results


def _run(jobs: list[_Job], workers: int) -> Iterator[tuple[_Job, dict[str, Any]]]:
    if workers <= 1:
        for job in jobs:
            yield job, _tokenise_unit(job)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_tokenise_unit, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _lines_before(job: _Job, jobs: list[_Job]) -> int:
    """Lines (or rows) of the same file in earlier units."""
    earlier = [other for other in jobs[: job.number] if other.unit.file == job.unit.file]
    return sum(_tokenise_unit(other)["lines"] for other in earlier)


# --- all units → shards ----------------------------------------------------------------------


def _join(
    jobs: list[_Job],
    results: list[dict[str, Any]],
    files: list[str],
    out: Path,
    vocabulary: _Vocabulary,
    settings: PrepareOptions,
    plan_hash: str,
) -> dict[str, Any]:
    splits = {}
    for split in SPLITS:
        parts = [
            (Path(f"{job.stem}.{split}.tokens"), Path(f"{job.stem}.{split}.ends")) for job in jobs
        ]
        shards = _write_shards(parts, out, split, np.dtype(vocabulary.dtype), settings.shard_tokens)
        splits[split] = {
            "tokens": sum(shard["tokens"] for shard in shards),
            "documents": sum(shard["documents"] for shard in shards),
            "shards": shards,
        }
    sources, rejects = _account([job.unit for job in jobs], results, files)
    content = Path(vocabulary.file).read_bytes()
    with _atomic(out / "tokenizer.json") as output:
        output.write(content)
    with _atomic(out / "rejects.jsonl") as output:
        for reject in rejects:
            output.write((json.dumps(reject, ensure_ascii=False) + "\n").encode())
    index: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": "",
        "dtype": vocabulary.dtype,
        "vocab_size": vocabulary.size,
        "eos_id": vocabulary.eos_id,
        "tokenizer": {
            "file": "tokenizer.json",
            "sha256": hashlib.sha256(content).hexdigest(),
        },
        "splits": splits,
        "documents": sum(s["documents"] for s in sources),
        "rejected": sum(s["rejected"] for s in sources),
        "sources": sources,
        "options": asdict(settings),
        "plan": plan_hash,
    }
    index["fingerprint"] = fingerprint(index)
    with _atomic(out / "index.json") as output:
        output.write((json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())
    return index


def _write_shards(
    parts: list[tuple[Path, Path]], out: Path, split: str, dtype: np.dtype, shard_tokens: int
) -> list[dict[str, Any]]:
    """Join the units' files into shards that end with a document."""
    for stale in out.glob(f"{split}-*"):
        stale.unlink()
    shards: list[dict[str, Any]] = []
    writer: _ShardWriter | None = None
    for tokens_file, ends_file in parts:
        ends = np.fromfile(ends_file, dtype="<u8").astype(np.int64)
        if not len(ends):
            continue
        tokens = np.memmap(tokens_file, dtype=dtype, mode="r")
        start = first = 0
        while first < len(ends):
            writer = writer or _ShardWriter(out, f"{split}-{len(shards):05}")
            # Up to and including the document that fills the shard.
            last = int(np.searchsorted(ends, start + shard_tokens - writer.tokens, side="left"))
            last = min(last + 1, len(ends))
            stop = int(ends[last - 1])
            writer.add(tokens[start:stop], ends[first:last] - start)
            start, first = stop, last
            if writer.tokens >= shard_tokens:
                shards.append(writer.close())
                writer = None
    if writer:
        shards.append(writer.close())
    return shards


class _ShardWriter:
    """One shard while it grows."""

    def __init__(self, out: Path, name: str) -> None:
        self.tokens = self.documents = 0
        self._out, self._name = out, name
        self._files = {kind: (out / f"{name}.{kind}").open("wb") for kind in ("tokens", "ends")}

    def add(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Append whole documents; `ends` count from the first of `tokens`."""
        self._files["tokens"].write(tokens.tobytes())
        self._files["ends"].write((ends + self.tokens).astype("<u8").tobytes())
        self.tokens += len(tokens)
        self.documents += len(ends)

    def close(self) -> dict[str, Any]:
        """Sync both files; returns the shard's entry in index.json."""
        entry: dict[str, Any] = {
            "name": self._name,
            "tokens": self.tokens,
            "documents": self.documents,
        }
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            digest, blocks = checksums(self._out / f"{self._name}.{kind}")
            entry |= {f"{kind}_sha256": digest, f"{kind}_crc32": blocks}
        return entry


def _account(
    units: list[Unit], results: list[dict[str, Any]], files: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What came out of each input file, and the rejected records with their lines in it."""
    sources = {
        file: {"file": file, "bytes": os.stat(file).st_size, "documents": 0, "rejected": 0}
        for file in files
    }
    rejects = []
    lines: dict[str, int] = dict.fromkeys(files, 0)
    for unit, result in zip(units, results, strict=True):
        for reject in result["rejects"]:
            line = reject["line"] + lines[unit.file]
            rejects.append({"file": unit.file, "line": line, "problem": reject["problem"]})
        lines[unit.file] += result["lines"]
        for key in ("documents", "rejected"):
            sources[unit.file][key] += result[key]
    return list(sources.values()), rejects


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """A file that is on disk, not only in memory, when the block ends well."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _atomic(path: Path) -> Iterator[BinaryIO]:
    """A file that appears whole under its name, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with _synced(temporary) as file:
        yield file
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
