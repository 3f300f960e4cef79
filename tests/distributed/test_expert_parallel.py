"""Experts on several ranks, whole or divided among them, give the losses of a single process and
the same checkpoints."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.jobs import (
    EP,
    GPT_OSS,
    LAYOUT,
    MOE,
    SIX,
    THIRTY,
    assert_follows,
    records,
    soak,
    told,
)
from tests.distributed.test_pipeline_parallel import FOUR, INTERLEAVED, NVME, ZERO_BUBBLE
from tests.distributed.test_tensor_parallel import EVEN, HSDP

UNTIED = (*MOE, "model.architecture.tie_word_embeddings=false")
SELECTIVE = ("strategy.activation_checkpointing=selective", "strategy.compile=true")
CP, PP = ("strategy.cp=2",), ("strategy.pp=2", "batch.micro_batch=2")
SP = ("strategy.tp=2", "strategy.sequence_parallel=true")


def weights(checkpoint):
    files = checkpoint.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "model"),
    [
        ("ep2-short", 2, [*EP, *SIX], MOE),
        *(
            pytest.param(*case, marks=soak)
            for case in (
                ("ep2", 2, EP, MOE),
                ("moe-ddp2", 2, ["strategy.name=ddp"], MOE),
                ("moe-zero1", 2, ["strategy.zero=1"], MOE),
                ("moe-zero2", 2, ["strategy.zero=2"], MOE),
                ("moe-fsdp2", 2, [], MOE),
                ("moe-fsdp4", 4, [], UNTIED),
                ("moe-hsdp", 4, HSDP, MOE),
                ("moe-full", 2, ["strategy.activation_checkpointing=full"], MOE),
                ("moe-compile", 2, ["strategy.compile=true"], MOE),
                ("ep2-untied", 2, EP, UNTIED),
                ("ep2-zero2", 2, [*EP, "strategy.zero=2"], MOE),
                ("ep2-full", 2, [*EP, "strategy.activation_checkpointing=full"], MOE),
                ("ep2-selective", 2, [*EP, "strategy.activation_checkpointing=selective"], MOE),
                ("ep2-compile", 2, [*EP, "strategy.compile=true"], MOE),
                ("ep2-full-compile", 2,
                 [*EP, "strategy.activation_checkpointing=full", SELECTIVE[1]], MOE),
                ("ep2-selective-compile", 2, [*EP, *SELECTIVE], MOE),
                ("moe-selective-compile", 2, SELECTIVE, MOE),
                ("ep2-tp2-selective-compile", 2, [*EP, *SP, *SELECTIVE], MOE),
                ("ep2-cp2-selective-compile", 2, [*EP, *CP, *SELECTIVE], MOE),
                ("ep2-pp2-selective-compile", 4,
                 [*EP, *PP, *SELECTIVE, "batch.global_batch=7"], MOE),
                ("moe-selective", 2, ["strategy.activation_checkpointing=selective"], MOE),
                ("ep2-every", 2, [*EP, "strategy.reduce_every_pass=true"], MOE),
                ("ep2-offload", 4, [*EP, "strategy.offload=cpu"], MOE),
                ("ep2-nvme", 2, [*EP, *NVME], UNTIED),
                ("ep2-tp2-sp-pp2-nvme", 4, [*EP, *SP, *PP, *NVME], MOE),
                ("ep2-whole", 2, [*EP, "data.document_mask=false"], MOE),
                ("ep2-uneven", 2, [*EP, "batch.global_batch=5"], MOE),
                ("ep2-fsdp2", 4, EP, MOE),
                ("ep2-fsdp2-zero2", 4, [*EP, "strategy.zero=2"], UNTIED),
                ("ep2-hsdp", 4, [*EP, *HSDP], MOE),
                ("ep2-fsdp3", 6, EP, MOE),
                ("ep4", 4, ["strategy.ep=4"], MOE),
                ("ep2-cp2", 2, [*EP, *CP], MOE),
                ("ep2-cp2-fsdp2", 4, [*EP, *CP], UNTIED),
                ("ep2-pp2", 4, [*EP, *PP], MOE),
                ("ep2-pp2-interleaved", 4, [*EP, *PP, *INTERLEAVED], [*MOE, *FOUR]),
                ("ep2-pp2-zero-bubble", 4, [*EP, *PP, *ZERO_BUBBLE], MOE),
                ("ep2-tp2", 2, [*EP, "strategy.tp=2"], MOE),
                ("ep2-tp2-sp", 2, [*EP, *SP], MOE),
                ("ep2-tp2-sp-fsdp2", 4, [*EP, *SP], UNTIED),
                ("ep4-tp2-sp", 4, ["strategy.ep=4", *SP], MOE),
                ("ep2-pp2-cp2", 4, [*EP, *PP, *CP], MOE),
                ("ep2-tp2-sp-cp2", 4, [*EP, *SP, *CP], MOE),
                ("ep2-tp2-sp-pp2", 4, [*EP, *SP, *PP], MOE),
                ("ep4-tp2-sp-pp2-cp2", 8, ["strategy.ep=4", *SP, *PP, *CP], MOE),
                ("moe-cp2", 2, CP, MOE),
                ("moe-pp2", 2, PP, MOE),
                ("moe-cp2-ddp", 2, [*CP, "strategy.name=ddp"], MOE),
                ("moe-cp2-zero1", 2, [*CP, "strategy.zero=1"], MOE),
                ("ep2-pp2-gpipe", 4, [*EP, *PP, "strategy.pp_schedule=gpipe"], MOE),
                ("ep2-pp2-cp2-fsdp2", 8, [*EP, *PP, *CP], MOE),
                ("ep2-tp2-sp-pp2-interleaved", 4, [*EP, *SP, *PP, *INTERLEAVED], [*MOE, *FOUR]),
                ("ep2-tp2-compile", 2, [*EP, *SP, "strategy.compile=true"], MOE),
                ("ep4-pp2", 8, ["strategy.ep=4", *PP], MOE),
                ("gpt-oss-fsdp2", 2, [], GPT_OSS),
                ("gpt-oss-ep2", 2, EP, GPT_OSS),
                ("gpt-oss-ep2-fsdp2", 4, EP, GPT_OSS),
                ("gpt-oss-ep2-tp2-sp", 2, [*EP, *SP], GPT_OSS),
                ("gpt-oss-ep4-tp2", 4, ["strategy.ep=4", "strategy.tp=2"], GPT_OSS),
                ("gpt-oss-pp2-selective-compile", 2, [*PP, *SELECTIVE], GPT_OSS),
                ("ep8", 8, ["strategy.ep=8", "batch.micro_batch=1"], MOE),
                ("ep8-tp2-sp", 8, ["strategy.ep=8", *SP], [*MOE, *EVEN]),
                ("ep2-fsdp4", 8, [*EP, "batch.micro_batch=1"], MOE),
                (
                    "ep2-fsdp2-hsdp", 8,
                    [*EP, HSDP[0], "strategy.shard_size=4", "batch.micro_batch=1"], MOE,
                ),
            )
        ),
    ],
)  # fmt: skip
def test_same_curve_as_one_process(
    workspace, train, alone, record_property, name, ranks, strategy, model
):
    shared = [key for key in strategy if key.startswith(("batch", "data", "run"))]
    output = train(ranks, f"run.dir={name}", *THIRTY, *strategy, *model)
    assert ("ep=" in output) == any("ep=" in key for key in strategy)
    ours, theirs = told(workspace, name), alone(*model, *shared)
    assert max(theirs[1]) > 1.0, "clipping must happen, or curves do not show it"
    differences = assert_follows(name, ours, theirs)
    record_property(LAYOUT, (ranks, [*strategy, *model], differences))


@soak
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_loses_no_more_than_fsdp_does(workspace, train, dtype):
    low = (f"precision.dtype={dtype}", *THIRTY, *MOE)
    for name, strategy in ((f"{dtype}-fsdp", ()), (f"{dtype}-ep", EP)):
        train(2, f"run.dir=moe-{name}", *strategy, *low)
    ours, theirs = (told(workspace, f"moe-{dtype}-{name}")[0] for name in ("ep", "fsdp"))
    assert ours == pytest.approx(theirs, rel=5e-3)


def test_what_is_recorded_and_saved(workspace, train):
    train(2, "run.dir=told", "run.steps=4", "schedule={}", "run.evaluate_every=4", *EP, *MOE)
    steps = [r for r in records(workspace, "told") if "lr" in r]
    for step in steps:
        both = step["cross_entropy"] + 0.01 * step["balance_loss"]
        assert step["loss"] == pytest.approx(both, rel=1e-6)
        assert 2 < step["balance_loss"] < 3  # 2 is best
        assert 1 < step["load_imbalance"] <= 4
        assert 1.9 < step["router_entropy"] < 2.08  # ln 8 at most
    held_out = next(r for r in records(workspace, "told") if "validation_loss" in r)
    assert held_out["validation_loss"] == held_out["validation_cross_entropy"]
    checkpoint = workspace / "told/checkpoints/step-00000004"
    _, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"]
    biases = {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in range(2)}
    assert set(report["unexpected_keys"]) == biases  # transformers has none for this family
    saved = weights(checkpoint)
    for name in biases:
        assert 0 < saved[name].abs().max() <= 4.001e-3  # a step moves it by 1e-3


@soak
@pytest.mark.timeout(240)
def test_checkpoints_are_the_same_bytes_in_every_layout(workspace, train, start):
    short = ("run.steps=3", "schedule={}", *MOE)
    train(1, "run.dir=experts-alone", "strategy.name=ddp", *short)
    train(2, "run.dir=experts-saved", *EP, *short)
    alone, before = (workspace / f"experts-{n}/checkpoints" for n in ("alone", "saved"))
    whole = weights(alone / "step-00000003")
    for name, tensor in weights(before / "step-00000003").items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-3)
    layouts = [(1, ()), (2, EP), (2, ()), (4, EP), (4, ("strategy.ep=4",)), (3, ()), (1, ())]
    layouts += [(4, (*EP, *HSDP)), (6, EP), (2, ("strategy.zero=1",)), (2, EP)]
    for number, (ranks, overrides) in enumerate(layouts):
        after = workspace / f"experts-saved/again-{number}"
        program = ("tests.distributed.resaved", str(after))
        given = (f"checkpoint.directory={before}", "schedule={}", *overrides, *MOE)
        code, output = start(ranks, *given, program=program).wait()
        assert code == 0, output
        one, other = (path / "step-00000003" for path in (before, after))
        names = [str(path.relative_to(one)) for path in sorted(one.rglob("*.safetensors"))]
        assert len(names) == 2
        for name in names:
            assert (one / name).read_bytes() == (other / name).read_bytes(), (number, name)
        before = after
    AutoModelForCausalLM.from_pretrained(before / "step-00000003")


@soak
def test_a_run_goes_on_in_another_layout(workspace, train, alone):
    """From storage: EP2, one process, EP2 x FSDP2, FSDP2."""
    layouts = [(2, EP), (1, ("strategy.name=ddp",)), (4, EP), (2, ())]
    shared = ("run.steps=30", "run.evaluate_every=15", "schedule.name=constant")
    for number, (ranks, strategy) in enumerate(layouts):
        last = min(30, 8 * (number + 1))
        given = ("run.dir=goes-on", *shared, f"run.steps={last}", "checkpoint.slots=0")
        train(ranks, *given, *strategy, *MOE)
    ours, theirs = told(workspace, "goes-on")[:1], alone(*MOE, "schedule.name=constant")[:1]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)


@soak
def test_exact_is_exact_with_experts(workspace, train):
    for ranks, strategy in ((1, ()), (2, ()), (4, ("strategy.zero=2",))):
        given = (f"run.dir=exact-moe-{ranks}", "run.determinism=exact", *THIRTY, *MOE)
        train(ranks, *given, *strategy)
    first, *others = (told(workspace, f"exact-moe-{ranks}") for ranks in (1, 2, 4))
    assert all(first == other for other in others)


@soak
def test_exact_is_exact_on_twice_as_many_ranks(workspace, train):
    """A group of ranks sums up the same micro-batches in each expert, whatever the world."""
    for number, more in enumerate(((), ("strategy.tp=2",), ("strategy.zero=2",))):
        for ranks in (2, 4):
            given = (f"run.dir=exact-ep-{ranks}-{number}", "run.determinism=exact")
            train(ranks, *given, *THIRTY, *MOE, *EP, *more)
        few, many = (told(workspace, f"exact-ep-{n}-{number}") for n in (2, 4))
        assert few == many, more


@soak
def test_bf16_loses_no_more_than_fsdp_does(workspace, train):
    low = ("precision.dtype=bf16", *THIRTY, *MOE)
    train(2, "run.dir=experts-bf16", *low)
    train(2, "run.dir=ep-bf16", *EP, *low)
    ours, theirs = told(workspace, "ep-bf16")[0], told(workspace, "experts-bf16")[0]
    print("ep2-bf16", max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)))
    assert ours == pytest.approx(theirs, rel=3e-3)
