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
the secret of the job; see secret.py). Nodes that stand together get ranks next to each other; see
place.py.
"""

import atexit
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic.exits import EXIT_INTERRUPTED, EXIT_WRONG_INPUT, SIGNALS, heeded, leaving_code
from elastic.group.cloud import Notice, parse_sources, watch
from elastic.group.health import HealthProblem, check_folders, check_node
from elastic.group.job_claim import NO_MARK, claim
from elastic.group.job_secret import SECRET_FILE, Secret, SecretError, find_secret
from elastic.group.member import Member, node_name
from elastic.group.membership import (
    Ask,
    Closed,
    Limits,
    Membership,
    over,
    ranks_of,
    room,
)
from elastic.group.sealed import SealedStore
from elastic.group.store import LOST, StoreClient, StoreLostError, host_store
from elastic.group.topology import own_place, tell
from elastic.node.agent import Node
from elastic.node.occupancy import Occupancy, OccupiedError
from elastic.node.program import Facts, differences, digest, torchrun_program
from elastic.node.zygote import start_early
from elastic.process import outlive
from elastic.world import PLACES, ROUND

logger = logging.getLogger(__name__)

TORCHRUN_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Environment variable: the signals that torchrun takes, from when it has started its workers."""
NOTICES = "PERDURE_NOTICES"
"""Environment variable: where to look for notices that this machine will be taken away: auto
(default), or some of aws, gcp, azure, file:PATH; empty for nowhere. See cloud.py."""
REJOIN_SECONDS = 3600.0
LOOPBACK = "127.0.0.1"
TELL_SECONDS = 10.0
MEET_SECONDS = 3600.0
"""How long a store that is away may keep a round from beginning."""
STORE_PATIENCE = 5.0
TORCH_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)
LOG_LEVEL = "LOGLEVEL"
"""Environment variable of torch's: level of its TORCH_LOGGERS."""
RECOVER_SECONDS, MAX_RECOVER_SECONDS = 10.0, 600.0
"""Before a node that was sent away is checked and may come back; doubled each time."""


def create_handler(parameters: RendezvousParameters) -> "PerdureRendezvous":
    """Make the handler of this node; connects to the store, or hosts it."""
    outlive()
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
        self._round, self._identity, self._secret = 0, "", Secret(b"")
        try:
            self._place = own_place(os.environ)
        except ValueError as error:
            raise self._refused(str(error)) from error
        self._mark = NO_MARK
        self._paused = -1
        """Generation in which all ranks of this node have paused, before it comes again."""
        self._recover_seconds = RECOVER_SECONDS
        self._round_store: dist.TCPStore | None = None
        self._occupancy: Occupancy | None = None
        self._stopped = self._interrupted = False
        name = node_name(local_address)
        self._member = Member(client, run_id, name, limits, self._wake_node, lease)
        self._node = Node(self._member, torchrun_program())
        self._node.start()
        self._end = threading.Event()
        if LOG_LEVEL not in os.environ:
            # How stand-ins end says nothing of the ranks, of which the node's agent tells.
            for logger_name in TORCH_LOGGERS:
                logging.getLogger(logger_name).setLevel(logging.CRITICAL)
        if threading.current_thread() is threading.main_thread():
            # torchrun would answer with a traceback and exit code 1, and save nothing.
            os.environ[TORCHRUN_SIGNALS] = "SIGQUIT"
            for number in heeded():
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
            self._member.start(self._secret, self._mark)
        elif self._sent_away():
            self._recover()
        timeout = REJOIN_SECONDS if self._round else self._timeout
        deadline = time.monotonic() + timeout
        while True:
            state = self._next_round(self._round, timeout, deadline)
            self._round, self._paused = state.round, -1
            info = self._meet(state)
            if info:
                places = dict(state.places)
                nodes = [(places.get(node, ""), ranks_of(state, node)) for node in state.members]
                os.environ |= {ROUND: str(state.round), PLACES: tell(nodes)}
                return info

    def _read_facts(self) -> Secret:
        """Wait until our zygote is warm, and knows what this node is going to train; returns the
        secret of the job."""
        # First, as the zygote reads them for the facts, and may wait for ever.
        deadline = time.monotonic() + self._timeout
        self._refuse(check_folders(self._node.folders(self._timeout)))
        facts = self._node.facts(max(0.0, deadline - time.monotonic()))
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
        several = self._member.limits.maximum > 1
        health = check_node(round_trip, folders=self._node.folders(0), network=several)
        if several:
            self._place = own_place(os.environ, health.domain)
        self._refuse(health.problems)

    def _refuse(self, problems: Sequence[HealthProblem]) -> None:
        """Tell of problems of this machine; refuses to join with one that others would wait for."""
        for problem in problems:
            logger.warning("health check: %s", problem)
        if any(problem.refuses for problem in problems):
            raise RendezvousConnectionError(
                f"this node does not join: {'; '.join(map(str, problems))}"
            )

    def _find_secret(self, facts: Facts) -> Secret:
        """The secret of the job; refuses to be a second job beside the one that was meant."""
        if self._hosted and self._member.limits.maximum == 1 and not self._secret_file:
            return Secret(os.urandom(32))  # nobody else is to know it
        try:
            secret = find_secret(self._secret_file, facts.directory)
            client = StoreClient(*self._store_address, self._timeout)
            self._mark = claim(client, self._run_id, secret, facts.directory).mark
            client.close()
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
        ranks = self._node.program.ranks
        member.ask(Ask(False, before, self._paused, ranks, self._identity, self._place))
        while True:
            if member.wait_for(in_next, 0.5):
                member.ask(None)
                return member.state
            state = member.state
            if member.refused():
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

        def ended(now: Membership) -> bool:
            return bool(now.closed) or now.round != state.round or over(now)

        member.wait_for(lambda now: bool(now.address) or ended(now), MEET_SECONDS)
        tell_at = time.monotonic() + TELL_SECONDS
        secret = self._secret.derive(f"round {state.round} of job {state.job}")
        self._node.page.share_secret(secret.derive("ranks").key)
        while not ended(member.state) and member.state.address:
            host, _, port = member.state.address.rpartition(":")
            connect = partial(
                dist.TCPStore,
                host,
                int(port),
                is_master=False,
                timeout=timedelta(seconds=30),
                wait_for_workers=False,
            )
            try:
                store = SealedStore(connect, secret, "agents")
                # Twice, as torch now has the agents wait for each other without a way out: one that
                # dies between the two is noticed here.
                for word in ("here", "all here"):
                    store.set(f"{word} {place}", b"")
                    # The first node looks at every other, all others at one key of its.
                    said = [f"{word} {other}" for other in range(state.size)] if not place else []
                    while not store.check(said or [word]) and not ended(member.state):
                        time.sleep(0.01)
                    if said:
                        store.set(word, b"")
                if ended(member.state):
                    return None
                return RendezvousInfo(
                    store,
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
        paused = self._node.paused()
        if not ours or over(state) or paused is not None:
            if self._node.leaving:
                return 0  # this node goes, and its stand-ins end by themselves
            self._paused = -1 if paused is None else paused
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
        """Leave. The job goes on without this node.

        Raises:
            JobClosed: torchrun is about to report that its workers failed. They are stand-ins, and
                have left with the exit code of the job.
        """
        if not self._stopped:
            self._stopped = True
            self._end.set()
            self._node.stop()
            self._occupy(None)
            self._member.stop(timeout=2.0)
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:  # Python gives them back their default action as it ends
                    signal.signal(number, signal.SIG_IGN)
            if isinstance(sys.exc_info()[1], ChildFailedError):
                if self._node.leaving:
                    raise self._gone()
                if closed := self._member.state.closed:
                    raise JobClosed(closed)
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
