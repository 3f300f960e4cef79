"""What of a model gets an adapter, and what is refused."""

import json
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from checkpointing.errors import StorageError
from checkpointing.format.nf4 import dequantise, quantise, weights_in
from checkpointing.format.peft import read_config
from trainer.models import Decoder
from trainer.models.adapter import LoraLinear, add_adapters, draw
from trainer.models.families.qwen3_moe import FAMILY as MOE
from trainer.models.family import family_of
from trainer.parallel.tensor import kinds_of
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.architecture import Architecture
from trainer.recipe.sections import AdapterSection

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
RECIPE = """\
run: {dir: runs/x, steps: 10}
model: {init_from: base, adapter: {}}
data: {sources: [{path: data/x}], seq_len: 16}
batch: {global_batch: 4}
optimizer: {lr: 1e-3}
"""


def decoder(model_type: str = "qwen3", **changes: Any) -> Decoder:
    family = family_of(model_type)
    options = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    if family is MOE:
        changes["options"] = options
    architecture = family.complete(Architecture(model_type=model_type, **{**SIZES, **changes}))
    with torch.device("meta"):
        return Decoder(architecture)


def adapted(model: Decoder) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]


def test_linear_layers_of_blocks_get_adapters_and_the_rest_is_frozen() -> None:
    model = decoder()
    names = [name for name, _ in model.named_parameters()]
    add_adapters(model, AdapterSection(rank=4))
    assert len(adapted(model)) == 7 * 2
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}
    assert [name for name, _ in model.named_parameters() if name not in trained] == names
    assert all(p.dtype == torch.bfloat16 for p in model.parameters() if not p.requires_grad)
    model = decoder()
    add_adapters(
        model,
        AdapterSection(targets=("q_proj", "layers.1.mlp.up_proj"), also=("lm_head", "model.norm")),
    )
    assert adapted(model) == [
        *(f"model.layers.{n}.self_attn.q_proj" for n in (0,)),
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    whole = {name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name}
    assert whole == {"lm_head.weight", "model.norm.weight"}
    assert model.get_parameter("lm_head.weight").dtype == torch.float32
    model = decoder("qwen3_moe")
    add_adapters(model, AdapterSection(targets=("q_proj",)))
    assert len(adapted(model)) == 2


def test_a_fresh_adapter_changes_nothing_and_one_of_rslora_more() -> None:
    given = nn.Linear(8, 6)
    layers = [LoraLinear(given, AdapterSection(rank=4, alpha=8, rslora=r)) for r in (False, True)]
    x = torch.randn(3, 8)
    with torch.no_grad():
        for layer in layers:
            layer.lora_A.copy_(draw("a.lora_A", (4, 8), 0))
            layer.lora_B.copy_(draw("a.lora_B", (6, 4), 0))
        assert layers[0](x).equal(given(x))
        assert 0.2 < layers[0].lora_A.abs().max() <= 8**-0.5
        assert not draw("b.lora_A", (4, 8), 0).equal(layers[0].lora_A)
        for layer in layers:
            layer.lora_B.fill_(1.0)
        plain, more = (layer(x) - given(x) for layer in layers)
        torch.testing.assert_close(more, plain * 2.0)  # 8 / √4 to 8 / 4


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, {"targets": ("qproj",)}, "no linear layer of a block is called qproj; name .* q_proj"),
        ({}, {"targets": ("lm_head",)}, "no linear layer .* lm_head; .*model.adapter.also"),
        ({}, {"also": ("lmhead",)}, "no module with parameters is called lmhead; name one of"),
        ({}, {"also": ("mlp",)}, "also: mlp contains .*gate_proj, which gets an adapter"),
        ({"tie_word_embeddings": True}, {"also": ("embed_tokens",)}, "embed_tokens shares its"),
        ({"tie_word_embeddings": True}, {"also": ("lm_head",)}, "lm_head shares its weight"),
        ({"model_type": "qwen3_moe"}, {}, "all-linear would leave out the experts"),
        ({"model_type": "qwen3_moe"}, {"targets": ("gate",)}, "no linear layer .* called gate"),
        (
            {"model_type": "qwen3_moe"},
            {"targets": ("q_proj",), "also": ("experts",)},
            "also: experts has experts",
        ),
    ],
)
def test_names_of_nothing_ties_and_experts_are_refused(
    model: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        add_adapters(decoder(**model), AdapterSection(**options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.init_from=null", "model.adapter: is trained over published weights"),
        ("precision.dtype=fp32", "model.adapter.base: bf16 would round .*base=fp32"),
        ("precision.matmul=fp8_rowwise", "precision.matmul: does not work with model.adapter"),
        ("precision.master=bf16_stochastic", "precision.master: an adapter is trained in float32"),
        ("model.adapter.targets=[]", "model.adapter.targets: the list is empty"),
        ("model.adapter.base=int4", "model.adapter.base: input should be 'bf16', 'fp32' or 'nf4'"),
        ("model.base=nf4", "model.base: unknown key"),
        (
            "model={init_from: null, adapter: {base: nf4}}",
            "model.adapter: is trained over published weights",
        ),
        (
            "precision.matmul=fp8_rowwise model.adapter.base=nf4",
            "precision.matmul: does not work with model.adapter",
        ),
        ("model.adapter.ranks=4", "did you mean 'rank'"),
        ("model.adapter.dora=true", "model.adapter.dora: DoRA is not supported"),
        ("model.adapter.rank=0", "model.adapter.rank: must be at least 1"),
        ("model.adapter={dropout: 0.1}", ""),
    ],
)
def test_what_a_recipe_cannot_mean_is_refused(tmp_path: Any, override: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    if not message:  # where it goes with the rest
        assert load_recipe(path, [override]).model.adapter == AdapterSection(dropout=0.1)
        assert load_recipe(path, [override]).draws
        assert not load_recipe(path).draws
        override, message = "strategy.tp=2", "model.adapter.dropout: draws other numbers"
        with pytest.raises(RecipeError, match=message):
            load_recipe(path, ["model.adapter={dropout: 0.1}", override])
        return
    with pytest.raises(RecipeError, match=message):
        load_recipe(path, re.split(r" (?=\w+\.)", override))


def test_an_adapter_of_another_kind_is_refused() -> None:
    config = {"r": 4, "lora_alpha": 8}
    for change in ({"use_dora": True}, {"rank_pattern": {"q_proj": 8}}, {"peft_type": "IA3"}):
        with pytest.raises(StorageError, match=f"{next(iter(change))}=.* is not supported, only"):
            read_config(json.dumps({**config, **change}).encode(), "adapter_config.json")
    plain = {**config, "use_dora": False, "rank_pattern": {}, "peft_type": "LORA"}
    assert read_config(json.dumps(plain).encode(), "adapter_config.json")[1] == 2


def test_in_nf4_a_weight_is_bytes_and_its_product_that_of_the_weight_that_they_are() -> None:
    model = decoder(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    counts = {name: p.numel() for name, p in model.named_parameters()}
    add_adapters(
        model, AdapterSection(base="nf4", targets=("q_proj", "k_proj", "down_proj")), "fp32"
    )
    kept = {name: p for name, p in model.named_parameters() if "lora_" not in name}
    assert {name: weights_in(p) for name, p in kept.items()} == counts
    bytes_ = {name for name, p in kept.items() if p.dtype == torch.uint8}
    assert bytes_ == {f"{name}.weight" for name in adapted(model)}
    assert {p.nbytes / counts[name] for name, p in kept.items() if name in bytes_} == {0.5625}
    # What nf4 does not keep has the format that is computed with.
    assert {p.dtype for name, p in kept.items() if name not in bytes_} == {torch.float32}
    other = decoder(hidden_size=64, num_attention_heads=4)
    add_adapters(other, AdapterSection(base="nf4"))
    assert other.get_parameter("lm_head.weight").dtype == torch.bfloat16

    given, bias = nn.Linear(128, 6), torch.randn(6)
    layer = LoraLinear(given, AdapterSection(rank=4, base="nf4"))
    layer.bias = nn.Parameter(bias, requires_grad=False)
    layer.weight.data.copy_(quantise(given.weight))
    weight = dequantise(layer.weight, torch.float32)
    assert 0 < (weight - given.weight).abs().max() < 0.16 * given.weight.abs().max()
    saved: list[torch.Tensor] = []
    for dtype, autocast in ((torch.float32, False), (torch.bfloat16, False), (None, True)):
        x = torch.randn(2, 3, 128, dtype=dtype, requires_grad=True)
        y = torch.randn(2, 3, 6, dtype=dtype or torch.bfloat16)
        found = []
        for compute in (
            layer.frozen,
            lambda x, bias, dtype=dtype: F.linear(x, weight.to(dtype or x.dtype), bias),
        ):
            with (
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
                saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
            ):
                out = compute(x, bias.to(dtype) if dtype else bias)
            found.append((out, *torch.autograd.grad(out, x, y)))
            if compute == layer.frozen:
                assert [one.dtype for one in saved] == [torch.uint8]
            saved.clear()
        assert all(ours.equal(plain) for ours, plain in zip(*found, strict=True))
        assert found[0][0].dtype == y.dtype


def test_blocks_of_nf4_are_not_cut() -> None:
    with pytest.raises(RecipeError, match=r"a multiple of 64 columns, but .*q_proj has 32;"):
        add_adapters(decoder(), AdapterSection(base="nf4"))
    model = decoder(hidden_size=64, num_attention_heads=4, head_dim=32, num_key_value_heads=2)
    add_adapters(model, AdapterSection(base="nf4", targets=("q_proj", "o_proj")))
    assert kinds_of(model, 2)["model.layers.0.self_attn.o_proj"] == "row"  # 128 columns
    model = decoder(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    add_adapters(model, AdapterSection(base="nf4"))
    with pytest.raises(RecipeError, match=r"its 64 columns are no multiple of 64 · tp=128"):
        kinds_of(model, 2)
