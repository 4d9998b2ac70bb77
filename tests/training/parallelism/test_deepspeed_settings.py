"""DeepSpeed's JSON says what the flags say, and a file may add to it but not contradict."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from training.config import TrainConfig
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
        ({"scheduler": {"type": "WarmupLR"}}, ("scheduler", "remove it")),
        ({"optimizer": {"type": "Lion"}}, ("optimizer.type is Lion", "only AdamW")),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, ("optimizer.params (lr)", "--learning_rate")),
        ("[1, 2]", ("must hold fields",)),
        ("{", ("not valid JSON",)),
    ],
)
def test_a_file_that_contradicts_is_refused_in_one_line_naming_both(
    given: Any, words: tuple[str, ...], file_of: Callable
) -> None:
    file = file_of(given)
    with pytest.raises(UserError) as error:
        _settings(deepspeed_config=file)
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
