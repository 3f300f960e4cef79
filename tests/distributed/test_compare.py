"""`perdure compare`: what it measures is what theory says, what it prints is what it measured, and
nothing is left behind."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from benchmarks.support import python_path
from checkpointing.storage.folders import SHARED_MEMORY, run_id
from elastic import Pulse
from elastic.group.batch_plan import plan_batch
from elastic.node.recall import NodeRecallSocket
from elastic.process import remaining
from elastic.record.history import LedgerStepLine
from elastic.world import World
from lab.chaos.faults import processes_with
from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import ROOT, soak
from trainer.data.loader import load, requests
from trainer.optim.optimizer import build_optimizer, build_schedule
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import parallelize
from trainer.plan import predict
from trainer.recipe import RecipeError, load_recipe
from trainer.run.profile import StepProfiler, peak_bytes, read_records, torch_profiler
from trainer.run.speed import RunSpeedRecorder
from trainer.run.state import Run, RunProgress
from trainer.run.step import StepInputs, train_step
from trainer.run.trace_summary import read_trace
from trainer.tasks.task import build_task
from trainer.tools.compare.compare import (
    AFTER_SAVE,
    INTERRUPTED,
    ComparedOutcome,
    candidate,
    compare_losses,
    problems,
    run_comparison,
    stall,
)
from trainer.tools.compare.comparison_report import parts_table, table

MARK = "PERDURE_TEST_COMPARE"
# Shards are padded to rows that every rank has: 257 rows over 4 ranks are 260.
THEORY = 0.03


def measure(recipe, rank, world_size):
    """The trainer's own step, three times, profiled in the last two."""
    world = World(
        rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size, nodes=1,
        round=0, generation=0, cause=None, device=torch.device("cpu"),
    )  # fmt: skip
    task, mesh = build_task(recipe), build_mesh(recipe, world)
    model = parallelize(task.model, task.blocks, mesh, recipe, world.device, task.fill)
    model.draw_weights()
    plan = plan_batch(recipe.batch.global_batch, world_size, recipe.batch.micro_batch)
    run = Run(
        recipe, recipe, task, world, mesh, plan, model,
        build_optimizer(model.optimized, recipe.optimizer), build_schedule(recipe), RunProgress(),
        SimpleNamespace(wait_staged=lambda: None, not_finite=""), None, None,
        Pulse.from_environment(), NodeRecallSocket(None),
    )  # fmt: skip
    batches = load(task.stream, requests(run.plan_at, rank, 0), workers=0, pin_memory=False)
    inputs = StepInputs(batches, run.passes)
    with StepProfiler(run, RunSpeedRecorder(run)) as profiler:
        for _ in range(recipe.run.steps):
            train_step(run, inputs)
            profiler.after_step()


@pytest.mark.parametrize(
    "worlds",
    [
        pytest.param({2: ("zero3",)}, marks=soak),
        pytest.param(
            {2: ("ddp", "zero1", "zero2", "zero3"), 4: ("zero1", "zero2", "zero3", "hybrid")},
            marks=soak,
        ),
    ],
    ids=["two", "four"],
)
def test_memory_follows_theory(worlds, workspace, tmp_path, monkeypatch):
    """Rajbhandari et al. 2020, figure 1: which of the three kinds each stage divides by N."""
    monkeypatch.chdir(workspace)

    def recipe_of(name, ranks):
        overrides = ["batch.micro_batch=8", "tracking.profile_steps=2", "tracking.profile_after=1"]
        overrides += ["run.steps=3"]
        run = tmp_path / f"{name}-{ranks}"
        run.mkdir(exist_ok=True)
        one = candidate(name, "recipe.yaml", ["schedule={}"], ranks, 3, run)
        return load_recipe(one.arguments[0], [*one.arguments[1:], *overrides])

    figures = {}
    for ranks, names in worlds.items():
        recipes = [recipe_of(name, ranks) for name in names]

        def work(rank, ranks=ranks, recipes=recipes):
            torch.set_num_threads(1)
            for recipe in recipes:
                measure(recipe, rank, ranks)

        run_ranks(ranks, work, tmp_path / f"ranks-{ranks}")
        for name in names:
            records = read_records(tmp_path / f"{name}-{ranks}")
            assert len(records) == ranks
            figures[name, ranks] = records

    task = build_task(recipe_of("zero3", 2))
    whole = sum(4 * p.numel() for p in task.model.parameters())
    # What is in no block stays gathered until backward needs it.
    root = 1 - sum(4 * p.numel() for block in task.blocks for p in block.parameters()) / whole
    for (name, ranks), records in figures.items():
        shards = {"ddp": 1, "hybrid": 2}.get(name, ranks)
        # Held whole: parameters between steps, those of a forward pass, gradients.
        kept, gathered, gradients = {
            "ddp": (1, 0, 1), "zero1": (1, 0, 1), "zero2": (1 / shards, 1, 1 / shards),
            "zero3": (1 / shards, root, 1 / shards), "hybrid": (1 / shards, root, 1 / shards),
        }[name]  # fmt: skip
        largest = [max(getattr(r, kind) for r in records) / whole for kind in (
            "parameters", "gathered", "gradients", "optimizer_state"
        )]  # fmt: skip
        assert largest == pytest.approx([kept, gathered, gradients, 2 / shards], rel=THEORY), name
        for record in records:
            sum_of_parts = record.parameters + record.gradients + record.optimizer_state
            # The logits and their gradient are live at once, whatever the strategy.
            assert record.peak > sum_of_parts + 8 // ranks * 32 * 257 * 4
            assert 0 < record.communication < 1
            planned = predict(recipe_of(name, ranks), ranks, ranks).communication_bytes
            # Beside this, the norm and the word that says whether all is well.
            assert record.sent == pytest.approx(planned, rel=0.01), name
    falling = ("ddp", 2), ("zero3", 2), ("zero3", 4)
    peaks = [figures[one][0].peak for one in falling if one in figures]
    assert peaks == sorted(peaks, reverse=True)


def test_a_profile_that_cannot_be_written_costs_nothing(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace)
    profiled = ["tracking.profile_steps=1", "tracking.profile_after=1", "run.steps=3"]
    recipe = load_recipe("recipe.yaml", ["schedule={}", f"run.dir={tmp_path}", *profiled])
    (tmp_path / "profile").write_text("in the way")
    ended = run_ranks(1, lambda rank: measure(recipe, rank, 1) or "well", tmp_path / "rank")
    assert ended == ["well"]
    assert read_records(tmp_path) == []


def perdure_compare(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", "compare", "recipe.yaml", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), MARK: "yes"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_nothing_left(runs):
    assert not remaining(lambda: processes_with(MARK, "yes"), 5)
    for run in runs.iterdir():
        assert not (run / "checkpoints").exists()
        assert not list(SHARED_MEMORY.glob(f"perdure-{run_id(str(run / 'checkpoints'))}-*"))


@soak
def test_command(workspace):
    names = "zero3+full_ac,ddp+offload,hybrid"
    process = perdure_compare(workspace, "--strategies", names, "--steps", "4", "--out", "compared")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    folder = workspace / "compared"
    result = json.loads((folder / "compare.json").read_text())
    zero3, offload, hybrid = result["strategies"]
    assert result["recipe"]["precision"]["dtype"] == "fp32"
    assert len(zero3["step_seconds"]) == 4
    rate = 8 * 32 / sorted(zero3["step_seconds"])[2]
    assert zero3["rate"] >= rate  # a median of four lies below the third
    assert zero3["checkpoint_bytes"] > 5 * zero3["parameters"]
    assert f" {zero3['rate']:,.0f} |" in output
    assert len(zero3["losses"]) == 4
    assert "cannot run" in offload["problem"]
    assert "strategy.name: fsdp" in offload["problem"]
    assert "the 2 rank(s)" in hybrid["problem"]
    assert hybrid["problem"] in output
    assert hybrid["problem"] in (folder / "compare.md").read_text()
    rows = list(csv.DictReader((folder / "compare.csv").open()))
    assert [row["name"] for row in rows] == names.split(",")
    assert int(rows[0]["peak"]) == zero3["peak"]
    planned = zero3["predicted"]
    assert zero3["communication_bytes"] == pytest.approx(planned["communication_bytes"], rel=0.01)
    more = zero3["checkpoint_bytes"] - planned["checkpoint_bytes"]
    assert 0 <= more < 20_000  # the trainer's own state: cursors, guard, random streams
    cell = f" {zero3['gradients'] / 1e6:.1f} ({planned['gradients'] / 1e6:.1f}) |"
    for text in output, (folder / "compare.md").read_text():
        beside = text.split("MB, measured (planned)")[1]
        assert cell in next(line for line in beside.splitlines() if line.startswith("| zero3"))
    words = [element.text for element in ET.parse(folder / "compare.svg").iter()]
    assert {"zero3+full_ac", f"{zero3['peak'] / 1e6:,.1f}"} <= set(words)
    assert_nothing_left(folder / "runs")


@soak
@pytest.mark.timeout(300)
def test_layouts(workspace):
    names = "zero2,tp2+sp,pp2,cp2,pp2+zero_bubble,ep2,tp4"
    one = ["batch.micro_batch=1"]
    process = perdure_compare(
        workspace, "--strategies", names, "--steps", "6", "--out", "layouts", *one
    )
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    result = json.loads((workspace / "layouts/compare.json").read_text())
    *ran, ep2, tp4 = result["strategies"]
    assert "ep2: cannot run: strategy.ep" in output, ep2["problem"]
    assert "do not divide" in tp4["problem"]
    for found in ran:
        planned = found["predicted"]
        assert len(found["ranks"]) == 2
        assert found["difference"] < 1e-5
        # Of 1 MB: 4 % under cp2, and by when messages of tp are let go of, 1 to 5 % under tp2.
        # Larger models are held to 3 % in tests/trainer/plan/test_measured.py.
        assert found["peak"] == pytest.approx(planned["peak"], rel=0.08), found["name"]
        assert (found["bubble"] is not None) == found["name"].startswith("pp2")
        if found["bubble"] is None:
            sent = planned["communication_bytes"]
            assert found["communication_bytes"] == pytest.approx(sent, rel=0.01), found["name"]
        else:
            assert 0 < found["bubble"] < 1
            assert f": bubble {found['bubble']:.1%} (simulated {planned['bubble']:.1%}, " in output
    assert_nothing_left(workspace / "layouts/runs")


@soak
def test_experts_apart(workspace):
    """Each token goes to all of them, so that no rank has more rows than the plan thinks."""
    options = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    moe = [f"model.architecture.options={{{', '.join(f'{k}: {v}' for k, v in options.items())}}}"]
    moe += ["model.architecture.model_type=qwen3_moe"]
    process = perdure_compare(
        workspace, "--strategies", "zero2,ep2", "--steps", "4", "--out", "experts", *moe
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    result = json.loads((workspace / "experts/compare.json").read_text())
    whole, apart = result["strategies"]
    for found in (whole, apart):
        planned = found["predicted"]
        assert found["difference"] < 1e-5
        assert found["peak"] == pytest.approx(planned["peak"], rel=0.03), found["name"]
        sent = planned["communication_bytes"]
        assert found["communication_bytes"] == pytest.approx(sent, rel=0.01), found["name"]
    assert apart["parameters"] == apart["predicted"]["parameters"] == whole["parameters"]
    assert_nothing_left(workspace / "experts/runs")


@soak
def test_interrupted(workspace):
    """One rank: of several, torchrun's death would be enough to end them."""
    arguments = ["--strategies", "zero3", "--steps", "5000", "--nproc", "1", "--out", "cut"]
    process = perdure_compare(workspace, *arguments)
    ledger = workspace / "cut/runs/zero3/ledger.jsonl"
    deadline = time.monotonic() + 120
    while not (ledger.exists() and '"kind":"step"' in ledger.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step came"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "PARTIAL: 0 of 1" in output
    assert "PARTIAL: 0 of 1" in (workspace / "cut/compare.md").read_text()
    assert_nothing_left(workspace / "cut/runs")


def test_wrong_input(workspace, tmp_path, monkeypatch):
    monkeypatch.chdir(workspace)

    def compare(names, out=tmp_path / "new"):
        run_comparison("recipe.yaml", (), names, ranks=2, steps=4, out=out)

    with pytest.raises(RecipeError, match=r"'zero4' is unknown; use one of ddp, zero1"):
        compare(["ddp", "zero4"])
    with pytest.raises(RecipeError, match=r"'ddp\+ofload' is unknown.*\+offload"):
        compare(["ddp+ofload"])
    for name in ("sp", "tp0", "compile+tp2", "zero2+tp2x"):
        with pytest.raises(RecipeError, match=r"or tp2, pp2, cp2, ep2 \(any number\)"):
            compare(["ddp", name])
    with pytest.raises(RecipeError, match=r"^tp3, zero3\+tp3: .*groups of 3 ranks"):
        compare(["tp3", "zero3+tp3"])
    with pytest.raises(RecipeError, match="already exists"):
        compare(["ddp"], out=tmp_path)
    with pytest.raises(RecipeError, match=r"hybrid: needs to divide the 2 rank\(s\)"):
        compare(["hybrid"])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tp2+sp", {"sharding": "SHARD_GRAD_OP", "tp": 2, "sequence_parallel": True}),
        ("zero3+cp2+full_ac", {"sharding": "FULL_SHARD", "cp": 2, "tp": 1}),
        ("tp2+pp2+interleaved", {"tp": 2, "pp": 2, "pp_stages_per_rank": 2}),
        ("hybrid+pp2", {"sharding": "HYBRID_SHARD", "shard_size": 2, "pp_schedule": "1f1b"}),
    ],
)
def test_layouts_compose(name, expected, workspace, tmp_path, monkeypatch):
    """Whatever the recipe's own strategy is."""
    monkeypatch.chdir(workspace)
    own = ["strategy.tp=4", "strategy.pp=2", "strategy.zero=3"]
    found = candidate(name, "recipe.yaml", own, 8, 4, tmp_path).recipe.strategy
    assert {key: getattr(found, key) for key in expected} == expected


def test_hybrid_says_how_many_ranks_it_needs(workspace, tmp_path, monkeypatch):
    """The shards are among the ranks of a stage and of one place in tensor parallelism."""
    monkeypatch.chdir(workspace)
    refused = candidate("hybrid+pp2", "recipe.yaml", (), 4, 4, tmp_path)
    assert refused.problem.endswith("several groups of several ranks; use --nproc 8")
    assert candidate("hybrid+pp2", "recipe.yaml", (), 8, 4, tmp_path).recipe


@pytest.mark.parametrize("other", [2.1, math.inf, math.nan])
def test_losses_that_differ_are_named(other):
    outcomes = [
        ComparedOutcome("no", "cannot run: because"),
        ComparedOutcome("ddp", losses={5: 3.0, 10: 2.0}),
        ComparedOutcome("zero1", losses={5: 3.0001, 10: 2.0}),
        ComparedOutcome("zero3", losses={5: 3.0, 10: other}),
        ComparedOutcome("zero2", "failed: out of memory; see log", failed=True),
    ]
    compare_losses(outcomes)
    found = problems(outcomes, 1e-2)
    assert [text.split(":")[0] for text in found] == ["zero2", "zero3"]
    assert "differs from that of ddp" in found[1]


def test_table_names_the_unit_and_what_is_missing():
    figures = {"unit": "samples", "rate": 1234.5, "unplanned": "data.factory: no tokens"}
    text = table([ComparedOutcome("ddp", **figures), ComparedOutcome("zero1", INTERRUPTED)])
    header, _, row, _, *notes = text.splitlines()
    assert "| samples/s |" in header
    assert "planned" not in header
    assert "|     1,234 |" in row
    assert [note.split(":")[0] for note in notes] == ["- zero1", "- planned", "- PARTIAL"]
    assert "1 of 2" in notes[2]
    assert "(" not in parts_table([ComparedOutcome("ddp", **figures)]).splitlines()[2]
    planned = ComparedOutcome(
        "ddp", gradients=3_000_000, predicted={"peak": 1, "gradients": 2_900_000}
    )
    assert "planned" in table([planned]).splitlines()[0]
    assert "bubble" not in table([planned])
    piped = ComparedOutcome("pp2", bubble=0.21, predicted={"bubble": 0.2, "bubble_formula": 1 / 3})
    assert "- pp2: bubble 21.0% (simulated 20.0%, by formula 33.3%)" in table([planned, piped])
    assert "| 3.0 (2.9) |" in parts_table([planned]).splitlines()[2]


def test_stall_is_what_a_checkpoint_cost():
    after, steps = 0.0, {}
    for number in count(1):
        slow = number == 9
        seconds = 1.4 if slow else 1.0  # the step after the save is slower
        after += 0.1 + seconds + (0.3 if slow else 0)  # and came later
        steps[number] = LedgerStepLine(number, 0, 0, seconds, after, False, 0)
        if number == 8 + AFTER_SAVE:
            break
    assert stall(steps, 8, 1.0) == pytest.approx(0.7)


def test_trace_of_real_allocations(tmp_path):
    """What was held at once counts; not all that was allocated, nor what another step held."""
    cpu, path = torch.device("cpu"), tmp_path / "trace.json.gz"
    with torch_profiler(cpu, 1, 3, lambda done: done.export_chrome_trace(str(path))) as profiler:
        for step in range(4):
            kept = torch.zeros(1000, 256) if step else torch.zeros(9000, 256)
            del kept
            first, second = torch.zeros(1000, 256), torch.zeros(500, 256)
            del first
            assert torch.zeros(100, 256) is not second
            del second
            profiler.step()
    trace = read_trace(path)
    assert peak_bytes(cpu, 7, trace) == pytest.approx(7 + 1500 * 256 * 4, rel=1e-3)
    assert len(trace.steps) == 3
    assert not trace.collectives
    assert trace.communication == 0
