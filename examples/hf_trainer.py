"""Hugging Face's Trainer on sequences to count on: torchrun --nproc-per-node 2 hf_trainer.py"""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS, GLOBAL_BATCH = 60, 12


class Sequences(Dataset):
    """Each counts on from a start, by a stride, modulo 61."""

    def __len__(self):
        return 720

    def __getitem__(self, index):
        start, stride = index % 61, 1 + index // 61
        tokens = (start + stride * torch.arange(16)) % 61
        return {"input_ids": tokens, "labels": tokens}


def build():
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=2, **sizes))


def main():
    arguments = TrainingArguments(
        "out",
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // 2,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(build(), arguments, train_dataset=Sequences())
    trainer.train()


if __name__ == "__main__":
    main()
