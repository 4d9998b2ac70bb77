"""What other trainers, and this one in earlier versions, call flags and their values: errors name ours."""

from __future__ import annotations

from training.facts import EPSILON

# What other trainers call our flags. They are not accepted, but the error names ours.
OTHER_NAMES = {
    name: field
    for field, names in {
        "learning_rate": "lr",
        "batch_size": "bs per_device_train_batch_size train_batch_size",
        "epochs": "num_train_epochs num_epochs",
        "gradient_accumulation": "gradient_accumulation_steps grad_accum accumulate_grad_batches",
        "model": "model_name_or_path model_name",
        "dataset": "data dataset_name train_file train_data data_dir",
        "dataset_config": "dataset_config_name subset",
        "dataset_revision": "revision",
        "max_train_rows": "max_samples max_train_samples",
        "validation_split": "val_split eval_split",
        "validation_fraction": "val_fraction",
        "output_dir": "output out",
        "max_length": "max_seq_length max_seq_len seq_len",
        "long": "doc_stride truncation",
        "warmup": "warmup_ratio warmup_steps",
        "schedule": "lr_scheduler_type lr_scheduler lr_decay",
        "weight_decay": "wd",
        "clip_norm": "max_grad_norm grad_clip gradient_clip_val gradient_clipping",
        "betas": "adam_beta1 adam_beta2",
        "layer_decay": "layerwise_lr_decay",
        "ema": "ema_decay",
        "precision": "fp16 bf16 fp32 amp mixed_precision dtype torch_dtype",
        "activation_checkpointing": "gradient_checkpointing",
        "strategy": "zero_stage sharding_strategy",
        "cpu_offload": "offload",
        "device": "cpu gpu cuda",
        "resume": "resume_from resume_from_checkpoint",
        "save_every": "save_steps save_interval checkpoint_every checkpoint_interval",
        "save_minutes": "checkpoint_interval_minutes",
        "keep_last": "save_total_limit",
        "evaluate_every": "eval_steps eval_interval",
        "best_metric": "metric_for_best_model",
        "early_stopping": "early_stopping_patience patience",
        "log_every": "logging_steps log_interval",
        "trackers": "report_to wandb",
    }.items()
    for name in names.split()
}
# Fields of earlier versions: what holds now. The config.yaml and the checkpoints of such runs are
# still read.
FORMER_FIELDS = {
    "dp": "it is always the number of ranks / (tp x pp), so leave it out",
    "epsilon": f"AdamW's is always {EPSILON:g}, so leave it out",
    "profile_start": "recording always begins ten steps after the first, so leave it out",
    "profile_ranks": "rank 0 is always the one that is recorded, so leave it out",
    "record_collectives_every": "the collectives of every 20th step are always recorded, so leave it out",
    "one_rank_rate": "divide the metric samples_per_second by that rate and by world_size instead",
}
# What others have flags for and we do not: what to do instead.
NOT_FLAGS = FORMER_FIELDS | {
    name: instead
    for names, instead in (
        (
            "backend ddp_backend dist_backend",
            "it follows from --device and is NCCL on GPUs, gloo on CPUs",
        ),
        (
            "num_workers dataloader_num_workers",
            "the rows are tokenized once and then read from a cache, so there are no workers",
        ),
        ("fsdp", "use --strategy zero3, or zero2 to shard all but the weights"),
        ("adam_epsilon", FORMER_FIELDS["epsilon"]),
        (
            "nproc_per_node nnodes node_rank master_addr master_port max_restarts rdzv_backend",
            "it is torchrun's: give it before the script",
        ),
        (
            "devices num_gpus",
            "torchrun's --nproc_per_node, before the script, says how many to use",
        ),
    )
    for name in names.split()
}
# What others call values of our flags.
OTHER_VALUES = {
    "strategy": dict.fromkeys(("fsdp", "fsdp2", "full_shard", "fully_shard", "zero"), "zero3")
    | {"shard_grad_op": "zero2", "dp": "ddp", "data_parallel": "ddp"}
    | {"pipeline": "pp", "pipeline_parallel": "pp", "tensor": "tp", "tensor_parallel": "tp"},
    "precision": {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"},
    "device": {"gpu": "cuda"},
}
