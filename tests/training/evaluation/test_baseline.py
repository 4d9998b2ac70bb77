"""The linear baseline beside a run: what it reads, what it answers, and when it counts as better than the network."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC

from training.config import TrainConfig
from training.data.prepare import PreparedData, prepare_data
from training.distributed.ranks import Ranks
from training.evaluation import baseline as module
from training.evaluation.baseline import Baseline, Gain, fit_linear, measure_baseline, seconds_for_baseline
from training.tasks import TASKS, Classification, Task

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"), "none")
WORDS = ("sea", "storm", "sun")
TEXTS = [f"{word} and {other}" for word in WORDS for other in ("wind", "rain", "cloud", "night")]
LABELS = np.repeat(np.arange(3), 4)


def test_single_labels_get_the_answers_of_scikit_learns_own_pipeline() -> None:
    texts, labels = ["warm sea", "cold sea", "red sun", "hot sun", "big storm", "a storm"], np.array([0, 0, 1, 1, 2, 2])
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    theirs = make_pipeline(vectorizer, LinearSVC(random_state=0)).fit(texts, labels)

    ours = fit_linear(texts, labels, 3, seed=0)

    assert np.array_equal(ours([*texts, "sun"]), theirs.decision_function([*texts, "sun"]))


@pytest.mark.parametrize(("present", "num_labels"), [((0, 1, 2), 3), ((0, 2), 2 + 1), ((1, 2), 4), ((2,), 3)], ids=str)
def test_a_label_without_training_rows_is_never_the_answer(present: tuple[int, ...], num_labels: int) -> None:
    rows = np.isin(LABELS, present)
    answer = fit_linear(
        [text for text, is_kept in zip(TEXTS, rows, strict=True) if is_kept], LABELS[rows], num_labels, 0
    )

    scores = answer(TEXTS)

    assert scores.shape == (len(TEXTS), num_labels)
    assert scores.argmax(axis=1)[rows].tolist() == LABELS[rows].tolist()
    assert set(scores.argmax(axis=1)) <= set(present)


def test_each_of_several_labels_is_told_and_one_that_always_or_never_applies_too() -> None:
    targets = np.zeros((len(TEXTS), 5), np.uint8)
    targets[np.arange(len(TEXTS)), LABELS] = 1
    targets[:, 3] = 1  # label 4 never applies

    assert np.array_equal(fit_linear(TEXTS, targets, 5, 0)(TEXTS) >= 0, targets.astype(bool))


def test_a_pair_is_told_by_what_both_texts_share() -> None:
    pairs = [(f"{a} today", f"the {b}") for a in WORDS for b in WORDS for _ in range(4)]
    equal = np.array([int(a == b) for a in WORDS for b in WORDS for _ in range(4)])

    answer = fit_linear(pairs, equal, 2, 0)

    assert answer(pairs).argmax(axis=1).tolist() == equal.tolist()
    # Words that were in no pair before, too: what counts is that they are shared.
    shared, different = answer([("sun sea storm", "sun sea storm"), ("sea", "sun storm")])
    assert shared[1] > different[1]


@pytest.mark.parametrize(("weights", "answer"), [(None, 0), ({0: 1.0, 1: 50.0, 2: 1.0}, 1)], ids=str)
def test_rows_weigh_in_it_what_they_weigh_in_the_loss(weights: dict[int, float] | None, answer: int) -> None:
    texts, labels = ["sea"] * 12 + ["sea"] * 2, np.array([0] * 12 + [1] * 2)  # label 2 has no rows
    assert fit_linear(texts, labels, 3, 0, weights)(["sea"]).argmax() == answer


@pytest.mark.parametrize(
    ("value", "error", "is_clear"),
    [(0.05, 0.01, True), (-0.05, 0.01, True), (0.05, 0.03, False), (0.0, 0.0, False), (-0.5, math.inf, False)],
)
def test_a_difference_is_clear_from_two_standard_errors_on(value: float, error: float, is_clear: bool) -> None:
    assert Gain("accuracy", value, error).is_clear is is_clear


def _gain(network: np.ndarray, linear: np.ndarray, targets: np.ndarray, metric: str = "accuracy") -> Gain:
    task = Classification(["no", "yes"])
    of_both = [(np.eye(2, dtype=np.float32)[answers], {}) for answers in (network, linear)]
    return module._gain(task, metric, of_both, targets)


def test_the_error_is_that_of_the_rows_on_which_the_two_differ() -> None:
    generator = np.random.default_rng(0)
    targets = generator.integers(0, 2, 4000)
    network, linear = (np.where(generator.random(4000) < wrong, 1 - targets, targets) for wrong in (0.1, 0.2))

    gain = _gain(network, linear, targets)

    differ = (network != linear).mean()
    assert gain.value == pytest.approx((network == targets).mean() - (linear == targets).mean())
    assert gain.standard_error == pytest.approx(math.sqrt(differ / 4000), rel=0.4)  # McNemar's, estimated from 20 parts


def test_too_few_test_rows_tell_nothing() -> None:
    targets = np.arange(19) % 2
    assert not _gain(1 - targets, targets, targets).is_clear


def test_a_network_that_knows_no_rare_label_loses_by_macro_f1_where_accuracy_cannot_tell() -> None:
    targets = (np.arange(2000) % 100 == 0).astype(int)  # 1%
    linear = np.where(np.arange(2000) % 300 == 0, 0, targets)  # finds most of them
    never = np.zeros_like(targets)
    many = [_gain(never, linear, targets, metric) for metric in ("accuracy", "macro_f1")]
    assert many[1].is_clear
    assert many[1].value < -0.2


@pytest.mark.parametrize(
    ("gain", "rows", "wins", "words"),
    [
        (Gain("accuracy", -0.2, 0.01), (900, 900), True, "(TF-IDF, the same rows): better than this model"),
        (Gain("macro_f1", -0.2, 0.01), (900, 900), True, "better than this model by its macro F1"),
        (Gain("accuracy", 0.2, 0.01), (300, 9000), False, "(TF-IDF, on 300 of the 9,000 rows): worse than this model"),
        (Gain("accuracy", -0.01, 0.01), (900, 900), False, "no clear difference"),
    ],
)
def test_the_line_says_what_it_read_and_who_is_better(
    gain: Gain, rows: tuple[int, int], wins: bool, words: str
) -> None:
    baseline = Baseline("TF-IDF", rows, {}, {"rows": 50, "accuracy": 0.875, "macro_f1": 0.8}, gain)
    assert str(baseline).startswith("accuracy 87.50%, macro F1 80.00% (")
    assert str(baseline).endswith(words)
    assert baseline.wins is wins
    assert baseline.tile[0] == "87.50%"


def _prepared(tmp_path: Path, **flags: Any) -> tuple[TrainConfig, PreparedData, Task]:
    config = TrainConfig(model="tiny", cache_dir=tmp_path, **flags)
    data = prepare_data(config, ALONE, lambda text: None)
    return config, data, TASKS[config.task](data.tokens.label_names)


def _rows_of(task: str, folder: Path) -> dict[str, Any]:
    """A data set in which words tell the labels."""
    lines = []
    for i in range(300):
        words = [word for place, word in enumerate(WORDS) if i >> place & 1]
        row: dict[str, Any] = {"text": f"{i}: {' and '.join(words) or 'nothing'}"}
        row["label"] = {"multi_label": words, "regression": 1000.0 * len(words)}.get(task, str("sea" in words))
        lines.append(row | ({"text_pair": "sun"} if task == "pair" else {}))
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"dataset": str(folder), "task": task}


@pytest.mark.parametrize(
    ("task", "metric", "at_least"),
    [
        ("classification", "accuracy", 0.9),
        ("pair", "accuracy", 0.9),
        ("multi_label", "micro_f1", 0.9),
        ("regression", "r2", 0.2),
    ],
)
def test_every_task_with_labels_has_one_that_learns(task: str, metric: str, at_least: float, tmp_path: Path) -> None:
    config, data, own = _prepared(tmp_path, **_rows_of(task, tmp_path))
    own.fit(data.tokens.train.labels[data.train_index], torch.nn.Linear(1, 1))
    knows_nothing = np.zeros((len(data.tokens.test), len(data.tokens.label_names)), np.float32)

    found = measure_baseline(config, data, own, None, knows_nothing, {})

    assert found.test[metric] >= at_least
    assert found.validation[metric] >= at_least
    assert found.rows == (len(data.train_index),) * 2
    assert found.wins
    assert json.loads(json.dumps(found.to_plain()))["test"]["rows"] == len(data.tokens.test)


def test_a_short_budget_has_it_read_some_rows_only(tmp_path: Path) -> None:
    config, data, task = _prepared(tmp_path, dataset="sample", budget="41s")
    scores = np.zeros((len(data.tokens.test), 4), np.float32)
    found, again = (measure_baseline(config, data, task, None, scores, {}) for _ in range(2))

    read, there = found.rows
    assert 50 < read < there == len(data.train_index)
    assert found == again


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [({}, (2, 10)), ({"budget": "50s"}, (2, 2.5)), ({"budget": "39s"}, (0, 0)), ({"collective_timeout": 9.0}, (0, 0))],
)
def test_it_takes_a_small_share_of_the_time_there_is(
    flags: dict[str, Any], seconds: tuple[float, float], tmp_path: Path
) -> None:
    config, data, _ = _prepared(tmp_path, dataset="sample", **flags)
    assert seconds[0] <= seconds_for_baseline(config, data) <= seconds[1]


def test_scikit_learn_is_imported_only_when_it_is_fitted() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = [
        getattr(node, "module", None) or node.names[0].name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not [name for name in names if name.startswith(("sklearn", "scipy"))]


def test_a_run_shows_it_beside_its_test_and_keeps_it(
    train_here: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert train_here("--output_dir", tmp_path / "model") == 0

    kept = json.loads((tmp_path / "model" / "metrics.json").read_text())["baseline"]
    line = next(line for line in capfd.readouterr().out.splitlines() if "Linear baseline" in line)
    assert f"accuracy {100 * kept['test']['accuracy']:.2f}%" in line
    assert line.endswith("(TF-IDF + linear SVM, the same rows): better than this model")
    assert "Linear baseline" in (tmp_path / "model.run" / "report.html").read_text()


def test_a_run_on_texts_without_words_does_without_it(
    train_here: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "signs.csv").write_text(
        "text,label\n" + "".join(f"{'+' if i % 2 else '-'} {i % 7},{i % 2}\n" for i in range(60))
    )

    assert train_here("--dataset", tmp_path / "signs.csv", "--output_dir", tmp_path / "model") == 0

    assert "No linear baseline: empty vocabulary" in capfd.readouterr().out
    assert "baseline" not in json.loads((tmp_path / "model" / "metrics.json").read_text())
