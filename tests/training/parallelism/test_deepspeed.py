"""DeepSpeed's engine on real ranks computes what one process computes, and its state is any other strategy's."""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.parallelism.ranks import here, run_on_ranks
from training.batching import pad, rank_share
from training.config import TrainConfig
from training.distributed import Ranks
from training.model import NewsClassifier
from training.parallelism.ddp import DDPStrategy
from training.parallelism.deepspeed import DeepSpeedStrategy
from training.tokenized import TokenizedRows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("deepspeed"), reason='needs the extra: pip install "distrinews[deepspeed]"'),
]

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
STEPS, FIRST, LAST = range(1, 4), range(1, 3), range(3, 4)
LEARNING_RATE = 1e-3
State = dict[str, Any]
Fields = dict[str, Any]


def _config(**fields: Any) -> TrainConfig:
    return TrainConfig(model="tiny", device="cpu", precision="fp32", clip_norm=0.5, **fields)


def _model() -> NewsClassifier:
    torch.manual_seed(0)
    # Five labels do not divide by two ranks: the last part of a tensor is padded.
    return NewsClassifier(5, "tiny", label_names=list("abcde"), vocab_size=64)


def _rows() -> TokenizedRows:
    generator = np.random.default_rng(1)
    lengths = generator.integers(3, 12, 24).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = generator.integers(5, 64, offsets[-1]).astype(np.int32)
    return TokenizedRows(ids, offsets, generator.integers(0, 5, 24).astype(np.int64), 0)


def _train(strategy: Any, fields: Fields, steps: range) -> dict[str, Any]:
    """This rank's shares of the losses, the norms and the first step's first moments, over batches of 7 rows."""
    made: dict[str, Any] = {"losses": [], "norms": []}
    for step in steps:
        batch = np.arange(7 * (step - 1), 7 * step)
        share = rank_share(_rows(), batch, strategy.place, fields.get("gradient_accumulation", 1))
        result = strategy.step(share, step, LEARNING_RATE)
        made["losses"].append(float(result.loss))
        made["norms"].append(float(result.grad_norm))
        if step == steps[0]:
            made["first"] = copy.deepcopy(strategy.state_dict())
    return made | {"state": strategy.state_dict(), "logits": _logits(strategy)}


def _logits(strategy: Any) -> torch.Tensor:
    ids, mask = pad(_rows(), np.arange(4), 11)
    return strategy.logits(ids, mask, "fp32")


def _alone(fields: Fields, state: State | None = None, steps: range = STEPS) -> dict[str, Any]:
    strategy = DDPStrategy(_model(), _config(**fields), ALONE, "fp32")
    if state:
        strategy.load_state_dict(state)
    return _train(strategy, fields, steps)


def _together(fields: Fields, state_file: Path | None = None, steps: range = STEPS) -> dict[str, Any]:
    strategy = DeepSpeedStrategy(_model(), _config(strategy="deepspeed", **fields), here(), "fp32")
    if state_file:
        strategy.load_state_dict(torch.load(state_file))
    return _train(strategy, fields, steps)


def _all_together(all_fields: list[Fields], *arguments: Any) -> list[dict[str, Any]]:
    return [_together(fields, *arguments) for fields in all_fields]


def _distance(mine: State, theirs: State, moment: str = "") -> float:
    """Of all tensors together, relative: biases of keys have no gradient, so alone they are noise."""

    def flat(states: State) -> torch.Tensor:
        tensors = [states[name][moment] if moment else states[name] for name in sorted(states)]
        return torch.cat([tensor.double().flatten() for tensor in tensors])

    assert sorted(mine) == sorted(theirs)
    return float((flat(mine) - flat(theirs)).norm() / flat(theirs).norm())


def _assert_equal(rank_0: dict[str, Any], rank_1: dict[str, Any], alone: dict[str, Any]) -> None:
    losses = [sum(shares) for shares in zip(rank_0["losses"], rank_1["losses"], strict=True)]
    assert losses == pytest.approx(alone["losses"], rel=1e-5)
    assert rank_0["norms"] == rank_1["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    # Clipped gradients times 0.1, then 0.001 of their squares.
    for moment in ("exp_avg", "exp_avg_sq"):
        assert _distance(rank_0["first"]["optimizer"], alone["first"]["optimizer"], moment) < 1e-6
    mine, theirs = rank_0["state"], alone["state"]
    assert _distance(mine["optimizer"], theirs["optimizer"], "exp_avg") < 1e-5
    assert _distance(mine["optimizer"], theirs["optimizer"], "step") == 0
    assert _distance(mine["model"], theirs["model"]) < 1e-6
    torch.testing.assert_close(rank_0["logits"], alone["logits"], rtol=1e-5, atol=1e-5)
    assert rank_1["state"]["model"] == rank_1["state"]["optimizer"] == {}


PLAIN = [
    {"deepspeed_stage": stage, "gradient_accumulation": accumulation}
    for stage in (0, 1, 2, 3)
    for accumulation in (1, 2)
]
OFFLOADED = [{"deepspeed_stage": stage, "gradient_accumulation": 2, "cpu_offload": True} for stage in (1, 2, 3)]


def test_every_stage_computes_what_one_process_computes_with_and_without_accumulation() -> None:
    alone = {accumulation: _alone({"gradient_accumulation": accumulation}) for accumulation in (1, 2)}
    for fields, *ranks in zip(PLAIN, *run_on_ranks(2, _all_together, PLAIN), strict=True):
        _assert_equal(*ranks, alone[fields["gradient_accumulation"]])


def test_offload_to_memory_changes_no_number() -> None:
    alone = _alone({"gradient_accumulation": 2})
    for ranks in zip(*run_on_ranks(2, _all_together, OFFLOADED), strict=True):
        _assert_equal(*ranks, alone)


def test_every_stage_goes_on_from_the_state_of_one_process(tmp_path: Path) -> None:
    whole, state_file = _alone({}), tmp_path / "state.pt"
    torch.save(_alone({}, steps=FIRST)["state"], state_file)
    for rank_0, rank_1 in zip(*run_on_ranks(2, _all_together, PLAIN[::2], state_file, LAST), strict=True):
        assert rank_0["losses"][0] + rank_1["losses"][0] == pytest.approx(whole["losses"][2], rel=1e-5)
        assert _distance(rank_0["state"]["model"], whole["state"]["model"]) < 1e-6
        assert _distance(rank_0["state"]["optimizer"], whole["state"]["optimizer"], "exp_avg_sq") < 1e-5
        assert _distance(rank_0["state"]["optimizer"], whole["state"]["optimizer"], "step") == 0


def test_one_process_goes_on_from_the_state_of_every_stage() -> None:
    whole = _alone({})
    for rank_0 in run_on_ranks(2, _all_together, PLAIN[::2], None, FIRST)[0]:
        went_on = _alone({}, rank_0["state"], LAST)
        assert went_on["losses"][0] == pytest.approx(whole["losses"][2], rel=1e-5)
        assert _distance(went_on["state"]["model"], whole["state"]["model"]) < 1e-6
