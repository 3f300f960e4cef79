"""The entry point of `torchrun --rdzv-backend perdure` (see perdure.py).

torch loads every entry point of the group `torchrun.handlers` while it imports its own rendezvous,
which elastic/rendezvous.py imports too. So this module imports elastic/rendezvous.py only when a
handler is created.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def torchrun_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """The entry point: returns the function that torch registers under the name `perdure`."""

    def create_handler(parameters: "RendezvousParameters") -> "RendezvousHandler":
        from elastic import rendezvous

        return rendezvous.create_handler(parameters)

    return create_handler
