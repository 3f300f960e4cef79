"""The keys of a DeepSpeed configuration that no recipe key stands for, and why.

Names are those of DeepSpeed 0.10 to 0.19 and of the older spellings it still reads. A key that ends
in a dot stands for all keys below it. What is in neither table here, nor read by
`trainer.import_deepspeed`, is unknown.
"""

ALIASES = {
    "bfloat16.": "bf16.",
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": (
        "zero_optimization.stage3_param_persistence_threshold"
    ),
    "zero_optimization.model_persistence_threshold": (
        "zero_optimization.stage3_model_persistence_threshold"
    ),
    "zero_optimization.gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.module_granularity_threshold": (
        "zero_optimization.stage3_module_granularity_threshold"
    ),
}
"""Other spelling → the one used here."""

_BLOCKWISE = "FSDP communicates one block of the model at a time, DDP and ZeRO-1 25 MB"
_OVERLAP = "communication overlaps computation, except ZeRO-1's gather after the update"
_QUANTIZED = "nothing is sent quantised: parameters in precision.dtype, gradients in float32"
_SCALER = "the fp16 loss scale halves at each overflow and doubles after 2000 good steps"
_FULL = "parameters, optimizer state and gradient sums are float32"
_SHOWN = "`perdure profile` shows where time goes, metrics.jsonl memory and speed"
_DATA = "the order of the data is a function of seed and position; there is no such curriculum"
_PARALLEL = "Perdure parallelises over data only: this changes what fits, not what is learned"
_IO = "Perdure reads and writes offloaded state in its own way"
_SAVES = "checkpoints are whole, checksummed, and load on any number of ranks"

TAKEN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization.stage",
    "zero_optimization.mics_shard_size",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "optimizer.type",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.type",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.total_num_steps",
    "fp16.enabled",
    "fp16.initial_scale_power",
    "bf16.enabled",
    "compile.enabled",
)
"""Keys that are translated, as far as a misspelt one may mean them."""

DROPPED = {
    # --- ZeRO
    "zero_optimization.reduce_bucket_size": _BLOCKWISE,
    "zero_optimization.allgather_bucket_size": _BLOCKWISE,
    "zero_optimization.allgather_partitions": _BLOCKWISE,
    "zero_optimization.reduce_scatter": "gradients are reduce-scattered wherever they are sharded",
    "zero_optimization.use_multi_rank_bucket_allreduce": _BLOCKWISE,
    "zero_optimization.contiguous_gradients": (
        "gradients are reduced from one buffer per block, under DDP per 25 MB"
    ),
    "zero_optimization.overlap_comm": _OVERLAP,
    "zero_optimization.round_robin_gradients": "each rank copies its own shard of every gradient",
    "zero_optimization.sub_group_size": (
        "the optimizer steps through all shards in one fused call, with offload: nvme in portions "
        "of 32 MiB"
    ),
    "zero_optimization.stage3_max_live_parameters": (
        "at most two blocks are gathered at a time, beside what is in no block"
    ),
    "zero_optimization.stage3_max_reuse_distance": "a block is freed after its forward pass",
    "zero_optimization.stage3_prefetch_bucket_size": "the next block is gathered ahead",
    "zero_optimization.stage3_param_persistence_threshold": "every parameter is sharded",
    "zero_optimization.stage3_model_persistence_threshold": "every parameter is sharded",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _SAVES,
    "zero_optimization.stage3_module_granularity_threshold": _BLOCKWISE,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _BLOCKWISE,
    "zero_optimization.stage3_allgather_sequential": _BLOCKWISE,
    "zero_optimization.stage3_partition_stream_chunk_size": "each rank builds its own shards only",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold float32 weights only",
    "zero_optimization.elastic_checkpoint": _SAVES,
    "zero_optimization.ignore_unused_parameters": (
        "under DDP every parameter must take part in the loss, unless the model sets some_unused"
    ),
    "zero_optimization.legacy_stage1": "there is one ZeRO-1",
    "zero_optimization.zero_hpz_partition_size": (
        "there is no second copy of parameters; HYBRID_SHARD with strategy.shard_size is the "
        "nearest: everything sharded inside a node"
    ),
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
    "zero_optimization.zeropp_loco_param.": _QUANTIZED,
    "zero_optimization.mics_hierarchical_params_gather": _BLOCKWISE,
    "zero_optimization.memory_efficient_linear": "torch's own linear keeps no extra copy",
    "zero_optimization.pipeline_loading_checkpoint": _SAVES,
    "zero_optimization.override_module_apply": "initial weights are drawn by parameter name",
    "zero_optimization.log_trace_cache_warnings": "there is no trace of the forward pass",
    "zero_optimization.enable_sanity_checks": "elastic.check_replicas_every compares replicas",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer is AdamW",
    "zero_optimization.cpu_offload_use_pin_memory": _IO,
    "zero_optimization.zenflow.": "the whole optimizer step runs every step",
    "zero_optimization.leaf_module.": "units of sharding are the repeated blocks of the model",
    "zero_optimization.offload_optimizer.": _IO,
    "zero_optimization.offload_param.": _IO,
    "zero_allow_untested_optimizer": "there is one optimizer, and it is tested",
    "zero_force_ds_cpu_optimizer": "offloaded state is updated by torch's fused AdamW",
    "aio.": _IO,
    # --- optimizer
    "optimizer.legacy_fusion": "AdamW is fused",
    "optimizer.params.torch_adam": "AdamW is torch's, fused",
    "optimizer.params.fused": "AdamW is torch's, fused",
    "optimizer.params.foreach": "AdamW is torch's, fused",
    "optimizer.params.capturable": "AdamW is torch's, fused",
    "optimizer.params.set_grad_none": "gradients are freed after each step",
    "optimizer.params.fp32_optimizer_states": _FULL,
    "optimizer.params.freeze_step": _QUANTIZED,
    "optimizer.params.var_freeze_step": _QUANTIZED,
    "optimizer.params.var_update_scaler": _QUANTIZED,
    "optimizer.params.local_step_scaler": _QUANTIZED,
    "optimizer.params.local_step_clipper": _QUANTIZED,
    "optimizer.params.cuda_aware": _QUANTIZED,
    "optimizer.params.comm_backend_name": _QUANTIZED,
    "scheduler.params.last_batch_iteration": "a run begins at step 0 or at its checkpoint",
    # --- precision
    "fp16.loss_scale_window": _SCALER,
    "fp16.hysteresis": _SCALER,
    "fp16.consecutive_hysteresis": _SCALER,
    "fp16.min_loss_scale": _SCALER + ", down to 1",
    "fp16.fused_mode": "AdamW is torch's, fused",
    "fp16.auto_cast": "token ids need no cast",
    "fp16.fp16": "says what fp16.enabled says",
    "fp16.fp16_master_weights_and_grads": _FULL,
    "fp16.": _FULL,
    "bf16.": _FULL,
    "amp.": "torch's own mixed precision takes Apex's place",
    "torch_autocast.": "matrix products run in precision.dtype",
    "communication_data_type": "gradients are reduced in float32",
    "seq_parallel_communication_data_type": _PARALLEL,
    "seq_parallel_comm_data_type": _PARALLEL,
    "fp32_allreduce": "gradients are reduced in float32",
    "data_types.": _FULL,
    "grad_accum_dtype": _FULL,
    # --- gradients
    "sparse_gradients": "gradients are dense",
    "prescale_gradients": "the loss is divided by the tokens of the whole batch before backward",
    "gradient_predivide_factor": (
        "the loss is divided by the tokens of the whole batch before backward"
    ),
    "gradient_allreduce_op": "the loss is divided by the tokens of the whole batch before backward",
    "disable_allgather": _BLOCKWISE,
    "allgather_size": _BLOCKWISE,
    "managed_gradient_accumulation": "accumulation follows from the batch sizes",
    # --- what is shown
    "steps_per_print": "run.log_every, 10 unless set, is also that of metrics.jsonl",
    "wall_clock_breakdown": _SHOWN,
    "memory_breakdown": _SHOWN,
    "dump_state": "the resolved recipe lies in run.dir/recipe.yaml",
    "timers.": _SHOWN,
    "tensorboard.": "tracking.tensorboard writes events to run.dir/tensorboard",
    "flops_profiler.": _SHOWN,
    "comms_logger.": _SHOWN,
    "comms_config.": _SHOWN,
    "monitor_config.": "metrics.jsonl is always written; tracking.* adds TensorBoard and W&B",
    "csv_monitor.": "metrics.jsonl is always written",
    "comet.": "tracking knows TensorBoard and W&B",
    "wandb.": "W&B takes team and group from WANDB_ENTITY and WANDB_RUN_GROUP",
    # --- what changes what is learned
    "curriculum_learning.": _DATA,
    "data_efficiency.": _DATA,
    "dataloader_drop_last": "sequences are packed: there is no incomplete batch",
    "progressive_layer_drop.": "layers are never dropped",
    "eigenvalue.": "no quantisation needs the curvature",
    "compression_training.": "nothing is pruned or quantised in training",
    "quantize_training.": "nothing is pruned or quantised in training",
    "weight_quantization.": "nothing is pruned or quantised in training",
    "sparse_attention.": "attention is full, inside documents where data.document_mask is set",
    # --- the rest
    "activation_checkpointing.": "blocks are recomputed on their own rank, from what it kept",
    "autotuning.": "`perdure plan` and `perdure compare` choose a strategy",
    "elasticity.": "the global batch is constant and any number of ranks shares it",
    "checkpoint.": _SAVES,
    "nebula.": _SAVES,
    "datastates.": _SAVES,
    "use_node_local_storage": _SAVES,
    "load_universal_checkpoint": _SAVES,
    "compile.": "blocks are compiled by torch's inductor",
    "graph_harvesting": "blocks are compiled by torch's inductor",
    "hybrid_engine.": "Perdure trains; it does not serve",
    "inference.": "Perdure trains; it does not serve",
    "tensor_parallel.": _PARALLEL,
    "autotp_size": _PARALLEL,
    "expert_parallel.": _PARALLEL,
    "pipeline.": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "data_parallel_size": "ranks are what the launcher starts",
    "use_data_before_expert_parallelism": _PARALLEL,
    "local_rank": "torchrun tells each rank its place",
    "vocabulary_size": "the model says",
}
"""Key, or prefix that ends in a dot → why nothing in a recipe stands for it."""
