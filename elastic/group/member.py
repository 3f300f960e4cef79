"""Keeps this node in the job: a thread that writes the node's heartbeats, and reads and changes the
membership document in the store. The rules are in membership.py.

[Note: loss of a node] The way from a dead node to the next round, in the order of the calls:

  1. The counter of the dead node no longer rises. A node that watches it sees this in
     `Member._read_beats`, and `MembershipLeases.lapsed` names the dead node after its lease.
  2. `Member._follow` removes that node from the document, and swaps the document in the store.
  3. Every other node reads the new document and wakes its agent (`Member._adopt`).
  4. The round has lost a node (`round_over`), so torchrun gets 1 from
     `PerdureRendezvous.num_nodes_waiting`, and ends its stand-ins. The agent keeps the training
     processes that can continue in the next round (recall.py), and ends all others
     (`NodeAgent._on_stand_in_gone`).
  5. torchrun calls `next_rendezvous`, which requests the next round. `complete` begins it once all
     remaining members have arrived.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from elastic.exits import EXIT_WRONG_INPUT
from elastic.group.job_claim import NO_MARK, JobClaim, claim_key
from elastic.group.job_secret import JobSecret
from elastic.group.membership import (
    OBSERVERS,
    Change,
    HeartbeatPace,
    Membership,
    MembershipEnd,
    MembershipFailure,
    MembershipLeases,
    MembershipLimits,
    MembershipRequest,
    all_nodes,
    beat_seconds,
    close,
    complete,
    differ_only_in_arrivals,
    fail,
    heed_all,
    is_foreign,
    lease_seconds,
    lose,
    newer,
    observers,
    poll_seconds,
    read_fields,
    room,
    round_over,
    spared_nodes,
    watched_nodes,
)
from elastic.group.sealed import JobKeys
from elastic.group.store import StoreClient, StoreLostError

logger = logging.getLogger(__name__)

ALONE_SECONDS = 0.4
"""Seconds between two reads of the membership document in a job of at most one node."""
MAX_KNOCKING = 20_000
"""Largest number of names of nodes that an observer keeps from the door, the key of the store to
which nodes that want to join append their names."""
COUNTS_PER_BEAT = 8
"""How often the first observer reads the counters of all nodes between two of its heartbeats, while
nodes arrive or leave."""
YOUNG_SECONDS = 30.0
"""Age up to which a job gives way to an older job of its name; see job_claim.py."""
KNOCK_SECONDS, MISSED_KNOCKS = 2.0, 10
"""Seconds between two knocks (entries at the door) of a node that wants to join, and number of
knocks after which observers forget a node that has not joined."""


@dataclass
class _Heartbeat:
    """Times by time.monotonic() at which this node writes heartbeats (its counter in the store) and
    knocks (its name at the door)."""

    count: int = 0
    due: float = 0.0
    sent: MembershipRequest | None = None
    pace: HeartbeatPace = field(default_factory=HeartbeatPace)
    knocks_since: float = 0.0
    """Time of the first knock; 0: this node does not wait at the door."""
    knock_due: float = 0.0


@dataclass
class _HeartbeatWatch:
    """Heartbeats of other nodes, as this node has read them."""

    leases: MembershipLeases = field(default_factory=MembershipLeases)
    living: frozenset[str] = frozenset()
    """Watched nodes whose counter rose while this node watched them."""
    requests: dict[str, MembershipRequest] = field(default_factory=dict)
    """Node → the request in its newest heartbeat. Only observers apply requests."""
    knocking: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Node at the door → (counter when first read, 0 before; time at which it is forgotten)."""
    due: float = 0.0
    """Time at which an observer reads the heartbeats again while nodes arrive or leave."""
    connections: int = 0
    """`StoreClient.connections` at the last read; a change means that the store restarted."""

    def remember(self, names: Sequence[str], inside: Sequence[str], now: float) -> None:
        """Add `names` to the nodes at the door. Drop nodes whose time has expired, and nodes
        `inside` the document."""
        for name in names:
            self.knocking.setdefault(name, (0, now + MISSED_KNOCKS * KNOCK_SECONDS))
        self.knocking = {
            name: (first, until)
            for name, (first, until) in self.knocking.items()
            if name not in inside and now < until
        }

    def note(self, node: str, counter: int, request: Mapping[str, object] | None) -> None:
        """Store the request in a heartbeat of `node`."""
        first, until = self.knocking.get(node, (1, 0.0))
        if not first:
            self.knocking[node] = counter, until
        elif node in self.knocking and counter <= first:
            pass  # the heartbeat may be left over from a dead process
        elif request and counter >= self.leases.seen.get(node, (0, 0.0))[0]:
            self.requests[node] = read_fields(MembershipRequest, request)


@dataclass
class _AnnouncedVersion:
    """What this node last read or wrote under the store's key `version`. While it is unchanged,
    a node without changes of its own does not read the document, unless it observes."""

    version: bytes | None = None
    state: Membership | None = None
    """Document whose version this node last wrote."""
    due: float = 0.0
    """Time from which a document that differs only in its arrivals is announced."""


class Member:
    """Follows and changes the membership document for this node, in a thread that `start` starts.
    Only this thread uses `client`, and calls `changed` after the document has changed. `lease`:
    seconds without a heartbeat after which a node is lost; None: `lease_seconds`."""

    def __init__(
        self,
        client: StoreClient,
        run_id: str,
        name: str,
        limits: MembershipLimits,
        changed: Callable[[], None],
        lease: float | None,
    ) -> None:
        self.name, self.limits = name, limits
        self.state = Membership()
        self.unreachable_since: float | None = None
        self.keys = JobKeys(client, run_id, JobSecret(b""))
        self.wake = threading.Event()
        self._run_id, self._changed, self._lease = run_id, changed, lease
        self._mark, self._young_until = NO_MARK, 0.0
        self._known: Membership | None = None
        self._changes: list[Change] = []
        """Changes of this node that the document in the store does not have yet."""
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._request: MembershipRequest | None = None
        self._identity = ""
        self._heartbeat, self._watch = _Heartbeat(), _HeartbeatWatch()
        self._announced = _AnnouncedVersion()
        self._arrivals: tuple[tuple[str, ...], float] = ((), 0.0)
        """(nodes that wait for the next round, time.monotonic() of their last change)."""
        self._loss_expected_until = 0.0
        self._own_status: tuple[int, str] | None = None
        """(alarm, status of this node's ranks) still to be written to the store."""
        self._statuses: tuple[int, list[str]] | None = None
        """(alarm, statuses of all nodes). Only the first node of the round collects them."""
        self._end = False
        self._thread = threading.Thread(target=self._run, name="perdure-member", daemon=True)

    def start(self, secret: JobSecret, mark: str = NO_MARK) -> None:
        """Begin to follow the membership document. `mark`: `JobClaim.mark` of the job."""
        self._mark, self._young_until = mark, time.monotonic() + YOUNG_SECONDS
        self.use_secret(secret)
        self._thread.start()

    def use_secret(self, secret: JobSecret) -> None:
        """Read and write values of the store sealed by `secret`; ignore all other values. Called
        before the first call of `look`."""
        self.keys = JobKeys(self.keys.client, self._run_id, secret)

    def change(self, change: Change) -> None:
        """Apply a change to the document soon. If another node writes first, `change` is applied
        again to the newer document, so it must check that it still applies."""
        with self._lock:
            self._changes.append(change)
        self.wake.set()

    def report(self, round: int, generation: int, failure: MembershipFailure) -> None:
        report = partial(fail, round=round, generation=generation, failure=failure)
        self.change(partial(report, limits=self.limits))

    def expect_loss(self, seconds: float) -> None:
        """Shorten all leases for the next `seconds`, because some node has probably died."""
        self._loss_expected_until = time.monotonic() + seconds
        self.wake.set()

    def request(self, request: MembershipRequest | None) -> None:
        """Request to join the next round or to leave; None withdraws the request."""
        if request and not request.leaves:
            self._identity = request.identity
        self._request = request
        self.wake.set()

    def refused(self) -> bool:
        """Whether this node cannot join because living nodes train something else."""
        state = self.state
        return is_foreign(state, self.name, self._identity) and not self._watch.living.isdisjoint(
            observers(state)
        )

    def publish(self, alarm: int, status: str) -> None:
        self._own_status = alarm, status
        self.wake.set()

    def statuses(self, alarm: int) -> list[str] | None:
        """Returns the statuses that all nodes published for `alarm`; None while one is missing.
        Always None except on the first node of the round."""
        statuses = self._statuses
        return statuses[1] if statuses and statuses[0] == alarm else None

    def wait_for(self, condition: Callable[[Membership], bool], timeout: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: condition(self.state), timeout)

    def stop(self, timeout: float) -> None:
        """Request to leave, wait up to `timeout` seconds until that is sent, end the thread."""
        client = self.keys.client
        client.patience = min(client.patience, timeout)
        departure = MembershipRequest(leaves=True)
        self.request(departure)
        deadline = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < deadline:
            if self._heartbeat.sent == departure and not self._changes:
                break
            time.sleep(0.01)
        self._end = True
        self.wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._end:
            self.wake.wait(self.look())

    def look(self) -> float:
        """Read and write the store once; returns the seconds to wait for `wake` before the next
        call. Called only by the thread of this object."""
        self.wake.clear()  # cleared first, so that a request made during the work sets it again
        try:
            self._follow()
            if self.unreachable_since is not None:
                logger.warning("the store answers again")
                self.unreachable_since = None
        except StoreLostError as lost:
            self._heartbeat.pace.skip()
            if self.unreachable_since is None:
                self.unreachable_since = time.monotonic()
                logger.warning("%s; training continues; joins and restarts wait", lost)
        except Exception:
            logger.exception("membership: internal error")
            return 1.0
        if self.limits.maximum == 1:  # nobody else changes the document
            return ALONE_SECONDS
        seconds = poll_seconds(spared_nodes(self.state), self._observes(self.state))
        # A node at the door does not know how many nodes wait there: it reads ever less often.
        since = self._heartbeat.knocks_since
        waited = time.monotonic() - since if since else 0.0
        return max(seconds, min(waited / 4, KNOCK_SECONDS))

    def _observes(self, state: Membership) -> bool:
        """Whether this node writes the document for other nodes: it is an observer, or there are
        fewer than OBSERVERS observers and this node would train the same run."""
        first = observers(state)
        few = len(first) < OBSERVERS and not is_foreign(state, self.name, self._identity)
        return few or self.name in first

    def _follow(self) -> None:
        keys, now = self.keys, time.monotonic()
        observes, request = self._observes(self.state), self._request
        lapsed: list[str] = []
        beats = now >= self._heartbeat.due
        if beats or request != self._heartbeat.sent:
            self._beat(request)
        if beats or (observes and now >= self._watch.due and self._nodes_move()):
            lapsed = self._read_beats(now)
        if self._own_status:
            alarm, status = self._own_status
            keys.put(f"standing/{self.name}", f"{alarm} {status}".encode())
            self._own_status = None
        with self._lock:
            changes = list(self._changes)
        version = keys.client.get(f"{keys.prefix}/version")
        unchanged = version is not None and version == self._announced.version
        if unchanged and not (observes or changes or lapsed) and self._known is not None:
            if request and not request.leaves and self.name not in all_nodes(self._known):
                self._knock_at_door(now)
            return
        self._announced.version = version
        key = f"{keys.prefix}/state"
        data = keys.client.get(key)
        text = keys.open(key, data)
        stored = Membership.decode(text) if text else None
        best = newer(self._known, stored) or Membership()
        if self.name not in all_nodes(best):
            # Members remove silent observers: if all observers are silent, no member lives.
            lapsed = all_nodes(best) if set(observers(best)) <= set(lapsed) else []
            joins = request is not None and not request.leaves
            if is_foreign(best, self.name, self._identity) and not (lapsed and joins):
                self._adopt(best)  # this node only reads: the nodes train something else
                return
        observes = self._observes(best)
        requests: dict[str, MembershipRequest] = {}
        if observes:
            # A node that was removed after its heartbeat was read must knock again to join.
            known = {*all_nodes(best), *self._watch.knocking}
            requests = {node: one for node, one in self._watch.requests.items() if node in known}
            if request:
                requests[self.name] = request
        state, unix_time = best, time.time()
        for change in changes:
            state = change(state)
        state = heed_all(state, requests, unix_time)
        for node in lapsed:
            if node in all_nodes(state):
                state = lose(state, node, unix_time)
                logger.warning("node %s is lost: no sign of life", node)
        if state.arrived != self._arrivals[0]:
            self._arrivals = state.arrived, now
        if observes and self.name in state.arrived:
            state = complete(state, self.limits, now - self._arrivals[1])
        if state != best or (best != stored and observes):
            # The new version exceeds that of every copy, so that this document replaces them all.
            versions = [copy.version for copy in (best, state, stored) if copy]
            state = replace(state, version=max(versions) + 1)
            sealed = keys.seal(key, state.encode())
            if keys.client.swap(key, data, sealed) != sealed:
                self.wake.set()  # another node has changed the document first: try again
                return
        if observes or state != best:
            self._announce(state, now, at_once=beats or not observes)
        self._watch.requests = {}
        with self._lock:
            del self._changes[: len(changes)]  # changes that came meanwhile stay
            if self._changes:
                self.wake.set()
        self._known = state
        if self._heartbeat.knocks_since and self.name in all_nodes(state):
            self._heartbeat.knocks_since = 0.0
        self._collect_statuses(state)
        self._adopt(state)

    def _adopt(self, state: Membership) -> None:
        if state != self.state:
            if (state.round, state.generation) != (self.state.round, self.state.generation):
                self._loss_expected_until = 0.0  # the document shows the loss, or another failure
            with self._news:
                self.state = state
                self._news.notify_all()
            self._changed()

    def _announce(self, state: Membership, now: float, at_once: bool) -> None:
        """Write the document's version to its own key, so that other nodes read the document. With
        `at_once` false, changes of the arrivals alone are announced once per `poll_seconds`."""
        before = self._announced.state
        early = before and (state.version == before.version or now < self._announced.due)
        if early and not at_once and differ_only_in_arrivals(state, before or state):
            return
        # Set first: if the store fails below, the next call of `look` reads the document again.
        self._announced.version = str(state.version).encode()
        # No node decides anything by this key, so its value carries no MAC.
        self.keys.client.set(f"{self.keys.prefix}/version", self._announced.version)
        self._announced.state = state
        self._announced.due = now + poll_seconds(spared_nodes(state), observes=False)

    def _beat(self, request: MembershipRequest | None) -> None:
        heart, seconds = self._heartbeat, beat_seconds(spared_nodes(self.state))
        now = time.monotonic()
        if self.keys.client.connections != self._watch.connections:
            heart.pace.skip()  # the store was unreachable since the last heartbeat
        heart.due = now + seconds
        heart.pace.beat(now)
        seconds = heart.pace.seconds(seconds, now)
        heart.count += 1
        text = json.dumps([heart.count, request and asdict(request), seconds]).encode()
        self.keys.put(f"beat/{self.name}", text)
        heart.sent = request
        if self.name in observers(self.state)[:1]:
            self._renew_claim()

    def _renew_claim(self) -> None:
        """Raise the counter of the job's claim, so that other jobs of this name are refused. A
        young job ends itself if an older job of this name is back after the store's restart."""
        key = claim_key(self._run_id)
        own = JobClaim(self.keys.fingerprint, self._heartbeat.count, self._mark)
        if time.monotonic() < self._young_until:
            other = JobClaim.decode(self.keys.client.get(key))
            if other and other.fingerprint != own.fingerprint and other.counter > own.counter:
                reason = (
                    f"a job named {self._run_id!r} was on this store before, with another secret; "
                    "put run.dir on storage that all nodes of the job share, or give a job of its "
                    "own another name (--rdzv-id)"
                )
                logger.error("%s", reason)
                self.change(partial(close, end=MembershipEnd(EXIT_WRONG_INPUT, reason)))
                return
        self.keys.client.set(key, own.encode())

    def _nodes_move(self) -> bool:
        """Whether nodes arrive, leave or may be lost, so that counters are read more often."""
        state = self.state
        if time.monotonic() < self._loss_expected_until:
            return True
        ends = round_over(state) or bool(set(state.members) & set(state.arrived))
        begins = not state.members or room(state, self.limits) > 0
        return ends or begins or bool(state.closed or self._watch.knocking)

    def _read_beats(self, now: float) -> list[str]:
        """Read the heartbeats of other nodes; returns the nodes whose lease lapsed."""
        watch, client = self._watch, self.keys.client
        beat = beat_seconds(spared_nodes(self.state))
        seconds = self._heartbeat.pace.seconds(beat, now)
        first = observers(self.state)
        if self._observes(self.state):
            # The first observer reads most often; other observers read in case it has died.
            position = first.index(self.name) if self.name in first else OBSERVERS
            watch.due = now + (1 + position) * beat / COUNTS_PER_BEAT
            self._open_door(now)
        others = watched_nodes(self.state, self.name)
        named = list(dict.fromkeys([*others, *watch.knocking]))
        keys = [f"{self.keys.prefix}/beat/{node}" for node in named]
        counters: dict[str, int] = {}
        paces: dict[str, float] = {}
        watch.requests = {}
        for node, key, data in zip(named, keys, client.get_all(keys), strict=True):
            text = self.keys.open(key, data) or b"[0, null, 0]"
            counters[node], request, pace, *_ = json.loads(text)
            # `pace` may be too short: that node may not have read yet that the job has grown.
            paces[node] = max(pace, seconds)
            watch.note(node, counters[node], request)
        late = time.monotonic() - now > seconds
        if client.connections != watch.connections or late:
            watch.leases.forgive()
        if client.connections != watch.connections:
            watch.connections = client.connections
            self._heartbeat.pace.skip()
        # Observers have the shortest leases and act first; nodes outside the document act last.
        patience = 1 if self.name in first else 2
        patience += self.name not in all_nodes(self.state)
        now = time.monotonic()
        hurried = now < self._loss_expected_until
        leases = {
            node: patience * (self._lease or lease_seconds(paces[node], hurried)) for node in others
        }
        seen = watch.leases.seen
        watch.living = frozenset(
            node
            for node in others
            if node in watch.living or (node in seen and counters[node] > seen[node][0])
        )
        lapsed = watch.leases.lapsed({node: counters[node] for node in others}, now, leases)
        for node in lapsed:
            watch.requests.pop(node, None)
        return lapsed

    def _knock_at_door(self, now: float) -> None:
        heart = self._heartbeat
        heart.knocks_since = heart.knocks_since or now
        heart.due = now  # the next heartbeat at once, so that observers soon see the counter rise
        if now < heart.knock_due:
            return
        heart.knock_due = now + KNOCK_SECONDS
        self.keys.client.append(f"{self.keys.prefix}/door", f"{self.name}\n".encode())

    def _open_door(self, now: float) -> None:
        key = f"{self.keys.prefix}/door"
        data = self.keys.client.get(key) or b""
        if data:
            self.keys.client.swap(key, data, b"")
        names = data.decode(errors="replace").splitlines()[:MAX_KNOCKING]
        self._watch.remember(names, all_nodes(self.state), now)

    def _collect_statuses(self, state: Membership) -> None:
        if not state.alarm or state.suspicion or self.name not in state.members[:1]:
            return
        keys = [f"{self.keys.prefix}/standing/{node}" for node in state.members]
        texts = []
        for key, data in zip(keys, self.keys.client.get_all(keys), strict=True):
            alarm, _, text = (self.keys.open(key, data) or b"").decode().partition(" ")
            if alarm == str(state.alarm):
                texts.append(text)
        if len(texts) == len(keys):
            self._statuses = state.alarm, texts
            self._changed()


def node_name(address: str) -> str:
    """Returns a unique name for this node. It has a random part because agents in two containers
    may share host name, address and process id."""
    return f"{socket.gethostname()}/{address}/{os.getpid()}-{secrets.token_hex(4)}"
