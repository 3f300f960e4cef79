"""The named peer: torchtitan, its own Trainer with its own Qwen3. Start it with torchrun and a
recipe (see benchmarks/support/peer.py)."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.support.peer import Clock, Job, run_peer
from trainer.recipe.architecture import Architecture


def train(job: Job, clock: Clock) -> None:
    """All steps of the recipe. On all ranks."""
    notes = []
    cpu = job.device.type == "cpu"
    if cpu:
        use_cpu()
        notes.append("told to take the CPU, which it does not by itself")
    if not job.sharded:
        notes.append("FSDP2 with replicas alone, as it has no DDP")
    if job.recipe.data.document_mask:
        notes.append("no mask between documents: plain causal attention")
    clock.note = "; ".join(notes)
    if job.recipe.strategy.pp * job.recipe.strategy.cp > 1:
        # Pipelines want a newer torch than 2.13, and rings attention that the CPU does not have.
        raise ValueError("no pp or cp here")
    trainer = trainer_config(job).build()
    for unit in trainer.model_parts[0].modules():
        if cpu and isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)  # gloo sums, and scales nothing
    batches = trainer.batch_generator(trainer.dataloader)
    # The steps of Trainer.train, which itself needs torch.distributed.set_timeout, not in 2.13.
    for step in range(1, job.recipe.run.steps + 1):
        trainer.step = step
        trainer.gc_handler.run(step)
        trainer.train_step(batches)
        clock.step()
    trainer.close()


def use_cpu() -> None:
    """torchtitan takes `torch.cuda` where it finds no accelerator: answer for the CPU in its place,
    before other modules of it copy the choice."""
    from torchtitan.tools import utils

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda _: None,
        current_device=lambda: 0,
        synchronize=lambda: None,
        get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=memory),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda _: {},
    )


def trainer_config(job: Job) -> Any:
    """Its `Trainer.Config` of the recipe; the optimizer is fused AdamW by default."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.qwen3 import parallelize_qwen3
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    class Batches(BaseDataLoader):
        """The micro-batches of the job, as torchtitan's data loaders give them."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            """Ranks and sizes are those of the job."""

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for batch in job.micro_batches():
                yield {"input": batch["input_ids"]}, batch["labels"]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Nothing is saved."""

    recipe = job.recipe
    options, schedule = recipe.optimizer, recipe.schedule
    return Trainer.Config(
        model_spec=ModelSpec(
            name="qwen3",
            flavor="recipe",
            model=model_config(job.architecture),
            parallelize_fn=parallelize_qwen3,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        hf_assets_path=recipe.data.sources[0].path,
        dump_folder=recipe.run.dir,
        loss=CrossEntropyLoss.Config(),
        dataloader=Batches.Config(),
        metrics=MetricsProcessor.Config(log_freq=recipe.run.log_every),
        optimizer=default_adamw(
            options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
        ),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=schedule.warmup_steps,
            decay_type="cosine",
            min_lr_factor=schedule.min_lr_ratio,
        ),
        training=TrainingConfig(
            local_batch_size=recipe.micro_batch,
            global_batch_size=recipe.batch.global_batch,
            seq_len=recipe.data.seq_len,
            max_norm=options.clip_norm,
            steps=recipe.run.steps,
            mixed_precision_param="bfloat16" if job.mixed else "float32",
            disable_cuda_graphs=job.device.type == "cpu",
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=1 if job.sharded else job.replicas,
            data_parallel_shard_degree=job.replicas if job.sharded else 1,
            tensor_parallel_degree=recipe.strategy.tp,
            enable_sequence_parallel=recipe.strategy.sequence_parallel,
            fsdp_reshard_after_forward="always" if job.free_after_forward else "never",
            # The default, spmd_types, wants a newer torch than 2.13 for more than one rank.
            spmd_backend="partial_dtensor",
        ),
        activation_checkpoint=None,
    )


def model_config(architecture: Architecture) -> Any:
    """The architecture as torchtitan's registry has Qwen3, with the causal attention of torch."""
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.qwen3 import Qwen3Model
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock

    hidden, vocabulary = architecture.hidden_size, architecture.vocab_size
    matrix = {"weight": partial(nn.init.normal_, std=architecture.initializer_range)}

    def norm(size: int) -> Any:
        return RMSNorm.Config(
            normalized_shape=size,
            eps=architecture.rms_norm_eps,
            param_init={"weight": nn.init.ones_},
        )

    def block() -> Any:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(hidden),
            ffn_norm=norm(hidden),
            attention=make_gqa_config(
                dim=hidden,
                n_heads=architecture.num_attention_heads,
                n_kv_heads=architecture.num_key_value_heads,
                head_dim=architecture.head_dim,
                wqkv_param_init=matrix,
                wo_param_init=matrix,
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=CosSinRoPE.Config(
                    dim=architecture.head_dim,
                    max_seq_len=architecture.max_position_embeddings,
                    theta=architecture.rope_theta,
                ),
                qk_norm=norm(architecture.head_dim) if architecture.model_type == "qwen3" else None,
            ),
            feed_forward=make_ffn_config(
                dim=hidden,
                hidden_dim=architecture.intermediate_size,
                w1_param_init=matrix,
                w2w3_param_init=matrix,
            ),
        )

    tied = architecture.tie_word_embeddings
    return Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=hidden,
        norm=norm(hidden),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=hidden,
            param_init={"weight": skip_param_init} if tied else matrix,
        ),
        lm_head=Linear.Config(in_features=hidden, out_features=vocabulary, param_init=matrix),
        layers=[block() for _ in range(architecture.num_hidden_layers)],
    )


if __name__ == "__main__":
    run_peer(train, tensor_parallel=True)
