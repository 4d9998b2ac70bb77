"""The accuracy of texts that nobody has labelled, and when it cannot be known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.observing.estimates import Estimate, Reviewed, estimate, label_shares
from inference.observing.reference import Reference

LABELS = 3
Cells = dict[int, tuple[int, float]]


class World:
    """Answers whose confidence means what it says, more or less sure of themselves."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)

    def answers(self, num: int, doubt: float = 0.2) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Probabilities, and the label that is right: drawn with them."""
        probabilities = self.draw.dirichlet([doubt] * LABELS, num)
        return probabilities, (probabilities.cumsum(axis=1) > self.draw.random((num, 1))).argmax(axis=1)

    def reference(self, num: int = 3000) -> Reference:
        found = Reference.of({"reference": Reference.fit(*self.answers(num), np.full(num, 9))})
        assert found is not None
        return found


def counted(reference: Reference, probabilities: NDArray[np.float64]) -> tuple[Cells, list[tuple[int, float]]]:
    cells: Cells = {}
    each = []
    for values in probabilities.tolist():
        sure = max(values)
        cell = reference.cell(values.index(sure), sure)
        n, total = cells.get(cell, (0, 0.0))
        cells[cell] = (n + 1, total + sure)
        each.append((cell, sure))
    return cells, each


def reviews(each: list[tuple[int, float]], is_right: NDArray[np.bool_], num: int) -> list[Reviewed]:
    return [(*one, bool(right), 1.0) for one, right in zip(each[:num], is_right, strict=False)]


def share_held(draw: Callable[[int], tuple[Estimate, float]], trials: int) -> tuple[float, float]:
    """How often the interval holds the truth, and the mean error."""
    held, errors = [], []
    for seed in range(trials):
        said, truth = draw(seed)
        assert said.value is not None
        assert said.low is not None
        assert said.high is not None
        held.append(said.low <= truth <= said.high)
        errors.append(said.value - truth)
    return float(np.mean(held)), float(np.mean(errors))


@pytest.mark.parametrize("doubt", [0.2, 0.5])
def test_the_interval_holds_the_accuracy_of_harder_texts_too(doubt: float) -> None:
    def draw(seed: int) -> tuple[Estimate, float]:
        world = World(seed)
        reference = world.reference()
        probabilities, right = world.answers(400, doubt)
        cells, _ = counted(reference, probabilities)
        return estimate(reference, cells), float((probabilities.argmax(axis=1) == right).mean())

    held, bias = share_held(draw, 150)
    assert held >= 0.86  # 90%, less what 150 trials may miss by chance
    assert abs(bias) < 0.006


def test_reviewed_texts_show_that_labels_mean_something_else() -> None:
    def draw(seed: int, num: int = 200) -> tuple[Estimate, float]:
        world = World(seed)
        reference = world.reference()
        probabilities, right = world.answers(1500)
        right = (right + 1) * (right < 2) + right * (right == 2)  # 0 is now 1, 1 is 2
        is_right = probabilities.argmax(axis=1) == right
        cells, each = counted(reference, probabilities)
        return estimate(reference, cells, reviews(each, is_right, num)), float(is_right.mean())

    without, truth = draw(0, num=0)
    assert without.low is not None
    assert without.low > truth + 0.3  # it cannot be seen
    held, bias = share_held(draw, 100)
    assert held >= 0.84
    assert abs(bias) < 0.02


def test_fewer_than_fifty_reviewed_texts_correct_nothing() -> None:
    world = World(0)
    reference = world.reference()
    cells, each = counted(reference, world.answers(300)[0])
    wrong = np.zeros(300, dtype=bool)
    assert estimate(reference, cells, reviews(each, wrong, 49)) == estimate(reference, cells)
    corrected = estimate(reference, cells, reviews(each, wrong, 50))
    assert corrected.reviewed == 50
    assert corrected.value == pytest.approx(0, abs=0.05)


def test_fifty_right_answers_are_no_proof_that_all_are() -> None:
    world = World(0)
    reference = world.reference()
    cells, each = counted(reference, world.answers(300)[0])
    said = estimate(reference, cells, reviews(each, np.ones(300, dtype=bool), 50))
    assert said.low is not None
    assert said.low < 0.95


def test_if_all_texts_were_reviewed_nothing_is_estimated() -> None:
    world = World(1)
    reference = world.reference()
    probabilities, right = world.answers(300, 0.5)
    is_right = probabilities.argmax(axis=1) == right
    cells, each = counted(reference, probabilities)
    said = estimate(reference, cells, reviews(each, is_right, 300))
    assert said.value == pytest.approx(is_right.mean())
    assert said.low is not None
    assert said.low == pytest.approx(said.value - 1 / 600)


def test_weights_make_up_for_texts_that_were_drawn_more_often() -> None:
    world = World(3)
    reference = world.reference()
    probabilities, right = world.answers(20_000, 0.5)
    is_right = probabilities.argmax(axis=1) == right
    cells, each = counted(reference, probabilities)
    # Doubtful answers are ten times as likely to be reviewed.
    chance = np.where(probabilities.max(axis=1) < 0.7, 0.5, 0.05)
    chosen = np.flatnonzero(world.draw.random(len(chance)) < chance)
    weighted = [(*each[i], bool(is_right[i]), 1 / float(chance[i])) for i in chosen]
    said = estimate(reference, cells, weighted)
    assert said.value == pytest.approx(float(is_right.mean()), abs=0.02)


def unknown(seed: int = 0, **changes: Any) -> str:
    world = World(seed)
    reference = world.reference()
    cells, _ = counted(reference, world.answers(300)[0])
    said = estimate(**({"reference": reference, "cells": cells} | changes))
    assert (said.value, said.low, said.high) == (None, None, None)
    assert "\n" not in said.reason
    return said.reason


def test_what_cannot_be_known_has_a_reason_and_no_value() -> None:
    assert "export it again, with labelled rows" in unknown(reference=None)
    assert unknown(cells={0: (49, 40.0)}) == "49 texts are too few, at least 50 are needed"
    assert unknown(cells={}) == "0 texts are too few, at least 50 are needed"
    assert "60% of the texts are unlike the training texts" in unknown(unfamiliar=180)
    assert "of a kind that the reference lacks" in unknown(cells={99: (60, 50.0), 0: (50, 30.0)})


def test_reviewed_texts_say_what_nothing_else_can() -> None:
    world = World(0)
    reference = world.reference()
    probabilities, right = world.answers(300)
    cells, each = counted(reference, probabilities)
    some = reviews(each, probabilities.argmax(axis=1) == right, 60)
    assert estimate(reference, cells, some, unfamiliar=300).value is not None


def test_label_shares_are_those_of_the_labels_and_not_of_the_answers() -> None:
    world = World(0)
    reference = world.reference(20_000)
    probabilities, right = world.answers(40_000)
    kept = (right != 0) | (world.draw.random(len(right)) < 0.1)  # a label becomes rare
    counts = np.bincount(probabilities[kept].argmax(axis=1), minlength=LABELS)
    found = label_shares(reference, dict(enumerate(counts.tolist())))
    truth = np.bincount(right[kept]) / kept.sum()
    assert found == pytest.approx(truth.tolist(), abs=0.015)
    assert abs(counts[0] / counts.sum() - truth[0]) > 0.03


def test_label_shares_are_shares_even_if_the_counts_contradict_the_confusion() -> None:
    reference = World(0).reference()
    found = label_shares(reference, {0: 500})
    assert found is not None
    assert min(found) >= 0
    assert sum(found) == pytest.approx(1)
    assert found[0] == max(found)


def test_label_shares_are_unknown_where_the_model_mixes_labels_up() -> None:
    draw = np.random.default_rng(0)
    probabilities = draw.dirichlet([1, 1], 500)
    at_random = Reference.of({"reference": Reference.fit(probabilities, draw.integers(0, 2, 500), np.full(500, 9))})
    assert label_shares(at_random, {0: 100, 1: 100}) is None
    assert label_shares(None, {0: 100}) is None
    assert label_shares(World(0).reference(), {0: 10}) is None
