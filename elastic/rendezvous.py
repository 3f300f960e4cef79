"""The rendezvous handler of `torchrun --rdzv-backend perdure …`.

The handler is registered in torch's entry point group `torchrun.handlers`, and implements torch's
public `RendezvousHandler`. torch's own handlers use one store for all rounds (restarted ranks read
addresses of dead ranks), notice lost nodes only when a node re-joins, and cannot add a node without
ending the job. This handler gives every round a new store; membership.py decides its nodes.

`--rdzv-conf` takes:

    is_host       1: host the store on this node, 0: never; default: host it if the endpoint is an
                  address of this machine and nobody hosts a store there
    join_timeout  seconds that a new node waits for a round, default 600; a node that has trained
                  waits an hour
    first_call    seconds, default 3; see `MembershipLimits`
    lease         seconds without a heartbeat after which a node is lost, default 1.2
    restarts      failures within an hour after which ranks are restarted, default 30
    unit          each round's number of ranks is a multiple of this, default 1; the unit in the
                  program's own description of the job (program.py) comes first
    secret        file with the secret of the job; see job_secret.py
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

from elastic.exits import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_INTERRUPTED,
    EXIT_WRONG_INPUT,
    SIGNALS,
    handled_signals,
    leaving_code,
)
from elastic.group.cloud import CloudNotice, parse_sources, watch
from elastic.group.health import HealthProblem, check_folders, check_node
from elastic.group.job_claim import NO_MARK, claim
from elastic.group.job_secret import SECRET_FILE, JobSecret, JobSecretError, find_secret
from elastic.group.member import Member, node_name
from elastic.group.membership import (
    Membership,
    MembershipEnd,
    MembershipFailure,
    MembershipLimits,
    MembershipRequest,
    close,
    ranks_of,
    room,
    round_over,
    set_address,
)
from elastic.group.sealed import SealedStore
from elastic.group.store import STORE_ERRORS, StoreClient, StoreLostError, connect_store, host_store
from elastic.group.topology import describe_places, own_place
from elastic.node.agent import NodeAgent
from elastic.node.occupancy import NodeDirectoryHold, NodeDirectoryOccupiedError
from elastic.node.program import NodeJobFacts, differences, digest, torchrun_program
from elastic.node.zygote import start_early
from elastic.process import tolerate_lost_output
from elastic.world import AGENT, JOB, PLACES, ROUND

logger = logging.getLogger(__name__)

TORCHRUN_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Environment variable: signals that torchrun handles, once it has started its workers."""
NOTICES = "PERDURE_NOTICES"
"""Environment variable: sources of notices that this machine will be taken away: auto (default), or
some of aws, gcp, azure, file:PATH, separated by commas; empty for none. See cloud.py."""
REJOIN_SECONDS = 3600.0
LOOPBACK = "127.0.0.1"
WARN_SECONDS = 10.0
MEET_SECONDS = 3600.0
"""Longest time that an unreachable store may delay the begin of a round."""
STORE_PATIENCE = 5.0
TORCH_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)
LOG_LEVEL = "LOGLEVEL"
"""torch's environment variable for the level of TORCH_LOGGERS."""
RECOVER_SECONDS, MAX_RECOVER_SECONDS = 10.0, 600.0
"""Seconds before a node that was removed for its failures is checked again; doubled each time up to
the maximum."""


def create_handler(parameters: RendezvousParameters) -> "PerdureRendezvous":
    """Create the rendezvous handler of this node. Connects to the store, or hosts it."""
    tolerate_lost_output()
    start_early()
    host, _, port = parameters.endpoint.rpartition(":")
    if not host:
        raise ValueError(f"--rdzv-endpoint {parameters.endpoint!r}: give HOST:PORT")
    alone = parameters.max_nodes == 1
    hosted = _host_if_ours(host, int(port), parameters.get_as_bool("is_host"), alone)
    if hosted and alone:
        host = LOOPBACK  # no other machine needs to reach the store
    limits = MembershipLimits(
        parameters.min_nodes,
        parameters.max_nodes,
        first_call=float(parameters.get("first_call", MembershipLimits.first_call)),
        restarts=int(parameters.get("restarts", MembershipLimits.restarts)),
        unit=int(parameters.get("unit", MembershipLimits.unit)),
    )
    address = LOOPBACK if alone else parameters.local_addr or _reachable(host, parameters.max_nodes)
    client = StoreClient(host, hosted.port if hosted else int(port), STORE_PATIENCE)
    return PerdureRendezvous(parameters, client, hosted, limits, address)


class _JobClosed(SystemExit):
    """Ends torchrun with the job's exit code, as there is no next round for this node. A
    `SystemExit`, because torchrun turns other exceptions into exit code 1 and a traceback."""

    def __init__(self, end: MembershipEnd) -> None:
        super().__init__(end.code)
        self.end = end
        if end.code != EXIT_WRONG_INPUT:  # the rank has printed the error already
            print(end.reason, file=sys.stderr, flush=True)


class PerdureRendezvous(RendezvousHandler):
    """torch's interface to this node's `Member` and `NodeAgent`. It handles signals only if it is
    created in the main thread."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        client: StoreClient,
        hosted: dist.TCPStore | None,
        limits: MembershipLimits,
        address: str,
    ) -> None:
        self._run_id, self._hosted, self._address = parameters.run_id, hosted, address
        self._secret_file: str | None = parameters.get("secret")
        self._timeout = float(parameters.get("join_timeout", 600))
        self._store_address = client.host, client.port
        self._round, self._identity, self._secret = 0, "", JobSecret(b"")
        try:
            self._place = own_place(os.environ)
        except ValueError as error:
            raise self._refusal(str(error)) from error
        self._mark = NO_MARK
        self._paused = -1
        """Generation in which this node's ranks have paused for the next round; -1: none."""
        self._recover_seconds = RECOVER_SECONDS
        self._round_store: dist.TCPStore | None = None
        self._occupancy: NodeDirectoryHold | None = None
        self._stopped = self._interrupted = False
        lease = float(parameters.get("lease", 0)) or None
        name = node_name(address)
        self._member = Member(client, self._run_id, name, limits, self._wake_node, lease)
        self._node = NodeAgent(self._member, torchrun_program())
        self._node.start()
        self._end = threading.Event()
        if LOG_LEVEL not in os.environ:
            # torchrun's processes are stand-ins (standin.py), whose exit codes say nothing about
            # their ranks. The agent logs how a rank ended.
            for logger_name in TORCH_LOGGERS:
                logging.getLogger(logger_name).setLevel(logging.CRITICAL)
        if threading.current_thread() is threading.main_thread():
            # torchrun would end with a traceback and exit code 1 on a signal, and save nothing.
            os.environ[TORCHRUN_SIGNALS] = "SIGQUIT"
            for number in handled_signals():
                signal.signal(number, self._on_signal)
        watch(parse_sources(os.environ.get(NOTICES, "auto")), self._on_notice, self._end)
        atexit.register(self.shutdown)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Signal handler: the first signal makes the node leave, a second Ctrl-C exits at once."""
        if self._interrupted and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)  # the kernel kills the processes that this one has started
        self._interrupted = self._interrupted or number == signal.SIGINT
        idle = not self._node.busy and not self._member.state.closed
        how = "Ctrl-C; the next one ends it at once" if self._interrupted else ""
        self._node.leave(how or signal.Signals(number).name, leaving_code(number))
        if idle:
            raise self._left()

    def _left(self) -> "_JobClosed":
        return _JobClosed(
            MembershipEnd(self._node.leaving, "this node has left; the same command resumes")
        )

    def _on_notice(self, notice: CloudNotice) -> None:
        left = "" if notice.seconds is None else f", in {notice.seconds:.0f} s"
        if notice.what == "rebalance":  # a raised risk, which may last for days
            logger.warning("%s: this machine may be taken away soon", notice.source)
        else:
            self._node.leave(f"{notice.source}: {notice.what}{left}")

    def _wake_node(self) -> None:
        self._node.wake()

    def get_backend(self) -> str:
        return "perdure"

    @property
    def use_agent_store(self) -> bool:
        """True: ranks connect through the round's store, hosted by the agent of group rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round that includes this node. Returns the round's store, this node's
        rank and the number of nodes. Called by torchrun. Sets environment variables that describe
        the round to the ranks.

        Raises:
            _JobClosed: there is no next round for this node.
            RendezvousConnectionError: this machine is unfit, or the store does not answer.
            RendezvousTimeoutError: too few nodes came in time, or the program's imports took too
                long.
        """
        # A node is checked before it arrives, as the members pause their training for an arrival.
        if not self._round:
            self._check_health()
            self._secret = self._read_facts()
            self._member.start(self._secret, self._mark)
        elif reason := self._sent_away():
            if reason.unfit:  # the health checks did not find the fault, and would pass again
                why = f"this node does not join again: {reason.why}; take this machine out"
                raise _JobClosed(MembershipEnd(EXIT_DO_NOT_REQUEUE, why))
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
                os.environ |= {ROUND: str(state.round), PLACES: describe_places(nodes)}
                os.environ |= {JOB: state.job, AGENT: str(os.getpid())}
                return info

    def _read_facts(self) -> JobSecret:
        """Get the description of the job from its program ([Note: facts] in program.py), and take
        this node's limits and identity from it. Returns the job's secret. Raises the refusal if
        this node cannot train."""
        # Folders are checked first: the process that runs the description may block on them.
        deadline = time.monotonic() + self._timeout
        self._refuse(check_folders(self._node.folders(self._timeout)))
        facts = self._node.facts(max(0.0, deadline - time.monotonic()))
        if facts is None:
            raise RendezvousTimeoutError(
                f"the imports of {self._node.program.package or 'torch'} take longer than "
                f"{self._timeout:.0f} s on this node (--rdzv-conf join_timeout)"
            )
        if facts.error:
            raise self._refusal(facts.error)
        member = self._member
        member.limits = replace(
            member.limits, most_ranks=facts.most_ranks, unit=facts.unit or member.limits.unit
        )
        secret = self._find_secret(facts)
        if facts.identity:
            self._identity = digest(facts.identity)
            key, text = self._identity_key(self._identity), json.dumps(facts.identity).encode()
            with suppress(StoreLostError):  # only error messages use the value
                client = StoreClient(*self._store_address, STORE_PATIENCE)
                client.set(key, secret.seal(key, text))
        return secret

    def _identity_key(self, identity: str) -> str:
        return f"perdure/{self._run_id}/identity/{identity}"

    def _foreign_job(self) -> "_JobClosed":
        """Returns the error of a node that would train something else than the job."""
        identity, key = None, self._identity_key(self._member.state.identity)
        with suppress(StoreLostError):
            client = StoreClient(*self._store_address, STORE_PATIENCE)
            identity = self._secret.open(key, client.get(key) or b"")
        facts = self._node.facts(0) or NodeJobFacts()
        differing = differences(facts.identity, json.loads(identity or b"{}"))
        return self._refusal(
            f"this node does not join job {self._run_id!r}, as it would train something else: "
            f"{differing}; give it the same recipe, code and data, or another --rdzv-id"
        )

    def _refusal(self, why: str) -> "_JobClosed":
        print(f"error: {why}", file=sys.stderr, flush=True)
        return _JobClosed(MembershipEnd(EXIT_WRONG_INPUT, why))

    def _check_health(self) -> None:
        """Check this machine; raise an error if a problem keeps this node from joining."""

        def round_trip() -> float:
            client, times = StoreClient(*self._store_address, STORE_PATIENCE), []
            client.get("health")  # this request opens the connection
            for _ in range(5):  # the shortest counts, as this machine is busy with imports
                started = time.monotonic()
                client.get("health")
                times.append(time.monotonic() - started)
            return min(times)

        try:  # a store that is restarting is no fault of this machine, so wait for it
            StoreClient(*self._store_address, self._timeout).get("health")
        except StoreLostError as error:
            raise RendezvousConnectionError(str(error)) from error
        several = self._member.limits.maximum > 1
        health = check_node(round_trip, folders=self._node.folders(0), network=several)
        if several:
            self._place = own_place(os.environ, health.domain)
        self._refuse(health.problems)

    def _refuse(self, problems: Sequence[HealthProblem]) -> None:
        """Log problems of this machine; raise an error if one of them keeps it from joining."""
        for problem in problems:
            logger.warning("health check: %s", problem)
        if any(problem.refuses for problem in problems):
            raise RendezvousConnectionError(
                f"this node does not join: {'; '.join(map(str, problems))}"
            )

    def _find_secret(self, facts: NodeJobFacts) -> JobSecret:
        if self._hosted and self._member.limits.maximum == 1 and not self._secret_file:
            return JobSecret(os.urandom(32))  # no other node needs the secret
        try:
            secret = find_secret(self._secret_file, facts.directory)
            client = StoreClient(*self._store_address, self._timeout)
            self._mark = claim(client, self._run_id, secret, facts.directory).mark
            client.close()
        except StoreLostError as error:
            raise RendezvousConnectionError(str(error)) from error
        except JobSecretError as error:
            raise self._refusal(str(error)) from error
        return secret

    def _sent_away(self) -> MembershipFailure | None:
        """Returns the failure for which this node was removed; None if it was not."""
        state, name = self._member.state, self._member.name
        struck = () if name in state.members or state.closed else state.struck
        return next((report for report in struck if report.node == name), None)

    def _recover(self) -> None:
        why = "this node was removed from the job for its failures"
        while True:
            logger.warning("%s; checking it in %.0f s", why, self._recover_seconds)
            deadline = time.monotonic() + self._recover_seconds
            self._recover_seconds = min(2 * self._recover_seconds, MAX_RECOVER_SECONDS)
            while time.monotonic() < deadline:
                if self._node.leaving or self._member.wait_for(lambda now: bool(now.closed), 0.5):
                    return
            try:
                self._check_health()
                logger.warning("this node passes its health checks again, and joins the job again")
                return
            except RendezvousConnectionError as error:
                why = str(error)

    def _next_round(self, before: int, timeout: float, deadline: float) -> Membership:
        """Wait for a round after `before` that includes this node."""
        member, name = self._member, self._member.name
        if self._node.leaving:
            raise self._left()

        def in_next(state: Membership) -> bool:
            return state.round > before and name in state.members

        present, ended, spare = bool(before), None, False
        ranks = self._node.program.ranks
        member.request(
            MembershipRequest(False, before, self._paused, ranks, self._identity, self._place)
        )
        while True:
            if member.wait_for(in_next, 0.5):
                member.request(None)
                return member.state
            state = member.state
            if member.refused():
                raise self._foreign_job()
            present = present or name in state.arrived
            if state.closed and present:
                raise _JobClosed(state.closed)
            if state.closed and not ended:
                ended = state.closed
                logger.warning(
                    "an earlier job %r of this store has ended (%s); a new job begins when all "
                    "nodes of the earlier one have left", self._run_id, ended.reason,
                )  # fmt: skip
            if self._node.leaving:
                raise self._left()
            limits, waits = member.limits, name in state.arrived and name not in state.members
            if waits and state.members and not room(state, limits):
                deadline = time.monotonic() + timeout  # a spare waits as long as the job runs
                if not spare:
                    spare = True
                    why = "the job has no room or no work for more"
                    if room(state, replace(limits, unit=1)):
                        why = f"a replica of the model takes {limits.unit} ranks"
                    logger.warning(
                        "%d node(s) train, and %s: this node waits as a spare",
                        len(state.members), why,
                    )  # fmt: skip
            if time.monotonic() < deadline:
                continue
            if ended:  # this node came after the job's end, and no other node came
                raise _JobClosed(ended)
            of_replicas = f", in replicas of {limits.unit} ranks" if limits.unit > 1 else ""
            raise RendezvousTimeoutError(
                f"{len(state.arrived)} node(s) are here, at least {limits.minimum} are "
                f"needed{of_replicas}, and no more came within {timeout:.0f} s; start more nodes "
                f"with the same secret ({SECRET_FILE}), or lower --nnodes MIN:MAX"
            )

    def _meet(self, state: Membership) -> RendezvousInfo | None:
        """Wait for all nodes of a round in its store; returns None if the round ends meanwhile."""
        member, group_rank = self._member, state.members.index(self._member.name)
        # The first node holds the run directory for the whole launch.
        self._occupy(state.job if group_rank == 0 else None)
        if group_rank == 0:
            self._round_store = host_store(self._address, 0)
            address = f"{self._address}:{self._round_store.port}"
            member.change(partial(set_address, round=state.round, address=address))

        def ended(now: Membership) -> bool:
            return bool(now.closed) or now.round != state.round or round_over(now)

        member.wait_for(lambda now: bool(now.address) or ended(now), MEET_SECONDS)
        warn_at = time.monotonic() + WARN_SECONDS
        secret = self._secret.derive(f"round {state.round} of job {state.job}")
        # Ranks get a secret derived from the agents' secret, so they cannot write as agents.
        self._node.page.share_secret(secret.derive("ranks").key)
        while not ended(member.state) and member.state.address:
            host, _, port = member.state.address.rpartition(":")
            connect = partial(connect_store, host, int(port), 30.0)
            try:
                store = SealedStore(connect, secret, "agents")
                # Nodes meet twice: an agent that dies in the first wait is noticed in the second.
                for word in ("here", "all here"):
                    store.set(f"{word} {group_rank}", b"")
                    # The first node waits for all nodes, and all nodes then wait for the first.
                    nodes = range(state.size) if group_rank == 0 else ()
                    keys = [f"{word} {node}" for node in nodes]
                    while not store.check(keys or [word]) and not ended(member.state):
                        time.sleep(0.01)
                    if keys:
                        store.set(word, b"")
                if ended(member.state):
                    return None
                address_info = RendezvousStoreInfo(host, int(port))
                return RendezvousInfo(store, group_rank, state.size, address_info)
            except STORE_ERRORS:
                time.sleep(0.1)  # the store's host has probably died, and its lease ends soon
                if time.monotonic() > warn_at:
                    warn_at = math.inf
                    logger.warning(
                        "%s, where the nodes of round %d meet, cannot be reached from this node; "
                        "still trying (--local-addr sets the address that a node gives to others)",
                        member.state.address, state.round,
                    )  # fmt: skip
        return None

    def _occupy(self, job: str | None) -> None:
        """Hold the run directory for `job`; release it if `job` is None."""
        facts = self._node.facts(0)
        if job and not self._occupancy and facts and facts.directory:
            try:
                self._occupancy = NodeDirectoryHold(Path(facts.directory), job)
            except NodeDirectoryOccupiedError as occupied:
                refused = self._refusal(str(occupied))
                self._member.change(partial(close, end=refused.end))
                raise refused from occupied
        elif not job and self._occupancy:
            self._occupancy.release()
            self._occupancy = None

    def num_nodes_waiting(self) -> int:
        """Returns 1 to make torchrun end its workers and call `next_rendezvous`: at once if a node
        is lost or has left, and after a pause of the ranks if nodes have arrived."""
        state = self._member.state
        in_round = state.round == self._round and self._member.name in state.members
        if state.closed:
            return 0
        paused = self._node.paused()
        if not in_round or round_over(state) or paused is not None:
            if self._node.leaving:
                return 0  # this node leaves, and torchrun's stand-ins end by themselves
            self._paused = -1 if paused is None else paused
            # The SIGTERM that follows comes from torchrun, and is no notice.
            self._node.expect_stop()
            return 1
        if room(state, self._member.limits):
            self._node.pause()  # once all ranks have paused, the next call returns 1
        return 0

    def is_closed(self) -> bool:
        return self._member.state.closed is not None

    def set_closed(self) -> None:
        self._member.change(partial(close, end=MembershipEnd(1, "the job was closed")))

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Leave the job, which continues without this node. Raises _JobClosed if torchrun would
        report failed workers, as these are stand-ins (standin.py) and ended with the job."""
        if not self._stopped:
            self._stopped = True
            self._end.set()  # ends the thread that polls the cloud
            self._node.stop()
            self._occupy(None)
            self._member.stop(timeout=2.0)
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:  # Python restores their default action when it exits
                    signal.signal(number, signal.SIG_IGN)
            if isinstance(sys.exc_info()[1], ChildFailedError):
                if self._node.leaving:
                    raise self._left()
                if closed := self._member.state.closed:
                    raise _JobClosed(closed)
        return True


def _host_if_ours(host: str, port: int, wanted: bool | None, alone: bool) -> dist.TCPStore | None:
    """Host the job's store in this process; returns None if another process hosts it. `wanted`: the
    setting `is_host`. `alone`: only this machine uses the store."""
    if wanted is False:
        return None
    if wanted is None and port and (not _is_ours(host) or _answers(host, port)):
        return None
    try:
        return host_store(LOOPBACK if alone else host, port)
    except OSError:
        if wanted or not _answers(host, port):
            raise
        return None  # another agent of this machine hosts the store


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
            probe.bind((address[0], 0))  # bind() works only for an address of this machine
        return True
    except OSError:
        return False


def _reachable(host: str, most_nodes: int) -> str:
    """Returns the address of this machine for other nodes: that of the interface towards `host`."""
    try:
        family, _, _, _, towards = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(towards)  # over UDP this sends nothing, and only selects the route
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousConnectionError(
            f"--rdzv-endpoint: this machine has no route to {host} ({error}); check the name and "
            "the network"
        ) from error
    present = host in ("localhost", address)
    if most_nodes > 1 and ip_address(address).is_loopback and not present:
        raise RendezvousConnectionError(
            f"--rdzv-endpoint: on this machine {host} is {towards[0]}, which other nodes cannot "
            "reach (see /etc/hosts); instead of the name give an address that they can reach, or "
            "--local-addr"
        )
    return address
