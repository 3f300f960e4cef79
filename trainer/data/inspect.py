"""What `perdure data inspect` shows of a prepared data set."""

from itertools import islice
from pathlib import Path
from typing import Any

from checkpointing.format.untrusted import printable, read_object
from trainer.data.shards import SPLITS, DataError, TokenDataset, read_index
from trainer.data.tokenizer import read_tokenizer


def inspect(directory: str | Path, documents: int = 2) -> str:
    """Counts, sources, first rejected records, and the beginning of the first documents, decoded;
    as text for a person.

    Raises:
        DataError: there is no prepared data set, or a file of it is missing or damaged.
    """
    directory = Path(directory)
    index = read_index(directory)
    lines = [
        f"{directory}: {index['dtype']} tokens, vocabulary {index['vocab_size']:,}, "
        f"documents {_begin(index)}end in token {index['eos_id']}",
        f"fingerprint {index['fingerprint']}",
        f"tokenizer   sha256:{index['tokenizer']['sha256']}",
        "",
    ]
    for split in SPLITS:
        part = index["splits"][split]
        lines.append(
            f"{split:<11}{part['tokens']:>16,} tokens {part['documents']:>12,} documents "
            f"{len(part['shards']):>4} shard(s)"
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
    start = 0
    for number in range(min(documents, dataset.documents)):
        length = dataset.document_length(number)
        ids = dataset.read(start, min(length, 60)).tolist()
        lines += ["", f"document {number}, {length:,} tokens: {tokenizer.decode(ids)!r}"]
        start += length
    return "\n".join(map(printable, lines))


def _first_rejects(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            rejects = [read_object(line) for line in islice(file, 3)]
        lines = [f"  {one['file']}:{one['line']}: {one['problem']}" for one in rejects]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: damaged: {error}; prepare the data again") from error
    return [*lines, f"  see {path}"]


def _split(source: dict[str, Any]) -> str:
    return ", all for validation" if source.get("split") == "validation" else ""


def _begin(index: dict[str, Any]) -> str:
    ids = index.get("start_ids")  # of data sets that are older there are none
    return f"begin with token {', '.join(map(str, ids))} and " if ids else ""
