"""Real torchrun jobs on a tiny model and real files; nothing outlives its test."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.jobs import RECIPE, ROOT, Job
from trainer.data.prepare import prepare


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with recipe.yaml and data/ (this repository's own texts, as bytes)."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "recipe.yaml").write_text(RECIPE)
    texts = [str(path) for path in sorted((ROOT / "trainer").rglob("*.py"))]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, path in enumerate(texts):
        (corpus / f"{number:03}.txt").write_text(Path(path).read_text())
    prepare([str(corpus)], folder / "data", tokenizer="bytes", validation_fraction=0.1)
    return folder


@pytest.fixture
def start(workspace):
    """start(ranks, *overrides, recipe=…, torchrun=…) → Job; what still runs at the end dies."""
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
