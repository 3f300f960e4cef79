"""More nodes than observers: all are heard, few change the document, any of them may be lost."""

from collections import Counter

import pytest

from elastic.membership import OBSERVERS, Ask, Limits, raise_alarm, room
from elastic.rendezvous import Member
from elastic.secret import Secret
from elastic.store import StoreClient, host_store

SECRET = Secret(b"of the job" * 4)
LIMITS = Limits(2, 9, first_call=1.5, settle=0.0)
NAMES = "abcdefgh"

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
            self[name] = Member(client, "run", name, LIMITS, lambda: None, lease=2.0)
            self[name].start(SECRET)
            self[name].ask(Ask())

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
                member.ask(Ask(after=before))
            self.until(lambda state: state.round > before and state.size == len(self))
            for member in self.values():
                member.ask(None)

    members = Job()
    for name in NAMES:
        members.add(name)
    members.until(lambda state: state.round == 1 and state.size == len(NAMES))
    for member in members.values():
        member.ask(None)
    yield members
    for member in members.values():
        member.stop(timeout=1.0)


def test_rounds_of_many_nodes_are_changes_by_few(job):
    members = job["a"].state.members
    others = set(members[OBSERVERS:])
    swaps.clear()
    lost = members[OBSERVERS]
    job.lose(lost)
    job.until(lambda state: lost not in state.members)
    job.come_again()
    job.add("new")
    job.until(lambda state: state.round > 2 or room(state, LIMITS) == 1 or "new" in state.arrived)
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
    job[rest[-1]].change(lambda state: raise_alarm(state, 1, 0))
    job.until(lambda state: state.alarm)
    alarm = job[first].state.alarm
    for name in rest:
        job[name].stand(alarm, f"of {name}")
    job[rest[0]].stand(alarm - 1, "of the alarm before")
    assert job[first].standings(alarm) is None
    job[rest[0]].stand(alarm, f"of {rest[0]}")
    job[first].stand(alarm, f"of {first}")
    for _ in range(100):
        if job[first].standings(alarm):
            break
        job[first].wait_for(lambda state: False, 0.1)
    assert job[first].standings(alarm) == [f"of {name}" for name in (first, *rest)]
    assert job[rest[0]].standings(alarm) is None
    assert sum(swaps.values()) <= OBSERVERS
