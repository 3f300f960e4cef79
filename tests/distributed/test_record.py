"""What a run says of itself: what a resume changes, what computes; and that no forgery passes."""

import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch

from elastic.record.history import read_history
from lab.local_nodes import LocalNodes
from tests.checkpointing.faults import until
from tests.distributed.forged import change_token
from tests.distributed.jobs import ROOT, Forked, Job, losses, soak, starts, wait_for_step
from trainer.cli.main import main
from trainer.run.provenance import recipe_file
from trainer.tools.report.report import check

CHANGED = "note: changed since the run last trained: "
PLAIN_KERNELS = {"ATEN_CPU_CAPABILITY": "default"}
"""Environment of a rank that computes as one on another CPU would."""
LATER = ("optimizer.lr=1e-3", "optimizer.betas=[0.9, 0.99]")
RUN = ("run.dir=recorded", "schedule={name: constant}")


@pytest.fixture(scope="session")
def recorded(workspace):
    """(directory of a run of 12 steps, of which the last 6 have another rate; what its five starts
    printed). The third is killed before anything is saved, the last is refused."""

    def train(*overrides):
        code, output = Job(workspace, 1, (*RUN, "checkpoint.every=3", *overrides)).wait()
        assert code == 0, output
        return output

    # Defaults, and what decides no step.
    same = ("data.workers=1", "optimizer.clip_norm=1.0", "tracking.name=other")
    told = [train("run.steps=6"), train("run.steps=9", *LATER, *same)]
    job = Job(workspace, 1, (*RUN, *LATER, "run.steps=1000", "checkpoint.every=0"))
    wait_for_step(workspace, "recorded", 11, job)
    job.kill()
    told += [job.output(), train("run.steps=12", *LATER, "checkpoint.every=0")]
    code, output = Job(workspace, 1, (*RUN, *LATER, "run.seed=8")).wait()
    assert code == 2, output
    return workspace / "recorded", [*told, output]


def test_a_resume_says_once_what_it_changes(workspace, recorded):
    run, told = recorded

    def changed(output):
        lines = [line for line in output.splitlines() if line.startswith(CHANGED)]
        return sorted(lines[0].removeprefix(CHANGED).split(", ")) if lines else []

    rate = ["optimizer.betas.1 0.95 → 0.99", "optimizer.lr 0.003 → 0.001"]
    assert list(map(changed, told)) == [
        [],
        [*rate, "run.steps 6 → 9"],
        ["checkpoint.every 3 → 0", "run.steps 9 → 1000"],
        ["run.steps 1000 → 12"],  # although what it loads had 9, and it trains as the one before
        [],
    ]
    assert "resuming after step 9 of 12" in told[3]
    lines = starts(workspace, run.name)
    assert lines[1]["changed"]["optimizer.lr"] == [0.003, 0.001]
    first, second, *_ = names = [line["attempt"] for line in lines]
    assert len(names) == 4
    assert [line["parent"] for line in lines] == ["", first, second, second]
    fine, text = check(read_history(run), run)
    assert fine, text
    assert "samples of all 12 steps, tokens of all 12 steps" in text
    assert "changed after step 6: " in text


def test_weights_that_a_run_did_not_begin_with_are_refused(workspace, recorded, start, train):
    """Wherever they lie; those that it began with may be left out later."""
    step = recorded[0] / "checkpoints/step-00000006"
    shutil.copytree(step, workspace / "begun")
    run = ("run.dir=tuned", "model.architecture=null", "schedule={name: constant}")
    train(1, *run, "model.init_from=begun", "run.steps=2")
    (workspace / "begun").rename(workspace / "begun-moved")
    assert "model.init_from" not in train(1, *run, "model.init_from=begun-moved", "run.steps=3")
    shutil.copytree(recorded[0] / "checkpoints/step-00000009", workspace / "begun")
    code, output = start(1, *run, "model.init_from=begun", "run.steps=4").wait()
    assert code == 2, output
    assert "model.init_from: the run began with other weights than those in begun" in output
    given = next(line for line in (workspace / "recipe.yaml").read_text().split("model:\n") if line)
    assert given


def test_ranks_on_unlike_machines_are_told_and_in_exact_mode_refused(workspace, start):
    run = ("run.dir=unlike", "run.steps=2", "schedule={}")
    code, output = start(2, *run, odd=PLAIN_KERNELS).wait()
    assert code == 0, output
    ours = torch.backends.cpu.get_cpu_capability()
    assert re.search(r"note: ranks compute on unlike .* DEFAULT \(\w+\) on 1 \(rank 1\)", output)
    (line,) = starts(workspace, "unlike")
    assert re.fullmatch(rf"{ours} \(\w+\) \+ DEFAULT \(\w+\)", line["computed_by"]["cpu"])
    assert {"code", "torch", "cpu"} == line["computed_by"].keys()

    run = ("run.dir=exact", "schedule={}", "run.determinism=exact", "run.steps=2")
    code, output = start(2, *run, odd=PLAIN_KERNELS).wait()
    assert code == 2, output
    assert re.search(rf"cpu is DEFAULT \(\w+\) on rank 1, {ours} \(\w+\) on rank 0", output)
    assert not starts(workspace, "exact")


@soak
@pytest.mark.timeout(240)
def test_a_takeover_keeps_the_record_and_a_machine_of_another_kind_stays_out(workspace, tmp_path):
    """Of an exact run. The rank that becomes the first finds no run directory on its machine."""
    run = workspace / "takeover"
    overrides = [f"run.dir={run.name}", "run.determinism=exact", "run.steps=100000"]
    overrides += ["elastic.snapshot_every=1", "checkpoint.every=0", "checkpoint.slots=2"]
    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", *overrides, f"tracking.prometheus={tmp_path / 'a.prom'}"],
        folder=workspace,
        nnodes="1:2",
        logs=tmp_path,
        start=Forked,
        ranks=2,
        environment={"PYTHONPATH": str(ROOT)},
    ) as nodes:
        node = nodes.add()

        def reaches(step):
            return until(lambda: max(losses(workspace, run.name), default=0) >= step, 60)

        assert until(run.exists, 60), node.text()
        assert reaches(5), node.text()
        nodes.environment = {**nodes.environment, **PLAIN_KERNELS}
        stranger = nodes.add()
        assert until(lambda: stranger.process.poll() is not None, 60), stranger.text()
        assert stranger.process.returncode == 2
        assert "cpu is DEFAULT" in stranger.text()

        shutil.rmtree(run / "recipes")
        (run / "recipe.yaml").unlink()
        os.kill(node.trainers()[0], signal.SIGKILL)
        assert reaches(max(losses(workspace, run.name)) + 5), node.text()
        record = tmp_path / "a.prom"
        tracked = re.compile(r"perdure_step\S* (\d+)")
        goal = max(losses(workspace, run.name))
        assert until(lambda: int(tracked.search(record.read_text())[1]) >= goal, 30), node.text()
        before, after = read_history(run).attempts
    assert after.parent is before
    assert after.start.parent == before.start.attempt
    assert recipe_file(run, after.start.recipe).is_file()
    assert dict(after.start.changed) == {}
    assert CHANGED not in node.text()


def edited(step, change):
    """A forgery: the line of a step, changed; None removes it."""

    def forge(run):
        lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        lines = [
            change(line) if line["kind"] == "step" and line["step"] == step else line
            for line in lines
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines if line)
        (run / "ledger.jsonl").write_text(text)

    return forge


def without(key):
    return lambda line: {name: value for name, value in line.items() if name != key}


def other_recipe(name, old, new):
    """A forgery: something else in a recipe, by its place in the run directory or as the newest."""

    def forge(run):
        path = recipe_file(run, starts(run.parent, run.name)[0]["recipe"])
        path = run / name if name else path
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return forge


def other_token(*, sealed, claimed=False):
    """A forgery: a token of step 5 is another; the index is made anew, and the ledger names it."""
    return lambda run: change_token(run, sealed=sealed, claimed=claimed)


FORGERIES = {
    "consumed removed": (edited(5, without("consumed")), "step 5 .* has no consumed, which"),
    "consumed changed": (
        edited(5, lambda line: {**line, "consumed": "0" * 16}),
        "step 5 .* a rank consumed other sequences",
    ),
    "norm removed": (edited(5, without("norm")), "step 5 .* has no norm"),
    "loss removed": (edited(5, without("loss")), "step 5 .* has no loss"),
    "line removed": (edited(5, lambda line: None), "no record of 5"),
    "last line removed": (edited(12, lambda line: None), "step 12, but its record ends at step 11"),
    "marked skipped": (
        edited(5, lambda line: {**line, "skipped": True}),
        "step 5 .* is marked as skipped for its no reason, but loss is",
    ),
    "marked skipped, with a reason": (
        edited(5, lambda line: {**line, "skipped": True, "why": "loss"}),
        "step 5 .* is marked as skipped for its loss, but loss is",
    ),
    "marked skipped, without a number": (
        edited(5, lambda line: {**line, "skipped": True, "why": "weights"}),
        "a save of attempt 1 at step 6 counts 0 steps skipped, but the lines up to there have 1",
    ),
    "marked skipped, with its number": (
        edited(8, lambda line: {**line, "skipped": True, "why": "loss", "loss": None}),
        "loaded a state with 0 steps skipped, but the lines before it have 1",
    ),
    "no longer skipped": (
        edited(5, lambda line: {**line, "norm": "inf"}),
        "step 5 .*: norm is inf, but the step is not marked as skipped",
    ),
    "recipe of then": (other_recipe("", "lr: 0.003", "lr: 0.004"), "is not the recipe of"),
    "recipe of now": (other_recipe("recipe.yaml", "lr: 0.001", "lr: 0.002"), "is not the recipe"),
    "data": (other_token(sealed=False), "a rank consumed other tokens"),
    "data, sealed": (other_token(sealed=True), "its fingerprint differs"),
    "data, sealed and claimed": (
        other_token(sealed=True, claimed=True),
        "step 5 .* a rank consumed other tokens",
    ),
}


def test_no_forgery_passes(workspace, recorded, tmp_path):
    for forgery, (forge, told) in FORGERIES.items():
        folder = tmp_path / forgery
        run = folder / "run"
        shutil.copytree(recorded[0], run, ignore=shutil.ignore_patterns("checkpoints"))
        shutil.copytree(workspace / "data", folder / "data")
        ledger = run / "ledger.jsonl"
        ledger.write_text(ledger.read_text().replace(str(workspace), str(folder)))
        if forgery == next(iter(FORGERIES)):
            assert check(read_history(run), run)[0] is True
        forge(run)
        fine, text = check(read_history(run), run)
        assert fine is False, forgery
        assert re.search(rf"^problem: .*{told}", text, re.MULTILINE), (forgery, text)


def test_what_is_away_is_said_and_is_no_proof(workspace, recorded, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(recorded[0], run, ignore=shutil.ignore_patterns("checkpoints"))
    ledger = run / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace(str(workspace), str(tmp_path)))
    fine, text = check(read_history(run), run)
    assert fine is None
    (line,) = [line for line in text.splitlines() if "compared" in line]
    assert line == (
        f"not compared: there is no data in {tmp_path / 'data'}, which has no index.json "
        "(attempt 1, 2, 4)"
    )
    assert "every sequence exactly once: 96 sequences in 12 steps over 4 attempts" in text
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # as main does, and undone after the test
    for options, code in ([], 2), (["--without-data"], 0):
        monkeypatch.setattr(sys, "argv", ["perdure", "report", str(run), "--check", *options])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
    shutil.copytree(workspace / "data", tmp_path / "data")
    recipe_file(run, starts(tmp_path, "run")[1]["recipe"]).unlink()
    fine, text = check(read_history(run), run)
    assert fine is None
    assert re.search(r"not compared: .*/recipes/\w+\.yaml: No such file .*attempt \d\)", text)
