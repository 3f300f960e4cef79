"""How a rank that fails says why: at once, on the console and to its agent."""

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
    EXIT_PEER_GONE,
    EXIT_WRONG_INPUT,
    Pulse,
)
from elastic.node.recall import Recall, Recalled
from elastic.process import plain_text
from elastic.world import is_lost_peer, supervised
from trainer.recipe.errors import known_errors, told
from trainer.recipe.factory import OwnCodeError
from trainer.run.micro_batch import HalvedError


class Telling:
    """A context that tells of the error by which it is left, before the contexts around it unwind:
    these may wait for what is being written, and for ranks that do not fail.

    Args:
        pulse: of this rank; its agent learns of the error, and waits for what follows it.
        rank: of this process.
        recall: an error after which this process goes on with another attempt is none to tell of.
        wait: seconds before the user is told what another rank may be telling, too.
    """

    def __init__(self, pulse: Pulse, rank: int, recall: Recall, wait: float = 0) -> None:
        self._pulse, self._rank, self._recall, self._wait = pulse, rank, recall, wait
        self._told: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            if self.recalls(error):
                raise Recalled from None
            self.tell(error, self._wait)

    def recalls(self, error: Exception) -> bool:
        """Whether this process goes on with another attempt."""
        return self._recall.recalls(error, _says_peer_is_lost(error))

    def tell(self, error: Exception, wait: float = 0) -> int:
        """Tell of an error, unless that was done; returns the exit code.

        Args:
            error: by which this rank ends.
            wait: seconds before the user is told of wrong input or code.
        """
        code = exit_code(error)
        if error is self._told:
            return code
        self._told = error
        what = printable(plain_text(error).partition("\n")[0])
        line = f"{type(error).__name__}: {what}"
        if isinstance(error, SaveFailed):  # the agent prints it again; rank 0 says why
            line = f"{type(error).__name__}: {error}".partition(" failed")[0] + " failed"
        self._pulse.fail(line)
        if isinstance(error, SaveFailed):  # on all ranks alike
            text = f"{told(error)}; the same command resumes" if self._rank == 0 else ""
        elif code in (EXIT_WRONG_INPUT, EXIT_DO_NOT_REQUEUE):
            time.sleep(wait)
            cause = error.__cause__ if code == EXIT_DO_NOT_REQUEUE else None
            trace = "".join(traceback.format_exception(cause)) if cause else ""
            text = "" if self._pulse.same_error_as_first else trace + told(error)
        elif code == EXIT_PEER_GONE:
            text = f"rank {self._rank}: a peer is gone: {what}"
        elif _says_peer_is_lost(error) and not isinstance(error, DistBackendError):
            # Where this rank waited for the other tells nothing of the cause; NCCL's may do so.
            text = (
                f"rank {self._rank}: a peer is gone: {what}; why stands in its "
                "output, and the same command resumes"
            )
        elif code == EXIT_MENDED:
            text = f"rank {self._rank}: {error}"
        else:
            text = f"rank {self._rank} failed:\n{''.join(traceback.format_exception(error))}"
        if text:  # in one piece: this process may be killed at any moment
            print(f"{text.rstrip()}\n", end="", file=sys.stderr, flush=True)
        return code


def exit_code(error: Exception) -> int:
    """How a rank ends by an error."""
    if isinstance(error, SaveFailed):  # of the last step: nothing is wrong with the input
        return EXIT_FAILED
    if isinstance(error, OwnCodeError):
        return EXIT_DO_NOT_REQUEUE
    if isinstance(error, known_errors()):
        return EXIT_WRONG_INPUT
    if isinstance(error, HalvedError) and supervised():
        return EXIT_MENDED
    if supervised() and _says_peer_is_lost(error):
        return EXIT_PEER_GONE
    return EXIT_FAILED


def _says_peer_is_lost(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and is_lost_peer(error)
