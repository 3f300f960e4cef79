"""Tokenises units of documents in worker processes, for prepare.py."""

import hashlib
import json
import multiprocessing
import os
import re
import signal
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.data.prepare.chats import ChatError, read_chat, read_pair
from trainer.data.prepare.options import PrepareOptions, Turns
from trainer.data.prepare.records import DataInputRecord, read_piece
from trainer.data.prepare.sources import Pieces, lines_before
from trainer.data.prepare.spans import ChatEncoder, ChatSpanFinder, RenderedChat
from trainer.data.prepare.template import ChatTemplate, ChatTemplateSource, confine
from trainer.data.prepare.writer import atomic, synced
from trainer.data.shards import SPLITS, DataError
from trainer.data.tokenizer import read_tokenizer, special_tokens

PROGRESS = "progress"
"""Name of the file in the work directory with the number of bytes read of each unit, as uint64."""
_BATCH = 512  # documents per call of the tokenizer
# Characters for one call of the tokenizer, which needs 150 bytes per token. The text that is added
# last may double this number.
_CHARACTERS = 1 << 17
# Words whose tokens the tokenizer keeps. Its default, 10,000, is too few for texts of many kinds.
_WORDS = 50_000
_AHEAD = 128  # records whose chats are encoded together
_LISTED_REJECTS = 1000  # listed rejects per unit; all are counted
MOST_LINES = (1 << 32) - 1
"""Largest recorded line number; later lines are recorded as this one."""


@dataclass(frozen=True)
class DataVocabulary:
    """The tokenizer in the work directory, and its properties."""

    file: str
    size: int
    eos_id: int
    start_ids: tuple[int, ...]
    """Tokens that the tokenizer puts before a document."""

    @property
    def dtype(self) -> str:
        return "uint16" if self.size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class TokeniseTask:
    """One unit to be tokenised into files in the directory `work`."""

    number: int
    unit: Pieces
    work: Path
    vocabulary: DataVocabulary
    settings: PrepareOptions
    template: ChatTemplateSource | None
    """None: the records are documents."""

    def path(self, ending: str) -> Path:
        """Path of a file of this unit: json, or SPLIT.tokens, SPLIT.ends, SPLIT.lines (uint32, line
        of each document in its piece), and for chats SPLIT.trained (a byte per token)."""
        return self.work / f"unit-{self.number:06}.{ending}"


def _tokenise_unit(job: TokeniseTask) -> list[dict[str, Any]]:
    """Tokenise one unit into files; the file that is written last marks it as done. Return for each
    piece of the unit: numbers of documents by split and of rejected records, the first rejected
    records, and the writer's `noted`."""
    done = job.path("json")
    if done.exists():
        return json.loads(done.read_bytes())
    results = []
    read = listed = 0
    with ExitStack() as stack:
        progress = stack.enter_context((job.work / PROGRESS).open("r+b"))
        template = job.template
        writer = _ChatWriter(job, template, stack) if template else _TextWriter(job, stack)

        def report(count: int) -> None:
            os.pwrite(progress.fileno(), struct.pack("<Q", read + count), 8 * job.number)

        for piece in job.unit:
            rejected = 0
            before = dict(writer.documents)
            rejects: list[dict[str, Any]] = []
            records = read_piece(piece, None if template else job.settings.field, report)
            for record in writer.ahead(records):
                for problem in writer.add(record, piece.form.held_out):
                    if job.settings.on_bad == "fail":
                        raise DataError(
                            f"{piece.file}:{lines_before(piece) + record.line}: {problem}; mend "
                            "it, or leave such records out with --on-bad skip"
                        )
                    rejected += 1
                    if (listed := listed + 1) <= _LISTED_REJECTS:
                        rejects.append({"line": record.line, "problem": problem})
            read += piece.size
            by_split = {split: writer.documents[split] - before[split] for split in SPLITS}
            counts = {"by_split": by_split, "rejected": rejected}
            results.append({**counts, "rejects": rejects, "noted": writer.noted()})
        writer.flush()
        report(0)
    with atomic(done) as output:
        output.write(json.dumps(results).encode())
    return results


class _UnitWriter:
    """Writes documents to the files of a unit."""

    def __init__(self, job: TokeniseTask, stack: ExitStack, *kinds: str) -> None:
        self._job = job
        self._files = {
            (split, kind): stack.enter_context(synced(job.path(f"{split}.{kind}")))
            for split in SPLITS
            for kind in ("tokens", "ends", "lines", *kinds)
        }
        self._tokens = dict.fromkeys(SPLITS, 0)
        self._characters = 0  # of the pending documents
        self.documents = dict.fromkeys(SPLITS, 0)

    def ahead(self, records: Iterator[DataInputRecord]) -> Iterator[DataInputRecord]:
        """Yield the records for `add`, which some writers prepare several at a time."""
        return records

    def flush(self) -> None:
        """Write the pending documents."""

    def _write(
        self,
        split: str,
        ids: Any,
        line: int,
        ends: bool = True,
        trained: NDArray[np.bool_] | None = None,
    ) -> None:
        """Write a document, or a part of one. `line`: line of its record in the piece. `ends`:
        whether the document ends with these tokens. `trained`: whether each token is trained."""
        self._tokens[split] += len(ids)
        dtype = self._job.vocabulary.dtype
        self._files[split, "tokens"].write(np.asarray(ids, dtype).tobytes())
        if trained is not None:
            self._files[split, "trained"].write(trained.tobytes())
        if ends:
            self._files[split, "ends"].write(np.asarray(self._tokens[split], "<u8").tobytes())
            self._files[split, "lines"].write(np.asarray(min(line, MOST_LINES), "<u4").tobytes())


class _TextWriter(_UnitWriter):
    def __init__(self, job: TokeniseTask, stack: ExitStack) -> None:
        super().__init__(job, stack)
        file = job.vocabulary.file
        letters = job.settings.special_tokens == "letters"
        self._tokenizer = _tokenizer(file, os.stat(file).st_mtime_ns, letters)
        tokens = sorted(special_tokens(self._tokenizer)) if letters else []
        self._special = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        # pending (text, split, line, begins, ends)
        self._batch: list[tuple[str, str, int, bool, bool]] = []
        self._split, self._line = "", 0  # split and line of the unfinished document
        self._spelled: Counter[str] = Counter()

    def add(self, record: DataInputRecord, held_out: bool) -> list[str]:
        """Add a document, or the next part of one, and return its problem if it has one.
        `held_out`: whether it belongs to the validation split."""
        text, goes_on = record.text, record.goes_on
        problems = [record.problem] if record.problem else []
        begins = not self._split
        if text and begins:
            share = self._job.settings.validation_fraction or 0.0
            self._split = "validation" if held_out else _split_of(text, share)
            self._line = record.line
            self.documents[self._split] += 1
        if not self._split:
            return problems
        if self._special:
            self._spelled.update(set(self._special.findall(text)))
        parts = segments(text)
        for number, part in enumerate(parts, 1):
            self._put(part, begins and number == 1, number == len(parts) and not goes_on)
        if not goes_on:
            self._split = ""
        return problems

    def noted(self) -> dict[str, Any]:
        """Return and reset, for each special token, the number of documents, or parts of one, whose
        text contains it."""
        spelled, self._spelled = dict(self._spelled), Counter()
        return {"spelled": spelled}

    def _put(self, text: str, begins: bool, ends: bool) -> None:
        self._batch.append((text, self._split, self._line, begins, ends))
        self._characters += len(text)
        if len(self._batch) == _BATCH or self._characters >= _CHARACTERS:
            self.flush()

    def flush(self) -> None:
        vocabulary = self._job.vocabulary
        encodings = self._tokenizer.encode_batch_fast(
            [text for text, *_ in self._batch], add_special_tokens=False
        )
        for (_, split, line, begins, ends), encoding in zip(self._batch, encodings, strict=True):
            ids, start = encoding.ids, list(vocabulary.start_ids)
            # A document that is a rendered chat has begin and end tokens already, if special tokens
            # in texts are encoded as tokens.
            if begins and ids[: len(start)] != start:
                ids = start + ids
            if ends and ids[-1:] != [vocabulary.eos_id]:
                ids = [*ids, vocabulary.eos_id]
            self._write(split, ids, line, ends)
        self._batch.clear()
        self._characters = 0


class _ChatWriter(_UnitWriter):
    """Writes chats, or pairs of chats."""

    def __init__(self, job: TokeniseTask, template: ChatTemplateSource, stack: ExitStack) -> None:
        super().__init__(job, stack, "trained")
        self._settings = settings = job.settings
        file = job.vocabulary.file
        compiled = ChatTemplate(template, settings.date)
        written = [*template.sources.values(), *map(str, template.variables.values())]
        tokenizer = _tokenizer(file, os.stat(file).st_mtime_ns, letters=False)
        encoder = ChatEncoder(tokenizer, "\n".join(written), compiled.has_blocks)
        self._finder = ChatSpanFinder(compiled, encoder, settings.loss, settings.spelled)
        self.noted = self._finder.noted
        self._ready: deque[list[tuple[RenderedChat, Turns]] | str] = deque()
        """Chats of the next records, or why a record is rejected."""

    def ahead(self, records: Iterator[DataInputRecord]) -> Iterator[DataInputRecord]:
        while some := list(islice(records, _AHEAD)):
            self._ready += map(self._chats, some)
            chats = (one for one in self._ready if not isinstance(one, str))
            self._finder.encode(chat for several in chats for chat, _ in several)
            yield from some

    def add(self, record: DataInputRecord, held_out: bool) -> list[str]:
        """Write a chat or a pair, and return why it, or a document of it, is rejected."""
        chats = self._ready.popleft()
        if isinstance(chats, str):
            return [chats]
        try:
            documents = [
                document
                for chat, turns in chats
                for document in self._finder.documents(chat, turns)
            ]
        except ChatError as error:
            return [str(error)]
        share, most = self._settings.validation_fraction or 0.0, self._settings.max_tokens
        split = "validation" if held_out else "train"
        if share and not held_out:
            # By a hash of the record: so pairs stay together, and the template does not matter.
            split = _split_of(json.dumps(record.value, sort_keys=True, default=str), share)
        drop = self._settings.too_long == "drop"
        over = f"more than --max-tokens {most}; --too-long cut keeps the first"
        if self._settings.pairs and most is not None:
            size = sum(len(document.ids) for document in documents)
            if size > most and drop:
                return [f"{size:,} tokens in both answers, {over}"]
            most = None if size <= most else most // 2
        kept = []
        problems = []
        for document in documents:
            size = len(document.ids)
            if most is None or size <= most or (not drop and document.trained[:most].any()):
                kept.append(document)
            elif drop:
                problems.append(f"{document.place}{size:,} tokens, {over}")
            else:
                problem = f"none of the first {most} of its {size:,} tokens is trained"
                problems.append(document.place + problem)
        if problems and self._settings.pairs:
            return problems[:1]
        for document in kept:
            ids, trained = document.ids[:most], document.trained[:most]
            self._write(split, ids, record.line, trained=trained)
            self.documents[split] += 1
        return problems

    def _chats(self, record: DataInputRecord) -> list[tuple[RenderedChat, Turns]] | str:
        rendered = self._finder.rendered
        if record.problem or not record.value:
            return record.problem or []
        try:
            if not self._settings.pairs:
                return [(rendered(read_chat(record.value)), self._settings.turns)]
            return [
                (rendered(chat), "last" if chat.trained == (len(chat.messages) - 1,) else "all")
                for chat in read_pair(record.value)
            ]
        except ChatError as error:
            return str(error)


@lru_cache(maxsize=1)
def _tokenizer(file: str, modified: int, letters: bool) -> Tokenizer:
    """Read a tokenizer, cached because reading may take longer than a unit. `modified`: time of the
    file's last change. `letters`: whether a text that spells a special token means letters."""
    tokenizer = read_tokenizer(file)
    if resize := getattr(tokenizer.model, "_resize_cache", None):
        resize(_WORDS)
    tokenizer.encode_special_tokens = letters
    return tokenizer


def segments(text: str) -> list[str]:
    """Cut a text into parts of at most _CHARACTERS, at line ends, else before spaces."""
    parts, start = [], 0
    while len(text) - start > _CHARACTERS:
        least, most = start + _CHARACTERS // 2, start + _CHARACTERS
        end = text.rfind("\n", least, most) + 1 or max(text.rfind(" ", least, most), 0) or most
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def _split_of(text: str, validation_fraction: float) -> str:
    """Split of a document by a hash of its text (of the first MiB or two, if read in parts), so
    that it is stable as the corpus grows, and equal documents stay together."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    share = int.from_bytes(digest, "little") / 2**64
    return "validation" if share < validation_fraction else "train"


def tokenise(jobs: list[TokeniseTask], workers: int, progress: bool) -> list[list[dict[str, Any]]]:
    """Run all jobs that are not done; return the result of `_tokenise_unit` for each job."""
    results: list[list[dict[str, Any]]] = [[]] * len(jobs)
    total = sum(piece.size for job in jobs for piece in job.unit)
    file = jobs[0].work / PROGRESS
    with file.open("ab") as slots:
        # Opened to append, so that a resumed command keeps the progress of completed units.
        slots.truncate(8 * len(jobs))
    with _shown(file, total) if progress and sys.stderr.isatty() else nullcontext():
        for number, result in _run(jobs, min(workers, len(jobs))):
            results[number] = result
    return results


@contextmanager
def _shown(file: Path, total: int) -> Iterator[None]:
    """Show a progress bar on stderr while the block runs, from the byte counts in the file."""
    from tqdm import tqdm  # imported only for a terminal

    over = threading.Event()

    def show() -> None:
        with tqdm(total=total, unit="B", unit_scale=True) as bar:
            waiting = True
            while waiting:
                waiting = not over.wait(0.2)
                bar.update(int(np.fromfile(file, "<u8").sum()) - bar.n)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _run(jobs: list[TokeniseTask], workers: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    # Templates run in a separate process, which can be killed.
    if workers <= 1 and not jobs[0].template:
        for job in jobs:
            yield job.number, _tokenise_unit(job)
        return
    # Spawned, because a fork of a process whose tokenizer has threads can hang.
    context = multiprocessing.get_context("spawn")
    confined = bool(jobs[0].template)
    with ProcessPoolExecutor(workers, context, _start_worker, (confined,)) as pool:
        futures = {pool.submit(_tokenise_unit, job): job.number for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(confined: bool) -> None:
    """Prepare a worker process: it ends when its parent ends, and without a traceback on Ctrl-C.
    `confined`: whether it renders chat templates."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallelism comes from processes
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            wait([parent.sentinel])
        # sys.exit would end only this thread
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if confined:
        confine()
