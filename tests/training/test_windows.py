"""Long texts as windows: the same on any number of ranks, exact to resume, and an ordinary model in the end."""

from __future__ import annotations

import csv
import random
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from common.errors import UserError
from common.model_folder import read_saved_model
from common.windows import ATTENTION_KEY, MOST_WINDOWS, pool
from tests.deployment.documented import documented
from tests.processes import here, run_on_ranks
from tests.training.parallelism.small_models import small_batch, small_model
from tests.training.parallelism.small_runs import small_rows, take_steps
from training.config import TrainConfig
from training.data.batching import DataShard, micro_batches_of_rank
from training.evaluation.evaluator import evaluate_saved
from training.model.classifier import NewsClassifier
from training.model.window_attention import add_window_attention, pool_windows, split_head
from training.parallelism.registry import STRATEGIES

REPOSITORY = Path(__file__).resolve().parents[2]
Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
WINDOW = 8


def widened(**fields: Any) -> tuple[NewsClassifier, TrainConfig]:
    config = TrainConfig(deterministic=True, long="windows", max_length=WINDOW, **fields)
    model = small_model("distilbert", dropout=0.1)
    add_window_attention(model, config)
    return model, config


def train_on_this_rank(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a few steps over rows of one to three windows and, on rank 0, the weights after them."""
    model, config = widened(**fields)
    strategy = STRATEGIES[config.strategy](model, config, here(), "fp32")
    rows = replace(small_rows(), window=WINDOW)
    losses = take_steps(strategy, range(1, 4), accumulation=config.gradient_accumulation, rows=rows)
    return losses, strategy.full_weights()


@pytest.fixture(scope="module")
def on_one_process() -> tuple[list[float], dict[str, torch.Tensor]]:
    return run_on_ranks(1, train_on_this_rank, {})[0]


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        (2, {"strategy": "ddp", "gradient_accumulation": 2}),
        (2, {"strategy": "zero3"}),
        pytest.param(2, {"strategy": "ddp"}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "zero1"}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "zero2"}, marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "ddp"}, marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_trains_on_windows_as_one_does(
    world_size: int, fields: dict[str, Any], on_one_process: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    expected_losses, expected = on_one_process
    losses, found = run_on_ranks(world_size, train_on_this_rank, fields)[0]

    assert losses == pytest.approx(expected_losses, rel=1e-5)
    found, expected = (split_head(weights, "classifier") for weights in (found, expected))
    for name, tensor in expected.items():
        if name.endswith("k_lin.bias"):  # its gradient is 0 but for rounding, of which AdamW makes steps
            continue
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert expected[f"network.{ATTENTION_KEY}"].abs().max() > 0, "the attention has learned nothing"


def losses_of_short_rows(window: int) -> list[float]:
    model, config = widened() if window else (small_model("distilbert", dropout=0.1), TrainConfig())
    strategy = STRATEGIES["ddp"](model, config, here(), "fp32")
    return take_steps(strategy, range(1, 4), rows=replace(small_rows(), window=window))


def test_rows_of_one_window_train_as_without_windows() -> None:
    with_windows, without = (run_on_ranks(1, losses_of_short_rows, window)[0] for window in (32, 0))

    assert with_windows == pytest.approx(without, rel=1e-6)


def test_every_window_is_in_one_share_and_the_shares_have_equal_work() -> None:
    rows = replace(small_rows(), window=WINDOW)
    batch = np.argsort(rows.lengths, kind="stable")

    shares = [micro_batches_of_rank(rows, batch, DataShard(rank, 3))[0] for rank in range(3)]

    counts = [len(share.input_ids) for share in shares]
    assert np.concatenate([share.rows for share in shares]).tolist() == batch.tolist()
    assert sum(counts) == rows.num_inputs(batch).sum()
    assert max(counts) - min(counts) <= 3
    assert [share.first_row for share in shares] == [0, counts[0], counts[0] + counts[1]]
    assert all(share.input_ids.shape[1] == WINDOW for share in shares)


def test_training_and_serving_pool_windows_alike_and_one_window_keeps_its_scores() -> None:
    outputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)) * 30
    windows = torch.tensor([[0, -1, -1], [1, 2, 3], [4, 5, -1]])

    found, shares = pool(outputs.numpy(), np.array([1, 3, 2]))

    torch.testing.assert_close(pool_windows(outputs, windows), torch.from_numpy(found))
    assert found[0].tolist() == outputs[0, :-1].tolist()
    assert np.add.reduceat(shares, [0, 1, 4]) == pytest.approx([1, 1, 1])


def test_a_row_whose_scores_are_not_finite_spoils_no_other() -> None:
    outputs = torch.randn(4, 3)
    outputs[0] = torch.nan
    outputs.requires_grad_()

    found = pool_windows(outputs, torch.tensor([[0, -1], [1, 2], [3, -1]]))

    assert found.isnan().all(dim=1).tolist() == [True, False, False]


@pytest.fixture
def long_texts(tmp_path: Path) -> Path:
    """Texts of 4 to 60 words, of which three anywhere in them say the label; one is longer than all windows."""
    folder, words = tmp_path / "long", random.Random(3)
    folder.mkdir()
    about = {"land": ["hill", "field", "farm", "road"], "sea": ["wave", "ship", "harbour", "tide"]}
    for split, count in (("train", 70), ("test", 20)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for number in range(count):
                label, length = list(about)[number % 2], 400 if number == 0 else words.choice([4, 20, 60])
                text = words.choices(["the", "of", "a", "in", "more", "with"], k=length)
                text[(place := words.randrange(length)) : place] = words.choices(about[label], k=3)
                writer.writerow([" ".join(text), label])
    return folder


def loss_of_saved(path: Path) -> float:
    return evaluate_saved(path, None, here(), quiet=True)["loss"]


FLAGS = ("--long", "windows", "--max_length", "16", "--batch_size", "8", "--epochs", "1")


def test_a_run_writes_an_ordinary_model_which_is_evaluated_with_its_windows(
    long_texts: Path, train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    assert train_here("--dataset", long_texts, "--max_train_rows", "0", *FLAGS, "--output_dir", output) == 0

    saved, weights = read_saved_model(output), load_file(output / "model.safetensors")
    assert f"2 of 90 texts (2.2%) are cut at {MOST_WINDOWS} windows of 16 tokens" in capfd.readouterr().out
    assert weights["classifier.weight"].shape == (2, 128)
    assert weights[ATTENTION_KEY].shape == (1, 128)
    assert weights[ATTENTION_KEY].abs().max() > 0
    assert AutoModelForSequenceClassification.from_pretrained(output).config.num_labels == 2
    for path in (output, output.with_suffix(".pt")):
        assert run_on_ranks(1, loss_of_saved, path)[0] == pytest.approx(saved.metadata["test"]["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_on_windows_resumes_exactly(
    long_texts: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    def train(name: str, *flags: object) -> list[float]:
        flags = ("--dataset", long_texts, *FLAGS, "--save_every", "3", "--keep_last", "9", *flags)
        assert train_here(*flags, "--output_dir", tmp_path / name) == 0
        return [record["loss"] for record in metrics_of(tmp_path / f"{name}.run")]

    whole = train("model")
    resumed = train("model", "--resume", tmp_path / "model.run" / "checkpoints" / "step_00000003")
    assert resumed == whole


def test_a_model_whose_scores_come_from_no_linear_layer_is_refused() -> None:
    model = small_model("distilbert")
    model.network.classifier = nn.Sequential(model.network.classifier, nn.Softmax(dim=1))

    with pytest.raises(UserError, match=r"--long windows and --model .*: the last layer of distilbert is not"):
        add_window_attention(model, TrainConfig(long="windows"))


@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
def test_other_families_get_the_same_output_more(family: str) -> None:
    model = small_model(family)
    model.eval()
    ids, mask = small_batch()[:2]
    before = model(ids, mask)

    add_window_attention(model, TrainConfig(long="windows"))

    torch.testing.assert_close(model(ids, mask), torch.cat([before, torch.zeros(len(ids), 1)], dim=1))


def test_an_encoder_in_half_precision_trains_on_windows(long_texts: Path, train_here: Train, tmp_path: Path) -> None:
    flags = ("--dataset", long_texts, "--model", "starter", "--long", "windows", "--max_length", 16)
    assert train_here(*flags, "--max_train_rows", 8, "--epochs", 1, "--output_dir", tmp_path / "model") == 0


def test_the_documented_command_trains(
    long_texts: Path, train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training").symlink_to(REPOSITORY / "training")
    (tmp_path / "articles.csv").write_bytes((long_texts / "train.csv").read_bytes())
    words = shlex.split(documented("docs/methods.md", "long-texts"))
    flags = words[words.index("--config") :]

    assert train_here(*flags, "--max_length", 16, "--epochs", 1) == 0
    assert (tmp_path / "checkpoints" / "articles" / "model.safetensors").is_file()
