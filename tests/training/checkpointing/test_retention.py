from __future__ import annotations

import pytest

from training.checkpointing.retention import SaveSchedule, steps_to_keep


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "best_step", "kept"),
    [
        (1, 0, None, {60}),
        (2, 0, None, {50, 60}),
        (9, 0, None, {10, 20, 30, 40, 50, 60}),
        (1, 20, None, {20, 40, 60}),
        (1, 0, 30, {30, 60}),
        (1, 25, 30, {30, 50, 60}),
        (1, 0, 999, {60}),
    ],
)
def test_the_newest_the_milestones_and_the_best_stay(
    keep_last: int, keep_every: int, best_step: int | None, kept: set[int]
) -> None:
    assert steps_to_keep([60, 10, 20, 30, 50, 40], keep_last, keep_every, best_step) == kept


def test_a_save_is_due_at_each_multiple_of_the_steps() -> None:
    schedule = SaveSchedule(every=5, minutes=0, now=0.0)

    assert [step for step in range(1, 16) if schedule.due(step, now=1e9)] == [5, 10, 15]


def test_a_save_is_due_when_the_minutes_since_the_last_have_passed() -> None:
    schedule = SaveSchedule(every=0, minutes=2, now=1000.0)

    assert not schedule.due(7, now=1119.9)
    assert schedule.due(7, now=1120.0)
    schedule.saved(now=1130.0)
    assert not schedule.due(8, now=1249.9)
    assert schedule.due(9, now=1250.0)


def test_no_save_is_due_between_epochs_if_neither_is_asked_for() -> None:
    schedule = SaveSchedule(every=0, minutes=0, now=0.0)

    assert not any(schedule.due(step, now=1e9) for step in range(1, 100))
