"""A rank that computes wrongly, and alike each time, is found by others, named, and leaves."""

from itertools import pairwise

import pytest

from benchmarks.support import json_lines, python_path
from elastic.record.causes import ending
from elastic.record.history import read_history
from lab.local_nodes import LocalNodes
from tests.distributed.jobs import ROOT, Forked, Job, assert_kept, deadly, losses, soak
from tests.distributed.test_elastic import wait_for_step
from tests.distributed.test_exact import assert_equal_bits, result
from trainer.recipe import RecipeError, load_recipe
from trainer.run.witness import OPENED, WitnessPass, differing, digest, draw_passes, find_outvoted

LYING = (
    "run.determinism=exact", "schedule.name=constant", "model.architecture=null",
    "model.factory=tests.distributed.lying:Lying", "batch.global_batch=12", "batch.micro_batch=2",
)  # fmt: skip


STEPS = 15
SEED = 7
"""`run.seed` of the recipe of these tests."""


def told(folder, run):
    """What the ledger says of disputes."""
    lines = json_lines(folder / run / "ledger.jsonl")
    return [line["what"] for line in lines if line.get("event") == "witness"]


@pytest.fixture(scope="module")
def right(workspace):
    """The run directory of a single process that computes rightly."""
    code, output = Job(workspace, 1, [*LYING, f"run.steps={STEPS}", "run.dir=right"]).wait()
    assert code == 0, output
    return "right"


def first_pass(number, passes, ranks, share):
    """The number of the first pass that each rank computes in a step, of so many for itself. The
    first step of a start has no others."""
    return passes * (number - 1) + sum(
        len(draw_passes(SEED, step, share, passes, ranks)) for step in range(2, number)
    )


@soak
@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_computes_wrongly_is_named_and_what_it_has_spoilt_is_passed_over(
    workspace, start, right, dies
):
    """Six micro-batches on three ranks: two passes a step. Rank 2 is wrong from a step on in which
    nothing is compared; all steps are saved. If it dies in the vote, nobody can name it."""
    share, run = 0.2, f"wrong-{dies}"
    drawn = [step for step in range(3, STEPS) if draw_passes(SEED, step, share, 2, 3)]
    before, found = next(pair for pair in pairwise(drawn) if pair[1] > pair[0] + 2)
    wrong = (*LYING, f"run.steps={STEPS}", f"elastic.witness={share}", f"run.dir={run}")
    wrong += ("checkpoint.every=1", "checkpoint.keep=0", "checkpoint.when_busy=wait")
    lies = {"LIES": f"{first_pass(before + 1, 2, 3, share)}:999"}
    if dies:  # a vote follows all passes of the step
        lies["DIES"] = f"{first_pass(found + 1, 2, 3, share)}"
    code, output = start(3, *wrong, "strategy.name=ddp", odd=lies).wait()
    assert code, output
    named = "two others contradicted the gradient of rank 2"
    opened = f"step {found}: {OPENED}"
    if dies:
        assert told(workspace, run) == [opened]
    else:
        assert told(workspace, run) == [
            opened,
            f"step {found}: {named}; the step is computed again",
            opened,
            f"{named} twice, the last time in step {found}; nothing speaks against the weights up "
            f"to step {before - 1}",
        ]
        assert f"error: {named} twice, the last time in step {found}\n" in output
    code, output = start(1, *wrong).wait()
    assert code == 0, output
    assert output.count("passed over: a rank may have computed wrongly") == found - before
    assert f"resuming after step {before - 1} of" in output
    assert_equal_bits(result(workspace, run, STEPS), result(workspace, right, STEPS))
    assert read_history(workspace / run).problems == []


def test_one_wrong_pass_costs_nothing_and_between_two_ranks_nobody_can_tell_who_is_wrong(
    workspace, start, right
):
    """The first pass of step 3 is wrong, and the own ones from step 6 on."""
    once, always = first_pass(3, 3, 2, 1), first_pass(6, 3, 2, 1) + 6
    given = (*LYING, f"run.steps={STEPS}", "elastic.witness=1", "run.dir=two")
    # Step 3 is computed again.
    code, output = start(2, *given, odd={"LIES": f"{once}:{once},{always}:999"}).wait()
    assert code == 93, output
    differ = "ranks 0 and 1 computed different gradients of one micro-batch; which of them is wrong"
    opened = f"step 3: {OPENED}", f"step 6: {OPENED}"
    assert [one for one in told(workspace, "two") if OPENED in one] == [*opened]
    settled = [one for one in told(workspace, "two") if OPENED not in one]
    assert [what.partition(differ)[::2] for what in settled] == [
        ("step 3: ", " only a third rank could tell; the step is computed again"),
        (
            "step 6: ",
            " only a third rank could tell; nothing speaks against the weights up to step 5",
        ),
    ]
    assert "error: step 6: ranks 0 and 1" in output
    assert "a second difference stops the run" in output
    expected = losses(workspace, right)
    assert losses(workspace, "two") == {step: expected[step] for step in range(1, 6)}


@soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "layout", "left"),
    [
        ("ddp", ["strategy.name=ddp"], 3),
        ("full", ["strategy.sharding=FULL_SHARD"], 3),
        ("hybrid", ["strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"], 2),
    ],
)
def test_the_node_of_a_rank_that_computes_wrongly_leaves_for_good(
    workspace, start, tmp_path, name, layout, left
):
    """Of the other nodes, those that hold whole replicas make the bits of a right run."""
    run = f"lying-{name}"
    steps = ("run.steps=40", "checkpoint.every=2", "checkpoint.keep=0", "elastic.witness=0.2")
    nodes = LocalNodes(
        ["-m", "trainer", "recipe.yaml", *LYING, *layout, *steps, f"run.dir={run}"],
        folder=workspace,
        nnodes="2:4",
        logs=tmp_path,
        start=Forked,
        environment={"PYTHONPATH": python_path(ROOT, workspace)},
    )
    lie = tmp_path / "lie"
    with nodes:
        honest = nodes.environment
        for number in range(4):
            nodes.environment = {**honest, **({"LIES": str(lie)} if number == 1 else {})}
            nodes.add()
        wait_for_step(workspace, run, 8, nodes)
        lie.touch()
        codes = nodes.wait(400)
    texts = [node.text() for node in nodes.nodes]
    assert codes == [0, 93, 0, 0], texts[1]
    assert "this node does not join again: two others contradicted the gradient" in texts[1]
    history = read_history(workspace / run)
    assert [attempt.start.world_size for attempt in history.attempts] == [4, left]
    found = ending(history, history.attempts[0])
    assert found.kind == "node"
    assert "was sent away: two others contradicted the gradient of rank" in found.text
    assert (history.step, history.problems) == (40, [])
    code, output = start(1, *LYING, "run.steps=40", f"run.dir={run}-right").wait()
    assert code == 0, output
    assert_equal_bits(result(workspace, run, 40), result(workspace, f"{run}-right", 40))


@soak
@pytest.mark.timeout(3600)
def test_fifty_faults_accuse_nobody(fifty_faults):
    folder = fifty_faults("chaos-witness", "elastic.witness=0.25", seed=5, every=12)
    assert told(folder, "run") == []


@soak
def test_ranks_that_keep_their_state_compare_on(workspace, train, tmp_path):
    """Others are killed amid a step in which each rank has computed a micro-batch of another."""
    exact = "run.determinism=exact", "batch.global_batch=12", "run.steps=30", "elastic.witness=1"
    train(1, *exact, *deadly("unkilled", {}))
    run = [*exact, *deadly("killed", {0: [(0, 10, "forward")], 1: [(1, 20, "backward")]})]
    with LocalNodes(
        ["-m", "trainer", "recipe.yaml", *run], folder=workspace, nnodes="1", logs=tmp_path,
        start=Forked, ranks=3, environment={"PYTHONPATH": str(ROOT)},
    ) as nodes:  # fmt: skip
        node = nodes.add()
        nodes.wait(120)
    assert_kept(node.text(), [2, 2])
    assert told(workspace, "killed") == []
    assert_equal_bits(result(workspace, "killed", 30), result(workspace, "unkilled", 30))


def test_a_share_of_the_passes_is_drawn_from_step_and_seed_alone():
    steps = range(1, 2001)
    for share, passes, ranks in ((0.01, 4, 8), (0.3, 5, 3), (1, 3, 2)):
        drawn = [draw_passes(7, step, share, passes, ranks) for step in steps]
        assert drawn == [draw_passes(7, step, share, passes, ranks) for step in steps]
        assert sum(map(len, drawn)) == pytest.approx(share * passes * len(steps), rel=0.2)
        for draws in drawn:
            assert len({draw.number for draw in draws}) == len(draws)
            assert all(draw.number < passes and 0 < draw.distance < ranks for draw in draws)
            assert all(draw.third not in (0, draw.distance) for draw in draws)
    assert draw_passes(7, 5, 0, 4, 8) == []


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_who_is_contradicted_by_two_is_wrong(distance):
    """Rank r's own micro-batch has the digest r, and rank 1 computes 100 more."""
    draw, ranks = WitnessPass(0, distance), 4
    truth = range(ranks)

    def computed(at, wrong):
        return [(rank - at) % ranks + 100 * (rank in wrong) for rank in truth]

    def found(*wrong, thirds=True):
        of = computed(draw.third, wrong) if thirds else None
        return find_outvoted(draw, computed(0, wrong), computed(distance, wrong), of)

    assert found() == (set(), set())
    assert found(1) == ({1}, set())
    assert found(1, thirds=False)[0] == set()
    own, witnessed, thirds = [0, 1, 2, 3], computed(distance, ()), computed(draw.third, ())
    witnessed[(2 + distance) % ranks], thirds[(2 + draw.third) % ranks] = 7, 8
    undecided = {2, (2 + distance) % ranks, (2 + draw.third) % ranks}
    assert find_outvoted(draw, own, witnessed, thirds) == (set(), undecided)
    assert differing(undecided, True).startswith("no two of the ranks")
    # All digests agree, and yet the sum over ranks said otherwise.
    assert "the sum over ranks that compares them is wrong" in differing(set(), True)


def test_every_bit_is_in_a_digest():
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 5), (2, 4), (7,), ()):
            words = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            whole = digest(words).item()
            assert digest(words.clone()).item() == whole
            integer = {4: torch.int32, 2: torch.int16}[words.element_size()]
            for bit in range(8 * words.element_size() - 1):
                for place in range(words.numel()):
                    changed = words.clone()
                    changed.reshape(-1).view(integer)[place] ^= 1 << bit
                    assert digest(changed).item() != whole, (dtype, shape, bit, place)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.determinism=fast"], "elastic.witness: compares .* set run.determinism=exact"),
        (["strategy.tp=2"], "strategy.tp: with elastic.witness .* set strategy.tp=1"),
        (["strategy.pp=2"], "strategy.pp: with elastic.witness"),
        (["strategy.offload=cpu"], "strategy.offload: does not work with elastic.witness"),
        (["batch.balance=speed"], "batch.balance: speed gives ranks unequal .* elastic.witness=0"),
        (["elastic.witness=1.5"], "elastic.witness: must be at most 1"),
    ],
)
def test_a_witness_is_refused_where_gradients_cannot_be_compared(workspace, overrides, message):
    given = ["run.determinism=exact", "elastic.witness=0.01", *overrides]
    with pytest.raises(RecipeError, match=message):
        load_recipe(workspace / "recipe.yaml", given)
