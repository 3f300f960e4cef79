"""In from Hugging Face, train, out to Hugging Face: no conversion on either side."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from checkpointing.tools.convert import export
from tests.distributed.jobs import losses, soak
from trainer.data.loader import TokenStream
from trainer.data.prepare.prepare import prepare
from trainer.data.shards import read_index
from trainer.data.tokenizer import train_bpe
from trainer.models.hf import files_beside
from trainer.tools.generate import generate


@pytest.fixture(scope="session")
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
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text())))  # not as we write it
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
    )
    theirs = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    expected = mean_loss(theirs, stream.fetch(range(8)))
    assert losses(workspace, "from-hf")[1] == pytest.approx(expected, rel=1e-5)

    checkpoint = workspace / "from-hf" / "checkpoints" / "step-00000003"
    trained, report = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert (checkpoint / "config.json").read_bytes() == (published / "config.json").read_bytes()
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    next_batch = stream.fetch(range(24, 32))
    train(1, "run.dir=from-hf", "run.steps=4", "schedule={}", *start)
    assert losses(workspace, "from-hf")[4] == pytest.approx(
        mean_loss(trained, next_batch), rel=1e-5
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(tokenizer("to be, or not")["input_ids"]) == "to be, or not"


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
FAMILIES = {
    "qwen2": {**WINDOW, "max_window_layers": 1},
    "mistral": {"sliding_window": 8},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {},
    "gpt_oss": {
        **{"sliding_window": 8, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "gemma3_text": {"sliding_window": 8, "head_dim": 16},
}


@soak
@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_family_goes_there_and_back(workspace, train, model_type):
    """Sequences have 32 tokens, of which each sees 8 in a window."""
    sizes = {
        **{"vocab_size": 257, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"initializer_range": 0.2, "pad_token_id": 0},
    }
    config = AutoConfig.for_model(model_type, **sizes, **FAMILIES[model_type])
    torch.manual_seed(3)
    theirs, folder = AutoModelForCausalLM.from_config(config), workspace / model_type
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    theirs.save_pretrained(folder)
    start = ("model.architecture=null", f"model.init_from={model_type}", "data.document_mask=false")
    run = f"from-{model_type}"
    train(2, f"run.dir={run}", "run.steps=3", "schedule={}", *start)
    sources = [(workspace / "data", 1.0)]
    stream = TokenStream.open(sources, split="train", seq_len=32, seed=7, shuffle=True)
    found = losses(workspace, run)
    assert found[1] == pytest.approx(mean_loss(theirs, stream.fetch(range(8))), rel=1e-5)
    checkpoint = workspace / run / "checkpoints" / "step-00000003"
    assert (checkpoint / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    trained, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    train(1, f"run.dir={run}", "run.steps=4", "schedule={}", *start)
    expected = mean_loss(trained, stream.fetch(range(24, 32)))
    assert losses(workspace, run)[4] == pytest.approx(expected, rel=1e-5)
    assert "".join(generate(checkpoint, "the ", temperature=0, max_new_tokens=4))


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


CARRIED = (
    "LICENSE",
    "README.md",
    "merges.txt",
    "vocab.bpe",
    "tokenizer.model.v3",
    "modeling_own.py",
)
CARRIED = (*CARRIED, "additional_chat_templates/tool_use.jinja", "notes/of/ours")
LEFT = (
    "training_args.bin",
    "original/consolidated.00.pth",
    "original/params.json",
    ".gitattributes",
)


@pytest.fixture(scope="session")
def instruct(workspace):
    """A Qwen3 that was taught to chat, as published: and it stops at two tokens."""
    folder = workspace / "instruct"
    text = (workspace / "corpus" / "000.txt").read_text()
    tokenizer = train_bpe([text], 300)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT,
        model_max_length=4096,
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_id=301,
        pad_token_id=0,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[301, 0], pad_token_id=0, do_sample=True, temperature=0.7, top_k=20, top_p=0.8
    )
    model.save_pretrained(folder)
    for name in (*CARRIED, *LEFT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_a_model_that_chats_still_does(workspace, train, instruct):
    prepare([str(workspace / "corpus/001.txt")], workspace / "spoken", tokenizer=str(instruct))
    start = ("model.architecture=null", "model.init_from=instruct", "schedule={}")
    data = ("data={sources: [{path: spoken}], seq_len: 32}", "run.dir=chat", "run.steps=2")
    assert "note:" not in train(1, *start, *data)
    checkpoint = workspace / "chat" / "checkpoints" / "step-00000002"
    export(checkpoint, workspace / "chat-exported", dtype="bf16")
    talk = [{"role": "user", "content": "to be?"}]
    theirs = AutoTokenizer.from_pretrained(instruct)
    expected = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert expected.endswith("<|im_end|>\n<|im_start|>assistant\n")
    names = {path.name for path in instruct.iterdir() if path.is_file()}
    names -= {*LEFT, "model.safetensors", "config.json"}
    names |= {*CARRIED}
    assert {"chat_template.jinja", "generation_config.json"} < names
    for folder in (checkpoint, workspace / "chat-exported"):
        for name in names:
            assert (folder / name).read_bytes() == (instruct / name).read_bytes(), name
        assert not any((folder / name).exists() for name in LEFT)
        ours = AutoTokenizer.from_pretrained(folder)
        assert expected == ours.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True
        )
        assert (ours.eos_token, ours.pad_token) == ("<|im_end|>", "<|endoftext|>")
        found = GenerationConfig.from_pretrained(folder).to_dict()
        assert found == GenerationConfig.from_pretrained(instruct).to_dict()
        config, source = (json.loads((f / "config.json").read_text()) for f in (folder, instruct))
        dtypes = {"float32"} if folder == checkpoint else {"bfloat16"}
        assert {config.pop("dtype"), config.pop("torch_dtype", *dtypes)} == dtypes
        source.pop("dtype")
        assert config == source


def test_data_that_does_not_fit_a_model_that_chats_is_told(workspace, instruct, tmp_path):
    def notes(**options):
        data = tmp_path / str(len(list(tmp_path.iterdir())))
        prepare([str(workspace / "corpus/001.txt")], data, **options)
        return files_beside(instruct, data, read_index(data))

    _, told = notes(tokenizer=str(instruct), eos="<|im_start|>")
    assert len(told) == 1
    assert "documents end in token 300, but the model" in told[0]
    assert "stops at 301, 0" in told[0]

    begins = tmp_path / "begins.json"
    tokenizer = AutoTokenizer.from_pretrained(instruct).backend_tokenizer
    special = [("<|im_start|>", 300)]
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
    tokenizer.save(str(begins))
    _, told = notes(tokenizer=str(begins))
    assert "documents begin with token 300, but" in told[0]

    files, told = notes(train_bpe=290)
    assert "prepared with other tokens" in told[0]
    assert files.keys() & {*CARRIED} == {"LICENSE", "README.md", "modeling_own.py", "notes/of/ours"}
    assert "chat_template.jinja" not in files
    assert b"im_start" not in files["tokenizer.json"]
