"""A node's part in finding the rank that hangs: it raises alarms, tells where its ranks stand, and
names those of its own that are to be ended. See watchdog.py [Note: hang]."""

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from elastic.group.member import Member
from elastic.group.membership import (
    Membership,
    calm,
    lose,
    over,
    raise_alarm,
    ranks_of,
    suspect,
)
from elastic.node.progress import Progress, ProgressPage
from elastic.node.vitals import Signs, Vigil
from elastic.node.watchdog import (
    PATIENCE,
    PhaseTimes,
    Standing,
    blame,
    overdue,
    standings,
    take_dumps,
)

logger = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS, LOOK_AGAIN_SHARE, LOOK_AGAIN_MOST = 1.0, 0.25, 30.0
"""After an alarm for which nobody was to blame yet: at least, as a share of how long a rank has
waited by then, at most. Each alarm has all ranks of the job dump their stacks."""
MISSING_SECONDS = 5.0
"""Beyond its limit that a rank waits for one without a process, before the node of that is lost."""


class Running(Protocol):
    """A training process of a rank."""

    pid: int
    local_rank: int
    dumps: int
    """File in memory for its stack dumps."""


class HangWatch:
    """What a node knows of its ranks, from look to look.

    Args:
        group: the membership.
        page: where the ranks say how far they are.
    """

    def __init__(self, group: Member, page: ProgressPage) -> None:
        self.times = PhaseTimes()
        self._group, self._page, self._vigil = group, page, Vigil()
        self._stood: dict[int, Progress] | None = None
        """What the ranks had said when this node told where they stand, since the alarm."""
        self._summed = 0
        """The last alarm of which this node has summed up the standings."""
        self._judged = 0
        """The last alarm whose suspects this node has looked at."""
        self._quiet_until = 0.0
        """No alarm before."""
        self._last_dumps: dict[int, str] = {}

    def look(
        self,
        state: Membership,
        generation: tuple[int, int],
        running: Mapping[int, Running],
        done: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """Take the next step; returns the ranks that are to be ended now.

        Args:
            state: of the membership.
            generation: (round, generation) that the ranks of this node are in.
            running: the processes of this node, by rank.
            done: local ranks of this node whose process has ended well, by rank.
        """
        progress = {rank: self._page.read(one.local_rank) for rank, one in running.items()}
        now = time.monotonic()
        self.times.follow(progress, now)
        signs = self._vigil.look({rank: one.pid for rank, one in running.items()}, progress, now)
        if (state.round, state.generation) != generation or over(state):
            return []
        if not state.alarm:
            late = overdue(progress, now, self.times, signs)
            longest = max((one.seconds for one in late), default=0.0)
            quiet = min(max(LOOK_AGAIN_SECONDS, LOOK_AGAIN_SHARE * longest), LOOK_AGAIN_MOST)
            if self._stood is not None:
                self._stood, self._quiet_until = None, now + quiet
            self._quiet_until = min(self._quiet_until, now + quiet)  # who was late has gone on
            stopped = any(one.where == "stopped" for one in late)
            if late and (stopped or now > self._quiet_until):
                self._group.change(lambda state: raise_alarm(state, *generation))
        elif self._stood is None:
            self._stood = {}
            self._stand(state.alarm, running, done, now, signs)
        elif state.suspicion:
            return self._judge(state, progress)
        elif state.alarm != self._summed:
            self._sum(state)
        return []

    def _stand(
        self,
        alarm: int,
        running: Mapping[int, Running],
        done: Mapping[int, int],
        now: float,
        signs: Mapping[int, Signs],
    ) -> None:
        """Tell all nodes where our ranks stand. Aside: a rank that hangs is waited for."""
        ranks = {
            number: (one.pid, Path(f"/proc/self/fd/{one.dumps}"))
            for number, one in running.items()
            if not signs[number].stopped
        }

        def work() -> None:
            self._last_dumps = take_dumps(ranks)
            # Who has gone on meanwhile does not hang.
            self._stood = {rank: self._page.read(one.local_rank) for rank, one in running.items()}
            ours = standings(self._stood, now, self.times, self._last_dumps, signs)
            for rank, local_rank in done.items():  # it is ahead of all that still run
                ours.append(Standing(rank, self._page.read(local_rank).step, "end", 0.0, PATIENCE))
            self._group.stand(alarm, json.dumps([asdict(one) for one in ours]))

        threading.Thread(target=work, name="perdure-dumps", daemon=True).start()

    def _sum(self, state: Membership) -> None:
        """On the first node: once all have told where their ranks stand, find the one that the
        others wait for. Nobody is blamed while a rank of the job has no process: the others may
        wait for that one, which its own node starts, or reports. A node that does neither is lost.
        """
        alarm, texts = state.alarm, self._group.standings(state.alarm)
        if texts is None:
            return
        self._summed = alarm
        by_node = [[Standing(**one) for one in json.loads(text)] for text in texts]
        everyone = [one for ones in by_node for one in ones]
        missing = [
            node
            for node, ones in zip(state.members, by_node, strict=False)
            if len(ones) < ranks_of(state, node)
        ]
        if missing:
            late = max((one.seconds - one.starved - one.limit for one in everyone), default=0.0)
            why = f"no process of a rank for {MISSING_SECONDS:.0f} s, for which the others wait"
            gone = late > MISSING_SECONDS
            if gone:
                logger.warning("node %s is lost: %s", missing[0], why)
            self._group.change(
                lambda state: (
                    lose(calm(state), missing[0], time.time(), why)
                    if gone and state.alarm == alarm
                    else calm(state)
                )
            )
            return
        found = blame(everyone) if everyone else None
        if found:
            ranks, reason = found.ranks, found.reason
            self._group.change(lambda state: suspect(state, alarm, ranks, reason))
        else:
            self._group.change(calm)

    def _judge(self, state: Membership, progress: Mapping[int, Progress]) -> list[int]:
        """The rank that the others wait for, if it is here; of ranks that all wait for each other,
        the first node's first."""
        self._quiet_until = time.monotonic() + LOOK_AGAIN_SECONDS
        if self._judged == state.alarm:
            return []
        self._judged = state.alarm
        first = sorted(progress)[:1] if self._group.name in state.members[:1] else []
        mine = [rank for rank in state.suspects or first if rank in progress]
        stood = self._stood or {}
        if any(progress[rank] != stood.get(rank) for rank in mine):
            self._group.change(calm)  # it has gone on after all
            return []
        logger.warning("a hang: %s", state.suspicion)
        for rank in mine:
            logger.warning("stack of rank %d:\n%s", rank, self._last_dumps.get(rank, ""))
        return mine
