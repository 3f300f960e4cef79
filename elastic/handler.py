"""What the entry point of `torchrun --rdzv-backend perdure` (perdure.py) returns.

torch loads every entry point of its group while its own rendezvous is imported, be that by
rendezvous.py. So this imports nothing before a handler is asked for.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def torchrun_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """What torch registers under the name `perdure`."""
    return create_handler


def create_handler(parameters: "RendezvousParameters") -> "RendezvousHandler":
    """Make the handler of this node; connects to the store, or hosts it."""
    from elastic import rendezvous

    return rendezvous.create_handler(parameters)
