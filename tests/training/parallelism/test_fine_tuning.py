"""Layers at different rates, frozen layers and averaged weights are the same however the model is distributed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from tests.processes import here, run_on_ranks
from tests.training.checkpointing.small_saves import save_now, saver_into
from tests.training.parallelism.cases import ALONE, SPREAD
from tests.training.parallelism.small_models import small_batch, small_model
from tests.training.parallelism.small_runs import take_steps
from training.checkpointing.resume import open_checkpoint
from training.config import TrainConfig
from training.distributed.ranks import Ranks
from training.model.layers import freeze_layers
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import Strategy

TUNED = {"layer_decay": 0.7, "betas": (0.8, 0.98), "ema": 0.9, "freeze": "1"}
FULL = {"activation_checkpointing": "full"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "powersgd": {"strategy": "ddp", "compress": "powersgd:2"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3", **FULL},
    "offloaded": {"strategy": "zero3", "cpu_offload": True},
    "copied": {"strategy": "zero3", "dp_shard": 2},
    "tp": {"strategy": "tp", "sequence_parallel": True},
    "pp": {"strategy": "pp"},
    "zero_bubble": {"strategy": "3d", "pp": 2, "pp_schedule": "zero_bubble"},
    "3d": {"strategy": "3d", "pp": 2, "tp": 2, **FULL},
}
Found = tuple[list[float], list[torch.Tensor]]


def _strategy(ranks: Ranks, **fields: Any) -> Strategy:
    config = TrainConfig(deterministic=True, gradient_accumulation=4, max_length=48, **(TUNED | fields))
    model = small_model("distilbert", 0.1, layers=8, spread=SPREAD)
    freeze_layers(model.network, config)
    return STRATEGIES[config.strategy](model, config, ranks, "fp32")


def _logits(strategy: Strategy) -> torch.Tensor:
    """Of the weights and then of their average, (2, rows, labels)."""
    ids, mask, _ = small_batch()
    own = strategy.logits(ids, mask, "fp32")
    with strategy.averaged():
        return torch.stack([own, strategy.logits(ids, mask, "fp32")])


def _through_checkpoints(folder: Path, names: list[str]) -> Found:
    """Losses and logits of a run that goes from layout to layout, two steps on each."""
    path, losses, logits = None, [], []
    for number, name in enumerate(names):
        strategy = _strategy(here(), **LAYOUTS[name])
        if path:
            strategy.load_state_dict(open_checkpoint(path, here()).tensors)
        losses += take_steps(strategy, [2 * number + 1], accumulation=4)
        logits.append(_logits(strategy))
        losses += take_steps(strategy, [2 * number + 2], accumulation=4)  # trains on with the weights, not the average
        saver = saver_into(folder)
        path = save_now(saver, 2 * number + 2, strategy.state_dict())
        saver.close()
    return losses, logits


def _alone(layouts: int) -> Found:
    strategy, losses, logits = _strategy(ALONE), [], []
    for number in range(layouts):
        losses += take_steps(strategy, [2 * number + 1], accumulation=4, ranks=ALONE)
        logits.append(_logits(strategy))
        losses += take_steps(strategy, [2 * number + 2], accumulation=4, ranks=ALONE)
    return losses, logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["ddp", "zero3", "pp"]),
        (4, ["zero1", "zero2", "3d", "offloaded", "zero_bubble", "copied"]),
        (2, ["tp", "zero2", "tp", "zero1"]),
    ],
)
def test_a_run_goes_from_layout_to_layout_as_one_process_trains(
    world_size: int, names: list[str], tmp_path: Path
) -> None:
    losses, logits = run_on_ranks(world_size, _through_checkpoints, tmp_path, names)[0]

    expected_losses, expected = _alone(len(names))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert all((own - averaged).abs().max() > 5e-4 for own, averaged in expected)


def _held(name: str) -> tuple[dict[str, bool], set[str], bool]:
    """Of this rank's parameters, which a step changes; the names of its state; whether averaging it left it as is."""
    strategy = _strategy(here(), **LAYOUTS[name])
    before = {key: _own(tensor) for key, tensor in strategy.state_dict().tensors.items()}
    take_steps(strategy, [1], accumulation=4)
    after = {key: _own(tensor) for key, tensor in strategy.state_dict().tensors.items()}
    with strategy.averaged():
        pass
    again = {key: _own(tensor) for key, tensor in strategy.state_dict().tensors.items()}
    changed = {key: not tensor.equal(after[key]) for key, tensor in before.items() if key.startswith("model/")}
    return changed, set(after), all(tensor.equal(again[key]) for key, tensor in after.items())


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).clone()


@pytest.mark.parametrize(
    "name", ["zero3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp", "powersgd", "pp"))]
)
def test_only_what_is_trained_changes_and_has_moments_and_an_average(name: str) -> None:
    frozen = re.compile(r"embeddings|layer\.0\.")
    for changed, held, is_restored in run_on_ranks(2, _held, name):
        trained = {key.removeprefix("model/") for key, is_changed in changed.items() if is_changed}
        assert trained
        assert not any(frozen.search(key) for key in trained)
        state = {key.split("/")[1] for key in held if key.startswith(("optimizer/", "average/"))}
        assert trained <= state
        assert not any(frozen.search(key) for key in state)
        assert is_restored


def _nothing_to_train() -> str:
    try:
        _strategy(here(), strategy="pp", freeze="4")
    except UserError as error:
        return error.line
    return ""


def test_a_pipeline_stage_without_anything_to_train_is_refused_on_all_ranks() -> None:
    for line in run_on_ranks(2, _nothing_to_train):
        assert "the first of 2 stages has blocks 1 to 4, and nothing in them is trained" in line
        assert line.endswith("[flags-conflict]")
