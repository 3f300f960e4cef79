"""Ranks of which the second goes a way of its own.

… -m tests.distributed.stray recipe RECIPE.yaml [key=value …]     it has another learning rate
… -m tests.distributed.stray data RECIPE.yaml [key=value …]       it takes the sequences of step 4
                                                                  in step 3
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

import trainer.run.train
from trainer.run.worker import main

plain_requests = trainer.run.train.requests


def stray_requests(plan_at: Any, rank: int, start: int) -> Iterator[list[int]]:
    plan = plan_at(start)
    for number, own in enumerate(plain_requests(plan_at, rank, start)):
        yield [one + plan.global_batch * (number // plan.passes == 2) for one in own]


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    if os.environ["RANK"] == "1" and how == "recipe":
        arguments.append("optimizer.lr=1e-3")
    if os.environ["RANK"] == "1" and how == "data":
        trainer.run.train.requests = stray_requests
    main(arguments)
