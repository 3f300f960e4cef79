"""The named peer: LitGPT's fine-tuning, the steps of `fit` in litgpt/finetune/lora.py and full.py
on its own GPT, with the same weights. Start it with torchrun and a recipe (see
benchmarks/support/peer.py); beside `model.init_from` lies what `litgpt convert_to_litgpt` makes of
it, under the same name and `-litgpt`.

`setup` there reads its own data and keeps no clock.
"""

from pathlib import Path
from typing import Any

import litgpt.lora
import litgpt.model
import torch
from lightning.fabric import Fabric
from litgpt.utils import chunked_cross_entropy, load_checkpoint

from benchmarks.support.peer import Clock, Job, run_peer


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On one rank."""
    recipe, adapter = job.recipe, job.recipe.model.adapter
    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    clock.note = "its model; chats of a sequence see each other"
    converted = Path(f"{recipe.model.init_from}-litgpt")
    model: Any
    if adapter:
        parts = ("query", "key", "value", "projection", "mlp")
        config = litgpt.lora.Config.from_file(
            converted / "model_config.yaml", lora_r=adapter.rank, lora_alpha=int(adapter.alpha),
            lora_dropout=adapter.dropout, **{f"lora_{part}": True for part in parts},
        )  # fmt: skip
        model = litgpt.lora.GPT(config)
        litgpt.lora.mark_only_lora_as_trainable(model)
    else:
        model = litgpt.model.GPT(litgpt.model.Config.from_file(converted / "model_config.yaml"))
    model.max_seq_length = recipe.data.seq_len
    model = fabric.setup(model)
    load_checkpoint(fabric, model, converted / "lit_model.pth", strict=not adapter)
    if job.architecture.tie_word_embeddings:  # as published; it would train both
        head = model.lm_head.linear if adapter else model.lm_head
        model.transformer.wte.weight = head.weight
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fabric.setup_optimizers(job.optimizer(trained))
    batches = job.chats()
    for _ in range(recipe.run.steps):
        for number in range(job.passes):
            batch = next(batches)
            with fabric.no_backward_sync(model, enabled=number < job.passes - 1):
                logits = model(batch["input_ids"], lm_head_chunk_size=128)
                loss = chunked_cross_entropy(logits, batch["labels"])
                fabric.backward(loss / job.passes)
        torch.nn.utils.clip_grad_norm_(trained, recipe.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss.detach())


if __name__ == "__main__":
    run_peer(train)
