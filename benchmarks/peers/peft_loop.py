"""The named peer: the module of transformers with PEFT's LoRA in a loop by hand, as their
documentation has it for one GPU. Start it with torchrun and a recipe (see
benchmarks/support/peer.py)."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.support.peer import Clock, Job, run_peer


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On one rank."""
    recipe, adapter = job.recipe, job.recipe.model.adapter
    clock.note = "its model, SDPA"
    if not adapter or adapter.base == "nf4":
        raise ValueError("only an adapter over whole weights here")
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model.init_from,
        dtype=torch.bfloat16 if adapter.base == "bf16" else torch.float32,
        attn_implementation="sdpa",
    ).to(job.device)
    model.config.use_cache = False
    blocks = model.model.layers
    if recipe.strategy.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    lora = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora, autocast_adapter_dtype=True).train()
    if recipe.strategy.compile:
        for block in blocks:
            block.compile()
    optimizer = job.optimizer(one for one in model.parameters() if one.requires_grad)
    batches = job.micro_batches()
    for _ in range(recipe.run.steps):
        for _ in range(job.passes):
            batch = next(batches)
            with torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=job.mixed):
                logits = model(input_ids=batch["input_ids"]).logits
                loss = nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), batch["labels"].flatten()
                )
            (loss / job.passes).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss)


if __name__ == "__main__":
    run_peer(train)
