"""Reports the error of a failing rank at once, on the console and to the agent of its node."""

import sys
import time
import traceback
from types import TracebackType

from torch.distributed import DistBackendError

from checkpointing import SaveFailed
from checkpointing.format.untrusted import printable
from elastic import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_FAILED,
    EXIT_MENDED,
    EXIT_OUTVOTED,
    EXIT_PEER_GONE,
    EXIT_WRONG_INPUT,
    Pulse,
)
from elastic.node.recall import NodeRecall, NodeRecallSocket
from elastic.process import plain_text
from elastic.world import is_lost_peer, supervised
from trainer.recipe.errors import error_text, known_errors
from trainer.recipe.factory import RecipeFactoryError
from trainer.run.guard import GradientDisputeError
from trainer.run.micro_batch import RunOutOfMemoryError


class RunFailureReport:
    """Context manager that reports an exception before the contexts around it are left, because
    these may wait for writes and for other ranks. If `recall` says that this process runs another
    attempt, nothing is reported. `wait`: seconds to wait before printing an error that another rank
    may print as well."""

    def __init__(self, pulse: Pulse, rank: int, recall: NodeRecallSocket, wait: float = 0) -> None:
        self._pulse, self._rank, self._recall, self._wait = pulse, rank, recall, wait
        self._sent: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            if self.recalls(error):
                raise NodeRecall from None
            self.send(error, self._wait)

    def recalls(self, error: Exception) -> bool:
        """Return whether this process continues with another attempt after `error`."""
        return self._recall.recalls(error, _says_peer_is_lost(error))

    def send(self, error: Exception, wait: float = 0) -> int:
        """Report the error that ends this rank, unless it was reported; returns the exit code.
        `wait`: seconds before an error in the user's input or code is printed."""
        code = exit_code(error)
        if error is self._sent:
            return code
        self._sent = error
        what = printable(plain_text(error).partition("\n")[0])
        line = f"{type(error).__name__}: {what}"
        if isinstance(error, SaveFailed):  # the agent repeats this line; rank 0 prints the reason
            line = f"{type(error).__name__}: {error}".partition(" failed")[0] + " failed"
        self._pulse.fail(line)
        if isinstance(error, SaveFailed):  # raised on all ranks: only one prints it
            text = f"{error_text(error)}; the same command resumes" if self._rank == 0 else ""
        elif code in (EXIT_WRONG_INPUT, EXIT_DO_NOT_REQUEUE):
            time.sleep(wait)
            cause = error.__cause__ if code == EXIT_DO_NOT_REQUEUE else None
            trace = "".join(traceback.format_exception(cause)) if cause else ""
            text = "" if self._pulse.same_error_as_first else trace + error_text(error)
        elif code == EXIT_PEER_GONE:
            text = f"rank {self._rank}: a peer is gone: {what}"
        elif _says_peer_is_lost(error) and not isinstance(error, DistBackendError):
            # A traceback would show where this rank waited, not the cause. NCCL's errors may name
            # the cause, so they are printed in full below.
            text = (
                f"rank {self._rank}: a peer is gone: {what}; the output of that "
                "rank says why, and the same command resumes"
            )
        elif code in (EXIT_MENDED, EXIT_OUTVOTED):
            text = f"rank {self._rank}: {error}"
        else:
            text = f"rank {self._rank} failed:\n{''.join(traceback.format_exception(error))}"
        if text:  # in one write, because this process may be killed at any moment
            print(f"{text.rstrip()}\n", end="", file=sys.stderr, flush=True)
        return code


def exit_code(error: Exception) -> int:
    if isinstance(error, SaveFailed):  # not an error in the recipe: a retry may succeed
        return EXIT_FAILED
    if isinstance(error, GradientDisputeError) and error.outvoted and supervised():
        return EXIT_OUTVOTED
    if isinstance(error, RecipeFactoryError | GradientDisputeError):
        return EXIT_DO_NOT_REQUEUE
    if isinstance(error, known_errors()):
        return EXIT_WRONG_INPUT
    if isinstance(error, RunOutOfMemoryError) and supervised():
        return EXIT_MENDED
    if supervised() and _says_peer_is_lost(error):
        return EXIT_PEER_GONE
    return EXIT_FAILED


def _says_peer_is_lost(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and is_lost_peer(error)
