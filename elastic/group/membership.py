"""Who is in a job: rounds, leases and generations, as pure functions on one JSON document.

[Note: membership] The nodes of a job share one document in the store and change it by
compare-and-swap. A *round* is a set of nodes with group ranks; its ranks run *generation* after
generation of training processes. A process that fails costs a generation. A node that is lost,
leaves or joins costs a round.

A node that wants to be in the next round is added to the *arrivals*. The next round begins when
every node of this round has arrived again, has left, or is lost, and at least `minimum` nodes have
arrived. So the nodes that train finish their step, *pause* their ranks and arrive as well. Their
requests name the generation that paused. A node whose request names none has lost its ranks without
a pause. It leaves the round as it arrives, because the other nodes would wait for these ranks.

Thousands of nodes cannot all swap one document, nor all read it whenever it may have changed. The
first nodes in order are its *observers*. All other nodes write their requests (`MembershipRequest`)
and the status of their ranks to keys of their own. The observers read these keys, and change the
document once for all requests. A node that is not in the document yet appends its name to the
*door*, a key of the store, and is let in when an observer has seen its counter rise. Nodes that do
not observe only compare the document's version. In a job of at most `OBSERVERS` nodes, all nodes
are observers.

The nodes of a round hold whole *replicas* of a model that is spread over `unit` ranks. Nodes that
complete no replica wait as spares, until enough other nodes arrive. When a node is lost, the
other replicas keep their nodes, so that these keep their state in memory. Nodes of one place are
neighbours, see topology.py.

Every node raises a counter in the store, its *heartbeat*. A node that sees another node's counter
stand still for the length of a *lease*, by its own monotonic clock, removes that node from the
document. On an overloaded machine a counter rises late. So a node writes how late it recently was
beside its counter, and gets a longer lease. An observer that was late itself extends all leases.

A node that would train something else than the nodes in the document, or runs another version of
this code, only reads the document while one of these nodes lives, and reports the difference. A
node outside of the document watches the observers for longer than a member would. If all observers
are silent then, it removes all nodes from the document.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from elastic.group.topology import common_levels, group_by_place, is_place, levels, natural_key

BEAT_SECONDS = 0.2
NODES_PER_BEAT = 128
LEASE_SECONDS, MISSED_BEATS = 1.2, 3
"""Shortest lease of a node: in seconds, and as a number of heartbeats at the node's recent pace."""
DOUBTED_SECONDS, DOUBTED_BEATS = 0.8, 2
"""Shortest lease, in seconds and heartbeats, after a rank has lost its connection to a peer and
nobody has reported a failure: some node has probably died."""
POLL_SECONDS = 0.05
LATE_BEATS, LATE_FACTOR, LATE_SECONDS = 32, 2.0, 2.0
"""If the longest of the last LATE_BEATS gaps between a node's heartbeats exceeds LATE_FACTOR times
the intended gap, its lease is computed from that longest gap, at most LATE_SECONDS."""
OBSERVERS = 3
"""Number of observers: these first nodes watch the counters of all nodes, and all other nodes watch
only the observers' counters."""


T = TypeVar("T")
Replica = list[str]
"""Names of nodes whose ranks together hold whole copies of the model: one copy, or several if a
single node holds them."""


def read_fields(kind: type[T], body: Mapping[str, Any]) -> T:
    """Build a dataclass from JSON that another version of this code may have written: unknown
    fields are ignored, missing ones have their defaults. Raises TypeError if a field without a
    default is missing."""
    names = {entry.name for entry in fields(cast(Any, kind))}
    return kind(**{name: value for name, value in body.items() if name in names})


@dataclass(frozen=True)
class MembershipFailure:
    """A training process that failed, or a node that was lost."""

    node: str
    rank: int | None
    """Rank of the process; None: unknown, or a whole node was lost. Such a failure counts neither
    towards the limits of a step nor of a node."""
    step: int
    """Step that the run was in; 0: before the first step, or unknown."""
    why: str
    at: float
    """Unix time of the failure, by the clock of `node`."""
    error: str = ""
    """Last line of the exception that ended the process, or a note of the agent that the machine
    had no memory left; else empty."""
    mended: bool = False
    """Whether the process removed the cause before it ended. Such a failure counts towards no limit
    of failures."""
    outside: bool = False
    """Whether a signal from another process ended the process. Such a failure counts towards
    `MembershipLimits.restarts`, but not towards the limits of a step or a node."""
    unfit: bool = False
    """Whether other ranks found that this machine computes wrongly. Its node is removed at once,
    and does not come back by itself."""
    evidence: str = ""
    """Proof in several lines: the stack of a rank that all others waited for, or counters of the
    kernel. Kept for the newest failure only, as all nodes read the document."""


@dataclass(frozen=True)
class MembershipEnd:
    """The end of a job: all its nodes leave, and no further round begins."""

    code: int
    reason: str


@dataclass(frozen=True)
class Membership:
    """The membership document of a job."""

    version: int = 0
    """Rises with every change, so the copy with the highest version is the newest. It begins with
    the job's start in ms of Unix time, so that it exceeds the versions of earlier jobs."""
    round: int = 0
    first: int = 1
    """Number of the job's first round. It exceeds 1 where the store has served earlier jobs."""
    job: str = ""
    """Name of the job's first node and Unix time of its start, unique among jobs."""
    identity: str = ""
    """Digest of `NodeJobFacts.identity` of the first node; nodes with another digest are
    refused."""
    ranks: int = 1
    """Ranks of each node that `uneven` does not list."""
    uneven: tuple[tuple[str, int], ...] = ()
    """(node, number of its ranks) of each node with another number of ranks than `ranks`."""
    places: tuple[tuple[str, str], ...] = ()
    """(node, place) of each node with a known place, sorted by node; see topology.py."""
    members: tuple[str, ...] = ()
    """Nodes that are still in this round, in the order of their group ranks."""
    size: int = 0
    """Number of nodes with which this round began."""
    unit: int = 1
    broken: tuple[str, ...] = ()
    """Members whose replica is incomplete because it has lost a node."""
    address: str = ""
    """host:port of the store for this round's ranks, hosted by the node of group rank 0."""
    generation: int = 0
    arrived: tuple[str, ...] = ()
    lost: MembershipFailure | None = None
    """Failure that ends this round, such as the loss of a node; None: no failure."""
    cause: MembershipFailure | None = None
    """Failure that ended the previous round; None: no failure."""
    failures: tuple[MembershipFailure, ...] = ()
    """Newest failures of processes, oldest first; as many as decide about the job's end."""
    struck: tuple[MembershipFailure, ...] = ()
    """The last failure of each node that was removed for its failures. Such a node may join again
    once its health checks pass, unless the failure is `unfit`."""
    alarm: int = 0
    """Number of the current alarm; 0: none. An alarm means that a rank seems to hang, and makes
    every node publish the status of its ranks."""
    suspects: tuple[int, ...] = ()
    """Ranks that all other ranks wait for."""
    suspicion: str = ""
    """Evidence against the suspects; empty until the statuses have been evaluated."""
    closed: MembershipEnd | None = None

    def encode(self) -> bytes:
        """Serialise to JSON. Each place is written only once, to keep the document short: all nodes
        read it."""
        body, stated = asdict(replace(self, places=())), dict(self.places)
        number = {place: index for index, place in enumerate(dict.fromkeys(stated.values()))}
        at = [number.get(stated.get(node, ""), -1) for node in all_nodes(self)] if stated else []
        return json.dumps({**body, "places": [[*number], at]}, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> "Membership":
        """Parse JSON, perhaps written by another version of this code; see `read_fields`."""
        body: dict[str, Any] = json.loads(data)
        for key in ("members", "broken", "arrived", "suspects"):
            body[key] = tuple(body.get(key, ()))
        body["uneven"] = tuple((node, ranks) for node, ranks in body.get("uneven", ()))
        places, at = body.get("places", ((), ()))
        nodes, known = dict.fromkeys((*body["members"], *body["arrived"])), range(len(places))
        pairs = zip(nodes, at, strict=False)
        stated = {node: places[index] for node, index in pairs if index in known}
        body["places"] = _sorted(stated)
        for key in ("failures", "struck"):
            body[key] = tuple(
                read_fields(MembershipFailure, failure) for failure in body.get(key, ())
            )
        for key, kind in (
            ("lost", MembershipFailure),
            ("cause", MembershipFailure),
            ("closed", MembershipEnd),
        ):
            body[key] = read_fields(kind, body[key]) if body.get(key) else None
        return read_fields(Membership, body)


@dataclass(frozen=True)
class MembershipLimits:
    """Limits of a job: sizes of a round, waits before a round begins, and failures."""

    minimum: int
    maximum: int
    most_ranks: int | None = None
    """Largest number of ranks that the global batch can occupy; None: any number."""
    unit: int = 1
    """Ranks that together hold one replica of the model. The ranks of a round are a multiple of
    this."""
    first_call: float = 3.0
    """Seconds without a further arrival until the first round begins with the nodes that wait. If
    no further node would fit, it begins at once."""
    settle: float = 0.3
    """Seconds without a further arrival until a later round begins, whose nodes run already."""
    restarts: int = 30
    """Failures within an hour that are answered by a restart; the next failure ends the job."""
    same_step: int = 3
    """Number of consecutive failures in one step, of one rank or with one error, after which the
    job ends. If all are on one node and the other nodes suffice, that node is removed instead."""
    strikes: int = 5
    """Failures of a node within an hour after which it is removed, if the other nodes suffice."""


def arrive(
    state: Membership, node: str, ranks: int = 1, identity: str = "", place: str = ""
) -> Membership:
    if node in state.arrived or is_foreign(state, node, identity):
        return state
    uneven = tuple(entry for entry in state.uneven if entry[0] != node)
    # The first node decides what is trained, and the usual number of ranks per node.
    if not {*state.members, *state.arrived} - {node}:
        state = replace(state, identity=identity, ranks=ranks)
    elif ranks != state.ranks:
        uneven = (*uneven, (node, ranks))
    places = _sorted({**dict(state.places), node: place})
    return replace(state, arrived=(*state.arrived, node), uneven=uneven, places=places)


def _sorted(stated: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns `Membership.places` for node → place: valid places only, sorted by node, so that
    equal places give equal documents."""
    good = (node for node in sorted(stated) if stated[node] and is_place(stated[node]))
    return tuple((node, stated[node]) for node in good)


def is_foreign(state: Membership, node: str, identity: str) -> bool:
    """Whether the document has nodes besides `node`, and these train something else than `node`
    would. `identity`: digest of what `node` would train."""
    others = {*state.members, *state.arrived} - {node}
    return bool(others) and not state.closed and state.identity != identity


def enter(
    state: Membership, node: str, now: float, ranks: int = 1, identity: str = "", place: str = ""
) -> Membership:
    """Add `node`, which was in no round yet, to the nodes that wait; `now` is Unix time. If the
    document has no other node, `node` begins a new job. While the document has nodes of an ended
    job, nothing changes."""
    nodes = all_nodes(state)
    if node in nodes or (nodes and state.closed):
        return state
    if nodes:
        return arrive(state, node, ranks, identity, place)
    # A node lost in an ended job does not explain the next job's start.
    lost = None if state.closed else state.lost
    fresh = Membership(
        version=max(state.version, int(now * 1000)),
        round=state.round,
        first=state.round + 1,
        job=f"{node} {now:.3f}",
        lost=lost,
    )
    return arrive(fresh, node, ranks, identity, place)


@dataclass(frozen=True)
class MembershipRequest:
    """A node's request to join the next round or to leave; observers apply it."""

    leaves: bool = False
    after: int = 0
    """Last round that the node was in; 0: none. The node joins the first later round."""
    paused: int = -1
    """Generation of round `after` in which the node's ranks have all paused; -1: they ended without
    a pause, or the node is new."""
    ranks: int = 1
    identity: str = ""
    place: str = ""


def heed(state: Membership, node: str, request: MembershipRequest, now: float) -> Membership:
    """Apply the request of `node`. Applying it again changes nothing. `now` is Unix time."""
    if request.leaves:
        return leave(state, node)
    # The round that the node wanted to join has begun already.
    if state.round > request.after and node in state.members:
        return state
    if request.after:
        current = leave(state, node) if _ends_round(state, node, request) else state
        return arrive(current, node, request.ranks, request.identity, request.place)
    return enter(state, node, now, request.ranks, request.identity, request.place)


def round_over(state: Membership) -> bool:
    """Whether this round has lost a node. Such a round begins no further generation."""
    return len(state.members) < state.size


def _ends_round(state: Membership, node: str, request: MembershipRequest) -> bool:
    """Whether the arrival of `node` ends this round, because its ranks ended without a pause."""
    if round_over(state) or node not in state.members or node in state.arrived:
        return False
    return 0 < request.after >= state.round and request.paused != state.generation


def heed_all(
    state: Membership, requests: Mapping[str, MembershipRequest], now: float
) -> Membership:
    """Apply the requests of many nodes, departures first. Gives the same result as `heed` for one
    node after another, in time linear in their number."""
    state = leave(state, *(node for node, request in requests.items() if request.leaves))
    arriving = {node: request for node, request in requests.items() if not request.leaves}
    # Until the document has two nodes, a request may begin a new job or set the job's identity,
    # on which later requests depend. So requests are applied one by one.
    while arriving and len(all_nodes(state)) < 2:
        node = next(iter(arriving))
        state = heed(state, node, arriving.pop(node), now)
    if not arriving:
        return state
    pending = list(arriving.items())
    # Later arrivals depend on whether the round has ended, so split the requests there.
    for place, (node, request) in enumerate(pending):
        if _ends_round(state, node, request):
            state = heed_all(state, dict(pending[:place]), now)
            state = heed(state, node, request, now)
            return heed_all(state, dict(pending[place + 1 :]), now)
    members, arrived = set(state.members), set(state.arrived)
    arrivals = {
        node: request
        for node, request in arriving.items()
        if node not in arrived
        and (node not in members or 0 < request.after >= state.round)
        and (request.after if state.closed else request.identity == state.identity)
    }
    if not arrivals:
        return state
    others = tuple(entry for entry in state.uneven if entry[0] not in arrivals)
    ranks = ((node, request.ranks) for node, request in arrivals.items())
    differing = tuple(entry for entry in ranks if entry[1] != state.ranks)
    places = {node: request.place for node, request in arrivals.items()}
    return replace(
        state,
        arrived=(*state.arrived, *arrivals),
        uneven=(*others, *differing),
        places=_sorted(dict(state.places) | places),
    )


def leave(state: Membership, *nodes: str) -> Membership:
    """Remove `nodes` from this round and from the nodes that wait for the next."""
    departed = set(nodes)
    if not departed:
        return state
    return replace(
        state,
        members=tuple(member for member in state.members if member not in departed),
        broken=_broken(state, departed),
        arrived=tuple(other for other in state.arrived if other not in departed),
        uneven=tuple(entry for entry in state.uneven if entry[0] not in departed),
        places=tuple(entry for entry in state.places if entry[0] not in departed),
    )


def _broken(state: Membership, departed: Set[str]) -> tuple[str, ...]:
    """Returns the members whose replica is incomplete once the nodes in `departed` are gone."""
    if state.unit == 1:
        return ()
    before = set(state.broken)
    whole = [member for member in state.members if member not in before]
    replicas, _ = _replicas(state, whole, state.unit)
    hit = [nodes for nodes in replicas if not departed.isdisjoint(nodes)]
    broken = before.union(*hit) - departed
    return tuple(member for member in state.members if member in broken)


def lose(state: Membership, node: str, now: float, why: str = "node lost") -> Membership:
    """Remove `node`, whose lease has lapsed or whose ranks do not start; `now` is Unix time."""
    if node not in state.members:
        return leave(state, node)
    return replace(leave(state, node), lost=MembershipFailure(node, None, 0, why, now))


def lose_unstarted(state: Membership, alarm: int, node: str, now: float, why: str) -> Membership:
    """End the alarm by removing `node`, which has not started a process for one of its ranks. No
    effect if the alarm has ended."""
    return lose(end_alarm(state), node, now, why) if state.alarm == alarm else state


def close(state: Membership, end: MembershipEnd) -> Membership:
    """End the job. A job that has ended keeps its first `MembershipEnd`."""
    return state if state.closed else replace(state, closed=end)


def set_address(state: Membership, round: int, address: str) -> Membership:
    return replace(state, address=address) if state.round == round else state


def accuse(state: Membership, round: int, failure: MembershipFailure) -> Membership:
    """Record the failure that ends `round` although no node was lost. Later reports are ignored."""
    known = state.closed or state.round != round or state.lost
    return state if known else replace(state, lost=failure)


def complete(state: Membership, limits: MembershipLimits, quiet: float) -> Membership:
    """Begin the next round once all members have arrived again and enough nodes wait. `quiet`:
    seconds since the last change of the arrivals.

    Nodes of the round before keep their order, so that group rank 0 and the neighbours of a node
    change as little as possible. Nodes of broken replicas come after them, and a new replica after
    the other replicas of its place. Nodes beyond the limits, or in no complete replica, wait."""
    # Wait while a member has not arrived again: it still trains in this round.
    if state.closed or not set(state.members) <= set(state.arrived):
        return state
    replicas = _fitting(state, _candidates(state, limits.unit), limits)
    where = {node: levels(place) for node, place in state.places}
    chosen = _nodes(
        group_by_place(
            replicas, lambda nodes: common_levels([where.get(node, ()) for node in nodes])
        )
    )
    if len(chosen) < limits.minimum:
        return state
    # The node "" stands for a node that may still arrive.
    one_more = _nodes(_fitting(state, [*_candidates(state, 1), [""]], limits))
    if "" in one_more and quiet < (
        limits.settle if state.round >= state.first else limits.first_call
    ):
        return state
    # The number in a node's place (`rack3#17`) orders only nodes that wait.
    places = dict(state.places)
    places |= {node: "/".join(where[node]) for node in chosen if node in places}
    return replace(
        state,
        round=state.round + 1,
        places=_sorted(places),
        members=chosen,
        size=len(chosen),
        unit=limits.unit,
        broken=(),
        address="",
        generation=0,
        arrived=tuple(sorted(set(all_nodes(state)) - set(chosen))),
        lost=None,
        cause=state.lost,
        alarm=0,
        suspects=(),
        suspicion="",
    )


def room(state: Membership, limits: MembershipLimits) -> int:
    """Number of waiting nodes that the next round could take besides this round's members."""
    chosen = _nodes(_fitting(state, _candidates(state, limits.unit), limits))
    return len(set(chosen) - set(state.members))


def _nodes(replicas: Sequence[Replica]) -> tuple[str, ...]:
    return tuple(node for nodes in replicas for node in nodes)


def _candidates(state: Membership, unit: int) -> list[Replica]:
    """Returns the replicas that the next round could have, by precedence: unbroken replicas of this
    round, replicas that contain other members of this round, replicas of waiting nodes only."""
    broken, places = set(state.broken), dict(state.places)
    whole, left = _replicas(state, [node for node in state.members if node not in broken], unit)
    waiting = sorted(
        set(state.arrived) - set(state.members),
        key=lambda node: (natural_key(places.get(node, "")), natural_key(node)),
    )
    others = [*left, *state.broken]
    near = _near(state, [*others, *waiting], unit)
    if set(others) <= set(_nodes(near)):
        return whole + sorted(near, key=set(others).isdisjoint)
    # Members hold state in memory, so they come before waiting nodes that are nearer to each other.
    return whole + _replicas(state, [*others, *waiting], unit)[0]


def _fitting(
    state: Membership, replicas: Sequence[Replica], limits: MembershipLimits
) -> list[Replica]:
    """Returns the replicas that the limits admit, taken in order. If `most_ranks` admits fewer than
    `minimum` nodes, `minimum` nodes are taken anyway: their ranks then report what is wrong."""
    ranks, left = dict(state.uneven), math.inf if limits.most_ranks is None else limits.most_ranks
    chosen: list[Replica] = []
    size = 0
    for nodes in replicas:
        needs = sum(ranks.get(node, state.ranks) for node in nodes)
        fits = size + len(nodes) <= limits.maximum
        if fits and (needs <= left or size < limits.minimum):
            chosen.append(nodes)
            size += len(nodes)
            left -= needs
    return chosen


def _replicas(
    state: Membership, order: Sequence[str], unit: int
) -> tuple[list[Replica], list[str]]:
    """Returns (replicas, nodes left over). A node whose ranks hold whole replicas forms a replica
    alone; other nodes are combined in order until their ranks are a multiple of `unit`."""
    uneven, result = dict(state.uneven), list[Replica]()
    together: list[str] = []
    ranks = 0
    for node in order:
        own = uneven.get(node, state.ranks)
        if own % unit == 0:
            result.append([node])
            continue
        together.append(node)
        ranks += own
        if ranks % unit == 0:
            result.append(together)
            together, ranks = [], 0
    return result, together


def _near(state: Membership, nodes: Sequence[str], unit: int) -> list[Replica]:
    """Returns replicas of nodes that are near each other: first replicas within the innermost
    places, such as racks; then, from the nodes left over, replicas within ever larger places."""
    where = {node: levels(place) for node, place in state.places}
    result, left = list[Replica](), list(nodes)
    for depth in range(max(map(len, where.values()), default=0), -1, -1):
        places: dict[tuple[str, ...], list[str]] = {}
        for node in left:
            places.setdefault(where.get(node, ())[:depth], []).append(node)
        left = []
        for together in places.values():
            replicas, others = _replicas(state, together, unit)
            result += replicas
            left += others
    return result


def fail(
    state: Membership,
    round: int,
    generation: int,
    failure: MembershipFailure,
    limits: MembershipLimits,
) -> Membership:
    """Record a failed training process, and react: begin the next generation, remove the process's
    node, or end the job with a reason. One failure makes the other ranks fail too, so later reports
    for the same generation change nothing, unless the node computes wrongly
    (`MembershipFailure.unfit`)."""
    if failure.unfit:
        return _expel(state, failure, limits)
    if state.closed or (state.round, state.generation) != (round, generation):
        return state
    before = [replace(entry, evidence="") for entry in state.failures if not entry.mended]
    # One failure more than `limits.restarts` suffices to exceed this limit.
    failures = (*before, failure)[-limits.restarts - 1 :]
    if failure.mended:
        return _continue(replace(end_alarm(state), failures=failures), failure)
    sent_away = {entry.node: entry.at for entry in state.struck}
    # Failures of a node before its removal count no longer, neither against it nor against others.
    counted = [item for item in failures if item.at > sent_away.get(item.node, -math.inf)]
    recent = [item for item in counted if item.at > failure.at - 3600]
    # A process killed from outside says nothing about the step or the node.
    known = [item for item in counted if item.rank is not None and not item.outside]
    same = known[-limits.same_step :] if known[-1:] == [failure] else []
    ranks = sorted({item.rank for item in same if item.rank is not None})
    culprit = f"node {failure.node}" if failure.rank is None else f"rank {failure.rank}"
    again = len(same) == limits.same_step and len({item.step for item in same}) == 1
    if again:  # a kill from outside in a later step shows that the run got past this step
        row = counted[counted.index(same[0]) :]
        again = all(item.step <= failure.step for item in row)
    # Numbers in the texts of one error differ between ranks and attempts.
    errors = {re.sub(r"0x[0-9a-fA-F]+|\d+", "#", item.error) for item in same}
    again = again and (len(ranks) == 1 or (bool(failure.error) and len(errors) == 1))
    spared = _can_spare(state, failure.node, limits)
    often = f"{limits.same_step} times in a row in step {failure.step}"
    # If all failures are on one node, the job may continue without that node.
    if again and not (spared and len({item.node for item in same}) == 1):
        named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        reason = f"{named} failed {often}, the last time by {failure.why}; a restart will not help"
        return replace(state, failures=failures, closed=MembershipEnd(93, reason))
    if len(recent) > limits.restarts:
        reason = (
            f"{len(recent)} failures within an hour, more than the {limits.restarts} allowed "
            f"(--max-restarts), the last on {culprit}: {failure.why}"
        )
        return replace(state, failures=failures, closed=MembershipEnd(93, reason))
    state = replace(end_alarm(state), failures=failures)
    if spared and (again or strikes(state, failure) >= limits.strikes):
        how = f"it failed {often}" if again else f"{limits.strikes} failures within an hour"
        return _send_away(state, failure, how)
    return _continue(state, failure)


def _expel(state: Membership, failure: MembershipFailure, limits: MembershipLimits) -> Membership:
    if state.closed or failure.node not in state.members:
        return state
    state = replace(end_alarm(state), failures=(*state.failures, failure)[-limits.restarts - 1 :])
    if _can_spare(state, failure.node, limits):
        return _send_away(state, failure, failure.why)
    reason = (
        f"{failure.why}. The job has too few nodes without {failure.node}: take that machine out, "
        "and start again with another"
    )
    return replace(state, closed=MembershipEnd(93, reason))


def _can_spare(state: Membership, node: str, limits: MembershipLimits) -> bool:
    without = _candidates(leave(state, node), limits.unit)
    return len(_nodes(_fitting(state, without, limits))) >= limits.minimum


def _send_away(state: Membership, failure: MembershipFailure, how: str) -> Membership:
    others = tuple(entry for entry in state.struck if entry.node != failure.node)
    lost = replace(failure, rank=None, why=f"sent away: {how}")
    return replace(leave(state, failure.node), struck=(*others, failure), lost=lost)


def _continue(state: Membership, failure: MembershipFailure) -> Membership:
    """Begin the next generation. But if members have left this round, or have arrived for the next
    one, end this round, with `failure` as the reason."""
    if round_over(state):
        return replace(state, lost=state.lost or failure)
    if set(state.members) & set(state.arrived):
        return replace(leave(state, failure.node), lost=failure)
    return replace(state, generation=state.generation + 1)


def strikes(state: Membership, failure: MembershipFailure) -> int:
    """Returns the number of failures that count for the node of `failure`: of its ranks, not by a
    signal from outside, within an hour, and after the node was last removed."""
    since = [entry.at for entry in state.struck if entry.node == failure.node]
    after = max([failure.at - 3600, *since])
    return sum(
        entry.rank is not None and entry.node == failure.node and entry.at > after
        for entry in state.failures
        if not entry.outside
    )


def raise_alarm(state: Membership, round: int, generation: int) -> Membership:
    if state.closed or (state.round, state.generation) != (round, generation):
        return state
    # No earlier alarm had this number, so late statuses for an earlier alarm are ignored.
    return state if state.alarm else replace(state, alarm=state.version + 1)


def record_suspects(state: Membership, alarm: int, ranks: Sequence[int], reason: str) -> Membership:
    # The alarm has ended since its statuses were read.
    if state.alarm != alarm:
        return state
    return replace(state, suspects=tuple(ranks), suspicion=reason)


def end_alarm(state: Membership) -> Membership:
    return replace(state, alarm=0, suspects=(), suspicion="")


# --- leases ----------------------------------------------------------------------------------


def beat_seconds(nodes: int) -> float:
    return BEAT_SECONDS * max(1.0, nodes / NODES_PER_BEAT)


@dataclass
class HeartbeatPace:
    """Recent gaps between the heartbeats of this node."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=LATE_BEATS))
    last: float | None = None

    def beat(self, now: float) -> None:
        if self.last is not None:
            self.gaps.append(now - self.last)
        self.last = now

    def skip(self) -> None:
        """Leave out the gap after the last heartbeat, because the store has caused that gap."""
        self.last = None

    def seconds(self, due: float, now: float) -> float:
        """Returns the seconds to expect between two heartbeats of this node: the intended seconds
        `due`, or more if recent heartbeats were late."""
        gaps = [*self.gaps, *([now - self.last] if self.last is not None else [])]
        worst = max(gaps, default=0.0)
        return max(due, min(worst, LATE_SECONDS)) if worst > LATE_FACTOR * due else due


def lease_seconds(beat: float, doubted: bool) -> float:
    """Seconds of silence after which a node that writes a heartbeat every `beat` seconds is lost.
    `doubted`: whether a rank has just lost a peer, so that some node has probably died."""
    if doubted:
        return max(DOUBTED_SECONDS, beat * DOUBTED_BEATS)
    return max(LEASE_SECONDS, beat * MISSED_BEATS)


def poll_seconds(nodes: int, observes: bool) -> float:
    """Seconds between two reads of the membership document by an observer (`observes`), or of its
    version by another node. They grow with `nodes`, to spare the store."""
    return POLL_SECONDS * max(1.0, nodes / (1000 if observes else 100))


def all_nodes(state: Membership) -> list[str]:
    return list(dict.fromkeys((*state.members, *state.arrived)))


def observers(state: Membership) -> list[str]:
    """Return the first OBSERVERS nodes. They read the requests of all other nodes, and change the
    membership document for them."""
    some = (*state.members[:OBSERVERS], *state.arrived[:OBSERVERS])
    return list(dict.fromkeys(some))[:OBSERVERS]


def watched_nodes(state: Membership, node: str) -> list[str]:
    """Nodes whose counters `node` reads: all if it observes, else the observers, as their watchers
    must notice when all observers are lost."""
    first = observers(state)
    everybody = all_nodes(state) if node in first else first
    return [other for other in everybody if other != node]


def ranks_of(state: Membership, node: str) -> int:
    return dict(state.uneven).get(node, state.ranks)


def spared_nodes(state: Membership) -> int:
    """Number of nodes by which heartbeats and reads become rarer, to spare the store: the nodes of
    this round or, if more, the nodes that wait for the next round."""
    return max(state.size, len(state.members), len(state.arrived))


def differ_only_in_arrivals(before: Membership, after: Membership) -> bool:
    ignored: dict[str, Any] = {"version": 0, "arrived": (), "uneven": (), "places": ()}
    return replace(before, **ignored) == replace(after, **ignored)


@dataclass
class MembershipLeases:
    """When the counters of other nodes last rose, as seen by this node."""

    seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Node → (highest counter, time when this node first read it)."""

    def lapsed(
        self, counters: Mapping[str, int], now: float, leases: Mapping[str, float]
    ) -> list[str]:
        """Returns the nodes whose counter has not risen within their lease. `counters`: node →
        counter, 0 if it has none; `leases`: node → seconds."""
        # `seen` is built anew, to drop the nodes that are no longer watched.
        self.seen = {
            node: self.seen[node]
            if node in self.seen and counter <= self.seen[node][0]
            else (counter, now)
            for node, counter in counters.items()
        }
        return [node for node, (_, since) in self.seen.items() if now - since > leases[node]]

    def forgive(self) -> None:
        """Restart all leases. Called after this node reconnected to the store, or a read of the
        counters took too long."""
        self.seen.clear()


def newer(own: Membership | None, stored: Membership | None) -> Membership | None:
    """Returns the newest of two copies of the document. A restarted store is empty or has an older
    copy, and the first node with a newer copy writes it back. A new job that began on the empty
    store has lower round numbers, so the older job's copy counts as newer."""
    if own and stored and stored.job != own.job and stored.round < own.round:
        return own
    copies: Sequence[Membership] = [copy for copy in (own, stored) if copy is not None]
    return max(copies, key=lambda copy: copy.version, default=None)


Change = Callable[[Membership], Membership]
