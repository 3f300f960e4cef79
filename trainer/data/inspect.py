"""Text and HTML of `perdure data inspect` about a prepared data set."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.format.untrusted import printable, read_object
from checkpointing.storage.place import StoragePlace, location
from checkpointing.storage.steps import storage_of
from trainer.data.shards import SPLITS, DataError, TokenDataset, read_index
from trainer.data.tokenizer import read_tokenizer

_LOOKED_AT = 1 << 20
"""Bytes that are read from the beginning of rejects.jsonl."""


def inspect(directory: str | StoragePlace, documents: int = 2) -> str:
    """Describe a data set: counts, sources, and first rejected records; for plain text, also the
    first `documents` documents, decoded.

    Raises:
        DataError: no prepared data set, or a missing or damaged file.
        StorageError: the store does not answer, or denies access.
    """
    directory = location(directory)
    index = read_index(directory)
    kind = index.get("kind", "")
    about = (
        f"{kind} by the template sha256:{index['chats']['template']}"
        if kind
        else (f"documents {_begin(index)}end in token {index['eos_id']}")
    )
    lines = [
        f"{directory}: {index['dtype']} tokens, vocabulary {index['vocab_size']:,}, {about}",
        f"fingerprint {index['fingerprint']}",
        f"tokenizer   sha256:{index['tokenizer']['sha256']}",
        "",
    ]
    for split in SPLITS:
        part = index["splits"][split]
        lines.append(
            f"{split:<11}{part['tokens']:>16,} tokens {part['documents']:>12,} documents "
            f"{len(part['shards']):>4} shard(s)"
            + (f" {part['trained']:>16,} trained tokens" if kind else "")
        )
    rejected, sources = index.get("rejected", 0), index.get("sources", [])
    taken = sum(index["splits"][split]["documents"] for split in SPLITS)
    lines += ["", f"{taken:,} documents taken, {rejected:,} records left out"]
    for source in sources:
        lines.append(
            f"  {source['file']}: {source['bytes']:,} bytes, {source['documents']:,} documents, "
            f"{source['rejected']:,} left out{_split(source)}"
        )
    if rejected:
        lines += _first_rejects(directory / "rejects.jsonl")
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    dataset, validation = (TokenDataset(directory, split) for split in SPLITS)
    dataset.check_ends()
    validation.check_ends()
    if kind:  # decoded text does not distinguish special tokens from their letters; `sample` does
        documents = 0
    start = 0
    for number in range(min(documents, dataset.documents)):
        length = dataset.document_length(number)
        ids = dataset.read(start, min(length, 60)).tolist()
        lines += ["", f"document {number}, {length:,} tokens: {tokenizer.decode(ids)!r}"]
        start += length
    return "\n".join(map(printable, lines))


@dataclass(frozen=True)
class _SampledDocument:
    """A document with its tokens, for display."""

    number: int
    """Index in the training split."""
    tokens: Sequence[tuple[int, str, bool]]
    """(id, text, whether it is trained) of each token."""

    @property
    def headline(self) -> str:
        trained = sum(is_trained for *_, is_trained in self.tokens)
        return f"document {self.number}, {len(self.tokens):,} tokens, {trained:,} of them trained"


def sample(directory: str | StoragePlace, count: int) -> list[_SampledDocument]:
    """Return `count` documents of the training split, evenly spaced. Raises DataError."""
    dataset = TokenDataset(directory, "train")
    tokenizer = read_tokenizer(location(directory) / "tokenizer.json")
    lengths = dataset.lengths()
    starts = lengths.cumsum() - lengths
    count = min(count, len(lengths))
    found = []
    for number in (place * len(lengths) // count for place in range(count)):
        start, length = int(starts[number]), int(lengths[number])
        ids = dataset.read(start, length).tolist()
        trained = dataset.read_trained(start, length).tolist()
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        found.append(_SampledDocument(number, list(zip(ids, texts, trained, strict=True))))
    return found


def as_text(documents: Sequence[_SampledDocument], columns: int | None, *, colour: bool) -> str:
    """Format documents for a terminal or a file (no `columns`); `colour` else * marks trained."""
    lines = []
    for document in documents:
        lines += ["", document.headline, ""]
        width = 0
        for number, text, trained in document.tokens:
            mark = "*" if trained and not colour else ""
            cell = f"{mark}{number}[{printable(text)}]"
            if width and width + len(cell) + 1 > (columns or 100):
                lines.append("")
                width = 0
            gap = " " if width else ""
            width += len(gap + cell)
            lines[-1] += gap + (f"\x1b[1;32m{cell}\x1b[0m" if trained and colour else cell)
    return "\n".join(lines)


def as_page(directory: str | StoragePlace, documents: Sequence[_SampledDocument]) -> str:
    title = html.escape(printable(f"{directory}: {len(documents)} documents"))
    parts = [_PAGE.replace("TITLE", title)]
    for document in documents:
        parts.append(f"<h2>{html.escape(document.headline)}</h2>\n<p>")
        for number, text, trained in document.tokens:
            shown = html.escape(printable(text)) or "&nbsp;"
            kind = ' class="t"' if trained else ""
            parts.append(f"<span{kind}>{shown}<sub>{number}</sub></span>")
            parts += ["<br>"] if "\n" in text else []
        parts.append("</p>\n")
    return "".join(parts)


_PAGE = """\
<!doctype html>
<meta charset="utf-8">
<title>TITLE</title>
<style>
body { font: 15px/1.9 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.3em } h2 { font-size: 1em; margin-top: 2em }
p { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
span { background: #eee; border-radius: 3px; padding: 1px 2px; margin: 1px; color: #222;
       white-space: pre-wrap }
span.t { background: #b7ebc3; color: #063 }
sub { font-size: 9px; opacity: .6; padding-left: 2px }
</style>
<h1>TITLE</h1>
<p>Tokens by text and number; <span class="t">trained</span> and <span>not trained</span>.</p>
"""


def _first_rejects(path: StoragePlace) -> list[str]:
    begin = memoryview(bytearray(_LOOKED_AT))
    try:
        with storage_of(path).open(path) as file:
            content = begin[: file.read_into([begin], 0)]
        rejects = [read_object(line) for line in bytes(content).splitlines()[:3]]
        lines = [f"  {reject['file']}:{reject['line']}: {reject['problem']}" for reject in rejects]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: damaged: {error}; prepare the data again") from error
    return [*lines, f"  see {path}"]


def _split(source: dict[str, Any]) -> str:
    return ", all for validation" if source.get("split") == "validation" else ""


def _begin(index: dict[str, Any]) -> str:
    ids = index.get("start_ids")  # data sets of older versions have no start_ids
    return f"begin with token {', '.join(map(str, ids))} and " if ids else ""
