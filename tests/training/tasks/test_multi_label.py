from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, log_loss, precision_score, recall_score

from common.errors import UserError
from common.problem_types import MULTI_LABEL, UnusableRow
from training.data.dataset import split_rows
from training.tasks import MultiLabelClassification

NAMES = ["sea", "storm", "sun"]


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    targets = (generator.random((400, 3)) < [0.5, 0.3, 0.1]).astype(np.uint8)
    return (generator.normal(targets * 1.5 - 1, 1.2)).astype(np.float32), targets


def test_metrics_are_those_of_scikit_learn_at_the_thresholds_given() -> None:
    scores, targets = random_case(0)
    found = MultiLabelClassification(NAMES).metrics(scores, targets, {"thresholds": [0.5, 0.4, 0.3]})

    probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))
    predicted = probabilities >= [0.5, 0.4, 0.3]
    assert found["micro_f1"] == pytest.approx(f1_score(targets, predicted, average="micro"))
    assert found["macro_f1"] == pytest.approx(f1_score(targets, predicted, average="macro"))
    assert found["exact_match"] == pytest.approx(accuracy_score(targets, predicted))
    losses = [log_loss(targets[:, i], probabilities[:, i]) for i in range(3)]
    assert found["loss"] == pytest.approx(np.mean(losses))
    for i, name in enumerate(NAMES):
        figures = found["per_class"][name]
        assert figures["precision"] == pytest.approx(precision_score(targets[:, i], predicted[:, i]))
        assert figures["recall"] == pytest.approx(recall_score(targets[:, i], predicted[:, i]))
    json.dumps(found)


def test_no_other_threshold_has_a_better_f1_on_the_rows_that_it_was_chosen_on() -> None:
    scores, targets = random_case(1)
    task = MultiLabelClassification(NAMES)
    chosen = task.metrics(scores, targets)

    for threshold in np.linspace(0.02, 0.98, 49):
        other = task.metrics(scores, targets, {"thresholds": [threshold] * 3})
        for name in NAMES:
            assert other["per_class"][name]["f1"] <= chosen["per_class"][name]["f1"] + 1e-12
    assert task.metrics(scores, targets, chosen)["micro_f1"] == chosen["micro_f1"]


def test_a_label_of_too_few_rows_keeps_the_threshold_of_one_half() -> None:
    scores, targets = random_case(2)
    targets[:, 2] = 0
    targets[:4, 2] = 1

    assert MultiLabelClassification(NAMES).metrics(scores, targets)["thresholds"][2] == 0.5


def test_the_loss_of_a_row_is_the_mean_over_its_labels() -> None:
    scores, targets = random_case(3)
    losses = MultiLabelClassification(NAMES).row_losses(torch.from_numpy(scores), torch.from_numpy(targets), 0.0)

    assert losses.shape == (400,)
    assert losses.mean().item() == pytest.approx(MultiLabelClassification(NAMES).metrics(scores, targets)["loss"])


def test_rare_labels_reach_both_parts_of_a_split() -> None:
    targets = np.zeros((200, 3), dtype=np.uint8)
    targets[:, 0] = 1
    targets[::50, 2] = 1  # four rows, which have the frequent label too
    train, held_out = split_rows(MultiLabelClassification.strata(targets), 0.25, seed=0)

    assert targets[train, 2].sum() == 3
    assert targets[held_out, 2].sum() == 1


def test_answers_are_described_in_words_the_most_wrong_one_with_the_largest_surprise() -> None:
    scores = np.array([[4, -4, -4], [4, 4, -4], [-4, -4, -4], [-1, 4, -4]], dtype=np.float32)
    targets = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0]], dtype=np.uint8)
    task = MultiLabelClassification(NAMES)
    answers = list(task.describe(scores, targets, {"thresholds": [0.5, 0.5, 0.5]}))

    assert [(one.label, one.predicted) for one in answers] == [
        ("sea", "sea"),
        ("sea", "sea, storm"),
        ("none", "none"),
        ("sea, storm", "storm"),
    ]
    assert [one.surprise == 0 for one in answers] == [True, False, True, False]
    assert answers[1].surprise > answers[3].surprise
    assert answers[3].certainty == pytest.approx(1 / (1 + np.exp(-1)))


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        ("storm, sea", ("storm", "sea")),
        ("storm|sea", ("storm", "sea")),
        ("storm;storm", ("storm",)),
        (["storm", "sea"], ("storm", "sea")),
        ('["heavy, rain", "sea"]', ("heavy, rain", "sea")),
        ("", ()),
        ([], ()),
        ([3, 1], ("3", "1")),
    ],
)
def test_labels_are_read_from_lists_and_from_separated_names(cell: object, labels: tuple[str, ...]) -> None:
    assert MULTI_LABEL.read_label(cell) == labels


@pytest.mark.parametrize("cell", [None, 3, 0.5, ["a", None], "[1,", {"a": 1}])
def test_what_is_no_list_of_labels_is_refused(cell: object) -> None:
    with pytest.raises(UnusableRow, match="label"):
        MULTI_LABEL.read_label(cell)


def test_labels_that_apply_to_all_rows_or_to_none_are_reported() -> None:
    names, notes = MultiLabelClassification.name_labels("x", [("a", "b"), ("a",), ("a",), ()] * 4, None, "label")

    assert names == ["a", "b"]
    assert notes == ["4 of 16 training rows have no label, which is learned too"]
    _, notes = MultiLabelClassification.name_labels("x", [("a", "b"), ("a",)] * 8, ["a", "b", "c"], "label")
    assert notes == ["label 'a' applies to every training row, so nothing is learned about it"]


def test_a_single_label_is_refused() -> None:
    with pytest.raises(UserError, match="have 1 different labels, and --task multi_label needs two"):
        MultiLabelClassification.name_labels("x", [("a",), ()], None, "label")
