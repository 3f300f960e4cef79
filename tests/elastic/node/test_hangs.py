"""Who hangs: the world is counted, not what happens to be known of it."""

import json
import time
from dataclasses import asdict, replace

import pytest

from elastic.group.membership import Membership, raise_alarm
from elastic.node import watchdog
from elastic.node.progress import NodeProgressPage
from elastic.node.watchdog import NodeHangWatch, NodeRankStatus
from tests.checkpointing.faults import until

WAITING = NodeRankStatus(0, 7, "reduce", 4.0, 3.5, "collective")


class Group:
    """A membership of two nodes of which the other one says `texts[1]`."""

    name = "a"

    def __init__(self, other):
        self.state = raise_alarm(
            Membership(version=1, round=1, members=("a", "b"), size=2, ranks=1), 1, 0
        )
        self.texts = [None, json.dumps([asdict(one) for one in other])]

    def change(self, change):
        self.state = change(self.state)

    def publish(self, alarm, text):
        self.texts[0] = text

    def statuses(self, alarm):
        return self.texts if self.texts[0] is not None else None


@pytest.fixture
def judged(monkeypatch):
    """judged(ours, theirs) → the membership after an alarm at which these ranks stand so."""

    def judged(ours, theirs):
        group = Group(theirs)
        monkeypatch.setattr(watchdog, "take_dumps", lambda ranks: {})
        monkeypatch.setattr(watchdog, "rank_statuses", lambda *_: ours)
        watch, alarm = NodeHangWatch(group, NodeProgressPage.make()), group.state.alarm

        def seen():
            watch.look(group.state, (1, 0), {})
            return group.state.alarm != alarm or group.state.suspicion

        assert until(seen, 5)
        return group.state

    return judged


def test_who_waits_for_a_rank_without_a_process_is_not_blamed(judged):
    state = judged([WAITING], [])
    assert (state.alarm, state.members, state.suspects) == (0, ("a", "b"), ())
    behind = replace(WAITING, rank=1, step=6, phase="step", where="elsewhere")
    assert judged([WAITING], [behind]).suspects == (1,)
    done = replace(WAITING, rank=1, phase="end", seconds=0.0)
    assert judged([WAITING], [done]).suspects == (0,), "nobody else can be waited for"


def test_a_node_that_never_starts_its_rank_is_lost(judged):
    state = judged([replace(WAITING, seconds=3.5 + watchdog.MISSING_SECONDS + 0.1)], [])
    assert (state.members, state.lost.node) == (("a",), "b")
    assert state.lost.why.startswith("no process of a rank for 5 s")
    assert state.lost.at == pytest.approx(time.time(), abs=5)
