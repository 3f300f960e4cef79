"""Where a run ends: after so many epochs, or when it has stopped improving."""

import math
import re
import shutil

from benchmarks.support import json_lines
from checkpointing import read_state
from checkpointing.tools.inspect import find_checkpoint, ls
from elastic.record.history import read_history
from tests.distributed.jobs import records, starts, told
from trainer.tools.report.report import check, report

ENDS = (
    *("run.steps=0", "run.epochs=0.02", "run.evaluate_every=1", "run.stop_after=2"),
    *("checkpoint.every=1", "checkpoint.when_busy=wait", "checkpoint.keep=1"),
    "checkpoint.keep_best=1",
    *("schedule={factory: 'tests.distributed.ending:fading'}", "run.determinism=exact"),
)


def test_a_run_ends_at_the_same_step_whatever_happens_to_it(workspace, start, train):
    """It improves until step 2. Of its 10 sequences for validation, two ranks take three
    micro-batches each, and one takes five."""
    (workspace / "ended").mkdir()
    (workspace / "prompts.txt").write_text("a\nthe b\n")
    sampled = ("--prompts", "prompts.txt", "--follow", "--max-new-tokens", "3")
    follower = start(1, *sampled, recipe="ended", program=("trainer.cli", "eval"))
    output = train(1, "run.dir=ended", *ENDS)
    counted = re.search(r"([\d,]+) sequences per epoch; 0.02 epoch\(s\) are (\d+) steps", output)
    batches = int(counted[1].replace(",", "")) / 8
    steps, longer = math.ceil(0.02 * batches), math.ceil(0.03 * batches)
    assert int(counted[2]) == steps > 4
    (why,) = re.findall(r"^stopped early .*$", output, flags=re.M)
    assert re.fullmatch(
        r"stopped early after step 4: 2 validation pass\(es\) in a row found no lower loss; "
        r"the best was \d\.\d{4}, after step 2",
        why,
    )

    code, printed = follower.wait()  # it ends with the run
    assert (code, "step 4: 2 sample(s), in ended/samples.jsonl" in printed) == (0, True), printed
    samples = json_lines(workspace / "ended/samples.jsonl")
    prompts = [(line["step"], line["prompt"]) for line in samples if line["step"] in (2, 4)]
    assert prompts == [(2, "a"), (2, "the b"), (4, "a"), (4, "the b")], printed
    assert {line["text"] for line in samples if line["step"] == 4} == {
        line["text"] for line in samples if line["step"] == 2
    }  # the weights of both are the same

    cut = ("run.dir=cut", *ENDS)
    killed = ("tests.distributed.ending", "SIGKILL", "11")  # in the pass that decides
    assert start(2, *cut, program=killed).wait()[0] == -9
    leaving = ("tests.distributed.ending", "SIGTERM", "3")  # the same, in another world
    code, output = start(1, *cut, program=leaving).wait()
    assert code == 75, output
    assert "step 4 is not validated yet: a node leaves" in output
    output = train(2, *cut)
    assert f"resuming after step 4 of {steps}" in output
    assert why in output
    # The pass that was made up is not in the checkpoint, but in the ledger.
    output = train(1, *cut)
    assert f"nothing to train: the run has {why}" in output
    passes = [one["step"] for one in records(workspace, "cut") if "validation_loss" in one]
    assert passes.count(4) == 1

    # As if all had been killed after that pass, before the last step was saved.
    shutil.rmtree(workspace / "ended/checkpoints/step-00000004")
    output = train(2, "run.dir=ended", *ENDS, "run.epochs=0.03")
    assert "changed since the run last trained: run.epochs 0.02 → 0.03" in output
    assert why in output

    # The last step of the second was saved before it was validated.
    for run, passes, most in ("ended", 2, longer), ("cut", 1, steps):
        folder, history = workspace / run, read_history(workspace / run)
        assert starts(workspace, run)[-1]["steps"] == most
        assert [history.attempts[-1].end[key] for key in ("code", "reason")] == [0, why]
        assert check(history)[0], check(history)[1]
        page = report(folder)
        assert f"{folder}: 4 of {most} steps" in page
        assert "validation: 4 passes, the lowest loss" in page
        assert why in page
        state = read_state(find_checkpoint(folder))
        assert [state[key] for key in ("step", "best_step", "passes_since_best")] == [4, 2, passes]
        assert state["recipe"]["run"]["steps"] == 0
        assert state["schedule"]["steps"] == most
        assert find_checkpoint(folder, "best").name == "step-00000002"
        assert re.search(r"^step-00000002 .* best$", str(ls(folder)), flags=re.M)
    assert told(workspace, "ended") == told(workspace, "cut")
