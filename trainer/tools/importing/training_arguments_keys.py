"""The keys of TrainingArguments without a counterpart in recipes, each with the reason. Some keys
are also translated; they are listed for the values that training_arguments.py cannot use. Names are
those of transformers 4.30 to 5.24, and some of TRL.
"""

from collections.abc import Mapping

from trainer.tools.importing.accelerate_keys import TABLE as ACCELERATE
from trainer.tools.importing.accelerate_keys import spelled_out
from trainer.tools.importing.foreign_config import ImportKeyTable, reasons

_NO_MEANING = """\
`perdure train` trains, and continues from the newest checkpoint in run.dir
    do_train do_eval do_predict resume_from_checkpoint overwrite_output_dir local_rank ddp_backend
    ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint past_index
    use_ipex use_mps_device tpu_num_cores tpu_metrics_debug xpu_backend _n_gpu dispatch_batches
max_steps or num_train_epochs says how long the run is
    num_train_epochs max_steps
loss and gradients that are not finite skip the step (elastic.max_skipped_steps)
    logging_nan_inf_filter
run.log_every says when metrics are written, on the console and in metrics.jsonl
    logging_first_step log_on_each_node log_level log_level_replica disable_tqdm logging_dir
    include_num_input_tokens_seen include_tokens_per_second
checkpoints are whole and sharded, from every node, in safetensors
    save_on_each_node save_only_model save_safetensors
the last checkpoint is exported with `perdure ckpt export`; nothing is pushed
    push_to_hub. push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token
validation reads data.validation_sequences, with batch.micro_batch, and writes its loss
    per_device_eval_batch_size per_gpu_eval_batch_size prediction_loss_only eval_on_start eval_delay
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    include_inputs_for_metrics batch_eval_metrics eval_packing
    do_train_eval jit_mode_eval fp16_full_eval bf16_full_eval
checkpoint.keep_best and checkpoint.best_by say which checkpoints stay
    metric_for_best_model greater_is_better
data.reader and data.workers say how prepared tokens are read
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order accelerator_config.
    remove_unused_columns label_names length_column_name dataset_num_proc dataset_text_field
    dataset_kwargs. pad_token eos_token pad_to_multiple_of
    dataset_batch_size truncation_mode trust_remote_code
training keeps no cache of keys and values
    use_cache
metrics.jsonl holds memory and speed, and skipped steps are named
    skip_memory_metrics debug
sequences are packed: there is no incomplete batch, and no padding
    dataloader_drop_last packing packing_strategy padding_free
DDP sends gradients in buckets of 25 MB, and every parameter takes part in the loss
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
the loss is divided by the target tokens of the whole batch
    average_tokens_across_devices
strategy.activation_checkpointing recomputes whole blocks, or all but their matrix products
    activation_checkpointing_kwargs. gradient_checkpointing_kwargs.
blocks are compiled by torch's inductor
    torch_compile_backend torch_compile_mode torchdynamo
Perdure's own models compute the loss in chunks, and norms and attention by torch
    use_liger_kernel use_liger liger_kernel_config.
strategy says how the model is spread
    fsdp fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap deepspeed
the schedule has no such value
    lr_scheduler_kwargs.
tracking.project names the project
    project trackio_space_id trackio_bucket_id trackio_static_space_id
torch.amp is what precision.dtype uses
    half_precision_backend fp16_backend fp16_opt_level
the model is model.init_from
    model_init_kwargs. chat_template_path
"""

_DIFFERS = """\
Perdure's optimizers take no such option; name a class in optimizer.factory
    optim_args optim_target_modules
the loss is plain cross-entropy
    label_smoothing_factor
no noise is added to embeddings
    neftune_noise_alpha
the order of the data follows from run.seed alone
    data_seed
data are shuffled, and sequences are packed to data.seq_len
    group_by_length train_sampling_strategy shuffle_dataset
the weight of the balance loss is that of the model's config.json
    router_aux_loss_coef
batch.micro_batch: auto is the nearest
    auto_find_batch_size
the cache of the allocator is left alone
    torch_empty_cache_steps
torch's own setting for float32 products holds, not TF32
    tf32
the loss is over all target tokens of a sequence
    completion_only_loss assistant_only_loss loss_type activation_offloading
tracking knows TensorBoard and W&B; others are tracking.sinks
    report_to_other
"""


def _spread(reasons_of_accelerate: Mapping[str, str]) -> dict[str, str]:
    # these sections have the same keys as in accelerate
    sections = ("fsdp_config.", "parallelism_config.")
    return {key: why for key, why in reasons_of_accelerate.items() if key.startswith(sections)}


TABLE = ImportKeyTable(
    owner="TrainingArguments",
    no_meaning={**_spread(ACCELERATE.no_meaning), **reasons(_NO_MEANING)},
    differs={**_spread(ACCELERATE.differs), **reasons(_DIFFERS)},
    aliases={"evaluation_strategy": "eval_strategy"},
    complete=spelled_out,
)
