"""What `perdure data inspect` shows of a prepared data set."""

from pathlib import Path

from tokenizers import Tokenizer

from trainer.data.shards import SPLITS, TokenDataset, read_index


def inspect(directory: str | Path, documents: int = 2) -> str:
    """Counts, sources, and the beginning of the first documents, decoded, as text for a person."""
    directory = Path(directory)
    index = read_index(directory)
    lines = [
        f"{directory}: {index['dtype']} tokens, vocabulary {index['vocab_size']:,}, "
        f"documents end in token {index['eos_id']}",
        f"fingerprint {index['fingerprint']}",
        "",
    ]
    for split in SPLITS:
        part = index["splits"][split]
        lines.append(
            f"{split:<11}{part['tokens']:>16,} tokens {part['documents']:>12,} documents "
            f"{len(part['shards']):>4} shard(s)"
        )
    lines += ["", f"{index['documents']:,} documents taken, {index['rejected']:,} records left out"]
    for source in index["sources"]:
        lines.append(
            f"  {source['file']}: {source['bytes']:,} bytes, {source['documents']:,} documents, "
            f"{source['rejected']:,} left out"
        )
    if index["rejected"]:
        lines.append(f"  the first of them are listed in {directory / 'rejects.jsonl'}")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    dataset = TokenDataset(directory, "train")
    start = 0
    for number in range(min(documents, dataset.documents)):
        length = dataset.document_length(number)
        ids = dataset.read(start, min(length, 60)).tolist()
        lines += ["", f"document {number}, {length:,} tokens: {tokenizer.decode(ids)!r}"]
        start += length
    return "\n".join(lines)
