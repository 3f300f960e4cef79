"""Adapters: their gradients are PEFT's under every layout, their checkpoints PEFT's files, and they
survive what other runs do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from checkpointing.errors import CheckpointError
from checkpointing.format.nf4 import dequantise, quantise
from checkpointing.format.peft import name_in_file
from checkpointing.tools.inspect import show, verify
from tests.distributed.jobs import SOAK, Job, assert_audited, losses, soak, wait_for_step
from tests.distributed.lora_gradients import VOCABULARY, batch, of_layouts, values
from tests.late import Late
from trainer.cli.main import parse
from trainer.tools.generate import generate

peft = Late("peft")
LORA = (
    "model.architecture=null", "model.init_from=base", "model.adapter.rank=4",
    "model.adapter.alpha=8", "model.adapter.base=fp32",
)  # fmt: skip
TP, SP, PP, CP = (
    "strategy.tp=2",
    "strategy.sequence_parallel=true",
    "strategy.pp=2",
    "strategy.cp=2",
)
ALSO = "model.adapter.also=[lm_head,embed_tokens]"
FULL = "strategy.activation_checkpointing=full"
BUBBLE = "strategy.pp_schedule=zero_bubble"
HYBRID = "strategy.sharding=HYBRID_SHARD strategy.shard_size=2"


@pytest.fixture(scope="module")
def base(workspace):
    """A small Qwen3 as published, which chats; its head is its own."""
    folder = workspace / "base"
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, tie_word_embeddings=False,
        eos_token_id=256,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = workspace / "data" / "tokenizer.json"
    PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), chat_template="{{ messages }}"
    ).save_pretrained(folder)
    shutil.copy(tokenizer, folder)
    (folder / "LICENSE").write_text("as is")
    return folder


def plain(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(base):
    """oracle(whole, folder=base) → gradients of PEFT in one process, in float32 and in float64, by
    our names; with `whole` embedding and head are trained, too."""

    def oracle(whole, folder=base):
        also = ["lm_head", "embed_tokens"] if whole else None
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM",
            modules_to_save=also,
        )  # fmt: skip
        model = peft.get_peft_model(plain(folder), config)
        trained = {
            name.removeprefix("base_model.model.")
            .replace(".default.weight", "")
            .replace(".modules_to_save.default", ""): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        trained = {n.replace("modules_to_save", "weight"): p for n, p in trained.items()}
        ids, labels = batch()
        found = []
        for dtype in (torch.float32, torch.float64):
            model.to(dtype).zero_grad()
            with torch.no_grad():
                for name, parameter in trained.items():
                    if "lora_" in name:
                        parameter.copy_(values(name, tuple(parameter.shape)))
            logits = model(ids).logits
            cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            found.append({name: p.grad.clone() for name, p in trained.items()})
        return found

    return oracle


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(1, ["", "run.determinism=exact"], marks=soak),
        (2, ["", f"{TP} {SP} {ALSO}"]),
        pytest.param(2, [CP, "run.determinism=exact"], marks=soak),
        pytest.param(2, [
            "strategy.name=ddp", f"{PP} strategy.name=ddp", ALSO, "strategy.zero=1", TP,
            f"{FULL} strategy.zero=2",
        ], marks=soak),
        pytest.param(3, ["", "strategy.name=ddp", "strategy.zero=1", ALSO], marks=soak),
        pytest.param(4, [
            f"{TP} {SP}", f"{TP} {SP} {FULL} {ALSO}", f"{TP} {PP}", f"{TP} {CP}", f"{PP} {CP}",
            f"{PP} {ALSO}", f"{PP} {BUBBLE} strategy.zero=2", f"{PP} {BUBBLE} strategy.name=ddp",
            f"{TP} strategy.name=ddp", HYBRID, f"{HYBRID} {TP}", "strategy.tp=4", "strategy.cp=4",
            "strategy.reduce_every_pass=true", "strategy.offload=cpu",
            f"{TP} run.determinism=exact",
            f"{PP} strategy.pp_schedule=interleaved_1f1b strategy.pp_stages_per_rank=2",
            "strategy.offload=nvme strategy.offload_directory=offload",
            "strategy.activation_checkpointing=selective",
        ], marks=[soak, pytest.mark.timeout(300)]),
        *(
            pytest.param(2, [f"strategy.compile=true {more}"], marks=soak)
            for more in ("", f"{TP} {SP}", FULL)
        ),
    ],
)  # fmt: skip
def test_gradients_are_those_of_peft(workspace, start, base, oracle, tmp_path, ranks, layouts):
    """Off by no more than twice what rounding takes PEFT itself from float64, in one process."""
    common = " ".join((*LORA, "data.document_mask=false"))
    given = [f"{common} {layout}".strip() for layout in layouts]
    found = of_layouts(start, ranks, given, tmp_path)
    expected = {whole: oracle(whole) for whole in {ALSO in layout for layout in layouts}}
    for layout, ours in zip(layouts, found, strict=True):
        single, exact = expected[ALSO in layout]
        assert ours.keys() == exact.keys(), layout

        def off(gradients, exact=exact):
            return max(((gradients[n] - g).norm() / g.norm()).item() for n, g in exact.items())

        print(f"{ranks} ranks {layout or 'FULL_SHARD'}: {off(ours):.1e}, PEFT {off(single):.1e}")
        assert off(ours) <= 2 * off(single), layout


STEPS = 30 if SOAK else 10
EXACT = (
    *LORA, "run.determinism=exact", f"run.steps={STEPS}", "schedule.name=constant",
    "optimizer.lr=1e-2", "optimizer.weight_decay=0", "batch.global_batch=6",
)  # fmt: skip


def perdure(*words):
    """A command, in this process."""
    arguments = parse(words)
    assert arguments.run(arguments) == 0


@pytest.fixture(scope="module")
def undisturbed(workspace, base):
    """The last step of a run of one rank."""
    code, output = Job(workspace, 1, ("run.dir=lora-alone", *EXACT)).wait()
    assert code == 0, output
    frozen = sum(tensor.numel() for tensor in plain(base).state_dict().values())
    assert (
        f"with an adapter (LoRA of rank 4, alpha 8, over fp32): 14,080 parameters trained, "
        f"{frozen:,} frozen" in output
    )
    return workspace / "lora-alone" / "checkpoints" / f"step-{STEPS:08}"


@soak  # test_preferences.py does the same to an adapter with another objective
def test_killed_and_resumed_on_other_ranks_it_is_the_same_adapter(
    workspace, undisturbed, base, start, train, monkeypatch
):
    given = ("run.dir=lora", *EXACT, "elastic.snapshot_every=1", "checkpoint.every=4")
    job = start(2, *given)
    wait_for_step(workspace, "lora", 6, job)
    job.kill()
    before = (workspace / "lora" / "metrics.jsonl").read_text().count('"loss"')
    output = train(1, *given)
    assert "resuming after step" in output
    assert before < STEPS
    step = workspace / "lora" / "checkpoints" / undisturbed.name
    files = [path.relative_to(undisturbed) for path in sorted(undisturbed.rglob("*.safetensors"))]
    assert [path.name for path in files] == [
        "adapter_model.safetensors",
        "optimizer-00001-of-00001.safetensors",
    ]
    for file in files:
        assert (step / file).read_bytes() == (undisturbed / file).read_bytes(), file
    assert_audited(workspace, "lora", "--nproc", "3")
    # Beside them lies what lay beside the weights of the base, and nothing that hides the adapter.
    names = {path.name for path in step.iterdir()}
    assert not names & {"config.json", "model.safetensors", "model.safetensors.index.json"}
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (step / name).read_bytes() == (base / name).read_bytes(), name
    state = json.loads((step / "trainer_state.json").read_text())
    assert state["base"] == {
        "path": str(base), "fingerprint": state["init_from"], "format": "fp32"
    }  # fmt: skip
    assert not verify(step).problems
    assert f"trained over {base} (fingerprint #" in str(show(step))
    # Another base, or another adapter, is refused before anything is trained.
    other = workspace / "other"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    for change, words in (
        ("model.init_from=other", "was trained over other weights than those in other"),
        ("model.adapter.alpha=16", "adapter.alpha (8.0 there, 16.0 here)"),
        ("model.adapter=null", "the checkpoint is of another model: adapter"),
    ):
        code, output = start(1, *given, change).wait()
        assert code, change
        assert words in output, output
    monkeypatch.chdir(workspace)
    with pytest.raises(Exception, match="trained over other weights than those in other"):
        perdure("ckpt", "export", "lora", "unmerged", "--merge", "--base", "other")


def test_peft_opens_it_and_it_can_be_merged(workspace, undisturbed, base, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    ids, _ = batch()
    with torch.no_grad():
        start = plain(base)(ids).logits
        expected = peft.PeftModel.from_pretrained(plain(base), undisturbed)(ids).logits
        assert (expected - start).abs().max() > 0.1, "the adapter has learned something"
        assert plain(undisturbed)(ids).logits.equal(expected)
        perdure("ckpt", "export", "lora-alone", "exported")
        assert {path.name for path in (workspace / "exported").iterdir()} == {
            "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "LICENSE",
            "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
            "adapter_base.json",
        }  # fmt: skip
        assert plain(workspace / "exported")(ids).logits.equal(expected)
        perdure("ckpt", "export", "exported", "merged", "--merge")
        assert (plain(workspace / "merged")(ids).logits - expected).abs().max() <= 1e-5
        perdure("ckpt", "export", "lora-alone", "merged-bf16", "--merge", "--dtype", "bf16")
        assert AutoModelForCausalLM.from_pretrained("merged-bf16").dtype == torch.bfloat16
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in (workspace / "merged").iterdir()} == names
    for name in names - {"model.safetensors"}:
        assert (workspace / "merged" / name).read_bytes() == (base / name).read_bytes(), name
    texts = {"".join(generate(where, "the ", temperature=0)) for where in (undisturbed, "merged")}
    assert len(texts) == 1
    assert texts != {"".join(generate(base, "the ", temperature=0))}


@soak  # without it: the base is bf16 under nf4's bytes, and gradients are compared with PEFT's
def test_over_a_base_in_bf16_ranks_agree_and_the_loss_falls(workspace, base, train):
    given = (*LORA, "model.adapter.base=bf16", "precision.dtype=bf16", "run.steps=12")
    given = (*given, "schedule={}", "optimizer.lr=1e-2", "model.adapter.dropout=0.1")
    train(2, "run.dir=lora-bf16", *given, ALSO)
    found = losses(workspace, "lora-bf16")
    assert found[12] < found[1] - 0.1
    step = workspace / "lora-bf16" / "checkpoints" / "step-00000012"
    tensors = load_file(step / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert name_in_file("lm_head.weight") in tensors
    adapted = peft.PeftModel.from_pretrained(plain(base), step)
    trained = adapted.base_model.model.lm_head.modules_to_save["default"].weight
    assert trained.equal(tensors[name_in_file("lm_head.weight")])
    assert not trained.equal(plain(base).lm_head.weight)


# --- over nf4 ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(workspace):
    """A small Qwen3 whose rows are of whole blocks of nf4, also for tp=2; as published, and as nf4
    keeps what is under an adapter."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    folders = workspace / "wide", workspace / "wide-nf4"
    model = Qwen3ForCausalLM(config)
    for folder in folders:
        model.save_pretrained(folder)
        shutil.copy(workspace / "data" / "tokenizer.json", folder)
        for name, weight in model.named_parameters():
            if name.endswith("proj.weight"):
                weight.data = dequantise(quantise(weight), torch.float32)
    return folders


OVER_NF4 = (*LORA, "model.init_from=wide", "model.adapter.base=nf4")


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, ["", "strategy.name=ddp", f"{TP} {SP}"]),
        pytest.param(1, ["", "strategy.name=ddp"], marks=soak),
        pytest.param(3, ["", "strategy.zero=1"], marks=soak),
        pytest.param(4, [
            f"{TP} {SP} {FULL}", f"{TP} {PP}", f"{PP} {BUBBLE} strategy.zero=2", HYBRID,
            f"{HYBRID} {TP}", "strategy.cp=4", "strategy.offload=cpu",
        ], marks=[soak, pytest.mark.timeout(300)]),
        pytest.param(2, [
            f"{PP} model.adapter.targets=[layers.0.self_attn.q_proj]", f"{PP} strategy.name=ddp",
            "strategy.offload=nvme strategy.offload_directory=offload",
            "strategy.activation_checkpointing=selective",
        ], marks=soak),
        *(
            pytest.param(2, [f"strategy.compile=true {more}"], marks=soak)
            for more in ("", f"{TP} {SP}", FULL)
        ),
    ],
)  # fmt: skip
def test_over_nf4_bytes_and_gradients_are_those_of_one_process(
    workspace, start, wide, oracle, tmp_path, ranks, layouts
):
    """Bytes bit for bit: of the published weights. Gradients to twice the rounding of PEFT, over
    the weights that these bytes are."""
    published = dict(plain(wide[0]).named_parameters())
    single, exact = oracle(False, wide[1])
    common = " ".join((*OVER_NF4, "data.document_mask=false"))
    given = [f"{common} {layout}".strip() for layout in layouts]
    found = of_layouts(start, ranks, given, tmp_path)
    for layout, ours in zip(layouts, found, strict=True):
        packed = {name: ours.pop(name) for name in [*ours] if "lora_" not in name}
        want = {name for name in ours if name.endswith("lora_A")}
        assert {name.replace("weight", "lora_A") for name in packed} == want
        for name, one in packed.items():
            assert one.equal(quantise(published[name])), (layout, name)
        if "targets" in layout:  # PEFT has more of them
            continue
        assert ours.keys() == exact.keys(), layout

        def off(gradients):
            return max(((gradients[n] - g).norm() / g.norm()).item() for n, g in exact.items())

        print(f"{ranks} ranks {layout or 'FULL_SHARD'}: {off(ours):.1e}, PEFT {off(single):.1e}")
        assert off(ours) <= 2 * off(single), layout


@soak
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_over_nf4_losses_are_those_over_the_weights_that_its_bytes_are(wide, start, dtype):
    """On 1 to 4 ranks, without any difference."""
    given = (*LORA, f"precision.dtype={dtype}", "run.steps=4", "schedule={name: constant}")
    given += ("optimizer.lr=1e-2",)
    workspace = wide[0].parent
    for ranks in (1, 2, 3, 4):
        curves = []
        for folder, base in zip(wide, ("nf4", dtype), strict=True):
            run = f"in-{dtype}-{base}-{ranks}"
            model = (f"model.init_from={folder.name}", f"model.adapter.base={base}")
            code, output = start(ranks, f"run.dir={run}", *given, *model).wait()
            assert code == 0, output
            curves.append(losses(workspace, run))
        assert curves[0] == curves[1], ranks
        assert curves[0][4] < curves[0][1]


def test_over_nf4_worlds_agree_and_what_is_merged_is_what_was_trained(
    workspace, wide, start, monkeypatch, capsys
):
    given = (*OVER_NF4, "run.determinism=exact", "run.steps=6", "schedule={name: constant}")
    given += ("optimizer.lr=1e-2", "optimizer.weight_decay=0")
    jobs = [start(ranks, f"run.dir=nf4-{ranks}", *given) for ranks in (1, 2)]
    outputs = [job.wait() for job in jobs]
    assert all(code == 0 for code, _ in outputs), outputs
    assert "over nf4): " in outputs[0][1]
    frozen = sum(tensor.numel() for tensor in plain(wide[0]).state_dict().values())
    assert f"parameters trained, {frozen:,} frozen" in outputs[0][1]
    assert losses(workspace, "nf4-1") == losses(workspace, "nf4-2")
    steps = [workspace / f"nf4-{ranks}" / "checkpoints" / "step-00000006" for ranks in (1, 2)]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (steps[0] / name).read_bytes() == (steps[1] / name).read_bytes()
    assert json.loads((steps[0] / "trainer_state.json").read_text())["base"]["format"] == "nf4"
    code, output = start(1, "run.dir=nf4-1", *given, "model.adapter.base=fp32").wait()
    assert code
    assert "adapter.base (nf4 there, fp32 here)" in output

    monkeypatch.chdir(workspace)
    ids, _ = batch()
    with torch.no_grad():
        before = plain(wide[1])(ids).logits
        trained, off = (
            peft.PeftModel.from_pretrained(plain(folder), steps[0])(ids).logits
            for folder in wide[::-1]
        )
        assert (trained - before).abs().max() > 0.1, "the adapter has learned something"
        perdure("ckpt", "export", "nf4-1", "nf4-merged", "--merge")
        assert "weights that the adapter was trained over" in capsys.readouterr().out
        merged = plain("nf4-merged")(ids).logits
        assert (merged - trained).abs().max() <= 1e-5
        perdure("ckpt", "export", "nf4-1", "nf4-published", "--merge", "--into-published")
        assert "over these weights rounded to nf4" in capsys.readouterr().out
        published = plain("nf4-published")(ids).logits
        assert (published - off).abs().max() <= 1e-5 < 1e-2 < (published - trained).abs().max()
        perdure("ckpt", "export", "nf4-1", "nf4-adapter")
        assert "was trained over a model in nf4" in capsys.readouterr().out
        perdure("ckpt", "export", "nf4-adapter", "nf4-twice")
        assert "was trained over a model in nf4" in capsys.readouterr().out
        perdure("ckpt", "export", "nf4-twice", "nf4-late", "--merge")
        assert plain("nf4-late")(ids).logits.equal(merged)
        assert not Path("nf4-late/adapter_base.json").exists()
        with pytest.raises(CheckpointError, match="was trained over other weights than those in"):
            perdure("ckpt", "export", "nf4-twice", "none", "--merge", "--base", str(wide[1]))
    with pytest.raises(CheckpointError, match="--into-published: only together with --merge"):
        perdure("ckpt", "export", "nf4-1", "none", "--into-published")
    places = steps[0], "nf4-merged", "nf4-adapter"
    texts = {"".join(generate(where, "the ", temperature=0)) for where in places}
    assert len(texts) == 1
