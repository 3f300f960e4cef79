"""Where nodes stand: what a node says of it, and that who stands together gets ranks together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.group.topology import (
    describe_places,
    group_by_place,
    is_place,
    levels,
    natural_key,
    own_place,
)

SWITCHES = {"SLURM_TOPOLOGY_ADDR": "s0.s3.n17", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}


@pytest.mark.parametrize(
    ("environment", "domain", "place"),
    [
        ({}, "", ""),
        ({}, "nvl-8c41f0d2.1", "nvl-8c41f0d2.1"),
        ({"PERDURE_PLACE": "row1/rack2"}, "nvl-8c41f0d2.1", "row1/rack2"),
        ({"PERDURE_PLACE": "", **SWITCHES}, "nvl-8c41f0d2.1", ""),
        ({**SWITCHES, "SLURM_NODEID": "3"}, "", "s0/s3#3"),
        (SWITCHES, "nvl-8c41f0d2.1", "s0/s3/nvl-8c41f0d2.1"),
        # The name of the node has dots; without switches there is nothing but the node.
        ({**SWITCHES, "SLURM_TOPOLOGY_ADDR": "s0.s3.n17.example.org"}, "", "s0/s3"),
        ({"SLURM_TOPOLOGY_ADDR": "n17", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, "", ""),
        ({"SLURM_TOPOLOGY_ADDR": "s[0-1].n17"}, "", "s[0-1]"),
        ({"SLURM_NODEID": "3"}, "", "#3"),
        ({"SLURM_NODEID": "three"}, "", ""),
        # What Slurm says is made to fit: the innermost names, and the ends of long ones.
        (
            {"SLURM_TOPOLOGY_ADDR": f"a.b.c.d e#.{'f' * 50}1.n"},
            "",
            f"b/c/d_e_/{'f' * 39}1",
        ),
    ],
)
def test_a_node_says_where_it_stands(environment, domain, place):
    assert own_place(environment, domain) == place
    assert is_place(place)


@pytest.mark.parametrize("place", ["a//b", "/a", "a b", "a/b/c/d/e", "x" * 41, "a#b", "ä", "a\n"])
def test_a_place_that_is_none_is_refused(place):
    with pytest.raises(ValueError, match="PERDURE_PLACE"):
        own_place({"PERDURE_PLACE": place})
    assert not is_place(place)
    assert not is_place(None)


PLACES = st.lists(st.sampled_from("ab"), max_size=3).map("/".join)


@given(st.lists(PLACES), st.lists(PLACES), st.sets(st.integers(0, 9)))
def test_nodes_of_a_place_are_neighbours_and_nobody_else_moves(here, coming, gone):
    def order(nodes):
        return group_by_place(nodes, lambda node: levels(node[1]))

    nodes = order(list(enumerate(here)))
    assert sorted(nodes) == list(enumerate(here))
    for depth in range(3):
        paths = [levels(place)[: depth + 1] for _, place in nodes]
        for path in {path for path in paths if len(path) > depth}:
            first, last = paths.index(path), len(paths) - paths[::-1].index(path)
            assert set(paths[first:last]) == {path}, nodes
    assert order(nodes) == nodes
    left = [node for node in nodes if node[0] not in gone]
    assert order(left) == left, "who leaves moves nobody"
    both = order([*nodes, *enumerate(coming, len(here))])
    assert [node for node in both if node in nodes] == nodes, "nor does who comes"


def test_numbers_in_names_count():
    names = ["node10", "node2", "node1/7", "9" * 5000, "a", ""]
    assert sorted(names[:3], key=natural_key) == ["node1/7", "node2", "node10"]
    assert sorted(names, key=natural_key)[0] == ""


def test_a_line_says_which_ranks_stand_where():
    assert describe_places([("", 2), ("#1", 2)]) == ""
    nodes = [("r/1#0", 2), ("r/1#1", 2), ("r/2", 1), ("", 4)]
    assert describe_places(nodes) == "ranks 0-3 in r/1, 4 in r/2, 5-8 in a place that is not stated"
    many = describe_places([(f"r{number}", 8) for number in range(20)])
    assert many.endswith("56-63 in r7 and 12 more")
