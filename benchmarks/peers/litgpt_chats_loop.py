"""The named peer: LitGPT's fine-tuning, the steps of `fit` in litgpt/finetune/lora.py and full.py
on its own GPT, with random weights. Start it with torchrun and a recipe (see
benchmarks/support/peer.py).

`setup` there reads its own checkpoints and data and keeps no clock. LitGPT wants a huggingface_hub
that newer transformers refuse: it is measured in an environment of its own.
"""

from typing import Any

import litgpt.lora
import litgpt.model
import torch
from lightning.fabric import Fabric
from litgpt.utils import chunked_cross_entropy

from benchmarks.peers.litgpt_loop import gpt_config
from benchmarks.support.peer import Clock, Job, run_peer


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On one rank."""
    recipe, adapter = job.recipe, job.recipe.model.adapter
    fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
    clock.note = "chats of a sequence see each other; its AdamW is not fused"
    model: Any
    if adapter:
        parts = ("query", "key", "value", "projection", "mlp")
        config = gpt_config(
            job, litgpt.lora.Config, lora_r=adapter.rank, lora_alpha=int(adapter.alpha),
            lora_dropout=adapter.dropout, **{f"lora_{part}": True for part in parts},
        )  # fmt: skip
        model = litgpt.lora.GPT(config)
    else:
        model = litgpt.model.GPT(gpt_config(job))
    model.max_seq_length = recipe.data.seq_len
    if job.architecture.tie_word_embeddings:
        model.transformer.wte.weight = (
            model.lm_head.linear.weight if adapter else model.lm_head.weight
        )
    if adapter:
        litgpt.lora.mark_only_lora_as_trainable(model)
    model = fabric.setup_module(model)
    options = recipe.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(
            trained, lr=options.lr, weight_decay=options.weight_decay, betas=options.betas
        )
    )
    batches = job.chats()
    for _ in range(recipe.run.steps):
        for number in range(job.passes):
            batch = next(batches)
            with fabric.no_backward_sync(model, enabled=number < job.passes - 1):
                logits = model(batch["input_ids"], lm_head_chunk_size=128)
                loss = chunked_cross_entropy(logits, batch["labels"])
                fabric.backward(loss / job.passes)
        torch.nn.utils.clip_grad_norm_(trained, options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss.detach())


if __name__ == "__main__":
    run_peer(train)
