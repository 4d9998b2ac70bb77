"""What twice the rows would bring is predicted close to what they bring, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from training.data.learning_curve import _fit, learning_curve

WORDS = [f"word{i}" for i in range(300)]


def rows(count: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Texts whose label is in some of their many words."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 3, count)
    numbers = (draw.integers(0, 100, (count, 8)) + 70 * labels[:, None]) % 300
    noise = draw.integers(0, 300, (count, 8))
    return [" ".join(WORDS[i] for i in [*a, *b]) for a, b in zip(numbers, noise, strict=True)], labels


def test_a_prediction_is_close_to_what_the_same_model_reaches_with_twice_the_rows() -> None:
    texts, labels = rows(1500)

    few = learning_curve(texts[:600], labels[:600], seed=1)
    many = learning_curve(texts, labels, seed=1)

    assert few["metric"] == "accuracy"
    assert few["scores"] == sorted(few["scores"])
    assert few["now"] < few["twice"] <= 1
    assert abs(few["twice"] - many["scores"][-1]) < 0.03  # which learned from four fifths of 1500, so 1200


def test_several_labels_and_numbers_have_a_curve_too() -> None:
    texts, labels = rows(400)

    several = learning_curve(texts, np.eye(3, dtype=np.uint8)[labels], seed=1)
    numbers = learning_curve(texts, labels.astype(np.float64), seed=1)

    assert (several["metric"], numbers["metric"]) == ("micro F1", "R²")
    assert 0.3 < several["twice"] <= 1
    assert 0 < numbers["now"] <= numbers["twice"] <= 1


@pytest.mark.parametrize(
    ("count", "labels", "why"),
    [
        (100, np.arange(100) % 2, "100 different rows are too few to tell; it takes 200"),
        (300, np.arange(300) % 60, "300 different rows of 60 labels are too few to tell; it takes 8 each"),
        (300, np.zeros(300, int), "all rows have the same label"),
    ],
)
def test_too_few_rows_have_no_curve_but_a_reason(count: int, labels: np.ndarray, why: str) -> None:
    assert learning_curve(["some text"] * count, labels, seed=0) == {"skipped": why}


def test_texts_without_words_have_no_curve() -> None:
    assert learning_curve(["!"] * 300, np.arange(300) % 2, seed=0) == {"skipped": "the texts have no words"}


def test_the_curve_finds_a_floor_that_more_rows_do_not_break() -> None:
    sizes = np.array([1000, 2000, 4000, 8000])

    predict = _fit(sizes, 0.1 + 3 * sizes**-0.5)
    flat = _fit(sizes, np.array([0.2, 0.21, 0.22, 0.23]))

    assert predict(16_000) == pytest.approx(0.1 + 3 * 16_000**-0.5, abs=2e-3)
    assert flat(16_000) == pytest.approx(0.22, abs=0.015)
