"""How long a loop waits for its batches that computes nothing, and sleeps in place of a GPU."""

import os
import time
from collections.abc import Mapping
from itertools import count

from trainer.data.loader import TokenStream, load
from trainer.data.stream import CONSUMED

PASSES, MICRO_BATCH, SEQ_LEN = 2, 4, 2048
WARM_UP = 5


def loader_wait(
    path: str, environment: Mapping[str, str], steps: int, seconds: float, ahead: int, workers: int
) -> tuple[float, list[int]]:
    """The share of the time that was waited, and a digest of the samples. To be called in a process
    of its own.

    Args:
        path: of the data set, or its URL.
        environment: added to that of this process.
        steps: of the loop, the first ones to warm up.
        seconds: of a step.
        ahead: see `data.ahead`.
        workers: see `data.workers`.
    """
    os.environ.update(environment)
    stream = TokenStream.open(
        [(path, 1.0)], split="train", seq_len=SEQ_LEN, seed=0, shuffle=True,
        documents="cu_seqlens", ahead=ahead,
    )  # fmt: skip
    requests = (list(range(at, at + MICRO_BATCH)) for at in count(0, MICRO_BATCH))
    batches = load(stream, requests, workers=workers, pin_memory=False, account=True)
    waited, digests, began = 0.0, [0, 0], time.perf_counter()
    for step in range(steps):
        if step == WARM_UP:
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        for _ in range(PASSES):
            digest = next(batches)[CONSUMED]
            digests = [(one + more) & 0xFFFFFFFF for one, more in zip(digests, digest, strict=True)]
        waited += time.perf_counter() - asked
        time.sleep(seconds)
    return waited / (time.perf_counter() - began), digests
