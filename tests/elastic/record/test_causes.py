"""The cause of an end in one line, by what the ledger says."""

import json

import pytest

from elastic.group.membership import (
    Membership,
    MembershipFailure,
    MembershipLimits,
    accuse,
    complete,
    fail,
)
from elastic.node.vitals import main_stack
from elastic.record.causes import ending
from elastic.record.history import read_history

HANG = "hang: rank 1 in step 16, phase step, for 4.2 s (allowed: 3.5 s); "


def failure(why, rank=1, **more):
    return {"rank": rank, "node": "n0", "step": 13, "why": why, "at": 108.0, **more}


def named(folder, cause=None, end=None, again=True):
    """How the first of two attempts ended."""
    common = {"sequences": 0, "global_batch": 8, "step": 0, "boot": "b", "monotonic": 0.0}
    lines = [{"kind": "start", **common, "world_size": 2, "at": 100.0, "attempt": "a"}]
    if end:
        code, reason = end
        tail = {"step": 0, "after": 5.0, "attempt": "a"}
        lines.append({"kind": "end", "code": code, "reason": reason, **tail})
    if again:
        more = {"world_size": 3, "at": 110.0, "monotonic": 10.0, "attempt": "c", "cause": cause}
        lines.append({"kind": "start", **common, **more})
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = read_history(folder)
    return ending(history, history.attempts[0])


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        (failure("SIGKILL"), "killed", "Rank 1 on n0 was killed from outside (SIGKILL)"),
        (failure("SIGSEGV"), "crashed", "Rank 1 on n0 crashed (SIGSEGV, Segmentation fault)"),
        (
            failure("SIGKILL (the kernel killed it: out of memory)"),
            "memory",
            "ran out of memory: the kernel killed it",
        ),
        (
            failure("exit code 1 (OutOfMemoryError: CUDA out of memory. Tried)"),
            "memory",
            "Rank 1 on n0 ran out of memory: OutOfMemoryError",
        ),
        (failure("exit code 1"), "error", "ended with exit code 1, and reported no error"),
        (
            failure("exit code 1 (ValueError: (a) (b))", error="ValueError: (a) (b)"),
            "error",
            "Rank 1 on n0 ended by an error: ValueError: (a) (b)",
        ),
        (
            failure("exit code 2 (StorageError: File too large (EFBIG))"),
            "storage",
            "was refused by storage: StorageError: File too large (EFBIG)",
        ),
        (
            failure("exit code 1 (OSError: [Errno 28] No space left on device)"),
            "storage",
            "No space left on device",
        ),
        (failure(HANG + "stopped by a signal"), "hang", "was stopped from outside, and all others"),
        (failure(HANG + "behind all others"), "hang", "(step 16, in “step”, for 4.2 s)"),
        (
            failure("hang: all 4 ranks stand in the same place: rank 0 in step 3, phase reduce"),
            "hang",
            "All 4 ranks waited for each other",
        ),
        (failure("node lost", None), "node", "Node n0 is gone: no sign of life"),
        (failure("sent away: it failed 3 times", None), "node", "was sent away: it failed 3 times"),
        (failure("rank 3 lost its connection to another", None), "network", "Rank 3 on n0 lost"),
        (
            failure("exit code 1 (its zygote was ended by SIGKILL)"),
            "process",
            "forks ranks from, which was killed (SIGKILL)",
        ),
        (failure("a stand-in was killed", None), "process", "A process of the launcher on n0"),
        ({}, "error", "A rank: failed"),
        ({"rank": [], "why": {}, "node": 3, "at": None}, "error", "Node 3: failed"),
    ],
)
def test_a_failure_is_named(tmp_path, cause, kind, words):
    how = named(tmp_path, cause)
    assert (how.kind, how.failed) == (kind, True)
    assert words in how.text
    assert "\n" not in how.text
    assert ("ledger line of the next start", "2") in how.evidence


@pytest.mark.parametrize(
    ("end", "again", "kind", "words", "failed"),
    [
        ((0, "finished"), False, "finished", "Finished", False),
        ((76, "a node joins"), True, "join", "with state saved: 2 ranks became 3", False),
        ((75, "a node leaves"), True, "leave", "was told to go, and left", False),
        ((130, "interrupted"), True, "asked", "Stopped by Ctrl-C", False),
        ((93, "step 5: loss is nan"), False, "stopped", "for good: step 5: loss is nan", True),
        ((1, "RuntimeError: out of luck"), True, "error", "ended by an error: RuntimeError", True),
        ((1, "OSError: [Errno 5] Input/output error"), True, "storage", "refused by storage", True),
        (None, True, "silent", "Everything was killed at once", True),
        (None, False, "open", "running, or killed", False),
    ],
)
def test_an_end_is_named(tmp_path, end, again, kind, words, failed):
    how = named(tmp_path, end=end, again=again)
    assert (how.kind, how.failed) == (kind, failed)
    assert words in how.text


def test_a_hang_shows_the_stack_that_was_waited_for(tmp_path):
    dump = (
        'Thread 0x1 (most recent call first):\n  File "/a/data.py", line 3 in fetch\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/b/model.py", line 7 in forward\n'
        '  File "/b/train.py", line 9 in train\n'
    )
    stack = main_stack(dump)
    assert stack == 'File "/b/model.py", line 7 in forward\nFile "/b/train.py", line 9 in train'
    assert main_stack("") == ""
    how = named(tmp_path, failure(HANG + "behind all others", evidence=stack))
    assert ("stack of the rank that was waited for", stack) in how.evidence
    how = named(tmp_path, failure(HANG + "stopped by a signal"))
    assert ("stack of the rank that was waited for", "none: it wrote no stack dump") in how.evidence


def test_the_document_keeps_the_evidence_of_the_newest_failure():
    state = Membership(round=1, members=("a", "b"), size=2)
    limits = MembershipLimits(minimum=1, maximum=2)
    for step in (3, 9):
        one = MembershipFailure(
            "a", 0, step, "hang: …", 1000.0 * step, evidence=f"stack of step {step}"
        )
        state = fail(state, 1, state.generation, one, limits)
    assert [one.evidence for one in state.failures] == ["", "stack of step 9"]
    assert Membership.decode(state.encode()).failures == state.failures


def test_a_round_that_ends_by_no_lost_node_has_a_cause():
    state = Membership(round=1, members=("a",), size=1, arrived=("a",))
    why = MembershipFailure("a", None, 3, "a stand-in was killed", 10.0)
    accused = accuse(accuse(state, 1, why), 1, MembershipFailure("a", None, 3, "a later one", 11.0))
    began = complete(accused, MembershipLimits(minimum=1, maximum=1), 10.0)
    assert (began.round, began.cause, began.lost) == (2, why, None)
    assert accuse(state, 2, why) == state
