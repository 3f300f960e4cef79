"""Rounds, leases and generations: whatever happens in whatever order, nodes end up in one round."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.group.membership import (
    OBSERVERS,
    Membership,
    MembershipEnd,
    MembershipFailure,
    MembershipLeases,
    MembershipLimits,
    MembershipRequest,
    all_nodes,
    arrive,
    complete,
    fail,
    heed,
    heed_all,
    is_foreign,
    leave,
    lose,
    newer,
    observers,
    room,
    round_over,
    watched_nodes,
)
from elastic.group.membership import enter as newcomer
from elastic.group.topology import group_by_place, levels

LIMITS = MembershipLimits(minimum=2, maximum=3)


def begin(*nodes, limits=LIMITS, state=None, ranks=1):
    """The round after `state` with these nodes; `rack1.b` is b, which stands in rack1."""
    state = state or Membership()
    for node in nodes:
        place, _, name = node.rpartition(".")
        state = arrive(state, name, ranks, place=place)
    return complete(state, limits, quiet=99)


def failure(rank=0, step=5, at=0.0):
    return MembershipFailure("a", rank, step, "SIGKILL", at)


def test_a_full_round_begins_at_once_and_a_small_one_after_the_call():
    two = arrive(arrive(Membership(), "b"), "a")
    assert complete(two, LIMITS, quiet=1).round == 0
    assert complete(two, LIMITS, quiet=4).members == ("a", "b")
    assert complete(arrive(two, "c"), LIMITS, quiet=0).members == ("a", "b", "c")
    assert complete(arrive(Membership(), "a"), LIMITS, quiet=99).round == 0


def test_a_newcomer_waits_until_everybody_has_come_again():
    state = arrive(begin("b", "c"), "a")
    assert room(state, LIMITS) == 1
    assert complete(state, LIMITS, quiet=99) == state
    state = arrive(state, "b")
    assert complete(state, LIMITS, quiet=99) == state
    after = complete(arrive(state, "c"), LIMITS, quiet=0)
    assert (after.round, after.members, after.arrived) == (2, ("b", "c", "a"), ())


def test_who_is_too_many_waits_as_a_spare_and_takes_the_place_of_a_lost_node():
    state = begin("a", "b", "c", "d")
    assert state.members == ("a", "b", "c")
    assert state.arrived == ("d",)
    assert room(state, LIMITS) == 0
    state = lose(state, "b", now=7.0)
    assert len(state.members) < state.size
    after = begin("a", "c", state=state)
    assert after.members == ("a", "c", "d")
    assert after.cause == MembershipFailure("b", None, 0, "node lost", 7.0)


def test_nodes_without_work_are_spares_from_the_first_moment():
    limits = MembershipLimits(minimum=1, maximum=8, most_ranks=5)
    state = Membership()
    for node, ranks in (("a", 2), ("b", 2), ("c", 2), ("d", 1)):
        state = arrive(state, node, ranks)
    state = complete(state, limits, quiet=0)
    assert (state.members, state.arrived) == (("a", "b", "d"), ("c",))
    assert room(state, limits) == 0
    state = leave(state, "d")
    assert room(state, limits) == 0, "one rank has work, but not two"
    state = lose(state, "b", now=0.0)
    assert room(state, limits) == 1
    after = complete(arrive(state, "a", 2), limits, quiet=0.3)
    assert (after.members, after.uneven) == (("a", "c"), ())
    # Too few sequences for the nodes that are needed: the ranks say so.
    needed = MembershipLimits(minimum=2, maximum=8, most_ranks=1)
    assert begin("a", "b", "c", limits=needed).members == ("a", "b")


def test_who_would_train_something_else_does_not_get_in():
    state = arrive(Membership(), "a", identity="x")
    assert is_foreign(state, "b", "y")
    assert newcomer(state, "b", 1.0, identity="y") == state
    state = complete(state, MembershipLimits(1, 3), quiet=99)
    assert arrive(state, "b", identity="y") == state
    assert room(arrive(state, "b", identity="x"), MembershipLimits(1, 3)) == 1
    # The nodes of the job are gone: it is begun anew.
    anew = newcomer(lose(state, "a", now=0.0), "b", 1.0, identity="y")
    assert (anew.identity, anew.arrived) == ("y", ("b",))
    assert Membership.decode(anew.encode()) == anew


def test_nodes_come_and_go_in_whole_replicas():
    limits = MembershipLimits(minimum=1, maximum=8, unit=2)
    assert begin("a", limits=limits).round == 0, "no replica"
    assert complete(begin("a", "b", limits=limits), limits, 99).members == ("a", "b")
    state = begin("a", "b", "c", "d", limits=limits)
    state = lose(state, "a", now=7.0)
    assert state.broken == ("b",)
    assert Membership.decode(state.encode()) == state
    after = begin("b", "c", "d", limits=limits, state=state)
    assert (after.members, after.arrived, after.broken) == (("c", "d"), ("b",), ())
    assert room(after, limits) == 0
    back = arrive(after, "a")
    assert room(back, limits) == 2
    whole = begin("c", "d", limits=limits, state=back)
    assert whole.members == ("c", "d", "a", "b")
    assert leave(whole, "a", "d").broken == ("c", "b")
    assert begin("b", "c", limits=limits, state=leave(whole, "a", "d")).members == ("c", "b")
    # A replica that cannot do without a node keeps it, but for others that would take its place.
    often = replace(limits, strikes=1)
    assert fail(begin("a", "b", limits=often), 1, 0, failure(), often).members == (
        "a",
        "b",
    )
    assert fail(whole, whole.round, 0, failure(), often).members == ("c", "d", "b")


def test_nodes_of_many_ranks_make_replicas_by_themselves_and_others_together():
    limits = MembershipLimits(minimum=1, maximum=8, unit=4)
    state = Membership()
    for node, ranks in (("a", 2), ("b", 8), ("c", 4), ("d", 2), ("e", 2)):
        state = arrive(state, node, ranks)
    state = complete(state, limits, quiet=99)
    assert (state.members, state.arrived) == (("b", "c", "a", "d"), ("e",))
    assert leave(state, "b").broken == ()
    assert leave(state, "a").broken == ("d",)


def test_nodes_of_a_rack_are_neighbours_and_who_stays_keeps_its_place():
    limits = MembershipLimits(minimum=1, maximum=6)
    state = begin("r10.a", "r2.b", "r10.c", "r2.d", limits=limits)
    assert state.members == ("b", "d", "a", "c"), "racks in the order of their numbers"
    assert Membership.decode(state.encode()) == state
    # A spare of the rack takes the place of a lost node: all other racks keep their ranks.
    after = begin("r2.d", "r10.a", "r10.c", "r2.z", limits=limits, state=lose(state, "b", 0.0))
    assert after.members == ("d", "z", "a", "c")
    assert after.places == (("a", "r10"), ("c", "r10"), ("d", "r2"), ("z", "r2"))
    # A node of a new rack, or of none, comes last.
    coming = ("r2.d", "r2.z", "r10.a", "r10.c", "r1.y", "x")
    after = begin(*coming, limits=limits, state=after)
    assert after.members == ("d", "z", "a", "c", "x", "y")
    names = begin("node10", "node9", limits=limits).members
    assert names == ("node9", "node10")


def test_a_replica_is_of_one_rack_where_it_can_be():
    limits = MembershipLimits(minimum=1, maximum=8, unit=2)
    state = begin("r1.a", "r1.b", "r1.c", "r2.d", "r2.e", "r2.f", limits=limits)
    assert state.members == ("a", "b", "d", "e", "c", "f"), "only the last spans both"
    state = begin("r1.a", "r1.b", "r1.c", "r2.d", "r2.e", limits=limits)
    assert (state.members, state.arrived) == (("a", "b", "d", "e"), ("c",))
    # b has lost a, and joins c of its rack; nobody else is touched.
    lost = lose(state, "a", 0.0)
    after = begin("r1.b", "r2.d", "r2.e", "r2.f", "r1.c", limits=limits, state=lost)
    assert (after.members, after.arrived) == (("d", "e", "b", "c"), ("f",))
    # b, which has a part of the state, goes before two that stand in one rack.
    small = MembershipLimits(minimum=1, maximum=2, unit=2)
    lost = lose(begin("r1.a", "r1.b", limits=small), "a", 0.0)
    after = begin("r1.b", "r2.c", "r2.d", limits=small, state=lost)
    assert (after.members, after.arrived) == (("b", "c"), ("d",))


def test_what_a_node_states_is_bounded():
    for place in ("x" * 41, "a b", "a/b/c/d/e", 7, ["a"]):
        assert arrive(Membership(), "a", place=place).places == ()
        body = {**json.loads(begin("a", "b").encode()), "places": [[place], [0, -1]]}
        assert Membership.decode(json.dumps(body).encode()).places == ()
    numbered = begin("r1#10.a", "r1#9.b", "#2.c")
    assert (numbered.members, numbered.places) == (("c", "b", "a"), (("a", "r1"), ("b", "r1")))
    state = begin("r1.a", "b")
    assert state.places == (("a", "r1"),)
    assert leave(state, "a").places == ()
    back = arrive(leave(state, "a"), "a", place="r2")
    assert back.places == (("a", "r2"),)


def test_below_the_minimum_nothing_begins_until_a_node_comes():
    state = begin("a", state=leave(begin("a", "b"), "b"))
    assert state.round == 1
    assert begin("c", state=state).members == ("a", "c")


def test_one_failure_is_one_generation_however_many_ranks_report_it():
    state = begin("a", "b")
    after = fail(state, 1, 0, failure(), LIMITS)
    assert after.generation == 1
    assert fail(after, 1, 0, failure(rank=1), LIMITS) == after
    assert begin("a", "b", state=after).generation == 0


def test_a_rank_that_always_dies_in_the_same_step_ends_the_job():
    state = begin("a", "b")
    for generation in range(3):
        assert state.closed is None
        state = fail(state, 1, generation, failure(rank=1, step=7), LIMITS)
    assert state.closed
    assert state.closed.code == 93
    assert "rank 1 failed 3 times in a row in step 7" in state.closed.reason


def test_an_error_that_is_the_same_in_the_same_step_ends_the_job_whichever_rank_raises_it():
    def run(*failures):
        state = begin("a", "b", "c")
        for generation, one in enumerate(failures):
            state = fail(state, 1, generation, one, LIMITS)
        return state

    def raised(rank, error, step=7):
        return MembershipFailure("abc"[rank], rank, step, "exit code 1", 0.0, error)

    what = "RuntimeError: shapes (4x{} and 9x9) cannot be multiplied, tensor at 0x7f{}"
    unknown = MembershipFailure("c", None, 7, "rank 2 lost its connection to another", 0.0)
    same = [raised(rank, what.format(rank, rank)) for rank in (0, 2, 1)]
    closed = run(same[0], unknown, *same[1:]).closed
    assert closed.code == 93
    assert closed.reason.startswith("ranks 0, 1, 2 failed 3 times in a row in step 7, the last ")
    assert run(*same[:2], raised(1, "KeyError: 'loss'")).closed is None
    assert run(*same[:2], raised(1, what, step=8)).closed is None
    assert run(*[raised(rank, "") for rank in (0, 2, 1)]).closed is None, "they were killed"


def test_a_rank_whose_peer_is_gone_has_not_failed():
    limits = MembershipLimits(minimum=1, maximum=2, strikes=3)
    state = begin("a", "b", limits=limits)
    lost_connection = replace(failure(rank=1, step=7), rank=None)
    for generation, found in enumerate([failure(rank=1, step=7), lost_connection] * 2):
        assert state.members == ("a", "b")
        state = fail(state, 1, generation, found, limits)
    for generation in range(4, 8):
        state = fail(state, 1, generation, lost_connection, limits)
    assert (state.closed, state.generation) == (None, 8)


def test_what_a_process_has_mended_itself_counts_for_nothing():
    limits = MembershipLimits(minimum=1, maximum=2, strikes=2, restarts=2)
    state = begin("a", "b", limits=limits)
    mended = replace(failure(rank=1, step=1), error="MemoryError: 8", mended=True)
    for generation, found in enumerate([failure(step=1), mended, mended, mended, mended]):
        state = Membership.decode(fail(state, 1, generation, found, limits).encode())
        assert (state.closed, state.members, state.generation) == (None, ("a", "b"), generation + 1)
        assert state.failures[-1] == found, "the cause of what follows"
    others = replace(limits, strikes=9)
    state = fail(state, 1, 5, failure(rank=1, step=2), others)
    assert state.closed is None
    assert "3 failures within an hour" in fail(state, 1, 6, failure(step=3), others).closed.reason


def test_a_kill_from_outside_is_no_failing_step_and_no_strike():
    limits = MembershipLimits(minimum=1, maximum=3, strikes=3, restarts=9)
    state = begin("a", "b", "c", limits=limits)
    killed = [
        MembershipFailure("ab"[n % 2], n % 2, 7, "SIGKILL", 0.0, outside=True) for n in range(9)
    ]
    for generation, found in enumerate(killed):
        state = Membership.decode(fail(state, 1, generation, found, limits).encode())
        assert (state.closed, state.generation) == (None, generation + 1)
        assert state.members == ("a", "b", "c")
    assert "10 failures within an hour" in fail(state, 1, 9, killed[0], limits).closed.reason
    # Between two kills a step still fails.
    state = begin("a", "b", limits=LIMITS)
    found = [failure(rank=1, step=7), killed[0], failure(rank=1, step=7), killed[1], killed[1]]
    for generation, one in enumerate([*found, failure(rank=1, step=7)]):
        assert state.closed is None
        state = fail(state, 1, generation, one, LIMITS)
    assert "rank 1 failed 3 times in a row in step 7" in state.closed.reason
    # A kill in a later step shows that a restart did help.
    state = begin("a", "b", limits=LIMITS)
    found = [failure(rank=1, step=7, at=float(second)) for second in range(4)]
    found.insert(1, replace(killed[0], step=9))
    for generation, one in enumerate(found):
        assert state.closed is None
        state = fail(state, 1, generation, one, LIMITS)
    assert "rank 1 failed 3 times in a row in step 7" in state.closed.reason


def test_a_newcomer_that_cannot_start_is_sent_away_and_costs_the_others_no_restarts():
    limits = MembershipLimits(minimum=1, maximum=3, restarts=3)
    state = begin("a", "b", limits=limits)
    for visit in range(4):
        state = begin(*state.members, "c", limits=limits, state=state)
        for generation in range(3):
            assert "c" in state.members
            broken = MembershipFailure("c", 2, 0, "exit code 2", at=10.0 * visit + generation)
            state = fail(state, state.round, generation, broken, limits)
        assert (state.members, state.closed) == (("a", "b"), None)
        assert "it failed 3 times in a row in step 0" in state.lost.why


def test_a_step_that_fails_on_one_node_after_the_other_ends_the_job():
    limits = MembershipLimits(minimum=1, maximum=3)
    state = begin("a", "b", "c", limits=limits)
    for generation, node in enumerate("abb"):
        found = replace(failure(rank=1, step=7), node=node)
        state = fail(state, 1, generation, found, limits)
    assert "rank 1 failed 3 times in a row in step 7" in state.closed.reason


def test_a_failure_while_others_have_ended_their_round_ends_it_for_this_node_too():
    state = fail(arrive(begin("a", "b"), "b"), 1, 0, failure(), LIMITS)
    assert (state.members, state.generation, state.struck) == (("b",), 0, ())
    assert begin("a", "b", state=state).round == 2


def test_a_store_outlives_a_job():
    ended = replace(begin("a", "b"), closed=MembershipEnd(0, "finished"), failures=(failure(),))
    assert newcomer(ended, "c", 1.0) == ended, "a and b are still there"
    nobody = leave(leave(ended, "a"), "b")
    fresh = newcomer(nobody, "c", 1.0)
    assert (fresh.closed, fresh.failures, fresh.arrived) == (None, (), ("c",))
    assert fresh.version == 1000, "newer than all of an earlier job"
    assert newcomer(fresh, "c", 1.0) == fresh
    assert complete(newcomer(fresh, "d", 1.0), LIMITS, quiet=1).round == 1, "the first call is made"
    again = complete(newcomer(fresh, "d", 1.0), LIMITS, quiet=4)
    assert (again.round, again.first, again.cause) == (2, 2, None)


def test_failures_are_counted_over_an_hour():
    limits = replace(LIMITS, restarts=3)
    often, seldom = begin("a", "b"), begin("a", "b")
    for number in range(4):
        often = fail(often, 1, number, failure(step=number, at=number * 60.0), limits)
        seldom = fail(seldom, 1, number, failure(step=number, at=number * 2000.0), limits)
    assert often.closed
    assert "4 failures within an hour" in often.closed.reason
    assert seldom.closed is None
    assert seldom.generation == 4


def test_a_node_that_fails_often_is_sent_away_and_may_come_back():
    limits = MembershipLimits(minimum=1, maximum=3, strikes=3)
    state = begin("a", "b", "c", limits=limits)
    for number in range(1, 4):
        assert state.members == ("a", "b", "c")
        state = fail(state, 1, state.generation, failure(step=number, at=number * 60.0), limits)
    assert state.members == ("b", "c")
    assert state.generation == 2
    assert state.lost.why == "sent away: 3 failures within an hour"
    state = Membership.decode(state.encode())
    state = begin("a", "b", "c", limits=limits, state=state)
    assert (state.round, state.members) == (2, ("b", "c", "a"))
    state = fail(state, 2, 0, failure(step=4, at=240.0), limits)
    assert state.members == ("b", "c", "a"), "counted anew"


def test_a_node_that_computes_wrongly_leaves_at_once_whatever_others_report():
    state, wrong = begin("a", "b", "c"), replace(failure(), why="b and c contradicted it")
    wrong = replace(wrong, unfit=True)
    lost_peer = MembershipFailure("b", None, 5, "rank 1 lost its connection to another", 0.0)
    for before in (state, fail(state, 1, 0, lost_peer, LIMITS)):
        after = fail(before, 1, 0, wrong, LIMITS)
        assert (after.members, after.closed) == (("b", "c"), None)
        assert after.lost.why == "sent away: b and c contradicted it"
        assert after.struck == (wrong,)
        assert fail(after, 1, 0, wrong, LIMITS) == after
    needed = fail(begin("a", "b"), 1, 0, wrong, LIMITS)
    assert needed.closed.code == 93
    assert needed.closed.reason.startswith("b and c contradicted it. The job has too few nodes")


def test_nobody_is_sent_away_who_is_needed():
    limits = MembershipLimits(minimum=2, maximum=3, strikes=1)
    state = fail(begin("a", "b"), 1, 0, failure(), limits)
    assert (state.members, state.generation) == (("a", "b"), 1)


def test_who_comes_back_without_its_ranks_ends_the_round_and_who_has_paused_does_not():
    state = begin("a", "b", "c")
    lost = fail(state, 1, 0, failure(), LIMITS)
    for before, generation in (state, 0), (lost, 1):
        back = heed(before, "b", MembershipRequest(after=1), 0.0)
        assert (back.members, back.arrived, round_over(back)) == (("a", "c"), ("b",), True)
        assert fail(back, 1, generation, failure(), LIMITS).generation == generation
        paused = heed(before, "b", MembershipRequest(after=1, paused=generation), 0.0)
        assert (paused.members, paused.arrived, round_over(paused)) == (
            before.members,
            ("b",),
            False,
        )
        asks = {name: MembershipRequest(after=1, paused=generation) for name in "cab"}
        assert complete(heed_all(before, asks, 0.0), LIMITS, 99).members == ("a", "b", "c")
    assert round_over(heed(lost, "b", MembershipRequest(after=1, paused=0), 0.0)), (
        "it has paused before the failure"
    )


def test_leases_lapse_when_a_counter_does_not_rise_and_not_when_we_were_away():
    leases = MembershipLeases()
    each = {"a": 1.0, "b": 1.0}
    assert leases.lapsed({"a": 1, "b": 0}, now=0, leases=each) == []
    assert leases.lapsed({"a": 2, "b": 0}, now=0.9, leases=each) == []
    assert leases.lapsed({"a": 2, "b": 0}, now=1.1, leases=each) == ["b"]
    assert leases.lapsed({"a": 1, "b": 1}, now=2.0, leases=each) == ["a"], "an old beat, again"
    leases.forgive()
    assert leases.lapsed({"a": 2, "b": 0}, now=9, leases=each) == []


NODE_NAMES = st.lists(st.sampled_from("abcdef"), unique=True, max_size=6).map(tuple)
ASKS = st.builds(
    MembershipRequest,
    leaves=st.booleans(),
    after=st.integers(0, 3),
    ranks=st.integers(1, 2),
    identity=st.sampled_from(["", "other"]),
    place=st.sampled_from(["", "r1", "r2"]),
)


@given(
    st.builds(
        Membership,
        round=st.integers(0, 3),
        members=NODE_NAMES,
        arrived=NODE_NAMES,
        uneven=st.dictionaries(st.sampled_from("abcdef"), st.just(2)).map(
            lambda uneven: tuple(uneven.items())
        ),
        closed=st.sampled_from([None, MembershipEnd(0, "done")]),
    ),
    st.dictionaries(st.sampled_from("abcdefgh"), ASKS),
)
def test_what_many_ask_for_is_what_each_asks_for(state, asks):
    one_by_one = state
    for node, ask in sorted(asks.items(), key=lambda item: not item[1].leaves):
        one_by_one = heed(one_by_one, node, ask, 1.0)
    at_once = heed_all(state, asks, 1.0)
    by_name, at_once_by_name = (
        replace(one, uneven=tuple(sorted(one.uneven))) for one in (one_by_one, at_once)
    )
    assert by_name == at_once_by_name


@given(NODE_NAMES, NODE_NAMES)
def test_the_observers_are_the_first_nodes(members, arrived):
    state = Membership(members=members, arrived=arrived)
    assert observers(state) == all_nodes(state)[:OBSERVERS]


def test_everybody_is_watched_by_somebody():
    state = Membership(members=tuple("abcdef"), arrived=("g", "h"))
    for node in "abcdefgh":
        observers = {other for other in "abcdefgh" if node in watched_nodes(state, other)}
        assert len(observers) >= 2
    assert watched_nodes(state, "g") == ["a", "b", "c"]


def test_the_newer_copy_wins_over_an_empty_or_older_store():
    old, new = Membership(version=3), Membership(version=4, round=2)
    assert newer(new, None) == newer(new, old) == newer(old, new) == new
    assert newer(None, None) is None


def test_a_job_gives_way_to_one_that_has_had_more_rounds():
    running = Membership(version=1000, round=2, job="a", members=("a", "b"))
    usurper = newcomer(Membership(), "c", now=5.0)
    assert usurper.version > running.version
    assert newer(running, usurper) == running
    follower = newcomer(replace(running, members=()), "c", now=5.0)
    assert newer(running, follower) == follower


def test_the_document_survives_encoding():
    state = fail(begin("a", "b"), 1, 0, failure(), LIMITS)
    state = replace(state, closed=MembershipEnd(93, "because"), address="h:1", arrived=("z",))
    assert Membership.decode(state.encode()) == state


NODES = "abcde"
EVENTS = st.lists(
    st.tuples(st.sampled_from(["come", "die", "fail", "wait"]), st.sampled_from(NODES)),
    max_size=60,
)


@given(
    EVENTS,
    st.sampled_from([1, 2, 3]),
    st.dictionaries(st.sampled_from(NODES), st.sampled_from(["r1/x", "r1/y", "r2"])),
)
def test_whatever_happens_the_living_end_up_in_one_round(events, unit, places):
    """Nodes follow the rules of the handler: they come again when their round has changed."""
    limits = MembershipLimits(minimum=1, maximum=4, unit=unit, restarts=1000, same_step=1000)
    state, alive, rounds = Membership(), set(), {}

    def follow(state):
        for node in sorted(alive):
            mine = rounds.get(node)
            broken = mine != state.round or node not in state.members
            if broken or len(state.members) < state.size or room(state, limits):
                state = arrive(state, node, place=places.get(node, ""))
        return state

    def turn(state, quiet):
        before = state
        state = complete(follow(state), limits, quiet)
        if state.round != before.round:
            assert state.round == before.round + 1
            assert 1 <= len(state.members) <= limits.maximum
            assert not set(state.members) & set(state.arrived)
            assert len(state.members) % unit == 0
            whole = [node for node in before.members if node not in before.broken]
            stay = [node for node in state.members if node in whole]
            assert stay == whole, "a lost node costs its replica only"
            if unit == 1:
                where = {node: levels(places.get(node, "")) for node in state.members}
                assert group_by_place(state.members, where.get) == list(state.members)
            if not places:
                assert list(state.members[: len(whole)]) == whole
            rounds.update(dict.fromkeys(state.members, state.round))
        return state

    for event, node in events:
        if event == "come" and node not in alive:
            alive.add(node)
            state = arrive(state, node, place=places.get(node, ""))
        elif event == "die" and node in alive:
            alive.discard(node)
            rounds.pop(node, None)
            state = leave(state, node)
        elif event == "fail":
            state = fail(state, state.round, state.generation, failure(), limits)
        state = turn(state, 0.1)
    for _ in range(3):
        state = turn(state, 99)
    if len(alive) >= unit:
        assert set(state.members) <= alive
        assert len(state.members) == min(len(alive), limits.maximum) // unit * unit
        assert set(state.members) | set(state.arrived) == alive


@pytest.mark.parametrize("size", [1, 4])
def test_a_full_job_is_left_alone(size):
    nodes = NODES[:size]
    state = begin(*nodes, limits=MembershipLimits(1, size))
    assert complete(state, MembershipLimits(1, size), 99) == state
