"""Prepared data sets of known documents."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from trainer.data.prepare.prepare import prepare


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """200 documents of 1 to 300 bytes, not all ASCII."""
    random = np.random.default_rng(0)
    letters = list("abcdefgh ijklmn opqrstuvwxyzäöü 한글")
    return [
        f"{number}" + "".join(random.choice(letters, random.integers(0, 150)))
        for number in range(200)
    ]


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, Sequence[str]], Path]:
    def write(path: Path, texts: Sequence[str]) -> Path:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write


@pytest.fixture(scope="session")
def tokens(documents) -> list[list[int]]:
    """What `documents` are in the byte tokenizer."""
    return [[*document.encode(), 256] for document in documents]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, documents, write_jsonl) -> Path:
    """`documents` as bytes, all of them for training, in several shards. Not to be changed."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_jsonl(folder / "documents.jsonl", documents)
    options = {"tokenizer": "bytes", "validation_fraction": 0.0, "shard_tokens": 5000}
    index = prepare([str(source)], folder / "data", **options)
    assert len(index["splits"]["train"]["shards"]) > 3
    return folder / "data"
