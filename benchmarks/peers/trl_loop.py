"""The named peer: trl's SFTTrainer on transformers' model, with PEFT's LoRA if the recipe has an
adapter. Start it with torchrun and a recipe (see benchmarks/support/peer.py)."""

import os
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.support.peer import Clock, Job, run_peer


class Told(TrainerCallback):
    """Tells the clock of every step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.step()


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On one rank."""
    recipe, options = job.recipe, job.recipe.optimizer
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # or it would wrap the model in DDP
        os.environ.pop(name)
    clock.note = "its model, SDPA; chats of a sequence see each other"
    place, adapter = recipe.model.init_from, recipe.model.adapter
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    arguments = SFTConfig(
        output_dir=recipe.run.dir,
        max_steps=recipe.run.steps,
        max_length=recipe.data.seq_len,
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=recipe.micro_batch,
        gradient_accumulation_steps=job.passes,
        gradient_checkpointing=False,
        learning_rate=options.lr,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_epsilon=options.eps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.clip_norm,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=job.mixed,
        logging_steps=recipe.run.log_every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=job.device.type == "cpu",
    )
    lora = adapter and LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows(job)),
        processing_class=AutoTokenizer.from_pretrained(place),
        peft_config=lora or None,
        callbacks=[Told(clock)],
    )
    trainer.train()


def rows(job: Job) -> list[dict[str, list[int]]]:
    """The sequences of all steps; the model itself shifts the labels."""
    batches = islice(job.chats(), job.passes * job.recipe.run.steps)
    return [
        {"input_ids": ids.tolist(), "labels": [-100, *labels.tolist()[:-1]]}
        for batch in batches
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


if __name__ == "__main__":
    run_peer(train)
