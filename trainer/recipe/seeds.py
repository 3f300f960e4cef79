"""Named random streams: a seed is a function of (run seed, purpose, numbers), never of history."""

import hashlib


def stable_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed, the same on every machine and Python version.

    Args:
        seed: of the run.
        purpose: what draws from the stream, such as "dropout" or a parameter's FQN.
        numbers: which draw, such as (step, rank).
    """
    text = "/".join(map(str, (seed, purpose, *numbers))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
