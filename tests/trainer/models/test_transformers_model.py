"""Models that transformers computes: loss and gradients are those of its own passes over each
document by itself, and what cannot be trained so is refused in a line."""

import json
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from checkpointing.format.nf4 import dequantise, quantise
from tests.distributed.jobs import soak
from tests.their_models import CONFIGS, QUICK, VOCABULARY, publish, separate, separate_loss
from trainer.models import Decoder, ModelConfigError
from trainer.models import transformers_model as ours
from trainer.models.adapter import add_adapters
from trainer.models.loss import preference_loss
from trainer.models.transformers_model import TransformersModel, document_runs
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.sections import AdapterSection, ObjectiveSection
from trainer.tasks.model_blocks import repeated_blocks
from trainer.tasks.text_model import build_text_model
from trainer.tools.generate import empty_model, load_weights

pytestmark = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < ours.OLDEST,
    reason="of transformers that is too old",
)
RECIPE = """\
run: {dir: runs/x, steps: 10}
model: {init_from: base}
data: {sources: [{path: data/x}], seq_len: 16}
batch: {global_batch: 4}
optimizer: {lr: 1e-3}
"""
BOUND = 2e-5
"""Of float32 rounding through two layers, of numbers about one: measured 4e-6."""


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and documents (3, 40); some of one token, and longer ones than windows."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 41), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, ::7] = -100
    starts = torch.zeros(3, 40, dtype=torch.int64)
    for row, places in enumerate(((1, 2, 20), (), (11, 30, 39))):
        starts[row, list(places)] = 1
    return ids[:, :-1], labels, starts.cumsum(1) % 2  # a number may come again


def opened(folder: Path) -> TransformersModel:
    model = empty_model(folder)
    if isinstance(model, Decoder):  # a family of Perdure's computes it, too
        model = ours.build_theirs(folder, "model.implementation=transformers", repeated_blocks)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_weights(model, folder, torch.device("cpu"))
    return model


def model_head(model: TransformersModel) -> str:
    return "embed_out" if model.config.model_type == "gpt_neox" else "lm_head"


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=soak) for name in CONFIGS]
)
def test_documents_apart_give_loss_and_gradients_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    reference = publish(model_type, tmp_path)
    model, (ids, labels, documents) = opened(tmp_path), batch()
    with torch.no_grad():
        expected = reference(ids).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(model(ids), expected, atol=BOUND, rtol=0, check_stride=False)
        apart = model(ids, document_ids=documents)
        assert (apart - expected).abs().max() > 100 * BOUND, "documents matter"
        alone = separate(reference, ids, documents)
        torch.testing.assert_close(apart, alone, atol=BOUND, rtol=0, check_stride=False)
        torch.testing.assert_close(
            model.head(model.hidden(ids)[0, -1]), expected[0, -1], atol=BOUND, rtol=0
        )

    loss = model.train()(ids, labels, documents)
    loss.backward()
    theirs = separate_loss(reference, ids, labels, documents)
    theirs.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    gradients = [parameter.grad for parameter in reference.parameters()]
    # Those of biases of keys are but rounding: they change no attention.
    floor = 1e-3 * torch.stack([one.norm() for one in gradients if one is not None]).max()
    names = {name.replace("lm_head", model_head(model)) for name, _ in reference.named_parameters()}
    assert {name for name, _ in model.named_parameters()} == names
    for (name, parameter), expected in zip(model.named_parameters(), gradients, strict=True):
        assert (parameter.grad - expected).norm() < BOUND * max(expected.norm(), floor), name
    assert {*load_file(tmp_path / "model.safetensors")} == names - {*model.tied_copies}
    assert not model.draws


def test_runs_and_positions_of_documents() -> None:
    runs, positions = document_runs(torch.tensor([[5, 5, 2, 5, 5, 5], [1, 1, 1, 1, 1, 1]]))
    assert runs.tolist() == [[1, 1, 2, 3, 3, 3], [1] * 6]
    assert positions.tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]


def built(folder: Path, *overrides: str) -> tuple[TransformersModel, list[str]]:
    (folder / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(str(folder / "recipe.yaml"), [f"model.init_from={folder}", *overrides])
    model, _, notes = build_text_model(recipe)
    assert isinstance(model, TransformersModel)
    return model, notes


def described(folder: Path, model_type: str, **keys: Any) -> Path:
    """A directory with a config.json, which is all that is needed to build a model."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 96, **CONFIGS.get(model_type, {})}
    config = {**AutoConfig.for_model(model_type, **sizes).to_dict(), **keys}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_a_family_of_ours_does_not_compute_is_for_transformers(tmp_path: Path) -> None:
    described(tmp_path, "llama", attention_bias=True, attention_dropout=0.1)
    model, notes = built(tmp_path)
    told = (
        r"LlamaForCausalLM of transformers 5\S+ computes it: Perdure does not support attention_\S+"
    )
    assert re.fullmatch(told, notes[0])
    assert model.draws
    for implementation, message in (("perdure", "attention_"), ("transformers", None)):
        if message:
            with pytest.raises(ModelConfigError, match=message):
                built(tmp_path, f"model.implementation={implementation}")
        else:
            assert built(tmp_path, f"model.implementation={implementation}")[0].draws


def test_no_code_comes_with_a_checkpoint(tmp_path: Path) -> None:
    """Not even by the names of kernels that transformers would fetch."""
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    keys = {"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    kernels = dict.fromkeys(("attn_implementation", "_attn_implementation"), "someone/kernel")
    model, _ = built(described(tmp_path, "gpt2", **keys, **kernels))
    assert model.config._attn_implementation == "sdpa"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "own"}))
    with pytest.raises(
        ModelConfigError, match="knows no model_type 'own', and code in a checkpoint"
    ):
        built(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "keys", "overrides", "message"),
    [
        ("bart", {}, [], "BartForCausalLM of transformers has an encoder and a decoder"),
        ("bert", {}, [], "BertLMHeadModel of transformers is not causal"),
        ("vit", {}, [], "vit of transformers is no causal language model"),
        (
            "gemma3",
            {},
            [],
            "Gemma3ForConditionalGeneration of transformers takes other inputs than text",
        ),
        ("opt", {"layerdrop": 0.1}, [], "layerdrop=0.1 would drop different layers on each rank"),
        (
            "gpt_oss",
            {"output_router_logits": True},
            ["model.implementation=transformers"],
            "output_router_logits=true adds",
        ),
        ("gpt2", {"n_embd": "wide"}, [], "config.json: transformers 5"),
        ("mamba", {}, [], "data.document_mask: MambaForCausalLM of transformers has layers that"),
        ("gpt2", {}, ["strategy.tp=2"], "strategy.tp: ranks do not compute GPT2LMHeadModel"),
        ("gpt2", {}, ["strategy.pp=2"], "strategy.pp: ranks do not compute GPT2LMHeadModel"),
        ("gpt2", {}, ["strategy.cp=2"], "strategy.cp: ranks do not compute GPT2LMHeadModel"),
        ("gpt2", {}, ["strategy.ep=2"], "strategy.ep: ranks do not compute GPT2LMHeadModel"),
        ("gpt2", {}, ["model.attention=sdpa"], "model.attention: GPT2LMHeadModel"),
        (
            "gpt2",
            {},
            ["strategy.activation_checkpointing=selective"],
            "strategy.activation_checkpointing: selective keeps results that GPT2LMHeadModel",
        ),
        ("gpt2", {}, ["model.adapter={}"], "layers of GPT2LMHeadModel have no nn.Linear"),
        ("gpt2", {"quantization_config": {"bits": 4}}, [], "not quantised"),
    ],
)
def test_what_is_refused_is_one_line(
    tmp_path: Path, model_type: str, keys: dict, overrides: list[str], message: str
) -> None:
    described(tmp_path, model_type, **keys)
    with pytest.raises((RecipeError, ModelConfigError)) as refusal:
        built(tmp_path, *overrides)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_weights_that_transformers_makes_of_others_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    with pytest.raises(ModelConfigError, match=r"lack model.layers.0.mlp.\S+, which transformers"):
        built(tmp_path)


def test_without_transformers_a_line_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(tmp_path, "gpt2")

    def gone(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ours, "version", gone)
    with pytest.raises(RecipeError, match=r"has no family 'gpt2'; .* pip install 'perdure\["):
        built(tmp_path)
    monkeypatch.setattr(ours, "version", lambda name: "4.57.6")
    with pytest.raises(RecipeError, match=r"transformers 5\.24 would compute the model, but 4"):
        built(tmp_path)


def test_names_as_published_without_the_first_part(tmp_path: Path) -> None:
    """As GPT-2 lies on the Hub: saved from the part below the head, with masks beside weights."""
    reference = publish("gpt2", tmp_path / "whole")
    bare, ids = tmp_path / "bare", batch()[0]
    reference.transformer.save_pretrained(bare)
    shutil.copy(tmp_path / "whole/config.json", bare)
    tensors = load_file(bare / "model.safetensors")
    assert not any(name.startswith("transformer.") for name in tensors)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, bare / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(ids).logits
        torch.testing.assert_close(opened(bare)(ids), expected, atol=BOUND, rtol=0)


def test_adapters_of_its_linear_layers(tmp_path: Path) -> None:
    publish("phi", tmp_path)
    model = opened(tmp_path)
    add_adapters(model, AdapterSection(rank=2, targets=("q_proj", "fc1"), base="fp32"), "fp32")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ends = [f"{layer}.lora_{part}" for layer in ("self_attn.q_proj", "mlp.fc1") for part in "AB"]
    assert {*trained} == {f"model.layers.{layer}.{end}" for layer in (0, 1) for end in ends}
    with pytest.raises(RecipeError, match="lm_head shares its weight with"):
        add_adapters(tied(tmp_path / "tied"), AdapterSection(also=("lm_head",)))


def tied(folder: Path) -> TransformersModel:
    folder.mkdir()
    model = empty_model(described(folder, "starcoder2", tie_word_embeddings=True))
    assert isinstance(model, TransformersModel)
    return model


def test_what_is_under_its_adapters_may_be_in_nf4(tmp_path: Path) -> None:
    """Its bytes take 4.5 bits a weight, and compute what the weights compute that they are."""
    publish("phi", tmp_path)
    targets = ("q_proj", "fc1")  # whose rows are of whole blocks
    model = empty_model(tmp_path)
    add_adapters(model, AdapterSection(rank=2, targets=targets, base="nf4"), "fp32")
    plain, (ids, labels, documents) = opened(tmp_path), batch()
    packed = {n for n, p in model.named_parameters() if p.dtype == torch.uint8}
    ends = tuple(f"{name}.weight" for name in targets)
    assert packed == {name for name, _ in plain.named_parameters() if name.endswith(ends)}
    buffers = dict(model.named_buffers())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for name, weight in plain.named_parameters():
            kept = model.get_parameter(name)
            kept.copy_(quantise(weight) if name in packed else weight)
            kept = dequantise(quantise(weight), torch.float32) if name in packed else weight
            weight.copy_(kept)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.zeros_like(parameter) if name.endswith("B") else 1)
    losses = [one(ids, labels, documents) for one in (model, plain)]
    assert losses[0].item() == losses[1].item()
    losses[0].backward()
    trained = {name for name, one in model.named_parameters() if one.grad is not None}
    assert trained == {n for n, p in model.named_parameters() if p.requires_grad} != set()


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_preferences_between_answers(tmp_path: Path, name: str) -> None:
    """Loss and gradients are those of transformers' passes over each answer by itself."""
    reference = publish("gemma2", tmp_path)
    model, (ids, labels, _) = opened(tmp_path).train(), batch()
    documents = (torch.arange(40) >= 17).long().expand(3, 40)  # two answers a row
    answers = documents + 2 * torch.arange(3)[:, None]
    model.preference = ObjectiveSection(name=name)
    counts = torch.zeros(6, dtype=torch.int64).index_add(
        0, answers.flatten(), (labels.flatten() != -100).long()
    )
    given = {"document_ids": documents, "segments": answers, "answer_labels": counts}
    logits = separate(reference, ids, documents).log_softmax(-1)
    each = logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * (labels != -100)
    sums = torch.zeros(6).index_add(0, answers.flatten(), each.flatten())
    before = None
    if name == "dpo":
        before = model(ids, labels, **given)
        assert isinstance(before, Tensor)
        torch.testing.assert_close(before.float(), sums, rtol=1e-5, atol=1e-4)
        before = before.detach() + torch.linspace(-1, 1, 6)
    found = model(ids, labels, **given, reference=before)
    assert isinstance(found, dict)
    means = preference_loss(model.preference, sums, torch.arange(len(sums)), counts, before)
    assert isinstance(means, dict)
    right = means["loss"]
    assert found["loss"].item() == pytest.approx(right.item(), rel=1e-5)
    found["loss"].backward()
    right.backward()
    expected = dict(reference.named_parameters())
    floor = 1e-3 * torch.stack([one.grad.norm() for one in expected.values()]).max()
    for key, parameter in model.named_parameters():
        gradient = expected[key].grad
        assert (parameter.grad - gradient).norm() < BOUND * max(gradient.norm(), floor), key
