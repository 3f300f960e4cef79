"""The keys of an accelerate configuration without a counterpart in recipes, each with the reason.
Some keys are also translated; they are listed for the values that
`trainer.tools.importing.accelerate` cannot use. Names are those of accelerate 0.11 to 1.15.
"""

from trainer.tools.importing.foreign_config import ImportedConfigKeys, reasons

_SECTIONS = {
    "fsdp.": "fsdp_config.fsdp_",
    "par.": "parallelism_config.parallelism_config_",
    "dynamo.": "dynamo_config.dynamo_",
    "fp8.": "fp8_config.fp8_",
    "megatron.": "megatron_lm_config.megatron_lm_",
}
"""Abbreviation of a section → prefix of its keys' names."""


def _expand(key: str) -> str:
    for short, long in _SECTIONS.items():
        key = long + key.removeprefix(short) if key.startswith(short) else key
    return key


_NO_MEANING = """\
torchrun starts the ranks, as the line at the end says
    compute_environment num_processes num_machines machine_rank main_process_ip main_process_port
    rdzv_backend same_network gpu_ids main_training_function
    mpirun_config.mpirun_hostfile mpirun_config.mpirun_ccl
a run uses CUDA where there is a GPU
    use_cpu
`perdure train` gives each rank its share of the cores
    enable_cpu_affinity num_cpu_threads_per_process
the log names a rank that waits too long or fails
    debug
TPUs are not used
    downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env commands
    command_file
precision.dtype is the dtype
    fp16 mixed_precision
sharding is that of FSDP2 in either case
    fsdp.version fsdp.use_orig_params
the sharding follows fsdp_reshard_after_forward of FSDP2, fsdp_sharding_strategy of FSDP1
    fsdp.sharding_strategy fsdp.reshard_after_forward
every parameter is sharded, by units that are the repeated blocks of the model
    fsdp.auto_wrap_policy fsdp.transformer_layer_cls_to_wrap fsdp.transformer_cls_names_to_wrap
    fsdp.min_num_params
the next block is gathered ahead
    fsdp.backward_prefetch fsdp.backward_prefetch_policy fsdp.forward_prefetch
    fsdp.limit_all_gathers
checkpoints are whole and sharded, and load on any number of ranks
    fsdp.state_dict_type fsdp.state_dict_config.
each rank reads its own shards only, and all begin with the same weights
    fsdp.cpu_ram_efficient_loading fsdp.sync_module_states
nothing is offloaded
    fsdp.offload_params fsdp.cpu_offload
nothing is recomputed
    fsdp.activation_checkpointing
XLA is not used
    fsdp.xla fsdp.xla_fsdp_v2 fsdp.xla_fsdp_grad_ckpt fsdp.xla_fsdp_settings.
data parallelism takes the ranks that the other sizes leave
    par.dp_shard_size par.dp_replicate_size
a size of 1 has no effect
    par.tp_size par.cp_size par.sp_size
strategy.cp passes keys and values around a ring, with the attention of model.attention
    par.cp_backend par.cp_comm_strategy par.sp_backend par.sp_seq_length
    par.sp_seq_length_is_variable par.sp_attn_implementation par.cp_handler. par.sp_handler.
strategy.tp splits by the model's family
    par.tp_handler. par.enable_async_tp
blocks are compiled one by one, by torch's inductor
    dynamo.backend dynamo.use_regional_compilation dynamo_backend
only with a backend
    dynamo.mode dynamo.use_fullgraph dynamo.use_dynamic
torchao scales by the tensor at hand, e4m3 forward and e5m2 backward, and keeps no history
    fp8.enable_fsdp_float8_all_gather fp8.pad_inner_dim
Perdure's own layers and checkpoints are used
    megatron.no_load_optim megatron.no_save_optim megatron.attention_backend
    megatron.attention_softmax_in_fp32 megatron.use_rotary_position_embeddings
    megatron.expert_tensor_parallel_size megatron.use_precision_aware_optimizer
    megatron.overlap_cpu_optimizer_d2h_h2d megatron.use_custom_fsdp
strategy.activation_checkpointing recomputes whole blocks, or all but their matrix products
    megatron.recompute_granularity megatron.recompute_method megatron.recompute_num_layers
    megatron.recompute_activations
strategy.tp and strategy.pp decide
    megatron.sequence_parallelism megatron.decoder_last_pipeline_num_layers
the sharding is given already
    megatron.use_distributed_optimizer
the loss is divided by the target tokens of the whole batch
    megatron.calculate_per_token_loss
a size of 1 has no effect
    megatron.tp_degree megatron.pp_degree megatron.context_parallel_size
    megatron.expert_model_parallel_size
"""

_DIFFERS = """\
every parameter is sharded
    fsdp.ignored_modules
the inputs of recomputed blocks stay on the device
    fsdp.activation_checkpointing_offload
activations are in precision.dtype, gradients are reduced in float32
    fsdp.mixed_precision_policy fsdp.mixed_precision_policy.
torch.compile is called with its default mode, which allows graph breaks
    dynamo.mode dynamo.use_fullgraph
torchao scales by the tensor at hand, e4m3 forward and e5m2 backward, and keeps no history
    fp8.format fp8.amax_history_len fp8.amax_compute_algo fp8.margin fp8.interval
    fp8.override_linear_precision fp8.use_autocast_during_eval fp8.opt_level
    fp8.use_mxfp8_block_scaling
not used here
    megatron.attention_dropout megatron.hidden_dropout megatron.optimizer_cpu_offload
    megatron.eod_mask_loss
torch.compile decides about dynamic shapes
    dynamo.use_dynamic
"""


def spelled_out(key: str) -> str:
    """Complete a section's key as accelerate's launcher does: "fsdp_config.version" becomes
    "fsdp_config.fsdp_version"."""
    for long in _SECTIONS.values():
        section = long[: long.index(".") + 1]
        if key.startswith(section) and not key.startswith(long):
            return long + key.removeprefix(section)
    return key


TABLE = ImportedConfigKeys(
    owner="accelerate",
    no_meaning=reasons(_NO_MEANING, _expand),
    differs=reasons(_DIFFERS, _expand),
    aliases={},
    complete=spelled_out,
)
