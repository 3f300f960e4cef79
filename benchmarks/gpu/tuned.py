"""Slice 10: fine-tuning. Adapters, a base in 4 bits, chats and preferences on a GPU against the
CPU; and the speed and memory of an adapter over a model of 8B."""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import save_file

from benchmarks.gpu.correct import BF16
from benchmarks.gpu.setting import (
    Sections,
    Setting,
    UnsupportedError,
    architecture,
    device_memory,
    difference,
    recipe,
    run_command,
    train,
)
from benchmarks.gpu.speed import rate_of_peer, rate_of_perdure
from benchmarks.gpu.synthetic import EOS
from trainer.data.tokenizer import byte_tokenizer

Base: TypeAlias = Literal["bf16", "fp32", "nf4"]
Kind: TypeAlias = Literal["chat", "pairs"]
SHARD_BYTES = 4 << 30
TEMPLATE = """\
{%- for m in messages %}{{ m.role[0] + m.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ 'a' }}{% endif %}"""
EVERY, WARM, MEASURED = 2, 3, 5
"""Steps of a log interval, and intervals, as in speed.py."""


def adapters(setting: Setting) -> dict[str, Any]:
    """LoRA over bases in float32 and in 4 bits against the CPU, in float32; and over one in bf16
    compiled against eager."""
    found = {}
    for base in ("fp32", "nf4"):
        ours, reference = (
            train(setting, f"{base}-{place}", adapted(setting, base, run={"device": place}))
            for place in (setting.place(), "cpu")
        )
        found[base] = difference(ours.losses(), reference.losses())
    compiled, eager = (
        train(setting, f"bf16-{on}", adapted(setting, "bf16", strategy={"compile": on}, **BF16))
        for on in (True, False)
    )
    found["bf16_compiled"] = difference(compiled.losses(), eager.losses())
    return {"difference": max(found.values()), **found}


def answers(setting: Setting) -> dict[str, Any]:
    """Chats, and pairs of answers under DPO, with an adapter, against the CPU, in float32."""
    found: dict[str, float] = {}
    kinds: tuple[tuple[Kind, dict[str, str]], ...] = (("chat", {}), ("pairs", {"name": "dpo"}))
    for kind, objective in kinds:
        data = {"sources": [{"path": str(prepared(setting, kind))}]}
        ours, reference = (
            train(
                setting,
                f"{kind}-{place}",
                adapted(setting, "fp32", run={"device": place}, data=data, objective=objective),
            )
            for place in (setting.place(), "cpu")
        )
        found[kind] = difference(ours.losses(), reference.losses())
    return {"difference": max(found.values()), **found}


def perdure(setting: Setting, base: Base, micro_batch: int) -> dict[str, Any]:
    """This trainer: LoRA of rank 16 in all linear layers of an 8B."""
    return rate_of_perdure(setting, large(setting, base, micro_batch), WARM, MEASURED)


def peer(setting: Setting, base: Base, micro_batch: int) -> dict[str, Any]:
    """The module of transformers with PEFT's adapter in a loop by hand, with the same recipe."""
    sections = large(setting, base, micro_batch)
    return rate_of_peer(setting, sections, "peft", WARM * EVERY, (WARM + MEASURED) * EVERY)


def large(setting: Setting, base: Base, micro_batch: int) -> Sections:
    """The recipe that both train: eight sequences of 4096 tokens a step."""
    if setting.on_gpu() and not setting.toy and device_memory() < 24e9:
        raise UnsupportedError("an adapter over 8B takes a GPU of 24 GB")
    return adapted(
        setting,
        base,
        "8B",
        run={"log_every": EVERY},
        data={"seq_len": 4096, "document_mask": False},
        batch={"global_batch": 8, "micro_batch": micro_batch},
        strategy={"compile": not setting.toy, "activation_checkpointing": "full"},
        **BF16,
    )


def adapted(setting: Setting, base: Base, model: str = "small", /, **sections: Any) -> Sections:
    """A recipe that trains an adapter over a published model."""
    start = {
        "architecture": None,
        "init_from": str(published(setting, model, torch.bfloat16 if model == "8B" else None)),
        "adapter": {"rank": 16, "base": base},
    }
    return recipe(setting, model, model=start, **sections)


def published(setting: Setting, model: str, dtype: torch.dtype | None) -> Path:
    """A model of random weights in Hugging Face's format, drawn on the device unless it is there.

    Args:
        model: as of `architecture`.
        dtype: None: float32.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds

    folder = setting.data / f"published-{setting.size}-{model}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(**architecture(setting, model), eos_token_id=EOS)
    with torch.device("meta"):
        shapes = {
            name: parameter.shape for name, parameter in Qwen3ForCausalLM(config).named_parameters()
        }
    torch.manual_seed(0)
    index: dict[str, str] = {}
    shard, nbytes = {}, 0
    for number, (name, shape) in enumerate(shapes.items(), start=1):
        drawn = torch.empty(shape, dtype=dtype, device=setting.place())
        drawn.fill_(1.0) if len(shape) == 1 else drawn.normal_(std=0.02)
        shard[name] = drawn.cpu()
        nbytes += shard[name].nbytes
        if nbytes > SHARD_BYTES or number == len(shapes):
            file = f"model-{number:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, file)
            shard, nbytes = {}, 0
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    spoken = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(spoken))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    config.save_pretrained(folder)  # last: a folder with it is whole
    return folder


def prepared(setting: Setting, kind: Kind) -> Path:
    """Records of random words, prepared by the command that users type."""
    draw, file = Random(0), setting.scratch / f"{kind}.jsonl"

    def said() -> str:
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(4, 12)))

    with file.open("w") as lines:
        for _ in range(2000):
            asked = {"role": "user", "content": said()}
            record: dict[str, Any] = {"prompt": said(), "chosen": said(), "rejected": said()}
            if kind == "chat":
                answer = {"role": "assistant", "content": said()}
                record = {"messages": [asked, answer]}
            lines.write(json.dumps(record) + "\n")
    out = setting.scratch / f"{kind}-data"
    perdure = ("trainer.cli", "data", "prepare", str(file), f"--{kind}", "--out", str(out))
    tokenizer = published(setting, "small", None)
    run_command(setting, [sys.executable, "-m", *perdure, "--tokenizer", str(tokenizer)])
    return out
