"""A run with a failure, written in milliseconds."""

import json

import pytest

from elastic.record.ledger import Ledger, StartLine

BATCH = 8
DAY_ONE = 1_795_248_000.0


def write_run(folder):
    """20 steps: rank 1 is killed after step 12, steps 11 and 12 are done again on more nodes, and a
    day after step 16 the run goes on."""
    plan = [
        {"at": DAY_ONE, "steps": range(1, 13), "saved": 10, "world": 2},
        {"at": DAY_ONE + 13, "steps": range(11, 17), "saved": 16, "world": 4},
        {"at": DAY_ONE + 86400, "steps": range(17, 21), "saved": 20, "world": 2},
    ]
    for number, part in enumerate(plan):
        at, steps = part["at"], part["steps"]
        clock = iter(range(1, 1000))
        cause = {"rank": 1, "node": "n0", "step": 13, "why": "SIGKILL", "at": DAY_ONE + 12.5}
        start = StartLine(
            step=steps[0] - 1,
            sequences=(steps[0] - 1) * BATCH,
            global_batch=BATCH,
            world_size=part["world"],
            nodes=part["world"] // 2,
            source="storage" if number else "none",
            cause=cause if number == 1 else None,
            phases={"imports": 0.2, "load": 0.1},
            at=at,
            monotonic=at,
            boot="a boot",
        )
        with pytest.MonkeyPatch.context() as patch:
            # One second of its clock passes between two lines.
            patch.setattr(
                "elastic.record.ledger.clock", lambda at=at, clock=clock: at + next(clock)
            )
            with Ledger(folder / "ledger.jsonl", start) as ledger:
                for step in steps:
                    ledger.step(step, (step - 1) * BATCH, step * BATCH, 0.9)
                if number:
                    ledger.save(part["saved"], 0.4)
                    ledger.save(part["saved"] + 1, 0.1, error="No space left on device")
                    ledger.end(130 if number == 1 else 0, "interrupted" if number == 1 else "done")
        with (folder / "metrics.jsonl").open("a") as metrics:
            for second, step in enumerate(steps, 1):
                record = {"step": step, "time": at + second, "loss": 8 - step / 4}
                record |= {"tokens_per_second": 5000 + step, "peak_memory": 3e9}
                metrics.write(json.dumps(record) + "\n")
            metrics.write(json.dumps({"step": step, "time": at, "validation_loss": None}) + "\n")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 21, "ti')
