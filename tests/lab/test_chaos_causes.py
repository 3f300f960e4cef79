"""Causes that a ledger names, beside the faults that came."""

import json

from elastic.record.history import read_history
from lab.chaos.causes import check_names
from lab.chaos.plan import Fault

CAUSE = {"rank": 1, "node": "n1", "step": 5, "why": "SIGKILL", "at": 1050.0, "outside": True}


def test_an_end_is_explained_by_a_fault_that_came_then(tmp_path):
    common = {"kind": "start", "step": 0, "sequences": 0, "global_batch": 8, "world_size": 2}
    common |= {"boot": "b"}
    causes = [None, CAUSE, {**CAUSE, "rank": None, "why": "node lost"}, None]
    lines = [
        {**common, "at": at, "monotonic": at, "attempt": f"{at:x}", "cause": cause}
        for at, cause in zip((1000, 1060, 1120, 1180), causes, strict=True)
    ]
    end = {"kind": "end", "code": 76, "reason": "a node joins", "step": 0, "after": 3.0}
    lines.insert(3, {**end, "attempt": f"{1120:x}"})
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = read_history(tmp_path)

    killed, cut, join = Fault(what="kill_worker"), Fault(what="partition"), Fault(what="join")
    named = check_names(history, [(killed, 1050.0), (cut, 1110.0), (join, 1130.0)])
    assert (named.right, named.wrong, named.share) == (3, [], 1.0)
    # A node that was cut off comes back by itself.
    assert check_names(history, [(killed, 1050.0), (cut, 1110.0)]).right == 3
    # What came too early, or too late, explains nothing.
    named = check_names(history, [(killed, 1070.0), (join, 600.0)])
    assert named.right == 0
    assert named.wrong[0].startswith("attempt 1: killed (Rank 1 on n1 was killed from outside")
    assert named.wrong[0].endswith("came: nothing")
    assert str(named).startswith("causes named: 0 of 3 (0%)\n  not attempt 1")
