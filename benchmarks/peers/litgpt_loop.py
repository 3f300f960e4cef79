"""The named peer: LitGPT, its own `GPT` in its own pretraining loop, `litgpt.pretrain.fit`. Start
it with torchrun and a recipe (see benchmarks/support/peer.py).

`litgpt.pretrain.setup`, which would build all this, compiles the model, and shards it with the
older FSDP, which is CUDA alone.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.pretrain import fit, initialize_weights
from torch import Tensor

from benchmarks.peers.fabric_loop import build_fabric
from benchmarks.support.peer import Clock, Job, run_peer


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On all ranks."""
    recipe = job.recipe
    fabric = build_fabric("lightning.fabric", job, lambda model: model.transformer.h)
    torch.manual_seed(recipe.run.seed)
    config = gpt_config(job)
    model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    if job.architecture.tie_word_embeddings:
        model.transformer.wte.weight = model.lm_head.weight
    model.max_seq_length = recipe.data.seq_len
    model = fabric.setup_module(model)
    optimizer = job.optimizer(model.parameters())
    optimizer.register_step_post_hook(lambda *_: clock.step())
    if recipe.data.document_mask:
        clock.note = "no mask between documents: plain causal attention"
    state = {
        "model": model,
        "optimizer": fabric.setup_optimizers(optimizer),
        "iter_num": 0,
        "step_count": 0,
    }
    windows = Windows(job)
    batch = recipe.batch
    fit(
        fabric,
        devices=job.world_size,
        state=state,
        train_dataloader=windows,
        val_dataloader=windows,
        out_dir=Path(recipe.run.dir),
        tokenizer_dir=None,
        train=TrainArgs(
            save_interval=None,
            log_interval=recipe.run.log_every,
            global_batch_size=batch.global_batch,
            micro_batch_size=recipe.micro_batch,
            lr_warmup_steps=recipe.schedule.warmup_steps,
            max_tokens=recipe.run.steps * batch.global_batch * recipe.data.seq_len,
            max_norm=recipe.optimizer.clip_norm,
            min_lr=recipe.optimizer.lr * recipe.schedule.min_lr_ratio,
        ),
        eval=EvalArgs(interval=2**62, initial_validation=False, final_validation=False),
    )


def gpt_config(job: Job) -> Config:
    """The architecture in LitGPT's words, as its registry has Qwen3 and Llama 3."""
    architecture = job.architecture
    return Config(
        block_size=architecture.max_position_embeddings,
        vocab_size=architecture.vocab_size,
        padded_vocab_size=architecture.vocab_size,
        n_layer=architecture.num_hidden_layers,
        n_head=architecture.num_attention_heads,
        n_query_groups=architecture.num_key_value_heads,
        head_size=architecture.head_dim,
        n_embd=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        mlp_class_name="LLaMAMLP",
        norm_class_name="RMSNorm",
        norm_eps=architecture.rms_norm_eps,
        norm_qk=architecture.model_type == "qwen3",
        rotary_percentage=1.0,
        rope_base=int(architecture.rope_theta),
        parallel_residual=False,
        bias=False,
    )


class Windows:
    """Micro-batches as LitGPT's data modules give them: (micro_batch, seq_len + 1) int64."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self._job.micro_batches():
            yield torch.cat((batch["input_ids"], batch["labels"][:, -1:]), dim=1)


if __name__ == "__main__":
    run_peer(train)
