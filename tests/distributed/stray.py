"""Ranks of which the second goes a way of its own.

… -m tests.distributed.stray recipe RECIPE.yaml [key=value …]     it has another learning rate
… -m tests.distributed.stray data RECIPE.yaml [key=value …]       it takes the first rank's
                                                                  sequences in step 3
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import trainer.run.train
from trainer.run.worker import main

plain_requests = trainer.run.train.requests


def stray_requests(plan: Any, rank: int, start: int) -> Iterator[list[int]]:
    """Those of rank 0 in place of this rank's own, in step 3."""
    both = zip(plain_requests(plan, rank, start), plain_requests(plan, 0, start), strict=True)
    for number, (own, other) in enumerate(both):
        yield other if number // plan.passes == 2 else own


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    if os.environ["RANK"] == "1" and how == "recipe":
        arguments.append("optimizer.lr=1e-3")
    if os.environ["RANK"] == "1" and how == "data":
        trainer.run.train.requests = stray_requests
    main(arguments)
