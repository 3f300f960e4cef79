"""A run whose mixture changes: killed, and resumed on other ranks, it trains on what it would have
undisturbed."""

import random
from string import ascii_lowercase

import pytest

from elastic.record.history import read_history
from tests.distributed.jobs import SOAK, wait_for_step
from tests.distributed.test_resume import assert_same
from trainer.data.prepare.prepare import prepare
from trainer.tools.report.report import check

STEPS = 60 if SOAK else 10
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


@pytest.mark.timeout(900)
def test_killed_and_on_another_world_it_is_the_undisturbed_run(mixed, start, train):
    """Two borders are inside a step, one inside what a kill loses."""
    command = (SOURCES, STAGES, *EXACT, *SAVED)
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
