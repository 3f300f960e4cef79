"""A module as a shell starts it on a terminal: … -m tests.distributed.on_terminal TERMINAL HANGUP
MODULE [ARGUMENT …]. HANGUP is SIG_DFL, or SIG_IGN as under nohup."""

import os
import runpy
import signal
import sys

if __name__ == "__main__":
    _, terminal, hangup, module, *arguments = sys.argv
    # The leader of a session without a terminal gets the first that it opens.
    descriptor = os.open(terminal, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    signal.signal(signal.SIGHUP, signal.Handlers[hangup])
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
