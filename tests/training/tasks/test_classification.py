from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_recall_fscore_support,
)

from common.problem_types import SINGLE_LABEL
from training.tasks.classification import Classification, log_softmax

NAMES = ["World", "Sports", "Business", "Sci/Tech"]


def random_case(seed: int, rows: int = 300) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.choice(4, size=rows, p=[0.4, 0.3, 0.2, 0.1])
    logits = generator.normal(size=(rows, 4)).astype(np.float32)
    logits[np.arange(rows), labels] += 1
    return logits, labels


def logits_for(probabilities: list[list[float]]) -> np.ndarray:
    return np.log(np.array(probabilities))


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_scikit_learns(seed: int) -> None:
    logits, labels = random_case(seed)
    predicted = logits.argmax(axis=1)
    precision, recall, f1, rows = precision_recall_fscore_support(labels, predicted, zero_division=0)

    found = Classification(NAMES).metrics(logits, labels)

    assert found["accuracy"] == pytest.approx(accuracy_score(labels, predicted))
    assert found["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert found["confusion_matrix"] == confusion_matrix(labels, predicted).tolist()
    assert found["loss"] == pytest.approx(log_loss(labels, np.exp(log_softmax(logits))))
    for i, name in enumerate(NAMES):
        scores = {"precision": precision[i], "recall": recall[i], "f1": f1[i], "rows": rows[i]}
        assert found["per_class"][name] == pytest.approx(scores)


def test_metrics_are_plain_values() -> None:
    found = Classification(NAMES).metrics(*random_case(0))

    assert json.loads(json.dumps(found)) == found
    assert (found["rows"], found["labels"]) == (300, NAMES)


def test_calibration_error_of_a_case_worked_by_hand() -> None:
    # Bins of 1/15: 0.9 and 0.92 fall into one (sum of confidences 1.82, one right), 0.6 into another (right).
    logits = logits_for([[0.9, 0.1], [0.92, 0.08], [0.4, 0.6]])

    found = Classification(["a", "b"]).metrics(logits, np.array([0, 1, 1]))

    assert found["calibration_error"] == pytest.approx((abs(1.82 - 1) + abs(0.6 - 1)) / 3)
    assert np.ravel(found["reliability"]) == pytest.approx([1, 0.6, 1, 2, 0.91, 0.5])


def test_a_class_without_rows_does_not_lower_the_macro_f1() -> None:
    logits, labels = random_case(1)
    logits, labels = logits[labels != 3], labels[labels != 3]
    predicted = logits.argmax(axis=1)

    found = Classification(NAMES).metrics(logits, labels)

    assert found["per_class"]["Sci/Tech"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 0}
    expected = f1_score(labels, predicted, average="macro", labels=[0, 1, 2])
    assert found["macro_f1"] == pytest.approx(expected)
    assert found["confusion_matrix"][3] == [0, 0, 0, 0]


def test_a_class_never_predicted_has_no_precision_and_no_warning() -> None:
    found = Classification(["a", "b"]).metrics(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 1]))

    assert found["per_class"]["b"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 1}
    assert found["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)


def test_log_softmax_stays_finite_for_large_logits() -> None:
    found = log_softmax(np.array([[1e4, 0.0], [-1e4, 0.0]], dtype=np.float32))

    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, [[0, -1e4], [-1e4, 0]])


def test_rows_labelled_0_belong_to_the_class_that_an_older_model_calls_0_0() -> None:
    assert Classification(["1.0", "0.0", "x"]).renamed(np.array([0, 1, 1]), ["0", "1"]).tolist() == [1, 0, 0]
    assert SINGLE_LABEL.read_label(1, ["1.0", "1"]) == "1"
    with pytest.raises(ValueError, match=r"label '2' is not one of the model's labels 1\.0, 0\.0"):
        Classification(["1.0", "0.0"]).renamed(np.array([0]), ["2"])
