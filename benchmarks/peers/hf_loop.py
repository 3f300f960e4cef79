"""The named peer: Hugging Face's Trainer with its own Qwen3, as its documentation trains on one
GPU. Start it with torchrun and a recipe (see benchmarks/support/peer.py)."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from benchmarks.support.peer import Clock, Job, run_peer
from benchmarks.support.transformers_trainer import Told, training_arguments


class Sequences(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Those of the job, one by one, on the CPU."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def __iter__(self) -> Any:
        for batch in self._job.micro_batches():
            for ids in batch["input_ids"]:
                # The model itself shifts the labels.
                yield {"input_ids": ids.cpu(), "labels": ids.cpu()}


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On one rank."""
    recipe = job.recipe
    notes = ["its model, SDPA"]
    if recipe.data.document_mask:
        notes.append("no mask between documents: plain causal attention")
    clock.note = "; ".join(notes)
    shape = job.architecture
    config = Qwen3Config(
        **{name: getattr(shape, name) for name in shape.__dataclass_fields__ if name in FIELDS},
        attn_implementation="sdpa",
        use_cache=False,
    )
    arguments = TrainingArguments(
        **training_arguments(job),
        torch_compile=recipe.strategy.compile,
        gradient_checkpointing=recipe.strategy.activation_checkpointing == "full",
        dataloader_num_workers=0 if job.device.type == "cpu" else 1,
    )
    trainer = Trainer(
        model=Qwen3ForCausalLM(config),
        args=arguments,
        train_dataset=Sequences(job),
        callbacks=[Told(clock)],
    )
    trainer.train()


FIELDS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "tie_word_embeddings", "initializer_range",
}  # fmt: skip
"""Fields of an architecture that have the same names there."""

if __name__ == "__main__":
    run_peer(train)
