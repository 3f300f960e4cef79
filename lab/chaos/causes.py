"""Checks the causes that the ledger gives for ended attempts against the injected faults."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic.record.attempt import RecordedAttempt
from elastic.record.causes import Kind, ending
from elastic.record.history import RecordHistory
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
"""Injected fault → causes that the ledger may give for the attempt that it ended. Faults that are
not listed end no attempt."""
RETURNS: tuple[What, ...] = ("stop_node", "partition")
"""Faults after which a lost node comes back by itself."""
LEASE_SECONDS, JOIN_SECONDS = 10.0, 300.0
"""Longest time from a fault to the end of the attempt that it ends: for all faults, and for the
join of a node, which first imports torch."""


@dataclass(frozen=True)
class CauseCheck:
    """Result of comparing the causes in the ledger for ended attempts with the injected faults."""

    right: int
    """Number of ended attempts with a right cause."""
    wrong: list[str]
    """One line for each ended attempt whose cause no fault explains."""

    @property
    def share(self) -> float:
        """Share of ended attempts whose cause a fault explains; 1 if no attempt ended."""
        count = self.right + len(self.wrong)
        return self.right / count if count else 1.0

    def __str__(self) -> str:
        text = f"causes named: {self.right} of {self.right + len(self.wrong)} ({self.share:.0%})"
        return "\n".join([text, *(f"  not {line}" for line in self.wrong)])


def check_names(history: RecordHistory, faults: Sequence[tuple[Fault, float]]) -> CauseCheck:
    """Compare the causes in the ledger for ended attempts with the injected faults.

    Args:
        history: ledger of the run with faults.
        faults: each fault with the Unix time of its injection.
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
    return CauseCheck(right, wrong)


def _possible(
    before: RecordedAttempt, after: RecordedAttempt, faults: Iterable[tuple[Fault, float]]
) -> Iterable[Kind]:
    for fault, came in faults:
        if came > after.loaded:
            continue
        over = came + (fault.seconds if fault.what in LASTING else 0.0)
        if over + LEASE_SECONDS >= before.loaded:
            yield from NAMES.get(fault.what, ())
        if fault.what in (*RETURNS, "join") and over + JOIN_SECONDS >= before.loaded:
            yield "join"
