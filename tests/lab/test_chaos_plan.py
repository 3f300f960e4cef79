"""Plans of faults: random ones keep their promises, wrong ones say what is wrong and where."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.chaos.plan import (
    NODES,
    OF_WORKERS,
    RESTARTING,
    WEIGHTS,
    Fault,
    FaultPlan,
    random_pairs,
    random_plan,
    read_plan,
)
from trainer.recipe import RecipeError

FILE = "plan.yaml"


@given(
    seed=st.integers(0, 2**32),
    faults=st.integers(0, 60),
    min_nodes=st.integers(1, 4),
    more=st.integers(0, 4),
    every=st.integers(1, 50),
    after=st.integers(0, 100),
)
def test_a_random_plan_can_be_carried_out(seed, faults, min_nodes, more, every, after):
    max_nodes = min_nodes + more
    arguments = (seed, faults, min_nodes, max_nodes)
    plan = random_plan(*arguments, every=every, after=after)
    assert plan == random_plan(*arguments, every=every, after=after)
    assert len(plan.faults) == faults
    assert all(min_nodes <= count <= max_nodes for count in plan.counts)
    steps = [after, *(fault.at for fault in plan.faults)]
    assert steps == sorted(steps)
    for before, fault in zip(plan.faults, plan.faults[1:], strict=False):
        amid = fault.during in ("init", "load", "rendezvous")
        if amid:  # there is something to be amid of, and it ends
            assert before.what in RESTARTING
            assert before.during not in ("init", "load", "rendezvous")
            assert fault.at == before.at
        assert not (fault.during == "rendezvous" and fault.what in OF_WORKERS)


def test_every_fault_is_drawn():
    plan = random_plan(1, 300, 1, 4, partitions=True)
    assert {fault.what for fault in plan.faults} == set(WEIGHTS)
    without = random_plan(1, 300, 1, 4)
    assert {fault.what for fault in without.faults} == set(WEIGHTS) - {"partition"}
    assert {fault.during for fault in plan.faults} == {
        *("init", "load", "step", "save", "rendezvous")
    }
    assert set(NODES) <= set(WEIGHTS)


def test_a_plan_is_read():
    tree = {
        "nodes": 2,
        "faults": [
            {"what": "kill_node", "at": 20},
            {"what": "join", "at": 20, "during": "rendezvous"},
            {"what": "stop_node", "at": 60, "node": 1, "seconds": 3},
        ],
    }
    plan = read_plan(tree, 0, {}, FILE)
    assert plan.counts == [2, 1, 2, 2]
    assert plan.faults[2] == Fault(what="stop_node", at=60, node=1, seconds=3.0)
    assert str(plan.faults[1]) == "join during rendezvous"
    drawn = read_plan({**tree, "random": {"faults": 5, "max_nodes": 3}}, 7, {}, FILE)
    assert drawn.faults[:3] == plan.faults
    assert len(drawn.faults) == 8
    assert drawn.faults[3].at > 60
    assert drawn == read_plan({**tree, "random": {"faults": 5, "max_nodes": 3}}, 7, {}, FILE)
    assert read_plan({}, 0, {}, FILE) == FaultPlan()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"fault": []}, "plan.yaml: fault: unknown key; did you mean 'faults'?"),
        ({"nodes": "two"}, "plan.yaml: nodes: input should be a valid integer"),
        ({"nodes": 0}, "plan.yaml: nodes: must be at least 1, but it is 0"),
        ({"faults": [{"at": 3}]}, "plan.yaml: faults.0.what: required, but not set"),
        (
            {"faults": [{"what": "kill_worker", "step": 3}]},
            "plan.yaml: faults.0.step: unknown key; known keys: what, at, during, node",
        ),
        (
            {"faults": [{"what": "kil_worker"}]},
            "plan.yaml: faults.0.what: input should be 'kill_worker', 'kill_stand_in'",
        ),
        (
            {"faults": [{"what": "join", "during": "saving"}]},
            "plan.yaml: faults.0.during: input should be 'init', 'load', 'step', 'save' or 'rend",
        ),
        (
            {"faults": [{"what": "join", "at": 9}, {"what": "join", "at": 8}]},
            "plan.yaml: faults.1.at: is below step 9 of the previous fault",
        ),
        ({"faults": [{"what": "kill_node"}]}, "plan.yaml: faults.0: leaves no node"),
        (
            {"faults": [{"what": "kill_worker", "during": "rendezvous"}]},
            "plan.yaml: faults.0.during: there is no worker during a rendezvous",
        ),
        (
            {"faults": [{"what": "partition"}]},
            "plan.yaml: faults.0: a partition needs root, and the commands ip, nft and nsenter",
        ),
        (
            {"faults": [{"what": "store", "seconds": -1}]},
            "plan.yaml: faults.0.seconds: must be at least 0, but it is -1",
        ),
        (
            {"nodes": 5, "random": {"faults": 3}},
            "plan.yaml: random: min_nodes 1 and max_nodes 4 do not include the 5 node(s)",
        ),
        (
            {"random": {"fault": 3}},
            "plan.yaml: random.fault: unknown key; did you mean 'faults'?",
        ),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(tree, message):
    with pytest.raises(RecipeError) as refused:
        read_plan(tree, 0, {}, FILE)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_hundred_pairs_are_of_every_kind(nodes):
    plan = random_pairs(1, 100, nodes)
    assert plan == random_pairs(1, 100, nodes)
    firsts = [n for n, fault in enumerate(plan.faults) if fault.delay is None]
    pairs = [plan.faults[n : n + 2] for n in firsts if plan.faults[n].what != "join"]
    assert len(pairs) == 100
    assert all(one.at == other.at and 0 <= other.delay <= 0.05 for one, other in pairs)
    kinds = Counter(frozenset((one.what, other.what)) for one, other in pairs)
    assert len(kinds) == (20 if nodes == 3 else 19)
    assert min(kinds.values()) >= 4
    assert min(plan.counts) >= 1
    assert plan.counts[-1] == nodes
