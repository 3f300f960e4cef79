"""Real jobs on a tiny model and real files; nothing outlives its test."""

import os
import random
import shutil
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from benchmarks.support import python_path
from lab.chaos.plan import random_plan
from lab.chaos.run import run_chaos
from lab.container import network_possible
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import EXAMPLES, LAYOUT, RECIPE, ROOT, THIRTY, Forked, Job, told
from trainer.data.prepare.prepare import prepare


def pytest_terminal_summary(terminalreporter):
    """In `make layouts`, of every layout: how far its curve is from that of one process."""
    reports = terminalreporter.stats.get("passed", [])
    layouts = [
        value for report in reports for key, value in report.user_properties if key == LAYOUT
    ]
    if not os.environ.get("SOAK") or not layouts:
        return
    lines = ["| layout | ranks | loss | grad. norm | validation loss |", "|---|---|---|---|---|"]
    for ranks, overrides, differences in sorted(layouts, key=str):
        shown = [text for text in overrides if not text.startswith("model.architecture.options")]
        names = (
            text.removeprefix("strategy.").removeprefix("model.architecture.") for text in shown
        )
        layout = "; ".join(names)
        figures = " | ".join(f"{difference:.1e}" for difference in differences)
        lines.append(f"| {layout or 'FULL_SHARD'} | {ranks} | {figures} |")
    terminalreporter.write_line("\n".join(["", *lines]))


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with recipe.yaml and data/ (words that are drawn, as bytes: always the same)."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "recipe.yaml").write_text(RECIPE)
    corpus = folder / "corpus"
    corpus.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices(ascii_lowercase, k=draw.randint(2, 9))) for _ in range(400)]
    for number in range(60):
        text = draw.choices(words, weights=[1 / rank for rank in range(1, 401)], k=800)
        (corpus / f"{number:03}.txt").write_text(" ".join(text))
    prepare([str(corpus)], folder / "data", tokenizer="bytes", validation_fraction=0.1)
    return folder


@pytest.fixture(scope="session")
def alone(workspace):
    """alone(*overrides) → what one process tells of 30 steps."""
    known: dict[tuple[str, ...], tuple[list[float], ...]] = {}

    def alone(*overrides: str) -> tuple[list[float], ...]:
        if overrides not in known:
            run = f"alone-{len(known)}"
            given = (f"run.dir={run}", "strategy.name=ddp", *THIRTY, *overrides)
            code, output = Job(workspace, 1, given).wait()
            assert code == 0, output
            known[overrides] = told(workspace, run)
        return known[overrides]

    return alone


@pytest.fixture
def start(workspace):
    """start(ranks, *overrides, recipe=…, program=…) → Job; what still runs at the end dies."""
    jobs: list[Job] = []

    def start(ranks: int, *overrides: str, **options: Any) -> Job:
        jobs.append(Job(workspace, ranks, overrides, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def train(start):
    """train(ranks, *overrides): run to the end, which must be good; returns the output."""

    def train(ranks: int, *overrides: str) -> str:
        code, output = start(ranks, *overrides).wait()
        assert code == 0, output
        return output

    return train


@pytest.fixture
def fifty_faults(workspace, monkeypatch):
    """fifty_faults(run, *overrides, seed=…): an exact run under DDP, on one to four nodes, through
    50 faults. It must have the bits of an undisturbed run, and each sequence once. Returns its
    folder."""

    def fifty_faults(run: str, *overrides: str, seed: int, every: int) -> Path:
        monkeypatch.chdir(workspace)
        plan = random_plan(seed, 50, 1, 4, nodes=2, every=every, partitions=network_possible())
        # The run goes on while a node that joins starts, and for half a minute where a fault hits
        # a node that is out of the job.
        joins = sum(fault.what == "join" for fault in plan.faults)
        steps = plan.last_step + 20 + 100 * joins
        given = [f"run.dir={run}", "run.determinism=exact", f"run.steps={steps}", *overrides]
        given += ["strategy.name=ddp", "checkpoint.every=20"]
        given += ["elastic.snapshot_every=1", "checkpoint.slots=2"]
        verdict = run_chaos(
            "recipe.yaml", given, plan, tolerance=0.0, patience=180.0,
            environment={"PYTHONPATH": python_path(ROOT, workspace)}, start=Forked,
        )  # fmt: skip
        print(verdict)
        assert not verdict.problems, verdict
        assert len(verdict.outcomes) == 50
        return workspace / f"{run}-chaos"

    return fifty_faults


@pytest.fixture
def cluster(tmp_path):
    """cluster(name, nnodes, ranks=…, VARIABLE=…) → LocalNodes of an example, without a node yet."""
    started = []

    def cluster(name, nnodes, ranks, **environment):
        shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
        (tmp_path / "secret").write_text("0" * 32)
        (tmp_path / "secret").chmod(0o600)
        nodes = LocalNodes(
            ["-m", "elastic.job", f"{name}.py"],
            folder=tmp_path,
            nnodes=nnodes,
            logs=tmp_path,
            start=Forked,
            ranks=ranks,
            environment={
                "PYTHONPATH": python_path(ROOT),
                "PERDURE_SECRET_FILE": str(tmp_path / "secret"),
                **environment,
            },
            store_outside=nnodes != "1",
        )
        started.append(nodes.__enter__())
        return nodes

    yield cluster
    for nodes in started:
        nodes.__exit__()
