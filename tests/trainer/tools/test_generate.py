"""Sampling from a checkpoint directory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from trainer.models import (
    Decoder,
    ModelConfigError,
    config_json,
    generation_config_json,
    init_parameter,
    tokenizer_files,
)
from trainer.recipe.architecture import Architecture
from trainer.tools.generate import GenerateError, _decode_pieces, generate

ARCHITECTURE = Architecture(
    model_type="qwen3",
    vocab_size=320,  # more than the tokenizer has, as in published models
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=48,
    tie_word_embeddings=True,
    initializer_range=0.3,
)
PROMPT = "The order of a run"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the order of the run is the order of the data"] * 3, trainer)
    return tokenizer


@pytest.fixture
def checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    weights = {
        name: init_parameter(name, tuple(parameter.shape), ARCHITECTURE, 1)
        for name, parameter in Decoder(ARCHITECTURE).named_parameters()
    }
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in tokenizer_files(tmp_path / "tokenizer.json", 0).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(config_json(ARCHITECTURE, eos_id=0)))
    set_eos(tmp_path, 0)
    return tmp_path


def set_eos(checkpoint: Path, eos_id: int | list[int]) -> None:
    content = json.dumps(generation_config_json(eos_id=eos_id))
    (checkpoint / "generation_config.json").write_text(content)


def greedy_ids(checkpoint: Path, tokenizer: Tokenizer, count: int) -> list[int]:
    """What transformers generates, padding rows of the embedding left out."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompt = torch.tensor([tokenizer.encode(PROMPT).ids])
    padding = list(range(tokenizer.get_vocab_size(), ARCHITECTURE.vocab_size))
    ids = reference.generate(
        prompt, max_new_tokens=count, do_sample=False, suppress_tokens=padding, pad_token_id=0
    )
    return ids[0, prompt.shape[1] :].tolist()


def test_greedy_text_is_that_of_transformers_and_ends_at_eos(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    ids = greedy_ids(checkpoint, tokenizer, 12)
    assert len(set(ids)) > 3
    prompt_ids = tokenizer.encode(PROMPT).ids

    def text_of(new_ids: list[int]) -> str:
        return tokenizer.decode(prompt_ids + new_ids)[len(PROMPT) :]

    text = "".join(generate(checkpoint, PROMPT, max_new_tokens=12, temperature=0))
    assert text == text_of(ids)

    first = next(n for n, token in enumerate(ids) if n > 2 and token not in ids[:n])
    set_eos(checkpoint, [0, ids[first]])
    text = "".join(generate(checkpoint, PROMPT, max_new_tokens=12, temperature=0))
    assert text == text_of(ids[:first])


def test_sampling_follows_seed_temperature_and_top_k(checkpoint: Path) -> None:
    def sample(**options: float | int | None) -> str:
        return "".join(generate(checkpoint, PROMPT, max_new_tokens=16, **options))

    assert sample(seed=1, temperature=1.0) == sample(seed=1, temperature=1.0)
    assert sample(seed=1, temperature=1.0) != sample(seed=2, temperature=1.0)
    greedy = sample(temperature=0)
    assert sample(seed=5, temperature=1.0, top_k=1) == greedy
    assert sample(seed=5, temperature=1e-4, top_k=None) == greedy
    assert sample(seed=5, temperature=5.0, top_k=None) != greedy


def test_text_ends_at_the_context_and_an_empty_prompt_starts_a_document(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    prompt = "z" * 45  # a letter that takes part in no merge
    assert len(tokenizer.encode(prompt).ids) == 45

    def sample(count: int) -> str:
        return "".join(generate(checkpoint, prompt, max_new_tokens=count, temperature=0))

    assert sample(2) != sample(3) == sample(100)
    from_eos = list(generate(checkpoint, "", max_new_tokens=4, temperature=0))
    assert from_eos == list(generate(checkpoint, "<|endoftext|>", max_new_tokens=4, temperature=0))


def test_pieces_never_split_a_character(tokenizer: Tokenizer) -> None:
    text = "순서 → data, déjà vu"
    prompt_ids, new_ids = tokenizer.encode("data: ").ids, tokenizer.encode(text).ids
    pieces = list(_decode_pieces(tokenizer, prompt_ids, iter(new_ids)))
    assert len(pieces) > 8
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    cut = list(_decode_pieces(tokenizer, prompt_ids, iter(tokenizer.encode("순").ids[:2])))
    assert "".join(cut) == "\N{REPLACEMENT CHARACTER}"


def test_what_cannot_be_sampled_is_refused_before_the_first_piece(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(GenerateError, match=r"max_position_embeddings.*shorten it"):
        generate(checkpoint, "order " * 200)
    with pytest.raises(GenerateError, match=r"temperature=-1"):
        generate(checkpoint, PROMPT, temperature=-1)
    with pytest.raises(GenerateError, match=r"top_k=0"):
        generate(checkpoint, PROMPT, top_k=0)
    if not torch.cuda.is_available():
        with pytest.raises(GenerateError, match=r"device=cuda: torch finds no GPU"):
            generate(checkpoint, PROMPT, device="cuda")

    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(GenerateError, match=r"run: not a checkpoint directory.*it is a run"):
        generate(run, PROMPT)
    with pytest.raises(GenerateError, match=r"missing: not a checkpoint directory"):
        generate(tmp_path / "missing", PROMPT)

    (checkpoint / "generation_config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"generation_config\.json: not a JSON object"):
        generate(checkpoint, PROMPT)
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(GenerateError, match=r"tokenizer\.json: not a tokenizer"):
        generate(checkpoint, PROMPT)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(GenerateError, match=r"has no tokenizer\.json"):
        generate(checkpoint, PROMPT)
    (checkpoint / "config.json").write_text('{"model_type": "gtp2"}')
    with pytest.raises(ModelConfigError, match=r"knows no model_type 'gtp2'"):
        generate(checkpoint, PROMPT)
