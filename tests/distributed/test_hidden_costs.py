"""What a step may do behind one's back: every collective and every wait of the host is counted, so
that nobody adds one unseen. Who changes these numbers says why."""

import json

import pytest
import torch

from tests.distributed.jobs import EP, MOE, RECIPE, soak

WORD = {"c10d::allreduce_": 1, "tolist": 1}  # the step's one word, and the one read of it
PASSES = 2  # of a step: 8 sequences, 2 ranks, 2 at a time
DOCUMENTS = {"nonzero": PASSES}  # the loader finds their ends, on the host
LAYERS = 2
UNITS = LAYERS + 1  # blocks, and the rest
RECOMPUTED = "strategy.activation_checkpointing=full"


@pytest.mark.parametrize(
    ("name", "ranks", "overrides", "expected"),
    [
        # No launcher has given it a number.
        ("alone", 1, ["strategy.name=ddp"], {**WORD, "nonzero": 2 * PASSES}),
        # Two buckets of gradients, reduced in the last pass.
        ("ddp", 2, ["strategy.name=ddp"], {**WORD, **DOCUMENTS, "c10d::allreduce_": 3}),
        (
            "full-shard",
            2,
            [],
            {
                **WORD,
                **DOCUMENTS,
                # Each block for forward and again for backward; the rest once.
                "c10d::_allgather_base_": PASSES * 2 * (UNITS - 1) + 1,
                "c10d::_reduce_scatter_base_": UNITS,
            },
        ),
        pytest.param(
            "shard-grad-op",
            2,
            ["strategy.sharding=SHARD_GRAD_OP"],
            {
                **WORD,
                **DOCUMENTS,
                "c10d::_allgather_base_": UNITS,
                "c10d::_reduce_scatter_base_": UNITS,
            },
            marks=soak,
        ),
    ],
)
def test_collectives_and_waits_of_a_step(workspace, start, name, ranks, overrides, expected):
    path = workspace / f"{name}.json"
    job = start(
        ranks, f"run.dir=counted-{name}", "run.steps=5", "schedule={}", *overrides,
        program=["tests.distributed.counted", str(path)],
    )  # fmt: skip
    code, output = job.wait()
    assert code == 0, output
    # The first two steps may do more: DDP puts its buckets in order once. The last one looks at all
    # that it has made.
    assert json.loads(path.read_text())[2:4] == [expected, expected]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch reports synchronisation on CUDA")
@pytest.mark.parametrize(
    ("name", "ranks", "overrides", "waits"),
    [
        ("dense", 1, [], 1),
        ("dense", 2, [RECOMPUTED], 1),
        ("experts", 1, [*MOE, RECOMPUTED], 1),
        ("experts", 2, MOE, 1),
        # An all-to-all takes its sizes from the host; in recomputation they are known.
        ("divided", 2, [*MOE, *EP], 1 + LAYERS * PASSES),
        ("divided-again", 2, [*MOE, *EP, RECOMPUTED], 1 + LAYERS * PASSES),
    ],
)
def test_the_host_waits_once_a_step_on_cuda(workspace, start, name, ranks, overrides, waits):
    if torch.cuda.device_count() < ranks:
        pytest.skip("a GPU for each rank")
    (workspace / "cuda.yaml").write_text(RECIPE.replace("device: cpu", "device: cuda"))
    path = workspace / f"cuda-{name}-{ranks}.json"
    job = start(
        ranks, f"run.dir=counted-{path.stem}", "run.steps=5", "schedule={}", "precision.dtype=bf16",
        *overrides, recipe="cuda.yaml", program=["tests.distributed.counted", str(path)],
    )  # fmt: skip
    code, output = job.wait()
    assert code == 0, output
    steps = json.loads(path.read_text())[2:4]
    assert [step["synchronised"] for step in steps] == [waits] * 2
    # What torch does not report, such as waits for events, the fake runtime counts.
    assert [step.get("waits", waits) for step in steps] == [waits] * 2
