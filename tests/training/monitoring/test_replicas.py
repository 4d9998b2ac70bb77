"""Copies that are no longer the same are noticed, whatever the layout, and the parameter and the ranks are named."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import TrainingFailure
from tests.processes import here, run_on_ranks
from tests.training.parallelism.small_runs import small_strategy, take_steps
from training.config import TrainConfig
from training.monitoring import Exporter
from training.monitoring.events import EventStream, RunStarted, StepDone, read_events
from training.monitoring.phases import Phases
from training.monitoring.replicas import CHUNK, ReplicaCheck, check_gradient_sync, checksum, first_difference

EMBEDDINGS = "network.distilbert.embeddings.word_embeddings.weight"
NORM = "network.distilbert.transformer.layer.1.sa_layer_norm.weight"


def _flip_a_bit(tensor: torch.Tensor) -> None:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_changes_with_any_bit_and_with_the_order_of_elements(dtype: torch.dtype) -> None:
    tensor = torch.randn(CHUNK + 5, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = checksum(tensor)

    for place in (0, 77, len(tensor) - 1):
        for bit in range(8 * tensor.element_size()):
            changed = tensor.clone()
            changed[place : place + 1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert checksum(changed) != expected, (place, bit)
    assert checksum(tensor.flip(0)) != expected
    assert checksum(tensor.clone()) == expected


def _named(fields: dict[str, Any], name: str, odd: int) -> tuple[str, str]:
    """What is found in a sound strategy, and after a bit of a parameter is flipped on one rank."""
    strategy = small_strategy(**fields)
    take_steps(strategy, [1, 2], accumulation=4 if strategy.data_shard.stages > 1 else 1)
    sound = first_difference(strategy.parameters, here())
    if here().rank == odd:
        _flip_a_bit(strategy.parameters[name])
    return str(sound), str(first_difference(strategy.parameters, here()))


@pytest.mark.parametrize(
    ("world_size", "fields", "name", "odd", "expected"),
    [
        pytest.param(
            *(2, {"strategy": "ddp"}, EMBEDDINGS, 1, "is not the same on ranks 0 and 1"), marks=pytest.mark.slow
        ),
        pytest.param(
            *(3, {"strategy": "zero1"}, NORM, 2, "on rank 2 is not that of ranks 0 and 1"), marks=pytest.mark.slow
        ),
        # Ranks 1 and 3 hold the second halves.
        pytest.param(
            *(4, {"strategy": "zero3", "dp_shard": 2}, EMBEDDINGS, 3, "is not the same on ranks 1 and 3"),
            marks=pytest.mark.slow,
        ),
        (2, {"strategy": "tp"}, NORM, 0, "is not the same on ranks 0 and 1"),
        # Copies of stages: ranks 0 and 1 the first, 2 and 3 the second, which has the second block's end.
        pytest.param(
            *(4, {"strategy": "pp", "pp": 2, "gradient_accumulation": 4}, EMBEDDINGS, 0),
            *("is not the same on ranks 0 and 1",),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(8, {"strategy": "3d", "tp": 2, "dp_shard": 2}, NORM, 5, "on rank 5 is not that of"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_flipped_bit_is_named_with_its_parameter_and_rank(
    world_size: int, fields: dict[str, Any], name: str, odd: int, expected: str
) -> None:
    for sound, found in run_on_ranks(world_size, _named, fields, name, odd):
        assert sound == "None"
        assert found.startswith(f"{name} {expected}")


def _go_astray(check: ReplicaCheck, strategy: Any) -> None:
    """Eight steps, after the third of which a bit of rank 1 flips."""
    check.receive(RunStarted(0, 8, []))
    for step in range(1, 9):
        take_steps(strategy, [step])
        if step == 3 and here().rank == 1:
            _flip_a_bit(strategy.parameters[NORM])
        check.receive(StepDone(step, []))


def _checked(folder: Path) -> tuple[str, list[float | None]]:
    """What ends a run that compares each second step, and what it has counted by then."""
    ranks, phases, strategy = here(), Phases(), small_strategy()
    events = EventStream(folder, ranks, phases)
    config = TrainConfig(check_replicas_every=2)
    with closing(Exporter(config, ranks, phases)) as exporter, events.recording():
        check = ReplicaCheck(strategy.parameters, config, ranks, phases, exporter, events)
        with pytest.raises(TrainingFailure) as failure:
            _go_astray(check, strategy)
    read, name = exporter.registry.get_sample_value, "distrinews_training_replica_checks_total"
    return str(failure.value), [read(name, {"outcome": outcome}) for outcome in ("equal", "different")]


def test_a_run_whose_copies_differ_ends_on_all_ranks_with_what_is_known(tmp_path: Path) -> None:
    for message, counted in run_on_ranks(2, _checked, tmp_path):
        expected = f"after step 4 the copies of the weights differ: {NORM} is not the same on ranks 0 and 1."
        assert message.startswith(expected)
        assert "They were the same after step 2." in message
        assert counted == [2, 1]
    assert [event["kind"] for event in read_events(tmp_path)].count("divergence") == 1


def _gradients_held_back(name: str) -> str:
    """What a step raises that is held to no reduction, after one that is as it should be."""
    strategy = small_strategy(strategy=name, check_gradient_sync=1)
    take_steps(strategy, [1])
    assert strategy.gradient_checks_left == 0
    strategy.gradient_checks_left = 1
    with strategy.no_sync(), pytest.raises(TrainingFailure) as failure:
        take_steps(strategy, [2])
    return str(failure.value)


def test_gradients_that_were_not_reduced_are_named_on_all_ranks() -> None:
    for message in run_on_ranks(2, _gradients_held_back, "ddp"):
        assert message.startswith(f"step 2: the gradients differ after their reduction: that of {EMBEDDINGS} is not")


def _compared_on_demand() -> str:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), float(here().rank == 2))
    check_gradient_sync({"other": torch.nn.Parameter(torch.zeros(3))}, here())
    with pytest.raises(TrainingFailure) as failure:
        check_gradient_sync({"weight": parameter}, here())
    return str(failure.value)


def test_gradients_can_be_compared_on_demand() -> None:
    for message in run_on_ranks(3, _compared_on_demand):
        assert message.startswith("the gradients differ after their reduction: that of weight on rank 2 is not that of")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.slow
def test_deepspeed_keeps_equal_copies(stage: int) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is an extra")
    assert run_on_ranks(2, _deepspeed, stage) == ["None", "None"]


def _deepspeed(stage: int) -> str:
    strategy = small_strategy(strategy="deepspeed", deepspeed_stage=stage)
    take_steps(strategy, [1, 2])
    return str(first_difference(strategy.parameters, here()))
