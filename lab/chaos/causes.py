"""Whether the causes that a run names for the ends of its attempts are the faults that came."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic.record.attempt import Attempt
from elastic.record.causes import Kind, ending
from elastic.record.history import History
from lab.chaos.plan import LASTING, Fault, What

NAMES: Mapping[What, tuple[Kind, ...]] = {
    "kill_worker": ("killed",),
    "kill_stand_in": ("process",),
    "kill_zygote": ("process",),
    "kill_agent": ("node",),
    "kill_node": ("node",),
    "stop_worker": ("hang",),
    "slow_worker": ("hang",),
    "stop_node": ("node", "hang"),
    "partition": ("node", "network"),
    "storage": ("storage",),
    "nan": ("stopped",),
    "notice": ("leave",),
    "join": ("join",),
}
"""What may be named for a fault that ended an attempt; those that are missing end none."""
RETURNS: tuple[What, ...] = ("stop_node", "partition")
"""After these a node that was lost comes back."""
LEASE_SECONDS, JOIN_SECONDS = 10.0, 300.0
"""So long after a fault an attempt may end by it; and by a node that comes, which imports first."""


@dataclass(frozen=True)
class Named:
    """How the ends of the attempts of a run were named."""

    right: int
    wrong: list[str]
    """One line for each that no fault explains."""

    @property
    def share(self) -> float:
        """The share of ends that were named by a fault that came."""
        count = self.right + len(self.wrong)
        return self.right / count if count else 1.0

    def __str__(self) -> str:
        text = f"causes named: {self.right} of {self.right + len(self.wrong)} ({self.share:.0%})"
        return "\n".join([text, *(f"  not {line}" for line in self.wrong)])


def check_names(history: History, faults: Sequence[tuple[Fault, float]]) -> Named:
    """Compare how attempts ended, by the ledger, with what was done to the run.

    Args:
        history: of the run.
        faults: each with the Unix time at which it came.
    """
    right, wrong = 0, []
    for before, after in pairwise(history.attempts):
        how = ending(history, before)
        possible = set(_possible(before, after, faults))
        if how.kind in possible:
            right += 1
        else:
            what = ", ".join(sorted(possible)) or "nothing"
            wrong.append(f"attempt {before.number}: {how.kind} ({how.text}); came: {what}")
    return Named(right, wrong)


def _possible(
    before: Attempt, after: Attempt, faults: Iterable[tuple[Fault, float]]
) -> Iterable[Kind]:
    for fault, came in faults:
        if came > after.loaded:
            continue
        over = came + (fault.seconds if fault.what in LASTING else 0.0)
        if over + LEASE_SECONDS >= before.loaded:
            yield from NAMES.get(fault.what, ())
        if fault.what in (*RETURNS, "join") and over + JOIN_SECONDS >= before.loaded:
            yield "join"
