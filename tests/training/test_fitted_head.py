"""A run begins with a head that logistic regression has fitted to what the encoder says of the training rows."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaConfig, pipeline

from tests.processes import run_on_ranks
from training.config import TrainConfig
from training.data.tokenized import TokenizedRows
from training.distributed.ranks import Ranks
from training.model.classifier import Loading, NewsClassifier
from training.model.pooling import MEAN, POOLING_FILE
from training.run.fitted_head import read_on_all_ranks
from training.run.head_start import start_from_head
from training.tasks import Classification

pytest_plugins = ("tests.training.small_teacher",)
Train = Callable[..., int]
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
LABELS = {"weather": ("storm", "wind"), "beach": ("sand", "sun")}
DEFAULTS = ("--max_train_rows", "0", "--precision", "fp32", "--max_length", "32")


@pytest.fixture(scope="module", name="encoder")
def fixture_encoder(teacher: Path) -> Path:
    """An encoder whose files say that it was trained for the mean of its tokens."""
    (teacher / POOLING_FILE).parent.mkdir(exist_ok=True)
    (teacher / POOLING_FILE).write_text('{"pooling_mode_mean_tokens": true}')
    return teacher


@pytest.fixture(scope="module", name="rows")
def fixture_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for split, count in (("train", 40), ("test", 60)):
        lines = ["text,label"]
        for i in range(count):
            label = list(LABELS)[i % 2]
            first, second = LABELS[label]
            lines.append(
                f"{first if i % 3 else second} and {second} at {'noon' if i % 4 else 'sea'} {i * 7 % 50},{label}"
            )
        (folder / f"{split}.csv").write_text("\n".join(lines))
    return folder


def flags(encoder: Path, rows: Path, output: Path, *more: str) -> tuple[str | Path, ...]:
    return "--model", encoder, "--dataset", rows, "--output_dir", output, *DEFAULTS, *more


def metrics(output: Path) -> dict:
    return json.loads((output / "metrics.json").read_text())


def test_method_head_writes_a_model_without_a_step_of_training(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_here(*flags(encoder, rows, tmp_path / "model", "--method", "head"), with_plots=True) == 0

    shown, found = capfd.readouterr().out, metrics(tmp_path / "model")
    assert found["test"]["accuracy"] > 0.9
    assert found["method"] == "head"
    assert found["train_rows"] == 40  # none kept for validation: folds take its place
    assert re.search(r"Fitted head +accuracy \d+\.\d\d% by 5 folds", shown)
    assert "no validation rows to choose" not in shown
    plots = {path.stem for path in (tmp_path / "model.run" / "plots").iterdir()}
    assert plots == {"confusion_matrix", "reliability"}


def test_models_that_are_fitted_to_different_rows_differ_only_behind_the_encoder(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path
) -> None:
    other = tmp_path / "other_rows"
    other.mkdir()
    for split, first in (("train", 0), ("test", 1000)):
        lines = [f"{'sun' if i % 3 else 'wind'}s {i} {i * 3},{'abc'[i % 3]}" for i in range(first, first + 30)]
        (other / f"{split}.csv").write_text("\n".join(["text,label", *lines]))

    for name, dataset in (("one", rows), ("other", other)):
        assert train_here(*flags(encoder, dataset, tmp_path / name, "--method", "head")) == 0

    one, another = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    different = {name for name in one | another if not torch.equal(one[name], another[name])}
    assert {"classifier.weight", "classifier.bias"} <= different
    assert all("pooler" in name or name.startswith("classifier.") for name in different)


def test_few_rows_are_fine_tuned_from_the_fitted_head_at_the_defaults(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train_here(*flags(encoder, rows, tmp_path / "model", "--epochs", "1")) == 0

    shown, found = capfd.readouterr().out, metrics(tmp_path / "model")
    assert re.search(r"Head +fitted to the mean of all tokens; accuracy \d+\.\d\d% by 5 folds", shown)
    assert found["train_rows"] == 40
    assert AutoConfig.from_pretrained(tmp_path / "model").num_hidden_layers == 5


@pytest.mark.slow
def test_the_written_model_answers_alike_in_plain_transformers_and_in_int8(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    assert train_here(*flags(encoder, rows, output, "--method", "head", "--export")) == 0

    texts = [line.split(",")[0] for line in (rows / "test.csv").read_text().splitlines()[1:]]
    expected = (tmp_path / "model.run" / "predictions.csv").read_text().splitlines()[1:]
    answers = pipeline("text-classification", str(output))(texts)
    assert [answer["label"] for answer in answers] == [line.split(",")[2] for line in expected]
    assert "error" not in capfd.readouterr().err


def test_the_first_evaluation_is_that_of_the_fitted_head_and_the_best_one_is_kept(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path
) -> None:
    # A rate that destroys the encoder: the head before the first step is better than anything after.
    more = ("--method", "fine_tune", "--learning_rate", "0.9", "--validation_fraction", "0.3", "--clip_norm", "0")
    assert train_here(*flags(encoder, rows, tmp_path / "model", *more)) == 0

    assert metrics(tmp_path / "model")["best_epoch"] == 0
    assert metrics(tmp_path / "model")["test"]["accuracy"] > 0.9


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_stopped(
    step: int, encoder: Path, rows: Path, train_here: Train, tmp_path: Path
) -> None:
    more = ("--save_every", "2", "--keep_last", "9", "--epochs", "2")
    assert train_here(*flags(encoder, rows, tmp_path / "whole", *more)) == 0
    shutil.copytree(tmp_path / "whole.run", tmp_path / "resumed.run")
    checkpoint = tmp_path / "resumed.run" / "checkpoints" / f"step_{step:08}"
    assert train_here(*flags(encoder, rows, tmp_path / "resumed", *more), "--resume", checkpoint) == 0

    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert weights[0] == weights[1]


def test_a_rate_of_ones_own_trains_as_ever_with_a_random_head(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path
) -> None:
    assert train_here(*flags(encoder, rows, tmp_path / "model", "--learning_rate", "1e-4", "--epochs", "1")) == 0

    assert AutoConfig.from_pretrained(tmp_path / "model").num_hidden_layers == 4
    assert "fitted_head" not in metrics(tmp_path / "model")


@pytest.mark.parametrize(
    ("task", "header", "label"),
    [
        ("multi_label", "text,label", lambda i: ("weather", "beach", "weather|beach", "")[i % 4]),
        ("regression", "text,label", lambda i: str(i % 2 + i % 3 / 10)),
    ],
)
def test_other_tasks_begin_with_a_fitted_head_too(
    task: str, header: str, label: Callable[[int], str], encoder: Path, train_here: Train, tmp_path: Path
) -> None:
    for split, count in (("train", 48), ("test", 24)):
        words = {"weather": "storm", "beach": "sand", "weather|beach": "storm and sand", "": "noon"}
        texts = [words.get(label(i), ("sand", "storm")[i % 2]) + f" at {i % 9}" for i in range(count)]
        lines = [f"{text},{label(i)}" for i, text in enumerate(texts)]
        (tmp_path / f"{split}.csv").write_text("\n".join([header, *lines]))

    output = tmp_path / "model"
    assert train_here(*flags(encoder, tmp_path, output, "--task", task, "--method", "head")) == 0

    found = metrics(output)
    assert found["fitted_head"]["metric"] == {"multi_label": "micro_f1", "regression": "r2"}[task]
    assert found["test"].get("micro_f1", found["test"].get("r2")) > 0.8


def read_here(folder: Path) -> np.ndarray:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    torch.manual_seed(0)
    model = NewsClassifier(2, str(folder), ["a", "b"], loading=Loading(pooling=MEAN))
    rows = TokenizedRows(np.arange(5, 45, dtype=np.int32), np.arange(0, 41, 4), np.zeros(10, np.int64), 0)
    return read_on_all_ranks(model, rows, np.arange(10), ranks, "fp32")[MEAN]


def test_ranks_that_share_the_reading_find_what_one_finds(encoder: Path) -> None:
    alone, shared = run_on_ranks(1, read_here, encoder)[0], run_on_ranks(3, read_here, encoder)

    assert all(np.allclose(found, alone, atol=1e-5) for found in shared)


@pytest.mark.slow
def test_a_model_that_was_written_with_the_mean_is_trained_again_with_the_mean(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train_here(*flags(encoder, rows, first, "--method", "head")) == 0
    assert train_here(*flags(first, rows, second, "--method", "head")) == 0

    assert AutoConfig.from_pretrained(second).num_hidden_layers == 5
    accuracies = [metrics(output)["test"]["accuracy"] for output in (first, second)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.05)


@pytest.mark.slow
def test_the_configuration_that_a_run_writes_down_trains_the_same_model_again(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path
) -> None:
    assert train_here(*flags(encoder, rows, tmp_path / "first", "--epochs", "1")) == 0
    file = tmp_path / "first.run" / "config.yaml"

    assert train_here("--config", file, *flags(encoder, rows, tmp_path / "second", "--epochs", "1")) == 0

    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]


def test_a_head_without_a_bias_or_of_all_tokens_begins_at_random(encoder: Path, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_labels=2
    )
    model = NewsClassifier.around(AutoModelForSequenceClassification.from_config(config), Classification(["a", "b"]))

    found = start_from_head(TrainConfig(model=str(encoder)), model, ALONE, None, "fp32", None, print)  # type: ignore[arg-type]

    assert found is None


def test_a_run_of_an_older_version_keeps_its_validation_rows_when_it_is_resumed(
    encoder: Path, rows: Path, train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Such a run has few rows and yet kept some of them, and says so in its checkpoints alone.
    given = flags(encoder, rows, tmp_path / "model", "--learning_rate", "1e-4")
    assert train_here(*given, "--epochs", "1", "--validation_fraction", "0.2") == 0
    assert "32 training, 8 validation" in capfd.readouterr().out

    assert train_here(*given, "--epochs", "2") == 0

    assert "32 training, 8 validation" in capfd.readouterr().out
