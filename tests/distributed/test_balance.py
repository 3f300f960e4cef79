"""With batch.balance=speed a slow rank gets less to do, and the result stays the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import json_lines
from elastic.record.history import read_history
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import MOE, ROOT, Forked, assert_kept, losses, records, soak
from tests.distributed.test_exact import assert_equal_bits, result
from trainer.recipe import RecipeError, load_recipe
from trainer.tools.report.report import check

STEPS = 20
BATCH = ("batch.global_batch=15", "batch.micro_batch=2")  # 8 micro-batches, the last one smaller
EXACT = ("run.determinism=exact", f"run.steps={STEPS}", *BATCH)
SPEED = "batch.balance=speed"
ZERO2 = "strategy.sharding=SHARD_GRAD_OP"


def slow(*seconds: float, **more: Any) -> str:
    """By rank, how long each of two layers sleeps for a sequence; see slowed.py."""
    factory, options = "tests.distributed.slowed:schedule", {"seconds": seconds, **more}
    return f"schedule={json.dumps({'factory': factory, 'factory_options': options})}"


def shares(folder: Path, run: str) -> list[list[int]]:
    """The shares that ranks were given in a run, change by change."""
    lines = json_lines(folder / run / "ledger.jsonl")
    return [line["shares"] for line in lines if line.get("event") == "shares"]


def consumed(run: Path) -> bool:
    """Whether `perdure report --check` finds each sequence consumed once."""
    good, text = check(read_history(run), run)
    print(text)
    return bool(good)


@soak
def test_a_slow_rank_gets_less_and_the_bits_stay(workspace, train):
    """Then three ranks go on, of equal shares. Forward waits for others under ZeRO-2, and a loader
    process has asked for samples ahead."""
    train(1, "run.dir=whole", *EXACT, slow(0))
    run = ("run.dir=balanced", *EXACT, SPEED)
    output = train(2, *run, slow(0, 0.005), ZERO2, "data.workers=1", f"run.steps={STEPS - 2}")
    (given,) = shares(workspace, "balanced")
    assert sum(given) == 8
    assert given[0] > given[1]
    assert "the slowest of them is rank 1" in output
    newest = [record for record in records(workspace, "balanced") if "loss" in record][-1]
    assert (newest["smallest_share"], newest["largest_share"]) == (given[1], given[0])
    train(3, *run, slow(0), "strategy.name=ddp")
    assert consumed(workspace / "balanced")
    assert_equal_bits(result(workspace, "balanced", STEPS), result(workspace, "whole", STEPS))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["run.determinism=exact"], "speed gains nothing with FULL_SHARD in exact mode"),
        (["strategy.ep=2", *MOE], "speed gains nothing with strategy.ep"),
        (
            ["strategy.pp=2", "strategy.pp_schedule=gpipe"],
            "strategy.pp_schedule: gpipe keeps the activations of all passes",
        ),
    ],
)
def test_where_speed_gains_nothing_it_is_refused(workspace, overrides, problem):
    with pytest.raises(RecipeError, match=problem):
        load_recipe(workspace / "recipe.yaml", [SPEED, *overrides])


FAST = (f"run.steps={STEPS}", "batch.global_batch=16", "batch.micro_batch=2", SPEED)


@soak
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["strategy.name=ddp"]),
        (2, ["strategy.zero=1"]),
        (2, [ZERO2, "data.workers=1"]),
        (2, []),
        (2, ["strategy.compile=true"]),
        (2, ["strategy.activation_checkpointing=full"]),
        (3, ["strategy.name=ddp", "batch.micro_batch=8"]),
        (4, ["strategy.tp=2", "strategy.name=ddp"]),
        (4, ["strategy.pp=2", "strategy.name=ddp"]),
        (4, ["strategy.pp=2", "strategy.zero=2", "strategy.pp_schedule=zero_bubble"]),
        (4, ["strategy.cp=2", "strategy.name=ddp"]),
        (4, ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"]),
    ],
)
def test_the_curve_stays(workspace, train, request, ranks, overrides):
    """In fast mode but for rounding, under each strategy."""
    run = f"curve-{request.node.callspec.id}"
    train(1, f"run.dir={run}-whole", *FAST, slow(0), "strategy.name=ddp")
    train(ranks, f"run.dir={run}", *FAST, slow(*[0] * (ranks - 1), 0.004), *overrides)
    given = shares(workspace, run)
    assert given, "no change"
    assert given[-1][-1] < 16 // len(given[-1])
    assert consumed(workspace / run)
    ours, theirs = (list(losses(workspace, name).values()) for name in (run, f"{run}-whole"))
    assert ours == pytest.approx(theirs, rel=1e-5)


@soak
def test_measurements_take_no_collective_of_their_own(workspace, start):
    path = workspace / "counted-balance.json"
    job = start(
        2, "run.dir=counted-balance", *EXACT, SPEED, slow(0, 0.004), "strategy.name=ddp",
        program=["tests.distributed.counted", str(path)],
    )  # fmt: skip
    code, output = job.wait()
    assert code == 0, output
    assert shares(workspace, "counted-balance")
    steps = [
        sum(calls for name, calls in step.items() if name.startswith("c10d::"))
        for step in json.loads(path.read_text())
    ]
    assert set(steps[2:-1]) == {steps[2]}


@soak
def test_ranks_that_keep_their_state_measure_anew(workspace, train, tmp_path):
    """Others are killed while shares are unequal. FSDP times the blocks of a model that is kept."""
    train(1, "run.dir=unkilled", *EXACT, slow(0), "run.steps=44")
    kills = {0: [(0, 18, "forward")], 1: [(1, 36, "backward")]}
    run = [*EXACT, SPEED, ZERO2, "run.dir=killed", "run.steps=44"]
    run += [slow(0, 0, 0.004, run="killed", kills=kills)]
    run += ["elastic.snapshot_every=1", "checkpoint.slots=2"]
    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", *run], folder=workspace, nnodes="1", logs=tmp_path,
        start=Forked, ranks=3, environment={"PYTHONPATH": str(ROOT)},
    ) as nodes:  # fmt: skip
        node = nodes.add()
        nodes.wait(120)
    assert_kept(node.text(), [2, 2])
    assert len(shares(workspace, "killed")) >= 2, node.text()
    assert consumed(workspace / "killed")
    assert_equal_bits(result(workspace, "killed", 44), result(workspace, "unkilled", 44))


@soak
@pytest.mark.timeout(3600)
def test_fifty_faults(fifty_faults):
    run = ("chaos-speed", SPEED, "batch.micro_batch=1", slow(0, 0.01))
    assert shares(fifty_faults(*run, seed=3, every=24), "run")
