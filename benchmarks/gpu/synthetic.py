"""Prepared data with documents as long as those of C4, and random tokens."""

import json
import math
from pathlib import Path

import numpy as np

from trainer.data.prepare.writer import write_data_set
from trainer.data.shards import SPLITS
from trainer.data.tokenizer import byte_tokenizer

MEDIAN, MEAN = 300, 480
"""Tokens of a document of C4; a log-normal distribution has both."""
SIGMA = math.sqrt(2 * math.log(MEAN / MEDIAN))
EOS = 256
"""What ends a document for the tokenizer that comes with it."""


def document_lengths(draw: np.random.Generator, tokens: int) -> np.ndarray:
    """Lengths of documents, int64, the end included, that come to at least so many tokens."""
    count = 16 + int(1.5 * tokens / MEAN)
    lengths = np.maximum(2, draw.lognormal(math.log(MEDIAN), SIGMA, count)).astype(np.int64)
    while lengths.sum() < tokens:  # by chance, with few
        lengths = np.concatenate((lengths, lengths))
    return lengths[: int(np.searchsorted(lengths.cumsum(), tokens)) + 1]


def data_set(folder: Path, vocabulary: int, tokens: int) -> Path:
    """The data set of so many training tokens and 1/16 of that for validation, made unless it is
    there: the same bytes on every machine.

    Token k comes about as often as 1 / (k + 1), as words of a language do (Zipf).
    """
    out = folder / f"synthetic-{vocabulary}-{tokens}"
    if (out / "index.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    parts = {}
    for number, (split, share) in enumerate(zip(SPLITS, (1, 16), strict=True)):
        draw = np.random.default_rng((vocabulary, tokens, number))
        ends = document_lengths(draw, tokens // share).cumsum()
        ids = (vocabulary ** draw.random(int(ends[-1])) - 1).astype("<u4")
        ids[ids == EOS] = EOS - 1  # only at an end
        ids[ends - 1] = EOS
        files = {kind: out / f".{split}.{kind}" for kind in ("tokens", "ends")}
        width = "<u2" if vocabulary <= 1 << 16 else "<u4"
        files["tokens"].write_bytes(ids.astype(width).tobytes())
        files["ends"].write_bytes(ends.astype("<u8").tobytes())
        parts[split] = [files]
    write_data_set(
        out,
        parts,
        dtype="uint16" if vocabulary <= 1 << 16 else "uint32",
        vocab_size=vocabulary,
        eos_id=EOS,
        start_ids=(),
        tokenizer=byte_tokenizer().to_str().encode(),
        about={"made_by": "benchmarks.gpu.synthetic", "plan": json.dumps([vocabulary, tokens])},
    )
    for file in out.glob(".*"):
        file.unlink()
    return out
