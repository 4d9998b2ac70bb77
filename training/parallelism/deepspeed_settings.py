"""DeepSpeed's JSON settings, made from the typed configuration, or the user's file completed by it.

Source: deepspeed.ai/docs/config-json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from training.config import TrainConfig

Settings = dict[str, Any]

# Elements reduced or gathered at once. DeepSpeed's default of 500,000,000 would cost a small model a 2 GB buffer.
LARGEST_BUCKET = 50_000_000

# What a file may repeat but not contradict, and the flag that sets it.
FLAGS = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "gradient_clipping": "clip_norm",
    "zero_optimization.stage": "deepspeed_stage",
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
    "scheduler",
    "sequence_parallel_size",
    "tensor_parallel",
)


def deepspeed_settings(config: TrainConfig, precision: str, world_size: int, num_parameters: int) -> Settings:
    """All settings for DeepSpeed; ``num_parameters`` is that of the whole model: no bucket is larger.

    Raises:
        UserError: the file cannot be read or contradicts a flag, or the stage does not support offload or fp16.
    """
    _check(config, precision)
    given = _read(config, config.deepspeed_config) if config.deepspeed_config else {}
    ours = _generated(config, precision, world_size, num_parameters)
    # In bf16 a file may ask for DeepSpeed's own mode, with bf16 weights, instead of autocast.
    if precision == "bf16" and _look_up(given, "bf16.enabled"):
        ours |= {"bf16": {"enabled": True, "check_grad_overflow": True}, "torch_autocast": {"enabled": False}}
    for path, flag in FLAGS.items():
        mine, theirs = _look_up(ours, path), _look_up(given, path)
        if None not in (mine, theirs) and mine != theirs:
            raise UserError(
                f"--deepspeed_config {config.deepspeed_config}: {path} is {json.dumps(theirs)}, and "
                f"--{flag} {str(getattr(config, flag)).lower()} makes it {json.dumps(mine)}: make them equal, "
                "or leave it out of the file",
                code="deepspeed-config",
            )
    return _merge(ours, given)


def _check(config: TrainConfig, precision: str) -> None:
    if config.deepspeed_stage == 0 and config.cpu_offload:
        raise UserError(
            "--cpu_offload with --deepspeed_stage 0: nothing is sharded there; use stage 1, 2 or 3",
            code="flags-conflict",
        )
    if config.deepspeed_stage == 0 and precision == "fp16":
        raise UserError(
            "--precision fp16 with --deepspeed_stage 0: DeepSpeed keeps no fp32 weights there; use stage 1, 2 or 3, "
            "or --strategy ddp",
            code="flags-conflict",
        )


def _generated(config: TrainConfig, precision: str, world_size: int, num_parameters: int) -> Settings:
    bucket = min(LARGEST_BUCKET, num_parameters + num_parameters % 2)  # DeepSpeed wants it even
    zero: Settings = {
        "stage": config.deepspeed_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if config.activation_checkpointing == "selective":
        # DeepSpeed's linear layer adds the bias to the product in place, so a product kept by checkpointing would get
        # it twice.
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
        # The same loss scale as the other strategies: it begins at 2^16 and doubles after 2,000 good steps.
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1},
        # Every strategy uses PyTorch's AdamW. DeepSpeed calls it untested; our tests cover it.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _read(config: TrainConfig, path: Path) -> Settings:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--deepspeed_config {path}: {error.strerror}", code="deepspeed-config") from error
    except ValueError as error:
        raise UserError(f"--deepspeed_config {path}: not valid JSON: {error}", code="deepspeed-config") from error
    if not isinstance(settings, dict):
        raise UserError(
            f'--deepspeed_config {path}: must hold fields, such as {{"zero_optimization": {{"stage": 2}}}}',
            code="deepspeed-config",
        )
    settings = _without_auto(settings)
    for name in sorted(settings.keys() & set(REFUSED)):
        raise UserError(
            f"--deepspeed_config {path}: {name} cannot be set in a file: the trainer's flags decide it; remove it",
            code="deepspeed-config",
        )
    if "optimizer" in settings:
        settings["optimizer"] = _adamw(config, path, settings["optimizer"])
    return settings


def _adamw(config: TrainConfig, path: Path, section: Any) -> Settings:
    """The settings of one of DeepSpeed's own optimizers, with the same numbers as PyTorch's."""
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), dict):
        raise UserError(
            f"--deepspeed_config {path}: optimizer and its params: must be objects with fields", code="deepspeed-config"
        )
    kind = section.get("type")
    if str(kind).lower() not in ("adam", "adamw"):
        raise UserError(
            f"--deepspeed_config {path}: optimizer.type is {kind}: only AdamW is trained with here",
            code="deepspeed-config",
        )
    if set(section.get("params", {})) - {"torch_adam"}:
        names = ", ".join(section["params"])
        raise UserError(
            f"--deepspeed_config {path}: optimizer.params ({names}): leave them out; --learning_rate, "
            "--weight_decay, --betas and --epsilon set them",
            code="deepspeed-config",
        )
    ours = {"lr": 0.0, "betas": list(config.betas), "eps": config.epsilon}
    return {"type": "AdamW", "params": {**ours, **section.get("params", {})}}


def _without_auto(settings: Settings) -> Settings:
    """Drop ``auto``, with which files for other trainers say that a flag decides."""
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value != "auto"
    }


def _look_up(settings: Mapping[str, Any], path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _merge(ours: Settings, given: Settings) -> Settings:
    merged = dict(ours)
    for name, value in given.items():
        inner = merged.get(name)
        merged[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
