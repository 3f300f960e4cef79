"""Pipeline parallelism gives the losses of a single process, and the same checkpoints."""

import pytest

from checkpointing import newest_checkpoint, read_state
from tests.distributed.jobs import LAYOUT, SIX, THIRTY, assert_follows, records, soak, told
from tests.distributed.test_tensor_parallel import FOUR_HEADS, HSDP, NVME, SGD

LENGTH = (*THIRTY, "batch.micro_batch=1")
PP = ("strategy.pp=2",)
FOUR = ("model.architecture.num_hidden_layers=4",)
EIGHT = ("model.architecture.num_hidden_layers=8",)
INTERLEAVED = ("strategy.pp_schedule=interleaved_1f1b", "strategy.pp_stages_per_rank=2")
ZERO_BUBBLE = ("strategy.pp_schedule=zero_bubble", "strategy.sharding=SHARD_GRAD_OP")
CP = ("strategy.cp=2",)
CPU = ("strategy.offload=cpu",)
SP = ("strategy.tp=2", "strategy.sequence_parallel=true")
LLAMA = ("model.architecture.model_type=llama", "model.architecture.tie_word_embeddings=false")


@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "model"),
    [
        pytest.param("pp2-nvme-short", 2, [*PP, *NVME, *SIX], (), marks=soak),
        ("pp2-tp2-sp-short", 4, [*PP, *SP, *SIX, "batch.micro_batch=4"], ()),
        *(
            pytest.param(*case, marks=soak)
            for case in (
                ("pp2", 2, PP, ()),
                ("pp2-tp2-sp", 4, [*PP, *SP, "batch.micro_batch=4"], ()),
                ("pp2-gpipe", 2, [*PP, "strategy.pp_schedule=gpipe"], ()),
                ("pp2-interleaved", 2, [*PP, *INTERLEAVED], FOUR),
                ("pp2-zero-bubble", 2, [*PP, *ZERO_BUBBLE], ()),
                ("pp2-llama", 2, PP, LLAMA),
                ("pp2-uneven", 2, PP, ["batch.global_batch=7", "batch.micro_batch=3"]),
                ("pp2-one", 2, PP, ["batch.micro_batch=8"]),
                ("pp2-auto", 2, PP, ["batch.micro_batch=auto"]),
                ("pp2-own", 2, PP, SGD),
                ("pp3", 3, ["strategy.pp=3"], FOUR),
                ("pp4", 4, ["strategy.pp=4"], FOUR),
                ("pp4-zero-bubble", 4, ["strategy.pp=4", *ZERO_BUBBLE], FOUR),
                ("pp2-fsdp2", 4, PP, ()),
                ("pp2-zero2", 4, [*PP, "strategy.zero=2"], ()),
                ("pp2-ddp2", 4, [*PP, "strategy.name=ddp"], ()),
                ("pp2-fsdp2-interleaved", 4, [*PP, *INTERLEAVED], FOUR),
                ("pp2-zero2-zero-bubble", 4, [*PP, *ZERO_BUBBLE], FOUR),
                ("pp2-full", 4, [*PP, "strategy.activation_checkpointing=full"], ()),
                ("pp2-zero-bubble-full", 4,
                 [*PP, *ZERO_BUBBLE, "strategy.activation_checkpointing=full"], ()),
                ("pp2-zero-bubble-selective", 4,
                 [*PP, *ZERO_BUBBLE, "strategy.activation_checkpointing=selective"], ()),
                ("pp2-selective", 4, [*PP, "strategy.activation_checkpointing=selective"], ()),
                ("pp2-compile", 2, [*PP, "strategy.compile=true"], ()),
                ("pp2-every", 4, [*PP, "strategy.reduce_every_pass=true"], ()),
                ("pp2-tp2", 4, [*PP, "strategy.tp=2"], ()),
                ("pp2-tp2-sp-8", 4, [*PP, *SP], ()),
                ("pp2-tp2-sp-llama", 4, [*PP, *SP], LLAMA),
                ("pp2-tp2-sp-fsdp2", 8, [*PP, *SP], ()),
                ("pp2-tp2-sp-fsdp2-interleaved", 8, [*PP, *SP, *INTERLEAVED], FOUR),
                ("pp2-tp2-sp-zero2-zero-bubble", 8, [*PP, *SP, *ZERO_BUBBLE], FOUR),
                ("pp2-tp2-sp-ddp2-uneven", 8,
                 [*PP, *SP, "strategy.name=ddp", "batch.micro_batch=2"],
                 ["batch.global_batch=7"]),
                ("pp2-cp2", 4, [*PP, *CP], ()),
                # After 30 steps rounding has made 1e-4 of its norms: 1e-6 of its losses.
                ("pp2-cp2-llama-31", 4, [*PP, *CP, *SIX], [*LLAMA, "data.seq_len=31"]),
                ("pp2-cp2-interleaved", 4, [*PP, *CP, *INTERLEAVED], FOUR),
                ("pp2-cp2-zero-bubble", 4, [*PP, *CP, *ZERO_BUBBLE], ()),
                ("pp2-cp2-full", 4, [*PP, *CP, "strategy.activation_checkpointing=full"], ()),
                ("pp2-cp2-fsdp2-uneven", 8, [*PP, *CP], ["batch.global_batch=7"]),
                ("pp2-tp2-sp-cp2", 8, [*PP, *SP, *CP], ()),
                ("pp2-fsdp3", 6, PP, ["batch.global_batch=7"]),
                ("pp2-hsdp", 8, [*PP, *HSDP], ()),
                ("pp2-offload", 2, [*PP, *CPU], ()),
                ("pp2-fsdp2-offload", 4, [*PP, *CPU], LLAMA),
                ("pp2-zero2-zero-bubble-offload", 4, [*PP, *ZERO_BUBBLE, *CPU], ()),
                ("pp2-every-offload", 4, [*PP, "strategy.reduce_every_pass=true", *CPU], ()),
                ("pp2-fsdp2-interleaved-nvme", 4, [*PP, *INTERLEAVED, *NVME], FOUR),
                ("pp2-zero-bubble-nvme", 2, [*PP, *ZERO_BUBBLE, *NVME], ()),
                ("pp2-tp2-sp-nvme", 4, [*PP, *SP, *NVME], ()),
                ("pp2-cp2-hsdp-offload", 8, [*PP, *CP, *HSDP, *CPU], ()),
                ("pp2-fsdp4-uneven", 8, PP, ["batch.global_batch=7"]),
                ("pp2-fsdp2-gpipe", 4, [*PP, "strategy.pp_schedule=gpipe"], ()),
                ("pp2-zero-bubble-ddp2", 4,
                 [*PP, "strategy.pp_schedule=zero_bubble", "strategy.name=ddp"], ()),
                ("pp2-cp2-hsdp", 8, [*PP, *CP, *HSDP], ()),
                ("pp2-tp2-sp-hsdp", 8, [*PP, *SP, HSDP[0], "strategy.shard_size=1"], ()),
                ("pp2-tp2-sp-fsdp2-full", 8,
                 [*PP, *SP, "strategy.activation_checkpointing=full"], ()),
                ("pp2-tp2-compile", 4, [*PP, *SP, "strategy.compile=true"], ()),
                ("pp2-cp2-compile", 4, [*PP, *CP, "strategy.compile=true"], ()),
                ("pp2-tp2-sp-cp2-gpipe", 8, [*PP, *SP, *CP, "strategy.pp_schedule=gpipe"], ()),
                ("pp2-tp2-sp-cp2-interleaved", 8, [*PP, *SP, *CP, *INTERLEAVED], FOUR),
                ("pp2-tp2-sp-cp2-zero-bubble", 8, [*PP, *SP, *CP, *ZERO_BUBBLE], ()),
                ("pp2-tp4-sp", 8, [*PP, "strategy.tp=4", SP[1]], FOUR_HEADS),
                ("pp3-fsdp2", 6, ["strategy.pp=3"], FOUR),
                ("pp4-interleaved", 4, ["strategy.pp=4", *INTERLEAVED], EIGHT),
                ("pp4-fsdp2", 8, ["strategy.pp=4"], FOUR),
                ("pp4-tp2-sp", 8, ["strategy.pp=4", *SP], FOUR),
                ("pp4-cp2", 8, ["strategy.pp=4", *CP], FOUR),
                ("pp8", 8, ["strategy.pp=8"], EIGHT),
            )
        ),
    ],
)  # fmt: skip
def test_same_curve_as_one_process(
    workspace, train, alone, record_property, name, ranks, strategy, model
):
    """Largest relative differences seen here: see docs/parallelism.md."""
    output = train(ranks, f"run.dir={name}", *LENGTH, *model, *strategy)
    assert "ranks idle for" in output
    steps = [record for record in records(workspace, name) if "step_seconds_p50" in record]
    assert all(0 < step["bubble"] < 1 for step in steps)
    shared = [key for key in strategy if key.startswith("run")]
    ours, theirs = told(workspace, name), alone(*model, *shared)
    assert len(steps) == len(ours[0]) - 1
    assert max(theirs[1]) > 1.0, "clipping must happen, or curves do not show it"
    differences = assert_follows(name, ours, theirs)
    record_property(LAYOUT, (ranks, [*strategy, *model], differences))


@soak
@pytest.mark.timeout(480)
def test_checkpoints_are_the_same_bytes_in_every_layout(workspace, train, start):
    """Saved by a pipeline of two, each layout loads what the one before it saved."""
    given = ("schedule={}", *FOUR)
    train(2, "run.dir=piped", "run.steps=3", *given, *PP)
    before = workspace / "piped/checkpoints"
    layouts = (
        (1, ()),
        (2, ()),
        (2, PP),
        (4, [*PP, *INTERLEAVED]),
        (2, ["strategy.tp=2"]),
        (4, ["strategy.pp=4", *ZERO_BUBBLE]),
        (4, [*PP, "strategy.name=ddp"]),
        (4, [*PP, *SP]),
        (4, [*PP, *SP, *NVME]),
        (2, [*PP, *CPU]),
        (2, PP),
    )
    for number, (ranks, overrides) in enumerate(layouts):
        after = workspace / f"piped/again-{number}"
        program = ("tests.distributed.resaved", str(after))
        job = start(ranks, f"checkpoint.directory={before}", *given, *overrides, program=program)
        code, output = job.wait()
        assert code == 0, output
        one, other = (path / "step-00000003" for path in (before, after))
        names = [str(p.relative_to(one)) for p in sorted(one.rglob("*.safetensors"))]
        assert len(names) == 2
        for each in names:
            assert (one / each).read_bytes() == (other / each).read_bytes(), each
        before = after


@soak
@pytest.mark.timeout(480)
def test_a_run_goes_on_in_other_layouts(workspace, train, alone):
    """From memory and storage, with the same order of data and the same state of the optimizer."""
    layouts = (
        (2, [*PP, *CPU]),
        (1, ["strategy.name=ddp"]),
        (4, [*PP, *INTERLEAVED, *NVME]),
        (2, []),
        (4, [*PP, *ZERO_BUBBLE]),
    )
    for number, (ranks, overrides) in enumerate(layouts):
        steps = (f"run.steps={6 * number + 6}", "schedule.name=constant")
        train(ranks, "run.dir=moved", *LENGTH, *FOUR, *overrides, *steps)
    ours, theirs = told(workspace, "moved"), alone(*FOUR, "schedule.name=constant")
    for found, expected, bound in zip(ours[:2], theirs, (1e-5, 1e-4), strict=False):
        assert found == pytest.approx(expected, rel=bound)
    groups = read_state(newest_checkpoint(workspace / "moved/checkpoints"))["parameter_groups"]
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"} <= {*groups}


@soak
def test_a_pipeline_starts_from_a_published_model(workspace, train):
    """Each stage reads what it has; a step later both have the losses of one process."""
    train(1, "run.dir=published", "run.steps=2", "schedule={}")
    start = next((workspace / "published/checkpoints").glob("step-*"))
    own = ("model.architecture=null", f"model.init_from={start}", "run.steps=3", "schedule={}")
    train(1, "run.dir=from-one", "strategy.name=ddp", *own)
    train(2, "run.dir=from-two", *PP, *own)
    assert told(workspace, "from-two")[0] == pytest.approx(told(workspace, "from-one")[0], rel=1e-5)


@soak
def test_fp16_loses_no_more_than_fsdp_does(workspace, train):
    """Every stage scales by what the last one multiplies the loss with. Nothing overflows here."""
    low = ("precision.dtype=fp16", "strategy.zero=2", *LENGTH)
    train(2, "run.dir=fp16-dp", *low)
    expected = told(workspace, "fp16-dp")[0]
    for name, strategy in (("pp", PP), ("tp-pp", [*PP, *SP]), ("cp", CP)):
        train(4, f"run.dir=fp16-{name}", *low, *strategy)
        assert told(workspace, f"fp16-{name}")[0] == pytest.approx(expected, rel=3e-3)


@soak
def test_bf16_loses_no_more_than_fsdp_does(workspace, train):
    low = ("precision.dtype=bf16", "strategy.zero=2", *LENGTH)
    train(2, "run.dir=bf16-dp", *low)
    expected = told(workspace, "bf16-dp")[0]
    for name, ranks, strategy in (
        ("1f1b", 4, PP),
        ("zero-bubble", 4, [*PP, *ZERO_BUBBLE[:1]]),
        ("tp-pp", 8, [*PP, *SP]),
        ("cp", 2, CP),
        ("cp-pp", 4, [*PP, *CP]),
    ):
        train(ranks, f"run.dir=bf16-{name}", *low, *strategy)
        assert told(workspace, f"bf16-{name}")[0] == pytest.approx(expected, rel=3e-3)
