"""The named peer: trl's SFTTrainer on transformers' model, with PEFT's LoRA if the recipe has an
adapter. Start it with torchrun and a recipe (see benchmarks/support/peer.py)."""

from itertools import islice

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.support.peer import Clock, Job, run_peer
from benchmarks.support.transformers_trainer import Told, training_arguments


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On one rank."""
    recipe = job.recipe
    clock.note = "its model, SDPA; chats of a sequence see each other"
    place, adapter = recipe.model.init_from, recipe.model.adapter
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    arguments = SFTConfig(
        **training_arguments(job),
        max_length=recipe.data.seq_len,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
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
