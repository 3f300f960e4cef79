"""The keys of a DeepSpeed configuration without a counterpart in recipes, each with the reason.
Some keys are also translated; they are listed for the values that
`trainer.tools.importing.deepspeed` cannot use.

Names are those of DeepSpeed 0.10 to 0.19 and the older spellings it still reads.
"""

from trainer.tools.importing.foreign_config import ImportedConfigKeys, reasons


def _inline(key: str) -> str:
    return f"deepspeed_config.{key}"


def _expand(key: str) -> str:
    for short, whole in (("zero.", "zero_optimization."), ("params.", "optimizer.params.")):
        key = whole + key.removeprefix(short) if key.startswith(short) else key
    return key


_RENAMED = """\
bfloat16.                                        bf16.
autotp_size                                      tensor_parallel.autotp_size
zero.cpu_offload_params                          zero.cpu_offload_param
zero.max_live_parameters                         zero.stage3_max_live_parameters
zero.max_reuse_distance                          zero.stage3_max_reuse_distance
zero.prefetch_bucket_size                        zero.stage3_prefetch_bucket_size
zero.param_persistence_threshold                 zero.stage3_param_persistence_threshold
zero.model_persistence_threshold                 zero.stage3_model_persistence_threshold
zero.gather_16bit_weights_on_model_save          zero.stage3_gather_16bit_weights_on_model_save
zero.stage3_gather_fp16_weights_on_model_save    zero.stage3_gather_16bit_weights_on_model_save
zero.module_granularity_threshold                zero.stage3_module_granularity_threshold
"""
"""Older spelling of a key → spelling in this package, both abbreviated."""

_INLINE = """\
zero_stage                     zero.stage
gradient_accumulation_steps    gradient_accumulation_steps
gradient_clipping              gradient_clipping
offload_optimizer_device       zero.offload_optimizer.device
offload_param_device           zero.offload_param.device
offload_optimizer_nvme_path    zero.offload_optimizer.nvme_path
offload_param_nvme_path        zero.offload_param.nvme_path
zero3_save_16bit_model         zero.stage3_gather_16bit_weights_on_model_save
seq_parallel_communication_data_type    seq_parallel_communication_data_type
"""
"""accelerate's spelling of a key below `deepspeed_config` → spelling in this package,
abbreviated."""

_NO_MEANING_INLINE = """\
torchrun starts the ranks
    deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
    deepspeed_multinode_launcher
each rank draws its own shards only, by parameter name
    zero3_init_flag
every parameter is sharded, by units that are the repeated blocks of the model
    deepspeed_moe_layer_cls_names
the file is read, and its keys are listed under its name
    deepspeed_config_file
"""

_NO_MEANING = """\
FSDP communicates one block of the model at a time, DDP and ZeRO-1 25 MB
    zero.reduce_bucket_size zero.allgather_bucket_size zero.allgather_partitions
    zero.use_multi_rank_bucket_allreduce zero.stage3_module_granularity_threshold
    zero.stage3_use_all_reduce_for_fetch_params zero.stage3_allgather_sequential
    zero.mics_hierarchical_params_gather disable_allgather allgather_size zero.contiguous_gradients
the next block is gathered ahead, and each is freed after its forward pass
    zero.stage3_max_live_parameters zero.stage3_max_reuse_distance
    zero.stage3_prefetch_bucket_size zero.log_trace_cache_warnings
every parameter is sharded, by units that are the repeated blocks of the model
    zero.stage3_param_persistence_threshold zero.stage3_model_persistence_threshold
    zero.leaf_module.
gradients are reduce-scattered wherever they are sharded
    zero.reduce_scatter zero.round_robin_gradients
communication overlaps computation, except ZeRO-1's gather after the update
    zero.overlap_comm
MiCS is switched off, or needs stage 3
    zero.mics_shard_size
each rank draws its own shards only, by parameter name
    zero.stage3_partition_stream_chunk_size zero.override_module_apply
under DDP every parameter must take part in the loss, unless the model sets some_unused
    zero.ignore_unused_parameters
elastic.check_replicas_every compares replicas
    zero.enable_sanity_checks
checkpoints are whole, checksummed, in float32, and load on any number of ranks
    zero.stage3_gather_16bit_weights_on_model_save zero.elastic_checkpoint
    zero.pipeline_loading_checkpoint zero.load_from_fp32_weights checkpoint. nebula. datastates.
    use_node_local_storage load_universal_checkpoint
not offloaded; DeepSpeed offloads optimizer state from stage 1 on, parameters with stage 3
    zero.offload_optimizer.device zero.offload_param.device zero.cpu_offload zero.cpu_offload_param
nothing is offloaded to it
    zero.offload_optimizer.nvme_path zero.offload_param.nvme_path
Perdure reads and writes offloaded state in its own way
    zero.cpu_offload_use_pin_memory aio.block_size aio.queue_depth aio.thread_count
    aio.single_submit aio.overlap_events aio.intra_op_parallelism aio.use_gds
    zero.offload_optimizer.buffer_count zero.offload_optimizer.pin_memory
    zero.offload_optimizer.pipeline zero.offload_optimizer.pipeline_read
    zero.offload_optimizer.pipeline_write zero.offload_optimizer.fast_init
    zero.offload_optimizer.ratio zero.offload_optimizer.super_offload
    zero.offload_optimizer.cpuadam_cores_perc zero.offload_param.buffer_count
    zero.offload_param.buffer_size zero.offload_param.max_in_cpu zero.offload_param.pin_memory
the optimizer is torch's AdamW, fused: it updates all shards in each step
    zero.sub_group_size zero.save_muon_momentum_buffer_in_memory zero.legacy_stage1
    zero.memory_efficient_linear zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    optimizer.legacy_fusion params.torch_adam params.fused params.foreach params.capturable
    params.set_grad_none fp16.fused_mode
parameters, optimizer state and gradient sums are float32
    params.fp32_optimizer_states bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    bf16.immediate_grad_update
DeepSpeed reads no such key either
    fp16.opt_level fp16.fp16_scale_tolerance
each step is checked for gradients that are not finite
    bf16.check_grad_overflow
another switch decides precision.dtype
    fp16.enabled bf16.enabled amp.enabled torch_autocast.enabled
with fp16 the dynamic loss scale begins at precision.loss_scale
    fp16.loss_scale fp16.initial_scale_power
weight decay is always decoupled
    params.adam_w_mode params.adamw_mode
AdamW corrects its moments from the first step on
    params.bias_correction
its iteration is that of torch.optim.Muon
    params.ns_method
muon_lr is given
    params.lr
max_grad_norm says the same
    gradient_clipping
matrix products run in precision.dtype, by torch's own mixed precision
    fp16.auto_cast fp16.fp16 amp. torch_autocast.
gradients are dense, and reduced in float32
    fp32_allreduce sparse_gradients
the loss is divided by the tokens of the whole batch before backward
    prescale_gradients gradient_predivide_factor gradient_allreduce_op
accumulation follows from the batch sizes
    managed_gradient_accumulation
the product micro-batch x accumulation x replicas: give --ranks, or fill in batch.global_batch
    train_batch_size
run.steps is the length of your run
    scheduler.params.total_num_steps
the peak is optimizer.lr
    scheduler.params.warmup_max_lr
the ranks that CUDA_VISIBLE_DEVICES names take part
    cuda_visible_devices
a run begins at step 0 or at its checkpoint
    scheduler.params.last_batch_iteration
warm-up is linear
    scheduler.params.warmup_type
a size of 1 or less has no effect
    tensor_parallel.autotp_size sequence_parallel_size
strategy.tp, pp, cp and ep say how a model is split, the topology where each part is placed
    seq_parallel_communication_data_type seq_parallel_comm_data_type tensor_parallel.
    expert_parallel. pipeline. use_data_before_expert_parallelism
run.log_every, 10 unless set, is also that of metrics.jsonl
    steps_per_print
`perdure profile` shows where time goes, metrics.jsonl memory and speed
    wall_clock_breakdown memory_breakdown timers. flops_profiler. comms_logger. comms_config.
the resolved recipe lies in run.dir/recipe.yaml
    dump_state
metrics.jsonl is always written; tracking.* adds TensorBoard and W&B
    monitor_config. csv_monitor. comet. tensorboard. wandb.
sequences are packed: there is no incomplete batch
    dataloader_drop_last
blocks are recomputed on their own rank, from what it kept
    activation_checkpointing.
`perdure plan` and `perdure compare` choose a strategy
    autotuning.
blocks are compiled by torch's inductor
    compile. graph_harvesting
Perdure trains; it does not serve
    hybrid_engine. inference.
the launcher and the model determine it
    data_parallel_size local_rank vocabulary_size
"""

_DIFFERS = """\
nothing is sent quantised: parameters in precision.dtype, gradients in float32
    zero.zero_quantized_weights zero.zero_quantized_nontrainable_weights
    zero.zero_quantized_gradients zero.zeropp_loco_param. params.freeze_step
    params.var_freeze_step params.var_update_scaler params.local_step_scaler
    params.local_step_clipper params.cuda_aware params.comm_backend_name
there is no second copy of parameters; HYBRID_SHARD with strategy.shard_size is the nearest
    zero.zero_hpz_partition_size
every step reads whole sequences, in an order that seed and position give: no curriculum
    curriculum_learning. data_efficiency.
nothing is dropped, pruned or quantised in training
    progressive_layer_drop. eigenvalue. compression_training. quantize_training.
    weight_quantization.
attention is full, inside documents where data.document_mask is set
    sparse_attention.
the global batch is constant and any number of ranks shares it
    elasticity.
DeepSpeed keeps the old optimizer state for the least important gradients; here none is late
    zero.zenflow.
warm-up is linear, and starts from 0
    scheduler.params.warmup_min_lr scheduler.params.warmup_min_ratio
the fp16 loss scale halves at each overflow, down to 1, and doubles after 2000 good steps
    fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale
gradients are reduced and added up in float32
    communication_data_type grad_accum_dtype data_types.
parameters, optimizer state and gradient sums are float32
    fp16.fp16_master_weights_and_grads
AdamW keeps no running maximum (AMSGrad)
    params.amsgrad
"""


TABLE = ImportedConfigKeys(
    owner="DeepSpeed",
    automatic=True,
    no_meaning=reasons(_NO_MEANING, _expand),
    differs=reasons(_DIFFERS, _expand),
    aliases={_expand(old): _expand(new) for old, new in map(str.split, _RENAMED.splitlines())},
)

INLINE = ImportedConfigKeys(
    owner="accelerate",
    automatic=True,
    no_meaning={**TABLE.no_meaning, **reasons(_NO_MEANING_INLINE, _inline)},
    differs=TABLE.differs,
    aliases={_inline(old): _expand(new) for old, new in map(str.split, _INLINE.splitlines())},
)
"""Rules for the untranslated keys of accelerate's `deepspeed_config`."""
