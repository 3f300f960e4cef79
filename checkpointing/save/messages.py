"""Messages between the processes of a save: ranks, the writer of each node, and the coordinator in
the writer of rank 0's node. coordinator.py [Note: a save] explains the protocol.

They are sent over a Channel, packed by wire.py. A process handles every message in its union below
(FromRank, ToCoordinator, ToNode, ToRank)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from errno import EDQUOT, ENOSPC
from typing import Any, Literal, get_args

from checkpointing.errors import RankFailure, explain
from checkpointing.format.plan import Nodes, SavePlanInput, SectionNumbers
from checkpointing.options import CheckpointOptions
from checkpointing.save.slots import Ranges, SaveSlots
from checkpointing.storage.interface import NewStoredStep
from checkpointing.wire import register

ANSWER_SECONDS = 30
"""Seconds after which a request to save is answered even if a node is missing."""

SIZE_BYTES = 8
"""Bytes of the little-endian size that precedes a WriterSetup on standard input."""

VOIDED = "the writer process of rank 0's node was lost after this save was requested"

Position = tuple[int, int]
"""A place in the order of all bytes of a save: (number of a file, byte in that file)."""
Key = tuple[int, int]
"""Identifies a save: (step, number of the request, counted from 1)."""
Address = tuple[str, int]


@dataclass(frozen=True)
class WriterSetup:
    """Configuration that a writer process reads from its standard input."""

    parent: int
    """Process id of the rank that starts the writer."""
    node: int
    nodes: Nodes
    """Global ranks of each node; rank 0 is on node 0."""
    directory: str
    run: str
    """Token of the run, see memory.py [Note: token]."""
    options: CheckpointOptions
    address: str
    """Name of the abstract Unix socket on which the writer listens for its ranks."""
    host: str
    """Address on which the writer listens for other nodes; "" if there are none."""
    port: int
    """TCP port for other nodes; 0: any free one."""
    secret: bytes
    voided: int = 0
    """On rank 0's node: number of the last request whose answer from the previous process may have
    reached other ranks but not rank 0. Every request up to this number is skipped."""


@dataclass(frozen=True)
class SaveCallerGreeting:
    """First message on a connection to a writer: who calls."""

    kind: Literal["rank", "node", "pull"]
    number: int
    """Rank or node of the caller; with `pull` the node that the caller intends to reach."""


@dataclass(frozen=True)
class SaveBlockRange:
    """Blocks number `first` to `stop` - 1 of one file: the work of one grant."""

    file: str
    first: int
    stop: int


@dataclass(frozen=True)
class SaveContents:
    """The part of a request to save that only rank 0 contributes."""

    directory: str
    state: bytes
    """trainer_state.json."""
    files: Mapping[str, bytes]
    damaged: Sequence[str]
    """Names of checkpoints that failed to load."""
    verified: Sequence[str]
    """Names of checkpoints that were read completely and are undamaged."""
    newest: int | None
    """Newest step in storage, as far as rank 0 knows."""
    memory_only: bool
    before: Mapping[str, bytes] = field(default_factory=dict)
    """Path or URL → contents of files and objects to create before the commit record. An object
    with the same bytes may exist already."""


@dataclass(frozen=True)
class NodeSaveFailure:
    """An error on a node, as sent to other nodes."""

    message: str
    file: str | None = None
    errno: int | None = None

    @staticmethod
    def of(error: Exception) -> "NodeSaveFailure":
        if isinstance(error, OSError):
            path = error.filename and str(error.filename)
            full = error.errno in (ENOSPC, EDQUOT)  # the user can make room
            return NodeSaveFailure(explain(error) + "; make room there" * full, path, error.errno)
        return NodeSaveFailure(explain(error))


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save."""

    step: int
    path: str | None
    """Path of the committed checkpoint; None if the save failed or was skipped."""
    error: str | None = None
    """One line: why there is no checkpoint, and where the save failed."""
    node: int | None = None
    """Node on which the save failed."""
    file: str | None = None
    """File or directory on which the save failed."""
    errno: int | None = None
    seconds: float = 0.0
    """Time from the admission of the save to its commit or failure."""
    nbytes: int = 0
    """Bytes of tensor files."""
    writers: int = 0
    """Largest number of writers that were allowed at the same time."""
    memory_only: bool = False
    """Whether the step was saved only to memory."""
    weights: str = ""
    """Digest of the model's tensors, 16 hexadecimal digits; see digests.py [Note: digest]."""
    moments: str = ""
    """Digest of the optimizer's tensors, 16 hexadecimal digits."""


def overdue(options: CheckpointOptions) -> str:
    return f"not done within {options.deadline:g} s (checkpoint.deadline)"


# --- from a rank to its writer, which forwards some to the coordinator ---------------------------


@dataclass(frozen=True)
class SaveAddresses:
    """A rank sends its writer the addresses of the writers of all nodes, in order."""

    of_nodes: Sequence[Address]


@dataclass(frozen=True)
class WantSlots:
    """A rank requests slots for a plan. The first rank of the node attaches the plan."""

    digest: str
    plan: SavePlanInput | None


@dataclass(frozen=True)
class SaveRequest:
    """A rank, or a writer for its node, requests to save. Rank 0 attaches the contents."""

    key: Key
    wait: bool
    contents: SaveContents | None


@dataclass(frozen=True)
class RefuseSave:
    """A rank reports that it cannot save. It waits for no answer."""

    key: Key
    failure: RankFailure


@dataclass(frozen=True)
class StagedReport:
    """A rank, or a writer for all ranks of its node, reports how far it has copied its pieces."""

    key: Key
    position: Position
    numbers: SectionNumbers | None = None
    """Summary of the copied numbers; sent with the last position."""


@dataclass(frozen=True)
class CopyFailed:
    """A rank reports that it could not copy its tensors."""

    key: Key
    message: str


@dataclass(frozen=True)
class RankClosing:
    """A rank will request no more saves."""

    keep_memory: bool


FromRank = (
    SaveAddresses | WantSlots | SaveRequest | RefuseSave | StagedReport | CopyFailed | RankClosing
)


@dataclass
class SaveManifest:
    """Description of a slot, which holds one node's part of a step. Stored beside the slot, see
    peers.py [Note: manifest]."""

    attempt: str
    """Identifier that is equal on all nodes and new at each start of the run, as a restarted run
    may reach the same step with different bits."""
    step: int
    committed: int | None
    """Newest step in storage when the step of this slot was copied; after its commit, that step. A
    restart compares this number with storage, to detect added or deleted checkpoints."""
    tensors: str
    """Digest of names, dtypes, shapes and file sizes, which determine all positions."""
    node: int
    nodes: int
    """Number of nodes that hold parts of the step."""
    ranges: Ranges
    checksums: dict[str, list[int]]
    """File → CRC-32 of each of the `portions` of its ranges."""
    state: str
    """Contents of trainer_state.json."""


# --- from a writer to the coordinator ------------------------------------------------------------


@dataclass(frozen=True)
class SlotsReport:
    """A writer reports to the coordinator that its node has slots for a plan."""

    plan: str
    slots: int


@dataclass(frozen=True)
class SlotRemembered:
    """A writer reports that its node's slot is complete and has a manifest, so that a restart may
    use it."""

    key: Key


@dataclass(frozen=True)
class SlotComplete:
    """A writer reports that its node's slot is complete, so that the next node can copy it."""

    key: Key
    slot: int
    manifest: SaveManifest


@dataclass(frozen=True)
class PeerCopyEnded:
    """A node has copied the slot of node `source`, or has failed to."""

    source: int
    key: Key


@dataclass(frozen=True)
class WriteReceipt:
    """A writer reports that it has written the blocks of a grant."""

    key: Key
    blocks: SaveBlockRange
    checksums: Mapping[int, int]
    """Number of a block → CRC-32."""
    span: Mapping[str, Any]
    """Entry for trace.jsonl."""


@dataclass(frozen=True)
class GrantDropped:
    """A writer dropped a grant, because the save failed or the writer does not know it."""

    key: Key
    blocks: SaveBlockRange


@dataclass(frozen=True)
class NodeCannotSave:
    """A writer reports that it could not write `blocks`, or, without them, that its node cannot
    take part in the save."""

    key: Key
    failure: NodeSaveFailure
    blocks: SaveBlockRange | None = None


@dataclass(frozen=True)
class WriterClosing:
    """All ranks of a node have sent RankClosing."""


ToCoordinator = (
    SlotsReport | SaveRequest | RefuseSave | StagedReport
    | SlotRemembered | SlotComplete | PeerCopyEnded
    | WriteReceipt | GrantDropped | NodeCannotSave | WriterClosing
)  # fmt: skip


# --- from the coordinator to writers, which forward some to ranks --------------------------------


@dataclass(frozen=True)
class SaveAdmitted:
    """Answer to SaveRequest: copy the tensors into slot number `slot`."""

    key: Key
    slot: int
    state: bytes
    newest: int | None
    """Newest step in storage."""


@dataclass(frozen=True)
class SaveSkipped:
    """Answer to SaveRequest: this save will not take place."""

    key: Key
    reason: str


@dataclass(frozen=True)
class SaveRefused:
    """Answer to SaveRequest: the save fails on all ranks, because one rank cannot save."""

    key: Key
    failure: RankFailure


@dataclass(frozen=True)
class WriteGrant:
    """Grants blocks to a writer."""

    key: Key
    slot: int
    blocks: SaveBlockRange
    target: NewStoredStep
    rate: float | None
    """Largest number of bytes per second; None: no limit."""


@dataclass(frozen=True)
class StopWriting:
    """A save has failed, so its writers must stop."""

    key: Key


@dataclass(frozen=True)
class CopySlot:
    """Makes a node copy the slot of node `source`."""

    source: int
    key: Key
    slot: int
    manifest: SaveManifest


@dataclass(frozen=True)
class SaveEnded:
    """A save has ended, with or without success."""

    key: Key
    outcome: SaveOutcome


@dataclass(frozen=True)
class AllClosed:
    """Tells processes that have sent RankClosing that nothing is pending any more."""


@dataclass(frozen=True)
class ExitWriter:
    """Makes a writer exit if it is writing, because it blocks a save."""


Answer = SaveAdmitted | SaveSkipped | SaveRefused
ToNode = Answer | WriteGrant | StopWriting | CopySlot | SaveEnded | AllClosed | ExitWriter


# --- from a writer to its ranks ------------------------------------------------------------------


@dataclass(frozen=True)
class SlotsMade:
    """The slots of a plan are ready."""

    digest: str
    slots: SaveSlots


@dataclass(frozen=True)
class NoSlots:
    """No slots could be created."""

    reason: str


@dataclass(frozen=True)
class StageInto:
    """Answer to a rank's SaveRequest: copy into slot number `slot`."""

    key: Key
    slot: int


RankAnswer = StageInto | SaveSkipped | SaveRefused
ToRank = RankAnswer | SaveEnded | SlotsMade | NoSlots | AllClosed


# --- from a writer to another --------------------------------------------------------------------


@dataclass(frozen=True)
class SlotInUse:
    """Address of a slot of the current run, on the node that receives the request."""

    number: int
    key: Key | None = None
    """Save that the slot must hold; None: any."""


@dataclass(frozen=True)
class SaveLeftoverAddress:
    """Address of a slot that an earlier process of this run left on the receiver's node."""

    folder: str


Slot = SlotInUse | SaveLeftoverAddress


@dataclass(frozen=True)
class SaveFetch:
    """Requests bytes of a slot. The answer is the bytes of each range."""

    slot: Slot
    file: str
    ranges: Sequence[tuple[int, int]]


register(WriterSetup, SaveCallerGreeting, SaveFetch, *get_args(Slot))
register(*{*get_args(FromRank), *get_args(ToCoordinator), *get_args(ToNode), *get_args(ToRank)})
