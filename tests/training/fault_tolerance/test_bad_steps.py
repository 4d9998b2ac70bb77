"""Bad steps are skipped and named; too many in a row, and the run goes back and does without the bad rows.

The bad rows are real: the model that training starts from has NaN where it looks up a word that only they have.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import TrainingFailure
from tests.processes import here, run_on_ranks
from tests.training.parallelism.cases import ALONE
from training.checkpointing.resume import newest_checkpoint, open_checkpoint
from training.config import TrainConfig
from training.data.batching import LengthBucketSampler, micro_batches_of_rank
from training.data.prepare import PreparedData, prepare_data, prepare_model
from training.model.classifier import NewsClassifier
from training.model.optimizer import learning_rate_at
from training.parallelism.registry import STRATEGIES
from training.parallelism.strategy import StepResult
from training.run.step import StepLog, StepRecord, optimizer_step
from training.run.trainer import Trainer

GLOBAL_BATCH = 8
STEPS_PER_EPOCH, LAST_STEP = 8, 16
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Ended:
    """How a run ended: weights and moments on its first rank, or what it said when it failed."""

    state: State
    failure: str = ""


class Bench:
    """A model for which rows of some steps are bad, and runs that begin with it.

    Args:
        folder: an empty one.
        bad: numbers of the steps of the first epoch that have one bad row each.
        wholly: all their rows are bad; rows of the validation and the test may then be, too.
    """

    def __init__(self, folder: Path, bad: Sequence[int], *, wholly: bool = False) -> None:
        self.folder = folder
        data = prepare_data(self.config(model="tiny"), ALONE, lambda line: None)
        steps = [batch.tolist() for batch in batches(data)]
        taken = set() if wholly else {*data.tokens.test.ids.tolist(), *words(data, data.validation_index)}
        self.rows, bad_words = [], set()
        for step in bad:
            others = [row for i, batch in enumerate(steps) if i < bad[0] - 1 or not wholly for row in batch]
            own = {
                row: words(data, [row]) - taken - words(data, [r for r in others if r != row])
                for row in steps[step - 1]
            }
            chosen = [row for row in own if own[row]][: None if wholly else 1]
            assert chosen
            assert not wholly or len(chosen) == len(own)
            self.rows += chosen
            bad_words |= {min(own[row]) for row in chosen}
        network = NewsClassifier(4, "tiny", vocab_size=data.tokens.vocab_size).network
        with torch.no_grad():
            # Not NaN, with which no training may begin; a sum of so large numbers is infinite.
            network.get_input_embeddings().weight[sorted(bad_words)] = torch.finfo(torch.float32).max
        network.save_pretrained(folder / "start")
        data.tokenizer.save_pretrained(folder / "start")

    def config(self, **fields: Any) -> TrainConfig:
        """Two epochs of eight steps; ``model`` is the folder's unless another is named."""
        small = {"dataset": "sample", "max_train_rows": 63, "max_length": 48, "epochs": 2, "learning_rate": 1e-3}
        exact = {"precision": "fp32", "deterministic": True, "device": "cpu", "check_replicas_every": 0}
        files = {"model": str(self.folder / "start"), "cache_dir": self.folder / "cache"}
        saving = {"output_dir": self.folder / "model", "save_every": 2, "keep_last": 20, "log_every": 1}
        return TrainConfig(**small | exact | files | saving | fields)

    def run(self, world_size: int, **fields: Any) -> Ended:
        """Train on real ranks."""
        config = self.config(batch_size=GLOBAL_BATCH // world_size, **fields)
        return run_on_ranks(world_size, train, config)[0]

    def records(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of the run."""
        return [json.loads(line) for line in (self.folder / "model.run" / name).read_text().splitlines()]


def batches(data: PreparedData, epoch: int = 1) -> list[np.ndarray]:
    """The global batches of an epoch, in row numbers of the training split."""
    sampler = LengthBucketSampler(data.tokens.train.lengths[data.train_index], GLOBAL_BATCH, seed=42)
    sampler.set_epoch(epoch)
    return [data.train_index[batch] for batch in sampler]


def words(data: PreparedData, rows: Sequence[int]) -> set[int]:
    """The token ids of training rows."""
    ids, offsets = data.tokens.train.ids, data.tokens.train.offsets
    return {word for row in rows for word in ids[offsets[row] : offsets[row + 1]].tolist()}


def train(config: TrainConfig) -> Ended:
    """A whole run on the ranks that are here."""
    try:
        trainer = Trainer(config, here())
        trainer.fit()
    except TrainingFailure as error:
        return Ended({}, str(error))
    # It holds the best epoch's weights now.
    trainer.checkpoints.restore(
        open_checkpoint(newest_checkpoint(here(), trainer.context.storage, trainer.context.say), here())
    )
    assert trainer.context.state.step == LAST_STEP
    return Ended(trainer.context.strategy.state_dict().tensors)


def train_without(config: TrainConfig, rows: Sequence[int]) -> State:
    """Every step by hand, with batches that never had ``rows``."""
    data = prepare_data(config, here(), lambda line: None)
    model, _ = prepare_model(config, here(), data, "fp32", lambda line: None)
    strategy = STRATEGIES[config.strategy](model, config, here(), "fp32")
    order = [batch for epoch in (1, 2) for batch in batches(data, epoch)]
    for step, batch in enumerate(order, start=1):
        left = batch[~np.isin(batch, rows)]
        if len(left):
            share = micro_batches_of_rank(data.tokens.train, left, strategy.data_shard)
            rate = learning_rate_at(step, LAST_STEP, config.learning_rate or 1e-3, config.warmup, config.schedule)
            optimizer_step(strategy, share, step, rate)
    return strategy.state_dict().tensors


def same(found: State, expected: State) -> bool:
    """Bit for bit; the bad words stay NaN in both."""
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name].nan_to_num(1e9), expected[name].nan_to_num(1e9)) for name in expected)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bad_step_is_skipped_counted_and_its_row_named(tmp_path: Path, world_size: int) -> None:
    bench = Bench(tmp_path, bad=[3])

    ended = bench.run(world_size)

    metrics = [record for record in bench.records("metrics.jsonl") if record["kind"] == "step"]
    bad = [record["step"] for record in metrics if record["bad"]]
    assert not ended.failure
    assert len(bad) == 2
    assert bad[0] == 3
    assert STEPS_PER_EPOCH < bad[1] <= LAST_STEP
    assert [record["step"] for record in metrics] == list(range(1, LAST_STEP + 1))
    lines = bench.records("bad_rows.jsonl")
    assert [(line["step"], line["epoch"], line["rows"]) for line in lines] == [
        (bad[0], 1, bench.rows),
        (bad[1], 2, bench.rows),
    ]
    assert all(line["loss"] is None and line["what"] == "the loss is nan" for line in lines)
    assert all(line["ranks"] in ([[0]] if world_size == 1 else [[0], [1]]) for line in lines)
    epochs = [record for record in bench.records("metrics.jsonl") if record["kind"] == "epoch"]
    assert all(math.isfinite(epoch["train_loss"]) for epoch in epochs)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_rolling_back_equals_a_run_without_the_bad_rows(tmp_path: Path, world_size: int) -> None:
    bench = Bench(tmp_path, bad=[4, 5, 6])

    ended = bench.run(world_size, bad_steps=2, ema=0.9)

    assert not ended.failure
    [event] = [event for event in bench.records("events.jsonl") if event["kind"] == "rolled_back"]
    assert (event["from_step"], event["step"], event["rows"]) == (6, 2, sorted(bench.rows))
    steps = [record for record in bench.records("metrics.jsonl") if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, LAST_STEP + 1))
    assert not any(record["bad"] for record in steps)
    assert [line["step"] for line in bench.records("bad_rows.jsonl")] == [4, 5, 6]
    config = bench.config(batch_size=GLOBAL_BATCH // world_size, ema=0.9)
    assert any(name.startswith("average/") for name in ended.state)
    assert same(ended.state, run_on_ranks(world_size, train_without, config, bench.rows)[0])


@pytest.mark.slow
def test_a_resumed_run_still_excludes_the_rows_on_any_number_of_ranks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, bad=[4, 5, 6])
    whole = bench.run(1, bad_steps=2)
    checkpoint = tmp_path / "model.run" / "checkpoints" / "step_00000010"
    assert checkpoint.is_dir()

    ended = {size: bench.run(size, resume=str(checkpoint), output_dir=tmp_path / f"on_{size}") for size in (1, 2)}

    assert same(ended[1].state, whole.state)
    for name, weight in whole.state.items():
        torch.testing.assert_close(ended[2].state[name], weight, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not list(tmp_path.glob("on_*.run/bad_rows.jsonl"))


@pytest.mark.slow
def test_a_run_rolls_back_as_long_as_it_makes_progress(tmp_path: Path) -> None:
    bench = Bench(tmp_path, bad=[3, 4, 5, 6, 7, 8])

    ended = bench.run(1, bad_steps=2)

    events = [event for event in bench.records("events.jsonl") if event["kind"] == "rolled_back"]
    assert not ended.failure
    assert [event["from_step"] for event in events] == [5, 8]
    assert events[-1]["rows"] == sorted(bench.rows)
    assert same(ended.state, run_on_ranks(1, train_without, bench.config(batch_size=8), bench.rows)[0])


def train_beside_damage(config: TrainConfig, at_step: int, file: Path) -> str:
    """A run one of whose files is torn before a step; returns what it fails from."""
    trainer = Trainer(config, here())
    begin_step = trainer.context.strategy.begin_step

    def tear_and_begin(learning_rate: float) -> None:
        if trainer.context.state.step + 1 == at_step:
            trainer.checkpoints.wait()
            file.write_bytes(b"torn")
        begin_step(learning_rate)

    trainer.context.strategy.begin_step = tear_and_begin
    with pytest.raises(TrainingFailure) as failed:
        trainer.fit()
    return str(failed.value)


@pytest.fixture(scope="module")
def not_helped(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run fails from that goes back over a damaged checkpoint, in vain; and its checkpoints."""
    bench = Bench(tmp_path_factory.mktemp("not_helped"), bad=[3, 4, 5, 6, 7, 8], wholly=True)
    checkpoints = bench.folder / "model.run" / "checkpoints"
    config = bench.config(batch_size=GLOBAL_BATCH, bad_steps=2, save_every=1)
    torn = checkpoints / "step_00000002" / "__0_0.distcp"
    return run_on_ranks(1, train_beside_damage, config, 5, torn)[0], checkpoints


def test_a_run_that_rolling_back_does_not_help_stops_and_names_the_step(not_helped: tuple[str, Path]) -> None:
    failure, _ = not_helped

    assert failure.startswith("step 8: the loss is nan (rank 0, training rows ")
    assert "Going back from step 5 and leaving out " in failure
    assert failure.endswith(" rows did not help: lower --learning_rate, then rerun the same command")


def test_a_damaged_checkpoint_is_moved_aside_when_a_run_rolls_back_past_it(not_helped: tuple[str, Path]) -> None:
    _, checkpoints = not_helped

    assert (checkpoints / "step_00000002.1" / "__0_0.distcp").read_bytes() == b"torn"
    assert (checkpoints / "step_00000002" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"bad_steps": 0}, "The last checkpoint is good and is kept; lower --learning_rate or fix the rows"),
        pytest.param(
            {"bad_steps": 2, "save_every": 0}, "There is no checkpoint yet to return to", marks=pytest.mark.slow
        ),
    ],
    ids=["no budget", "no checkpoint"],
)
def test_a_run_without_a_budget_or_a_checkpoint_stops(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    bench = Bench(tmp_path, bad=[3, 4, 5])

    failure = bench.run(1, **fields).failure

    step = 3 + fields["bad_steps"]
    assert failure.startswith(f"step {step}: the loss is nan (rank 0, training rows {bench.rows[fields['bad_steps']]})")
    assert re.search(r'; row \d+ reads ".+"\. ', failure)
    assert expected in failure


@pytest.mark.slow
def test_a_skipped_step_is_reported_with_its_text(
    train_here: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench = Bench(tmp_path, bad=[3])
    flags = ["--model", bench.folder / "start", "--batch_size", 8, "--epochs", 1, "--learning_rate", "1e-3"]

    code = train_here(*flags, "--output_dir", tmp_path / "model")

    assert code == 0
    [line] = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Skipped ")]
    text = prepare_data(bench.config(), ALONE, lambda line: None).texts.train.texts[bench.rows[0]]
    assert line.startswith(f"Skipped step 3: the loss is nan (rank 0, training rows {bench.rows[0]}); row ")
    assert line.endswith(f'reads "{text[:80]}"')


def test_if_only_the_gradient_is_not_finite_all_rows_of_the_batch_are_suspect() -> None:
    log, batch = StepLog(ALONE), np.array([7, 3, 9])
    losses = torch.tensor([0.5, 0.4, 0.3])
    result = StepResult(losses.mean(), losses, torch.tensor(math.inf), False, None, torch.zeros(2))
    log.add(StepRecord(4, 1, 1e-3, batch, 30, batch, result))

    synced = log.sync(1.0, {})

    assert synced.bad[4].suspects == [7, 3, 9]
    assert str(synced.bad[4]) == (
        "step 4: the gradient norm is inf (every row has a finite loss, the gradient overflowed)"
    )
    assert [(step.skipped, step.bad) for step in synced.steps] == [(True, True)]


def test_a_step_that_the_loss_scale_explains_is_skipped_but_not_bad() -> None:
    log, batch = StepLog(ALONE), np.array([7])
    for step, loss in ((1, 0.5), (2, math.nan)):
        losses = torch.tensor([loss])
        result = StepResult(losses[0], losses, torch.tensor(math.inf), True, None, torch.zeros(2))
        log.add(StepRecord(step, 1, 1e-3, batch, 30, batch, result))

    steps = log.sync(1.0, {}).steps

    assert [(step.skipped, step.bad) for step in steps] == [(True, False), (True, True)]
