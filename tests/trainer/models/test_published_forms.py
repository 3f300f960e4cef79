"""Hugging Face directories as people have them. Each form is opened with the logits of
transformers, bit by bit, also after it was saved; or it is refused in a line that says what to do.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.utils import logging

from checkpointing import CheckpointError
from trainer.models import Decoder, ModelConfigError, read_config
from trainer.models.hf import files_without_tokenizer
from trainer.models.parameter_names import apart
from trainer.tools.generate import empty_model, load_weights

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # a wrong angle or weight shows
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "llama3": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "qwen2": Qwen2Config(**SIZES),
    "windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=16),
    "olmo2": Olmo2Config(**SIZES),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=16,
        sliding_window_pattern=2,
        query_pre_attn_scalar=16,
    ),
    "gpt_oss": GptOssConfig(
        **{**SIZES, "initializer_range": 0.2},
        head_dim=16,
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0], pad_token_id=0),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "longrope": Phi3Config(
        **SIZES,
        pad_token_id=0,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.5],
            "long_factor": [1.0, 3.0],
        },
    ),
}
Tensors = dict[str, Tensor]
Form = Callable[[Path], object]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories as transformers saves them."""
    folder = tmp_path_factory.mktemp("published")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for number, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases, or one that is left out would not show
                    parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
        model.save_pretrained(folder / name)
    return {name: folder / name for name in MODELS}


# --- changes ---------------------------------------------------------------------------------


def config(*removed: str, **changes: object) -> Form:
    def change(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        kept = {key: value for key, value in found.items() if key not in removed}
        (folder / "config.json").write_text(json.dumps(kept | changes))

    return change


def tensors(change: Callable[[Tensors], Tensors]) -> Form:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        made = {name: one.contiguous() for name, one in change(found).items()}
        save_file(made, folder / "model.safetensors", {"format": "pt"})

    return rewrite


def names(change: Callable[[str], str]) -> Form:
    return tensors(lambda found: {change(name): one for name, one in found.items()})


def added(**more: Tensor) -> Form:
    return tensors(lambda found: found | more)


def to(dtype: torch.dtype, *, but: str = " ") -> Form:
    return tensors(
        lambda found: {name: one if but in name else one.to(dtype) for name, one in found.items()}
    )


def all_of(*forms: Form) -> Form:
    return lambda folder: [form(folder) for form in forms]


def file(name: str, content: str = "{}") -> Form:
    return lambda folder: (folder / name).write_text(content)


def renamed(name: str) -> Form:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def sharded(folder: Path, *, left_out: str = "", twice: str = "", extra: str = "") -> None:
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = sorted(found)[::2], sorted(found)[1::2]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        part = {name: found[name] for name in {*half, *filter(None, [twice])}}
        save_file(part, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(half, shard)
    weight_map.pop(left_out, None)
    weight_map |= dict.fromkeys(filter(None, [extra]), shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def old_index(folder: Path) -> None:
    """An earlier save was sharded, and a later one was not."""
    now = (folder / "model.safetensors").read_bytes()
    tensors(lambda found: {name: one + 1 for name, one in found.items()})(folder)
    sharded(folder)
    (folder / "model.safetensors").write_bytes(now)


def hub_cache(folder: Path) -> None:
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(os.path.relpath(blobs / path.name, folder))


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def without_metadata(folder: Path) -> None:
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


def only_head(found: Tensors) -> Tensors:
    return {HEAD if name == EMBEDDING else name: one for name, one in found.items()}


def in_blocks(word: str) -> Form:
    """As of a model whose blocks are wrapped one by one."""
    return names(lambda name: name.replace("layers.0.", f"layers.0.{word}."))


FREQUENCIES = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in (0, 1)}
CACHES = {
    f"model.layers.0.self_attn.rotary_emb.{kind}_cached": torch.ones(8, 8)
    for kind in ("cos", "sin")
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8, "truncate": False}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

OPENED: dict[str, tuple[str, Form]] = {
    **{f"as saved: {name}": (name, lambda folder: None) for name in MODELS},
    "sharded": ("qwen3", sharded),
    "an index that leaves a tensor out": (
        "llama",
        lambda f: sharded(f, left_out="model.norm.weight"),
    ),
    "an old index": ("llama", old_index),
    "links, as the Hub's cache has": ("llama", hub_cache),
    "no metadata": ("llama", without_metadata),
    "a pickle beside it": ("llama", file("pytorch_model.bin")),
    "code of its own": (
        "llama",
        all_of(config(auto_map={"AutoModelForCausalLM": "own.Own"}), file("own.py", "1 / 0")),
    ),
    "frequencies of Llama 2": ("llama", added(**FREQUENCIES)),
    "frequencies of the model": ("llama", added(**{"model.rotary_emb.inv_freq": torch.ones(4)})),
    "cosines of older code": ("llama", added(**CACHES)),
    "positions": ("llama", added(**{"model.position_ids": torch.arange(9)})),
    "the head twice": ("tied", tensors(lambda t: t | {HEAD: t[EMBEDDING].clone()})),
    "the head twice, in two formats": (
        "tied",
        all_of(to(torch.bfloat16), tensors(lambda t: t | {HEAD: t[EMBEDDING].float()})),
    ),
    "the head alone": ("tied", tensors(only_head)),
    "the head alone, sharded": ("tied", all_of(tensors(only_head), sharded)),
    "a tied base model": ("tied", names(lambda name: name.removeprefix("model."))),
    "no prefix": ("llama", names(lambda name: name.removeprefix("model."))),
    "no prefix, with experts": ("moe", names(lambda name: name.removeprefix("model."))),
    "the prefix twice": ("llama", names(lambda name: f"model.{name}")),
    "bf16": ("llama", all_of(to(torch.bfloat16), config("dtype", torch_dtype="bfloat16"))),
    "fp16": ("tied", to(torch.float16)),
    "float64": ("llama", to(torch.float64)),
    "norms in float32": ("tied", to(torch.bfloat16, but="norm")),
    "dtype auto": ("llama", config("dtype", torch_dtype=None)),
    "rope_theta alone": ("llama", config("rope_parameters", rope_theta=5e4)),
    "rope_theta in both": ("llama", config(rope_theta=5e4)),
    "no rope keys": ("llama", config("rope_parameters")),
    "rope_scaling null": ("llama", config("rope_parameters", rope_scaling=None, rope_theta=2e4)),
    "rope type default": ("llama", config("rope_parameters", rope_scaling={"type": "default"})),
    "llama3 in rope_scaling": (
        "llama",
        config("rope_parameters", rope_scaling=LLAMA3_ROPE, rope_theta=5e5),
    ),
    "llama3 in both, different": ("llama3", config(rope_scaling=LLAMA3_ROPE)),
    "no head_dim": ("llama", config("head_dim")),
    "heads of another width": ("qwen3", config(sliding_window=16)),
    "no rms_norm_eps": ("llama", config("rms_norm_eps")),
    "no tie_word_embeddings": ("llama", config("tie_word_embeddings")),
    "pretraining_tp": ("llama", config(pretraining_tp=2)),
    "a window that is not used": ("qwen3", config(use_sliding_window=False, max_window_layers=1)),
    "layer types": ("qwen3", config(layer_types=["full_attention"] * 2)),
    "sliding layers": ("windows", config(layer_types=["sliding_attention", "full_attention"])),
    "Gemma as published": (
        "gemma3",
        config(
            *("rope_parameters", "layer_types", "_sliding_window_pattern"),
            rope_theta=1e6,
            rope_local_base_freq=2e4,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            sliding_window_pattern=2,
        ),
    ),
    "GPT-OSS as published": (
        "gpt_oss",
        config(
            *("rope_parameters", "swiglu_alpha", "num_experts_per_tok", "dtype"),
            rope_theta=1.5e5,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            initial_context_length=4096,
            experts_per_token=4,
            router_aux_loss_coef=0.9,
        ),
    ),
    "rotary parameters by default": ("gpt_oss", config("rope_parameters")),
    "limits of gates": ("gpt_oss", config(swiglu_limit=0.5, swiglu_alpha=1.2)),
    "another scale of scores": ("gemma3", config(query_pre_attn_scalar=12)),
    "no window": ("mistral", config(sliding_window=None)),
    "a window that is absent": ("mistral", config("sliding_window")),
    "each fourth layer": ("smollm3", config("no_rope_layers", no_rope_layer_interval=2)),
    **{
        f"{kind} in {key}": (
            "llama",
            config("rope_parameters", **{key: {word: kind, "factor": 4.0, "rope_theta": 1e4}}),
        )
        for kind in ("yarn", "linear", "dynamic")
        for key, word in (("rope_scaling", "type"), ("rope_parameters", "rope_type"))
    },
    "yarn of a length": ("qwen2", config(rope_parameters={"rope_type": "yarn", **YARN})),
    "yarn with all keys": (
        "qwen3",
        config(rope_parameters={"rope_type": "yarn", **YARN, **MSCALES}),
    ),
    "yarn with a factor": (
        "mistral",
        config(rope_parameters={"rope_type": "yarn", **YARN, "attention_factor": 0.5}),
    ),
    "longrope, as su": (
        "longrope",
        config(
            "rope_parameters",
            rope_scaling={
                "type": "su",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 2.0],
                "long_factor": [2.0, 3.0],
            },
        ),
    ),
    "longrope of short sequences": ("longrope", config(original_max_position_embeddings=128)),
    "keys of nobody": ("llama", config(unsloth_version="1", _name_or_path="x", bos_token_id=9)),
}
"""What transformers opens: (model, what is done to its directory)."""

WRAPPED: dict[str, tuple[str, Form]] = {
    "compiled": ("llama", names(lambda name: f"_orig_mod.{name}")),
    "of DDP": ("llama", names(lambda name: f"module.{name}")),
    "of DDP, twice": ("llama", names(lambda name: f"module.module.{name}")),
    "compiled, of DDP": ("tied", names(lambda name: f"module._orig_mod.{name}")),
    "blocks compiled": ("llama", in_blocks("_orig_mod")),
    "blocks of FSDP": ("llama", in_blocks("_fsdp_wrapped_module")),
    "blocks recomputed": ("moe", in_blocks("_checkpoint_wrapped_module")),
    "below, compiled": ("llama", names(lambda name: name.replace("model.", "model._orig_mod."))),
    "compiled, the head alone": (
        "tied",
        all_of(tensors(only_head), names(lambda name: f"_orig_mod.{name}")),
    ),
}
"""What transformers draws anew: opened with the logits of the model that was wrapped."""

THEIRS = "transformers trains"
REFUSED: dict[str, tuple[str, Form, tuple[str, ...]]] = {
    "a head of its own": (
        "tied",
        tensors(lambda t: t | {HEAD: t[EMBEDDING] + 1}),
        (HEAD, EMBEDDING, '"tie_word_embeddings": false'),
    ),
    "a head of another size": (
        "tied",
        added(**{HEAD: torch.ones(70, 32)}),
        (HEAD, '"tie_word_embeddings": false'),
    ),
    "a compiled head of its own": (
        "tied",
        all_of(added(**{HEAD: torch.ones(64, 32)}), names(lambda name: f"_orig_mod.{name}")),
        (HEAD, '"tie_word_embeddings": false'),
    ),
    "a pickle": ("llama", renamed("pytorch_model.bin"), ("pytorch_model.bin", "save_pretrained")),
    "pickles": (
        "llama",
        all_of(renamed("pytorch_model-1.bin"), file("pytorch_model.bin.index.json")),
        ("pytorch_model-1.bin", "save_pretrained"),
    ),
    "an adapter": (
        "llama",
        all_of(renamed("adapter_model.safetensors"), file("adapter_config.json")),
        ("adapter", "merge_and_unload"),
    ),
    "GGUF": ("llama", renamed("model.gguf"), ("model.gguf", "safetensors")),
    "a variant": (
        "llama",
        renamed("model.fp16.safetensors"),
        ("model.fp16.safetensors", "rename that to model.safetensors"),
    ),
    "no weights": ("llama", renamed("../away"), ("holds neither", "give a directory")),
    "Gemma": ("llama", config(model_type="gemma"), ("model_type='gemma'", THEIRS)),
    "a soft cap": (
        "gemma3",
        config(final_logit_softcapping=30.0),
        ("final_logit_softcapping=30.0", THEIRS),
    ),
    "no biases": ("llama", config(model_type="qwen2"), ("q_proj.bias",)),
    "a window of nothing": (
        "mistral",
        config(sliding_window=0),
        ("sliding_window: 0 is no whole number above 0",),
    ),
    "sliding layers without a window": (
        "qwen2",
        config(layer_types=["full_attention", "sliding_attention"]),
        ("layer_types", "write full_attention"),
    ),
    "a layer without a type": (
        "windows",
        config(layer_types=["full_attention"]),
        ("layer_types", "each of 2 layers"),
    ),
    "neither with nor without": (
        "smollm3",
        config(no_rope_layers=[1, 2]),
        ("no_rope_layers", "a 0 or 1 for each of 2"),
    ),
    "factors of another size": (
        "longrope",
        config(
            partial_rotary_factor=0.75,
            rope_parameters={
                "rope_type": "longrope",
                "short_factor": [1.0] * 2,
                "long_factor": [1.0] * 2,
            },
        ),
        ("short_factor has 2 numbers", "give 3, one for each rotated pair"),
    ),
    "attention bias": ("llama", config(attention_bias=True), ("attention_bias=True", THEIRS)),
    "MLP bias": ("llama", config(mlp_bias=True), ("mlp_bias=True", THEIRS)),
    "dropout": ("llama", config(attention_dropout=0.1), ("attention_dropout=0.1", "write 0.0")),
    "another activation": ("llama", config(hidden_act="gelu"), ("hidden_act='gelu'", THEIRS)),
    "a sliding window": (
        "qwen3",
        config(use_sliding_window=True, sliding_window=16, max_window_layers=0),
        ("use_sliding_window=True", "write false if"),
    ),
    "sliding layers": (
        "qwen3",
        config(layer_types=["full_attention", "sliding_attention"]),
        ("layer_types=", "write full_attention if"),
    ),
    **{
        f"{kind} in {key}": (
            "llama",
            config("rope_parameters", **{key: {word: kind, "factor": 4.0, "rope_theta": 1e4}}),
            (f"{key}.rope_type='{kind}'", "remove it", THEIRS),
        )
        for kind in ("proportional", "mrope")
        for key, word in (("rope_scaling", "type"), ("rope_parameters", "rope_type"))
    },
    "half a rotation": (
        "llama",
        config(partial_rotary_factor=0.5),
        ("partial_rotary_factor=0.5", THEIRS),
    ),
    "quantised": (
        "llama",
        config(quantization_config={"bits": 4}),
        ("quantization_config", "not quantised"),
    ),
    "MXFP4, as GPT-OSS is published": (
        "gpt_oss",
        config(quantization_config={"quant_method": "mxfp4"}),
        ("quantization_config", "not quantised"),
    ),
    "quantised, without a word": (
        "llama",
        added(**{"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}),
        ("weight_scale_inv", "are quantised"),
    ),
    "whole numbers": ("llama", to(torch.int8), ("I8", "config.json")),
    "weights under another name": (
        "llama",
        config(transformers_weights="other.safetensors"),
        ("transformers_weights='other.safetensors'", "model.safetensors"),
    ),
    "biases": (
        "llama",
        added(**{"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        ("q_proj.bias", "biases", "model.factory"),
    ),
    "fewer layers": ("llama", config(num_hidden_layers=3), ("layers.2", "config.json")),
    "more layers": ("llama", config(num_hidden_layers=1), ("layers.1", "config.json")),
    "another vocabulary": ("llama", config(vocab_size=70), ("[70, 32]", "config.json")),
    "no head": (
        "llama",
        tensors(lambda t: {name: one for name, one in t.items() if name != HEAD}),
        (HEAD, "AutoModelForCausalLM"),
    ),
    "a classifier": (
        "llama",
        names(lambda name: name.replace("lm_head", "score")),
        ("score.weight", HEAD, "config.json"),
    ),
    "LoRA": (
        "llama",
        names(lambda name: f"base_model.model.{name}"),
        ("base_model.model.", "merge_and_unload"),
    ),
    "names that meet": (
        "llama",
        tensors(lambda t: t | {"norm.weight": t["model.norm.weight"] + 1}),
        ("model.norm.weight twice", "remove one of the two"),
    ),
    "a tensor in two files": (
        "llama",
        lambda folder: sharded(folder, twice="model.norm.weight"),
        ("model.norm.weight is in model-00001", "remove the files that another save left there"),
    ),
    "a tensor in no file": (
        "llama",
        lambda folder: sharded(folder, extra="model.more.weight"),
        ("lacks model.more.weight", "index.json"),
    ),
    "cut short": ("llama", cut_short, ("model.safetensors",)),
}
"""(model, what is done to its directory, words of the refusal)."""


# --- tests -----------------------------------------------------------------------------------


def made(published: dict[str, Path], folder: Path, model: str, form: Form) -> Path:
    home = folder / "snapshots" / "1"
    home.mkdir(parents=True)
    for path in published[model].iterdir():
        (home / path.name).write_bytes(path.read_bytes())
    form(home)
    return home


@torch.no_grad()
def check_logits(folder: Path, reference: Path, saved: Path) -> None:
    """Opened here, and saved as a run without a step would save it."""
    tokens = torch.randint(0, 64, (2, 100), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    expected = theirs(tokens).logits
    architecture, decoder = read_config(folder), empty_model(folder)
    load_weights(decoder, folder, torch.device("cpu"))
    # Experts are grouped otherwise there, and scores scaled elsewhere: measured 2.4e-6.
    scaled = "query_pre_attn_scalar" in (architecture.options or {})
    tolerance = 1e-5 if decoder.stacks or scaled else 0.0
    torch.testing.assert_close(decoder(tokens), expected, atol=tolerance, rtol=0)
    files, _ = files_without_tokenizer(folder)
    for name, content in files.items():
        (saved / name).write_bytes(content)
    state = apart(dict(decoder.named_parameters()), decoder.stacks_apart)
    save_file({name: one.contiguous() for name, one in state.items()}, saved / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert torch.equal(again(tokens).logits, expected)


@pytest.mark.parametrize("form", OPENED)
def test_what_transformers_opens_is_opened(
    published: dict[str, Path], form: str, tmp_path: Path
) -> None:
    folder = made(published, tmp_path, *OPENED[form])
    (tmp_path / "saved").mkdir()
    check_logits(folder, folder, tmp_path / "saved")


@pytest.mark.parametrize("form", WRAPPED)
def test_names_of_wrappers_are_passed_over(
    published: dict[str, Path], form: str, tmp_path: Path
) -> None:
    model, change = WRAPPED[form]
    folder = made(published, tmp_path, model, change)
    (tmp_path / "saved").mkdir()
    check_logits(folder, published[model], tmp_path / "saved")


def load_as(model_type: str, folder: Path) -> None:
    model = empty_model(folder)
    assert isinstance(model, Decoder)
    assert model.family.model_type == model_type
    load_weights(model, folder, torch.device("cpu"))


@pytest.mark.parametrize("form", REFUSED)
def test_what_is_refused_says_what_to_do(
    published: dict[str, Path], form: str, tmp_path: Path
) -> None:
    model, change, words = REFUSED[form]
    folder = made(published, tmp_path, model, change)
    with pytest.raises((ModelConfigError, CheckpointError)) as refusal:
        load_as(read_config(folder).model_type, folder)
    told = str(refusal.value)
    assert str(folder) in told
    assert "\n" not in told
    for word in words:
        assert word in told
