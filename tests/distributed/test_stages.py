"""A run whose mixture changes: killed, and resumed on other ranks, it trains on what it would have
undisturbed."""

import random
import re
import time
from string import ascii_lowercase

import pytest

import trainer.tasks.task  # noqa: F401  # slow to import while a run waits
from benchmarks.support import json_lines, python_path
from elastic.record.history import read_history
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT, SOAK, Forked, losses, soak, starts, wait_for_step
from tests.distributed.test_replay import BIT_BY_BIT, HOLDS
from tests.distributed.test_resume import assert_same
from trainer.data.prepare.prepare import prepare
from trainer.recipe import RecipeError
from trainer.tools.data_change import change_data
from trainer.tools.report.report import check

STEPS = 90 if SOAK else 8
EXACT = ("run.determinism=exact", "schedule={name: constant}", "batch.micro_batch=1")
SAVED = ("checkpoint.every=2", "checkpoint.when_busy=wait")
SOURCES = "data.sources=[{path: data}, {path: few}, {path: more}, {path: other}]"
STAGES = (
    "data.stages=[{until: 13, weights: {data: 7, few: 3}}, {until: 29, weights: {few: 1, other: 1}}"
    ", {until: 52, append: {few: [more]}}, {weights: {data: 1, few: 1, other: 1}}]"
)


@pytest.fixture(scope="module")
def mixed(workspace):
    """The workspace with small data sets few, more and other, of which epochs are short."""
    draw = random.Random(1)
    for name in ("few", "more", "other"):
        (workspace / f"{name}.txt").write_text("".join(draw.choices(ascii_lowercase + " ", k=400)))
        options = {"tokenizer": "bytes", "validation_fraction": 0.0}
        prepare([str(workspace / f"{name}.txt")], workspace / name, **options)
    return workspace


def assert_proved(run):
    fine, text = check(read_history(run), run)
    assert fine, text
    assert f"tokens of all {STEPS} steps" in text
    return text


PACED = """
import time, torch

class Paced(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Embedding(257, 257)

    def forward(self, input_ids, labels, document_ids):
        time.sleep(0.1)
        scores = self.head(input_ids).flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, labels.flatten())
"""


@pytest.mark.timeout(900)
def test_killed_and_on_another_world_it_is_the_undisturbed_run(mixed, start, train):
    """Two borders are inside a step, one inside what a kill loses."""
    command = (SOURCES, STAGES, *EXACT, *SAVED, "batch.micro_batch=4")
    train(1, "run.dir=stages-whole", f"run.steps={STEPS}", *command)
    kills = (4, 2), *(((9, 1), (17, 3), (28, 2), (41, 3)) if SOAK else ())
    for step, ranks in kills:
        job = start(ranks, "run.dir=stages", "run.steps=1000", *command)
        wait_for_step(mixed, "stages", step, job)
        job.kill()
    output = train(1, "run.dir=stages", f"run.steps={STEPS}", *command)
    assert "data: 4 stages, from sequences 0, 13, 29, 52; " in output
    assert_same(mixed, "stages-whole", "stages")
    text = assert_proved(mixed / "stages")
    assert "the data has 4 stages, from sequences 0, 13, 29, 52" in text
    if SOAK:  # from the beginning: across the attempts of all worlds, and all stages
        words = ("--step", f"{STEPS}", "--why", "--nproc", "2")
        job = start(1, *words, recipe="stages", program=("trainer.cli", "replay"))
        code, output = job.wait()
        assert code == 0, output
        assert BIT_BY_BIT in output
        assert re.search(r" of other +\S+/other\.txt:1 ", output), output
    ledger = mixed / "stages/ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"stages":[[13,', '"stages":[[12,'))
    fine, text = check(read_history(mixed / "stages"), mixed / "stages")
    assert not fine
    assert "is not what attempt 1 trained on: its stages differ" in text


@soak
@pytest.mark.timeout(3600)
def test_three_changes_while_it_runs_and_five_kills(mixed, tmp_path, start, train):
    """The second change is accepted, and everything killed before the run has paused for it."""
    (mixed / "paced.py").write_text(PACED)
    command = ("model={factory: 'paced:Paced'}", "strategy.name=ddp", "batch.global_batch=4")
    command += (*EXACT, *SAVED, f"run.steps={STEPS}")
    changes = {
        0: (30, {"data": 1.0, "few": 3.0}, [("", "few")], []),
        2: (55, {"few": 1.0, "other": 1.0}, [("", "other")], []),
        3: (75, None, [], [("few", "more")]),
    }
    run = mixed / "changed"
    for life, (ranks, begin, end) in enumerate(
        [(2, 4, 14), (1, 34, 34), (3, 36, 36), (2, 58, 66), (1, 80, 80), (2, STEPS, STEPS)]
    ):
        with LocalNodes(
            ["-m", "trainer", "recipe.yaml", "run.dir=changed", *command],
            folder=mixed,
            nnodes="1:1",
            logs=tmp_path,
            start=Forked,
            ranks=ranks,
            environment={"PYTHONPATH": python_path(ROOT, mixed)},
        ) as nodes:
            node = nodes.add()

            def reaches(step, node=node):
                deadline = time.monotonic() + 900
                while max(losses(mixed, "changed"), default=0) < step:
                    assert node.process.poll() is None, node.text()
                    assert time.monotonic() < deadline, node.text()
                    time.sleep(0.05)

            reaches(begin)
            if life in changes:
                before = len(starts(mixed, "changed"))
                step, weights, added, appended = changes[life]
                added = [(name, str(mixed / path)) for name, path in added]
                appended = [(name, str(mixed / path)) for name, path in appended]
                answer = change_data(run, step, weights, added, appended)
                assert answer.startswith(f"accepted: from sequence {4 * step}: ")
                with pytest.raises(RecipeError, match=r"--at-step 2: step \d+ is under way"):
                    change_data(run, 2, weights, added, appended)
            reaches(end)
            if life in (0, 3):
                assert len(starts(mixed, "changed")) == before + 1
            if begin == STEPS:
                assert nodes.wait(60) == [0]
            node.kill()
    table = (
        "data.stages=[{until: 120, weights: {data: 1}}, {until: 220, weights: {data: 1, few: 3}}, "
        "{until: 300, weights: {few: 1, other: 1}}, {append: {few: [more]}}]"
    )
    train(1, "run.dir=changed-whole", SOURCES, table, *command)
    assert_same(mixed, "changed-whole", "changed")
    assert "4 stages, from sequences 0, 120, 220, 300" in assert_proved(run)
    lines = json_lines(run / "ledger.jsonl")
    assert sum(line.get("event") == "data change" for line in lines) == 3
    assert sum(line.get("reason") == "the data changes" for line in lines) == 2
    words = ("--audit", "3", "--seed", "1", "--nproc", "3")
    code, output = start(1, *words, recipe="changed", program=("trainer.cli", "replay")).wait()
    assert code == 0, output
    assert HOLDS in output
