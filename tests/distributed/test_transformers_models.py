"""Models that transformers computes, in real jobs: plain AdamW on transformers' own passes over
documents by themselves is what they follow, whatever is killed and however many ranks go on."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lab.local_nodes import LocalNodes
from tests.checkpointing.faults import until
from tests.distributed.jobs import ROOT, Forked, losses, soak, starts, wait_for_step
from tests.distributed.lora_gradients import batch, documents, of_layouts
from tests.late import Late
from tests.their_models import CONFIGS, VOCABULARY, publish, separate_loss
from trainer.data.loader import TokenStream
from trainer.data.prepare.prepare import prepare
from trainer.recipe.architecture import bundled_families
from trainer.tools.generate import generate

peft = Late("peft")
STEPS = 12
BOUND = 1e-4
"""Of gradients in float32, relative to those of each weight: measured 5e-6."""
GIVEN = (
    "model.architecture=null", "data.sources=[{path: lines}]", "schedule={name: constant}",
    "optimizer={lr: 1.0e-3, clip_norm: 0, weight_decay: 0.1}",
)  # fmt: skip


@pytest.fixture(scope="module")
def lines(workspace):
    """Documents of which several share a sequence."""
    text = " ".join((workspace / "corpus/000.txt").read_text().split())
    words = text.split()
    rows = [" ".join(words[start : start + 2]) for start in range(0, len(words), 2)]
    (workspace / "lines.txt").write_text("\n".join(rows * 20))
    options = {"tokenizer": "bytes", "split_documents": "line", "validation_fraction": 0.05}
    prepare([str(workspace / "lines.txt")], workspace / "lines", **options)
    return workspace / "lines"


@pytest.fixture
def published(workspace, lines):
    def published(model_type):
        folder = workspace / f"of-{model_type}"
        model = publish(model_type, folder)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(lines / "tokenizer.json"))
        tokenizer.save_pretrained(folder)
        # A family of Perdure's computes some of them, too.
        forced = ("model.implementation=transformers",) * (model_type in bundled_families())
        return model, (*GIVEN, *forced, f"model.init_from={folder.name}")

    return published


def batches(lines):
    stream = TokenStream.open(
        [(lines, 1.0)], split="train", seq_len=32, seed=7, shuffle=True, documents="document_ids"
    )
    for step in range(STEPS):
        batch = stream.fetch(range(8 * step, 8 * step + 8))
        assert (batch["document_ids"][:, 1:] != batch["document_ids"][:, :-1]).any()
        yield batch["input_ids"], batch["labels"], batch["document_ids"]


def follow(model, lines):
    """(loss of each step, gradients of the first) of plain AdamW; the model is trained."""
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    found, gradients = [], {}
    for given in batches(lines):
        optimizer.zero_grad()
        loss = separate_loss(model, *given)
        loss.backward()
        found.append(loss.item())
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return found, gradients


def check_first_step(checkpoint, gradients):
    """The first moment of AdamW is then a tenth of the gradient."""
    moments = {}
    for file in (checkpoint / "optimizer").glob("*.safetensors"):
        moments |= load_file(file)
    found = {name.removesuffix(".exp_avg"): 10 * one for name, one in moments.items()}
    check_gradients(found, gradients, checkpoint)


def in_files(name, known):
    """As the files of GPT-NeoX name it."""
    return name if name in known else name.replace("lm_head", "embed_out")


def check_gradients(found, expected, where):
    # Those of biases of keys are but rounding: they change no attention.
    floor = 1e-3 * max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (found[in_files(name, found)] - gradient).norm() / max(gradient.norm(), floor)
        assert error < BOUND, (where, name)


@torch.no_grad()
def check_opens(checkpoint, model):
    """transformers opens it, with the logits of the model that plain AdamW has trained."""
    trained, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.arange(3, 51)[None]
    stored = load_file(next(checkpoint.glob("model*.safetensors")))
    held = dict(trained.named_parameters())
    assert {*stored} == {in_files(name, stored) for name in held}
    assert all(stored[in_files(name, stored)].equal(one) for name, one in held.items())
    ours, theirs = trained(ids).logits, model(ids).logits
    assert (ours - theirs).abs().max() < 2e-2 * theirs.std()


@soak
@pytest.mark.timeout(240)
def test_it_trains_and_goes_on_elsewhere(workspace, lines, published, train):
    model, given = published("gemma2")
    given = (*given, "run.dir=theirs", "checkpoint.every=1", "checkpoint.keep=9")
    output = train(2, *given, "run.steps=1")
    assert "Gemma2ForCausalLM of transformers 5" in output
    expected, gradients = follow(model, lines)
    steps = workspace / "theirs/checkpoints"
    check_first_step(steps / "step-00000001", gradients)
    train(1, *given, f"run.steps={STEPS}", "strategy.name=ddp")
    found = losses(workspace, "theirs")
    assert found[1] == pytest.approx(expected[0], rel=1e-6)
    assert [found[step + 1] for step in range(STEPS)] == pytest.approx(expected, rel=1e-3)
    check_opens(steps / f"step-{STEPS:08}", model)


LAYOUTS = ["", "strategy.name=ddp", "strategy.activation_checkpointing=full strategy.zero=2"]


@pytest.mark.parametrize(
    ("ranks", "model_types", "layouts"),
    [
        pytest.param(2, ["gemma2"], LAYOUTS[::2], marks=soak),
        pytest.param(3, ["opt", "gpt_oss", "gpt2"], [
            *LAYOUTS, "strategy.zero=1",
            "strategy.offload=cpu", "strategy.offload=nvme strategy.offload_directory=offload",
            "strategy.reduce_every_pass=true", "run.determinism=exact",
        ], marks=soak),
        pytest.param(
            4, ["gemma2"], ["strategy.sharding=HYBRID_SHARD strategy.shard_size=2"], marks=soak
        ),
    ],
)  # fmt: skip
def test_gradients_of_layouts(
    workspace, lines, published, start, tmp_path, ranks, model_types, layouts
):
    given, references = [], []
    for model_type in model_types:
        model, common = published(model_type)
        references += [model] * len(layouts)
        # layouts are cut at spaces
        start_from = " ".join(["model.architecture=null", *common[len(GIVEN) :]])
        given += [f"{start_from} {layout}".strip() for layout in layouts]
    found = of_layouts(start, ranks, given, tmp_path)
    ids, labels = batch(VOCABULARY)
    for layout, model, ours in zip(given, references, found, strict=True):
        model.zero_grad()
        separate_loss(model, ids, labels, documents()).backward()
        check_gradients(ours, {n: p.grad for n, p in model.named_parameters()}, layout)


@soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_killed_and_on_other_ranks(workspace, lines, published, start, train, model_type):
    model, given = published(model_type)
    run = f"soak-{model_type}"
    given = (*given, f"run.dir={run}", "checkpoint.every=1", "checkpoint.keep=20")
    job = start(2, *given, "run.steps=1000", "strategy.sharding=SHARD_GRAD_OP")
    wait_for_step(workspace, run, 4, job)
    job.kill()
    checkpoints = workspace / run / "checkpoints"
    expected, gradients = follow(model, lines)
    check_first_step(checkpoints / "step-00000001", gradients)
    for step in range(5, 1000):  # so that what comes is computed by the other ranks
        shutil.rmtree(checkpoints / f"step-{step:08}", ignore_errors=True)
    output = train(3, *given, f"run.steps={STEPS}", "strategy.activation_checkpointing=full")
    assert "resuming after step" in output
    found = losses(workspace, run)
    assert found[1] == pytest.approx(expected[0], rel=1e-6)
    assert [found[step + 1] for step in range(STEPS)] == pytest.approx(expected, rel=1e-3)
    check_opens(checkpoints / f"step-{STEPS:08}", model)


def last_step(workspace, run, steps):
    folder = workspace / run / "checkpoints" / f"step-{steps:08}"
    files = sorted(folder.rglob("*.safetensors"))
    return {name: one for file in files for name, one in load_file(file).items()}


@soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "gpt2"])
def test_exact_mode(workspace, published, train, model_type):
    _, given = published(model_type)
    given = (*given, "run.determinism=exact", "run.steps=6")
    train(1, *given, f"run.dir=exact-1-{model_type}")
    train(3, *given, f"run.dir=exact-3-{model_type}", "strategy.name=ddp")
    train(2, *given, f"run.dir=exact-2-{model_type}")
    one, *others = (last_step(workspace, f"exact-{ranks}-{model_type}", 6) for ranks in (1, 2, 3))
    for other in others:
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


@soak
@pytest.mark.timeout(240)
def test_bf16_and_dropout(workspace, published, start, train):
    """Two runs draw the same numbers, whatever is killed, and end with the same loss."""
    folder = workspace / "of-gpt2"
    _, given = published("gpt2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "resid_pdrop": 0.1}))
    given = (*given, "run.steps=8", "precision.dtype=bf16", "checkpoint.every=1")
    for name in ("fsdp", "ddp"):
        train(2, *given, f"run.dir=drop-{name}", f"strategy.name={name}")
    assert losses(workspace, "drop-fsdp") == pytest.approx(losses(workspace, "drop-ddp"), rel=2e-2)
    job = start(2, *given, "run.dir=drop-killed")
    wait_for_step(workspace, "drop-killed", 3, job)
    job.kill()
    train(2, *given, "run.dir=drop-killed")
    assert losses(workspace, "drop-killed") == losses(workspace, "drop-fsdp")


@soak
@pytest.mark.timeout(240)
def test_an_adapter(workspace, published, train):
    model, given = published("gemma2")
    given = (*given, "run.dir=adapted", "model.adapter={rank: 4, base: fp32}", "optimizer.lr=0.02")
    train(2, *given, "run.steps=10", "checkpoint.every=10")
    train(1, *given, "run.steps=20")
    step = workspace / "adapted/checkpoints/step-00000020"
    ids = torch.arange(3, 51)[None]
    with torch.no_grad():
        before = model(ids).logits
        expected = peft.PeftModel.from_pretrained(model, step)(ids).logits
        assert (expected - before).abs().max() > 1e-3
    found = losses(workspace, "adapted")
    assert found[20] < 0.9 * found[1]
    assert "".join(generate(step, "the ", temperature=0, max_new_tokens=4))


@soak
@pytest.mark.timeout(240)
def test_a_killed_rank_costs_the_others_no_process(workspace, published, tmp_path):
    _, given = published("gemma2")
    fast = ("elastic.snapshot_every=1", "checkpoint.slots=2", "run.steps=100000")
    nodes = LocalNodes(
        ["-m", "trainer", "recipe.yaml", *given, *fast, "run.dir=in-place"],
        folder=workspace,
        nnodes="1",
        logs=tmp_path,
        start=Forked,
        ranks=2,
        environment={"PYTHONPATH": f"{ROOT}:{workspace}"},
    )

    def goes_on(node, steps):
        goal = max(losses(workspace, "in-place"), default=0) + steps
        reached = until(lambda: max(losses(workspace, "in-place"), default=0) >= goal, 100)
        assert reached, node.text()

    with nodes:
        node = nodes.add()
        goes_on(node, 8)
        before = node.trainers()
        os.kill(before[1], signal.SIGKILL)
        goes_on(node, 5)
        assert before[0] in node.trainers()
    assert [s["cause"] and s["cause"]["rank"] for s in starts(workspace, "in-place")] == [None, 1]


@soak
def test_documents_that_see_each_other_end_the_run(workspace, published, start):
    _, given = published("opt")
    program = ("tests.distributed.leaky",)
    code, output = start(1, *given, "run.dir=leaky", "run.steps=2", program=program).wait()
    assert code == 2, output
    told = "data.document_mask: in OPTForCausalLM of transformers a document changes the loss of"
    assert told in output
    assert "step 1/2" not in output
