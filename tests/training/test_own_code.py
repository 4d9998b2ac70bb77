"""Training from Python, with a network, a loss, a metric and a subscriber of one's own: the examples of the page."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from common.errors import ModelLoadError, UserError
from common.model_folder import read_saved_model
from tests.deployment.documented import REPOSITORY, documented
from tests.processes import save_blank
from training import Subscriber, TrainConfig, train
from training.data.dataset import AG_NEWS_LABELS, load_data
from training.monitoring import EpochMetrics

PAGE = "docs/tasks.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / PAGE).read_text(), re.MULTILINE | re.DOTALL)
SMALL = {"dataset": "sample", "model": "tiny", "max_length": 32, "max_train_rows": 80, "epochs": 1, "device": "cpu"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the page's my_models.py."""
    (tmp_path / "my_models.py").write_text(next(code for code in EXAMPLES if "class TextCNN" in code))
    (tmp_path / "training").symlink_to(REPOSITORY / "training")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Figure, "savefig", save_blank)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)
    sys.modules.pop("my_models", None)


def _my_models() -> ModuleType:
    import my_models

    return my_models


def _config(folder: Path, **fields: Any) -> TrainConfig:
    return TrainConfig(**SMALL, output_dir=folder / "model", cache_dir=folder / "cache", **fields)


def test_an_own_network_loss_and_metric_train_and_a_subscriber_follows(folder: Path) -> None:
    mine, followed = _my_models(), []

    class Follow(Subscriber):
        def receive(self, event: object) -> None:
            if isinstance(event, EpochMetrics):
                followed.append(event.validation["top_two"])

    result = train(
        _config(folder, best_metric="top_two", metric="my_models:top_two"),
        network=mine.TextCNN,
        loss=mine.focal_loss,
        subscribers=[Follow()],
    )

    assert result.model_folder == folder / "model"
    assert len(followed) == 1
    assert 0 <= result.metrics["test"]["top_two"] <= 1
    assert "Top_two" in (folder / "model.run" / "report.html").read_text()
    network = mine.TextCNN(load_file(folder / "model" / "model.safetensors")["words.weight"].shape[0], 4)
    network.load_state_dict(load_file(folder / "model" / "model.safetensors"))
    with pytest.raises(ModelLoadError, match=r"holds a network of your own \(my_models:TextCNN\)"):
        read_saved_model(folder / "model")


@pytest.mark.slow
def test_calling_again_resumes_and_gives_the_same_result(folder: Path) -> None:
    first = train(_config(folder), network=_my_models().TextCNN)
    again = train(_config(folder), network=_my_models().TextCNN)

    assert again.metrics["test"] == first.metrics["test"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_two_ranks_train_an_own_network_as_one_does_by_the_documented_command(
    strategy: str, folder: Path, launch: Callable[..., Any], metrics_of: Callable[..., Any]
) -> None:
    words = shlex.split(documented(PAGE, "own-network"))
    flags = words[words.index("--network") : words.index("--strategy")]
    losses = []
    for ranks in (1, 2):
        output = folder / f"on_{ranks}"
        more = ("--strategy", strategy) if ranks > 1 else ()
        size = ("--batch_size", 8 // ranks, "--epochs", 1, "--output_dir", output)
        ended = launch(ranks, *flags, *more, *size, cwd=folder)
        assert ended.process.returncode == 0, ended.err
        losses.append([step["loss"] for step in metrics_of(folder / f"on_{ranks}.run")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_examples_of_the_page_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, names = load_data("sample").test, AG_NEWS_LABELS
    lines = [json.dumps({"text": rows.texts[i][:40], "label": names[rows.labels[i]]}) for i in range(0, len(rows), 5)]
    (folder / "short.jsonl").write_text("\n".join(lines))
    for number, code in enumerate(code for code in EXAMPLES if "train(" in code):
        quick = code.replace('dataset="sample"', f'dataset="short.jsonl", cache_dir="cache_{number}"')
        exec(compile(quick, f"example {number}", "exec"), {"__name__": "example"})
    assert (folder / "checkpoints" / "sample" / "model.safetensors").is_file()
    assert (folder / "checkpoints" / "followed" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"network": lambda words, scores: torch.nn.Embedding(words, scores)},
            "--network: a text cannot be classified",
        ),
        ({"loss": lambda scores, labels: scores.sum()}, r"--loss: must return the loss of each row, .* shape \(4,\)"),
        ({"loss": lambda scores: scores}, r"--loss: failed on a few rows \(TypeError"),
        ({"metric": lambda scores, labels: {"best": "high"}}, "--metric: 'best' must be a number, got 'high'"),
        (
            {"metric": lambda scores, labels: {"top_two": 0.5}},
            "--best_metric top2: there is .*, loss, top_two; name one",
        ),
    ],
)
def test_code_that_does_not_fit_is_refused_before_the_first_step(
    arguments: dict[str, Any], message: str, folder: Path
) -> None:
    fields = {"metric": "my_models:top_two", "best_metric": "top2"} if "top2" in message else {}
    with pytest.raises(UserError, match=message):
        train(_config(folder, **fields), **arguments)
    assert not (folder / "model.run").exists()


def test_a_network_that_reads_padding_is_refused(folder: Path) -> None:
    class Mean(torch.nn.Module):
        def __init__(self, words: int, scores: int) -> None:
            super().__init__()
            self.words, self.scores = torch.nn.Embedding(words, 8), torch.nn.Linear(8, scores)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.scores(self.words(ids).mean(dim=1))

    with pytest.raises(UserError, match=r"--network: Mean reads padding, which changes a row's logits by"):
        train(_config(folder), network=Mean)


@pytest.mark.parametrize("path", ["nowhere:TextCNN", "my_models:Nothing", "my_models"])
def test_an_import_path_that_leads_nowhere_is_refused(path: str, folder: Path) -> None:
    with pytest.raises(UserError, match=f"--network {path}: cannot be imported|is not a class or a function"):
        train(_config(folder, network=path))


def _numbers(folder: Path) -> dict[str, Any]:
    rows = (f"{'good ' * (i % 4)}film {i},{300 + 10 * (i % 4)}" for i in range(60))
    (folder / "numbers.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    return {"dataset": str(folder / "numbers.csv"), "task": "regression"}


@pytest.mark.parametrize("has_own_loss", [True, False])
def test_an_own_loss_and_metric_of_numbers_get_them_in_their_unit(folder: Path, has_own_loss: bool) -> None:
    def squared(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (scores[:, 0] - targets.float()) ** 2

    def mean_square(scores: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        return {"mean_square": float(np.mean((scores[:, 0] - targets) ** 2))}

    config = TrainConfig(**SMALL | _numbers(folder), output_dir=folder / "model", cache_dir=folder / "cache")
    test = train(config, loss=squared if has_own_loss else None, metric=mean_square).metrics["test"]

    assert test["mean_square"] == pytest.approx(test["rmse"] ** 2, rel=1e-4)
    if has_own_loss:  # which the network cannot come near to in one epoch, as it begins near 0
        assert test["rmse"] > 100


def test_a_layer_that_is_not_the_last_one_is_not_given_the_scale_of_the_numbers(folder: Path) -> None:
    class Attending(torch.nn.Module):
        def __init__(self, words: int, scores: int) -> None:
            super().__init__()
            self.words, self.scores = torch.nn.Embedding(words, 8), torch.nn.Linear(8, scores)
            self.attend = torch.nn.Linear(8, 1)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            words = self.words(ids)
            weights = self.attend(words).masked_fill(mask[..., None] == 0, -torch.inf).softmax(dim=1)
            return self.scores((weights * words).sum(dim=1))

    config = TrainConfig(**SMALL | _numbers(folder), output_dir=folder / "model", cache_dir=folder / "cache")
    train(config, network=Attending)

    written = load_file(folder / "model" / "model.safetensors")
    assert written["attend.weight"].abs().max() < 3
    assert written["scores.bias"].abs().max() < 3


def test_an_own_metric_is_computed_on_all_rows_at_once(folder: Path) -> None:
    seen = []

    def count(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        seen.append((scores.shape, labels.shape))
        return {"rows_seen": len(labels)}

    result = train(_config(folder), metric=count)

    assert result.metrics["test"]["rows_seen"] == result.metrics["test"]["rows"]
    assert seen[-1] == ((result.metrics["test"]["rows"], 4), (result.metrics["test"]["rows"],))
