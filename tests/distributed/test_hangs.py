"""A healthy rank is left alone, whatever it waits for; one that is stopped is found."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.support import python_path
from elastic.process import children
from lab.local_nodes import LocalNodes
from tests.checkpointing.faults import until
from tests.distributed.jobs import ROOT, Forked, records, soak

FACTORY = '''
import time
from pathlib import Path

from torch import distributed, nn

from trainer.data.loader import TokenStream

fetch = TokenStream.fetch_with_digest


def fetch_slowly(stream, positions):
    while Path("storage-is-away").exists():
        time.sleep(0.05)
    return fetch(stream, positions)


TokenStream.fetch_with_digest = fetch_slowly


class Model(nn.Module):
    """A bigram table that takes its time for each sequence, in every tenth call ten times that."""

    def __init__(self, seconds):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(257, 257)])
        self.seconds, self.calls = seconds, 0

    def forward(self, input_ids, labels, document_ids=None):
        self.calls += 1
        rank = distributed.get_rank()
        while Path(f"asleep-{rank}").exists():
            time.sleep(0.05)
        while Path(f"spinning-{rank}").exists():
            pass
        work = self.seconds * len(input_ids) * (1 if self.calls % 10 else 10)
        began = time.thread_time()
        while time.thread_time() - began < work:
            pass
        logits = self.layers[0](input_ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(seconds):
    return Model(seconds)
'''
AWAY = 4.1
"""Seconds: longer than a step of milliseconds may take."""


@pytest.fixture
def slow_job(workspace, tmp_path):
    """slow_job(run, seconds) → the node of a job of two ranks with uneven shares, each sequence of
    which takes so many seconds."""
    (workspace / "slow_model.py").write_text(FACTORY)
    head, rest = (workspace / "recipe.yaml").read_text().split("model:\n")
    rest = rest[rest.index("data:") :]
    (workspace / "slow.yaml").write_text(f"{head}model: {{factory: 'slow_model:build'}}\n{rest}")
    with ExitStack() as stack:

        def slow_job(run, seconds):
            recipe = ["slow.yaml", f"run.dir={run}", "run.steps=1000000"]
            recipe += ["run.evaluate_every=10", "checkpoint.every=15", "checkpoint.slots=2"]
            recipe += ["elastic.snapshot_every=1", "batch.global_batch=5", "batch.micro_batch=3"]
            recipe += ["data.workers=0", f"model.factory_options={{seconds: {seconds}}}"]
            nodes = LocalNodes(
                ["-m", "trainer", *recipe],
                folder=workspace,
                nnodes="1",
                logs=tmp_path,
                start=Forked,
                ranks=2,
                environment={"PYTHONPATH": python_path(ROOT, workspace)},
            )
            return stack.enter_context(nodes).add()

        yield slow_job
        (workspace / "storage-is-away").unlink(missing_ok=True)


def reached(workspace, run):
    """The last step that was logged."""
    return max((record["step"] for record in records(workspace, run)), default=0)


def keep_waiting(workspace, node):
    """Storage is away, and then the writer of checkpoints is stopped, for a while each."""
    (workspace / "storage-is-away").touch()
    time.sleep(AWAY)
    (workspace / "storage-is-away").unlink()
    writers = [pid for rank in node.trainers() for pid in children(rank)]
    assert writers
    for pid in writers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(AWAY)
    for pid in writers:
        os.kill(pid, signal.SIGCONT)


def try_to_death(workspace, node, run, seconds):
    """The job is kept waiting for `seconds`, and nobody is called hung; then a rank is stopped, and
    found."""
    assert until(lambda: reached(workspace, run) >= 12, 60 + seconds), node.text()
    end = time.monotonic() + seconds
    while True:
        keep_waiting(workspace, node)
        now = reached(workspace, run)
        assert until(lambda now=now: reached(workspace, run) >= now + 2, 250), node.text()
        if time.monotonic() > end:
            break
    assert not re.search("hang|resuming", node.text()), node.text()
    began = time.monotonic()
    os.kill(node.trainers()[1], signal.SIGSTOP)
    assert until(lambda: "a hang: rank 1 " in node.text(), 10), node.text()
    assert time.monotonic() - began < 10
    assert until(lambda: "resuming after step" in node.text(), 60), node.text()


def test_who_waits_for_data_or_storage_is_left_alone_and_who_is_stopped_is_found(
    slow_job, workspace
):
    try_to_death(workspace, slow_job("waits", 0.003), "waits", 0)


@contextmanager
def burners(count):
    """So many processes that never rest."""
    command = [sys.executable, "-m", "elastic.process", "tests.distributed.burner"]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@soak
@pytest.mark.timeout(1200)
def test_a_healthy_job_on_a_busy_machine(slow_job, workspace):
    """Two more processes that never rest on the two cores; HEALTHY_SECONDS, by default 600."""
    with burners(2):
        seconds = float(os.environ.get("HEALTHY_SECONDS", "600"))
        try_to_death(workspace, slow_job("busy", 0.05), "busy", seconds)


@soak
@pytest.mark.parametrize(("how", "seconds"), [("asleep", 30), ("spinning", 300)])
def test_who_hangs_in_the_users_code_is_found_on_a_busy_machine(slow_job, workspace, how, seconds):
    with burners(2):
        node = slow_job(how, 0.003)
        assert until(lambda: reached(workspace, how) >= 12, 60), node.text()
        (workspace / f"{how}-1").touch()
        try:
            assert until(lambda: "a hang: rank 1 " in node.text(), seconds), node.text()
        finally:
            (workspace / f"{how}-1").unlink()
        now = reached(workspace, how)
        assert until(lambda: reached(workspace, how) >= now + 3, 60), node.text()
