"""--budget: a run ends when it was asked to, however fast the machine turns out to be."""

from __future__ import annotations

import csv
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.text import TextTokenizer
from tests.deployment.documented import documented
from training.checkpointing.saver import STATE_FILE
from training.config import TrainConfig, parse_config
from training.data.dataset import Rows, load_data
from training.data.prepare import PreparedData, prepare_data, prepare_model
from training.data.tokenized import encode_rows, load_tokenizer
from training.distributed.ranks import Ranks
from training.model.dropout import RowDropout
from training.run import budget as module
from training.run.budget import Budget, expect_accuracy, settle_flags, settle_learning

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
# Its own epochs and no repetition bit for bit, which a budget cannot promise.
RUN = ("--deterministic", "false", "--epochs", 5000, "--validation_fraction", 0.1)

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none", milestones={"imported": time.time()})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.seconds, perf_counter=time.perf_counter))
    return now


@pytest.fixture
def just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, which is that of all tests, counts from now on."""
    monkeypatch.setattr(module, "_seconds_since_start", lambda ranks: 0.0)
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.5)


@pytest.fixture
def only_steps_take_time(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, just_started: None) -> None:
    """A fifth of a second each, however fast or busy the machine is."""
    observe = Budget.observe

    def one_step_later(budget: Budget, tokens: float, seconds: float, tokens_per_step: float) -> None:
        clock.seconds += 0.2
        observe(budget, tokens_per_step, 0.2, tokens_per_step)

    monkeypatch.setattr(Budget, "observe", one_step_later)
    monkeypatch.setattr(module, "_seconds_per_token", lambda *_: 1e-6)


def _prepared(model: str, tmp_path: Path, **flags: Any) -> tuple[TrainConfig, PreparedData]:
    config = TrainConfig(model=model, dataset="sample", cache_dir=tmp_path, **flags)
    return config, prepare_data(config, ALONE, print)


@pytest.mark.parametrize("pace", [0.5, 1.0, 4.0])
def test_the_steps_end_at_the_deadline_whatever_pace_was_guessed(clock: SimpleNamespace, pace: float) -> None:
    budget = Budget(600, since_start=20, saved={})
    budget.closing, budget.seconds_per_token = 40.0, 0.01
    steps = 0
    while budget.steps_left(100):
        clock.seconds += pace * 100 * 0.01
        budget.observe(100, pace * 100 * 0.01, 100)
        steps += 1
    assert steps == pytest.approx(540 / pace, rel=0.01)
    assert 0 <= budget.left_for_steps < pace


def test_the_number_of_steps_follows_a_machine_that_gets_slower(clock: SimpleNamespace) -> None:
    budget = Budget(1000, since_start=0, saved={})
    budget.seconds_per_token = 0.01
    counts = []
    for step in range(500):
        seconds = 1.0 if step < 200 else 3.0
        if not budget.steps_left(100):
            break
        clock.seconds += seconds
        budget.observe(100, seconds, 100)
        counts.append(step + 1 + budget.steps_left(100))
    assert counts[150] == pytest.approx(1000, rel=0.01)
    assert len(counts) == pytest.approx(200 + 800 / 3, rel=0.01)
    assert 0 <= budget.left_for_steps < 3


def test_a_resumed_run_has_what_the_run_before_left(clock: SimpleNamespace) -> None:
    before = Budget(600, since_start=5, saved={})
    clock.seconds += 200
    saved = before.to_plain()
    clock.seconds += 10_000  # between the two nobody computed
    after = Budget(600, since_start=7, saved=saved)
    assert after.spent == pytest.approx(212)


def test_a_run_ends_with_a_rate_near_zero_and_goes_on_with_more_time(
    train_here: Train,
    metrics_of: Metrics,
    tmp_path: Path,
    only_steps_take_time: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = (*RUN, "--output_dir", tmp_path / "model")
    spent, last, run_dir = [], [], tmp_path / "model.run"
    for budget in ("5s", "8s"):
        assert train_here(*flags, "--budget", budget) == 0
        steps = metrics_of(run_dir)
        last.append(steps[-1]["step"])
        assert steps[-1]["learning_rate"] < 0.3 * max(step["learning_rate"] for step in steps)
        assert {epoch["step"] for epoch in metrics_of(run_dir, "epoch")} == set(last), "only last steps are validated"
        state = json.loads((run_dir / "checkpoints" / f"step_{last[-1]:08d}" / STATE_FILE).read_text())
        spent.append(state["budget"]["spent"])
    printed = capfd.readouterr().out
    assert "5s in all" in printed
    assert "Resuming" in printed
    report = (run_dir / "report.html").read_text()
    assert "because its time (--budget 8s) was up" in report
    assert "evaluations in a row" not in report
    assert 5 < last[0] < 25, "of a fifth of a second, in 5 seconds"
    assert last[0] + 5 < last[1] < 40, "in 8 seconds"
    assert 0 < spent[0] < 5 < spent[1] < 8


@pytest.mark.slow
def test_the_documented_command_trains(
    train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, just_started: None, metrics_of: Metrics
) -> None:
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "my_rows.csv").open("w", newline="") as file:
        rows = load_data("sample").train
        csv.writer(file).writerows([("text", "label"), *zip(rows.texts, rows.labels, strict=True)])
    flags = shlex.split(documented("docs/running.md", "budget"))[2:]

    assert train_here(*flags, *RUN, "--budget", "8s", "--output_dir", "model") == 0

    assert metrics_of(tmp_path / "model.run", "epoch")


@pytest.mark.slow
def test_a_run_that_has_all_its_epochs_ends_before_the_deadline_and_says_so(
    train_here: Train, metrics_of: Metrics, tmp_path: Path, just_started: None, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--deterministic", "false", "--epochs", 1, "--output_dir", tmp_path / "model")
    assert train_here(*flags, "--budget", "1h") == 0
    assert "ends before it, after --epochs 1" in capfd.readouterr().out
    assert metrics_of(tmp_path / "model.run", "epoch")[-1]["epoch"] == 1


def test_a_budget_in_which_nothing_can_be_trained_is_refused_before_anything_is_written(
    train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_seconds_since_start", lambda ranks: 30.0)
    assert train_here(*RUN, "--output_dir", tmp_path / "model", "--budget", "20s") == 2
    error = capfd.readouterr().err
    assert "error: --budget 20s: the start took " in error
    assert "[budget-too-short]" in error
    assert not (tmp_path / "model.run").exists()


@pytest.mark.parametrize("length", [8, 20, 33])
@pytest.mark.parametrize("model", ["starter", "tiny"])
def test_rows_that_are_cut_are_those_that_a_tokenizer_of_that_length_gives(model: str, length: int) -> None:
    data = load_data("sample")
    some = Rows(data.train.texts[:200], data.train.labels[:200])
    json = load_tokenizer(model, data.train.texts, 64).backend_tokenizer.to_str()
    long, short = (encode_rows(TextTokenizer.from_json(json, size, "news"), some) for size in (64, length))
    cut = long.cut(length)
    for name in ("ids", "offsets", "labels"):
        assert np.array_equal(getattr(cut, name), getattr(short, name)), name
    assert cut.num_cut == short.num_cut


def test_texts_are_cut_where_most_of_their_tokens_are_before_the_cut(tmp_path: Path) -> None:
    config, data = _prepared("starter", tmp_path, budget="1m")
    chosen, cut = settle_flags(config, data, {})
    kept = cut.tokens.train.lengths.sum() / data.tokens.train.lengths.sum()
    assert 32 <= chosen.max_length < config.max_length == 128
    assert 0.95 <= kept < 1
    assert cut.tokenizer is not None
    assert cut.tokenizer.model_max_length == chosen.max_length


def test_a_resumed_run_cuts_where_it_did_before(tmp_path: Path) -> None:
    config, data = _prepared("starter", tmp_path, budget="1m")
    chosen, cut = settle_flags(config, data, {"config": {"max_length": 40}})
    assert chosen.max_length == 40
    assert cut.tokens.test.lengths.max() == 40


def test_a_length_and_a_rate_that_were_given_are_kept(tmp_path: Path) -> None:
    config, data = _prepared("starter", tmp_path, budget="10h", max_length=100, learning_rate=1e-5)
    assert settle_flags(config, data, {}) == (config, data)
    model, _ = prepare_model(config, ALONE, data, "fp32", print)
    assert settle_learning(config, model, ALONE, data, "fp32", {}).learning_rate == 1e-5


def test_a_narrow_encoder_gets_a_higher_rate_than_a_wide_one(tmp_path: Path) -> None:
    rates = []
    config, data = _prepared("starter", tmp_path, budget="10m", strategy="zero3")
    for width in (256, 384, 768, 1024):
        model: Any = SimpleNamespace(config=SimpleNamespace(hidden_size=width, num_hidden_layers=12), network=None)
        rates.append(settle_learning(config, model, ALONE, data, "fp32", {}).learning_rate)
    assert rates == sorted(rates, reverse=True)
    assert rates[2] == pytest.approx(3e-5)
    assert all(low < high for high, low in itertools.pairwise(rates))


def test_windows_are_not_timed_as_one_long_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, data = _prepared("tiny", tmp_path, budget="10h")
    monkeypatch.setattr(module, "_seconds_per_row", lambda *_: pytest.fail("timed"))
    model: Any = SimpleNamespace(config=SimpleNamespace(hidden_size=128), network=None)
    chosen = settle_learning(config.model_copy(update={"long": "windows"}), model, ALONE, data, "fp32", {})
    assert chosen.dropout is None


def test_the_time_of_a_command_counts_from_its_start_and_of_a_call_from_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = replace(ALONE, milestones={"imported": time.time()})
    monkeypatch.setattr(module, "process_started", lambda process: time.time() - 3600)
    for script, seconds in (("notebook.py", 0), ("/somewhere/training/train_single.py", 3600)):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
        assert module._seconds_since_start(called) == pytest.approx(seconds, abs=30)


@pytest.mark.parametrize(("budget", "frozen"), [("10s", True), ("10h", False)])
def test_few_rows_train_half_of_the_encoder_without_dropout_and_many_train_it_gently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, frozen: bool
) -> None:
    monkeypatch.setattr(module, "_seconds_since_start", lambda ranks: 9.9)
    monkeypatch.setattr(module, "LEAST_BLOCKS", 2)
    config, data = _prepared("starter", tmp_path, budget=budget)
    model, _ = prepare_model(config, ALONE, data, "fp32", print)
    chosen = settle_learning(config, model, ALONE, data, "fp32", {})
    assert chosen.freeze == ("1" if frozen else "none")
    assert chosen.dropout == (0 if frozen else None)
    assert (chosen.learning_rate, chosen.layer_decay) == ((5.4e-4, 1) if frozen else (2.7e-4, 0.9))
    assert {layer.p for layer in model.modules() if isinstance(layer, RowDropout)} == ({0} if frozen else {0.1, 0.2})
    trained = {name for name, parameter in model.network.named_parameters() if parameter.requires_grad}
    assert ("distilbert.embeddings.word_embeddings.weight" not in trained) == frozen
    assert "distilbert.transformer.layer.2.attention.q_lin.weight" in trained
    assert all(parameter.grad is None for parameter in model.parameters())
    before = {"config": {"freeze": "2", "dropout": 0.3, "learning_rate": 0.001, "layer_decay": 0.8}}
    resumed = settle_learning(config, model, ALONE, data, "fp32", before)
    assert before["config"].items() <= resumed.model_dump().items()
    own = {"freeze": "none", "dropout": 0.5, "learning_rate": 0.002, "layer_decay": 0.7}
    given = config.model_copy(update=own)  # and all are then set
    assert settle_learning(given, model, ALONE, data, "fp32", before) == given


def test_the_words_of_the_rows_say_what_to_expect_of_an_encoder_but_not_of_a_network_from_scratch(
    tmp_path: Path,
) -> None:
    config, data = _prepared("starter", tmp_path, budget="1m")
    few, many = (expect_accuracy(config, data, rows) for rows in (100, 10_000))
    assert few
    assert many
    assert 0.25 < few.low < many.low < many.high <= 1
    assert few.low < few.high < many.high
    assert expect_accuracy(config.model_copy(update={"model": "tiny"}), data, 10_000) is None


@pytest.mark.parametrize("value", ["10", "m", "-5m", "0s", "10 m", "1h30m"])
def test_a_budget_is_a_time_with_a_unit(value: str) -> None:
    with pytest.raises(UserError, match=r"--budget .*: must be a time with its unit: s, m or h, such as 90s"):
        parse_config([f"--budget={value}"])


def test_a_budget_keeps_fewer_rows_for_validation_unless_told_otherwise() -> None:
    chosen, given = (
        parse_config(["--budget", "10m", *more]) for more in ((), ("--epochs", "2", "--validation_fraction", "0.1"))
    )
    assert (chosen.epochs, chosen.validation_fraction, chosen.budget_seconds) == (10, 0.02, 600)
    assert (given.epochs, given.validation_fraction) == (2, 0.1)
