"""Named random streams: a seed is a function of (run seed, purpose, numbers), independent of
history."""

import hashlib


def stable_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed, equal on all machines and Python versions.

    Args:
        purpose: of the stream, such as "dropout" or a parameter's FQN.
        numbers: which draw, such as (step, rank).
    """
    text = "/".join(map(str, (seed, purpose, *numbers))).encode()
    # 63 bits fit an int64.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
