"""What the processes of a save say to each other: ranks, the writer of each node, and the
coordinator in the writer of rank 0's node. See coordinator.py [Note: a save].

Messages travel over a Channel as wire.py packs them. Any side may receive any message of its union
below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from typing import Any, Literal, get_args

from checkpointing.errors import RankFailure, explain
from checkpointing.format.plan import Nodes
from checkpointing.format.sections import Numbers, PlanInput
from checkpointing.options import CheckpointOptions
from checkpointing.save.slots import Ranges, Slots
from checkpointing.storage.interface import NewStep
from checkpointing.wire import register

ANSWER_SECONDS = 30
"""A request to save is answered after so long even if a node does not answer."""

SIZE_BYTES = 8
"""Before a Setup, its size in bytes, the lowest first."""

VOIDED = "the writer process of rank 0's node was lost while it was asked for"

Position = tuple[int, int]
"""A place in the order of all bytes: number of a file, byte in it."""
Key = tuple[int, int]
"""Names a save: its step, and how many saves were asked for before it."""
Address = tuple[str, int]


@dataclass(frozen=True)
class Setup:
    """What a writer process is started with, on its standard input."""

    parent: int
    """Process id of the rank that starts it."""
    node: int
    nodes: Nodes
    """Global ranks of each node; rank 0 is on node 0."""
    directory: str
    run: str
    """Token of the run; see `memory.token`."""
    options: CheckpointOptions
    address: str
    """Where it listens for its ranks: an abstract Unix socket."""
    host: str
    """Where it listens for other nodes, with `port`; unused if there are none."""
    port: int
    """0: any free one."""
    secret: bytes
    """Who does not know it is not listened to."""
    voided: int = 0
    """On rank 0's node: number of the last request that the process before may have answered to
    others and not to rank 0. Every request up to it is skipped."""


@dataclass(frozen=True)
class Caller:
    """The first message of whoever connects to a writer."""

    kind: Literal["rank", "node", "pull"]
    number: int
    """The caller's rank or node; with `pull` the node that is called."""


@dataclass(frozen=True)
class BlockRange:
    """Work for one writer: some blocks of one file, from `first` to before `stop`."""

    file: str
    first: int
    stop: int


@dataclass(frozen=True)
class Contents:
    """What rank 0 alone says of a save."""

    directory: str
    """That holds the steps."""
    state: bytes
    """trainer_state.json."""
    files: Mapping[str, bytes]
    """Other files by name."""
    damaged: Sequence[str]
    """Names of steps that could not be loaded."""
    right: Sequence[str]
    """Names of steps of which every byte was read and found right."""
    newest: int | None
    """Newest step in storage, as far as rank 0 knows."""
    memory_only: bool


@dataclass(frozen=True)
class Failure:
    """What went wrong on a node."""

    message: str
    file: str | None = None
    errno: int | None = None

    @staticmethod
    def of(error: Exception) -> "Failure":
        """What others are told of an error."""
        if isinstance(error, OSError):
            path = error.filename and str(error.filename)
            full = error.errno in (ENOSPC, EDQUOT)
            return Failure(explain(error) + "; make room there" * full, path, error.errno)
        return Failure(explain(error))


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended."""

    step: int
    path: str | None
    """The committed checkpoint; None if it failed or was skipped."""
    error: str | None = None
    """Why there is none, and where; one line."""
    node: int | None = None
    """Where it failed."""
    file: str | None = None
    """What it failed on."""
    errno: int | None = None
    """The system's error number, if any."""
    seconds: float = 0.0
    """From the request to the commit."""
    nbytes: int = 0
    """Bytes of tensor files."""
    writers: int = 0
    """How many wrote at once."""
    memory_only: bool = False
    """It was not to be written."""
    weights: str = ""
    """Digest of the model's tensors in 16 hexadecimal digits, once all are copied; see bits.py
    [Note: digest]."""
    moments: str = ""
    """Digest of the optimizer's."""


def overdue(options: CheckpointOptions) -> str:
    """What is told of a save that has taken too long."""
    return f"not done within {options.deadline:g} s (checkpoint.deadline)"


# --- from a rank to its writer; some of it goes on to the coordinator ----------------------------


@dataclass(frozen=True)
class Addresses:
    """Where the writers of all nodes listen."""

    of_nodes: Sequence[Address]


@dataclass(frozen=True)
class WantSlots:
    """A rank wants the slots of a plan; the node's first rank brings the plan."""

    digest: str
    plan: PlanInput | None


@dataclass(frozen=True)
class Begin:
    """A rank, or all ranks of a node, want to save; the contents come from rank 0 alone."""

    key: Key
    wait: bool
    contents: Contents | None


@dataclass(frozen=True)
class Refuse:
    """A rank cannot save, and waits for no answer."""

    key: Key
    failure: RankFailure


@dataclass(frozen=True)
class Staged:
    """How far a rank, or all ranks of a node, have copied their pieces."""

    key: Key
    position: Position
    numbers: Numbers | None = None
    """What these pieces hold; with the last position."""


@dataclass(frozen=True)
class CopyFailed:
    """A rank could not copy its tensors."""

    key: Key
    message: str


@dataclass(frozen=True)
class Close:
    """A rank has nothing more to save."""

    keep_memory: bool


FromRank = Addresses | WantSlots | Begin | Refuse | Staged | CopyFailed | Close


@dataclass
class Manifest:
    """What a slot holds: one node's part of a step."""

    attempt: str
    """The same on all nodes, until the run is started again: it may come to the same step again,
    and not to the same bits."""
    step: int
    committed: int | None
    """The newest step in storage when this one was copied, or this one, once it is committed: by
    it a restart knows that nobody has deleted or added checkpoints since."""
    tensors: str
    """Digest of names, dtypes, shapes and file sizes, from which follows where every byte lies."""
    node: int
    nodes: int
    """Over how many nodes the step is spread."""
    ranges: Ranges
    """The bytes that are there."""
    checksums: dict[str, list[int]]
    """CRC-32 of each of the `portions` of these."""
    state: str
    """trainer_state.json."""


# --- from a writer to the coordinator ------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A node has made so many slots for a plan."""

    plan: str
    slots: int


@dataclass(frozen=True)
class Remembered:
    """A node's slot holds all of its part, and its checksums are known."""

    key: Key


@dataclass(frozen=True)
class ForNext:
    """A node's slot is whole, and the next node is to keep a copy of it."""

    key: Key
    slot: int
    manifest: Manifest


@dataclass(frozen=True)
class Copied:
    """A node has a copy of what another has staged, or has failed to make one."""

    source: int
    key: Key


@dataclass(frozen=True)
class Written:
    """The receipt of a unit of work."""

    key: Key
    blocks: BlockRange
    checksums: Mapping[int, int]
    """CRC-32 by block."""
    span: Mapping[str, Any]
    """What the trace says of it."""


@dataclass(frozen=True)
class Stopped:
    """A writer has given blocks up because their save was, or it knows nothing of that save."""

    key: Key
    blocks: BlockRange


@dataclass(frozen=True)
class Failed:
    """Blocks could not be written; or a node cannot take part, then there are none."""

    key: Key
    failure: Failure
    blocks: BlockRange | None = None


@dataclass(frozen=True)
class Closing:
    """A node's ranks have nothing more to save."""


ToCoordinator = (
    Hello | Begin | Refuse | Staged | Remembered | ForNext | Copied
    | Written | Stopped | Failed | Closing
)  # fmt: skip


# --- from the coordinator to writers; some of it goes on to ranks --------------------------------


@dataclass(frozen=True)
class Go:
    """The answer to Begin: save, into this slot."""

    key: Key
    slot: int
    state: bytes
    """trainer_state.json."""
    newest: int | None
    """Newest step in storage."""


@dataclass(frozen=True)
class Skip:
    """The answer to Begin: this save is left out."""

    key: Key
    reason: str


@dataclass(frozen=True)
class Refused:
    """The answer to Begin: a rank cannot save."""

    key: Key
    failure: RankFailure


@dataclass(frozen=True)
class Write:
    """Write these blocks."""

    key: Key
    slot: int
    blocks: BlockRange
    target: NewStep
    rate: float | None
    """Most bytes per second."""


@dataclass(frozen=True)
class Stop:
    """A save is given up."""

    key: Key


@dataclass(frozen=True)
class CopySlot:
    """Keep a copy of what another node has staged."""

    source: int
    key: Key
    slot: int
    manifest: Manifest


@dataclass(frozen=True)
class Ended:
    """A save has ended, well or not."""

    key: Key
    outcome: SaveOutcome


@dataclass(frozen=True)
class Closed:
    """All is done; whoever wanted to close may."""


@dataclass(frozen=True)
class End:
    """A writer that is writing holds a save up, and is to end."""


Answer = Go | Skip | Refused
ToNode = Answer | Write | Stop | CopySlot | Ended | Closed | End


# --- from a writer to its ranks ------------------------------------------------------------------


@dataclass(frozen=True)
class SlotsMade:
    """The slots of a plan."""

    digest: str
    slots: Slots


@dataclass(frozen=True)
class NoSlots:
    """There are none, and why."""

    reason: str


@dataclass(frozen=True)
class Stage:
    """A rank's answer to Begin: copy into this slot."""

    key: Key
    slot: int


RankAnswer = Stage | Skip | Refused
ToRank = RankAnswer | Ended | SlotsMade | NoSlots | Closed


# --- from a writer to another --------------------------------------------------------------------


@dataclass(frozen=True)
class SlotInUse:
    """A slot of the node that is asked."""

    number: int
    key: Key | None = None
    """The save that it must hold; None: any."""


@dataclass(frozen=True)
class SlotLeft:
    """A slot that a dead run left there."""

    folder: str


Slot = SlotInUse | SlotLeft


@dataclass(frozen=True)
class Fetch:
    """Bytes of a slot are wanted; the answer is the bytes of each range."""

    slot: Slot
    file: str
    ranges: Sequence[tuple[int, int]]


register(Setup, Caller, Fetch, *get_args(Slot))
register(*{*get_args(FromRank), *get_args(ToCoordinator), *get_args(ToNode), *get_args(ToRank)})
