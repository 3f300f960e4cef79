"""Seeds of named random streams, which do not depend on what ran before."""

import hashlib


def stable_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit seed, which is equal on all machines and Python versions.

    Args:
        seed: the run's seed.
        purpose: name of the stream, such as "dropout" or a parameter's FQN.
        numbers: what distinguishes seeds of one stream, such as (step, rank).
    """
    text = "/".join(map(str, (seed, purpose, *numbers))).encode()
    # 63 bits, which fit an int64.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
