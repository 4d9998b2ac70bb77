"""BatchNorm in a network of one's own: all ranks keep the same running statistics, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from common.errors import TrainingFailure
from tests.processes import here, run_on_ranks
from tests.training.parallelism.small_runs import take_steps
from training.config import TrainConfig
from training.distributed.failures import translate_errors
from training.model.classifier import NewsClassifier
from training.monitoring.replicas import first_difference
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy
from training.tasks import Classification

MEAN = "network.norm.running_mean"


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1024, 16)
        self.norm = nn.BatchNorm1d(16)
        self.scores = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        words = self.words(ids) * mask[..., None]
        return self.scores(self.norm(words.sum(1) / mask.sum(1, keepdim=True)))


def _strategy(precision: str = "fp32", **fields: Any) -> Strategy:
    torch.manual_seed(1)
    config = TrainConfig(**fields)
    model = NewsClassifier.around(WithBatchNorm(), Classification(["a", "b", "c", "d"]))
    return STRATEGIES[config.strategy](model, config, here(), precision)


def _after_steps(fields: dict[str, Any], accumulation: int) -> tuple[str, torch.Tensor, dict[str, torch.Tensor]]:
    strategy = _strategy(**fields)
    before = strategy.buffers[MEAN].clone()
    take_steps(strategy, [1, 2, 3], accumulation=accumulation)
    assert not torch.equal(strategy.buffers[MEAN], before)
    difference = str(first_difference({**strategy.parameters, **strategy.buffers}, here()))
    token = torch.ones(1, 3, dtype=torch.int64)
    # Every rank evaluates and saves with the same statistics.
    saved = {name: tensor.clone() for name, tensor in strategy.state_dict().tensors.items() if MEAN in name}
    return difference, strategy.logits(token, token, "fp32"), saved


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "ddp"},
        {"strategy": "ddp", "ema": 0.5, "deterministic": True},
        pytest.param({"strategy": "ddp", "compress": "fp16"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "zero1"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "zero2"}, marks=pytest.mark.slow),
        {"strategy": "zero3"},
        pytest.param({"strategy": "zero3", "precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_weights_and_running_statistics_are_the_same_on_all_ranks(fields: dict[str, Any], accumulation: int) -> None:
    (first, logits, saved), (second, other_logits, other_saved) = run_on_ranks(2, _after_steps, fields, accumulation)

    assert (first, second) == ("None", "None")
    assert torch.equal(logits, other_logits)
    assert saved
    assert all(torch.equal(tensor, other_saved[name]) for name, tensor in saved.items())
    assert (f"average/{MEAN}" in saved) == ("ema" in fields)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_keeps_the_same_running_statistics(stage: int) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is an extra")
    assert run_on_ranks(2, _deepspeed, stage) == ["None", "None"]


def _deepspeed(stage: int) -> str:
    strategy = _strategy(strategy="deepspeed", deepspeed_stage=stage)
    take_steps(strategy, [1, 2, 3])
    return str(first_difference(strategy.buffers, here()))


def _drifted() -> str:
    strategy = _strategy()
    take_steps(strategy, [1])
    if here().rank == 1:
        strategy.buffers[MEAN][3] += 1e-6
    return str(first_difference({**strategy.parameters, **strategy.buffers}, here()))


def test_a_running_mean_that_drifts_is_named() -> None:
    assert run_on_ranks(2, _drifted) == [f"{MEAN} is not the same on ranks 0 and 1"] * 2


def _one_row() -> str:
    strategy = _strategy()
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(TrainingFailure) as failure, translate_errors(here(), 7):
        strategy.forward(ids, ids)
    return str(failure.value)


def test_a_micro_batch_of_one_row_is_refused_in_one_line() -> None:
    message = run_on_ranks(2, _one_row)[1]
    assert message.startswith("step 7: BatchNorm cannot train on a single row, which is all that rank 1 has")
