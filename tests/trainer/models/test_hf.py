"""Our models and transformers' are the same, in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer.models import (
    Decoder,
    ModelConfigError,
    config_json,
    generation_config_json,
    read_config,
    tokenizer_files,
)
from trainer.recipe.architecture import Architecture, RopeScalingSection

# float32 rounding through three layers; measured difference: 0.
TOLERANCE = 1e-5

LLAMA_3_1_8B = {  # as published, in the words of transformers 4
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@torch.no_grad()
def compare(decoder: Decoder, reference: torch.nn.Module) -> None:
    """Same logits and loss; transformers shifts the labels itself, ours come shifted."""
    tokens = torch.randint(0, 131, (2, 101), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    torch.testing.assert_close(
        decoder(inputs), reference(inputs).logits, atol=TOLERANCE, rtol=0, check_stride=False
    )
    expected = reference(tokens, labels=tokens).loss
    torch.testing.assert_close(decoder(inputs, labels), expected, atol=TOLERANCE, rtol=0)


def test_transformers_opens_what_we_write(
    decoder: Decoder, architecture: Architecture, tmp_path: Path
) -> None:
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    write_json(tmp_path / "config.json", config_json(architecture, eos_id=7))
    write_json(tmp_path / "generation_config.json", generation_config_json(eos_id=7))

    reference, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)

    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert reference.dtype == torch.float32
    assert reference.generation_config.eos_token_id == 7
    compare(decoder, reference)


@pytest.mark.parametrize("shard_size", ["20KB", "1GB"])
def test_we_open_what_transformers_writes(
    architecture: Architecture, shard_size: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "config.json", config_json(architecture))
    torch.manual_seed(5)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    reference.save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "20KB")

    decoder = Decoder(read_config(tmp_path / "saved"))

    parameters = dict(decoder.named_parameters())
    for file in files:
        for name, tensor in load_file(file).items():
            parameters.pop(name).detach().copy_(tensor)
    assert not parameters
    compare(decoder, reference)


def test_config_survives_both_spellings(architecture: Architecture, tmp_path: Path) -> None:
    ours = write_json(tmp_path / "config.json", config_json(architecture))
    assert read_config(ours) == read_config(tmp_path) == architecture

    written = config_json(architecture)
    newer = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}
    older = {k: v for k, v in written.items() if k != "rope_parameters"}
    assert read_config(write_json(tmp_path / "newer.json", newer)) == architecture
    assert read_config(write_json(tmp_path / "older.json", older)) == architecture

    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == architecture


def test_published_configs(tmp_path: Path) -> None:
    llama = read_config(write_json(tmp_path / "llama.json", LLAMA_3_1_8B))
    assert llama.head_dim == 128  # absent from the file
    assert llama.rope_scaling == RopeScalingSection(factor=8.0)
    assert llama.rope_theta == 500000.0
    qwen = read_config(write_json(tmp_path / "qwen.json", QWEN3_0_6B))
    assert (qwen.head_dim, qwen.hidden_size, qwen.num_attention_heads) == (128, 1024, 16)
    assert qwen.tie_word_embeddings
    assert qwen.rope_theta == 1e6


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA_3_1_8B, {"model_type": "gemma"}, "model_type='gemma'"),
        (LLAMA_3_1_8B, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA_3_1_8B, {"attention_bias": True}, "attention_bias=True"),
        (LLAMA_3_1_8B, {"mlp_bias": True}, "mlp_bias=True"),
        (LLAMA_3_1_8B, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (LLAMA_3_1_8B, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_type='mrope'"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, "rope_type=['yarn']"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        (LLAMA_3_1_8B, {"rope_scaling": {"type": "longrope"}}, "short_factor is missing"),
        (QWEN3_0_6B, {"rope_parameters": {"full": {"rope_type": "yarn"}}}, "rope_parameters"),
        (LLAMA_3_1_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (QWEN3_0_6B, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN3_0_6B, {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
        (QWEN3_0_6B, {"num_key_value_heads": 5}, "num_key_value_heads=5"),
        (QWEN3_0_6B, {"hidden_size": "1024"}, "hidden_size is '1024'"),
        (QWEN3_0_6B, {"vocab_size": None}, "vocab_size is missing"),
        (QWEN3_0_6B, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        (QWEN3_0_6B, {"rope_theta": -1}, "rope_theta is -1"),
    ],
)
def test_what_we_do_not_compute_is_refused(
    base: dict[str, Any], change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    file = write_json(tmp_path / "config.json", base | change)
    with pytest.raises(ModelConfigError) as refusal:
        read_config(tmp_path)
    assert named in str(refusal.value)
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_unreadable_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json: not a JSON object: Expecting"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(
        ModelConfigError, match=r"config\.json: not a JSON object: \[\] where an obj"
    ):
        read_config(tmp_path)


def test_sizes_that_transformers_cannot_open_are_refused() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    with pytest.raises(ModelConfigError, match=r"hidden_size: 32 is not a multiple"):
        config_json(Architecture(model_type="llama", **sizes, **heads))
    config_json(Architecture(model_type="qwen3", **sizes, **heads))


def test_auto_tokenizer_encodes_as_the_tokenizer_does(
    architecture: Architecture, tmp_path: Path
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    source = tmp_path / "source.json"
    tokenizer.save(str(source))
    write_json(tmp_path / "config.json", config_json(architecture, eos_id=256))

    for name, content in tokenizer_files(source, 256).items():
        (tmp_path / name).write_bytes(content)

    opened = AutoTokenizer.from_pretrained(tmp_path)
    # The last letter is two code points: Qwen's own tokenizer class would make them one.
    text = "It doesn't cost  12345 €\n\n한국어<|endoftext|>e\N{COMBINING ACUTE ACCENT}"
    assert opened(text)["input_ids"] == tokenizer.encode(text).ids
    assert opened.decode(opened(text)["input_ids"]) == text
    assert opened.eos_token_id == 256
    assert (tmp_path / "tokenizer.json").read_bytes() == source.read_bytes()


def test_tokenizer_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"tokenizer\.json: cannot be read"):
        tokenizer_files(tmp_path / "tokenizer.json", 0)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelConfigError, match=r"tokenizer\.json: not a tokenizer"):
        tokenizer_files(tmp_path / "tokenizer.json", 0)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelConfigError, match=r"tokenizer\.json: has no token 9"):
        tokenizer_files(tmp_path / "tokenizer.json", 9)
