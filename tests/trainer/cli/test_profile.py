"""Where a step's time goes: a real traced run, and the arithmetic of intervals."""

import gzip
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support import python_path
from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import RECIPE, ROOT, soak
from trainer.data.prepare.prepare import prepare
from trainer.recipe import StrategySection
from trainer.recipe.strategies import MODEL_PARALLEL
from trainer.run.profile import StepProfiler
from trainer.run.trace_summary import (
    PHASES,
    intersect,
    length,
    merge,
    read_trace,
    subtract,
    summary,
)

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8).map(
    lambda pairs: [(float(begin), float(begin + size)) for begin, size in pairs]
)


def moments(spans):
    return {moment for begin, end in spans for moment in range(int(begin), int(end))}


@given(SPANS, SPANS)
def test_intervals_are_sets_of_moments(one, other):
    a, b = merge(one), merge(other)
    assert moments(a) == moments(one)
    assert length(a) == len(moments(one))
    assert all(a[i][1] < a[i + 1][0] for i in range(len(a) - 1))
    assert moments(intersect(a, b)) == moments(one) & moments(other)
    assert moments(subtract(a, b)) == moments(one) - moments(other)


def test_each_kind_of_model_parallelism_says_what_it_sends():
    def sent(strategy):
        return {kind.KEYS[0]: kind.bytes_sent(strategy, 120.0, 12.0) for kind in MODEL_PARALLEL}

    nothing = {"tp": 0, "pp": 0, "cp": 0, "ep": 0}
    assert sent(StrategySection()) == nothing
    assert sent(StrategySection(tp=4, pp=2, cp=2)) == {**nothing, "tp": 180}
    assert sent(StrategySection(ep=3)) == {**nothing, "ep": pytest.approx(8)}


@soak
@pytest.mark.parametrize(
    ("strategy", "collective", "times"),
    [
        # Two layers and the rest: three units, each reduced once in a step.
        ("strategy.zero=3", "c10d::_reduce_scatter_base_", 3),
        # A message for each of four passes, and one for the tied embedding.
        ("strategy.pp=2", "c10d::send", 4 + 1),
        ("strategy.cp=2", "c10d::_reduce_scatter_base_", 3),
    ],
)
def test_a_traced_run_of_two_ranks(tmp_path, strategy, collective, times):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 400)
    prepare([str(tmp_path / "text.txt")], tmp_path / "data", tokenizer="bytes")
    command = [sys.executable, "-m", "trainer.cli", "profile", "recipe.yaml", "--steps", "3"]
    done = subprocess.run(
        [*command, "--nproc", "2", "checkpoint.every=200", strategy],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "run-profile"
    page = (out / "profile.md").read_text()
    assert page in done.stdout
    assert all(f"\n| {phase} " in page for phase in PHASES)
    assert "with one in 200 steps, as the recipe has it" in page
    assert not (out / "checkpoints").exists()
    for rank in range(2):
        profile = read_trace(out / "profile" / f"rank-{rank:05}.trace.json.gz")
        assert (profile.rank, len(profile.steps), profile.saves) == (rank, 3, 1)
        assert sum(profile.phases.values()) == pytest.approx(sum(profile.steps))
        assert min(profile.phases.values()) > 0
        assert profile.communication >= profile.phases["communication"]
        assert profile.collectives[collective] == 3 * times
        assert "aten::mm" in [operator.name for operator in profile.operators[:12]]


def test_the_step_after_a_trace_waits_for_no_rank_that_still_writes(tmp_path, monkeypatch):
    """Or its speed, and the bubble of a pipeline, would be that of writing."""

    class SlowOnRank1:
        def __init__(self, device, after, steps, ready):
            self.left = after + steps

        def step(self):
            self.left -= 1
            if self.left == 0 and dist.get_rank() == 1:
                time.sleep(0.5)
                written.touch()

    written, barriers, barrier = tmp_path / "written", [], dist.barrier
    monkeypatch.setattr(dist, "barrier", lambda group: barriers.append(group) or barrier(group))
    monkeypatch.setattr("trainer.run.profile.torch_profiler", SlowOnRank1)
    monkeypatch.setattr("trainer.run.profile._TensorSizes", Mock())

    def work(rank):
        run = Mock(mesh=Mock(group=dist.group.WORLD))
        run.recipe.tracking = Mock(profile_steps=2, profile_after=1)
        speed = Mock()
        speed.aside.side_effect = nullcontext
        profiler = StepProfiler(run, speed)
        after = []
        for _ in range(4):
            profiler.after_step()
            after.append((len(barriers), written.exists()))
        return after

    for after in run_ranks(2, work, tmp_path):
        assert [waits for waits, _ in after] == [0, 0, 1, 1]
        assert after[2][1], "the other rank still writes"


def test_on_a_gpu_the_device_comes_first(tmp_path):
    def event(category, name, begin, end):
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": 1}

    events = [
        event("user_annotation", "ProfilerStep#4", 0, 100),
        event("user_annotation", "enumerate(DataLoader)#next", 0, 12),
        event("cpu_op", "aten::mm", 12, 60),  # the host is ahead: its time does not count
        event("kernel", "gemm", 10, 50),
        event("kernel", "ncclDevKernel_AllGather", 40, 60),
        event("gpu_user_annotation", "Optimizer.step#AdamW.step", 60, 80),
        event("kernel", "adamw", 60, 75),
        event("user_annotation", "Optimizer.step#AdamW.step", 58, 98),  # ends on the host
        event("user_annotation", "save checkpoint", 70, 95),
    ]
    path = tmp_path / "rank-0.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "distributedInfo": {"rank": 0}}, file)
    profile = read_trace(path)
    microseconds = {phase: round(value * 1e6) for phase, value in profile.phases.items()}
    assert microseconds == {
        "compute": 40, "communication": 10, "optimizer": 18, "data": 10, "idle": 2,
    }  # fmt: skip
    assert round(profile.communication * 1e6) == 20
    assert round(profile.checkpoint * 1e6) == 20
    assert profile.operators[0].name == "gemm"
    assert "50% of that is hidden" in summary([profile], "x")
