"""Units of documents → units of tokens, in worker processes; the middle part of prepare.py."""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from trainer.data.options import PrepareOptions
from trainer.data.shards import SPLITS, DataError
from trainer.data.sources import Unit, lines_before, read_piece
from trainer.data.writer import atomic, synced

_BATCH = 512  # documents per call of the tokenizer
_LISTED_REJECTS = 1000  # per unit; all are counted


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer in the work directory, and what follows from it."""

    file: str
    size: int
    eos_id: int

    @property
    def dtype(self) -> str:
        return "uint16" if self.size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Job:
    """One unit to be tokenised into files in the directory `work`."""

    number: int
    unit: Unit
    work: Path
    vocabulary: Vocabulary
    settings: PrepareOptions

    def path(self, ending: str) -> Path:
        """A file of this unit: json, or SPLIT.tokens and SPLIT.ends."""
        return self.work / f"unit-{self.number:06}.{ending}"


def _tokenise_unit(job: Job) -> list[dict[str, Any]]:
    """Tokenise one unit into files; another, written last, says that it is done.

    Returns:
        For each piece of the unit: counts of its documents, rejected records and lines, and the
        first of the rejected records.
    """
    done = job.path("json")
    if done.exists():
        return json.loads(done.read_bytes())
    tokenizer = Tokenizer.from_file(job.vocabulary.file)
    # A document that spells out a special token means the letters, not the token.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings, results = job.settings, []
    texts: list[str] = []
    written = dict.fromkeys(SPLITS, 0)  # tokens
    listed = 0

    def flush() -> None:
        for text, encoding in zip(
            texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            split = _split_of(text, settings.validation_fraction)
            ids = np.asarray([*encoding.ids, job.vocabulary.eos_id], job.vocabulary.dtype)
            written[split] += len(ids)
            outputs[split, "tokens"].write(ids.tobytes())
            outputs[split, "ends"].write(np.asarray(written[split], "<u8").tobytes())
        texts.clear()

    with ExitStack() as stack:
        outputs = {
            (split, kind): stack.enter_context(synced(job.path(f"{split}.{kind}")))
            for split in SPLITS
            for kind in ("tokens", "ends")
        }
        for piece in job.unit:
            documents = rejected = lines = 0
            rejects: list[dict[str, Any]] = []
            for record in read_piece(piece, settings.field, settings.split_documents):
                lines = record.line
                if record.problem:
                    if settings.on_bad == "fail":
                        raise DataError(
                            f"{piece.file}:{lines_before(piece) + record.line}: {record.problem}; "
                            "mend it, or leave such records out with --on-bad skip"
                        )
                    rejected += 1
                    if (listed := listed + 1) <= _LISTED_REJECTS:
                        rejects.append({"line": record.line, "problem": record.problem})
                elif record.text:
                    documents += 1
                    texts.append(record.text)
                    if len(texts) == _BATCH:
                        flush()
            results.append(
                {"documents": documents, "rejected": rejected, "lines": lines, "rejects": rejects}
            )
        flush()
    with atomic(done) as output:
        output.write(json.dumps(results).encode())
    return results


def _split_of(text: str, validation_fraction: float) -> str:
    """The split of a document: by a hash of its text, so that it stays where it is when the corpus
    grows, and equal documents stay together."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    share = int.from_bytes(digest, "little") / 2**64
    return "validation" if share < validation_fraction else "train"


def tokenise(jobs: list[Job], workers: int, progress: bool) -> list[list[dict[str, Any]]]:
    """Do all jobs, those done before excepted; returns what `_tokenise_unit` says of each."""
    results: list[list[dict[str, Any]]] = [[]] * len(jobs)
    sizes = [sum(piece.size for piece in job.unit) for job in jobs]
    hidden = not (progress and sys.stderr.isatty())
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, disable=hidden) as bar:
        for number, result in _run(jobs, min(workers, len(jobs))):
            results[number] = result
            bar.update(sizes[number])
    return results


def _run(jobs: list[Job], workers: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    if workers <= 1:
        for job in jobs:
            yield job.number, _tokenise_unit(job)
        return
    # Spawned, since a fork of a process whose tokenizer has threads can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker) as pool:
        futures = {pool.submit(_tokenise_unit, job): job.number for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Let this process end when its parent does, however that ends; on Ctrl-C without a word."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
