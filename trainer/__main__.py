"""The program that torchrun starts for each rank: `torchrun … -m trainer RECIPE.yaml [key.sub=value
…]`. Without torchrun, it trains in a single process. Exit codes: see elastic/exits.py.

Under `--rdzv-backend perdure` this process becomes a stand-in (elastic/node/standin.py): the node's
agent forks the training process from one that has imported torch already. So this module imports
nothing slow before it knows whether it trains itself.
"""

import os
import signal
import sys
from typing import NoReturn


def main(arguments: list[str]) -> NoReturn:
    """Train as one rank; never returns. Under an agent of Perdure, the rank is forked by the agent,
    and this process waits for it and ends with its exit code."""
    if not sys.flags.safe_path:
        # With `-m` the working directory comes first in sys.path: its folders and files could hide
        # our packages, or modules of torch and Python.
        del sys.path[0]
        home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        if home not in sys.path:  # for a checkout that is not installed
            sys.path.append(home)
    from elastic.exits import handled_signals, leave_at_once
    from elastic.node.standin import NODE_SOCKET, stand_in
    from elastic.process import tolerate_lost_output

    tolerate_lost_output()
    if NODE_SOCKET in os.environ and "RANK" in os.environ:
        stand_in("trainer.run.worker:main", "trainer.run.join:prepare", arguments)
    if "RANK" not in os.environ:  # there is no torchrun, which would handle signals
        for number in handled_signals():
            signal.signal(number, leave_at_once)
    from trainer.run.worker import main as work

    work(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
