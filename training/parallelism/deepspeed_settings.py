"""DeepSpeed's JSON settings, made from the typed configuration, or the user's file completed by it.

Source: deepspeed.ai/docs/config-json.
"""

from __future__ import annotations

import json

from common.errors import UserError
from training.config import TrainConfig
from training.deepspeed_file import FLAGS, SCHEDULES, Settings, look_up, read_file
from training.facts import EPSILON

# Elements reduced or gathered at once. DeepSpeed's default of 500,000,000 would cost a small model
# a 2 GB buffer.
LARGEST_BUCKET = 50_000_000

# Fields that follow from a flag, in addition to those that are one.
FOLLOWING = {
    "train_batch_size": "batch_size",
    "scheduler.type": "schedule",
    "zero_optimization.offload_optimizer.device": "cpu_offload",
    "zero_optimization.memory_efficient_linear": "activation_checkpointing",
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
    "bf16.check_grad_overflow": "bad_steps",
    "torch_autocast.enabled": "precision",
    "torch_autocast.dtype": "precision",
}

# Settings that would change the rows, the layout or the math without the trainer noticing.
REFUSED = (
    "amp",
    "autotuning",
    "communication_data_type",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "elasticity",
    "gradient_allreduce_op",
    "managed_gradient_accumulation",
    "pipeline",
    "progressive_layer_drop",
    "sequence_parallel_size",
    "tensor_parallel",
)


def deepspeed_settings(
    config: TrainConfig, precision: str, world_size: int, num_parameters: int
) -> Settings:
    """All settings for DeepSpeed; ``num_parameters`` is that of the whole model: no bucket is
    larger.

    Raises:
        UserError: the file cannot be read or contradicts a flag, or the stage does not support
            offload or fp16.
    """
    _check(config, precision)
    path = config.deepspeed_config
    given = read_file(path) if path else {}
    for name in sorted(given.keys() & set(REFUSED)):
        raise UserError(
            f"--deepspeed_config {path}: {name} cannot be set in a file: the trainer's flags "
            "decide it; remove it",
            code="deepspeed-config",
        )
    ours = _generated(config, precision, world_size, num_parameters)
    # In bf16 a file may ask for DeepSpeed's own mode, with bf16 weights, instead of autocast.
    if precision == "bf16" and look_up(given, "bf16.enabled"):
        ours |= {
            "bf16": {"enabled": True, "check_grad_overflow": True},
            "torch_autocast": {"enabled": False},
        }
    for name, flag in (FLAGS | FOLLOWING).items():
        mine, theirs = look_up(ours | _of_flags(config), name), look_up(given, name)
        if None not in (mine, theirs) and mine != theirs:
            raise UserError(
                f"--deepspeed_config {path}: {name} is {json.dumps(theirs)}, and --{flag} "
                f"{str(getattr(config, flag)).lower()} makes it {json.dumps(mine)}: make them "
                "equal, or leave one out",
                code="deepspeed-config",
            )
    # The trainer sets the learning rate before each step, and gives each group of parameters its
    # weight decay.
    given.pop("scheduler", None)
    if "optimizer" in given:
        flags = {"lr": 0.0, "betas": list(config.betas), "eps": EPSILON}
        kept = {
            name: value
            for name, value in given["optimizer"].get("params", {}).items()
            if name == "torch_adam"
        }
        given["optimizer"] = {"type": "AdamW", "params": flags | kept}
    return _merge(ours, given)


def _of_flags(config: TrainConfig) -> Settings:
    """What a file's optimizer and scheduler would have to say if they were to say what the flags do."""
    kinds = {schedule: kind for kind, schedule in SCHEDULES.items()}
    steps = {"warmup_max_lr": config.learning_rate, "warmup_num_steps": config.warmup}
    numbers = {"betas": list(config.betas), "weight_decay": config.weight_decay}
    return {
        "optimizer": {"params": {"lr": config.learning_rate, **numbers}},
        "scheduler": {"type": kinds.get(config.schedule, config.schedule), "params": steps},
    }


def _check(config: TrainConfig, precision: str) -> None:
    if config.deepspeed_stage == 0 and config.cpu_offload:
        raise UserError(
            "--cpu_offload with --deepspeed_stage 0: nothing is sharded there; use stage 1, 2 or 3",
            code="flags-conflict",
        )
    if config.deepspeed_stage == 0 and precision == "fp16":
        raise UserError(
            "--precision fp16 with --deepspeed_stage 0: DeepSpeed keeps no fp32 weights there; "
            "use stage 1, 2 or 3, "
            "or --strategy ddp",
            code="flags-conflict",
        )


def _generated(
    config: TrainConfig, precision: str, world_size: int, num_parameters: int
) -> Settings:
    bucket = min(LARGEST_BUCKET, num_parameters + num_parameters % 2)  # DeepSpeed wants it even
    zero: Settings = {
        "stage": config.deepspeed_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if config.activation_checkpointing == "selective":
        # DeepSpeed's linear layer adds the bias to the product in place, so a product kept by
        # checkpointing would get it twice.
        zero["memory_efficient_linear"] = False
    if config.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if config.deepspeed_stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": config.batch_size * config.gradient_accumulation * world_size,
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "gradient_clipping": config.clip_norm,
        "zero_optimization": zero,
        "torch_autocast": {"enabled": precision == "bf16", "dtype": "bfloat16"},
        "bf16": {"enabled": False},
        # The same loss scale as the other strategies: it begins at 2^16 and doubles after 2,000
        # good steps.
        "fp16": {
            "enabled": precision == "fp16",
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
        },
        # Every strategy uses PyTorch's AdamW. DeepSpeed calls it untested; our tests cover it.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _merge(ours: Settings, given: Settings) -> Settings:
    merged = dict(ours)
    for name, value in given.items():
        inner = merged.get(name)
        merged[name] = (
            _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
        )
    return merged
