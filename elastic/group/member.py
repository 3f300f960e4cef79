"""A node's part in the membership: a thread that keeps its lease, follows the document of the job
in the store, and applies this node's changes to it. membership.py says what they mean."""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace

from elastic.exits import EXIT_WRONG_INPUT
from elastic.group.job_claim import NO_MARK, Claim, claim_key
from elastic.group.job_secret import Secret
from elastic.group.membership import (
    OBSERVERS,
    Ask,
    Change,
    Closed,
    Failure,
    Leases,
    Limits,
    Membership,
    Pace,
    beat_seconds,
    complete,
    fail,
    heed_all,
    inside,
    lease_seconds,
    look_seconds,
    lose,
    newer,
    nodes_about,
    observers,
    over,
    read_fields,
    room,
    same_for_members,
    strange,
    watched,
)
from elastic.group.store import StoreClient, StoreLostError

logger = logging.getLogger(__name__)

ALONE_SECONDS = 0.4
"""How often a node reads the document where there can only be one."""
MAX_KNOCKING = 20_000
"""Names at the door that a node remembers."""
COUNTS_PER_BEAT = 8
"""How often the first observer reads all counters in the time of a beat, while nodes come or go."""
YOUNG_SECONDS = 30.0
"""For so long a node that begins a job looks whether one of this name was there before; see
claim.py."""
KNOCK_SECONDS, MISSED_KNOCKS = 2.0, 10
"""How often a node leaves its name at the door until it is in the document."""


class Member:
    """This node's part in the membership: a thread that keeps its lease, follows the document and
    applies this node's changes to it.

    Args:
        client: of the store; used by the thread only.
        run_id: name of the job.
        name: of this node; unique in the job.
        limits: of the job.
        changed: called from the thread after the document has changed.
        lease: seconds without a beat after which a node is lost; None: by the number of nodes.
    """

    def __init__(
        self,
        client: StoreClient,
        run_id: str,
        name: str,
        limits: Limits,
        changed: Callable[[], None],
        lease: float | None,
    ) -> None:
        self.name, self.limits = name, limits
        self.state = Membership()
        self.unreachable_since: float | None = None
        self.dropped: Counter[str] = Counter()
        """How often a key held what was not sealed by the job's secret."""
        self._client, self._changed, self._run_id = client, changed, run_id
        self._secret = Secret(b"")
        self._mark, self._young_until = NO_MARK, 0.0
        self._prefix = ""
        self._lease = lease
        self._known: Membership | None = None
        self._wanted: list[Change] = []
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self.wake = threading.Event()
        """There is something to do at once."""
        self._leases, self._pace = Leases(), Pace()
        self._living: frozenset[str] = frozenset()
        """Those of the watched nodes whose counter was seen to rise."""
        self._arrivals: tuple[tuple[str, ...], float] = ((), 0.0)
        self._beats, self._next_beat, self._end = 0, 0.0, False
        self._ask: Ask | None = None
        self._identity = ""
        self._told: Ask | None = None
        """What was asked for by the last beat."""
        self._asks: dict[str, Ask] = {}
        """What other nodes ask for, where this one observes."""
        self._knocking: dict[str, tuple[int, float]] = {}
        """Nodes at the door: the first counter that was seen of each, and until when it counts."""
        self._next_knock = 0.0
        self._at_door = 0.0
        """Since when this node knocks; 0: it does not."""
        self._next_count = 0.0
        """When this observer reads the counters of all again, while nodes come or go."""
        self._doubts_until = 0.0
        """Until when a node is likely to be gone."""
        self._told_state: Membership | None = None
        self._next_tell = 0.0
        self._version: bytes | None = None
        """Version of the document that was read last, as the store tells it."""
        self._standing: tuple[int, str] | None = None
        self._standings: tuple[int, list[str]] | None = None
        self._connections = 0
        self._thread = threading.Thread(target=self._run, name="perdure-member", daemon=True)

    def start(self, secret: Secret, mark: str = NO_MARK) -> None:
        """Begin to follow the document; what is not sealed by `secret` is dropped. `mark`: of the
        job's claim."""
        self._mark, self._young_until = mark, time.monotonic() + YOUNG_SECONDS
        self.trust(secret)
        self._thread.start()

    def trust(self, secret: Secret) -> None:
        """What is not sealed by `secret` is dropped from now on. Comes before the first `look`."""
        self._secret = secret.derive("membership")
        self._fingerprint = secret.fingerprint
        self._prefix = key_prefix(self._run_id, secret)

    def change(self, change: Change) -> None:
        """Apply a change to the document soon: again if another node was faster, so it must come to
        the same whatever was done in between."""
        with self._lock:
            self._wanted.append(change)
        self.wake.set()

    def report(self, round: int, generation: int, failure: Failure) -> None:
        """Tell of a training process that failed."""
        self.change(lambda state: fail(state, round, generation, failure, self.limits))

    def doubt(self, seconds: float) -> None:
        """Take it for so long that a node may be gone: its lease is shorter meanwhile."""
        self._doubts_until = time.monotonic() + seconds
        self.wake.set()

    def ask(self, ask: Ask | None) -> None:
        """Come or leave, soon; None: nothing more."""
        if ask and not ask.leaves:
            self._identity = ask.identity
        self._ask = ask
        self.wake.set()

    def refused(self) -> bool:
        """Whether this node does not get in: nodes that live train something else."""
        state = self.state
        return strange(state, self.name, self._identity) and not self._living.isdisjoint(
            observers(state)
        )

    def stand(self, alarm: int, text: str) -> None:
        """Say where the ranks of this node stand."""
        self._standing = alarm, text
        self.wake.set()

    def standings(self, alarm: int) -> list[str] | None:
        """What all nodes have said of an alarm; None as long as one is missing, and on all nodes
        but the first."""
        found = self._standings
        return found[1] if found and found[0] == alarm else None

    def wait_for(self, condition: Callable[[Membership], bool], timeout: float) -> bool:
        """Wait until the document meets a condition; False after `timeout` seconds."""
        with self._news:
            return self._news.wait_for(lambda: condition(self.state), timeout)

    def stop(self, timeout: float) -> None:
        """Leave, if the store answers within `timeout` seconds, and end."""
        self._client.patience = min(self._client.patience, timeout)
        gone = Ask(leaves=True)
        self.ask(gone)
        deadline = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._told == gone and not self._wanted:
                break
            time.sleep(0.01)
        self._end = True
        self.wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._end:
            seconds = self.look()
            self.wake.wait(seconds)

    def look(self) -> float:
        """Look at the store once; returns in how many seconds to look again, if `wake` is not set
        before. Called by the thread only, where there is one."""
        self.wake.clear()
        try:
            self._follow()
            if self.unreachable_since is not None:
                logger.warning("the store answers again")
                self.unreachable_since = None
        except StoreLostError as lost:
            self._pace.skip()
            if self.unreachable_since is None:
                self.unreachable_since = time.monotonic()
                logger.warning("%s; training goes on, joins and restarts wait", lost)
        except Exception:
            logger.exception("membership: an error of ours")
            return 1.0
        if self.limits.maximum == 1:  # nobody else changes the document
            return ALONE_SECONDS
        seconds = look_seconds(nodes_about(self.state), self._observes(self.state))
        # At the door a node does not know how many others are there.
        waited = time.monotonic() - self._at_door if self._at_door else 0.0
        return max(seconds, min(waited / 4, KNOCK_SECONDS))

    def _observes(self, state: Membership) -> bool:
        """Whether this node changes the document for others. So does everybody while there are too
        few, but for those who would train something else."""
        first = observers(state)
        few = len(first) < OBSERVERS and not strange(state, self.name, self._identity)
        return few or self.name in first

    def _follow(self) -> None:
        """One look at the store."""
        now = time.monotonic()
        observes, ask = self._observes(self.state), self._ask
        lapsed: list[str] = []
        beats = now >= self._next_beat
        if beats or ask != self._told:
            self._beat(ask)
        if beats or (observes and now >= self._next_count and self._pending()):
            lapsed = self._count(now)
        if self._standing:
            self._stand(*self._standing)
        with self._lock:
            wanted = list(self._wanted)
        version = self._client.get(f"{self._prefix}/version")
        unchanged = version is not None and version == self._version
        if unchanged and not (observes or wanted or lapsed) and self._known is not None:
            if ask and not ask.leaves and self.name not in inside(self._known):
                self._knock(now)
            return
        self._version = version
        key = f"{self._prefix}/state"
        data = self._client.get(key)
        text = self._open(key, data)
        stored = Membership.decode(text) if text else None
        best = newer(self._known, stored) or Membership()
        if self.name not in inside(best):
            # Members would have lost these observers by now: if all are silent, no member lives.
            lapsed = inside(best) if set(observers(best)) <= set(lapsed) else []
            joins = ask is not None and not ask.leaves
            if strange(best, self.name, self._identity) and not (lapsed and joins):
                self._see(best)  # and change nothing in what others train
                return
        observes = self._observes(best)
        state = best
        for change in wanted:
            state = change(state)
        if observes:
            known = {*inside(best), *self._knocking}  # who was lost since must knock
            asks = {node: wish for node, wish in self._asks.items() if node in known}
            if ask:
                asks[self.name] = ask
            state = heed_all(state, asks, time.time())
        for node in lapsed:
            if node in state.members or node in state.arrived:
                logger.warning("node %s is lost: no sign of life", node)
                state = lose(state, node, time.time())
        if state.arrived != self._arrivals[0]:
            self._arrivals = state.arrived, now
        if observes and self.name in state.arrived:
            state = complete(state, self.limits, now - self._arrivals[1])
        if state != best or (best != stored and observes):
            versions = [copy.version for copy in (best, state, stored) if copy]
            state = replace(state, version=max(versions) + 1)
            sealed = self._secret.seal(key, state.encode())
            if self._client.swap(key, data, sealed) != sealed:
                self.wake.set()  # another was faster
                return
        if observes or state != best:
            self._tell(state, now, at_once=beats or not observes)
        self._asks = {}
        with self._lock:
            del self._wanted[: len(wanted)]
            if self._wanted:
                self.wake.set()
        self._known = state
        if self._at_door and self.name in inside(state):
            self._at_door = 0.0
        self._sum(state)
        self._see(state)

    def _see(self, state: Membership) -> None:
        """Tell of the document, if it is another."""
        if state != self.state:
            if (state.round, state.generation) != (self.state.round, self.state.generation):
                self._doubts_until = 0.0  # it is known what happened
            with self._news:
                self.state = state
                self._news.notify_all()
            self._changed()

    def _tell(self, state: Membership, now: float, at_once: bool) -> None:
        """Tell the version to those who only look whether it is another, and then read the whole
        document. What is nothing to act upon, as in a job whose nodes come one by one, is told no
        more often than they look. The version decides nothing, so it has no MAC."""
        before = self._told_state
        early = before and (state.version == before.version or now < self._next_tell)
        if early and not at_once and same_for_members(state, before or state):
            return
        self._version = str(state.version).encode()
        self._client.set(f"{self._prefix}/version", self._version)
        self._told_state = state
        self._next_tell = now + look_seconds(nodes_about(state), observes=False)

    def _beat(self, ask: Ask | None) -> None:
        """Keep our lease, and say what we ask for."""
        seconds = beat_seconds(nodes_about(self.state))
        now = time.monotonic()
        self._next_beat = now + seconds
        self._pace.beat(now)
        seconds = self._pace.seconds(seconds, now)
        self._beats += 1
        key = f"{self._prefix}/beat/{self.name}"
        text = json.dumps([self._beats, ask and asdict(ask), seconds]).encode()
        self._client.set(key, self._secret.seal(key, text))
        self._told = ask
        if self.name in observers(self.state)[:1]:
            self._keep_claim()

    def _keep_claim(self) -> None:
        """Tell who comes by which secret this job is here. A young job gives way to an older one,
        which the store had forgotten."""
        key, ours = claim_key(self._run_id), Claim(self._fingerprint, self._beats, self._mark)
        if time.monotonic() < self._young_until:
            other = Claim.decode(self._client.get(key))
            if other and other.fingerprint != ours.fingerprint and other.counter > ours.counter:
                reason = (
                    f"a job named {self._run_id!r} was on this store before, with another secret; "
                    "put run.dir on storage that all nodes of the job share, or give a job of its "
                    "own another name (--rdzv-id)"
                )
                logger.error("%s", reason)
                closed = Closed(EXIT_WRONG_INPUT, reason)
                self.change(lambda state: replace(state, closed=state.closed or closed))
                return
        self._client.set(key, ours.encode())

    def _pending(self) -> bool:
        """Whether nodes are coming or going, or may be, so that they are looked at more often."""
        state = self.state
        if time.monotonic() < self._doubts_until:
            return True
        ends = over(state) or bool(set(state.members) & set(state.arrived))
        begins = not state.members or room(state, self.limits) > 0
        return ends or begins or bool(state.closed or self._knocking)

    def _count(self, now: float) -> list[str]:
        """Read the counters that are ours to watch, and what their nodes ask for; returns the nodes
        that did not keep their lease."""
        seconds = self._pace.seconds(beat_seconds(nodes_about(self.state)), now)
        if self._observes(self.state):
            # The first serves all; the others are there in case it does not.
            them = observers(self.state)
            place = them.index(self.name) if self.name in them else OBSERVERS
            beat = beat_seconds(nodes_about(self.state))
            self._next_count = now + (1 + place) * beat / COUNTS_PER_BEAT
            self._open_door(now)
        others = watched(self.state, self.name)
        named = list(dict.fromkeys([*others, *self._knocking]))
        keys = [f"{self._prefix}/beat/{node}" for node in named]
        counters: dict[str, int] = {}
        beats: dict[str, float] = {}
        """By node: how often it raises its counter, as it says; not all know of a new size yet."""
        self._asks = {}
        for node, key, data in zip(named, keys, self._client.get_all(keys), strict=True):
            counter, ask, every, *_ = json.loads(self._open(key, data) or b"[0, null, 0]")
            counters[node], beats[node] = counter, max(every, seconds)
            first, until = self._knocking.get(node, (1, 0.0))
            if not first:
                self._knocking[node] = counter, until
            elif node in self._knocking and counter <= first:
                pass  # perhaps an old beat of a node that is gone
            elif ask and counter >= self._leases.seen.get(node, (0, 0.0))[0]:
                self._asks[node] = read_fields(Ask, ask)
        late = time.monotonic() - now > seconds
        if self._client.connections != self._connections or late:
            self._leases.forgive()
        if self._client.connections != self._connections:
            self._connections = self._client.connections
            self._pace.skip()
        # The observers are first; nodes that are not in the document come last.
        patience = 1 if self.name in observers(self.state) else 2
        patience += self.name not in inside(self.state)
        now = time.monotonic()
        doubted = now < self._doubts_until
        leases = {
            node: patience * (self._lease or lease_seconds(beats[node], doubted)) for node in others
        }
        seen = self._leases.seen
        self._living = frozenset(
            node
            for node in others
            if node in self._living or (node in seen and counters[node] > seen[node][0])
        )
        lapsed = self._leases.lapsed({node: counters[node] for node in others}, now, leases)
        for node in lapsed:
            self._asks.pop(node, None)
        return lapsed

    def _knock(self, now: float) -> None:
        """Leave our name at the door."""
        self._at_door = self._at_door or now
        self._next_beat = now  # it is to be seen that we live
        if now < self._next_knock:
            return
        self._next_knock = now + KNOCK_SECONDS
        self._client.append(f"{self._prefix}/door", f"{self.name}\n".encode())

    def _open_door(self, now: float) -> None:
        """See who is there."""
        key, known = f"{self._prefix}/door", inside(self.state)
        names = self._client.get(key)
        if names:
            self._client.swap(key, names, b"")
            for name in names.decode(errors="replace").splitlines()[:MAX_KNOCKING]:
                self._knocking.setdefault(name, (0, now + MISSED_KNOCKS * KNOCK_SECONDS))
        self._knocking = {
            name: (first, until)
            for name, (first, until) in self._knocking.items()
            if name not in known and now < until
        }

    def _stand(self, alarm: int, text: str) -> None:
        key = f"{self._prefix}/standing/{self.name}"
        self._client.set(key, self._secret.seal(key, f"{alarm} {text}".encode()))
        self._standing = None

    def _sum(self, state: Membership) -> None:
        """On the first node, after an alarm: what all have said."""
        if not state.alarm or state.suspicion or self.name not in state.members[:1]:
            return
        keys = [f"{self._prefix}/standing/{node}" for node in state.members]
        found = []
        for key, data in zip(keys, self._client.get_all(keys), strict=True):
            alarm, _, text = (self._open(key, data) or b"").decode().partition(" ")
            if alarm == str(state.alarm):
                found.append(text)
        if len(found) == len(keys):
            self._standings = state.alarm, found
            self._changed()

    def _open(self, key: str, data: bytes | None) -> bytes | None:
        """What a node of this job has put there."""
        text = self._secret.open(key, data) if data else None
        if data and text is None:
            self.dropped[key] += 1
            if self.dropped[key] == 1:
                logger.warning(
                    "the store's key %s holds what no node of this job has written (%d bytes): it "
                    "is dropped, and so is what comes there after it", key, len(data),
                )  # fmt: skip
        return text


def key_prefix(run_id: str, secret: Secret) -> str:
    """What a job's keys in the store begin with. Another secret is another job, also under the
    same name."""
    return f"perdure/{run_id}/{secret.fingerprint}"


def node_name(address: str) -> str:
    """What others call this node. The agents of two containers of one host may have its name, its
    address and process id 1, hence the random part."""
    return f"{socket.gethostname()}/{address}/{os.getpid()}-{secrets.token_hex(4)}"
