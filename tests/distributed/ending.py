"""Ranks that are told to go, or die, in the middle of a validation pass; and a schedule under which
a run stops improving.

… -m tests.distributed.ending SIGNAL NUMBER RECIPE.yaml [key=value …]    a rank gets the signal in
                                                the NUMBER-th micro-batch that it validates
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count

from torch.nn.modules.module import register_module_forward_hook

from trainer.models import Decoder
from trainer.run.worker import main


def fading(steps: int, lr: float) -> Callable[[int], float]:
    """A rate that is `lr` for two steps, and then 0: the weights stay as they are."""
    return lambda step: lr if step <= 2 else 0.0


def strike_in(number: int, blow: signal.Signals) -> None:
    validated = count(1)

    def after(module: object, _inputs: object, _output: object) -> None:
        if isinstance(module, Decoder) and not module.training and next(validated) == number:
            os.kill(os.getpid(), blow)
            time.sleep(0.3)  # until it is heard

    register_module_forward_hook(after)


if __name__ == "__main__":
    strike_in(int(sys.argv[2]), signal.Signals[sys.argv[1]])
    main(sys.argv[3:])
