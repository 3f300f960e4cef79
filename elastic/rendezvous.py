"""The rendezvous handler `perdure` of torchrun: `torchrun --rdzv-backend perdure …`.

It is registered through torch's entry point group `torchrun.handlers`, implements torch's public
`RendezvousHandler`, and uses no private class. torch's own handlers reuse the workers' store over
rounds (restarted ranks read the addresses of dead ones), learn of lost nodes only when somebody
re-joins, and cannot let a node in without ending the job; here every round has a store of its own,
and membership.py says who is in it.

`--rdzv-conf` takes: is_host (0 or 1: host the store here; default: if the endpoint is an address of
this machine and nobody hosts one there), join_timeout (seconds, default 600; a job that was trained
before waits an hour), first_call (seconds, default 3), lease (seconds, default 1.2),
restarts (failures of one hour that are answered by a new generation, default 30), unit (ranks of
which each round has a multiple, default what the program says of itself, or 1), secret (file with
the secret of the job; see secret.py).
"""

import atexit
import json
import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic.exits import EXIT_INTERRUPTED, EXIT_WRONG_INPUT, SIGNALS, leaving_code
from elastic.group.cloud import Notice, parse_sources, watch
from elastic.group.health import check_node
from elastic.group.membership import (
    MISSED_BEATS,
    OBSERVERS,
    Ask,
    Change,
    Closed,
    Failure,
    Leases,
    Limits,
    Membership,
    beat_seconds,
    complete,
    fail,
    heed_all,
    inside,
    look_seconds,
    lose,
    newer,
    nodes_about,
    observers,
    room,
    same_for_members,
    strange,
    watched,
)
from elastic.group.secret import SECRET_FILE, Secret, SecretError, find_secret
from elastic.group.store import LOST, StoreClient, StoreLostError, host_store
from elastic.node.agent import Node
from elastic.node.facts import Facts, differences, digest, torchrun_program
from elastic.node.occupancy import Occupancy, OccupiedError
from elastic.node.warm import start_early
from elastic.world import ROUND

logger = logging.getLogger(__name__)

TORCHRUN_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Environment variable: the signals that torchrun takes, from when it has started its workers."""
NOTICES = "PERDURE_NOTICES"
"""Environment variable: where to look for notices that this machine will be taken away: auto
(default), or some of aws, gcp, azure, file:PATH; empty for nowhere. See cloud.py."""
ALONE_SECONDS = 0.4
"""How often a node reads the document where there can only be one."""
MAX_KNOCKING = 20_000
"""Names at the door that a node remembers."""
COUNTS_PER_BEAT = 8
"""How often the first observer reads all counters in the time of a beat, while nodes come or go."""
KNOCK_SECONDS, MISSED_KNOCKS = 2.0, 10
"""How often a node leaves its name at the door until it is in the document."""
REJOIN_SECONDS = 3600.0
OTHER_SECRET_SECONDS = 3.0
"""Who finds another secret in the store looks again after so long whether its job runs."""
LOOPBACK = "127.0.0.1"
TELL_SECONDS = 10.0
MEET_SECONDS = 3600.0
"""How long a store that is away may keep a round from beginning."""
STORE_PATIENCE = 5.0
RECOVER_SECONDS, MAX_RECOVER_SECONDS = 10.0, 600.0
"""Before a node that was sent away is checked and may come back; doubled each time."""


def create_handler(parameters: RendezvousParameters) -> "PerdureRendezvous":
    """Make the handler of this node; connects to the store, or hosts it."""
    start_early()
    host, _, port = parameters.endpoint.rpartition(":")
    if not host:
        raise ValueError(f"--rdzv-endpoint {parameters.endpoint!r}: give HOST:PORT")
    alone = parameters.max_nodes == 1
    hosted = _host_if_ours(host, int(port), parameters.get_as_bool("is_host"), alone)
    if hosted and alone:
        host = LOOPBACK
    limits = Limits(
        parameters.min_nodes,
        parameters.max_nodes,
        first_call=float(parameters.get("first_call", Limits.first_call)),
        restarts=int(parameters.get("restarts", Limits.restarts)),
        unit=int(parameters.get("unit", Limits.unit)),
    )
    return PerdureRendezvous(
        run_id=parameters.run_id,
        client=StoreClient(host, hosted.port if hosted else int(port), STORE_PATIENCE),
        hosted=hosted,
        secret_file=parameters.get("secret"),
        limits=limits,
        local_address=LOOPBACK
        if alone
        else parameters.local_addr or _reachable(host, parameters.max_nodes),
        join_timeout=float(parameters.get("join_timeout", 600)),
        lease=float(parameters.get("lease", 0)) or None,
    )


class JobClosed(SystemExit):
    """There will be no next round for this node: ends torchrun with the exit code of the job, which
    its own errors would turn into 1 and a traceback.

    Args:
        closed: how the job ended.
    """

    def __init__(self, closed: Closed) -> None:
        super().__init__(closed.code)
        self.closed = closed
        if closed.code != EXIT_WRONG_INPUT:  # there the rank has said what is wrong
            print(closed.reason, file=sys.stderr, flush=True)


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
        self._prefix = ""
        self._lease = lease
        self._known: Membership | None = None
        self._wanted: list[Change] = []
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self.wake = threading.Event()
        """There is something to do at once."""
        self._leases = Leases()
        self._arrivals: tuple[tuple[str, ...], float] = ((), 0.0)
        self._beats, self._next_beat, self._end = 0, 0.0, False
        self._ask: Ask | None = None
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
        self._told_state: Membership | None = None
        self._next_tell = 0.0
        self._version: bytes | None = None
        """Version of the document that was read last, as the store tells it."""
        self._standing: tuple[int, str] | None = None
        self._standings: tuple[int, list[str]] | None = None
        self._connections = 0
        self._thread = threading.Thread(target=self._run, name="perdure-member", daemon=True)

    def start(self, secret: Secret) -> None:
        """Begin to follow the document; what is not sealed by `secret` is dropped."""
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

    def ask(self, ask: Ask | None) -> None:
        """Come or leave, soon; None: nothing more."""
        self._ask = ask
        self.wake.set()

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
        few."""
        first = observers(state)
        return self.name in first or len(first) < OBSERVERS

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
        if state != self.state:
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
        self._next_beat = time.monotonic() + seconds
        self._beats += 1
        key = f"{self._prefix}/beat/{self.name}"
        text = json.dumps([self._beats, ask and asdict(ask), seconds]).encode()
        self._client.set(key, self._secret.seal(key, text))
        self._told = ask
        if self.name in observers(self.state)[:1]:
            self._client.set(
                last_secret(self._run_id), f"{self._fingerprint} {self._beats}".encode()
            )

    def _pending(self) -> bool:
        """Whether nodes are coming or going, so that what they ask for is looked at more often."""
        state = self.state
        ends = len(state.members) < state.size or bool(set(state.members) & set(state.arrived))
        begins = not state.members or room(state, self.limits) > 0
        return ends or begins or bool(state.closed or self._knocking)

    def _count(self, now: float) -> list[str]:
        """Read the counters that are ours to watch, and what their nodes ask for; returns the nodes
        that did not keep their lease."""
        seconds = beat_seconds(nodes_about(self.state))
        if self._observes(self.state):
            # The first serves all; the others are there in case it does not.
            them = observers(self.state)
            place = them.index(self.name) if self.name in them else OBSERVERS
            self._next_count = now + (1 + place) * seconds / COUNTS_PER_BEAT
            self._open_door(now)
        others = watched(self.state, self.name)
        named = list(dict.fromkeys([*others, *self._knocking]))
        keys = [f"{self._prefix}/beat/{node}" for node in named]
        counters: dict[str, int] = {}
        beats: dict[str, float] = {}
        """By node: how often it raises its counter, as it says; not all know of a new size yet."""
        self._asks = {}
        for node, key, data in zip(named, keys, self._client.get_all(keys), strict=True):
            counter, ask, every = json.loads(self._open(key, data) or b"[0, null, 0]")
            counters[node], beats[node] = counter, max(every, seconds)
            first, until = self._knocking.get(node, (1, 0.0))
            if not first:
                self._knocking[node] = counter, until
            elif node in self._knocking and counter <= first:
                pass  # perhaps an old beat of a node that is gone
            elif ask and counter >= self._leases.seen.get(node, (0, 0.0))[0]:
                self._asks[node] = Ask(**ask)
        late = time.monotonic() - now > seconds
        if self._client.connections != self._connections or late:
            self._connections = self._client.connections
            self._leases.forgive()
        patience = 1 if self.name in observers(self.state) else 2  # the observers are first
        lapsed = self._leases.lapsed(
            {node: counters[node] for node in others},
            time.monotonic(),
            {node: patience * (self._lease or beats[node] * MISSED_BEATS) for node in others},
        )
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


def last_secret(run_id: str) -> str:
    """The key that says by which secret a job of this name is here, to those who have another:
    its fingerprint and a counter. Anybody could write that, so it decides about no running node."""
    return f"perdure/{run_id}/secret"


def node_name(address: str) -> str:
    """What others call this node. The agents of two containers of one host may have its name, its
    address and process id 1, hence the random part."""
    return f"{socket.gethostname()}/{address}/{os.getpid()}-{secrets.token_hex(4)}"


class PerdureRendezvous(RendezvousHandler):
    """See the module. Made by `create_handler`, in the agent's main thread."""

    def __init__(
        self,
        *,
        run_id: str,
        client: StoreClient,
        hosted: dist.TCPStore | None,
        secret_file: str | None,
        limits: Limits,
        local_address: str,
        join_timeout: float,
        lease: float | None,
    ) -> None:
        self._run_id, self._hosted, self._secret_file = run_id, hosted, secret_file
        self._store_address = client.host, client.port
        self._address, self._timeout = local_address, join_timeout
        self._round, self._size, self._identity, self._secret = 0, 0, "", Secret(b"")
        self._recover_seconds = RECOVER_SECONDS
        self._round_store: dist.TCPStore | None = None
        self._occupancy: Occupancy | None = None
        self._stopped = self._interrupted = False
        name = node_name(local_address)
        self._member = Member(client, run_id, name, limits, self._wake_node, lease)
        self._node = Node(self._member, torchrun_program())
        self._node.start()
        self._end = threading.Event()
        if threading.current_thread() is threading.main_thread():
            # torchrun would answer with a traceback and exit code 1, and save nothing.
            os.environ[TORCHRUN_SIGNALS] = "SIGHUP,SIGQUIT"
            for number in SIGNALS:
                signal.signal(number, self._told)
        watch(parse_sources(os.environ.get(NOTICES, "auto")), self._noticed, self._end)
        atexit.register(self.shutdown)

    def _told(self, number: int, _: FrameType | None) -> None:
        """A signal: the first is a notice, the second Ctrl-C ends all at once."""
        if self._interrupted and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)  # the kernel ends what this process has started
        self._interrupted = self._interrupted or number == signal.SIGINT
        idle = not self._node.busy and not self._member.state.closed
        how = "Ctrl-C; the next one ends it at once" if self._interrupted else ""
        self._node.told_to_go(how or signal.Signals(number).name, leaving_code(number))
        if idle:
            raise self._gone()

    def _gone(self) -> "JobClosed":
        return JobClosed(Closed(self._node.leaving, "this node has left; the same command resumes"))

    def _noticed(self, notice: Notice) -> None:
        """The cloud says that this machine will be taken away, or may be."""
        left = "" if notice.seconds is None else f", in {notice.seconds:.0f} s"
        if notice.what == "rebalance":  # a risk, which may last for days
            logger.warning("%s: this machine may be taken away soon", notice.source)
        else:
            self._node.told_to_go(f"{notice.source}: {notice.what}{left}")

    def _wake_node(self) -> None:
        self._node.wake()

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return "perdure"

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in the store of their round, which the agent of group rank 0 hosts."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round that this node is in. See RendezvousHandler."""
        if not self._round:  # others pause when we arrive: only once we can start
            self._check_health()
            self._secret = self._read_facts()
            self._member.start(self._secret)
        elif self._sent_away():
            self._recover()
        timeout = REJOIN_SECONDS if self._round else self._timeout
        deadline = time.monotonic() + timeout
        while True:
            state = self._next_round(self._round, timeout, deadline)
            self._round, self._size = state.round, state.size
            info = self._meet(state)
            if info:
                os.environ[ROUND] = str(state.round)
                return info

    def _read_facts(self) -> Secret:
        """Wait until our zygote is warm, and knows what this node is going to train; returns the
        secret of the job."""
        facts = self._node.facts(self._timeout)
        if facts is None:
            raise RendezvousTimeoutError(
                f"the imports of {self._node.program.package or 'torch'} take longer than "
                f"{self._timeout:.0f} s on this node (--rdzv-conf join_timeout)"
            )
        if facts.error:
            raise self._refused(facts.error)
        member = self._member
        member.limits = replace(
            member.limits, most_ranks=facts.most_ranks, unit=facts.unit or member.limits.unit
        )
        secret = self._find_secret(facts)
        if facts.identity:
            self._identity = digest(facts.identity)
            key, text = self._identity_key(self._identity), json.dumps(facts.identity).encode()
            with suppress(StoreLostError):  # it only helps to tell what differs
                client = StoreClient(*self._store_address, STORE_PATIENCE)
                client.set(key, secret.seal(key, text))
        return secret

    def _identity_key(self, identity: str) -> str:
        """Where the store holds what a digest of `Facts.identity` stands for."""
        return f"perdure/{self._run_id}/identity/{identity}"

    def _strange(self) -> "JobClosed":
        """This node would train something else than the job."""
        theirs, key = None, self._identity_key(self._member.state.identity)
        with suppress(StoreLostError):
            client = StoreClient(*self._store_address, STORE_PATIENCE)
            theirs = self._secret.open(key, client.get(key) or b"")
        facts = self._node.facts(0) or Facts()
        differing = differences(facts.identity, json.loads(theirs or b"{}"))
        return self._refused(
            f"this node does not join job {self._run_id!r}, as it would train something else: "
            f"{differing}; give it the same recipe, code and data, or another --rdzv-id"
        )

    def _refused(self, why: str) -> "JobClosed":
        print(f"error: {why}", file=sys.stderr, flush=True)
        return JobClosed(Closed(EXIT_WRONG_INPUT, why))

    def _check_health(self) -> None:
        """Refuse to join with a machine that would fail the others."""

        def round_trip() -> float:
            client, times = StoreClient(*self._store_address, STORE_PATIENCE), []
            client.get("health")  # connects
            for _ in range(5):  # the best of them, as this machine has imports to do now
                started = time.monotonic()
                client.get("health")
                times.append(time.monotonic() - started)
            return min(times)

        try:  # a store that is away just now, to be started again, is no fault of this machine
            StoreClient(*self._store_address, self._timeout).get("health")
        except StoreLostError as error:
            raise RendezvousConnectionError(str(error)) from error
        problems = check_node(round_trip)
        for problem in problems:
            logger.warning("health check: %s", problem)
        if any(problem.check != "gpu" for problem in problems):
            raise RendezvousConnectionError(
                f"this node does not join: {'; '.join(map(str, problems))}"
            )

    def _find_secret(self, facts: Facts) -> Secret:
        """The secret of the job; refuses to be a second job beside the one that was meant."""
        if self._hosted and self._member.limits.maximum == 1 and not self._secret_file:
            return Secret(os.urandom(32))  # nobody else is to know it
        try:
            secret = find_secret(self._secret_file, facts.directory)
            key = last_secret(self._run_id)
            client = StoreClient(*self._store_address, self._timeout)
            found = [client.get(key)]
            if found[0] and not found[0].startswith(secret.fingerprint.encode()):
                time.sleep(OTHER_SECRET_SECONDS)
                found.append(client.get(key))
            client.close()
            if len(set(found)) > 1:
                raise SecretError(
                    f"a job named {self._run_id!r} runs on this store with another secret than "
                    f"that of {os.environ[SECRET_FILE]}; give its nodes one file ({SECRET_FILE}), "
                    "or this job another name (--rdzv-id)"
                )
        except StoreLostError as error:
            raise RendezvousConnectionError(str(error)) from error
        except SecretError as error:
            raise self._refused(str(error)) from error
        return secret

    def _sent_away(self) -> bool:
        """Whether this node is out for its failures."""
        state, name = self._member.state, self._member.name
        struck = any(one.node == name for one in state.struck)
        return struck and name not in state.members and not state.closed

    def _recover(self) -> None:
        """Wait, and then until this node is found healthy: it failed too often."""
        why = "this node was sent away for its failures"
        while True:
            logger.warning("%s; checking it in %.0f s", why, self._recover_seconds)
            deadline = time.monotonic() + self._recover_seconds
            self._recover_seconds = min(2 * self._recover_seconds, MAX_RECOVER_SECONDS)
            while time.monotonic() < deadline:
                if self._node.leaving or self._member.wait_for(lambda now: bool(now.closed), 0.5):
                    return
            try:
                self._check_health()
                logger.warning("this node was sent away for its failures; it is healthy, and joins")
                return
            except RendezvousConnectionError as error:
                why = str(error)

    def _next_round(self, before: int, timeout: float, deadline: float) -> Membership:
        """Wait for a round after `before`."""
        member, name = self._member, self._member.name
        if self._node.leaving:
            raise self._gone()

        def in_next(state: Membership) -> bool:
            return state.round > before and name in state.members

        here, ended, spare = bool(before), None, False
        member.ask(Ask(after=before, ranks=self._node.program.ranks, identity=self._identity))
        while True:
            if member.wait_for(in_next, 0.5):
                member.ask(None)
                return member.state
            state = member.state
            if strange(state, name, self._identity):
                raise self._strange()
            here = here or name in state.arrived
            if state.closed and here:
                raise JobClosed(state.closed)
            if state.closed and not ended:
                ended = state.closed
                logger.warning(
                    "the last job %r of this store has ended (%s); a new one begins when all of it "
                    "have left", self._run_id, ended.reason,
                )  # fmt: skip
            if self._node.leaving:
                raise self._gone()
            limits, waits = member.limits, name in state.arrived and name not in state.members
            if waits and state.members and not room(state, limits):
                deadline = time.monotonic() + timeout  # a spare waits as long as the job runs
                if not spare:
                    spare = True
                    why = "there is no room or no work for more"
                    if room(state, replace(limits, unit=1)):
                        why = f"a replica of the model takes {limits.unit} ranks"
                    logger.warning(
                        "%d node(s) train, and %s: this node waits as a spare",
                        len(state.members), why,
                    )  # fmt: skip
            if time.monotonic() < deadline:
                continue
            if ended:  # it came late, and alone
                raise JobClosed(ended)
            of_replicas = f", in replicas of {limits.unit} ranks" if limits.unit > 1 else ""
            raise RendezvousTimeoutError(
                f"{len(state.arrived)} node(s) are here, at least {limits.minimum} are "
                f"needed{of_replicas}, and no more came within {timeout:.0f} s; start more, with "
                f"this secret ({SECRET_FILE}), or lower --nnodes MIN:MAX"
            )

    def _meet(self, state: Membership) -> RendezvousInfo | None:
        """Meet the other nodes of a round in its store; None if one was lost meanwhile."""
        member, place = self._member, state.members.index(self._member.name)
        self._occupy(state.job if place == 0 else None)
        if place == 0:
            self._round_store = host_store(self._address, 0)
            address = f"{self._address}:{self._round_store.port}"
            member.change(
                lambda now: replace(now, address=address) if now.round == state.round else now
            )

        def over(now: Membership) -> bool:
            return bool(now.closed) or now.round != state.round or len(now.members) < state.size

        member.wait_for(lambda now: bool(now.address) or over(now), MEET_SECONDS)
        tell_at = time.monotonic() + TELL_SECONDS
        while not over(member.state) and member.state.address:
            host, _, port = member.state.address.rpartition(":")
            try:
                store = dist.TCPStore(
                    host,
                    int(port),
                    is_master=False,
                    timeout=timedelta(seconds=30),
                    wait_for_workers=False,
                )
                # Twice, as torch now has the agents wait for each other without a way out: one that
                # dies between the two is noticed here.
                for key in ("here", "all here"):
                    store.add(key, 1)
                    while int(store.add(key, 0)) < state.size and not over(member.state):
                        time.sleep(0.01)
                if over(member.state):
                    return None
                return RendezvousInfo(
                    dist.PrefixStore("agent", store),
                    place,
                    state.size,
                    RendezvousStoreInfo(host, int(port)),
                )
            except LOST:
                time.sleep(0.1)  # its host is dead, which the leases tell in a moment
                if time.monotonic() > tell_at:
                    tell_at = math.inf
                    logger.warning(
                        "%s, where the nodes of round %d meet, cannot be reached from here; going "
                        "on trying (--local-addr names the address of a node)",
                        member.state.address, state.round,
                    )  # fmt: skip
        return None

    def _occupy(self, job: str | None) -> None:
        """Hold the folder of the run for a job, or for none."""
        facts = self._node.facts(0)
        if job and not self._occupancy and facts and facts.directory:
            try:
                self._occupancy = Occupancy(Path(facts.directory), job)
            except OccupiedError as occupied:
                refused = self._refused(str(occupied))
                self._member.change(
                    lambda state: replace(state, closed=state.closed or refused.closed)
                )
                raise refused from occupied
        elif not job and self._occupancy:
            self._occupancy.release()
            self._occupancy = None

    def num_nodes_waiting(self) -> int:
        """Whether torchrun is to end its workers and come to the next round: 1 for yes.

        Nodes that are lost, or have left, are a reason at once. For nodes that have come, the ranks
        are asked to pause, and are ended when they have.
        """
        state = self._member.state
        ours = state.round == self._round and self._member.name in state.members
        if state.closed:
            return 0
        if not ours or len(state.members) < self._size or self._node.paused():
            if self._node.leaving:
                return 0  # this node goes, and its stand-ins end by themselves
            self._node.expect_stop()
            return 1
        if room(state, self._member.limits):
            self._node.pause()
        return 0

    def is_closed(self) -> bool:
        """See RendezvousHandler."""
        return self._member.state.closed is not None

    def set_closed(self) -> None:
        """See RendezvousHandler."""
        closed = Closed(1, "the job was closed")
        self._member.change(lambda state: replace(state, closed=state.closed or closed))

    @property
    def verdict(self) -> Closed | None:
        """How the job ended, None while it goes on."""
        return self._member.state.closed

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave. The job goes on without this node."""
        if not self._stopped:
            self._stopped = True
            self._end.set()
            self._node.stop()
            self._occupy(None)
            self._member.stop(timeout=2.0)
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:  # Python gives them back their default action as it ends
                    signal.signal(number, signal.SIG_IGN)
        return True


def _host_if_ours(host: str, port: int, wanted: bool | None, alone: bool) -> dist.TCPStore | None:
    """Host the store, if it is for this node to do; `alone`: for nobody else."""
    if wanted is False:
        return None
    if wanted is None and port and (not _is_ours(host) or _answers(host, port)):
        return None
    try:
        return host_store(LOOPBACK if alone else host, port)
    except OSError:
        if wanted or not _answers(host, port):
            raise
        return None  # another agent of this machine was faster


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
        return True
    except OSError:
        return False


def _is_ours(host: str) -> bool:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
        return True
    except OSError:
        return False


def _reachable(host: str, most_nodes: int) -> str:
    """The address of this machine for the others."""
    address = _address_towards(host)
    here = host in ("localhost", address)
    if most_nodes > 1 and ip_address(address).is_loopback and not here:
        raise RendezvousConnectionError(
            f"--rdzv-endpoint: {host} is {address} on this machine, where other nodes cannot reach "
            "it (see /etc/hosts); give its address instead of its name, or --local-addr"
        )
    return address


def _address_towards(host: str) -> str:
    """The address of this machine on the way to `host`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousConnectionError(f"--rdzv-endpoint: no way to {host}: {error}") from error
