"""Runs that train layers at different rates, freeze some, average the weights, or get more epochs than they had."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from training.model.classifier import NewsClassifier

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]

SIZES = ("--batch_size", 8, "--save_every", 2, "--keep_last", 20)
TUNED = ("--layer_decay", 0.7, "--betas", "0.8,0.98", "--freeze", 2, "--ema", 0.9)
STEPS_PER_EPOCH = 8


def _weights(output: Path) -> str:
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()


def _losses(metrics_of: Metrics, output: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(output.with_name(f"{output.name}.run"))]


def test_a_tuned_run_resumes_exactly_and_writes_the_average_of_what_it_trained(
    train_here: Train,
    metrics_of: Metrics,
    checkpoint_state: Callable[..., Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags = (*SIZES, *TUNED, "--epochs", 1)
    assert train_here(*flags, "--output_dir", whole) == 0
    banner = capfd.readouterr().out
    checkpoint = tmp_path / "whole.run" / "checkpoints" / "step_00000004"

    assert train_here(*flags, "--output_dir", resumed, "--resume", checkpoint) == 0

    assert _losses(metrics_of, resumed) == _losses(metrics_of, whole)[4:]
    assert _weights(resumed) == _weights(whole)
    at_start, at_end = (checkpoint_state(tmp_path / "whole.run", step) for step in (2, 8))
    written = {f"network.{name}": tensor for name, tensor in load_file(whole / "model.safetensors").items()}
    averages = at_end.part("average/")
    frozen = {name for name in written if re.search(r"embeddings|layer\.[01]\.", name)}
    assert averages.keys() == written.keys() - frozen
    assert all(tensor.equal(averages[name]) for name, tensor in written.items() if name not in frozen)
    assert not any(tensor.equal(at_end.model[name]) for name, tensor in averages.items())
    assert all(written[name].equal(at_start.model[name]) for name in frozen)
    assert re.search(r"Model .*\d M parameters, 0\.4\d M of them trained = ", banner)
    assert "times 0.7 from each block to the one below" in banner
    assert "the moving average of the weights, --ema 0.9" in (tmp_path / "whole.run" / "report.html").read_text()


@pytest.mark.slow
def test_two_ranks_train_average_and_test_as_one_does(launch: Callable[..., Any], tmp_path: Path) -> None:
    for name, world_size, more in (("one", 1, ()), ("ddp", 2, ()), ("zero3", 2, ("--strategy", "zero3"))):
        sizes = (*TUNED, "--batch_size", 8 // world_size, "--epochs", 1, "--output_dir", tmp_path / name)
        run = launch(world_size, *map(str, sizes), *more)
        assert run.process.returncode == 0, run.err
    one, *others = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "ddp", "zero3"))
    for scores in others:
        for split in ("validation", "test"):
            assert scores[split]["loss"] == pytest.approx(one[split]["loss"], rel=1e-4)


CONSTANT = (*SIZES, "--schedule", "constant", "--warmup", 0, "--ema", 0.9)


@pytest.fixture
def one_epoch(train_here: Train, tmp_path: Path) -> Path:
    """A finished run of one epoch at a constant rate."""
    assert train_here(*CONSTANT, "--epochs", 1, "--output_dir", tmp_path / "model") == 0
    return tmp_path / "model"


@pytest.mark.slow
def test_a_finished_run_gets_more_epochs_and_is_tested_again(
    one_epoch: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert train_here(*CONSTANT, "--epochs", 2, "--output_dir", one_epoch) == 0
    said = capfd.readouterr().out
    assert train_here(*CONSTANT, "--epochs", 2, "--output_dir", tmp_path / "whole") == 0

    assert "--epochs was 1 and is now 2, so the schedule ends at step 16" in said
    run_dir = tmp_path / "model.run"
    assert [record["step"] for record in metrics_of(run_dir)] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert [record["epoch"] for record in metrics_of(run_dir, "epoch")] == [1, 2]
    assert [record["step"] for record in metrics_of(run_dir, "test")] == [16]
    # A constant rate does not depend on where the schedule ends, so nothing shows that the run had ended before.
    assert _losses(metrics_of, one_epoch) == _losses(metrics_of, tmp_path / "whole")
    assert _weights(one_epoch) == _weights(tmp_path / "whole")

    assert train_here(*CONSTANT, "--epochs", 1, "--output_dir", one_epoch) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert re.search(r"--epochs 1: .*step_00000016 has reached epoch 2; give 2 or more, or --resume none", line)


@pytest.mark.slow
def test_a_run_stopped_within_an_epoch_takes_a_new_end_and_keeps_it(
    one_epoch: Path, train_here: Train, metrics_of: Metrics, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    middle = one_epoch.with_name("model.run") / "checkpoints" / "step_00000006"
    linear = (*SIZES, "--ema", 0.9, "--warmup", 0, "--epochs", 3)
    wrong = train_here(*linear, "--output_dir", tmp_path / "other", "--resume", middle)
    assert wrong == 2
    assert "schedule was 'constant' and is now 'linear'" in capfd.readouterr().err

    flags = (*CONSTANT, "--epochs", 3, "--output_dir", tmp_path / "longer")
    assert train_here(*flags, "--resume", middle) == 0
    losses = _losses(metrics_of, tmp_path / "longer")
    later = tmp_path / "longer.run" / "checkpoints" / "step_00000010"
    capfd.readouterr()
    assert train_here(*flags, "--resume", later) == 0

    assert "so the schedule ends" not in capfd.readouterr().out
    assert _losses(metrics_of, tmp_path / "longer") == losses


def test_without_dropout_a_model_answers_the_same_in_training_as_in_serving() -> None:
    model = NewsClassifier(4, "checkpoints/starter")
    ids = torch.randint(5, 8000, (4, 24), generator=torch.Generator().manual_seed(0))

    def differs() -> bool:
        in_training, in_serving = model.train()(ids, None), model.eval()(ids, None)
        return not torch.allclose(in_training, in_serving, atol=1e-5)

    assert differs()
    assert model.set_dropout(0)
    assert not differs()


def test_dropout_is_refused_for_a_network_that_has_none(
    train_here: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here" / "plain.py").write_text(
        "from torch import nn\n"
        "def build(words, scores):\n"
        "    class Plain(nn.Module):\n"
        "        def __init__(self):\n"
        "            super().__init__()\n"
        "            self.words, self.head = nn.Embedding(words, 8), nn.Linear(8, scores)\n"
        "        def forward(self, ids, mask):\n"
        "            return self.head((self.words(ids) * mask[..., None]).sum(1))\n"
        "    return Plain()\n"
    )

    assert train_here("--network", "plain:build", "--dropout", 0.1, "--output_dir", tmp_path / "model") == 2

    assert "--dropout 0.1: --model tiny has no dropout layers; leave it out" in capfd.readouterr().err


@pytest.mark.slow
def test_rough_copies_are_trained_on_and_named(
    train_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--rough_share", "1", "--batch_size", "8", "--output_dir", tmp_path / "model", "--epochs", "1")
    assert train_here(*flags) == 0

    shown = capfd.readouterr().out
    assert "Rough texts    57 rows of each epoch, the same texts as people type them" in shown
    assert "step 15/15" in shown  # 114 texts
