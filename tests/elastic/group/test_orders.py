"""Membership as a state machine: up to three things go wrong on a few nodes, in every order, and
between any two of them every node looks at the document, or does not. All ends in a live round."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elastic.group.membership import (
    Membership,
    MembershipFailure,
    MembershipLimits,
    MembershipRequest,
    all_nodes,
    complete,
    fail,
    heed_all,
    lose,
    observers,
    room,
    round_over,
)
from tests.distributed.jobs import soak

NEWCOMER = "n"


@dataclass(frozen=True)
class Agent:
    """What a node knows, and what its ranks do."""

    alive: bool = True
    wants: bool = True
    """Whether it is to be in the job; one that does not leaves it."""
    runs: bool = False
    """Its ranks are in (round, generation); else it waits for the round after `round`."""
    round: int = 0
    generation: int = 0
    asked: bool = False
    """Its ranks are asked to pause."""
    paused: int = -1
    """Generation in which they have."""
    failed: bool = False
    """A rank of it has, and is not started again yet."""
    report: tuple[int, int] | None = None
    """(round, generation) of a failure that the document does not have yet."""
    said: MembershipRequest | None = None
    """What it has asked for in its key, for the observers."""


@dataclass(frozen=True, eq=False)
class World:
    """The document, and the nodes around it. Equal worlds are one object, and so are all parts of
    them: that they are compared by identity makes this test one of seconds."""

    state: Membership
    agents: dict[str, Agent]
    pausing: tuple[int, int]
    """(round, generation) in which all ranks have agreed to pause."""
    happened: int
    """Things that went wrong so far."""


class Explorer:
    """Goes through all that can happen.

    Args:
        nodes: in the job at the start, besides one that may come.
        places: the nodes that something happens to.
        limits: of the job.
        events: most things that go wrong.
    """

    def __init__(self, nodes: str, places: str, limits: MembershipLimits, events: int) -> None:
        self.limits, self.places, self.events = limits, places, events
        self._parts: dict[Any, Any] = {}
        self._worlds: dict[tuple[int, ...], World] = {}
        self._looks: dict[Any, tuple[Agent, Membership]] = {}
        self._settled: dict[World, World] = {}
        state = complete(
            heed_all(Membership(), {name: MembershipRequest() for name in nodes}, 0.0), limits, 99.0
        )
        first = Agent(runs=True, round=state.round)
        agents = {name: first if name in state.members else Agent() for name in nodes}
        self.start = self._world(state, {**agents, NEWCOMER: Agent(wants=False)}, (0, 0), 0)

    def _world(
        self, state: Membership, agents: dict[str, Agent], pausing: tuple[int, int], happened: int
    ) -> World:
        same = self._parts.setdefault
        if id(state) not in self._parts:
            # No node decides by these.
            state = replace(state, version=0, job="", lost=None, cause=None, failures=())
            state = same(state, state)
            self._parts[id(state)] = state
        agents = {name: same(one, one) for name, one in agents.items()}
        key = (id(state), *map(id, agents.values()), *pausing, happened)
        if key not in self._worlds:
            self._worlds[key] = World(state, agents, pausing, happened)
        return self._worlds[key]

    def _with(
        self,
        world: World,
        name: str,
        agent: Agent,
        state: Membership | None = None,
        events: int = 0,
    ) -> World:
        """With another agent, and perhaps another document."""
        agents = {**world.agents, name: agent}
        happened = world.happened + events
        return self._world(state or world.state, agents, world.pausing, happened)

    def follows(self, world: World) -> Iterator[World]:
        """What may come next by itself."""
        state, agents = world.state, world.agents
        for name, agent in agents.items():
            if agent.alive and (agent.wants or agent.runs or name in all_nodes(state)):
                yield self._look(world, name, agent)
            together = (agent.round, agent.generation) == world.pausing
            if agent.alive and agent.runs and together and not agent.failed and agent.paused < 0:
                yield self._with(world, name, replace(agent, paused=agent.generation))
        for name in all_nodes(state):
            if not agents[name].alive:  # whoever watches it
                yield self._with(world, name, agents[name], lose(state, name, 0.0))
        now = state.round, state.generation
        members = [agents[name] for name in state.members]
        meet = all(
            one.alive and one.runs and not one.failed and (one.round, one.generation) == now
            for one in members
        )
        if meet and any(one.asked for one in members) and world.pausing != now:
            yield self._world(state, agents, now, world.happened)

    def goes_wrong(self, world: World) -> Iterator[World]:
        """What may go wrong next."""
        if world.happened == self.events:
            return
        for name in self.places:
            agent = world.agents[name]
            if not agent.alive or not agent.wants:
                continue
            yield self._with(world, name, replace(agent, alive=False), events=1)
            yield self._with(world, name, replace(agent, wants=False), events=1)
            if name in all_nodes(world.state):  # though it lives
                yield self._with(world, name, agent, lose(world.state, name, 0.0), events=1)
            if agent.runs:  # its stand-in died
                yield self._with(world, name, replace(agent, runs=False, paused=-1), events=1)
            if agent.runs and not agent.failed and agent.paused < 0:
                report = agent.round, agent.generation
                yield self._with(world, name, replace(agent, failed=True, report=report), events=1)
        if not world.agents[NEWCOMER].wants:
            yield self._with(world, NEWCOMER, Agent(), events=1)

    def _look(self, world: World, name: str, agent: Agent) -> World:
        said = {one: other.said if other.alive else None for one, other in world.agents.items()}
        key = id(world.state), name, id(agent), *said.values()
        if key not in self._looks:
            self._looks[key] = self.look(world.state, name, agent, said)
        return self._with(world, name, *self._looks[key])

    def look(
        self, state: Membership, name: str, agent: Agent, said: dict[str, MembershipRequest | None]
    ) -> tuple[Agent, Membership]:
        """A node looks at the document, changes it, and does what it says; see `Member._follow`,
        `PerdureRendezvous.num_nodes_waiting` and `NodeAgent._look`."""
        before, ask = state, None
        if not agent.wants:
            ask = MembershipRequest(leaves=True)
        elif not agent.runs:
            ask = MembershipRequest(after=agent.round, paused=agent.paused)
        if agent.report:
            one = MembershipFailure(name, 0, 5, "SIGKILL", 0.0)
            state = fail(state, *agent.report, one, self.limits)
        first = observers(state)
        observes = name in first or len(first) < 3
        if observes:
            asks = {one: other for one, other in said.items() if other and one != name}
            if ask:
                asks[name] = ask
            state = heed_all(state, asks, 0.0)
            if name in state.arrived:
                state = complete(state, self.limits, 99.0)
        agent = replace(agent, said=ask, report=None)
        if not agent.wants:
            agent = replace(agent, runs=False)
        elif not agent.runs:
            if state.round > agent.round and name in state.members:
                agent = Agent(runs=True, round=state.round, generation=state.generation)
        elif state.round != agent.round or name not in state.members or round_over(state):
            agent = replace(agent, runs=False, failed=False, asked=False)
        elif state.generation != agent.generation:
            agent = Agent(runs=True, round=state.round, generation=state.generation)
        elif agent.paused >= 0:
            agent = replace(agent, runs=False, asked=False)
        elif room(state, self.limits):
            agent = replace(agent, asked=True)
        return agent, before if state == before else state

    def check_end(self, world: World) -> None:
        """Nothing comes by itself any more: the job trains, and everybody knows it."""
        state, agents = world.state, world.agents
        here = [name for name, agent in agents.items() if agent.alive and agent.wants]
        size = min(len(here), self.limits.maximum) // self.limits.unit * self.limits.unit
        if size < self.limits.minimum:
            return
        assert len(state.members) == state.size == size, world
        assert {*state.members, *state.arrived} == set(here), world
        for name in state.members:
            one = agents[name]
            assert one.runs, world
            assert not one.failed, world
            assert (one.round, one.generation) == (state.round, state.generation), world
        for name in state.arrived:
            assert not agents[name].runs, world

    def explore(self) -> int:
        """All that may happen, however looks and events follow each other; the number of worlds.

        Raises:
            AssertionError: nodes wait for ever, or go round in a circle.
        """
        done: set[World] = set()
        path: dict[World, Iterator[World]] = {}

        def enter(world: World) -> None:
            own = [one for one in self.follows(world) if one is not world]
            if not own:
                self.check_end(world)
            # A circle of what comes by itself would be one for ever.
            path[world] = iter([*own, *self.goes_wrong(world)])

        enter(self.start)
        while path:
            world = next(reversed(path))
            after = next(path[world], None)
            if after is None:
                del path[world]
                done.add(world)
            elif after in path:
                raise AssertionError(f"for ever in a circle: {after}")
            elif after not in done:
                enter(after)
        return len(done)

    def enumerate(self) -> int:
        """All orders of events; between two of them nothing happens, or one node looks, or all is
        done that comes by itself. The number of ends.

        Raises:
            AssertionError: nodes wait for ever, or go round in a circle.
        """
        before = {self.start}
        for _ in range(self.events):
            worlds = {after for world in before for after in self.goes_wrong(world)}
            before = set(worlds)
            for world in worlds:
                before.update(self.follows(world))
                before.add(self._settle(world))
        ends = {self._settle(world) for world in before}
        for world in ends:
            self.check_end(world)
        return len(ends)

    def _settle(self, world: World) -> World:
        """Do all that comes by itself, in one order."""
        passed: list[World] = []
        while world not in self._settled:
            passed.append(world)
            after = next((one for one in self.follows(world) if one is not world), world)
            assert after is world or after not in passed, f"for ever in a circle: {after}"
            if after is world:
                break
            world = after
        end = self._settled.get(world, world)
        self._settled.update(dict.fromkeys(passed, end))
        return end


LIMITS = MembershipLimits(1, 4, restarts=99, same_step=99, strikes=99)
MANY = "abcde"
"""More than observers; the last two ask them."""


@pytest.mark.parametrize(
    ("nodes", "places", "limits", "events"),
    [
        ("abc", "abc", LIMITS, 3),
        pytest.param("abc", "abc", replace(LIMITS, unit=2), 3, marks=soak),
        ("abcd", "abd", replace(LIMITS, unit=2, maximum=5), 2),
        (MANY, "ade", replace(LIMITS, maximum=6), 2),
    ],
)
def test_what_goes_wrong_in_any_order_ends_in_a_live_round(nodes, places, limits, events):
    assert Explorer(nodes, places, limits, events).enumerate() > 10


@pytest.mark.parametrize("unit", [pytest.param(1, marks=soak), 2])
def test_so_it_does_however_looks_and_events_follow_each_other(unit):
    assert Explorer("abc", "abc", replace(LIMITS, unit=unit), 2).explore() > 5000


@soak
def test_three_events_however_looks_follow_each_other():
    assert Explorer("abc", "abc", LIMITS, 3).explore() > 100_000
