"""In from Hugging Face, train, out to Hugging Face: no conversion on either side."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.distributed.jobs import losses
from trainer.data.loader import TokenStream


@pytest.fixture(scope="module")
def published(workspace):
    """A tied Qwen3 as published ones are: several shards, and the tied head a second time."""
    config = Qwen3Config(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    folder = workspace / "published"
    Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    index = (folder / "model.safetensors.index.json").read_text()
    first = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(first)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, first, metadata={"format": "pt"})
    entry = f'"weight_map": {{\n    "lm_head.weight": "{first.name}",'
    index = index.replace('"weight_map": {', entry, 1)
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def mean_loss(model, batch):
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    return cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten()).item()


def test_there_and_back(workspace, train, published):
    start = ("model.architecture=null", "model.init_from=published", "data.document_mask=false")
    train(2, "run.dir=from-hf", "run.steps=3", "schedule={}", *start)
    stream = TokenStream.open(
        [(workspace / "data", 1.0)],
        split="train",
        seq_len=32,
        seed=7,
        shuffle=True,
        document_mask=False,
    )
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    expected = mean_loss(theirs, stream.fetch(range(8)))
    assert losses(workspace, "from-hf")[1] == pytest.approx(expected, rel=1e-5)

    checkpoint = workspace / "from-hf" / "checkpoints" / "step-00000003"
    trained, report = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    next_batch = stream.fetch(range(24, 32))
    train(1, "run.dir=from-hf", "run.steps=4", "schedule={}", *start)
    assert losses(workspace, "from-hf")[4] == pytest.approx(
        mean_loss(trained, next_batch), rel=1e-5
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(tokenizer("to be, or not")["input_ids"]) == "to be, or not"
