"""Prepared data that is not what a run was trained on any more."""

import json
from pathlib import Path

from tests.distributed.jobs import starts
from trainer.data.loader import TokenStream
from trainer.data.shards import checksums, fingerprint


def opened(data: Path) -> TokenStream:
    """What the recipe of jobs.py trains on, of a data set."""
    return TokenStream.open([(data, 1.0)], split="train", seq_len=32, seed=7, shuffle=True)


def seal(data: Path) -> None:
    """Give the index of a data set the checksums and the fingerprint of its shard as it is now."""
    index = json.loads((data / "index.json").read_text())
    entry = index["splits"]["train"]["shards"][0]
    entry["tokens_sha256"], entry["tokens_crc32"] = checksums(data / "train-00000.tokens")
    index["fingerprint"] = fingerprint(index)
    (data / "index.json").write_text(json.dumps(index))


def change_token(run: Path, step: int = 5, *, sealed: bool, claimed: bool) -> TokenStream:
    """Change a token of the first sequence of a step. `sealed`: the index has the checksums of
    now; `claimed`: the ledger names its fingerprint. Returns the data of now."""
    data = run.parent / "data"
    shard = data / "train-00000.tokens"
    tokens = bytearray(shard.read_bytes())
    tokens[2 * (int(opened(data).locate([(step - 1) * 8])[1][0]) * 32 + 3)] ^= 1
    shard.write_bytes(tokens)
    if sealed:
        seal(data)
    stream = opened(data)
    if claimed:
        ledger = run / "ledger.jsonl"
        claim = starts(run.parent, run.name)[0]["data"]
        ledger.write_text(ledger.read_text().replace(claim, stream.fingerprint))
    return stream
