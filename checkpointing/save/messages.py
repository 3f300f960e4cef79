"""Messages between the processes of a save: ranks, the writer of each node, and the coordinator in
the writer of rank 0's node. coordinator.py [Note: a save] explains the protocol.

They travel over a Channel, packed by wire.py. A process handles every message of its union below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from errno import EDQUOT, ENOSPC
from typing import Any, Literal, get_args

from checkpointing.errors import RankFailure, explain
from checkpointing.format.plan import Nodes
from checkpointing.format.sections import NumberSummary, PlanInput
from checkpointing.options import CheckpointOptions
from checkpointing.save.slots import Ranges, Slots
from checkpointing.storage.interface import NewStep
from checkpointing.wire import register

ANSWER_SECONDS = 30
"""A request to save is answered after so long even if a node is missing."""

SIZE_BYTES = 8
"""Length of the little-endian size that precedes a WriterSetup on standard input."""

VOIDED = "the writer process of rank 0's node was lost while it was asked for"

Position = tuple[int, int]
"""A place in the order of all bytes: (number of a file, byte in it)."""
Key = tuple[int, int]
"""Identifies a save: (step, number of the request, from 1)."""
Address = tuple[str, int]


@dataclass(frozen=True)
class WriterSetup:
    """Configuration that a writer process reads from its standard input."""

    parent: int
    """Process id of the rank that starts it."""
    node: int
    nodes: Nodes
    """Global ranks of each node; rank 0 is on node 0."""
    directory: str
    run: str
    """Token of the run, see memory.py [Note: token]."""
    options: CheckpointOptions
    address: str
    """Name of the abstract Unix socket on which it listens for its ranks."""
    host: str
    """Address on which it listens for other nodes; "" if there are none."""
    port: int
    """TCP port for other nodes; 0: any free one."""
    secret: bytes
    """Authenticates the processes of the run."""
    voided: int = 0
    """On rank 0's node: number of the last request that the previous process may have answered to
    other ranks and not to rank 0. Every request up to it is skipped."""


@dataclass(frozen=True)
class Caller:
    """First message on a connection to a writer."""

    kind: Literal["rank", "node", "pull"]
    number: int
    """Rank or node of the caller; with `pull` the node that it means to reach."""


@dataclass(frozen=True)
class BlockRange:
    """Some blocks of one file, `first` to before `stop`: the work of one grant."""

    file: str
    first: int
    stop: int


@dataclass(frozen=True)
class SaveContents:
    """What rank 0 alone contributes to the request to save."""

    directory: str
    state: bytes
    """trainer_state.json."""
    files: Mapping[str, bytes]
    damaged: Sequence[str]
    """Names of steps that failed to load."""
    verified: Sequence[str]
    """Names of steps whose every byte was read and is correct."""
    newest: int | None
    """Newest step in storage that rank 0 knows of."""
    memory_only: bool
    before: Mapping[str, bytes] = field(default_factory=dict)
    """Files and objects to create before the commit record, by path or URL. An object may be there
    already, with the same bytes."""


@dataclass(frozen=True)
class NodeFailure:
    """An error on a node."""

    message: str
    file: str | None = None
    errno: int | None = None

    @staticmethod
    def of(error: Exception) -> "NodeFailure":
        """Describes an exception for the other nodes."""
        if isinstance(error, OSError):
            path = error.filename and str(error.filename)
            full = error.errno in (ENOSPC, EDQUOT)  # the user can mend these
            return NodeFailure(explain(error) + "; make room there" * full, path, error.errno)
        return NodeFailure(explain(error))


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save."""

    step: int
    path: str | None
    """The committed checkpoint; None if the save failed or was skipped."""
    error: str | None = None
    """Why there is no checkpoint, and where it failed; one line."""
    node: int | None = None
    """Node on which it failed."""
    file: str | None = None
    """File or directory on which it failed."""
    errno: int | None = None
    seconds: float = 0.0
    """Time from the request to the commit."""
    nbytes: int = 0
    """Bytes of tensor files."""
    writers: int = 0
    """Most writers at a time."""
    memory_only: bool = False
    """Whether it was to stay in memory."""
    weights: str = ""
    """Digest of the model's tensors in 16 hexadecimal digits, known once all are copied; see
    bits.py [Note: digest]."""
    moments: str = ""
    """Digest of the optimizer's tensors, likewise."""


def overdue(options: CheckpointOptions) -> str:
    """Returns the message for a save that exceeds its deadline."""
    return f"not done within {options.deadline:g} s (checkpoint.deadline)"


# --- from a rank to its writer, which forwards some to the coordinator ---------------------------


@dataclass(frozen=True)
class Addresses:
    """Gives a writer the addresses of the writers of all nodes, in order."""

    of_nodes: Sequence[Address]


@dataclass(frozen=True)
class WantSlots:
    """A rank requests slots for a plan; the node's first rank attaches the plan."""

    digest: str
    plan: PlanInput | None


@dataclass(frozen=True)
class Begin:
    """A rank, or all ranks of a node, request to save; rank 0 attaches the contents."""

    key: Key
    wait: bool
    contents: SaveContents | None


@dataclass(frozen=True)
class Refuse:
    """A rank cannot save, and waits for no answer."""

    key: Key
    failure: RankFailure


@dataclass(frozen=True)
class Staged:
    """Reports up to where a rank, or all ranks of a node, have copied their pieces."""

    key: Key
    position: Position
    numbers: NumberSummary | None = None
    """Summary of the copied numbers, with the last position."""


@dataclass(frozen=True)
class CopyFailed:
    """A rank could not copy its tensors."""

    key: Key
    message: str


@dataclass(frozen=True)
class Close:
    """A rank will request no more saves."""

    keep_memory: bool


FromRank = Addresses | WantSlots | Begin | Refuse | Staged | CopyFailed | Close


@dataclass
class Manifest:
    """Describes the content of a slot: one node's part of a step. Written to disk, see peers.py
    [Note: manifest]."""

    attempt: str
    """Equal on all nodes, and new at each start of the run: a restarted run may reach the same step
    with other bits."""
    step: int
    committed: int | None
    """Newest step in storage when this one was copied, or this step once it is committed. A restart
    compares it with storage to detect added or deleted checkpoints."""
    tensors: str
    """Digest of names, dtypes, shapes and file sizes, which determine where every byte lies."""
    node: int
    nodes: int
    """Number of nodes over which the step is spread."""
    ranges: Ranges
    checksums: dict[str, list[int]]
    """CRC-32 of each of the `portions` of these ranges, by file."""
    state: str
    """Contents of trainer_state.json."""


# --- from a writer to the coordinator ------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """Tells the coordinator that a node has slots for a plan."""

    plan: str
    slots: int


@dataclass(frozen=True)
class Remembered:
    """A node's slot holds its whole part, with known checksums."""

    key: Key


@dataclass(frozen=True)
class ForNext:
    """A node's slot is complete, and the next node shall keep a copy of it."""

    key: Key
    slot: int
    manifest: Manifest


@dataclass(frozen=True)
class Copied:
    """A node has copied the slot of node `source`, or failed to."""

    source: int
    key: Key


@dataclass(frozen=True)
class Written:
    """Receipt for a grant."""

    key: Key
    blocks: BlockRange
    checksums: Mapping[int, int]
    """CRC-32 by number of the block."""
    span: Mapping[str, Any]
    """Entry for trace.jsonl."""


@dataclass(frozen=True)
class Stopped:
    """A writer dropped a grant because its save failed, or is unknown to it."""

    key: Key
    blocks: BlockRange


@dataclass(frozen=True)
class Failed:
    """Blocks could not be written, or, without blocks, a node cannot take part."""

    key: Key
    failure: NodeFailure
    blocks: BlockRange | None = None


@dataclass(frozen=True)
class Closing:
    """All ranks of a node have sent Close."""


ToCoordinator = (
    Hello | Begin | Refuse | Staged | Remembered | ForNext | Copied
    | Written | Stopped | Failed | Closing
)  # fmt: skip


# --- from the coordinator to writers, which forward some to ranks --------------------------------


@dataclass(frozen=True)
class Go:
    """Answer to Begin: copy the tensors into `slot`."""

    key: Key
    slot: int
    state: bytes
    """Contents of trainer_state.json."""
    newest: int | None
    """Newest step in storage."""


@dataclass(frozen=True)
class Skip:
    """Answer to Begin: there will be no such save."""

    key: Key
    reason: str


@dataclass(frozen=True)
class Refused:
    """Answer to Begin: the save fails on all ranks, since one cannot save."""

    key: Key
    failure: RankFailure


@dataclass(frozen=True)
class Write:
    """Grants blocks to a writer."""

    key: Key
    slot: int
    blocks: BlockRange
    target: NewStep
    rate: float | None
    """Most bytes per second; None: no limit."""


@dataclass(frozen=True)
class Stop:
    """A save has failed; its writers stop."""

    key: Key


@dataclass(frozen=True)
class CopySlot:
    """Asks a node to copy the slot of node `source`."""

    source: int
    key: Key
    slot: int
    manifest: Manifest


@dataclass(frozen=True)
class Ended:
    """A save has ended, successfully or not."""

    key: Key
    outcome: SaveOutcome


@dataclass(frozen=True)
class AllClosed:
    """Tells processes that asked to close that nothing is pending."""


@dataclass(frozen=True)
class EndWriter:
    """Asks a writer to exit if it is writing, since it blocks a save."""


Answer = Go | Skip | Refused
ToNode = Answer | Write | Stop | CopySlot | Ended | AllClosed | EndWriter


# --- from a writer to its ranks ------------------------------------------------------------------


@dataclass(frozen=True)
class SlotsMade:
    """The slots of a plan are ready."""

    digest: str
    slots: Slots


@dataclass(frozen=True)
class NoSlots:
    """No slots could be made."""

    reason: str


@dataclass(frozen=True)
class StageInto:
    """A rank's answer to Begin: copy into `slot`."""

    key: Key
    slot: int


RankAnswer = StageInto | Skip | Refused
ToRank = RankAnswer | Ended | SlotsMade | NoSlots | AllClosed


# --- from a writer to another --------------------------------------------------------------------


@dataclass(frozen=True)
class SlotInUse:
    """Addresses a slot of the current run on the node that receives the request."""

    number: int
    key: Key | None = None
    """The save that it must hold; None: any."""


@dataclass(frozen=True)
class LeftoverAddress:
    """Addresses a slot that an earlier process of this run left there."""

    folder: str


Slot = SlotInUse | LeftoverAddress


@dataclass(frozen=True)
class Fetch:
    """Requests bytes of a slot; the answer is the bytes of each range."""

    slot: Slot
    file: str
    ranges: Sequence[tuple[int, int]]


register(WriterSetup, Caller, Fetch, *get_args(Slot))
register(*{*get_args(FromRank), *get_args(ToCoordinator), *get_args(ToNode), *get_args(ToRank)})
