"""Runs of every task: on one rank and on several, resumed, written, read back."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

from common.model_folder import read_manifest, read_saved_model
from inference import export
from tests.deployment.documented import REPOSITORY, documented
from training.distributed.group import join_ranks
from training.evaluation.evaluator import evaluate_saved
from training.model.classifier import NewsClassifier
from training.quiet import quiet_libraries
from training.tasks import PairClassification

Train = Callable[..., int]
Metrics = Callable[..., list[dict[str, Any]]]
WORDS = ("sea", "storm", "sun")
TASKS = ("multi_label", "regression", "pair")
LAYOUTS = {
    "zero3": (2, "--strategy", "zero3"),
    "tp": (2, "--strategy", "tp", "--gradient_accumulation", 2),
    "pp": (2, "--strategy", "pp", "--gradient_accumulation", 2),
    "3d": (8, "--strategy", "3d", "--pp", 2, "--tp", 2, "--gradient_accumulation", 2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data of each task: which of three words a text has, and how many."""
    folders = {task: tmp_path_factory.mktemp(task) for task in TASKS}
    for split, count in (("train", 96), ("test", 24)):
        rows = [(i, [word for place, word in enumerate(WORDS) if i >> place & 1]) for i in range(count)]
        texts = [f"{split} {i}: {' and '.join(words) or 'nothing'}" for i, words in rows]
        lines = [json.dumps({"text": text, "label": words}) for text, (_, words) in zip(texts, rows, strict=True)]
        (folders["multi_label"] / f"{split}.jsonl").write_text("\n".join(lines))
        pairs = [
            {"text": f"{split} {i}: {words}", "text_pair": WORDS[i % 3], "label": str(WORDS[i % 3] in words)}
            for i, words in rows
        ]
        (folders["pair"] / f"{split}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        numbers = [f"{text};{1000 * len(words)}" for text, (_, words) in zip(texts, rows, strict=True)]
        (folders["regression"] / f"{split}.csv").write_text("text;label\n" + "\n".join(numbers))
    return folders


def _flags(task: str, folders: dict[str, Path], output: Path) -> tuple[object, ...]:
    return ("--task", task, "--dataset", folders[task], "--output_dir", output, "--save_every", 4, "--keep_last", 9)


@pytest.fixture(scope="module")
def alone(
    folders: dict[str, Path], launch_shared: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The model of each task, trained by one process."""
    models = {}
    for task in TASKS:
        models[task] = tmp_path_factory.mktemp("alone") / task
        ended = launch_shared(1, *_flags(task, folders, models[task]), "--batch_size", 8)
        assert ended.process.returncode == 0, ended.err
    return models


def _losses(metrics_of: Metrics, output: Path) -> list[float]:
    run = output.with_name(f"{output.name}.run")
    return [step["loss"] for step in metrics_of(run)] + [
        epoch["validation"]["loss"] for epoch in metrics_of(run, "epoch")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", *LAYOUTS])
@pytest.mark.parametrize("task", TASKS)
def test_every_layout_trains_a_task_as_one_process_does(
    task: str,
    layout: str,
    folders: dict[str, Path],
    alone: dict[str, Path],
    launch: Callable[..., Any],
    metrics_of: Metrics,
    tmp_path: Path,
) -> None:
    world_size, *flags = LAYOUTS.get(layout, (2,))
    shares = {"ddp": 2, "zero3": 2, "3d": 2}.get(layout, 1)
    accumulation = 2 if "--gradient_accumulation" in flags else 1
    output = tmp_path / "model"
    size = 8 // shares // accumulation
    ended = launch(world_size, *_flags(task, folders, output), *flags, "--batch_size", size)

    assert ended.process.returncode == 0, ended.err
    assert _losses(metrics_of, output) == pytest.approx(_losses(metrics_of, alone[task]), rel=1e-4)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task == "pair" else pytest.mark.slow) for task in TASKS]
)
def test_a_run_resumes_exactly(
    task: str,
    folders: dict[str, Path],
    alone: dict[str, Path],
    train_here: Train,
    metrics_of: Metrics,
    tmp_path: Path,
) -> None:
    shutil.copytree(alone[task].with_name(f"{task}.run"), tmp_path / "model.run")
    checkpoint = tmp_path / "model.run" / "checkpoints" / "step_00000004"
    assert train_here(*_flags(task, folders, tmp_path / "model"), "--batch_size", 8, "--resume", checkpoint) == 0

    assert _losses(metrics_of, tmp_path / "model") == _losses(metrics_of, alone[task])
    weights, again = _weights(alone[task]), _weights(tmp_path / "model")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def _weights(model: Path) -> dict[str, torch.Tensor]:
    return torch.load(model.with_suffix(".pt"), weights_only=True)["model_state_dict"]


def test_a_multi_label_model_names_its_thresholds_and_transformers_answers_with_its_probabilities(
    alone: dict[str, Path], folders: dict[str, Path]
) -> None:
    quiet_libraries()
    saved = read_saved_model(alone["multi_label"])
    metrics = saved.metadata
    classify = pipeline("text-classification", model=str(alone["multi_label"]), top_k=None)
    rows = [json.loads(line) for line in (folders["multi_label"] / "test.jsonl").read_text().splitlines()]
    answers = classify([row["text"] for row in rows])

    assert saved.config["problem_type"] == "multi_label_classification"
    assert saved.thresholds == metrics["validation"]["thresholds"] == metrics["test"]["thresholds"]
    threshold = dict(zip(saved.labels, saved.thresholds, strict=True))
    right = [
        {one["label"] for one in answer if one["score"] >= threshold[one["label"]]} == set(row["label"])
        for row, answer in zip(rows, answers, strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(metrics["test"]["exact_match"])
    with alone["multi_label"].with_name("multi_label.run").joinpath("predictions.csv").open(newline="") as file:
        predictions = list(csv.DictReader(file))
    assert [row["label"] == row["predicted"] for row in predictions] == right


def test_a_regression_model_answers_in_the_unit_of_the_data_in_transformers_too(
    alone: dict[str, Path], folders: dict[str, Path]
) -> None:
    quiet_libraries()
    saved = read_saved_model(alone["regression"])
    predict = pipeline("text-classification", model=str(alone["regression"]), function_to_apply="none")
    with (folders["regression"] / "test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter=";"))
    answers = [answer["score"] for answer in predict([row["text"] for row in rows])]

    errors = [abs(answer - float(row["label"])) for answer, row in zip(answers, rows, strict=True)]
    assert saved.config["problem_type"] == "regression"
    assert saved.labels == ["label"]
    assert sum(errors) / len(errors) == pytest.approx(saved.metadata["test"]["mae"], rel=1e-4)
    assert saved.metadata["test"]["mae"] < 1000  # the mean of the training rows is off by about that


def test_a_pair_model_gives_transformers_the_same_answers(alone: dict[str, Path], folders: dict[str, Path]) -> None:
    quiet_libraries()
    classify = pipeline("text-classification", model=str(alone["pair"]))
    rows = [json.loads(line) for line in (folders["pair"] / "test.jsonl").read_text().splitlines()]
    answers = classify([{"text": row["text"], "text_pair": row["text_pair"]} for row in rows])

    with alone["pair"].with_name("pair.run").joinpath("predictions.csv").open(newline="") as file:
        predictions = list(csv.DictReader(file))
    assert [row["predicted"] for row in predictions] == [answer["label"] for answer in answers]
    assert predictions[0]["text"] == f"{rows[0]['text']} | {rows[0]['text_pair']}"


def test_a_pair_model_is_exported_on_the_columns_of_its_training(
    alone: dict[str, Path], folders: dict[str, Path], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(alone["pair"], tmp_path / "pair"))

    export.main([str(model), "--engine", "native", "--max_drop", "100"])

    accuracy = read_manifest(model / "native").accuracy
    assert accuracy["rows"] == len((folders["pair"] / "test.jsonl").read_text().splitlines())
    assert accuracy["before"] == pytest.approx(read_saved_model(model).metadata["test"]["accuracy"], abs=1e-4)


@pytest.mark.parametrize("family", ["Bert", "Electra"])
def test_a_pairs_second_text_has_the_token_types_of_transformers(family: str) -> None:
    config = AutoConfig.for_model(
        family.lower(),
        vocab_size=40,
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
        text_pair_separator=3,
        initializer_range=1.0,
    )
    ids = torch.tensor([[2, 9, 8, 3, 7, 7, 3], [2, 9, 3, 6, 3, 0, 0]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0]])
    mask = (ids != 0).long()
    network = AutoModelForSequenceClassification.from_config(config).eval()
    expected = network(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
    without = network(input_ids=ids, attention_mask=mask).logits

    found = NewsClassifier.around(network, PairClassification(["no", "yes"])).eval()(ids, mask)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, without, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_evaluating_gives_the_figures_that_training_wrote(task: str, alone: dict[str, Path]) -> None:
    written = json.loads((alone[task] / "metrics.json").read_text())["test"]
    with join_ranks("cpu") as ranks:
        found = evaluate_saved(alone[task], None, ranks, quiet=True)

    for name in {"accuracy", "micro_f1", "macro_f1", "exact_match", "rmse", "mae", "r2", "spearman"} & written.keys():
        assert found[name] == pytest.approx(written[name], rel=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_the_report_and_the_card_show_the_metrics_of_the_task(task: str, alone: dict[str, Path]) -> None:
    report = alone[task].with_name(f"{task}.run").joinpath("report.html").read_text()
    card = (alone[task] / "README.md").read_text()

    shown = {
        "multi_label": ("Test micro F1", "All labels right", "Threshold", "Test by class"),
        "pair": ("Test accuracy", "Macro F1"),
        "regression": ("Test RMSE", "Mean absolute error", "Predicted and true label", "Spearman correlation"),
    }
    for words in shown[task]:
        assert words in report, words
    assert {"multi_label": "micro-F1", "regression": "RMSE", "pair": "accuracy"}[task] in card
    assert ("Test accuracy" in report) == (task == "pair")


@pytest.mark.parametrize(
    ("name", "file", "task"),
    [
        ("multi-label", "tickets.jsonl", "multi_label"),
        ("regression", "reviews.csv", "regression"),
        ("pairs", "questions.jsonl", "pair"),
        ("imbalanced", "my_rows.csv", "regression"),  # its labels are two names here: the numbers as text
    ],
)
def test_the_documented_commands_train(
    name: str,
    file: str,
    task: str,
    folders: dict[str, Path],
    train_here: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "training").symlink_to(REPOSITORY / "training")
    (rows,) = folders[task].glob("train.*")
    (tmp_path / file).write_bytes(rows.read_bytes())
    words = shlex.split(documented("docs/methods.md" if name == "imbalanced" else "docs/tasks.md", name))
    flags = words[words.index("--config") :]

    assert train_here(*flags, "--epochs", 1) == 0
    assert any((tmp_path / "checkpoints").glob("*/model.safetensors"))


def test_columns_of_0_and_1_give_the_labels_that_a_list_would(
    folders: dict[str, Path], alone: dict[str, Path], train_here: Train, metrics_of: Metrics, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = map(json.loads, (folders["multi_label"] / f"{split}.jsonl").read_text().splitlines())
        lines = [f"{row['text']};{';'.join(str(int(word in row['label'])) for word in WORDS)}" for row in rows]
        (tmp_path / "data" / f"{split}.csv").write_text("\n".join([f"text;{';'.join(WORDS)}", *lines]))

    flags = ("--task", "multi_label", "--dataset", tmp_path / "data", "--label_column", ",".join(WORDS))
    assert train_here(*flags, "--output_dir", tmp_path / "model", "--save_every", 4, "--batch_size", 8) == 0

    assert _losses(metrics_of, tmp_path / "model") == _losses(metrics_of, alone["multi_label"])


@pytest.mark.parametrize(
    ("task", "cell", "message"),
    [
        ("multi_label", "2", "data.csv line 2: '2' in the column sea must be 0 or 1"),
        ("classification", "1", "--label_column sea,sun: only --task multi_label reads several columns of 0 and 1"),
    ],
)
def test_columns_that_are_no_labels_are_refused(
    task: str, cell: str, message: str, train_here: Train, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "data.csv").write_text(f"text,sea,sun\nhello,{cell},0\n")

    flags = ("--task", task, "--dataset", tmp_path / "data.csv", "--label_column", "sea,sun", "--model", "tiny")
    assert train_here(*flags, "--output_dir", tmp_path / "model") == 2
    assert message in capfd.readouterr().err
