"""Seconds of a plan: latency, launches and cards move them the way they should."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.plan.recipes import EP, EVEN
from trainer.parallel.schedules import arranged, schedule, simulate
from trainer.plan import predict
from trainer.plan.blueprint import read_blueprint
from trainer.plan.costs import DEFAULT_NET, describe_machine
from trainer.plan.search import PlanCandidate
from trainer.plan.trace import trace
from trainer.recipe import load_recipe

ROOT = Path(__file__).parents[3]
PIPELINE = "strategy.pp=2 strategy.pp_stages_per_rank=2 strategy.pp_schedule=interleaved_1f1b"
LAYOUTS = (
    "strategy.name=ddp",
    "strategy.sharding=OPTIMIZER_STATE",
    "strategy.sharding=FULL_SHARD strategy.reduce_every_pass=true",
    "strategy.sharding=HYBRID_SHARD strategy.offload=cpu",
    "strategy.sharding=SHARD_GRAD_OP strategy.tp=2 strategy.sequence_parallel=true",
    f"strategy.sharding=SHARD_GRAD_OP strategy.cp=2 {PIPELINE}",
    f"{EP} strategy.tp=2 {PIPELINE}",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slower_parts_make_no_layout_faster(recipe_file, layout):
    """And more cards make none slower. Each part that a layout needs is seen in its seconds."""
    common = f"{EVEN} strategy.compile=false batch.global_batch=16 batch.micro_batch=1"
    recipe = load_recipe(recipe_file, [*common.split(" "), *layout.split(" ")])
    blueprint = read_blueprint(recipe)
    machine = describe_machine("2xH100", 4, "bf16")

    def seconds(machine):
        found = predict(recipe, 8, 2, machine=machine, device="cuda", blueprint=blueprint)
        return found.seconds_per_step

    keys = ("launch", "call", "hop", "hop_between")
    slower = {key: replace(machine, **{key: 100 * getattr(machine, key)}) for key in keys}
    once = seconds(machine)
    times = {key: seconds(other) for key, other in slower.items()}
    assert min(times.values()) >= once, times
    assert times["launch"] > once < times["call"]
    assert max(times["hop"], times["hop_between"]) > once
    cards = [seconds(replace(machine, net=machine.net * n)) for n in (0.01, 1, 2, 8)]
    assert cards == sorted(cards, reverse=True)
    assert cards[0] > cards[-1]


def test_zero_3_of_405b_is_not_first_over_512_ranks_of_one_sequence():
    """What each of its 512 ranks computes hides neither bytes nor steps of their gathers."""
    machine = describe_machine("1024xH100", 1, "bf16")
    assert machine.net == 8 * 50e9
    pipeline = "tp: 4, pp: 16, pp_stages_per_rank: 4, pp_schedule: interleaved_1f1b"
    other = "sharding: SHARD_GRAD_OP, activation_checkpointing: full, compile: true"
    strategy = f"{{{other}, sequence_parallel: true, {pipeline}}}"
    path, found, blueprint = ROOT / "recipes/llama3_405b.yaml", [], None
    for overrides in ([], [f"strategy={strategy}"]):
        recipe = load_recipe(path, [*overrides, "batch.micro_batch=1"])
        blueprint = blueprint or read_blueprint(recipe)
        seen = predict(recipe, 1024, 8, machine=machine, device="cuda", blueprint=blueprint)
        assert PlanCandidate("", recipe, seen).fits(machine)
        found.append(seen)
    zero3, faster = found
    assert zero3.passes == 1
    assert faster.seconds_per_step < zero3.seconds_per_step
    # By the wires alone it would be the other way round.
    wires = replace(machine, net=8 * machine.net, hop=0, hop_between=0, call=0)
    recipe = load_recipe(path, ["batch.micro_batch=1"])
    alone = predict(recipe, 1024, 8, machine=wires, device="cuda", blueprint=blueprint)
    assert alone.seconds_per_step < faster.seconds_per_step


def test_a_node_has_the_cards_of_its_gpus():
    """As the vendor builds it, unless somebody says otherwise."""
    assert describe_machine("4xA100", 2, "bf16").net == 4 * 25e9
    assert "8 x 400 Gb/s per node" in describe_machine("8xH200", 2, "bf16").note
    assert describe_machine("8xL40S", 2, "bf16").net == DEFAULT_NET
    said = describe_machine("8xH100", 2, "bf16", net="400Gb/s")
    assert said.net == 50e9
    assert "--net" not in said.note


def test_messages_go_through_a_pipeline():
    one = arranged(schedule("1f1b", 4, 1, 1))
    assert simulate(one).seconds == 4 * 3
    assert simulate(one, message=0.5).seconds == 4 * 3 + 2 * 3 * 0.5
    many = arranged(schedule("interleaved_1f1b", 4, 2, 16))
    slow = [simulate(many, message=each) for each in (0.0, 0.1, 1.0, 10.0)]
    assert [s.seconds for s in slow] == sorted({s.seconds for s in slow})
    assert slow[0].busy == slow[-1].busy


def test_a_compiler_leaves_fewer_kernels_and_less_traffic(recipe_file):
    """The same arithmetic, and a tensor that nothing reads outside of a kernel is not written."""
    blueprint = read_blueprint(load_recipe(recipe_file, []))
    eager, compiled = (
        trace(blueprint, 2, "none", torch.bfloat16, False, "cuda", compiled=each)
        for each in (False, True)
    )
    for half in ("forward", "backward"):
        works = [getattr(one, half) for one in (eager, compiled)]
        operations, traffic, launches = (
            [sum(getattr(kernel, key) for kernel in work) for work in works]
            for key in ("operations", "traffic", "launches")
        )
        assert operations[0] == operations[1]
        assert traffic[1] < 0.9 * traffic[0]
        assert launches[1] < 0.7 * launches[0]
    assert eager.saved == compiled.saved
