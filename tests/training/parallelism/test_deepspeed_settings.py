"""DeepSpeed's JSON says what the flags say, and a file may add to it but not contradict."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from training.config import TrainConfig, parse_config
from training.parallelism.deepspeed_settings import LARGEST_BUCKET, deepspeed_settings


def _settings(precision: str = "fp32", world_size: int = 2, num_parameters: int = 10**9, **fields: Any) -> dict:
    return deepspeed_settings(TrainConfig(strategy="deepspeed", **fields), precision, world_size, num_parameters)


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[[Any], Path]:
    """`file_of(settings)`: a JSON file that holds them."""

    def write(settings: Any) -> Path:
        path = tmp_path / "deepspeed.json"
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return path

    return write


def test_the_flags_alone_say_stage_batch_clipping_and_precision() -> None:
    settings = _settings(
        "bf16", world_size=4, batch_size=8, gradient_accumulation=2, clip_norm=0.5, deepspeed_stage=3, cpu_offload=True
    )
    assert settings["zero_optimization"]["stage"] == 3
    assert settings["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert settings["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert settings["train_batch_size"] == 64
    assert settings["train_micro_batch_size_per_gpu"] == 8
    assert settings["gradient_clipping"] == 0.5
    assert (settings["torch_autocast"]["enabled"], settings["fp16"]["enabled"]) == (True, False)


def test_buckets_are_no_larger_than_the_model() -> None:
    assert _settings(num_parameters=1001)["zero_optimization"]["reduce_bucket_size"] == 1002
    assert _settings()["zero_optimization"]["reduce_bucket_size"] == LARGEST_BUCKET


def test_a_file_adds_fields_and_leaves_the_rest_to_the_flags(file_of: Callable) -> None:
    file = file_of({"zero_optimization": {"stage": "auto", "overlap_comm": True}, "train_batch_size": "auto"})
    settings = _settings(deepspeed_config=file, deepspeed_stage=1)
    assert settings["zero_optimization"]["overlap_comm"] is True
    assert settings["zero_optimization"]["stage"] == 1
    assert settings["train_batch_size"] == 64


def test_a_file_may_ask_for_weights_in_bf16_where_the_run_is_in_bf16(file_of: Callable) -> None:
    settings = _settings("bf16", deepspeed_config=file_of({"bf16": {"enabled": True}}))
    assert (settings["bf16"]["enabled"], settings["torch_autocast"]["enabled"]) == (True, False)


def test_an_optimizer_of_deepspeed_gets_the_numbers_of_the_flags(file_of: Callable) -> None:
    settings = _settings(deepspeed_config=file_of({"optimizer": {"type": "adamw"}}))
    assert settings["optimizer"] == {"type": "AdamW", "params": {"lr": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"zero_optimization": {"stage": 3}}, ("zero_optimization.stage is 3", "--deepspeed_stage 2 makes it 2")),
        ({"gradient_clipping": 5}, ("gradient_clipping is 5", "--clip_norm 1.0 makes it 1.0")),
        ({"train_batch_size": 7}, ("train_batch_size is 7", "--batch_size 32 makes it 64")),
        ({"bf16": {"enabled": True}}, ("bf16.enabled is true", "--precision auto makes it false")),
        ({"elasticity": {}}, ("elasticity cannot be set", "remove it")),
        ({"scheduler": {"type": "OneCycle"}}, ("scheduler.type is OneCycle", "WarmupLR, WarmupDecayLR")),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}}}, ("warmup_min_lr is 1e-05",)),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"steps": 1}}}, ("scheduler.params.steps: not supported",)),
        ({"optimizer": {"type": "Lion"}}, ("optimizer.type is Lion", "only AdamW")),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, ("optimizer.params.amsgrad: not supported",)),
        ({"optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}, ("optimizer.params.eps is 1e-06", "leave it out")),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, ("params.lr is 1e-05", "makes it 2e-05")),
        ("[1, 2]", ("must hold fields",)),
        ("{", ("not valid JSON",)),
    ],
)
def test_a_file_that_contradicts_is_refused_in_one_line_naming_both(
    given: Any, words: tuple[str, ...], file_of: Callable
) -> None:
    file = file_of(given)
    with pytest.raises(UserError) as error:
        _settings(deepspeed_config=file, learning_rate=2e-5)
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith(f"--deepspeed_config {file}: ")
    for word in words:
        assert word in line


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: No such file"):
        _settings(deepspeed_config=Path("nowhere.json"))


def test_stage_0_knows_no_offload_and_no_fp16() -> None:
    with pytest.raises(UserError, match="--cpu_offload with --deepspeed_stage 0"):
        _settings(deepspeed_stage=0, cpu_offload=True)
    with pytest.raises(UserError, match="--precision fp16 with --deepspeed_stage 0"):
        _settings("fp16", deepspeed_stage=0)


# The first file of DeepSpeed's "Getting started", and the fields of its page on the configuration.
FIRST_FILE = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "fp16": {"enabled": True},
    "zero_optimization": True,
}
OPTIMIZER = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}
MEMORY = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}


def _parsed(file: Path, *flags: str, num_ranks: int = 2) -> TrainConfig:
    arguments = ["--strategy", "deepspeed", "--deepspeed_config", str(file), *flags]
    return parse_config(arguments, {"WORLD_SIZE": str(num_ranks)})


def test_the_file_of_deepspeed_s_own_documentation_is_taken(file_of: Callable) -> None:
    config = _parsed(file_of(FIRST_FILE))
    assert (config.batch_size, config.gradient_accumulation, config.deepspeed_stage) == (4, 1, 1)
    assert (config.learning_rate, config.precision) == (0.00015, "fp16")
    settings = deepspeed_settings(config, "fp16", 2, 1000)
    assert settings["train_batch_size"] == 8
    assert settings["zero_optimization"]["stage"] == 1
    assert settings["fp16"]["enabled"] is True
    assert settings["optimizer"]["params"]["lr"] == 0.0  # the trainer sets it before each step


def test_optimizer_and_scheduler_of_a_file_become_flags(file_of: Callable) -> None:
    config = _parsed(file_of({"optimizer": OPTIMIZER, "scheduler": SCHEDULER, "zero_optimization": MEMORY}))
    assert (config.learning_rate, config.betas, config.weight_decay) == (0.001, (0.8, 0.999), 3e-7)
    assert (config.schedule, config.warmup, config.deepspeed_stage) == ("constant", 1000, 3)
    settings = deepspeed_settings(config, "fp32", 2, 1000)
    assert "scheduler" not in settings
    assert settings["optimizer"]["params"]["betas"] == [0.8, 0.999]
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "nvme"


@pytest.mark.parametrize(
    ("scheduler", "schedule", "warmup", "learning_rate"),
    [
        ({"type": "WarmupLR"}, "constant", 1000, 0.001),
        ({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 5e-5, "total_num_steps": 9}}, "linear", 1000, 5e-5),
        ({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7}}, "cosine", 7, None),
    ],
)
def test_each_scheduler_is_the_schedule_that_means_it(
    scheduler: dict, schedule: str, warmup: int, learning_rate: float | None, file_of: Callable
) -> None:
    config = _parsed(file_of({"scheduler": scheduler}))
    assert (config.schedule, config.warmup, config.learning_rate) == (schedule, warmup, learning_rate)
    deepspeed_settings(config, "fp32", 2, 1000)


@pytest.mark.parametrize(
    ("fields", "batch_size", "accumulation"),
    [
        ({"train_batch_size": 32}, 8, 1),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, 2),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 2, 4),
    ],
)
def test_the_factors_of_the_global_batch_follow_as_in_deepspeed(
    fields: dict, batch_size: int, accumulation: int, file_of: Callable
) -> None:
    config = _parsed(file_of(fields), num_ranks=4)
    assert (config.batch_size, config.gradient_accumulation) == (batch_size, accumulation)


def test_a_flag_that_is_given_counts_and_a_file_that_contradicts_it_is_refused(file_of: Callable) -> None:
    file = file_of({"train_batch_size": 8, "optimizer": OPTIMIZER})
    config = _parsed(file, "--learning_rate", "3e-5")
    assert (config.learning_rate, config.batch_size) == (3e-5, 4)
    with pytest.raises(UserError, match=r"optimizer.params.lr is 0.001, and --learning_rate 3e-05 makes it 3e-05"):
        deepspeed_settings(config, "fp32", 2, 1000)


def test_a_value_of_a_file_that_no_flag_can_have_names_the_file(file_of: Callable) -> None:
    with pytest.raises(UserError, match=r"--deepspeed_config .*: clip_norm -1: must be at least 0"):
        _parsed(file_of({"gradient_clipping": -1}))
    with pytest.raises(UserError, match="train_batch_size 9 is not divisible by 2 ranks"):
        _parsed(file_of({"train_batch_size": 9}))
