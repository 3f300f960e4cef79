"""Why an attempt ended: one line for people, the kind of the cause, and the evidence. Pure
functions.

[Note: kinds] `killed` a signal from another process · `crashed` a fault in compiled code · `memory`
no memory left on machine or GPU · `error` an exception · `storage` a failed read or write · `hang`
a rank that all others waited for · `node` a machine that gave no sign of life · `network` a lost
connection without another failure · `process` death of the zygote (zygote.py) or a stand-in
(standin.py) · `silent` no process was left to report a cause · `stopped` the run stopped for good ·
`leave`, `join` a change of nodes, with state saved · `asked` a user stopped the run · `finished`
all steps are done · `open` the attempt still runs, or was killed."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elastic.exits import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PAUSED,
    EXIT_REQUEUE,
)
from elastic.record.attempt import RecordedAttempt
from elastic.record.history import RecordHistory
from elastic.record.reliability import failed_at

Kind = Literal[
    "killed", "crashed", "memory", "error", "storage", "hang", "node", "network", "process",
    "silent", "stopped", "leave", "join", "asked", "finished", "open",
]  # fmt: skip
WANTED: tuple[Kind, ...] = ("leave", "join", "asked", "finished", "open")
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_STORAGE = re.compile(
    r"StorageError|SaveFailed|\b(ENOSPC|EIO|EFBIG|EDQUOT|ESTALE|EROFS)\b|No space left|"
    r"Input/output error|Disk quota|Stale file handle|Read-only file system"
)
_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory", re.I)
_LONGEST = 2000


@dataclass(frozen=True)
class _AttemptEnd:
    """How and why an attempt ended."""

    kind: Kind
    text: str
    """The cause in one line, for readers who do not know the code."""
    at: float
    rank: int | None = None
    node: str = ""
    evidence: tuple[tuple[str, str], ...] = ()
    """(description of a piece of evidence, its text)."""

    @property
    def failed(self) -> bool:
        return self.kind not in WANTED


def ending(history: RecordHistory, attempt: RecordedAttempt) -> _AttemptEnd:
    """Returns how an attempt of a run ended, as far as the ledger shows."""
    following = history.next(attempt)
    # The failure that the agents recorded tells more than the end line of one rank.
    if following and following.start.cause is not None:
        cause = following.start.cause
        rank = cause.get("rank")
        # Ledgers are not trusted: the value may have any type.
        rank = rank if isinstance(rank, int) and not isinstance(rank, bool) else None
        kind, text = _of_failure(rank, str(cause.get("node") or ""), cause)
        evidence = _evidence(cause, following)
        at = failed_at(attempt, following)
        return _AttemptEnd(kind, text, at, rank, str(cause.get("node") or ""), evidence)
    if attempt.end:
        kind, text = _of_end(attempt, following)
        evidence = (
            ("reason in the ledger", str(attempt.end["reason"])[:_LONGEST]),
            ("exit code of the ranks", str(attempt.end["code"])),
            ("ledger line", str(attempt.end["line"])),
        )
        at = attempt.loaded + float(attempt.end["after"])
        return _AttemptEnd(kind, text, at, evidence=evidence)
    if not following:
        return _AttemptEnd("open", "running, or killed", attempt.finished)
    # Rank 0 writes the start line, so `boot` is that of the machine of rank 0.
    same = bool(attempt.start.boot) and attempt.start.boot == following.start.boot
    where = "" if same else "; rank 0 is on another machine since, or its machine was restarted"
    text = (
        f"Everything was killed at once, the launcher included: nobody was left to say why{where}"
    )
    missing = f"attempt {attempt.number} has no end line, and the next start no cause"
    line = "ledger line of the next start", str(following.line)
    evidence = ("what is missing", missing), line
    return _AttemptEnd("silent", text, attempt.finished, evidence=evidence)


def _of_failure(rank: int | None, node: str, cause: Mapping[str, Any]) -> tuple[Kind, str]:
    why, error = str(cause.get("why") or "failed"), str(cause.get("error") or "")
    node = shown_node(node)
    on = f" on {node}" if node else ""
    who = f"Rank {rank}{on}" if rank is not None else f"Node {node}" if node else "A rank"
    if why.startswith("hang: "):
        return "hang", _hang(who, why.removeprefix("hang: "))
    if why == "node lost":
        return "node", f"{who} is gone: no sign of life from its machine, or its network"
    if why.startswith("no process of a rank"):
        return "node", f"{who} is gone: it had no process for a rank that the others waited for"
    if why.startswith("sent away: "):
        return "node", f"{who} was sent away: {why.removeprefix('sent away: ')}"
    if lost := re.fullmatch(r"rank (\d+) lost its connection to another", why):
        return "network", (
            f"Rank {lost[1]}{on} lost its connection to another rank, and no node said why: the "
            "network, or a machine that went away"
        )
    if "its zygote was ended" in why:
        killed = re.search(r"its zygote was ended by (SIG\w+)", why)
        how = f"was killed ({killed[1]})" if killed else "ended"
        return (
            "process",
            f"{who} ended with the process that its node forks ranks from, which {how}",
        )
    if why == "a stand-in was killed":
        text = f"A process of the launcher{on} was killed: torchrun started its ranks anew"
        return "process", text
    name, _, rest = why.partition(" ")
    if name.startswith("SIG"):
        if "out of memory" in rest:
            return "memory", f"{who} ran out of memory: the kernel killed it ({name})"
        if name in FROM_OUTSIDE:
            return "killed", f"{who} was killed from outside ({name}){_rest(rest)}"
        return "crashed", f"{who} crashed ({_named(name)}){_rest(rest)}"
    ended = re.fullmatch(r"exit code -?\d+(?: \((.*)\))?", why, re.DOTALL)
    if not ended:
        return "error", f"{who}: {why}"
    return _of_error(who, error or ended[1] or "", why)


def _of_error(who: str, error: str, why: str) -> tuple[Kind, str]:
    error = error.strip()
    if _STORAGE.search(error):
        return "storage", f"{who} was refused by storage: {error}"
    if _MEMORY.search(error):
        return "memory", f"{who} ran out of memory: {error}"
    if error:
        return "error", f"{who} ended by an error: {error}"
    return "error", f"{who} ended with {why}, and reported no error; see its output"


def _of_end(attempt: RecordedAttempt, following: RecordedAttempt | None) -> tuple[Kind, str]:
    assert attempt.end
    code, reason = attempt.end["code"], str(attempt.end["reason"])
    if code == EXIT_DONE:
        return "finished", "Finished" if reason in ("finished", "done") else f"Finished: {reason}"
    if code == EXIT_INTERRUPTED:
        return "asked", "Stopped by Ctrl-C"
    if code in (EXIT_PAUSED, EXIT_REQUEUE):
        size = ""
        if following:
            before, now = attempt.start.world_size, following.start.world_size
            size = f": {_ranks(before)} became {now}" if before != now else f": {_ranks(now)} again"
        if reason == "a node joins":
            return "join", f"A node joined, with state saved{size}"
        if reason == "a node leaves":
            return "leave", f"A node was told to go, and left with state saved{size}"
        return "asked", f"Paused with state saved ({reason}){size}"
    if code == EXIT_DO_NOT_REQUEUE:
        return "stopped", f"The run stopped for good: {reason}"
    return _of_error("The run", reason, f"exit code {code}")


def _hang(who: str, reason: str) -> str:
    place = re.search(r"in step (\d+), phase (\w+), for ([\d.]+) s", reason)
    where = f" (step {place[1]}, in “{place[2]}”, for {place[3]} s)" if place else ""
    if together := re.match(r"all (\d+) ranks stand in the same place", reason):
        return f"All {together[1]} ranks waited for each other{where}: the network, or a deadlock"
    if "stopped by a signal" in reason:
        return f"{who} was stopped from outside, and all others waited for it{where}"
    if "no sign of life" in reason:
        return f"{who} hung without a sign of life, and all others waited for it{where}"
    return f"{who} hung, and all others waited for it{where}"


def _evidence(cause: Mapping[str, Any], following: RecordedAttempt) -> tuple[tuple[str, str], ...]:
    step, why = cause.get("step"), str(cause.get("why") or "failed")
    shown = [("as recorded", why)]
    if cause.get("evidence"):
        hung = why.startswith("hang: ")
        what = "stack of the rank that was waited for" if hung else "further evidence"
        shown.append((what, str(cause["evidence"])))
    elif why.startswith("hang: "):
        shown.append(("stack of the rank that was waited for", "none: it wrote no stack dump"))
    if isinstance(step, int) and step > 0:
        shown.append(("step it was working on", str(step)))
    if cause.get("node"):
        shown.append(("node", str(cause["node"])))
    if cause.get("outside"):
        shown.append(("sender of the signal", "not this run; the kernel does not tell who"))
    shown.append(("ledger line of the next start", str(following.line)))
    return tuple((what, text[:_LONGEST]) for what, text in shown)


def shown_node(node: str) -> str:
    """Returns host and address of a node name, without the part that distinguishes its agents."""
    return node.rpartition("/")[0] if node.count("/") == 2 else node


def _rest(text: str) -> str:
    text = text.strip().removeprefix("(").removesuffix(")")
    return f": {text}" if text else ""


def _named(name: str) -> str:
    number = getattr(signal, name, None)
    words = signal.strsignal(number) if isinstance(number, signal.Signals) else None
    return f"{name}, {words}" if words else name


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"
