"""Runs that are told to go, at any moment: what they save, and the code they leave with."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.support import python_path
from elastic.exits import SIGNALS
from lab.local_nodes import LocalNode
from tests.distributed.jobs import ROOT, Forked, soak
from trainer.data.prepare.sources import UNIT_BYTES

PERDURE = Path(sys.executable).parent / "perdure"
LONG_EVALUATION = ["run.evaluate_every=2", "data.validation_sequences=800", "batch.micro_batch=1"]


@pytest.fixture
def launch(workspace, tmp_path):
    """launch(*words) → a `perdure` command as leader of a process group, as a shell starts it; of
    what has imported torch, unless `anew`."""
    started = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    # A test that has prepared data in this process has left it blocked, as `perdure data` does.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def launch(*words, anew=False):
        log = tmp_path / f"{len(started)}.log"
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT, workspace)}
        if anew:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [PERDURE, *words],
                    cwd=workspace,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
        else:
            module = "torch.distributed.run" if words[0].startswith("--rdzv") else "trainer.cli"
            process = Forked([module, *words], workspace, environment, log)
        started.append(LocalNode(0, process, log))
        return started[-1]

    yield launch
    for one in started:
        one.kill()


def until(condition, node, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert node.process.poll() is None, node.text()
        assert time.monotonic() < deadline, node.text()
        time.sleep(0.01)


def ends(node, code, seconds=20):
    """The node, and all that it has started, ends in this way."""
    family = node.family()
    assert node.process.wait(seconds) == code, node.text()
    # No page, and no line of torch's elastic agent (E1125 …) or of gloo's (… GLHF!).
    assert not re.search(r"Traceback|^[EW]\d{4} |GLHF", node.text(), flags=re.M), node.text()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < deadline, family
        time.sleep(0.01)


def evaluating(node, step):
    """Whether both ranks are in the evaluation after a step."""
    found = [node.progress(local_rank) for local_rank in range(2)]
    return all(one and (one.step, one.phase) == (step, "evaluate") for one in found)


def test_ctrl_c_and_notices_in_every_phase(launch, start, workspace):
    train = ["train", "recipe.yaml", "run.dir=leaving", *LONG_EVALUATION]
    node = launch(*train, anew=True)
    until(node.zygote, node)  # it still imports what an agent needs
    node.process.send_signal(signal.SIGTERM)
    ends(node, 75)
    assert not (workspace / "leaving").exists()

    node = launch(*train)
    until(lambda: evaluating(node, 2), node)
    os.killpg(node.process.pid, signal.SIGINT)
    ends(node, 130)
    assert "step 2 is not validated at all: a node leaves" in node.text()
    assert (workspace / "leaving/checkpoints/step-00000002").exists()

    node = launch(*train)
    until(lambda: evaluating(node, 4), node)
    code, output = start(1, "run.dir=leaving").wait()
    assert code == 2, output
    assert f"process {node.process.pid} on {os.uname().nodename}, since" in output
    os.kill(node.trainers()[1], signal.SIGSTOP)  # it will not save
    os.killpg(node.process.pid, signal.SIGINT)
    until(lambda: "the next one ends it at once" in node.text(), node)
    os.killpg(node.process.pid, signal.SIGINT)
    ends(node, 130, seconds=5)


def test_torchrun_leaves_with_our_code_and_line(launch):
    """Whatever its --max-restarts, which is 0."""
    torchrun = ["--rdzv-backend", "perdure", "--rdzv-endpoint", "127.0.0.1:0"]
    train = ["-m", "trainer", "recipe.yaml", "run.dir=torchrun", *LONG_EVALUATION]
    node = launch(*torchrun, *train)
    until(lambda: (found := node.progress(0)) and found.step >= 2, node)
    os.killpg(node.process.pid, signal.SIGINT)
    ends(node, 130)
    assert node.text().endswith("this node has left; the same command resumes\n")


LONG_PASS = """
import time, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Embedding(257, 257)])

    def forward(self, input_ids, labels, document_ids):
        if torch.distributed.is_initialized():  # and not where it is only tried
            time.sleep(600)
        return self.layers[0](input_ids).mean()
"""


def test_a_notice_in_a_long_first_pass_is_followed_at_once(
    launch, workspace, tmp_path, monkeypatch
):
    """Nothing is lost by that: the run has nothing yet that is not in storage. Nothing is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (workspace / "long_pass.py").write_text(LONG_PASS)
    model = ["model.architecture=null", "model.factory=long_pass:Model", "strategy.name=ddp"]
    node = launch("train", "recipe.yaml", "run.dir=long-pass", *model, "--nproc-per-node", "2")

    def computing():
        found = [node.progress(local_rank) for local_rank in range(2)]
        return all(one and (one.step, one.phase) == (1, "step") for one in found)

    until(computing, node)
    node.process.send_signal(signal.SIGTERM)
    ends(node, 75, seconds=10)
    assert "this node must leave the job (SIGTERM)" in node.text()
    assert not list(tmp_path.glob("torchelastic_*"))


SHARING = """
import time, torch
from multiprocessing.shared_memory import SharedMemory

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Embedding(257, 257)])

    def forward(self, input_ids, labels, document_ids):
        SharedMemory(create=True, size=1).unlink()  # lets SIGINT and SIGTERM through
        time.sleep(0 if self.training else 0.01)
        return self.layers[0](input_ids).mean()
"""


@soak
def test_a_process_without_an_agent_leaves_likewise(start, workspace):
    (workspace / "sharing.py").write_text(SHARING)
    model = ["model.architecture=null", "model.factory=sharing:Model", "strategy.name=ddp"]
    job = start(1, "run.dir=leaving-alone", *LONG_EVALUATION, *model)
    node = LocalNode(0, job.ranks[0], Path())
    deadline = time.monotonic() + 60
    while not ((found := node.progress(0)) and found.phase == "evaluate"):
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.01)
    code, output = start(1, "run.dir=leaving-alone").wait()
    assert code == 2, output
    assert f"process {job.ranks[0].pid} on {os.uname().nodename}, since" in output
    os.kill(job.ranks[0].pid, signal.SIGINT)
    code, output = job.wait()
    assert code == 130, output
    assert "step 2 is not validated" in output
    assert "Traceback" not in output
    assert (workspace / "leaving-alone/checkpoints/step-00000002").exists()

    job = start(1, "run.dir=leaving-alone", "run.steps=3", "schedule={}", *LONG_EVALUATION, *model)
    node = LocalNode(0, job.ranks[0], Path())
    while not ((found := node.progress(0)) and (found.step, found.phase) == (3, "evaluate")):
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.01)
    os.kill(job.ranks[0].pid, signal.SIGINT)
    code, output = job.wait()
    assert code == 0, output
    saved = output.index("saved step 3:")
    assert "step 3 is not validated yet" in output[:saved], "its state comes first"
    assert "validation loss" in output[saved:]


def test_ctrl_c_while_data_is_prepared(launch, tmp_path):
    """The workers still import what they need."""
    line = json.dumps({"text": "The quick brown fox. " * 50_000})
    (tmp_path / "rows.jsonl").write_text(f"{line}\n" * 2 * (UNIT_BYTES // len(line)))
    words = ["data", "prepare", f"{tmp_path}/rows.jsonl", "--out", f"{tmp_path}/cut"]
    node = launch(*words, "--tokenizer", "bytes", "--workers", "2")
    until(lambda: len(node.family()) > 2, node)  # a tracker of resources is the third
    os.killpg(node.process.pid, signal.SIGINT)
    ends(node, 130)
    assert "the same command resumes" in node.text()
