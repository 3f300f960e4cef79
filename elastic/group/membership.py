"""Who is in the job: rounds, leases, generations, as pure functions on one JSON document.

[Note: membership] The nodes of a job share one document in the store and change it by
compare-and-swap. A *round* is a set of nodes with group ranks; its ranks run *generation* after
generation of training processes. A process that fails costs a generation; a node that is lost,
leaves or joins costs a round.

A node that wants to be in the next round puts itself among the arrivals. The next round begins when
every node of this one has arrived again, has left, or is lost, and at least `minimum` nodes are
there. So a newcomer changes nothing until the nodes that train have noticed it, finished their step
and arrived as well: their ranks have *paused*, and they say in which generation. A node that
arrives without that has dropped its ranks. It leaves the round as it arrives, as the others would
wait for these ranks.

Thousands of nodes cannot all swap one document, nor all read it at every look. The first nodes in
order are its *observers*. The others say in keys of their own what they ask for (`Ask`) and where
their ranks stand; the observers read these keys, and change the document once for all who asked.
Whoever is not in the document yet leaves its name at the *door*, a key to which anybody appends,
and is let in when an observer has seen its counter rise. All others only look whether the version
is another. Up to `OBSERVERS` nodes are all observers, and ask nobody.

The nodes of a round hold whole *replicas* of a model that is spread over `unit` ranks. Who
completes none waits as a spare, until others come with whom it does. Where a node is lost, the
replicas of all others keep their nodes, so that these keep what they have in memory. Nodes that
stand together are neighbours, see place.py.

Leases: every node raises a counter in the store now and then. Whoever sees a counter stand still
for the length of a lease, on its own monotonic clock, takes that node out of the document. No
clocks are compared between machines. On a machine with more to do than it has cores a counter is
raised late. So a node says with it how late it was of late, and is given a longer lease; and so
does an observer that was late itself, whose machine may be the node's.

A node that would train something else, or runs another version of this code, reads the document to
say so, and writes none while a node of it lives. Whoever is not in the document watches the
observers for longer than a member would; if all are silent then, it loses all nodes at once.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from elastic.group.topology import common, grouped, is_place, levels, natural

BEAT_SECONDS = 0.2
"""How often a node of a small job raises its counter; rarer with many nodes, to spare the store."""
NODES_PER_BEAT = 128
LEASE_SECONDS, MISSED_BEATS = 1.2, 3
"""Shortest lease of a node: in seconds, and in beats at the pace that it has had of late."""
DOUBTED_SECONDS, DOUBTED_BEATS = 0.8, 2
"""Shortest lease while a rank has lost a peer and no node reports why: then some node is gone."""
LOOK_SECONDS = 0.05
"""How often a node of a small job looks at the document."""
LATE_BEATS, LATE_FACTOR, LATE_SECONDS = 32, 2.0, 2.0
"""Beats by whose worst gap a lease is lengthened: if it is so many times a beat, and by at most so
many seconds a beat."""
OBSERVERS = 3
"""So many nodes, the first in order, watch all; the others watch only these."""


T = TypeVar("T")
Replica = list[str]
"""Nodes that hold whole replicas of the model together, in the order of their ranks."""


def read_fields(kind: type[T], body: Mapping[str, Any]) -> T:
    """A dataclass from JSON of another version of this code, perhaps: what this one does not know
    is left out, and what is missing is as it is at first."""
    names = {one.name for one in fields(cast(Any, kind))}
    return kind(**{name: value for name, value in body.items() if name in names})


@dataclass(frozen=True)
class Failure:
    """A training process that ended as it should not have, or a node that was lost."""

    node: str
    rank: int | None
    """None: all of a node, or it is not known whose failure it was; that is nobody's strike."""
    step: int
    """Step it was working on; 0 before the first, or not known."""
    why: str
    at: float
    """Unix time, by the clock of its node."""
    error: str = ""
    """What its process raised, in a line; empty if it was killed, hung or lost."""
    mended: bool = False
    """Its process has seen to it that this does not happen again: it counts for nothing."""
    outside: bool = False
    """Its process was killed by somebody else, and raised nothing: a failure of the hour, but of no
    step and no node."""


@dataclass(frozen=True)
class Closed:
    """The end of the job."""

    code: int
    """Exit code of every process."""
    reason: str


@dataclass(frozen=True)
class Membership:
    """The document."""

    version: int = 0
    """Raised by every change, so that it is known which of two copies is the newer. A job begins at
    its time of birth in ms of Unix time: what was recorded of one before it does not win."""
    round: int = 0
    """Number of the newest round; 0: none yet."""
    first: int = 1
    """Number of the job's first round: a store outlives jobs, and rounds are counted on."""
    job: str = ""
    """The node that began the job, and when: it tells this job from all others."""
    identity: str = ""
    """Digest of what the job trains, as its first node said; who would train something else does
    not get in."""
    ranks: int = 1
    """Ranks of each node, but for those in `uneven`."""
    uneven: tuple[tuple[str, int], ...] = ()
    """(node, its ranks)."""
    places: tuple[tuple[str, str], ...] = ()
    """(node, where it stands) of those that have stated it, by name of node; see place.py."""
    members: tuple[str, ...] = ()
    """Nodes of this round that are still in it, in the order of their group ranks."""
    size: int = 0
    """Nodes this round began with."""
    unit: int = 1
    """Ranks of a replica in this round."""
    broken: tuple[str, ...] = ()
    """Members whose replica has lost a node."""
    address: str = ""
    """host:port of the store of this round's ranks, which group rank 0 hosts."""
    generation: int = 0
    """Generation of training processes in this round, counted from 0."""
    arrived: tuple[str, ...] = ()
    """Nodes that want to be in the next round."""
    lost: Failure | None = None
    """The last node of this round that was lost, if any was."""
    cause: Failure | None = None
    """The node whose loss ended the round before."""
    failures: tuple[Failure, ...] = ()
    """The latest failures of training processes."""
    struck: tuple[Failure, ...] = ()
    """The last failure of each node that was sent away for its failures; it may come back once it
    is found healthy."""
    alarm: int = 0
    """A rank of this generation seems to hang, and every node is to say where its ranks stand; the
    number of this alarm. 0: no alarm."""
    suspects: tuple[int, ...] = ()
    """Ranks that all others wait for, by what the first node has read of all; see `suspicion`."""
    suspicion: str = ""
    """Why; empty: not known yet."""
    closed: Closed | None = None

    def encode(self) -> bytes:
        """As JSON. It is read by all, so a place that many nodes have is in it once."""
        body, stated = asdict(replace(self, places=())), dict(self.places)
        number = {place: index for index, place in enumerate(dict.fromkeys(stated.values()))}
        at = [number.get(stated.get(node, ""), -1) for node in inside(self)] if stated else []
        return json.dumps({**body, "places": [[*number], at]}, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes) -> "Membership":
        """From JSON, also of another version of this code; see `read_fields`."""
        body: dict[str, Any] = json.loads(data)
        for key in ("members", "broken", "arrived", "suspects"):
            body[key] = tuple(body.get(key, ()))
        body["uneven"] = tuple((node, ranks) for node, ranks in body.get("uneven", ()))
        places, at = body.get("places", ((), ()))
        nodes, known = dict.fromkeys((*body["members"], *body["arrived"])), range(len(places))
        stated = {node: places[one] for node, one in zip(nodes, at, strict=False) if one in known}
        body["places"] = _sorted(stated)
        for key in ("failures", "struck"):
            body[key] = tuple(read_fields(Failure, failure) for failure in body.get(key, ()))
        for key, kind in (("lost", Failure), ("cause", Failure), ("closed", Closed)):
            body[key] = read_fields(kind, body[key]) if body.get(key) else None
        return read_fields(Membership, body)


@dataclass(frozen=True)
class Limits:
    """How a job may be sized, and how failures are judged."""

    minimum: int
    """Nodes of a round, at least."""
    maximum: int
    most_ranks: int | None = None
    """Ranks for which there is work; None: any number."""
    unit: int = 1
    """Ranks of a replica: those of a round are a multiple."""
    first_call: float = 3.0
    """Seconds that the first round waits for more nodes than `minimum`, after each arrival."""
    settle: float = 0.3
    """The same for later rounds, where everybody is already there."""
    restarts: int = 30
    """Failures of one hour that are answered by a new generation; the next one ends the job."""
    same_step: int = 3
    """Failures in a row in one step, of one rank or with one error, for which their node is sent
    away, if there is one and enough others are there, or which end the job."""
    strikes: int = 5
    """Failures of one node within an hour for which it is sent away, if enough others are there."""


def arrive(
    state: Membership, node: str, ranks: int = 1, identity: str = "", place: str = ""
) -> Membership:
    """`node`, with so many ranks, wants to be in the next round of a job of this identity. It
    stands at `place`."""
    if node in state.arrived or strange(state, node, identity):
        return state
    uneven = tuple(one for one in state.uneven if one[0] != node)
    if not {*state.members, *state.arrived} - {node}:
        state = replace(state, identity=identity, ranks=ranks)
    elif ranks != state.ranks:
        uneven = (*uneven, (node, ranks))
    places = _placed(state, {node: place})
    return replace(state, arrived=(*state.arrived, node), uneven=uneven, places=places)


def _placed(state: Membership, stated: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """`Membership.places` once these nodes have stated where they stand."""
    return _sorted({**dict(state.places), **stated})


def _sorted(stated: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """`Membership.places`: in one order, as copies of the document are compared."""
    good = (node for node in sorted(stated) if stated[node] and is_place(stated[node]))
    return tuple((node, stated[node]) for node in good)


def strange(state: Membership, node: str, identity: str) -> bool:
    """Whether there are nodes that train something else than `node` would."""
    others = {*state.members, *state.arrived} - {node}
    return bool(others) and not state.closed and state.identity != identity


def begin(
    state: Membership, node: str, now: float, ranks: int = 1, identity: str = "", place: str = ""
) -> Membership:
    """`node`, which was in no round yet, wants to be in the next one; `now` is Unix time. If nobody
    else is left, it begins a new job of this name; while others are there that has ended, nothing
    changes."""
    others = {*state.members, *state.arrived} - {node}
    if node in state.members or node in state.arrived:
        return state
    if others:
        return state if state.closed else arrive(state, node, ranks, identity, place)
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
class Ask:
    """What a node wants of the document."""

    leaves: bool = False
    after: int = 0
    """It comes, for the first round after this one; 0: to a job that it was not in yet."""
    paused: int = -1
    """Generation of that round in which all its ranks have paused; -1: it has dropped them."""
    ranks: int = 1
    identity: str = ""
    place: str = ""
    """Where the node stands in the network: names from the outermost to the node; see place.py."""


def heed(state: Membership, node: str, ask: Ask, now: float) -> Membership:
    """Do what a node asks for; nothing if that is done. `now` is Unix time."""
    if ask.leaves:
        return leave(state, node)
    if state.round > ask.after and node in state.members:
        return state
    if ask.after:
        here = leave(state, node) if _drops(state, node, ask) else state
        return arrive(here, node, ask.ranks, ask.identity, ask.place)
    return begin(state, node, now, ask.ranks, ask.identity, ask.place)


def over(state: Membership) -> bool:
    """Whether this round has lost a node, so that it cannot begin another generation."""
    return len(state.members) < state.size


def _drops(state: Membership, node: str, ask: Ask) -> bool:
    """Whether `node` ends this round by its arrival. Later arrivals keep their place in order."""
    if over(state) or node not in state.members or node in state.arrived:
        return False
    return 0 < ask.after >= state.round and ask.paused != state.generation


def heed_all(state: Membership, asks: Mapping[str, Ask], now: float) -> Membership:
    """Do what many nodes ask for, as `heed` does for one after another, first for those that leave;
    in time that grows with their number, not with its square."""
    state = leave(state, *(node for node, ask in asks.items() if ask.leaves))
    come = {node: ask for node, ask in asks.items() if not ask.leaves}
    while come and len(inside(state)) < 2:  # whoever is the first may begin another job
        node = next(iter(come))
        state = heed(state, node, come.pop(node), now)
    if not come:
        return state
    asked = list(come.items())
    for place, (node, ask) in enumerate(asked):
        if _drops(state, node, ask):
            state = heed_all(state, dict(asked[:place]), now)
            state = heed(state, node, ask, now)
            return heed_all(state, dict(asked[place + 1 :]), now)
    members, arrived = set(state.members), set(state.arrived)
    arrivals = {
        node: ask
        for node, ask in come.items()
        if node not in arrived
        and (node not in members or 0 < ask.after >= state.round)
        and (ask.after if state.closed else ask.identity == state.identity)
    }
    if not arrivals:
        return state
    others = tuple(one for one in state.uneven if one[0] not in arrivals)
    ranks = ((node, ask.ranks) for node, ask in arrivals.items())
    differing = tuple(one for one in ranks if one[1] != state.ranks)
    return replace(
        state,
        arrived=(*state.arrived, *arrivals),
        uneven=(*others, *differing),
        places=_placed(state, {node: ask.place for node, ask in arrivals.items()}),
    )


def leave(state: Membership, *nodes: str) -> Membership:
    """These are in no round from now on."""
    gone = set(nodes)
    if not gone:
        return state
    return replace(
        state,
        members=tuple(member for member in state.members if member not in gone),
        broken=_broken(state, gone),
        arrived=tuple(other for other in state.arrived if other not in gone),
        uneven=tuple(one for one in state.uneven if one[0] not in gone),
        places=tuple(one for one in state.places if one[0] not in gone),
    )


def _broken(state: Membership, gone: Set[str]) -> tuple[str, ...]:
    """The members whose replica has a node no longer, once these are gone."""
    if state.unit == 1:
        return ()
    before = set(state.broken)
    whole = [member for member in state.members if member not in before]
    replicas, _ = _replicas(state, whole, state.unit)
    hit = [nodes for nodes in replicas if not gone.isdisjoint(nodes)]
    broken = before.union(*hit) - gone
    return tuple(member for member in state.members if member in broken)


def lose(state: Membership, node: str, now: float, why: str = "node lost") -> Membership:
    """`node` gave no sign of life, or none of its ranks; `now` is Unix time."""
    if node not in state.members:
        return leave(state, node)
    return replace(leave(state, node), lost=Failure(node, None, 0, why, now))


def complete(state: Membership, limits: Limits, quiet: float) -> Membership:
    """Begin the next round, if it is time.

    Args:
        state: now.
        limits: of the job.
        quiet: seconds for which the arrivals have been the same.

    Nodes that were in the round before keep their order, so that group rank 0 and the neighbours of
    a node change as little as possible; whose replica is broken comes after them. A replica that is
    new comes after the others of its place. Arrivals for which there is no room or no work, or who
    complete no replica, go on waiting, as spares.
    """
    if state.closed or not set(state.members) <= set(state.arrived):
        return state
    replicas = _fitting(state, _candidates(state, limits.unit), limits)
    chosen = _nodes(_side_by_side(state, replicas))
    if len(chosen) < limits.minimum:
        return state
    one_more = _nodes(_fitting(state, [*_candidates(state, 1), [""]], limits))
    if "" in one_more and quiet < (
        limits.settle if state.round >= state.first else limits.first_call
    ):
        return state
    # Only among nodes that wait does its number in a place order a node.
    places = dict(state.places)
    places |= {node: "/".join(levels(places[node])) for node in chosen if node in places}
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
        arrived=tuple(sorted(set(inside(state)) - set(chosen))),
        lost=None,
        cause=state.lost,
        alarm=0,
        suspects=(),
        suspicion="",
    )


def room(state: Membership, limits: Limits) -> int:
    """How many nodes wait that the next round could take beyond those of this one."""
    chosen = _nodes(_fitting(state, _candidates(state, limits.unit), limits))
    return len(set(chosen) - set(state.members))


def _nodes(replicas: Sequence[Replica]) -> tuple[str, ...]:
    return tuple(node for nodes in replicas for node in nodes)


def _candidates(state: Membership, unit: int) -> list[Replica]:
    """Replicas of the next round, in the order in which there is room for them: those of this round
    that are whole, those with its other members, and those of nodes that wait."""
    broken, places = set(state.broken), dict(state.places)
    whole, left = _replicas(state, [node for node in state.members if node not in broken], unit)
    waiting = sorted(
        set(state.arrived) - set(state.members),
        key=lambda node: (natural(places.get(node, "")), natural(node)),
    )
    others = [*left, *state.broken]
    near = _near(state, [*others, *waiting], unit)
    if set(others) <= set(_nodes(near)):
        return whole + sorted(near, key=set(others).isdisjoint)
    # A member, which has a part of the state in memory, goes before nodes that stand nearer.
    return whole + _replicas(state, [*others, *waiting], unit)[0]


def _fitting(state: Membership, replicas: Sequence[Replica], limits: Limits) -> list[Replica]:
    """The first of these replicas, as many as there is room and work for. Where there is work for
    fewer nodes than `minimum`, no fewer than these: their ranks will say what is wrong.
    """
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
    """The replicas that nodes make together: one that has ranks for some by itself, and otherwise
    the next ones in order. Also the nodes that are left over, which complete none."""
    uneven, found = dict(state.uneven), list[Replica]()
    together: list[str] = []
    ranks = 0
    for node in order:
        own = uneven.get(node, state.ranks)
        if own % unit == 0:
            found.append([node])
            continue
        together.append(node)
        ranks += own
        if ranks % unit == 0:
            found.append(together)
            together, ranks = [], 0
    return found, together


def _near(state: Membership, nodes: Sequence[str], unit: int) -> list[Replica]:
    """The replicas that nodes make with others of their place, from the inside out: those of a rack
    first, and those that span racks of what is left over in each."""
    where = {node: levels(place) for node, place in state.places}
    found, left = list[Replica](), list(nodes)
    for depth in range(max(map(len, where.values()), default=0), -1, -1):
        places: dict[tuple[str, ...], list[str]] = {}
        for node in left:
            places.setdefault(where.get(node, ())[:depth], []).append(node)
        left = []
        for together in places.values():
            replicas, others = _replicas(state, together, unit)
            found += replicas
            left += others
    return found


def _side_by_side(state: Membership, replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas, those of one place next to each other."""
    where = {node: levels(place) for node, place in state.places}
    return grouped(replicas, lambda nodes: common([where.get(node, ()) for node in nodes]))


def fail(
    state: Membership, round: int, generation: int, failure: Failure, limits: Limits
) -> Membership:
    """A training process failed: the next generation, or the end of the job, with the reason.

    Later reports on the same generation change nothing: one failure makes the others fail too.
    """
    if state.closed or (state.round, state.generation) != (round, generation):
        return state
    before = [one for one in state.failures if not one.mended]
    failures = (*before, failure)[-limits.restarts - 1 :]
    if failure.mended:
        return _go_on(replace(calm(state), failures=failures), failure)
    away = {one.node: one.at for one in state.struck}
    # What a node was sent away for is settled: the others need not pay for it.
    counted = [item for item in failures if item.at > away.get(item.node, -math.inf)]
    recent = [item for item in counted if item.at > failure.at - 3600]
    known = [item for item in counted if item.rank is not None and not item.outside]
    same = known[-limits.same_step :] if known[-1:] == [failure] else []
    ranks = sorted({item.rank for item in same if item.rank is not None})
    who = f"node {failure.node}" if failure.rank is None else f"rank {failure.rank}"
    again = len(same) == limits.same_step and len({item.step for item in same}) == 1
    if again:  # who was killed from outside in a later step shows that the run had got beyond it
        row = counted[counted.index(same[0]) :]
        again = all(item.step <= failure.step for item in row)
    again = again and (len(ranks) == 1 or (bool(failure.error) and len(set(map(_kind, same))) == 1))
    without = _candidates(leave(state, failure.node), limits.unit)
    spared = len(_nodes(_fitting(state, without, limits))) >= limits.minimum
    often = f"{limits.same_step} times in a row in step {failure.step}"
    if again and not (spared and len({item.node for item in same}) == 1):
        named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        reason = (
            f"{named} failed {often}, the last time so: {failure.why}. A restart will not mend it"
        )
        return replace(state, failures=failures, closed=Closed(93, reason))
    if len(recent) > limits.restarts:
        reason = (
            f"{len(recent)} failures within an hour, more than the {limits.restarts} allowed "
            f"(--max-restarts), the last on {who}: {failure.why}"
        )
        return replace(state, failures=failures, closed=Closed(93, reason))
    state = replace(calm(state), failures=failures)
    if spared and (again or strikes(state, failure) >= limits.strikes):
        others = tuple(one for one in state.struck if one.node != failure.node)
        how = f"it failed {often}" if again else f"{limits.strikes} failures within an hour"
        lost = replace(failure, rank=None, why=f"sent away: {how}")
        return replace(leave(state, failure.node), struck=(*others, failure), lost=lost)
    return _go_on(state, failure)


def _go_on(state: Membership, failure: Failure) -> Membership:
    """Begin the next generation, or end the round of which some nodes are gone or have paused."""
    if over(state):
        return replace(state, lost=state.lost or failure)
    if set(state.members) & set(state.arrived):
        return replace(leave(state, failure.node), lost=failure)
    return replace(state, generation=state.generation + 1)


def _kind(failure: Failure) -> str:
    """Its error without what differs between ranks, and between runs."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", failure.error)


def strikes(state: Membership, failure: Failure) -> int:
    """Failures of a node in the hour before `failure`, and since it was last sent away."""
    since = [one.at for one in state.struck if one.node == failure.node]
    after = max([failure.at - 3600, *since])
    own = (one for one in state.failures if one.rank is not None and one.node == failure.node)
    return sum(one.at > after and not one.outside for one in own)


def raise_alarm(state: Membership, round: int, generation: int) -> Membership:
    """A rank seems to hang."""
    if state.closed or (state.round, state.generation) != (round, generation):
        return state
    return state if state.alarm else replace(state, alarm=state.version + 1)


def suspect(state: Membership, alarm: int, ranks: Sequence[int], reason: str) -> Membership:
    """All nodes have said where their ranks stand: these are waited for (none: all stand alike)."""
    if state.alarm != alarm:
        return state
    return replace(state, suspects=tuple(ranks), suspicion=reason)


def calm(state: Membership) -> Membership:
    """It was no hang, or not yet."""
    return replace(state, alarm=0, suspects=(), suspicion="")


# --- leases ----------------------------------------------------------------------------------


def beat_seconds(nodes: int) -> float:
    """How often a node of a job of so many nodes raises its counter."""
    return BEAT_SECONDS * max(1.0, nodes / NODES_PER_BEAT)


@dataclass
class Pace:
    """How often this node has raised its counter of late."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=LATE_BEATS))
    """Seconds between two beats."""
    last: float | None = None
    """Time of the last beat."""

    def beat(self, now: float) -> None:
        """The counter was raised."""
        if self.last is not None:
            self.gaps.append(now - self.last)
        self.last = now

    def skip(self) -> None:
        """The time since the last beat was lost by the store, not by this machine."""
        self.last = None

    def seconds(self, due: float, now: float) -> float:
        """Seconds between two beats to reckon with, where `due` is what they should be."""
        gaps = [*self.gaps, *([now - self.last] if self.last is not None else [])]
        worst = max(gaps, default=0.0)
        return max(due, min(worst, LATE_SECONDS)) if worst > LATE_FACTOR * due else due


def lease_seconds(beat: float, doubted: bool) -> float:
    """How long a node may be silent that raises its counter every `beat` seconds."""
    if doubted:
        return max(DOUBTED_SECONDS, beat * DOUBTED_BEATS)
    return max(LEASE_SECONDS, beat * MISSED_BEATS)


def look_seconds(nodes: int, observes: bool) -> float:
    """How often a node of a job of so many nodes looks at the document: all together a bounded
    number of times a second."""
    return LOOK_SECONDS * max(1.0, nodes / (1000 if observes else 100))


def inside(state: Membership) -> list[str]:
    """All nodes of the document, in order."""
    return list(dict.fromkeys((*state.members, *state.arrived)))


def observers(state: Membership) -> list[str]:
    """The nodes that may change the document for others; the first nodes of `inside`."""
    some = (*state.members[:OBSERVERS], *state.arrived[:OBSERVERS])
    return list(dict.fromkeys(some))[:OBSERVERS]


def watched(state: Membership, node: str) -> list[str]:
    """Whose counters a node reads: so that a large job does not read each of all. Whoever watches
    loses the nodes that did not keep their lease, so after all observers others observe."""
    first = observers(state)
    everybody = inside(state) if node in first else first
    return [other for other in everybody if other != node]


def ranks_of(state: Membership, node: str) -> int:
    """Ranks of one node."""
    return dict(state.uneven).get(node, state.ranks)


def nodes_about(state: Membership) -> int:
    """For how many nodes the store is to be spared: those of the round, and those that wait."""
    return max(state.size, len(state.members), len(state.arrived))


def same_for_members(one: Membership, other: Membership) -> bool:
    """Whether two documents differ at most in who has arrived: nobody but the observers acts upon
    that before a round begins, or there is room for it."""
    untold: dict[str, Any] = {"version": 0, "arrived": (), "uneven": (), "places": ()}
    return replace(one, **untold) == replace(other, **untold)


@dataclass
class Leases:
    """Counters of other nodes, as one node saw them change."""

    seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By node: the highest counter, and when it was first seen."""

    def lapsed(
        self, counters: Mapping[str, int], now: float, leases: Mapping[str, float]
    ) -> list[str]:
        """Nodes whose counter (0: none) has not risen for the seconds of their lease."""
        self.seen = {
            node: self.seen[node]
            if node in self.seen and counter <= self.seen[node][0]
            else (counter, now)
            for node, counter in counters.items()
        }
        return [node for node, (_, since) in self.seen.items() if now - since > leases[node]]

    def forgive(self) -> None:
        """Begin all leases anew: this node itself was cut off, and saw nobody's counter."""
        self.seen.clear()


def newer(mine: Membership | None, stored: Membership | None) -> Membership | None:
    """The copy to go on with: a store that was lost comes back empty or behind, and is then brought
    up to date by the first node that has a newer copy. If a newcomer was faster, and took the store
    for that of a new job, its job counts rounds from the first on, and gives way to the one that
    has had more. None: there is none yet."""
    if mine and stored and stored.job != mine.job and stored.round < mine.round:
        return mine
    copies: Sequence[Membership] = [copy for copy in (mine, stored) if copy is not None]
    return max(copies, key=lambda copy: copy.version, default=None)


Change = Callable[[Membership], Membership]
