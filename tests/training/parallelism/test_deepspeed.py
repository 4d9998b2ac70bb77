"""DeepSpeed's engine on real ranks computes what one process computes, and its state is any other strategy's."""

import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from tests.processes import here, run_on_ranks
from tests.training.conftest import TRAINING, Run
from tests.training.parallelism.saved_states import WholeState, whole_state
from training.config import TrainConfig
from training.data.batching import micro_batches_of_rank, pad
from training.data.tokenized import TokenizedRows
from training.distributed.ranks import Ranks
from training.model.classifier import NewsClassifier
from training.parallelism.ddp import DDPStrategy
from training.parallelism.deepspeed import DeepSpeedStrategy
from training.run.step import optimizer_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("deepspeed"), reason='needs the extra: pip install "distrinews[deepspeed]"'),
]

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
STEPS, FIRST, LAST = range(1, 4), range(1, 3), range(3, 4)
LEARNING_RATE = 1e-3
Tensors = dict[str, torch.Tensor]
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


def _train(strategy: Any, fields: Fields, steps: range, ranks: Ranks) -> dict[str, Any]:
    """This rank's shares of the losses, the norms and the first step's first moments, over batches of 7 rows."""
    made: dict[str, Any] = {"losses": [], "norms": []}
    for step in steps:
        batch = np.arange(7 * (step - 1), 7 * step)
        share = micro_batches_of_rank(_rows(), batch, strategy.data_shard, fields.get("gradient_accumulation", 1))
        result = optimizer_step(strategy, share, step, LEARNING_RATE)
        made["losses"].append(float(result.loss))
        made["norms"].append(float(result.grad_norm))
        if step == steps[0]:
            made["first"] = whole_state(strategy, ranks)
    return made | {"state": whole_state(strategy, ranks), "logits": _logits(strategy)}


def _logits(strategy: Any) -> torch.Tensor:
    ids, mask = pad(_rows(), np.arange(4), 11)
    return strategy.logits(ids, mask, "fp32")


def _alone(fields: Fields, state: WholeState | None = None, steps: range = STEPS) -> dict[str, Any]:
    strategy = DDPStrategy(_model(), _config(**fields), ALONE, "fp32")
    if state:
        strategy.load_state_dict(state)
    return _train(strategy, fields, steps, ALONE)


def _together(fields: Fields, state_file: Path | None = None, steps: range = STEPS) -> dict[str, Any]:
    strategy = DeepSpeedStrategy(_model(), _config(strategy="deepspeed", **fields), here(), "fp32")
    if state_file:
        strategy.load_state_dict(torch.load(state_file, weights_only=False))
    return _train(strategy, fields, steps, here())


def _all_together(all_fields: list[Fields], *arguments: Any) -> list[dict[str, Any]]:
    return [_together(fields, *arguments) for fields in all_fields]


def _distance(mine: Tensors, theirs: Tensors) -> float:
    """Of all tensors together, relative: biases of keys have no gradient, so alone they are noise."""

    def flat(tensors: Tensors) -> torch.Tensor:
        return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])

    assert sorted(mine) == sorted(theirs)
    return float((flat(mine) - flat(theirs)).norm() / flat(theirs).norm())


def _assert_equal(rank_0: dict[str, Any], rank_1: dict[str, Any], alone: dict[str, Any]) -> None:
    losses = [sum(shares) for shares in zip(rank_0["losses"], rank_1["losses"], strict=True)]
    assert losses == pytest.approx(alone["losses"], rel=1e-5)
    assert rank_0["norms"] == rank_1["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    # Clipped gradients times 0.1, then 0.001 of their squares.
    for moment in ("exp_avg", "exp_avg_sq"):
        assert _distance(rank_0["first"].moments(moment), alone["first"].moments(moment)) < 1e-6
    mine, theirs = rank_0["state"], alone["state"]
    assert _distance(mine.moments("exp_avg"), theirs.moments("exp_avg")) < 1e-5
    assert _distance(mine.moments("step"), theirs.moments("step")) == 0
    assert _distance(mine.model, theirs.model) < 1e-6
    torch.testing.assert_close(rank_0["logits"], alone["logits"], rtol=1e-5, atol=1e-5)


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


def test_layers_at_different_rates_train_as_on_one_process() -> None:
    tuned = {"layer_decay": 0.5, "betas": (0.8, 0.98)}
    alone = _alone(tuned)
    fields = [{"deepspeed_stage": stage, **tuned} for stage in (0, 1, 2, 3)]
    for rank_0, rank_1 in zip(*run_on_ranks(2, _all_together, fields), strict=True):
        assert _distance(rank_0["state"].model, alone["state"].model) < 1e-6
        torch.testing.assert_close(rank_1["logits"], alone["logits"], rtol=1e-5, atol=1e-5)


def test_offload_to_memory_changes_no_number() -> None:
    alone = _alone({"gradient_accumulation": 2})
    for ranks in zip(*run_on_ranks(2, _all_together, OFFLOADED), strict=True):
        _assert_equal(*ranks, alone)


def _can_swap() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible()


def test_offload_to_a_disk_changes_no_number_and_resumes(tmp_path: Path) -> None:
    if not _can_swap():
        pytest.skip("needs libaio (apt-get install libaio-dev) and ninja")
    disk, file, state_file = tmp_path / "disk", tmp_path / "nvme.json", tmp_path / "state.pt"
    place = {"device": "nvme", "nvme_path": str(disk)}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place | {"buffer_size": 2**24}}
    file.write_text(json.dumps({"zero_optimization": zero}))
    fields: Fields = {"deepspeed_stage": 3, "deepspeed_config": file}
    alone = _alone({})

    _assert_equal(*run_on_ranks(2, _together, fields, seconds=600.0), alone)  # the first time compiles for minutes

    for rank in range(2):
        assert list((disk / "zero_stage_3" / "optimizer" / f"rank{rank}").glob("exp_avg-*.swp"))
    torch.save(_alone({}, steps=FIRST)["state"], state_file)
    resumed = run_on_ranks(2, _together, fields, state_file, LAST)
    assert sum(rank["losses"][0] for rank in resumed) == pytest.approx(alone["losses"][2], rel=1e-5)
    assert _distance(resumed[0]["state"].model, alone["state"].model) < 1e-6
    assert _distance(resumed[0]["state"].moments("exp_avg_sq"), alone["state"].moments("exp_avg_sq")) < 1e-5


def test_activation_checkpointing_changes_no_number() -> None:
    kinds = [(2, "selective"), (3, "selective"), (3, "full")]
    fields = [{"deepspeed_stage": stage, "activation_checkpointing": kind} for stage, kind in kinds]
    alone = _alone({})
    for ranks in zip(*run_on_ranks(2, _all_together, fields), strict=True):
        _assert_equal(*ranks, alone)


def test_every_stage_resumes_from_the_state_of_one_process(tmp_path: Path) -> None:
    whole, state_file = _alone({}), tmp_path / "state.pt"
    torch.save(_alone({}, steps=FIRST)["state"], state_file)
    for rank_0, rank_1 in zip(*run_on_ranks(2, _all_together, PLAIN[::2], state_file, LAST), strict=True):
        assert rank_0["losses"][0] + rank_1["losses"][0] == pytest.approx(whole["losses"][2], rel=1e-5)
        mine, theirs = rank_0["state"], whole["state"]
        assert _distance(mine.model, theirs.model) < 1e-6
        assert _distance(mine.moments("exp_avg_sq"), theirs.moments("exp_avg_sq")) < 1e-5
        assert _distance(mine.moments("step"), theirs.moments("step")) == 0


def test_one_process_resumes_from_the_state_of_every_stage() -> None:
    whole = _alone({})
    for rank_0 in run_on_ranks(2, _all_together, PLAIN[::2], None, FIRST)[0]:
        went_on = _alone({}, rank_0["state"], LAST)
        assert went_on["losses"][0] == pytest.approx(whole["losses"][2], rel=1e-5)
        assert _distance(went_on["state"].model, whole["state"].model) < 1e-6


def _held_by_this_rank(all_fields: list[Fields]) -> list[dict[str, int]]:
    strategies = (DeepSpeedStrategy(_model(), _config(strategy="deepspeed", **f), here(), "fp32") for f in all_fields)
    return [{name: t.nbytes for name, t in strategy.state_dict().tensors.items()} for strategy in strategies]


def test_each_state_is_on_exactly_one_rank_and_no_rank_has_all() -> None:
    for rank_0, rank_1 in zip(*run_on_ranks(2, _held_by_this_rank, PLAIN[::2]), strict=True):
        largest = max(rank_0.values())
        assert not rank_0.keys() & rank_1.keys()
        assert abs(sum(rank_0.values()) - sum(rank_1.values())) <= largest


def _meet_a_bad_step(all_fields: list[tuple[str, Fields]]) -> list[tuple[float, bool, bool]]:
    """A step whose rows weigh infinitely much on rank 1: its norm; whether it changed nothing, then or a step later."""
    met = []
    for precision, fields in all_fields:
        config = _config(strategy="deepspeed", **fields)
        strategy, spared = (DeepSpeedStrategy(_model(), config, here(), precision) for _ in range(2))
        first, second, third = (
            micro_batches_of_rank(_rows(), np.arange(i, i + 7), strategy.data_shard) for i in (0, 7, 14)
        )
        if here().rank == 1:
            second = [replace(batch, weights=batch.weights * math.inf) for batch in second]
        optimizer_step(strategy, first, 1, LEARNING_RATE)
        before = _tensors(strategy)
        norm = float(optimizer_step(strategy, second, 2, LEARNING_RATE).grad_norm)
        changed_nothing = _equal(before, _tensors(strategy))
        optimizer_step(strategy, third, 3, LEARNING_RATE)
        optimizer_step(spared, first, 1, LEARNING_RATE)
        optimizer_step(spared, third, 3, LEARNING_RATE)
        assert not _equal(before, _tensors(strategy))
        met.append((norm, changed_nothing, _equal(_tensors(spared), _tensors(strategy))))
    return met


def _tensors(strategy: DeepSpeedStrategy) -> dict[str, torch.Tensor]:
    """A copy of those weights, moments and numbers of steps that this rank would save."""
    return copy.deepcopy(strategy.state_dict().tensors)


def _equal(mine: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == others.keys() and all(tensor.equal(others[name]) for name, tensor in mine.items())


def test_a_step_that_is_bad_on_one_rank_changes_nothing_at_any_stage(tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text('{"bf16": {"enabled": true}}')
    stages = [{"deepspeed_stage": stage} for stage in range(4)]
    cases = [(precision, fields) for precision in ("fp32", "bf16") for fields in stages]
    # With weights in bf16; and offloaded.
    cases += [("bf16", fields | {"deepspeed_config": file}) for fields in stages[1:]]
    cases += [("fp32", fields | {"cpu_offload": True}) for fields in stages[1:]]

    for met in run_on_ranks(2, _meet_a_bad_step, cases, seconds=240.0):
        for case, (norm, changed_nothing, later_equal) in zip(cases, met, strict=True):
            assert not math.isfinite(norm), case
            assert changed_nothing, case
            assert later_equal, case


def _train_in_bf16(all_fields: list[Fields]) -> list[dict[str, Any]]:
    strategies = (DeepSpeedStrategy(_model(), _config(**fields), here(), "bf16") for fields in all_fields)
    return [_train(strategy, {}, STEPS, here()) for strategy in strategies]


def test_bf16_by_autocast_or_in_the_weights_stays_near_fp32(tmp_path: Path) -> None:
    alone, file = _alone({}), tmp_path / "deepspeed.json"
    file.write_text('{"bf16": {"enabled": true}}')
    fields: Fields = {"strategy": "deepspeed"}
    stages = [fields | {"deepspeed_stage": stage} for stage in (0, 2, 3)]
    stages += [fields | {"deepspeed_stage": stage, "deepspeed_config": file} for stage in (2, 3)]
    for rank_0, rank_1 in zip(*run_on_ranks(2, _train_in_bf16, stages), strict=True):
        losses = [sum(shares) for shares in zip(rank_0["losses"], rank_1["losses"], strict=True)]
        assert losses == pytest.approx(alone["losses"], rel=0.02)
        assert {tensor.dtype for tensor in rank_0["state"].model.values()} == {torch.float32}


def _refuse(file: Path) -> str:
    with pytest.raises(UserError) as error:
        DeepSpeedStrategy(_model(), _config(strategy="deepspeed", deepspeed_config=file), here(), "fp32")
    return str(error.value)


def test_what_deepspeed_does_not_understand_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text('{"zero_optimization": {"reduce_bucket_size": "many"}}')
    for line in run_on_ranks(2, _refuse, file):
        assert line.startswith(f"--deepspeed_config {file}: DeepSpeed refuses it: ")
        assert "reduce_bucket_size" in line
        assert "\n" not in line


def test_its_own_launcher_trains_as_one_process_does(
    start: Callable[..., Run],
    launch: Callable[..., Run],
    base_flags: Sequence[str],
    tmp_path: Path,
    metrics_of: Callable,
) -> None:
    flags = ("--epochs", "1", "--output_dir")
    launch(1, "--batch_size", "8", *flags, tmp_path / "alone")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", TRAINING / "train_ddp.py"]
    strategy = ("--strategy", "deepspeed", "--deepspeed_stage", "3", "--batch_size", "4")
    run = start([*launcher, *base_flags, *strategy, *flags, tmp_path / "two"], env={"DS_ACCELERATOR": "cpu"})
    assert (run.process.returncode, run.err) == (0, "")
    alone, two = (metrics_of(tmp_path / f"{name}.run") for name in ("alone", "two"))
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in alone], rel=1e-4)
