"""The starter: made by one command from an encoder and texts, and what training does with the one in the repository."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from common.model_folder import read_saved_model
from tests.deployment.documented import REPOSITORY, documented
from tests.training.parallelism.cases import ALONE
from tests.training.small_teacher import fixture_teacher, fixture_text  # noqa: F401
from training.config import STARTER, TrainConfig
from training.data import prepare
from training.model.classifier import NewsClassifier
from training.model.pooling import POOLER, trained_pooling

SIZES = ("--width", "32", "--layers", "2", "--vocabulary", "85", "--embedding_epochs", "1", "--processes", "1")


@pytest.mark.slow
def test_the_documented_commands_make_a_starter_and_fine_tune_it(teacher: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "minilm").symlink_to(teacher)
    (tmp_path / "mails.txt").symlink_to(text / "train.txt")
    rows = "\n".join(f"{'calm' if i % 2 else 'rough'},{'sea' if i % 2 else 'storm'} {i}" for i in range(60))
    (tmp_path / "my_rows.csv").write_text(f"label,text\n{rows}\n")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    environment["DISTRINEWS_CACHE_DIR"] = str(tmp_path / "cache")
    make, tune = documented("docs/tasks.md", "starter").strip().splitlines()

    def run(command: str, *more: str) -> str:
        words = [sys.executable, *shlex.split(command)[1:], *more]
        ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    said = run(make, *SIZES)
    assert (
        said.index("--task masked_lm") < said.index("--task embedding") < said.index("Written: checkpoints/our-starter")
    )
    starter = tmp_path / "checkpoints" / "our-starter"
    assert {str(tensor.dtype) for tensor in load_file(starter / "model.safetensors").values()} == {"torch.float16"}
    card = (starter / "README.md").read_text()
    assert "--width 32" in card
    assert "minilm/model.safetensors" in card
    again = run(make, *SIZES)  # finds both runs finished
    assert "step 1/" in said
    assert "step 1/" not in again
    words = [sys.executable, *shlex.split(make)[1:], *SIZES, "--width", "64"]
    other = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert other.returncode == 2
    assert "--width 64: checkpoints/our-starter.parts was begun with --width 32" in other.stderr
    run(tune, "--epochs", "1")
    assert (
        json.loads((tmp_path / "checkpoints/tickets/metrics.json").read_text())["base_model"]
        == "./checkpoints/our-starter"
    )


def test_a_width_that_splits_a_head_is_refused_in_one_line(
    teacher: Path, text: Path, start: Callable[..., Any], tmp_path: Path
) -> None:
    command = [sys.executable, REPOSITORY / "training" / "starter.py", "--dataset", text, "--teacher", teacher]
    ended = start([*command, "--output_dir", tmp_path / "starter", "--width", "40"], warm=True)
    assert ended.process.returncode == 2
    assert "--width 40: must be a multiple of 16, the width of the teacher's heads [flag-value]" in ended.err
    assert not (tmp_path / "starter").exists()


@pytest.mark.slow  # the test below, with real processes
def test_without_a_network_a_run_that_names_no_model_takes_the_starter_and_keeps_it(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    place = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    train = [
        sys.executable,
        REPOSITORY / "training" / "train_single.py",
        "--dataset",
        "sample",
        "--max_train_rows",
        "60",
    ]
    train += ["--output_dir", tmp_path / "model", "--cache_dir", tmp_path / "cache", "--device", "cpu", "--epochs", "1"]

    ended = start(train, env=place)
    assert ended.process.returncode == 0, ended.err
    assert "distilbert-base-uncased is not in its cache: training --model starter instead" in ended.out
    metrics = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert metrics["base_model"] == "starter"
    # Extended when there is a network again: the run keeps the model that it began with.
    ended = start([*train, "--epochs", "2"], env={"HF_HOME": place["HF_HOME"], "HF_HUB_OFFLINE": "0"})
    assert ended.process.returncode == 0, ended.err
    assert "is not in its cache" not in ended.out
    assert "step 8/8" in ended.out


@pytest.mark.parametrize("hub_answers", [True, False])
def test_a_run_that_names_no_model_takes_what_can_be_had_and_keeps_it(
    hub_answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(prepare, "hub_may_have", lambda name, revision: hub_answers)
    chosen = prepare.settle_model(TrainConfig(), ALONE, {}, said.append).model
    assert chosen == ("distilbert-base-uncased" if hub_answers else STARTER)
    assert len(said) == (not hub_answers)

    # When it is resumed, whatever the hub answers then.
    for earlier in ("distilbert-base-uncased", STARTER):
        config = prepare.settle_model(TrainConfig(), ALONE, {"config": {"model": earlier}}, said.append)
        assert config.model == earlier
    assert prepare.settle_model(TrainConfig(model="acme/other"), ALONE, {}, said.append).model == "acme/other"
    assert len(said) == (not hub_answers)


def test_the_starter_of_the_repository_is_an_encoder_with_a_card() -> None:
    folder = REPOSITORY / "checkpoints" / "starter"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    card = (folder / "README.md").read_text()
    for words in ("python -m training.starter", "SHA-256", "research and other non-commercial use"):
        assert words in card, words
    assert trained_pooling(folder) == POOLER


def test_a_teacher_that_is_no_folder_of_an_encoder_is_refused_in_one_line(
    text: Path, start: Callable[..., Any], tmp_path: Path
) -> None:
    command = [sys.executable, REPOSITORY / "training" / "starter.py", "--dataset", text]
    ended = start([*command, "--teacher", "bert-base-uncased", "--output_dir", tmp_path / "starter"], warm=True)
    assert ended.process.returncode == 2
    assert "--teacher bert-base-uncased: has no config.json; give the folder of an encoder" in ended.err


@pytest.mark.slow
def test_a_model_that_began_in_half_precision_is_written_and_read_in_full(
    train_here: Callable[..., int], tmp_path: Path
) -> None:
    flags = ("--model", "starter", "--method", "head", "--max_length", "32", "--output_dir", tmp_path / "model")
    assert train_here(*flags) == 0

    # transformers loads a model in what its configuration says, and CPUs compute halves slowly.
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    assert {parameter.dtype for parameter in AutoModel.from_pretrained(tmp_path / "model").parameters()} == {
        torch.float32
    }
    about = json.loads((tmp_path / "model" / "config.json").read_text()) | {"dtype": "float16"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(about))  # as an earlier version wrote it
    model = NewsClassifier.from_saved(read_saved_model(tmp_path / "model"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
