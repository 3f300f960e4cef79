"""Exit codes of a run, as schedulers see them."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
"""Wrong recipe or input, found before any rendezvous."""
EXIT_REQUEUE = 75
"""Told to go, state saved: start the same command again (EX_TEMPFAIL of sysexits.h)."""
EXIT_PAUSED = 76
"""Of a training process only, to the agent that asked it to pause: its state is saved."""
EXIT_PEER_GONE = 77
"""Of a training process only, to its agent: it lost the connection to another rank."""
EXIT_DO_NOT_REQUEUE = 93
"""A restart would not mend it: no progress, bad numbers that persist."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""
