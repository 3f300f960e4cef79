"""Plans of faults: random ones keep their promises, wrong ones say what is wrong and where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.chaos_plan import (
    NODES,
    OF_WORKERS,
    RESTARTING,
    WEIGHTS,
    Fault,
    Plan,
    PlanError,
    random_plan,
    read_plan,
)


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


def where(key):
    return f"plan.yaml:{len(key)}"


def test_a_plan_is_read():
    tree = {
        "nodes": 2,
        "faults": [
            {"what": "kill_node", "at": 20},
            {"what": "join", "at": 20, "during": "rendezvous"},
            {"what": "stop_node", "at": 60, "node": 1, "seconds": 3},
        ],
    }
    plan = read_plan(tree, 0, where)
    assert plan.counts == [2, 1, 2, 2]
    assert plan.faults[2] == Fault(what="stop_node", at=60, node=1, seconds=3.0)
    assert str(plan.faults[1]) == "join during rendezvous"
    drawn = read_plan({**tree, "random": {"faults": 5, "max_nodes": 3}}, 7, where)
    assert drawn.faults[:3] == plan.faults
    assert len(drawn.faults) == 8
    assert drawn.faults[3].at > 60
    assert drawn == read_plan({**tree, "random": {"faults": 5, "max_nodes": 3}}, 7, where)
    assert read_plan({}, 0, where) == Plan()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "plan.yaml:0: plan: "),
        ({"fault": []}, "plan.yaml:1: fault: unknown key; did you mean 'faults'?"),
        ({"nodes": "two"}, "plan.yaml:1: nodes: input should be a valid integer"),
        ({"nodes": 0}, "plan.yaml:1: nodes: a run needs at least one node, not 0"),
        ({"faults": [{"at": 3}]}, "plan.yaml:3: faults.0.what: required, but not set"),
        (
            {"faults": [{"what": "kill_worker", "step": 3}]},
            "plan.yaml:3: faults.0.step: unknown key; known: what, at, during, node, rank, seconds",
        ),
        (
            {"faults": [{"what": "kil_worker"}]},
            "plan.yaml:3: faults.0.what: there is no 'kil_worker'; did you mean 'kill_worker'?",
        ),
        (
            {"faults": [{"what": "join", "during": "saving"}]},
            "plan.yaml:3: faults.0.during: there is no 'saving'; did you mean 'save'?",
        ),
        (
            {"faults": [{"what": "join", "at": 9}, {"what": "join", "at": 8}]},
            "plan.yaml:3: faults.1.at: comes after the fault at step 9",
        ),
        ({"faults": [{"what": "kill_node"}]}, "plan.yaml:2: faults.0: leaves no node"),
        (
            {"faults": [{"what": "kill_worker", "during": "rendezvous"}]},
            "plan.yaml:3: faults.0.during: there is no worker during a rendezvous",
        ),
        (
            {"faults": [{"what": "partition"}]},
            "plan.yaml:2: a partition takes root, and the commands ip, nft and nsenter",
        ),
        (
            {"faults": [{"what": "store", "seconds": -1}]},
            "plan.yaml:3: faults.0.seconds: must not be negative",
        ),
        (
            {"nodes": 5, "random": {"faults": 3}},
            "plan.yaml:1: random: min_nodes 1 and max_nodes 4 do not fit the 5 node(s)",
        ),
        (
            {"random": {"fault": 3}},
            "plan.yaml:2: random.fault: unknown key; did you mean 'faults'?",
        ),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(tree, message):
    with pytest.raises(PlanError) as refused:
        read_plan(tree, 0, where)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
