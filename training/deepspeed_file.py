"""A user's DeepSpeed JSON file, and the trainer's flags that its fields stand for.

Files that were written for DeepSpeed's own training loop hold what flags say here: batch size,
optimizer, learning rate. Such a field is the flag's value, unless the flag itself is given. Source:
deepspeed.ai/docs/config-json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from training.facts import EPSILON

Settings = dict[str, Any]

# The flag of each field that means the same.
FLAGS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "gradient_clipping": "clip_norm",
    "zero_optimization.stage": "deepspeed_stage",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "betas",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup",
}

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

# What a scheduler may say beside the fields above. The rate rises linearly in any case, and falls
# until the run ends.
IGNORED = {"warmup_type", "total_num_steps"}
ZERO = {"warmup_min_lr", "warmup_min_ratio"}
# DeepSpeed's defaults, of which the last one is as good as zero.
DEFAULTS = {"warmup_max_lr": 0.001, "warmup_num_steps": 1000, "cos_min_ratio": 0.0001}


def read_file(path: Path) -> Settings:
    """The fields of a file, without those that are ``"auto"``, with which a file leaves them to the
    flags.

    Raises:
        UserError: it cannot be read, or sets something that the trainer does not do.
    """
    what = f"--deepspeed_config {path}"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}", code="deepspeed-config") from error
    except ValueError as error:
        raise UserError(f"{what}: not valid JSON: {error}", code="deepspeed-config") from error
    if not isinstance(settings, dict):
        raise UserError(
            f'{what}: must hold fields, such as {{"zero_optimization": {{"stage": 2}}}}',
            code="deepspeed-config",
        )
    settings = _without_auto(settings)
    if isinstance(settings.get("zero_optimization"), bool):  # as older files say it
        settings["zero_optimization"] = {"stage": int(settings["zero_optimization"])}
    for section in ("optimizer", "scheduler"):
        if section in settings:
            _check_section(settings[section], f"{what}: {section}")
    if "optimizer" in settings:
        _check_optimizer(settings["optimizer"], what)
    if "scheduler" in settings:
        # The scheduler comes with its defaults from here on. If it names a rate, DeepSpeed uses
        # that instead of the optimizer's, so only one of the two may reach --learning_rate.
        settings["scheduler"] = _checked_scheduler(settings["scheduler"], what)
        if "warmup_max_lr" in settings["scheduler"]["params"]:
            settings.get("optimizer", {}).get("params", {}).pop("lr", None)
    return settings


def flags_of_file(path: Path, num_ranks: int) -> dict[str, Any]:
    """The flags that a file sets, by name; what it says of the global batch is for this number of ranks."""
    settings = read_file(path)
    flags = {
        flag: value
        for name, flag in FLAGS.items()
        if (value := look_up(settings, name)) is not None
    }
    if "scheduler" in settings:
        flags["schedule"] = SCHEDULES[settings["scheduler"]["type"]]
    for precision in ("fp16", "bf16"):
        if look_up(settings, f"{precision}.enabled"):
            flags["precision"] = precision
    # The global batch has no flag of its own: it is what the other two give on so many ranks. If
    # the file has both, nothing is left to derive.
    total = settings.get("train_batch_size")
    if isinstance(total, int) and {"batch_size", "gradient_accumulation"} - flags.keys():
        # DeepSpeed derives whichever of the two is missing, and takes an accumulation of 1 if both
        # are.
        missing = "batch_size" if "batch_size" not in flags else "gradient_accumulation"
        known = num_ranks * int(flags.get("batch_size", flags.get("gradient_accumulation", 1)))
        if known < 1 or total % known or total < known:
            raise UserError(
                f"--deepspeed_config {path}: train_batch_size {total} is not divisible by "
                f"{num_ranks} ranks"
                f"{f' and the other factors, together {known}' if known != num_ranks else ''}",
                code="deepspeed-config",
            )
        flags[missing] = total // known
    return flags


def look_up(settings: Mapping[str, Any], path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _check_section(section: Any, what: str) -> None:
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), dict):
        raise UserError(
            f"{what} and its params: must be objects with fields", code="deepspeed-config"
        )


def _check_optimizer(section: Settings, what: str) -> None:
    kind = section.get("type")
    if str(kind).lower() not in ("adam", "adamw"):
        raise UserError(
            f"{what}: optimizer.type is {kind}: this trainer uses only AdamW",
            code="deepspeed-config",
        )
    # What is not known is refused, not ignored: a user would believe in a setting that does
    # nothing.
    known = {name.rpartition(".")[2] for name in FLAGS if name.startswith("optimizer.")} | {
        "eps",
        "torch_adam",
    }
    params = section.get("params", {})
    if unknown := sorted(params.keys() - known):
        raise UserError(
            f"{what}: optimizer.params.{unknown[0]}: not supported here; leave it out "
            f"({', '.join(sorted(known))} are "
            "supported)",
            code="deepspeed-config",
        )
    if (eps := params.get("eps", EPSILON)) != EPSILON:
        raise UserError(
            f"{what}: optimizer.params.eps is {eps}: this trainer's AdamW always has {EPSILON:g}; "
            "leave it out",
            code="deepspeed-config",
        )


def _checked_scheduler(section: Settings, what: str) -> Settings:
    """A scheduler with its defaults, if a flag can say the same."""
    kind, params = section.get("type"), section.get("params", {})
    if kind not in SCHEDULES:
        raise UserError(
            f"{what}: scheduler.type is {kind}: must be one of {', '.join(SCHEDULES)}; for others "
            "use --schedule",
            code="deepspeed-config",
        )
    names = {"warmup_num_steps", "cos_min_ratio" if kind == "WarmupCosineLR" else "warmup_max_lr"}
    if unknown := sorted(params.keys() - names - IGNORED - ZERO):
        raise UserError(
            f"{what}: scheduler.params.{unknown[0]}: not supported here; leave it out",
            code="deepspeed-config",
        )
    for name in sorted(params.keys() & ZERO):
        if params[name] != 0:
            raise UserError(
                f"{what}: scheduler.params.{name} is {params[name]}: the learning rate begins at "
                "0 here",
                code="deepspeed-config",
            )
    if params.get("cos_min_ratio", 0) > DEFAULTS["cos_min_ratio"]:
        raise UserError(
            f"{what}: scheduler.params.cos_min_ratio is {params['cos_min_ratio']}: the learning "
            "rate ends at 0 here",
            code="deepspeed-config",
        )
    return {
        "type": kind,
        "params": {name: params.get(name, DEFAULTS[name]) for name in sorted(names)},
    }


def _without_auto(settings: Settings) -> Settings:
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if value != "auto"
    }
