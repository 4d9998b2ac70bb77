"""The benchmark of the estimates counts as the server does, and judges the alarm by texts that are drawn at random."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drift import alarms, cost, months
from benchmarks.drift.answers import Answers
from inference.observing.alarm import Alarm
from inference.observing.reference import Reference


def answers(num: int, seed: int = 0, familiar: float = 1.0) -> Answers:
    draw = np.random.default_rng(seed)
    scores = 3 * draw.normal(size=(num, 3))
    right = (scores + draw.gumbel(size=scores.shape)).argmax(axis=1)
    return Answers(scores, familiar * draw.random(num), 3 + draw.poisson(20, num), right)


def reference(some: Answers) -> Reference:
    record = Reference.fit(some.probabilities, some.right, some.num_tokens, some.familiarity)
    found = Reference.of({"reference": record})
    assert found is not None
    return found


def test_texts_are_counted_in_the_cells_that_the_server_counts_them_in() -> None:
    known, some = reference(answers(2000)), answers(300, seed=1)
    counts: dict[int, tuple[int, float]] = {}
    for label, sure in zip(some.label.tolist(), some.confidence.tolist(), strict=True):
        n, total = counts.get(known.cell(label, sure), (0, 0.0))
        counts[known.cell(label, sure)] = (n + 1, total + sure)
    found = some.counted(known)
    assert {cell: n for cell, (n, _) in found.items()} == {cell: n for cell, (n, _) in counts.items()}
    assert all(np.isclose(found[cell][1], total) for cell, (_, total) in counts.items())


def test_swapped_labels_change_what_is_right_and_nothing_else() -> None:
    some = answers(300)
    swapped = months._swapped(some, 0, 2)
    assert swapped.counted(reference(some)) == some.counted(reference(some))
    assert swapped.is_right.mean() < some.is_right.mean() - 0.2
    assert (months._swapped(swapped, 0, 2).right == some.right).all()


def test_foreign_texts_are_found_and_usual_ones_raise_no_alarm() -> None:
    usual = answers(2000)
    alarm, draw = Alarm(reference(usual)), np.random.default_rng(0)
    quiet = alarms.reached(alarm, usual)
    strange, same = (alarms.reached(alarm, answers(500, seed=2, familiar=one)) for one in (0.01, 1.0))
    found = alarms._time_to_alarm(alarm, quiet, [strange], 20, draw)
    assert found["found"] == 1
    assert 16 <= found["low"] <= found["median"] <= found["high"] <= 320
    assert alarms._time_to_alarm(alarm, quiet, [same], 20, draw)["median"] is None


def test_the_cost_is_that_of_neighbouring_slices_and_the_observers_thread_counts_for_the_texts_it_counted() -> None:
    idle = [[is_on, 0.5, 0, 0.0, 0.0] for is_on in (False, False, True, True, False)]
    off, on, after = [False, 0.5, 100, 0.2, 0.0], [True, 0.5, 100, 0.22, 0.001], [False, 0.5, 100, 0.2, 0.003]
    last = [[False, 0.5, 100, 0.2, 0.0], [True, 0.5, 3, 0.1, 0.0], [True, 0.5, 0, 0.0, 0.0], [False, 0.5, 0, 0.0, 0.0]]

    found = cost.compared([*idle, *[off, on, on, after] * 4, *last])

    assert len(found) == 2
    # Of 0.020 s for 803 texts, each has its share.
    assert found[0] == {"off": 200, "on": 200, "off_cpu_ms": 2.0, "on_cpu_ms": pytest.approx(2.2 + 20 / 803)}
