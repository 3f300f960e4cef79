"""`perdure data prepare`: turns text into token shards. See [Note: prepared data set] in shards.py.

Inputs are cut into units in a fixed order. Workers tokenise units into files, each completed by an
atomic rename, so that a repeated command resumes after the completed units. Units are then joined
in order: the bytes depend neither on the number of workers nor on interruptions.
"""

import hashlib
import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from checkpointing.format.untrusted import printable, read_object
from elastic.node.files import own_directory
from trainer.data.prepare.chats import COLUMN_OF_CHATS, form_of
from trainer.data.prepare.inputs import (
    CORPORA,
    FOLDER,
    DataInputFiles,
    fetch_corpus,
    find_inputs,
    is_pipe,
    spool,
)
from trainer.data.prepare.options import OF_CHATS, PrepareOptions
from trainer.data.prepare.records import read_piece
from trainer.data.prepare.sources import (
    DataInputFormat,
    DataInputPiece,
    Pieces,
    cut_units,
    describe,
    detect_forms,
    lines_before,
)
from trainer.data.prepare.spans import notes_for_user
from trainer.data.prepare.template import ChatTemplateSource, read_template
from trainer.data.prepare.tokenise import (
    MOST_LINES,
    DataVocabulary,
    TokeniseTask,
    segments,
    tokenise,
)
from trainer.data.prepare.writer import atomic, to_json, write_data_set
from trainer.data.shards import (
    FORMAT,
    KINDS,
    RECORDS,
    SPLITS,
    DataError,
    TokenDataset,
    checksums,
    read_index,
)
from trainer.data.tokenizer import (
    byte_tokenizer,
    find_eos,
    parse_tokenizer,
    start_ids,
    tokenizer_file,
    train_bpe,
    vocabulary_size,
)

# Characters in total: more hardly improve a tokenizer, and training keeps every word in memory.
_BPE_TEXT_SIZE = 1 << 25
_VALIDATION_FRACTION = 0.02
_DECIDES = ("turns", "template_options", "date", "loss", "max_tokens", "too_long", "spelled")
"""Options that, besides the tokens, are part of the identity of a data set of chats."""
_LOOKED_AT = 20
"""Number of records from which `what_to_type` finds the options."""
_FLAGS = {"chats": "--chat", "pairs": "--pairs"}
_WORK = ".work-4-"  # increase the number when the contents of units change


def prepare(
    inputs: Sequence[str],
    out: str | Path,
    *,
    workers: int = 1,
    progress: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Tokenise `inputs` into the directory `out`, and return its index. A complete data set of the
    same inputs and options is left as it is. Only one process at a time may prepare a directory.

    Args:
        inputs: files, directories, "-" for standard input, or a named corpus ("wikipedia",
            "stdlib").
        out: created if missing.
        workers: number of processes that tokenise.
        progress: report on stderr, with a bar on a terminal.
        options: fields of PrepareOptions.

    Raises:
        DataError: an input cannot be read, a record is bad with on_bad="fail", there is no
            document, or `out` has other contents or cannot be written.
    """
    settings, out = PrepareOptions(**options), Path(out)
    _check_options(settings, workers)
    try:
        names = [_resolve(name, out, settings) for name in inputs]
        known = settings.field if settings.kind == "documents" else COLUMN_OF_CHATS
        found = find_inputs(names, known, settings.splits == "by-name")
        if found.broken and settings.on_bad == "fail":
            raise DataError(
                f"links that cannot be followed: {', '.join(found.broken)}; repair or remove them"
            )
        # A validation split by file names replaces the default share.
        if settings.validation_fraction is None:
            share = 0.0 if found.validation else _VALIDATION_FRACTION
            settings = replace(settings, validation_fraction=share)
        _say(progress, *found.notes)
        template = _read_template(settings) if settings.kind != "documents" else None
        plan_hash = _plan_hash(found, settings, template)
        if (out / "index.json").exists() and (index := _finished(out, plan_hash)):
            _say(progress, f"{out}: is up to date")
            return index
        forms = detect_forms(found.files, settings.split_documents, found.validation)
        if template and (texts := [file for file, form in forms.items() if form.kind == "text"]):
            raise DataError(f"{texts[0]}: plain text has no chats; use jsonl, json or parquet")
        _say(progress, *describe(forms), *(template.notes if template else ()))
        index = _prepare(forms, out, settings, template, plan_hash, workers, progress)
        wanted = settings.validation_fraction
        if wanted and not index["splits"]["validation"]["tokens"]:
            _say(
                progress,
                f"no validation tokens: none of {index['documents']} document(s) fell into the "
                f"{wanted:.1%} of the validation split; raise --validation-fraction, or make more "
                "documents with --split-documents",
            )
        return index
    except OSError as error:
        raise DataError(f"{error.filename or out}: {error.strerror or error}") from error
    except BrokenProcessPool as error:
        raise DataError(
            f"{out}: a worker was killed, perhaps for lack of memory"
            + (" or by a chat template without end" if settings.kind != "documents" else "")
            + "; the same command, with fewer --workers, resumes"
        ) from error
    finally:
        shutil.rmtree(out / FOLDER, ignore_errors=True)


def what_to_type(inputs: Sequence[str]) -> str:
    """Return what to type for inputs that were given without options, by their first records."""
    unseen = any(map(is_pipe, inputs)) or set(inputs) & set(CORPORA)
    files = [] if unseen else find_inputs(inputs, COLUMN_OF_CHATS, by_name=False).files[:1]
    for unit in cut_units(detect_forms(files, "auto")):
        records = (record for piece in unit for record in read_piece(piece, None))
        values = (record.value for record in islice(records, _LOOKED_AT) if record.value)
        kind = next(map(form_of, values), "")
        if kind:
            words = ["perdure", "data", "prepare", *inputs, _FLAGS[kind]]
            words += ["--tokenizer", "MODEL_DIRECTORY", "--out", f"data/{kind}"]
            return f"{files[0]}: holds {kind}; type {shlex.join(words)}"
    return "--out: name the directory of the data set, such as --out data/mine"


def _say(progress: bool, *lines: str) -> None:
    for line in lines if progress else ():
        print(printable(line), file=sys.stderr)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _check_options(settings: PrepareOptions, workers: int) -> None:
    if (settings.tokenizer is None) == (settings.train_bpe is None):
        raise DataError(
            "give one of --tokenizer FILE, --tokenizer bytes and --train-bpe SIZE, such as 4096"
        )
    if not 0 <= (settings.validation_fraction or 0.0) < 1:
        raise DataError(f"--validation-fraction {settings.validation_fraction}: must be in [0, 1)")
    for option, kind in get_type_hints(PrepareOptions).items():
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if choices and getattr(settings, option) not in choices:
            raise DataError(f"{_flag(option)} must be one of {', '.join(choices)}")
    if min(workers, settings.shard_tokens) < 1:
        raise DataError("--workers and --shard-tokens must be at least 1")
    plain = PrepareOptions()
    if settings.kind == "documents":
        given = [key for key in OF_CHATS if getattr(settings, key) != getattr(plain, key)]
        if given:
            raise DataError(f"{_flag(given[0])}: only for chats and pairs; add --chat or --pairs")
        return
    for key in ("train_bpe", "field", "special_tokens"):
        if getattr(settings, key) != getattr(plain, key):
            raise DataError(f"{_flag(key)}: cannot be used with --chat or --pairs; remove it")
    if settings.chat and settings.pairs:
        raise DataError("give one of --chat and --pairs")
    if settings.pairs and settings.turns != "auto":
        raise DataError("--turns: cannot be used with --pairs, which trains the answers; remove it")
    if settings.max_tokens is None and settings.too_long != plain.too_long:
        raise DataError("--too-long cut: add --max-tokens, such as --max-tokens 4096")
    if settings.max_tokens is not None and settings.max_tokens < 2:
        raise DataError("--max-tokens must be at least 2: one input and one label")


def _read_template(settings: PrepareOptions) -> ChatTemplateSource:
    home = None
    if settings.tokenizer and settings.tokenizer != "bytes":
        home = tokenizer_file(settings.tokenizer).parent
    try:
        options = read_object(settings.template_options or "{}")
    except ValueError as error:
        raise DataError(
            f"--template-options: not a JSON object ({error}); give it as "
            """'{"enable_thinking": false}'"""
        ) from error
    try:
        date.fromisoformat(settings.date or "2026-01-31")
    except ValueError as error:
        raise DataError(f"--date {settings.date}: no day; write it as --date 2026-01-31") from error
    return read_template(settings.template, home, options)


def _resolve(name: str, out: Path, settings: PrepareOptions) -> str:
    """Return the file to read for an input: that of a named corpus, the copy of a pipe, or else
    `name` itself."""
    if name in CORPORA and not Path(name).exists():
        return str(fetch_corpus(name, out / "corpus"))
    return str(spool(name, out, settings.field)) if is_pipe(name) else name


def _plan_hash(
    inputs: DataInputFiles, settings: PrepareOptions, template: ChatTemplateSource | None
) -> str:
    """Hash of all that determines the data set: options, tokenizer, chat template, and the name,
    size, time of change and split of each input."""
    stats = []
    for file in inputs.files:
        status = os.stat(file)
        split = ["validation"] if file in inputs.validation else []
        stats.append([file, status.st_size, status.st_mtime_ns, *split])
    tokenizer = b""
    if settings.tokenizer and settings.tokenizer != "bytes":
        tokenizer = tokenizer_file(settings.tokenizer).read_bytes()
    options = asdict(settings)
    del options["splits"]  # hashed by its effect, the split of each input
    if settings.special_tokens == "letters":
        del options["special_tokens"]  # data sets of older versions keep their hash
    # Data sets of plain text keep the hash of older versions.
    if template is None:
        options = {key: value for key, value in options.items() if key not in OF_CHATS}
    facts = [FORMAT, options, stats, hashlib.sha256(tokenizer).hexdigest()]
    facts += [template.digest] if template else []
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _finished(out: Path, plan_hash: str) -> dict[str, Any] | None:
    """Index of the complete data set in `out`; None if a file is missing or truncated. Raises
    DataError if it was prepared from other inputs or options than those of `plan_hash`."""
    index = read_index(out)
    if index.get("plan") != plan_hash:
        raise DataError(
            f"{out}: holds a data set of other inputs or options; choose another --out, or remove "
            "it first"
        )
    try:
        for split in SPLITS:
            # opening checks the size of every file
            TokenDataset(out, split)
    except DataError:
        return None
    return index


def _prepare(
    forms: dict[str, DataInputFormat],
    out: Path,
    settings: PrepareOptions,
    template: ChatTemplateSource | None,
    plan_hash: str,
    workers: int,
    progress: bool,
) -> dict[str, Any]:
    # Without its index, the directory is no data set while files change.
    (out / "index.json").unlink(missing_ok=True)
    work = out / f"{_WORK}{plan_hash[:16]}"
    # These folders are left by interrupted commands with other inputs or options.
    for stale in out.glob(".work-*"):
        if stale != work:
            shutil.rmtree(stale)
    out.mkdir(parents=True, exist_ok=True)
    # Private, as other users must not replace units before they are joined.
    own_directory(work)
    units = cut_units(forms)
    vocabulary, dropout = _make_tokenizer(units, settings, work)
    if dropout:
        what = f"the tokenizer's BPE dropout of {dropout} is off"
        _say(progress, f"{what}: equal texts must give equal tokens")
    jobs = [
        TokeniseTask(number, unit, work, vocabulary, settings, template)
        for number, unit in enumerate(units)
    ]
    results = tokenise(jobs, workers, progress)
    noted = [counts["noted"] for unit in results for counts in unit]
    _say(progress, *(notes_for_user(noted) if template else _spelled_out(noted)))
    index = _join(jobs, results, forms, out, vocabulary, settings, template, plan_hash)
    # Removed last, because a repeated command resumes from these files.
    shutil.rmtree(work)
    return index


def _spelled_out(noted: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a note for the user if special tokens in texts were tokenised as plain letters."""
    counts: Counter[str] = Counter()
    for part in noted:
        counts.update(part["spelled"])
    if not counts:
        return
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
    listed = ", ".join(f"{token} in {count:,}" for token, count in most)
    more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
    yield (
        f"special tokens in the text of documents became letters: {listed}{more}; --special-tokens "
        "tokens keeps them as tokens, which rendered chats need"
    )


def _make_tokenizer(
    units: list[Pieces], settings: PrepareOptions, work: Path
) -> tuple[DataVocabulary, float | None]:
    """Write the tokenizer into the work directory. Returns its properties, and its BPE dropout."""
    file = given = work / "tokenizer.json"
    home = None
    if settings.tokenizer and settings.tokenizer != "bytes":
        given = tokenizer_file(settings.tokenizer)
        home, content = given.parent, given.read_bytes()
    # An interrupted command has trained this tokenizer, and tokenised units with it.
    elif file.exists():
        content = file.read_bytes()
    elif settings.train_bpe:
        texts = _training_texts(units, settings)
        content = train_bpe(texts, settings.train_bpe).to_str(pretty=True).encode()
    else:
        content = byte_tokenizer().to_str(pretty=True).encode()
    tokenizer = parse_tokenizer(content, given, dropout=True)  # errors name the user's file
    with atomic(file) as output:
        output.write(content)
    eos_id = find_eos(tokenizer, settings.eos, home, chats=settings.kind != "documents")
    dropout = getattr(tokenizer.model, "dropout", None)
    size, begin = vocabulary_size(tokenizer), start_ids(tokenizer)
    return DataVocabulary(str(file), size, eos_id, begin), dropout


def _training_texts(units: list[Pieces], settings: PrepareOptions) -> Iterator[str]:
    """Yield the beginnings of all units: everything, or _BPE_TEXT_SIZE characters in total."""
    # Files of the validation split do not train the tokenizer. Documents that validation_fraction
    # draws from other files do.
    units = [tuple(piece for piece in unit if not piece.form.held_out) for unit in units]
    total = sum(piece.size for unit in units for piece in unit)
    for unit in units:
        size = sum(piece.size for piece in unit)
        left = _BPE_TEXT_SIZE * size // max(total, 1)
        records = (record for piece in unit for record in read_piece(piece, settings.field))
        for record in records:
            if record.text:
                yield from segments(record.text[:left])
            left -= len(record.text)
            if left <= 0:
                break


def _join(
    jobs: list[TokeniseTask],
    results: list[list[dict[str, Any]]],
    forms: dict[str, DataInputFormat],
    out: Path,
    vocabulary: DataVocabulary,
    settings: PrepareOptions,
    template: ChatTemplateSource | None,
    plan_hash: str,
) -> dict[str, Any]:
    before = _lines_before([job.unit for job in jobs])
    sources, rejects = _account([job.unit for job in jobs], before, results, forms)
    with atomic(out / "rejects.jsonl") as output:
        for reject in rejects:
            output.write(to_json(reject))
    documents, rejected = (
        sum(source[key] for source in sources) for key in ("documents", "rejected")
    )
    if not documents:
        first = next((f" (first {r['file']}:{r['line']}: {r['problem']})" for r in rejects), "")
        raise DataError(
            f"{out}: the inputs have no document, {rejected} bad records{first}; see "
            f"{out / 'rejects.jsonl'}"
        )
    _write_records(jobs, before, results)
    kinds = (*(KINDS[1] if template is None else KINDS[2]), RECORDS)
    parts = {
        split: [{kind: job.path(f"{split}.{kind}") for kind in kinds} for job in jobs]
        for split in SPLITS
    }
    options = {k: v for k, v in asdict(settings).items() if template or k not in OF_CHATS}
    decisive = {key: getattr(settings, key) for key in _DECIDES}
    return write_data_set(
        out,
        parts,
        dtype=vocabulary.dtype,
        vocab_size=vocabulary.size,
        eos_id=vocabulary.eos_id,
        start_ids=vocabulary.start_ids,
        tokenizer=Path(vocabulary.file).read_bytes(),
        shard_tokens=settings.shard_tokens,
        about={
            **{"documents": documents, "rejected": rejected, "sources": sources},
            **{"options": options, "plan": plan_hash},
        },
        chats={"kind": settings.kind, "chats": {"template": template.digest, **decisive}}
        if template
        else {},
    )


def _lines_before(units: list[Pieces]) -> list[list[int]]:
    """Return `lines_before` of each piece of each unit."""
    known: tuple[DataInputPiece, int] | None = None
    counts: list[list[int]] = []
    for unit in units:
        counts.append([])
        for piece in unit:
            known = piece, lines_before(piece, known)
            counts[-1].append(known[1])
    return counts


def _write_records(
    jobs: list[TokeniseTask], before: list[list[int]], results: list[list[dict[str, Any]]]
) -> None:
    """For each unit and split, write the line of each document in its input file. Workers have
    written lines counted from the begin of a piece. `before`: from `_lines_before`."""
    for job, starts, result in zip(jobs, before, results, strict=True):
        for split in SPLITS:
            counts = [piece["by_split"][split] for piece in result]
            lines = np.fromfile(job.path(f"{split}.lines"), "<u4").astype(np.int64)
            lines = np.minimum(lines + np.repeat(starts, counts), MOST_LINES)
            with atomic(job.path(f"{split}.{RECORDS}")) as output:
                output.write(lines.astype("<u4").tobytes())


def _account(
    units: list[Pieces],
    before: list[list[int]],
    results: list[list[dict[str, Any]]],
    forms: dict[str, DataInputFormat],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (counts for each input file, rejected records with their lines in these files)."""
    sources: dict[str, dict[str, Any]] = {
        file: {
            "file": file,
            "bytes": os.stat(file).st_size,
            "sha256": checksums(Path(file))[0],
            "holds": form.kind if form.kind != "text" else form.split,
            "documents": 0,
            "by_split": dict.fromkeys(SPLITS, 0),
            "rejected": 0,
            **({"split": "validation"} if form.held_out else {}),
        }
        for file, form in forms.items()
    }
    rejects = []
    for unit, starts, result in zip(units, before, results, strict=True):
        for piece, start, counts in zip(unit, starts, result, strict=True):
            for reject in counts["rejects"]:
                line = start + reject["line"]
                problem = reject["problem"]
                rejects.append({"file": piece.file, "line": line, "problem": problem})
            source = sources[piece.file]
            for split, number in counts["by_split"].items():
                source["by_split"][split] += number
                source["documents"] += number
            source["rejected"] += counts["rejected"]
    return list(sources.values()), rejects
