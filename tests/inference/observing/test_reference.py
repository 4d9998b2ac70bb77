"""What an export keeps of its held-out rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from inference.observing.reference import SCORES, TAILS, Reference, most_in_tail


def fitted(num: int = 2000, seed: int = 0, familiarity: bool = True) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    probabilities = draw.dirichlet([0.5, 0.5, 0.5], num)
    right = (probabilities.cumsum(axis=1) > draw.random((num, 1))).argmax(axis=1)
    lengths = draw.integers(3, 90, num)
    return Reference.fit(probabilities, right, lengths, draw.random(num) if familiarity else None)


def read(record: dict[str, Any]) -> Reference:
    found = Reference.of({"reference": json.loads(json.dumps(record))})
    assert found is not None
    return found


def test_a_reference_is_read_as_it_was_written() -> None:
    record = fitted()
    reference = read(record)
    assert reference.rows == 2000 == sum(one.rows for one in reference.cells.values())
    assert sum(one.right for one in reference.cells.values()) / 2000 == pytest.approx(reference.accuracy)
    assert sum(one.total for one in reference.cells.values()) / 2000 == pytest.approx(reference.confidence)
    assert reference.confusion is not None
    assert np.trace(reference.confusion) / 2000 == pytest.approx(reference.accuracy)
    assert set(reference.tails) == set(SCORES)
    assert sum(reference.answered().values()) == 2000


def test_the_cell_of_a_text_is_the_one_that_such_rows_were_counted_in() -> None:
    draw = np.random.default_rng(1)
    probabilities = draw.dirichlet([1, 1], 500).round(1)  # so that many confidences lie on an edge
    right = draw.integers(0, 2, 500)
    reference = read(Reference.fit(probabilities, right, np.full(500, 9)))
    counts: dict[int, int] = {}
    for values in probabilities.tolist():
        cell = reference.cell(values.index(max(values)), max(values))
        counts[cell] = counts.get(cell, 0) + 1
    assert counts == {cell: one.rows for cell, one in reference.cells.items()}


def test_at_most_the_share_of_the_rows_that_a_tail_is_named_after_reaches_it() -> None:
    lengths = 3 + np.random.default_rng(2).poisson(30, 1000)
    probabilities = np.full((1000, 2), 0.5)
    reference = read(Reference.fit(probabilities, np.zeros(1000, dtype=np.int64), lengths))
    for least, share in zip(reference.tails["long"], TAILS, strict=True):
        assert least is not None
        reached = int((lengths >= least).sum())
        shorter = lengths[lengths < least].max()
        assert 1 <= reached <= most_in_tail(1000, share) < int((lengths >= shorter).sum())
    # All rows are equally sure, so none is among the most uncertain.
    assert reference.tails["uncertain"] == (None,) * len(TAILS)


def test_few_rows_have_no_narrow_tail() -> None:
    assert read(fitted(150)).tails["uncertain"][0] is None
    assert read(fitted(250)).tails["uncertain"][0] is not None


def test_a_model_without_familiarity_has_no_tail_of_it() -> None:
    reference = read(fitted(familiarity=False))
    assert set(reference.tails) == set(SCORES) - {"unfamiliar"}


def test_many_labels_have_no_table_of_confusion() -> None:
    probabilities = np.random.default_rng(0).dirichlet(np.ones(60), 200)
    record = Reference.fit(probabilities, np.zeros(200, dtype=np.int64), np.full(200, 5))
    assert read(record).confusion is None


def test_an_older_manifest_has_no_reference() -> None:
    assert Reference.of({}) is None
    assert Reference.of({"reference": {}}) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"version": 2}, "version 2, this program reads version 1; export again"),
        ({"cells": [[0, 1]]}, "damaged"),
        ({"edges": None}, "damaged"),
        ({"tails": []}, "damaged"),
    ],
    ids=str,
)
def test_a_damaged_reference_is_one_line(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Reference.of({"reference": fitted() | damage})
    assert "\n" not in str(refused.value)
