"""The named peer: torchtitan, its own Trainer with its own Qwen3. Start it with torchrun and a
recipe (see benchmarks/support/peer.py). `layout_step` is for benchmarks.parallelism."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

from benchmarks.peers.torch_layouts import Step
from benchmarks.support.peer import Clock, Job, run_peer
from trainer.models import Decoder
from trainer.optim.optimizer import set_rate
from trainer.parallel.schedules import cut
from trainer.recipe import Recipe
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
        # Its train_step calls a pipeline as torch after 2.13 wants it, see `_whole_batch`; and none
        # of its attentions does a ring's backward on a CPU.
        raise ValueError("no pp or cp here")
    trainer = build(job)
    batches = trainer.batch_generator(trainer.dataloader)
    # The steps of Trainer.train, which itself needs torch.distributed.set_timeout, not in 2.13.
    for step in range(1, job.recipe.run.steps + 1):
        trainer.step = step
        trainer.gc_handler.run(step)
        trainer.train_step(batches)
        clock.step()
    trainer.close()


def layout_step(recipe: Recipe, model: Decoder) -> Step:
    """A step of its parts under tp, sp, pp or cp of the recipe, from the weights of `model`, at a
    constant learning rate: its forward, backward and optimizer, without clipping, metrics and data
    loader. All ranks have all tokens. On all ranks of a world that is joined."""
    use_cpu()
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter

    job = Job(recipe, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    trainer = build(job)
    gc.enable()  # it would collect every 50th step, for all that run here
    weights = Qwen3StateDictAdapter(trainer.model_config, None).from_hf(model.state_dict())
    for part in trainer.model_parts:
        cut_as = {key: (its.device_mesh, its.placements) for key, its in part.state_dict().items()}
        part.load_state_dict({k: distribute_tensor(weights[k], *how) for k, how in cut_as.items()})
    for optimizer in trainer.optimizers:
        set_rate(optimizer, recipe.optimizer.lr)
    pipeline, ring = recipe.strategy.pp > 1, recipe.strategy.cp > 1
    if pipeline:
        trainer.pp_schedule.step = _whole_batch(trainer.pp_schedule.step)

    def step(batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        labels = [batch["labels"] for batch in batches]
        inputs = [{"input": batch["input_ids"]} for batch in batches]
        if ring:
            for one in inputs:
                one["positions"] = torch.arange(one["input"].shape[1]).expand_as(one["input"])
        told = {"global_valid_tokens": torch.tensor(sum(each.numel() for each in labels))}
        passes = [(inputs, labels)] if pipeline else zip(inputs, labels, strict=True)
        total = torch.zeros(())
        for some, wanted in passes:
            loss = trainer.forward_backward_step(input_dict=some, labels=wanted, **told)
            total += loss.detach().sum().clamp(min=0)  # a stage without the loss has [-1]
        trainer.optimizers.step()
        trainer.optimizers.zero_grad()
        if ring:
            dist.all_reduce(total)
        return total

    return step


def _whole_batch(step: Any) -> Any:
    """A schedule's `step` of torch 2.13, which wants the batch whole, for torchtitan 0.3, which
    gives lists of micro-batches."""

    def wrapped(
        arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **rest: Any
    ) -> None:
        ids = [torch.cat([each for (each,) in arg_mbs])] if arg_mbs else []
        target = torch.cat(target_mbs) if target_mbs else None
        step(*ids, target=target, losses=losses, loss_kwargs=loss_kwargs, **rest)

    return wrapped


def build(job: Job) -> Any:
    """Its Trainer of the job."""
    trainer = trainer_config(job).build()
    for part in trainer.model_parts:
        for unit in part.modules():
            if job.device.type == "cpu" and isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)  # gloo sums, and scales nothing
    return trainer


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
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
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

    class NoTokenizer(BaseTokenizer):
        """The data is tokens."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = lambda *_, **__: None

    recipe = job.recipe
    options, schedule, strategy = recipe.optimizer, recipe.schedule, recipe.strategy
    passes = job.passes if strategy.pp > 1 else 1  # a pipeline's local batch is all of them
    return Trainer.Config(
        model_spec=ModelSpec(
            name="qwen3",
            flavor="recipe",
            model=model_config(job.architecture),
            parallelize_fn=parallelize_qwen3,
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        tokenizer=NoTokenizer.Config(),
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
            local_batch_size=recipe.micro_batch * passes,
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
            tensor_parallel_degree=strategy.tp,
            enable_sequence_parallel=strategy.sequence_parallel,
            context_parallel_degree=strategy.cp,
            pipeline_parallel_degree=strategy.pp,
            pipeline_parallel_schedule="1F1B",
            pipeline_parallel_microbatch_size=recipe.micro_batch,
            module_fqns_per_model_part=stages(job) if strategy.pp > 1 else None,
            fsdp_reshard_after_forward="always" if job.free_after_forward else "never",
            # The default, spmd_types, wants a newer torch than 2.13 for more than one rank.
            spmd_backend="partial_dtensor",
        ),
        activation_checkpoint=None,
    )


def stages(job: Job) -> list[list[str]]:
    """Its names of what each stage has: the cut of this trainer."""
    with torch.device("meta"):
        costs = Decoder(job.architecture).block_costs(job.recipe.data.seq_len)
    runs = cut(tuple(costs), job.recipe.strategy.pp)
    names = [[f"layers.{number}" for number in run] for run in runs]
    return [["tok_embeddings", *names[0]], *names[1:-1], [*names[-1], "norm", "lm_head"]]


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
