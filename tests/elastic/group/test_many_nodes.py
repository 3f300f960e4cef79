"""More nodes than observers: all are heard, few change the document, any of them may be lost."""

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import count

import pytest

from elastic.group.job_secret import JobSecret
from elastic.group.member import Member
from elastic.group.membership import (
    OBSERVERS,
    MembershipFailure,
    MembershipLimits,
    MembershipRequest,
    is_foreign,
    lose,
    raise_alarm,
    room,
)
from elastic.group.store import StoreClient, host_store
from tests.distributed.jobs import soak

SECRET = JobSecret(b"of the job" * 4)
LIMITS = MembershipLimits(2, 9, first_call=1.5, settle=0.0)
NAMES = "abcdefgh"
LOST = MembershipFailure("b", None, 0, "node lost", 7.0)

swaps: Counter[str] = Counter()


class Counted(StoreClient):
    """Counts who swaps."""

    name = ""

    def swap(self, key, old, new):
        swaps[self.name] += 1
        return super().swap(key, old, new)


@pytest.fixture
def job():
    """job[name] → member; eight of them, in a round of a real store."""
    store = host_store("127.0.0.1", 0)

    class Job(dict):
        def add(self, name):
            client = Counted("127.0.0.1", store.port, 5.0)
            client.name = name
            self[name] = Member(client, "run", name, LIMITS, lambda: None, lease=4.0)
            self[name].start(SECRET)
            self[name].request(MembershipRequest())

        def lose(self, name):
            member = self.pop(name)
            member._end = True  # its thread ends without a word
            member._thread.join(5)

        def until(self, condition):
            for name, member in self.items():
                assert member.wait_for(condition, 20), (name, member.state)

        def come_again(self):
            before = next(iter(self.values())).state.round
            for member in self.values():
                member.request(MembershipRequest(after=before))
            self.until(lambda state: state.round > before and state.size == len(self))
            for member in self.values():
                member.request(None)

    members = Job()
    for name in NAMES:
        members.add(name)
    known = set(NAMES)
    members.until(lambda state: state.round and known <= {*state.members, *state.arrived})
    if members["a"].state.size < len(NAMES):  # the round began before a busy machine had all
        members.come_again()
    for member in members.values():
        member.request(None)
    yield members
    for member in members.values():
        member.stop(timeout=1.0)


@soak
def test_rounds_of_many_nodes_are_changes_by_few(job):
    members = job["a"].state.members
    others = set(members[OBSERVERS:])
    swaps.clear()
    lost = members[OBSERVERS]
    job.lose(lost)
    job.until(lambda state: lost not in state.members)
    job.come_again()
    before = next(iter(job.values())).state.round
    job.add("new")
    job.until(
        lambda state: state.round > before or room(state, LIMITS) == 1 or "new" in state.arrived
    )
    job.come_again()
    assert "new" in job["new"].state.members
    assert not others & set(swaps), swaps

    for one in job["new"].state.members[:OBSERVERS]:  # all who observe, at once
        job.lose(one)
    job.until(lambda state: set(state.members) <= set(job))
    job.come_again()


def test_where_ranks_stand_is_known_to_the_first_node_alone(job):
    first, *rest = job["a"].state.members
    swaps.clear()
    job[rest[-1]].change(lambda state: raise_alarm(state, state.round, 0))
    job.until(lambda state: state.alarm)
    alarm = job[first].state.alarm
    for name in rest:
        job[name].publish(alarm, f"of {name}")
    job[rest[0]].publish(alarm - 1, "of the alarm before")
    assert job[first].statuses(alarm) is None
    job[rest[0]].publish(alarm, f"of {rest[0]}")
    job[first].publish(alarm, f"of {first}")
    for _ in range(100):
        if job[first].statuses(alarm):
            break
        job[first].wait_for(lambda state: False, 0.1)
    assert job[first].statuses(alarm) == [f"of {name}" for name in (first, *rest)]
    assert job[rest[0]].statuses(alarm) is None
    assert sum(swaps.values()) <= OBSERVERS


@dataclass
class Clock:
    """The time of nodes without threads. It passes while they look, however busy the machine is."""

    now: float = 1000.0

    def monotonic(self):
        return self.now

    time = staticmethod(time.time)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("elastic.group.member.time", clock)
    return clock


@pytest.fixture
def nodes(clock):
    """Make nodes without threads, which look when the test has them look."""
    store = host_store("127.0.0.1", 0)
    clients = []

    def make(name, minimum, unit=1, identity=""):
        clients.append(Reading("127.0.0.1", store.port, 5.0))
        limits = MembershipLimits(minimum, 9, unit=unit, first_call=0.0, settle=0.0)
        member = Member(clients[-1], "run", name, limits, lambda: None, None)
        member.client, member.clock = clients[-1], clock
        member.client.clock = clock
        member.use_secret(SECRET)
        member.request(MembershipRequest(identity=identity))
        return member

    yield make
    for client in clients:
        client.close()


class Reading(StoreClient):
    """Counts how often the document is read. The store can be away for 3 s in a call for a key."""

    reads, away, clock = 0, "", None

    def get(self, key):
        self.reads += key.endswith("/state")
        self._lose(key)
        return super().get(key)

    def set(self, key, value):
        self._lose(key)
        super().set(key, value)

    def _lose(self, key):
        if self.away and f"/{self.away}" in key:
            self.away = ""
            self.clock.now += 3.0
            self.close()  # the call connects again


def look(members, until, seconds=10.0):
    """Have members look every 10 ms, until a condition is met: within `seconds` of their clock."""
    clock = members[0].clock
    end = clock.now + seconds
    while not until() and clock.now < end:
        clock.now += 0.01
        for member in members:
            member.look()
    assert until(), [member.state for member in members]


def trained_by(members):
    """Have them come to the first round."""
    last = members[-1]
    look(members, lambda: last.state.round == 1 and last.state.size == len(members))
    for member in members:
        member.request(None)
        member.look()


def test_nodes_that_come_one_by_one_are_not_a_document_each_to_read(nodes, clock, monkeypatch):
    members = [nodes(name, len(NAMES)) for name in NAMES]
    trained_by(members)
    first, last = members[0], members[-1]
    monkeypatch.setattr("elastic.group.member.poll_seconds", lambda nodes, observes: 60.0)
    monkeypatch.setattr("elastic.group.member.beat_seconds", lambda nodes: 60.0)
    monkeypatch.setattr("elastic.group.member.COUNTS_PER_BEAT", 60_000)
    for member in members:
        member._heartbeat.due = clock.now + 60.0
    before = last.client.reads
    for number in range(10):
        newcomer = nodes(f"z{number}", len(NAMES))
        if not number:  # at rest, the door is looked at once in a beat
            newcomer.look()
            newcomer.look()
            first._heartbeat.due = 0.0
        look([newcomer, *members], lambda name=newcomer.name: name in first.state.arrived)
    assert last.client.reads - before <= 1 + OBSERVERS
    assert len(last.state.arrived) < 10
    first._announced.due = 0.0
    look(members, lambda: len(last.state.arrived) == 10)


def test_a_node_is_lost_by_the_time_that_it_gave_itself(nodes, monkeypatch):
    members = [nodes(name, 5) for name in NAMES[:5]]
    trained_by(members)
    first, *_, slow, quick = members
    for member, seconds in (slow, 60.0), (quick, 0.3), *((one, 0.3) for one in members[:3]):
        monkeypatch.setattr(
            "elastic.group.member.beat_seconds", lambda nodes, seconds=seconds: seconds
        )
        member._heartbeat.due = 0.0
        member.look()
    look(members[:3], lambda: quick.name not in first.state.members)
    assert slow.name in first.state.members


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("amid", ["version", "state", "beat"])
def test_time_that_a_store_was_away_extends_no_lease(nodes, clock, amid, times):
    """Nodes were reading the document, or beat, when it went; it may go twice."""
    members = [nodes(name, 3) for name in NAMES[:3]]
    trained_by(members)
    first, second, silent = members
    look(members, lambda end=clock.now + 3.0: clock.now >= end)
    for _ in range(times):
        began, ended = clock.now, []
        for member in members:  # for all of them it is the same time
            clock.now, member.client.away = began, amid
            look([member], lambda client=member.client: not client.away)
            ended.append(clock.now)
        clock.now = max(ended)
    look([first, second], lambda: silent.name not in first.state.members, seconds=3.0)


def test_a_silent_node_is_lost_sooner_where_a_rank_has_lost_a_peer(nodes, monkeypatch):
    monkeypatch.setattr("elastic.group.membership.LEASE_SECONDS", 60.0)
    members = [nodes(name, 3) for name in NAMES[:3]]
    trained_by(members)
    first, other, silent = members
    first.expect_loss(20.0)
    look([first, other], lambda: silent.name not in first.state.members)
    assert first.state.members == (first.name, other.name)


def test_a_node_that_beats_late_is_given_time_and_a_dead_one_is_not(nodes, clock):
    """As on a machine with more to do than it has cores."""
    members = [nodes(name, 3) for name in NAMES[:3]]
    trained_by(members)
    first, slow, dead = members
    for _ in range(4):  # it gets a core every 0.9 s
        end = clock.now + 0.9
        look([first, dead], lambda end=end: clock.now > end)
        slow.look()
    first.expect_loss(60.0)
    look([first], lambda: dead.name not in first.state.members, 2.0)
    for _ in range(2):
        end = clock.now + 0.9
        look([first], lambda end=end: clock.now > end)
        slow.look()
    assert slow.name in first.state.members


def test_three_of_four_nodes_are_a_replica_of_two_and_a_spare(nodes):
    members = {name: nodes(name, 4, unit=2) for name in "abcd"}

    def come(*names):
        """To the next round, which so many are to train in; returns its nodes and its spares."""
        before = members[names[0]].state.round
        for name in names:
            members[name].request(MembershipRequest(after=before, paused=0))
        here = [members[name] for name in names]
        size = len(names) // 2 * 2

        def begun():
            return all(m.state.round > before and m.state.size == size for m in here)

        look(here, begun)
        for member in here:
            if member.name in member.state.members:
                member.request(None)
                member.look()
        return here[0].state.members, here[0].state.arrived

    assert come(*"abcd") == (tuple("abcd"), ())
    for member in members.values():
        member.limits = replace(member.limits, minimum=1)
    members["b"].change(lambda state: lose(state, "a", 0.0))
    assert come(*"bcd") == (tuple("cd"), ("b",))
    assert room(members["b"].state, members["b"].limits) == 0, "training goes on"
    members["a"] = nodes("e", 1, unit=2)
    look([*members.values()], lambda: room(members["c"].state, members["c"].limits) == 2)
    assert come(*"bcda") == (tuple("cdbe"), ())


def test_a_node_of_another_version_reads_what_it_can_and_changes_nothing(nodes, caplog):
    """The document of an older version lacks fields; a newer one has others, also in what its nodes
    ask for, and beats of another form."""
    members = [nodes(name, 2, identity="ours") for name in "ab"]
    trained_by(members)
    first, secret = members[0], SECRET.derive("membership")
    key, client = f"{first.keys.prefix}/state", first.client
    body = json.loads(secret.open(key, client.get(key)))
    older = {name: body[name] for name in ("version", "round", "job", "identity", "members")}
    for text in older, {**body, "later": 1, "cause": {**asdict(LOST), "later": 2}}:
        document = secret.seal(key, json.dumps(text).encode())
        client.set(key, document)
        stranger = nodes("z", 1, identity="theirs")
        look([stranger], lambda one=stranger: one.state.identity == "ours")
        assert is_foreign(stranger.state, "z", "theirs")
        assert stranger.state.members == ("a", "b")
        stranger.change(lambda state: replace(state, members=()))
        stranger.request(MembershipRequest(leaves=True))
        stranger.look()
        assert client.get(key) == document

    client.append(f"{first.keys.prefix}/door", b"c\n")
    beat, ask = (
        f"{first.keys.prefix}/beat/c",
        {**asdict(MembershipRequest(identity="ours")), "later": 1},
    )

    counters = count(1)

    def arrived():
        text = json.dumps([next(counters), ask, 0.2, "later"])
        client.set(beat, secret.seal(beat, text.encode()))
        return "c" in first.state.arrived

    look(members, arrived)
    assert "internal error" not in caplog.text


def test_only_nodes_that_live_refuse_one_that_would_train_something_else(nodes):
    members = [nodes(name, 5, identity="ours") for name in NAMES[:5]]
    trained_by(members)
    stranger, last = nodes("z", 1, identity="theirs"), members[-1]
    look([stranger], lambda: stranger.state.identity == "ours")
    assert not stranger.refused(), "nobody was seen to live yet"
    # All observers are gone, and one node lives: it takes their place, and is not lost.
    look([stranger, last], lambda: stranger.state.members == (last.name,))
    assert stranger.refused()
    again = nodes("y", 1, identity="theirs")
    look([again], lambda: again.state.members == ("y",))
    assert again.state.identity == "theirs"
    assert not again.refused()
