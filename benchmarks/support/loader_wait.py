"""How long a loop waits for its batches, that computes nothing and sleeps in place of a GPU.

    python -m benchmarks.support.loader_wait PATH STEPS STEP_SECONDS AHEAD

Prints a JSON object: the share of the time that was waited, and a digest of the samples.
"""

import json
import sys
import time
from itertools import count

from trainer.data.loader import TokenStream, load
from trainer.data.stream import CONSUMED

PASSES, MICRO_BATCH, SEQ_LEN = 2, 4, 2048
WARM_UP = 5


def main(path: str, steps: str, step_seconds: str, ahead: str) -> None:
    stream = TokenStream.open(
        [(path, 1.0)], split="train", seq_len=SEQ_LEN, seed=0, shuffle=True,
        documents="cu_seqlens", ahead=int(ahead),
    )  # fmt: skip
    requests = (list(range(at, at + MICRO_BATCH)) for at in count(0, MICRO_BATCH))
    batches = load(stream, requests, workers=0, pin_memory=False, account=True)
    waited, digests, began = 0.0, [0, 0], time.perf_counter()
    for step in range(int(steps)):
        if step == WARM_UP:
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        for _ in range(PASSES):
            digest = next(batches)[CONSUMED]
            digests = [(one + more) & 0xFFFFFFFF for one, more in zip(digests, digest, strict=True)]
        waited += time.perf_counter() - asked
        time.sleep(float(step_seconds))
    share = waited / (time.perf_counter() - began)
    print(json.dumps({"share": share, "digests": digests}))


if __name__ == "__main__":
    main(*sys.argv[1:])
